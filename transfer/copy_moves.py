"""Neighbouring pages, found without a loop, so that a host copy takes them as one array slice."""

from __future__ import annotations

from typing import Final

import numpy as np
from numpy.typing import NDArray

from transfer.pages import PagePairs

Index = tuple[int | slice, int | slice]
"""(slot, sub-page) part of an array index; at most one of the two is a slice."""

Move = tuple[Index, Index]
"""(destination index, source index) of pages that are copied at once."""

_NEXT_SLOT: Final = 1
_NEXT_SUB: Final = 2


def find_moves(pages: PagePairs, first: int, end: int, limit: int) -> list[Move]:
    """Return index pairs that cover pages ``[first, end)``, neighbours together.

    Pages are neighbours where each side goes on either to the next slot in the same sub-page, or to the next sub-page
    of the same slot. `limit` is the most pages of one move (0: no limit).
    """
    src_slot, src_sub = pages.src_slot[first:end], pages.src_sub[first:end]
    dst_slot, dst_sub = pages.dst_slot[first:end], pages.dst_sub[first:end]
    src_steps, dst_steps = _steps(src_slot, src_sub), _steps(dst_slot, dst_sub)
    both = np.where((src_steps > 0) & (dst_steps > 0), 3 * src_steps + dst_steps, 0)
    starts = np.ones(end - first, np.bool_)
    starts[1:] = both[:-1] == 0
    # A change to another kind of step opens a move, except right after a page that opened one for having no neighbour.
    starts[2:] |= (both[1:-1] != both[:-2]) & (both[:-2] > 0)
    if limit:
        order = np.arange(end - first)
        starts |= (order - np.maximum.accumulate(np.where(starts, order, 0))) % limit == 0
    at = np.flatnonzero(starts)
    ends = [*at[1:].tolist(), end - first]
    counts = [stop - start for start, stop in zip(at.tolist(), ends, strict=True)]
    to = map(_index, dst_slot[at].tolist(), dst_sub[at].tolist(), counts, dst_steps[at].tolist())
    of = map(_index, src_slot[at].tolist(), src_sub[at].tolist(), counts, src_steps[at].tolist())
    return list(zip(to, of, strict=True))


def _steps(slots: NDArray[np.int32], subs: NDArray[np.int32]) -> NDArray[np.int64]:
    """Return how the page after each page follows it: _NEXT_SLOT, _NEXT_SUB, or 0 (always for the last page)."""
    slot_step, sub_step = slots[1:] - slots[:-1], subs[1:] - subs[:-1]
    next_slot = (slot_step == 1) & (sub_step == 0)
    next_sub = (slot_step == 0) & (sub_step == 1)
    steps = np.zeros(len(slots), np.int64)
    steps[:-1] = next_slot * _NEXT_SLOT + next_sub * _NEXT_SUB
    return steps


def _index(slot: int, sub: int, count: int, step: int) -> Index:
    if count == 1:
        return slot, sub
    if step == _NEXT_SUB:
        return slot, slice(sub, sub + count)
    return slice(slot, slot + count), sub
