"""Which pages travel, and which page of one side belongs to which of the other. Ordinals, never list lengths."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from transfer.plan import GroupPair

SlotArray = NDArray[np.int32]


@dataclass(frozen=True, slots=True, kw_only=True)
class PagePairs:
    """Pages of one group pair, ready to copy: four int32 arrays of one length.

    Attributes:
        src_slot, dst_slot: slots on each side.
        src_sub, dst_sub: sub-page inside the slot, all zero where the page sizes are equal.
    """

    src_slot: SlotArray
    src_sub: SlotArray
    dst_slot: SlotArray
    dst_sub: SlotArray

    def __len__(self) -> int:
        return int(self.src_slot.shape[0])


def live_ordinals(
    prompt_tokens: int, *, tokens_per_block: int, window: int | None, sink_blocks: int, cached_tokens: int = 0
) -> SlotArray:
    """Return the block ordinals of a prompt that travel, ascending."""
    raise NotImplementedError


def validate_table(table: SlotArray, *, num_slots: int, max_blocks: int, thing: str) -> None:
    """Refuse a peer's page table that could lead a copy astray."""
    raise NotImplementedError


def pair_pages(pair: GroupPair, src_table: SlotArray, dst_table: SlotArray, prompt_tokens: int) -> PagePairs:
    """Pair the pages of two tables by token position."""
    raise NotImplementedError
