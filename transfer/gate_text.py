"""Sets of layers, heads and ranks as short text: ``layers 0-3, 7``."""

from __future__ import annotations

from collections.abc import Iterable

from unikv.ranges import Span


def union(spans: Iterable[Span]) -> tuple[Span, ...]:
    """Return the numbers in any of `spans` as the fewest half-open ranges, ascending; empty spans vanish."""
    merged: list[Span] = []
    for span in sorted(spans):
        if not len(span):
            continue
        if merged and span.lo <= merged[-1].hi:
            merged[-1] = Span(merged[-1].lo, max(merged[-1].hi, span.hi))
        else:
            merged.append(span)
    return tuple(merged)


def spans_text(word: str, spans: Iterable[Span]) -> str:
    """Return `spans` the way people count: last number included, "layer 3", "layers 0-3, 7", or "none"."""
    ranges = union(spans)
    if not ranges:
        return "none"
    plural = "" if len(ranges) == 1 and len(ranges[0]) == 1 else "s"
    parts = (str(span.lo) if len(span) == 1 else f"{span.lo}-{span.hi - 1}" for span in ranges)
    return f"{word}{plural} {', '.join(parts)}"


def numbers_text(word: str, numbers: Iterable[int]) -> str:
    """Return single numbers in the form of `spans_text`."""
    return spans_text(word, (Span(number, number + 1) for number in numbers))
