"""Equal or weighted pages for every layer group."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from unikv.errors import SpecError
from unikv.ids import GroupId, LayerId
from unikv.layer_spec import KVCacheLayerSpec, KVDtype, LayerOwner
from unikv.layout import CacheLayout, build_layout
from unikv.sizing_weights import max_slots_for_bytes
from unikv.testing import mixed_specs, spec_lists


def mixed_layout() -> CacheLayout:
    return build_layout(mixed_specs(), tokens_per_block=32, max_seq_len=8192)


def test_layer_groups_get_equally_many_pages() -> None:
    assert [max_slots_for_bytes(mixed_layout(), group, 10 * (25600 + 32768)) for group in range(2)] == [10, 10]
    assert [max_slots_for_bytes(mixed_layout(), group, 10 * (25600 + 32768) - 1) for group in range(2)] == [9, 9]


def test_weights_split_the_bytes() -> None:
    weights = {GroupId(0): 10, GroupId(1): 1}
    quota_bytes = 3 * (10 * 25600 + 32768)
    assert [max_slots_for_bytes(mixed_layout(), group, quota_bytes, weights=weights) for group in range(2)] == [30, 3]


def test_groups_of_one_allocator_add_up() -> None:
    """Half the layers windowed with sinks, half full, all pages alike: 32 MiB are 28 slots."""
    specs = [
        KVCacheLayerSpec(
            layer_id=LayerId(number),
            owner=LayerOwner.TARGET,
            num_kv_heads=4,
            head_dim=128,
            dtype=KVDtype.BFLOAT16,
            window=128 if number % 2 == 0 else None,
            sink_tokens=1 if number % 2 == 0 else 0,
        )
        for number in range(36)
    ]
    layout = build_layout(specs, tokens_per_block=32, max_seq_len=None)
    assert [group.page_bytes for group in layout.groups] == [1179648, 1179648]
    assert layout.num_pool_groups == 1
    assert max_slots_for_bytes(layout, 0, 32 * 2**20) == 28


def test_too_few_bytes_for_a_page_beside_the_null_slot() -> None:
    needed = 2 * (25600 + 32768)
    assert max_slots_for_bytes(mixed_layout(), 0, needed) == 2
    with pytest.raises(SpecError, match=rf"cache: quota_bytes is {needed - 1}, expected >= {needed} for pool group 0"):
        max_slots_for_bytes(mixed_layout(), 0, needed - 1)


def test_unknown_pool_groups_and_missing_weights() -> None:
    with pytest.raises(SpecError, match=r"layout: pool_group is 2, expected in \[0, 2\)"):
        max_slots_for_bytes(mixed_layout(), 2, 10**9)
    with pytest.raises(SpecError, match="group 1: weight is 0, expected an integer >= 1; weigh every group"):
        max_slots_for_bytes(mixed_layout(), 0, 10**9, weights={GroupId(0): 1})


@given(spec_lists(), st.integers(0, 10**7))
def test_all_pools_together_stay_within_the_quota(specs: tuple[KVCacheLayerSpec, ...], spare_bytes: int) -> None:
    layout = build_layout(specs, tokens_per_block=4, max_seq_len=None)
    page_bytes = {group.pool_group: group.page_bytes for group in layout.groups}
    quota_bytes = 2 * sum(group.page_bytes for group in layout.groups) + spare_bytes
    slots = {group: max_slots_for_bytes(layout, group, quota_bytes) for group in page_bytes}
    used_bytes = sum(slots[group] * page_bytes[group] for group in page_bytes)
    assert quota_bytes - sum(page_bytes.values()) < used_bytes <= quota_bytes
