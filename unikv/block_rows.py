"""The pages of one request in one layer group: a row of slots that grows in place.

A step costs what it changes, not what exists: the row has room to grow, and only the ordinals that leave the window,
are cut off or are new get touched.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np

from unikv.ids import NO_PAGE
from unikv.layout import GroupLayout
from unikv.page_table import SlotRow, empty_row
from unikv.ranges import Span

_FIRST_BLOCKS: Final = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class RowStep:
    """How one row changes in one step; nothing has happened yet.

    Attributes:
        leaving: ordinals that leave the window and have a page.
        cut: ordinals behind the new end that have a page.
        added: new ordinals that get a page, ascending.
        num_blocks: entries afterwards.
        stale: ordinals out of the window afterwards.
    """

    leaving: tuple[int, ...]
    cut: tuple[int, ...]
    added: tuple[int, ...]
    num_blocks: int
    stale: Span


class BlockRow:
    """A growing row of slots by block ordinal.

    Attributes:
        group: the layer group it belongs to.
        stale: ordinals that left the window.
        num_pages: entries that have a page.
        pending: pages that left the window and wait to be published, by ordinal.
        unwritten: positions whose KV was never written in this group.
    """

    def __init__(self, group: GroupLayout) -> None:
        self.group: Final = group
        self.stale = Span(0, 0)
        self.num_pages = 0
        self.pending: dict[int, int] = {}
        self.unwritten = Span(0, 0)
        self._buffer = empty_row(_FIRST_BLOCKS)
        self._num_blocks = 0

    @property
    def slots(self) -> SlotRow:
        """The row, ``[num_blocks]`` int32; shares memory with the row it becomes."""
        return self._buffer[: self._num_blocks]

    def plan(self, num_blocks: int, stale: Span) -> RowStep:
        """Plan the step to `num_blocks` entries with the ordinals in `stale` out of the window.

        Each new ordinal gets a page unless it is stale already. An ordinal that exists without a page never gets one.
        """
        old = self._num_blocks
        leaving = range(max(self.stale.hi, stale.lo), min(stale.hi, old))
        added = (*range(old, min(num_blocks, stale.lo)), *range(max(old, stale.hi), num_blocks))
        return RowStep(
            leaving=self._with_page(leaving),
            cut=self._with_page(range(num_blocks, old)),
            added=added,
            num_blocks=num_blocks,
            stale=stale,
        )

    def apply(self, step: RowStep, slots: Sequence[int]) -> None:
        """Do what was planned, with `slots` for the added ordinals."""
        if step.num_blocks > self._buffer.shape[0]:
            grown = empty_row(max(step.num_blocks, 2 * self._buffer.shape[0]))
            grown[: self._num_blocks] = self.slots
            self._buffer = grown
        for ordinal in (*step.leaving, *step.cut):
            self._buffer[ordinal] = NO_PAGE
        if step.added:
            self._buffer[list(step.added)] = slots
        self.num_pages += len(step.added) - len(step.leaving) - len(step.cut)
        self._num_blocks, self.stale = step.num_blocks, step.stale

    def at(self, ordinal: int) -> int:
        """Return the slot of an ordinal, also of one that waits to be published; `NO_PAGE` if there is none."""
        waiting = self.pending.get(ordinal)
        if waiting is not None:
            return waiting
        return int(self._buffer[ordinal]) if ordinal < self._num_blocks else NO_PAGE

    def valid_from(self, ordinal: int, tokens_per_block: int) -> int:
        """Return the offset in a block from which on its KV was written: 0 where all of it was."""
        start = ordinal * tokens_per_block
        missing = self.unwritten.intersect(Span(start, start + tokens_per_block))
        return missing.hi - start if len(missing) else 0

    def put(self, ordinal: int, slot: int) -> None:
        """Exchange the slot of an ordinal that has one."""
        if ordinal in self.pending:
            self.pending[ordinal] = slot
        else:
            self._buffer[ordinal] = slot

    def fill(self, num_blocks: int, stale: Span, slots: Iterable[tuple[int, int]]) -> None:
        """Begin anew with `num_blocks` entries of which only `slots`, pairs of ordinal and slot, have a page."""
        self._buffer = empty_row(max(num_blocks, _FIRST_BLOCKS))
        self._num_blocks, self.stale, self.num_pages = num_blocks, stale, 0
        for ordinal, slot in slots:
            self._buffer[ordinal] = slot
            self.num_pages += 1

    def pages(self) -> list[tuple[int, int]]:
        """Return (ordinal, slot) of every entry with a page, ascending."""
        ordinals = np.flatnonzero(self.slots != NO_PAGE)
        return list(zip(ordinals.tolist(), self.slots[ordinals].tolist(), strict=True))

    def _with_page(self, ordinals: range) -> tuple[int, ...]:
        if not ordinals:
            return ()
        part = self._buffer[ordinals.start : ordinals.stop]
        return tuple((np.flatnonzero(part != NO_PAGE) + ordinals.start).tolist())
