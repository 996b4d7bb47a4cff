"""Bytes to slots: never over the quota, never a slot less than fits, and what cannot be done is said."""

from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from unikv.budget import PoolBudget, PoolSplit
from unikv.errors import SpecError
from unikv.layer_spec import KVCacheLayerSpec, KVDtype, KVLayout, LayerOwner
from unikv.layout import build_layout
from unikv.sizing_pages import RequestShape
from unikv.sizing_split import check_ratios, min_slots, split_bytes, split_layout

GRAIN = 2 * 2**20


def grains(slots, sizes, grain):
    return sum(-(-slots * size // grain) for size in sizes)


def test_five_grains_hold_two_slots_of_one_size_and_three_of_the_other():
    sizes = [(GRAIN - 1,), (GRAIN,)]
    ratios = [Fraction(1, 2), Fraction(1, 2)]
    slots = split_bytes(5 * GRAIN, sizes, ratios, [1, 1], granularity_bytes=GRAIN)
    assert sorted(slots) == [2, 3]


@given(
    quota=st.integers(0, 400),
    groups=st.lists(
        st.tuples(st.lists(st.integers(1, 9), min_size=1, max_size=3), st.integers(0, 5), st.integers(1, 4)),
        min_size=1,
        max_size=4,
    ),
    grain=st.integers(1, 7),
)
def test_the_quota_is_kept_and_used_up(quota, groups, grain):
    sizes = [tuple(size) for size, _, _ in groups]
    ratios = [Fraction(weight) for _, weight, _ in groups]
    least = [count for _, _, count in groups]
    needed = sum(grains(count, size, grain) for count, size in zip(least, sizes, strict=True))
    if needed > quota // grain:
        with pytest.raises(SpecError, match="quota_bytes is"):
            split_bytes(quota, sizes, ratios, least, granularity_bytes=grain)
        return
    slots = split_bytes(quota, sizes, ratios, least, granularity_bytes=grain)
    assert all(count >= at_least for count, at_least in zip(slots, least, strict=True))
    used = [grains(count, size, grain) for count, size in zip(slots, sizes, strict=True)]
    assert sum(used) <= quota // grain
    for index, (count, size) in enumerate(zip(slots, sizes, strict=True)):
        more = sum(used) - used[index] + grains(count + 1, size, grain)
        assert more > quota // grain, f"group {index} could have one slot more"


@pytest.mark.parametrize(
    ("ratios", "word"),
    [([], "length"), ([1.0], "length"), ([0, 1], "positive"), ([-0.1, 1.1], "positive"), ([0.4, 0.5], r"1\.0")],
)
def test_wrong_ratios_are_named(ratios, word):
    with pytest.raises(SpecError, match=word):
        check_ratios(ratios, 2)


def layer(number, window=None, owner=LayerOwner.TARGET):
    return KVCacheLayerSpec(
        layer_id=number, owner=owner, num_kv_heads=1, head_dim=16, dtype=KVDtype.FLOAT16, window=window
    )


LAYOUT = build_layout(
    [layer(0), layer(1), layer(2, window=64, owner=LayerOwner.DRAFT)],
    tokens_per_block=32,
    max_seq_len=4096,
    kv_layout=KVLayout.HND,
)


def test_every_group_keeps_a_page_its_longest_window_and_every_constraint():
    assert min_slots(LAYOUT) == (1 + 1, 1 + 3)
    long = [RequestShape(capacity_tokens=1024, history_tokens=1000)]
    assert min_slots(LAYOUT, [long]) == (1 + 32, 1 + 3)
    assert min_slots(LAYOUT, headroom_tokens=40) == (2, 1 + 5)


def test_pools_follow_the_load_they_are_meant_for():
    page_bytes = [group.page_bytes for group in LAYOUT.groups]
    assert page_bytes == [4096, 2048]
    typical = [RequestShape(capacity_tokens=2048, history_tokens=2047)] * 8
    slots = split_layout(LAYOUT, 4 * 2**20, typical=typical)
    assert slots[0] > 900 and slots[1] < 50, "full attention holds 64 pages a request, the window 3"
    equal = PoolBudget(bytes=4 * 2**20).slots(LAYOUT)
    assert equal[0] == equal[1]
    assert PoolBudget(bytes=4 * 2**20, split=PoolSplit(typical=typical)).slots(LAYOUT) == slots
    by_ratio = split_layout(LAYOUT, 2**20, ratios=[0.75, 0.25])
    assert [round(n * size / 2**20, 2) for n, size in zip(by_ratio, page_bytes, strict=True)] == [0.75, 0.25]
    with pytest.raises(SpecError, match="give one of them"):
        PoolBudget(pages=4, split=PoolSplit())
