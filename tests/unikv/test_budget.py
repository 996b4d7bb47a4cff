"""Budgets of pools."""

from __future__ import annotations

from typing import Any

import pytest

from unikv.budget import PoolBudget, PoolSplit
from unikv.errors import SpecError
from unikv.ids import GroupId
from unikv.layout import CacheLayout, build_layout
from unikv.sizing_pages import RequestShape
from unikv.testing import mixed_specs


def mixed_layout() -> CacheLayout:
    return build_layout(mixed_specs(), tokens_per_block=32, max_seq_len=8192)


def test_pages_are_slots_of_every_pool_group() -> None:
    assert PoolBudget(pages=7).slots(mixed_layout()) == (7, 7)


def test_bytes_alone_give_every_group_as_many_pages() -> None:
    assert PoolBudget(bytes=7 * (25600 + 32768)).slots(mixed_layout()) == (7, 7)


def test_bytes_follow_the_load() -> None:
    step = RequestShape(capacity_tokens=8192, history_tokens=8177)
    split = PoolSplit(typical=[step] * 4, headroom_tokens=15)
    assert PoolBudget(bytes=4 * (256 * 25600 + 3 * 32768), split=split).slots(mixed_layout()) == (1024, 12)
    # One step holds 3 blocks of the window, and 4 where it lies across blocks.
    assert PoolBudget(bytes=1 << 20, split=split).slots(mixed_layout())[1] == 1 + 4


def test_bytes_follow_ratios_in_whole_grains() -> None:
    split = PoolSplit(ratios=(0.5, 0.5), granularity_bytes=1 << 20)
    slots = PoolBudget(bytes=(8 << 20) + 12345, split=split).slots(mixed_layout())
    # 4 MiB each: one pool of 32 KiB slots; and four pools, three of 8 KiB slots and one that leaves most of its grain.
    assert slots == (128, 128)


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({}, "budget is 'pages=None and bytes=None', expected either pages or bytes"),
        ({"pages": 1, "bytes": 1}, "budget is 'pages=1 and bytes=1', expected either pages or bytes"),
        ({"pages": 0}, "pages is 0, expected an integer >= 1"),
        ({"bytes": 1.5}, "bytes is 1.5, expected an integer >= 1"),
        ({"pages": 3, "weights": {GroupId(0): 1}}, "weights is .*, expected None beside pages"),
        ({"pages": 3, "split": PoolSplit()}, "split is .*, expected None beside pages"),
        ({"bytes": 3, "weights": {}, "split": PoolSplit()}, "split is .*, expected None beside weights"),
    ],
)
def test_budgets_that_are_none(fields: dict[str, Any], words: str) -> None:
    with pytest.raises(SpecError, match=f"pool: {words}"):
        PoolBudget(**fields)
