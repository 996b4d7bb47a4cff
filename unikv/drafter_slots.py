"""A bounded set of slots for what a drafter keeps per request, above all how long the context is that it may read.

Slot 0 is the dummy: padding rows and warm-up fillers get it, and never a slot of a real request. A slot is seeded with
the positions of the batch in which its request first appears, or appears again under an id that was used before: what
an earlier request left there is never read.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from unikv.errors import CapacityError, InternalError, SpecError, explain

DUMMY_SLOT: Final = 0
"""The slot of rows that are no request's."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftRow:
    """One row of a batch.

    Attributes:
        key: identity of the request's cache: another request under the same id has another key.
        num_tokens: tokens of the sequence so far.
        extent_tokens: positions that have pages, ``extent(row) * tokens_per_block``.
    """

    key: Hashable
    num_tokens: int
    extent_tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class SlotAssignment:
    """Slots of one batch, arrays of one entry per row. New ones every time: a copy of the last batch's may be pending.

    Attributes:
        slots: int32, `DUMMY_SLOT` for rows without a request.
        context_tokens: int32, context length to start from; 0 for dummy rows.
        seeded: bool, rows whose `context_tokens` replace what the slot holds.
    """

    slots: NDArray[np.int32]
    context_tokens: NDArray[np.int32]
    seeded: NDArray[np.bool_]


class DrafterSlotManager:
    """Gives requests their slots. One thread uses it."""

    def __init__(self, num_slots: int) -> None:
        """Start with all slots free.

        Args:
            num_slots: slots that exist, the dummy included.

        Raises:
            SpecError: fewer than two.
        """
        if num_slots < 2:
            raise SpecError(explain("drafter slots", "num_slots", num_slots, ">= 2", "slot 0 is the dummy"))
        self._num_slots = num_slots
        self._free = list(range(num_slots - 1, DUMMY_SLOT, -1))
        self._slots: dict[int, int] = {}
        self._keys: dict[int, Hashable] = {}

    @property
    def num_free(self) -> int:
        """Slots that requests can still get."""
        return len(self._free)

    def assign(
        self, request_ids: Sequence[int | None], rows: Sequence[DraftRow | None], *, warm_up: bool = False
    ) -> SlotAssignment:
        """Return the slots of a batch; requests that are new get one.

        The context never reaches past the pages: it is seeded with the smaller of tokens and extent.

        Args:
            request_ids: one per row; None for a dummy.
            rows: what is known of each request; None for a dummy.
            warm_up: ids repeat from batch to batch and mean nothing: seed every row from this batch.

        Raises:
            CapacityError: more requests than slots; nothing was changed.
            SpecError: rows and ids differ in length or in which rows are dummies.
        """
        if len(request_ids) != len(rows) or any(
            (i is None) != (r is None) for i, r in zip(request_ids, rows, strict=True)
        ):
            want = "one row per id, None for None"
            raise SpecError(explain("drafter slots", "rows", len(rows), want, "pass them in the order of the batch"))
        new = {i for i in request_ids if i is not None and i not in self._slots}
        if len(new) > len(self._free):
            text = f"drafter slots: {len(new)} new requests, where {len(self._free)} of {self._num_slots - 1} are free"
            raise CapacityError(f"{text}; release what has ended", needed_pages=len(new), free_pages=len(self._free))
        slots, context = np.zeros(len(rows), dtype=np.int32), np.zeros(len(rows), dtype=np.int32)
        seeded = np.zeros(len(rows), dtype=np.bool_)
        for number, (request_id, row) in enumerate(zip(request_ids, rows, strict=True)):
            if request_id is not None and row is not None:
                slots[number], seeded[number] = self._slot_of(request_id, row, warm_up=warm_up)
                context[number] = min(row.num_tokens, row.extent_tokens)
        return SlotAssignment(slots=slots, context_tokens=context, seeded=seeded)

    def release(self, request_id: int) -> None:
        """Free the slot of a request that has ended; without one do nothing."""
        slot = self._slots.pop(request_id, None)
        if slot is not None:
            del self._keys[request_id]
            self._free.append(slot)

    def check_integrity(self) -> None:
        """Check that every slot is the dummy, free, or one request's.

        Raises:
            InternalError: one is not; the text prints the terms.
        """
        places = sorted([DUMMY_SLOT, *self._free, *self._slots.values()])
        if places != list(range(self._num_slots)) or self._keys.keys() != self._slots.keys():
            raise InternalError(f"drafter slots: dummy, free {self._free} and used {self._slots} of {self._num_slots}")

    def _slot_of(self, request_id: int, row: DraftRow, *, warm_up: bool) -> tuple[int, bool]:
        known = request_id in self._slots and self._keys[request_id] == row.key
        if request_id not in self._slots:
            self._slots[request_id] = self._free.pop()
        self._keys[request_id] = row.key
        return self._slots[request_id], warm_up or not known
