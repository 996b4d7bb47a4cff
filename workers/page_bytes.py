"""The bytes of pages by meaning: every (layer, role) buffer as ``[slot, head, token, byte]``, whatever its layout."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
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
                pages=_pages(arrays[pool.storage], view, entry, pool.slot_stride_bytes, pool.num_slots),
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class LivePages:
    """The pages of one group that a transfer fills, and how many tokens of each are the prompt's.

    Attributes:
        ordinals, slots: int32 of one length.
        tokens: valid tokens of each page; less than a block in the last one only.
    """

    ordinals: SlotArray
    slots: SlotArray
    tokens: SlotArray


def live_pages(card: RankCard, group_id: GroupId, tables: Mapping[GroupId, SlotArray], prompt_tokens: int) -> LivePages:
    """Return the live pages of a prompt in one group (windows masked, pages that are not there left out)."""
    group, size = card.group(group_id), card.tokens_per_block
    ordinals = live_ordinals(prompt_tokens, tokens_per_block=size, window=group.window, sink_blocks=group.sink_blocks)
    ordinals = ordinals[tables[group_id][ordinals] != NO_PAGE]
    tokens = np.minimum(size, prompt_tokens - ordinals * size).astype(np.int32)
    return LivePages(ordinals=ordinals, slots=tables[group_id][ordinals], tokens=tokens)


def _pages(array: Bytes, view: KVView, entry: ViewEntry, slot_stride_bytes: int, num_slots: int) -> Bytes:
    heads, tokens, row = len(view.heads), view.tokens_per_block, view.row_bytes
    by_head, by_token = (tokens * row, row) if view.kv_layout is KVLayout.HND else (row, heads * row)
    return as_strided(
        array[entry.offset_bytes :],
        shape=(num_slots, heads, tokens, row),
        strides=(slot_stride_bytes, by_head, by_token, 1),
    )
