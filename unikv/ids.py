"""Names for the integers that travel through the project, and the two page values with a meaning of their own."""

from __future__ import annotations

from typing import Final, NewType

LayerId = NewType("LayerId", int)
"""Global layer number, the same on every rank; draft layers follow the target's."""

GroupId = NewType("GroupId", int)
"""Rank-local number of a layer group, in order of first appearance."""

SlotId = NewType("SlotId", int)
"""Index of a page in the pools of its group."""

RequestId = NewType("RequestId", int)
"""Request number, 63 bits, equal on both sides of a transfer."""

Rank = NewType("Rank", int)
"""Flat rank inside an instance: ``(pp_rank * tp + tp_rank) * cp + cp_rank``."""

NO_PAGE: Final = -1
"""Page-table entry of an ordinal that has no page (out of window, never allocated, not asked for)."""

NULL_SLOT: Final = SlotId(0)
"""Slot of every pool group that is never handed out and stays zero: padding and dummy rows point here."""
