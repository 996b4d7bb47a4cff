"""What can be wrong with a request's numbers and rows, in words."""

from __future__ import annotations

import numpy as np

from unikv.block_rows import BlockRow
from unikv.errors import SpecError, explain
from unikv.ids import NO_PAGE
from unikv.page_table import SlotRow
from unikv.ranges import Span


def wrong_sizes(thing: str, capacity: int, history: int, history_so_far: int, max_capacity: int) -> SpecError:
    """Return the error for a capacity and a history that break ``history so far <= history <= capacity <= limit``."""
    if history < history_so_far:
        want = f">= {history_so_far}, the history so far"
        cure = "final tokens stay final: close the request and begin anew"
        return SpecError(explain(thing, "history_tokens", history, want, cure))
    if capacity < history:
        want = f">= history_tokens={history}"
        return SpecError(explain(thing, "capacity_tokens", capacity, want, "keep pages for every final token"))
    want = f"<= {max_capacity}, a block-table row of the longest sequence"
    cure = "end the sequence at max_seq_len, or build the manager with a larger one"
    return SpecError(explain(thing, "capacity_tokens", capacity, want, cure))


def check_own_pages(thing: str, own: BlockRow, wanted: SlotRow) -> None:
    """Check that every page of `wanted` is where the request has it.

    Raises:
        SpecError: one is not; the text names its ordinal and slot.
    """
    slots = own.slots
    wrong = [i for i, slot in enumerate(wanted.tolist()) if slot != NO_PAGE and (i >= len(slots) or slots[i] != slot)]
    if wrong:
        want = "the page the request has there now"
        cure = "pin before pages can leave, with rows from page_tables()"
        raise SpecError(explain(thing, f"pinned page at ordinal {wrong[0]}", int(wanted[wrong[0]]), want, cure))


def rows_match(row: BlockRow, num_blocks: int, stale: Span, *, active: bool) -> bool:
    """Return whether a row has pages exactly where it should: in the window of an active request, nowhere else."""
    expected = np.full(num_blocks, active, dtype=np.bool_)
    expected[stale.lo : stale.hi] = False
    same = np.array_equal(row.slots != NO_PAGE, expected) and row.num_pages == np.count_nonzero(expected)
    return same and all(ordinal in stale for ordinal in row.pending)
