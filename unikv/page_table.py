"""Rows of slots by block ordinal, one per request and layer group, and what kernels and peers get to see of them.

A windowed row of six blocks after three left the window and the last two were taken back::

    ordinal   0   1   2   3   4   5
    slot     -1  -1  -1   9  -1  -1      extent 4 (last valid ordinal + 1), num_valid 1

Ordinals never shift: entry ``i`` is the page of token positions ``[i*tpb, (i+1)*tpb)`` for as long as the row lives.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from unikv.errors import SpecError, explain
from unikv.ids import NO_PAGE, NULL_SLOT
from unikv.ranges import Span

SlotRow = NDArray[np.int32]
"""One row, ``[blocks]`` int32: a slot by ordinal, `NO_PAGE` where there is no page."""


def empty_row(num_blocks: int = 0) -> SlotRow:
    """Return a new row of `num_blocks` entries without a page."""
    return np.full(num_blocks, NO_PAGE, dtype=np.int32)


@dataclass(frozen=True, slots=True, kw_only=True)
class RowPlan:
    """How one row changes in one step; nothing has happened yet.

    Attributes:
        row: the row afterwards, `NO_PAGE` at the ordinals that will get a new page.
        dropped: slots that leave the row, in the order of their ordinals.
        added: ordinals that get a new page, ascending.
    """

    row: SlotRow
    dropped: tuple[int, ...]
    added: tuple[int, ...]

    def filled(self, slots: Sequence[int]) -> SlotRow:
        """Return the row with `slots` at the added ordinals. It shares the memory of `row`."""
        self.row[list(self.added)] = np.asarray(slots, dtype=np.int32)
        return self.row


def plan_row(row: SlotRow, num_blocks: int, stale: Span) -> RowPlan:
    """Plan the step of `row` to `num_blocks` entries with the ordinals in `stale` out of the window.

    Ordinals in `stale` lose their page, ordinals at or behind `num_blocks` are cut off, and each new ordinal gets a
    page unless it is stale already. An ordinal that exists and has no page never gets one.

    Args:
        row: ``[blocks]``, left as it is.
        num_blocks: entries afterwards.
        stale: half-open ordinals that no later step reads.
    """
    kept = min(num_blocks, row.shape[0])
    after = empty_row(num_blocks)
    after[:kept] = row[:kept]
    after[stale.lo : stale.hi] = NO_PAGE
    remains = after[:kept] != NO_PAGE
    left = row.copy()
    left[:kept][remains] = NO_PAGE
    added = tuple(ordinal for ordinal in range(row.shape[0], num_blocks) if ordinal not in stale)
    return RowPlan(row=after, dropped=valid_slots(left), added=added)


def extent(row: SlotRow) -> int:
    """Return the blocks a kernel may address: last valid ordinal + 1, 0 without any page.

    A position ``p`` can be written exactly where ``p < extent * tokens_per_block``. The count of valid entries says
    nothing of the kind once blocks have left a window.
    """
    valid = np.flatnonzero(row != NO_PAGE)
    return int(valid[-1]) + 1 if valid.size else 0


def num_valid(row: SlotRow) -> int:
    """Return how many pages the row holds. Not a position limit: see `extent`."""
    return int(np.count_nonzero(row != NO_PAGE))


def valid_slots(row: SlotRow) -> tuple[int, ...]:
    """Return the slots of the row in the order of their ordinals."""
    return tuple(row[row != NO_PAGE].tolist())


def masked_row(row: SlotRow, stale: Span) -> SlotRow:
    """Return a copy of `row` whose `stale` ordinals show no page, whether or not one is still attached."""
    result = row.copy()
    result[stale.lo : stale.hi] = NO_PAGE
    return result


def export_row(row: SlotRow, out: SlotRow) -> None:
    """Write `row` into the longer row `out` that somebody else owns; entries behind it become `NO_PAGE`.

    Raises:
        SpecError: `out` has fewer entries than `row` or is no int32 row; nothing was written.
    """
    _check_target(row, out, "external row")
    out[: row.shape[0]] = row
    out[row.shape[0] :] = NO_PAGE


def write_kernel_row(row: SlotRow, out: SlotRow, pad_slot: int = NULL_SLOT) -> None:
    """Write `row` into `out` for a kernel: raw slots, and `pad_slot` wherever there is no page and behind the row.

    A kernel reads whole rows, so every entry must be a slot it may touch. The null slot belongs to nobody: a dummy
    row that writes through it cannot reach a page of another request.

    Raises:
        SpecError: `out` has fewer entries than `row` or is no int32 row; nothing was written.
    """
    _check_target(row, out, "block table row")
    head = out[: row.shape[0]]
    head[:] = row
    head[head == NO_PAGE] = pad_slot
    out[row.shape[0] :] = pad_slot


def _check_target(row: SlotRow, out: SlotRow, thing: str) -> None:
    if out.dtype != np.int32 or out.ndim != 1:
        raise SpecError(
            explain(thing, "dtype and axes", (str(out.dtype), out.ndim), "int32 and 1", "pass one int32 row")
        )
    if out.shape[0] < row.shape[0]:
        want = f">= {row.shape[0]}, the blocks of the request"
        raise SpecError(explain(thing, "length", out.shape[0], want, "pass a longer row"))
