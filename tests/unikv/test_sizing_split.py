"""Bytes dealt out to pools."""

from __future__ import annotations

import math
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from unikv.errors import SpecError
from unikv.layer_spec import KVCacheLayerSpec
from unikv.layout import CacheLayout, build_layout
from unikv.ranges import ceil_div
from unikv.sizing_fit import pool_bytes
from unikv.sizing_pages import RequestShape
from unikv.sizing_split import DEFAULT_BATCH, batch_ratios, check_ratios, min_slots, split_bytes, split_layout
from unikv.testing import mixed_specs, spec_lists

GRAIN = 2 << 20


def mixed_layout() -> CacheLayout:
    return build_layout(mixed_specs(), tokens_per_block=32, max_seq_len=8192)


@pytest.mark.parametrize("ratios", [(1, 64), (1, 1), (0, 1)])
def test_five_grains_for_slots_of_about_one(ratios: tuple[int, int]) -> None:
    parts = [Fraction(ratio) for ratio in ratios]
    assert split_bytes(5 * GRAIN, [[GRAIN - 1], [GRAIN]], parts, [2, 1], granularity_bytes=GRAIN) == (2, 3)


def test_every_pool_of_a_group_takes_whole_grains() -> None:
    # Two pools of 3 and 1 bytes a slot, grains of 4: 5 slots are 4 + 2 grains, 4 slots 3 + 1.
    assert split_bytes(23, [[3, 1]], [Fraction(1)], [1], granularity_bytes=4) == (4,)
    assert split_bytes(24, [[3, 1]], [Fraction(1)], [1], granularity_bytes=4) == (5,)


def test_pinned_groups_leave_the_rest_to_the_others() -> None:
    assert split_bytes(100, [[1], [1], [1]], [Fraction(1), Fraction(1), Fraction(8)], [30, 2, 2]) == (30, 8, 62)


def test_a_quota_below_what_is_needed() -> None:
    with pytest.raises(SpecError, match=r"cache: quota_bytes is 11, expected >= 12 for \[2, 3\] slots"):
        split_bytes(11, [[3], [2]], [Fraction(1), Fraction(1)], [2, 3])
    with pytest.raises(SpecError, match="pool split: granularity_bytes is 0, expected >= 1"):
        split_bytes(11, [[3]], [Fraction(1)], [2], granularity_bytes=0)


@st.composite
def quotas(draw: st.DrawFn) -> tuple[int, list[list[int]], list[Fraction], list[int], int]:
    groups = draw(st.integers(1, 4))
    sizes = [draw(st.lists(st.integers(1, 300), min_size=1, max_size=3)) for _ in range(groups)]
    ratios = [Fraction(draw(st.integers(0, 50))) for _ in range(groups)]
    least = [draw(st.integers(0, 5)) for _ in range(groups)]
    grain = draw(st.sampled_from([1, 7, 256]))
    needed = sum(ceil_div(n * size, grain) for n, pools in zip(least, sizes, strict=True) for size in pools) * grain
    return needed + draw(st.integers(0, 20_000)), sizes, ratios, least, grain


@given(quotas())
def test_a_split_stays_within_the_quota_and_leaves_no_slot(
    case: tuple[int, list[list[int]], list[Fraction], list[int], int],
) -> None:
    quota, sizes, ratios, least, grain = case
    slots = split_bytes(quota, sizes, ratios, least, granularity_bytes=grain)

    def taken(counts: list[int]) -> int:
        return sum(ceil_div(n * size, grain) for n, pools in zip(counts, sizes, strict=True) for size in pools) * grain

    assert taken(list(slots)) <= quota
    for index in range(len(slots)):
        more = [count + (number == index) for number, count in enumerate(slots)]
        assert taken(more) > quota
    assert all(count >= need for count, need in zip(slots, least, strict=True))


@given(quotas())
def test_a_split_gives_nobody_less_than_its_part(
    case: tuple[int, list[list[int]], list[Fraction], list[int], int],
) -> None:
    quota, sizes, ratios, _, grain = case
    if not sum(ratios):
        return
    slots = split_bytes(quota, sizes, ratios, [0] * len(sizes), granularity_bytes=grain)
    for count, pools, ratio in zip(slots, sizes, ratios, strict=True):
        part = int(quota // grain * ratio / sum(ratios))
        assert sum(ceil_div((count + 1) * size, grain) for size in pools) > part


@pytest.mark.parametrize(
    ("ratios", "words"),
    [
        ([], "length is 0, expected 2"),
        ([1.0], "length is 1, expected 2"),
        ([0.0, 1.0], "ratio is 0.0, expected positive"),
        ([-0.1, 1.1], "ratio is -0.1, expected positive"),
        ([math.nan, 1.0], "ratio is nan, expected positive"),
        ([math.inf, 1.0], "ratio is inf, expected positive"),
        ([0.4, 0.5], "sum is 0.9, expected 1.0; let the ratios sum to 1.0"),
    ],
)
def test_ratios_that_are_none(ratios: list[float], words: str) -> None:
    with pytest.raises(SpecError, match=f"pool ratios: {words}"):
        check_ratios(ratios, 2)
    with pytest.raises(SpecError, match=f"pool ratios: {words}"):
        split_layout(mixed_layout(), 1 << 30, ratios=ratios)


def test_ratios_of_a_batch_are_its_bytes() -> None:
    # 65 blocks of full attention; of a window of 64 the blocks 62 to 64, for 2048 tokens are final.
    assert batch_ratios(mixed_layout(), DEFAULT_BATCH) == (
        Fraction(65 * 25600, 65 * 25600 + 3 * 32768),
        Fraction(3 * 32768, 65 * 25600 + 3 * 32768),
    )
    with pytest.raises(SpecError, match="pool split: pages of the batch is 0, expected >= 1"):
        batch_ratios(mixed_layout(), [RequestShape(capacity_tokens=0)])


def test_least_slots_are_the_window_across_blocks_a_page_and_the_null_slot() -> None:
    assert min_slots(mixed_layout(), headroom_tokens=15) == (1 + 1, 1 + 4)
    chunk = [RequestShape(capacity_tokens=256)]
    steps = [RequestShape(capacity_tokens=64, history_tokens=63), RequestShape(capacity_tokens=0)]
    assert min_slots(mixed_layout(), [steps]) == (1 + 2, 1 + 3)
    assert min_slots(mixed_layout(), [chunk, steps]) == (1 + 8, 1 + 8)


def test_ratios_come_before_the_typical_load_before_constraints() -> None:
    layout, quota = mixed_layout(), 1 << 26
    long = [RequestShape(capacity_tokens=8192, history_tokens=8191)]
    short = [RequestShape(capacity_tokens=32, history_tokens=31)]
    by_default = split_layout(layout, quota)
    assert by_default[0] > 20 * by_default[1]
    assert split_layout(layout, quota, constraints=[short]) == split_layout(layout, quota, typical=short)
    assert split_layout(layout, quota, constraints=[short, long]) == split_layout(layout, quota, typical=long)
    assert split_layout(layout, quota, typical=short, constraints=[long])[0] < by_default[0]
    halves = split_layout(layout, quota, ratios=[0.5, 0.5], typical=long)
    assert halves == ((1 << 25) // 25600, (1 << 25) // 32768)


@given(spec_lists(), st.integers(0, 10**7), st.sampled_from([1, 256]))
def test_layouts_split_within_the_quota_and_above_the_least(
    specs: tuple[KVCacheLayerSpec, ...], spare_bytes: int, grain: int
) -> None:
    layout = build_layout(specs, tokens_per_block=4, max_seq_len=None)
    least = min_slots(layout)
    pools = sum(len(group.pools) for group in layout.groups)
    quota = pool_bytes(layout, least) + pools * grain + spare_bytes
    slots = split_layout(layout, quota, granularity_bytes=grain)
    assert pool_bytes(layout, slots) <= quota
    assert all(count >= need >= 2 for count, need in zip(slots, least, strict=True))
