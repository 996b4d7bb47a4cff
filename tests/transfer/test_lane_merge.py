"""Merging lanes: fewer lanes, the same bytes."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from transfer.lane_merge import merge_lanes
from transfer.lanes import SINGLE_ROW, Lane, Rows


def lane(src, dst, run=8, **changes):
    made = Lane(
        pair=0,
        src_pool=0,
        dst_pool=0,
        src_offset=src,
        dst_offset=dst,
        src_sub_stride=0,
        dst_sub_stride=0,
        outer=SINGLE_ROW,
        inner=SINGLE_ROW,
        run_bytes=run,
        packed_offset=0,
    )
    return replace(made, **changes)


def bytes_of(lanes):
    """Every (pools, source byte, destination byte) of the first three sub-pages, with how often it is copied."""
    found = {}
    for one in lanes:
        for sub in range(3):
            for i in range(one.outer.count):
                for j in range(one.inner.count):
                    src = (
                        one.src_offset + i * one.outer.src_stride + j * one.inner.src_stride + sub * one.src_sub_stride
                    )
                    dst = (
                        one.dst_offset + i * one.outer.dst_stride + j * one.inner.dst_stride + sub * one.dst_sub_stride
                    )
                    for k in range(one.run_bytes):
                        key = (one.src_pool, one.dst_pool, sub, src + k, dst + k)
                        found[key] = found.get(key, 0) + 1
    return found


def test_neighbours_on_both_sides_become_one_run():
    assert merge_lanes([lane(16, 108), lane(8, 100), lane(24, 116, run=4)]) == [lane(8, 100, run=20)]


def test_neighbours_on_one_side_become_rows():
    rows = Rows(count=3, src_stride=16, dst_stride=8)
    assert merge_lanes([lane(0, 0), lane(16, 8), lane(32, 16)]) == [lane(0, 0, inner=rows)]


def test_lanes_with_rows_become_outer_rows():
    inner = Rows(count=4, src_stride=32, dst_stride=8)
    merged = merge_lanes([lane(0, 0, inner=inner), lane(256, 32, inner=inner)])
    assert merged == [lane(0, 0, inner=inner, outer=Rows(count=2, src_stride=256, dst_stride=32))]


def test_lanes_with_two_row_dimensions_stay_apart():
    rows = Rows(count=2, src_stride=16, dst_stride=8)
    lanes = [lane(at, at, run=4, inner=rows, outer=Rows(count=2, src_stride=64, dst_stride=32)) for at in (0, 512)]
    assert merge_lanes(lanes) == lanes


def test_unequal_distances_stay_apart():
    lanes = [lane(0, 0), lane(16, 8), lane(64, 16)]
    assert merge_lanes(lanes) == [lane(0, 0, inner=Rows(count=2, src_stride=16, dst_stride=8)), lane(64, 16)]


def test_falling_source_offsets_are_no_rows():
    lanes = [lane(64, 0), lane(32, 8), lane(0, 16)]
    assert merge_lanes(lanes) == lanes


def test_pools_and_sub_pages_are_never_mixed():
    for changes in ({"src_pool": 1}, {"dst_pool": 1}, {"src_sub_stride": 8}, {"dst_sub_stride": 8}):
        for second in (lane(8, 8, **changes), lane(32, 32, **changes)):
            assert len(merge_lanes([lane(0, 0), second])) == 2


def test_equal_sub_pages_merge():
    subs = {"src_sub_stride": 64}
    assert merge_lanes([lane(0, 0, **subs), lane(8, 8, **subs)]) == [lane(0, 0, run=16, **subs)]


@given(
    st.lists(
        st.builds(
            lambda src, dst, run, pool, sub, rows: lane(
                src * 4, dst * 4, run * 4, dst_pool=pool, src_sub_stride=sub, inner=rows
            ),
            st.integers(0, 12),
            st.integers(0, 12),
            st.integers(1, 2),
            st.integers(0, 1),
            st.sampled_from([0, 0, 64]),
            st.sampled_from([SINGLE_ROW, SINGLE_ROW, Rows(count=2, src_stride=16, dst_stride=8)]),
        ),
        max_size=8,
    )
)
def test_merged_lanes_copy_the_same_bytes(lanes):
    merged = merge_lanes(lanes)
    assert bytes_of(merged) == bytes_of(lanes)
    assert len(merged) <= len(lanes)
