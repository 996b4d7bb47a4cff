"""The same bytes in fewer lanes: neighbours become longer runs, lanes at equal distances become rows.

Two layers of K and V, 8 heads on the left, 4 of them (``[4, 8)``) on the right; ``x`` moves::

    whole slots      |xxxxxxxx|xxxxxxxx|xxxxxxxx|xxxxxxxx|   one lane of one run
    source, sliced   |....xxxx|....xxxx|....xxxx|....xxxx|   one lane of four rows,
    destination      |xxxx|xxxx|xxxx|xxxx|                   with its own stride on each side
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace

from transfer.lanes import SINGLE_ROW, Lane, Rows


def merge_lanes(lanes: Iterable[Lane]) -> list[Lane]:
    """Return the same bytes in fewer lanes, ordered by pools and destination offset.

    Neighbours that follow one another on both sides become one longer run (a slot whose layers are laid out alike
    becomes one lane); then lanes of one shape at equal distances become rows of one lane.
    """
    ordered = sorted(lanes, key=lambda lane: (lane.src_pool, lane.dst_pool, lane.dst_offset))
    return _fold_rows(_join_runs(ordered))


def _join_runs(lanes: Iterable[Lane]) -> list[Lane]:
    joined: list[Lane] = []
    for lane in lanes:
        if joined and _follows(joined[-1], lane):
            joined[-1] = replace(joined[-1], run_bytes=joined[-1].run_bytes + lane.run_bytes)
        else:
            joined.append(lane)
    return joined


def _follows(first: Lane, second: Lane) -> bool:
    """Whether `second` starts where `first` ends on both sides, in every sub-page."""
    return (
        first.is_single_run
        and second.is_single_run
        and _frame(first) == _frame(second)
        and first.src_offset + first.run_bytes == second.src_offset
        and first.dst_offset + first.run_bytes == second.dst_offset
    )


def _fold_rows(lanes: Sequence[Lane]) -> list[Lane]:
    folded: list[Lane] = []
    at = 0
    while at < len(lanes):
        count = _equal_steps(lanes, at)
        lane = lanes[at]
        if count > 1:
            step = Rows(count=count, src_stride=_step(lanes, at, "src"), dst_stride=_step(lanes, at, "dst"))
            unused = lane.inner.count == 1
            lane = replace(lane, outer=SINGLE_ROW if unused else step, inner=step if unused else lane.inner)
        folded.append(lane)
        at += count
    return folded


def _step(lanes: Sequence[Lane], at: int, side: str) -> int:
    return int(getattr(lanes[at + 1], f"{side}_offset")) - int(getattr(lanes[at], f"{side}_offset"))


def _equal_steps(lanes: Sequence[Lane], at: int) -> int:
    """Return how many lanes from `at` on have one shape and lie at equal, increasing distances on both sides."""
    end = at + 1
    while end < len(lanes) and _shape(lanes[end]) == _shape(lanes[at]) and lanes[at].outer.count == 1:
        steps = (_step(lanes, end - 1, "src"), _step(lanes, end - 1, "dst"))
        if min(steps) <= 0 or (end > at + 1 and steps != (_step(lanes, at, "src"), _step(lanes, at, "dst"))):
            break
        end += 1
    return end - at


def _frame(lane: Lane) -> tuple[int, int, int, int]:
    """What places a lane's pages: lanes may be one only where these are equal."""
    return (lane.src_pool, lane.dst_pool, lane.src_sub_stride, lane.dst_sub_stride)


def _shape(lane: Lane) -> tuple[object, ...]:
    """Everything two lanes must have in common to be rows of one lane."""
    return (_frame(lane), lane.outer, lane.inner, lane.run_bytes)
