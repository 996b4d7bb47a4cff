"""Neighbouring buffers merged into ranges of bytes."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from unikv.errors import SpecError, UnknownLayerError
from unikv.ids import GroupId, LayerId
from unikv.layer_spec import KEY, VALUE
from unikv.layout import CacheLayout, build_layout
from unikv.slot_ranges import SlotRange, aggregated_ranges
from unikv.testing import mixed_specs, odd_slot_specs, spec_lists

layouts = st.builds(build_layout, spec_lists(), tokens_per_block=st.just(4), max_seq_len=st.none())


def mixed() -> CacheLayout:
    return build_layout(mixed_specs(), tokens_per_block=32, max_seq_len=None)


def test_whole_groups_are_one_range_a_pool() -> None:
    target, draft = (aggregated_ranges(mixed(), GroupId(group_id)) for group_id in range(2))
    assert [(found.pool_index, found.size_bytes) for found in target] == [(0, 8192), (1, 8192), (2, 8192), (3, 1024)]
    assert draft == (
        SlotRange(group_id=GroupId(1), pool_index=0, offset_bytes=0, size_bytes=32768, stride_bytes=32768),
    )


def test_only_neighbours_merge() -> None:
    layout = build_layout(odd_slot_specs(), tokens_per_block=32, max_seq_len=None)
    ends = aggregated_ranges(layout, GroupId(0), [(LayerId(1), VALUE), (LayerId(0), KEY)])
    assert [(found.offset_bytes, found.size_bytes, found.stride_bytes) for found in ends] == [
        (0, 8192, 24576),
        (16384, 8192, 24576),
    ]
    pair = aggregated_ranges(layout, GroupId(0), [(LayerId(1), KEY), (LayerId(1), VALUE)])
    assert [(found.offset_bytes, found.size_bytes) for found in pair] == [(8192, 16384)]
    assert aggregated_ranges(layout, GroupId(0), []) == ()


def test_buffers_of_another_group_are_refused() -> None:
    with pytest.raises(SpecError, match="layer 4: group is 1, expected group 0; ask group by group"):
        aggregated_ranges(mixed(), GroupId(0), [(LayerId(0), KEY), (LayerId(4), KEY)])
    with pytest.raises(UnknownLayerError, match="group_id is 2"):
        aggregated_ranges(mixed(), GroupId(2))


@given(layouts, st.data())
def test_ranges_are_exactly_the_bytes_of_the_buffers(layout: CacheLayout, data: st.DataObject) -> None:
    group = data.draw(st.sampled_from(layout.groups))
    buffers = [buffer for pool in group.pools for buffer in pool.buffers]
    chosen = data.draw(st.lists(st.sampled_from(buffers), unique=True))
    ranges = aggregated_ranges(layout, group.group_id, [(buffer.layer_id, buffer.role) for buffer in chosen])
    covered = [
        (found.pool_index, byte)
        for found in ranges
        for byte in range(found.offset_bytes, found.offset_bytes + found.size_bytes)
    ]
    wanted = {
        (buffer.pool_index, byte)
        for buffer in chosen
        for byte in range(buffer.offset_bytes, buffer.offset_bytes + buffer.size_bytes)
    }
    assert len(covered) == len(set(covered))
    assert set(covered) == wanted
    edges = [(found.pool_index, found.offset_bytes) for found in ranges]
    assert edges == sorted(edges)
    # Nothing is left to merge.
    assert not {(found.pool_index, found.offset_bytes + found.size_bytes) for found in ranges} & set(edges)
