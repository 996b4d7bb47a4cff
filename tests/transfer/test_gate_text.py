"""Ranges as text: merging is exact and the text can be read back."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from transfer.gate_text import numbers_text, spans_text, union
from unikv.ranges import Span


@pytest.mark.parametrize(
    ("numbers", "text"),
    [([], "none"), ([3], "layer 3"), ([0, 1], "layers 0-1"), ([5, 0, 1, 2, 7, 6], "layers 0-2, 5-7")],
)
def test_numbers(numbers: list[int], text: str) -> None:
    assert numbers_text("layer", numbers) == text


def test_spans_that_touch_become_one() -> None:
    assert spans_text("head", [Span(4, 8), Span(0, 4), Span(9, 10), Span(9, 9)]) == "heads 0-7, 9"


spans = st.lists(st.tuples(st.integers(0, 30), st.integers(0, 5)).map(lambda t: Span(t[0], t[0] + t[1])))


@given(spans)
def test_union_keeps_every_number_and_no_other(parts: list[Span]) -> None:
    merged = union(parts)
    assert {n for s in merged for n in range(s.lo, s.hi)} == {n for s in parts for n in range(s.lo, s.hi)}
    assert all(left.hi < right.lo for left, right in pairwise(merged))
    assert all(len(span) for span in merged)
