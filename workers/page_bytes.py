"""The bytes of pages by meaning: every (layer, role) buffer as ``[slot, head, token, byte]``, whatever its layout."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.lib.stride_tricks import as_strided
from numpy.typing import NDArray

from transfer.hello import RankCard
from transfer.pages import SlotArray, live_ordinals
from unikv.ids import NO_PAGE, GroupId, LayerId
from unikv.layer_spec import KVLayout, LayerOwner
from unikv.ranges import Span
from unikv.views import KVView, ViewEntry
from workers.runner import PromptPages

Bytes = NDArray[np.uint8]


@dataclass(frozen=True, slots=True, kw_only=True)
class BufferBytes:
    """One buffer of every slot.

    Attributes:
        heads: global heads, half-open.
        pages: uint8 ``[num_slots, heads, tokens_per_block, row_bytes]``, a view of the pool's memory.
    """

    layer_id: LayerId
    owner: LayerOwner
    role: str
    group_id: GroupId
    heads: Span
    pages: Bytes

    @property
    def row_bytes(self) -> int:
        """Bytes of one head of one token."""
        return int(self.pages.shape[3])

    def rows(self, live: LiveUnits) -> Bytes:
        """Return a copy of the rows of some units: uint8 ``[units, heads, unit_tokens, row_bytes]``."""
        slots, heads, tokens, row = self.pages.shape
        split = self.pages.reshape(slots, heads, tokens // live.unit_tokens, live.unit_tokens, row)
        found: Bytes = split[live.slots, :, live.subs]
        return found


@dataclass(frozen=True, slots=True, kw_only=True)
class LiveUnits:
    """The pieces of one group's pages that a transfer fills.

    ::

        blocks of 64, units of 16, prompt of 90 tokens      unit    0 1 2 3 | 4 5      (unit = first token / 16)
                                                            slot    A A A A | B B
                                                            sub     0 1 2 3 | 0 1
                                                            tokens 16 .. 16 | 16 10

    Attributes:
        units, slots, subs, tokens: int32 of one length: which unit, the slot that holds it, which unit of that slot
            it is, and how many of its tokens are the prompt's (less than a unit in the last one only).
        missing: units that should be there, but the page table has no page for them.
    """

    unit_tokens: int
    units: SlotArray
    slots: SlotArray
    subs: SlotArray
    tokens: SlotArray
    missing: SlotArray


def buffer_bytes(card: RankCard, arrays: Sequence[Bytes]) -> Iterator[BufferBytes]:
    """Yield every buffer of a rank. `arrays` holds the bytes of each storage of `card`, in its order."""
    for view in card.views:
        pool = card.pool(view.group_id, view.pool_index)
        for entry in view.entries:
            yield BufferBytes(
                layer_id=entry.layer_id,
                owner=view.owner,
                role=entry.role,
                group_id=view.group_id,
                heads=view.heads,
                pages=_pages(
                    arrays[pool.storage][pool.offset_bytes :], view, entry, pool.slot_stride_bytes, pool.num_slots
                ),
            )


def live_units(card: RankCard, group_id: GroupId, pages: PromptPages, *, stale: bool = False) -> LiveUnits:
    """Return the live pieces of a prompt in one group: windows are masked, sinks are not, unless `stale` is wanted too.

    Under context parallelism these are the pieces in the rank's own blocks, which alone have a place in its tables.
    """
    group, unit = card.group(group_id), pages.unit_tokens
    subs = card.tokens_per_block // unit
    units = live_ordinals(
        pages.prompt_tokens,
        tokens_per_block=unit,
        window=None if stale else group.window,
        sink_blocks=group.sink_blocks * subs,
        cached_tokens=pages.cached_tokens.get(group_id, 0),
    )
    cp, cp_rank = card.position.cp, card.position.cp_rank
    units = units[units // subs % cp == cp_rank]
    slots = _slots(pages.tables[group_id], units // np.int32(subs * cp))
    there = slots != NO_PAGE
    held = units[there]
    return LiveUnits(
        unit_tokens=unit,
        units=held,
        slots=slots[there],
        subs=held % np.int32(subs),
        tokens=_tokens(held, unit, pages.prompt_tokens),
        missing=units[~there],
    )


def missing_tokens(live: LiveUnits, prompt_tokens: int) -> int:
    """Return how many tokens of the prompt are in units without a page."""
    return int(_tokens(live.missing, live.unit_tokens, prompt_tokens).sum())


def _tokens(units: SlotArray, unit_tokens: int, prompt_tokens: int) -> SlotArray:
    tokens: SlotArray = np.minimum(unit_tokens, prompt_tokens - units * np.int32(unit_tokens)).astype(np.int32)
    return tokens


def _slots(table: SlotArray, places: SlotArray) -> SlotArray:
    """Look places up in a table; behind its end there is no page."""
    slots = np.full(len(places), NO_PAGE, dtype=np.int32)
    inside = places < len(table)
    slots[inside] = table[places[inside]]
    return slots


def _pages(array: Bytes, view: KVView, entry: ViewEntry, slot_stride_bytes: int, num_slots: int) -> Bytes:
    heads, tokens, row = len(view.heads), view.tokens_per_block, view.row_bytes
    by_head, by_token = (tokens * row, row) if view.kv_layout is KVLayout.HND else (row, heads * row)
    return as_strided(
        array[entry.offset_bytes :],
        shape=(num_slots, heads, tokens, row),
        strides=(slot_stride_bytes, by_head, by_token, 1),
    )
