"""A runner without a model: every row of KV says which layer, role, head and token it is.

A row is filled with 64-bit words ``mix(layer, role, head, token) + j * STEP`` (j = 0, 1, ...), so a misplaced row can
be recognised from its first word, and a row that was never written (poison) as well.
"""

from __future__ import annotations

from typing import Final

import numpy as np
from numpy.typing import NDArray

from transfer.hello import RankCard
from transfer.messages import AuxData
from unikv.cache_manager import UnifiedKVCacheManager
from unikv.ids import NO_PAGE, NULL_SLOT
from unikv.layer_spec import STANDARD_ROLES, LayerOwner
from unikv.request import KVCacheRequest
from workers.page_bytes import BufferBytes, Bytes, LivePages, buffer_bytes, live_pages
from workers.runner import Decoded, Evidence, Tables

POISON: Final = 0xEE
"""Byte that pages are filled with before a transfer may write them."""

_STEP: Final = np.uint64(0x9E3779B97F4A7C15)
_ROLE_BITS, _LAYER_BITS, _HEAD_BITS = np.uint64(56), np.uint64(40), np.uint64(24)
Words = NDArray[np.uint64]


def mix(layer: int, role: int, heads: Words, tokens: Words) -> Words:
    """Return the word of rows ``[len(heads), len(tokens)]`` (finaliser of splitmix64, Steele et al. 2014)."""
    place = np.uint64(role) << _ROLE_BITS | np.uint64(layer) << _LAYER_BITS
    word = (place | heads[:, None] << _HEAD_BITS | tokens[None, :]) + _STEP
    word = (word ^ word >> np.uint64(30)) * np.uint64(0xBF58476D1CE4E5B9)
    word = (word ^ word >> np.uint64(27)) * np.uint64(0x94D049BB133111EB)
    return word ^ word >> np.uint64(31)


class PatternRunner:
    """Fills and checks pages on CPU pools."""

    background = True

    def __init__(self) -> None:
        self._manager: UnifiedKVCacheManager | None = None
        self._card: RankCard | None = None
        self._buffers: tuple[BufferBytes, ...] = ()
        self._roles: dict[str, int] = {}

    def bind(self, manager: UnifiedKVCacheManager, card: RankCard) -> None:
        """Use the pages of `manager` from now on; it must outlive the runner's use."""
        arrays = [manager.pools.numpy(storage) for storage in range(len(card.storages))]
        self._manager, self._card = manager, card
        self._buffers = tuple(buffer_bytes(card, arrays))
        extras = sorted({buffer.role for buffer in self._buffers} - set(STANDARD_ROLES))
        self._roles = {role: number for number, role in enumerate([*STANDARD_ROLES, *extras])}
        for buffer in self._buffers:
            buffer.pages[NULL_SLOT + 1 :] = POISON

    def prefill(self, request: KVCacheRequest, prompt: tuple[int, ...], prompt_tokens: int) -> AuxData:
        """Write the pattern of `prompt_tokens` tokens into the request's pages."""
        assert self._manager is not None
        request.resize(self._manager.context_capacity(0, prompt_tokens), prompt_tokens)
        tables = request.page_tables()
        for buffer, live in self._live(tables, prompt_tokens, with_draft=True):
            rows = self._expected(buffer, live)
            for index, tokens in enumerate(live.tokens):
                buffer.pages[live.slots[index], :, :tokens] = rows[index][:, :tokens]
        return AuxData(first_tokens=(prompt_tokens % 1000,), prompt_tokens=prompt_tokens)

    def discard(self, tables: Tables) -> None:
        """Poison the pages of a request that is over; the next transfer into them finds no old pattern."""
        for buffer in self._buffers:
            slots = tables[buffer.group_id]
            buffer.pages[slots[slots != NO_PAGE]] = POISON

    def examine(self, tables: Tables, prompt_tokens: int, *, with_draft: bool) -> Evidence:
        """Compare every live row with what must be there."""
        checked = wrong = 0
        first = ""
        for buffer, live in self._live(tables, prompt_tokens, with_draft=with_draft):
            rows = self._expected(buffer, live)
            valid = np.arange(rows.shape[2])[None, None, :, None] < live.tokens[:, None, None, None]
            differs = (buffer.pages[live.slots] != rows) & valid
            checked += int(live.tokens.sum()) * rows.shape[1] * rows.shape[3]
            if differs.any():
                wrong += int(differs.sum())
                first = first or self._name_first(buffer, live, differs, prompt_tokens)
        return Evidence(checked_bytes=checked, mismatched_bytes=wrong, first_mismatch=first)

    def decode(
        self, request: KVCacheRequest, prompt: tuple[int, ...], first_token: int, draft_valid_from: int, max_new: int
    ) -> Decoded:
        """There is nothing to decode: the first token is all."""
        return Decoded(tokens=(first_token,))

    def _live(self, tables: Tables, prompt_tokens: int, *, with_draft: bool) -> list[tuple[BufferBytes, LivePages]]:
        assert self._card is not None
        card = self._card
        live = {group: live_pages(card, group, tables, prompt_tokens) for group in tables}
        wanted = [b for b in self._buffers if with_draft or b.owner is LayerOwner.TARGET]
        return [(buffer, live[buffer.group_id]) for buffer in wanted]

    def _expected(self, buffer: BufferBytes, live: LivePages) -> Bytes:
        """Return the pattern of the live pages, ``[pages, heads, tokens_per_block, row_bytes]``."""
        _, heads, size, row = buffer.pages.shape
        blocks: Words = live.ordinals.astype(np.uint64) * np.uint64(size)
        inside: Words = np.arange(size, dtype=np.uint64)
        tokens: Words = np.add.outer(blocks, inside).ravel()
        numbers = np.arange(buffer.heads.lo, buffer.heads.hi, dtype=np.uint64)
        first = mix(buffer.layer_id, self._roles[buffer.role], numbers, tokens)
        words = first[:, :, None] + np.arange(-(-row // 8), dtype=np.uint64) * _STEP
        rows = words.view(np.uint8)[:, :, :row].reshape(heads, len(live.ordinals), size, row)
        return rows.transpose(1, 0, 2, 3)

    def _name_first(self, buffer: BufferBytes, live: LivePages, differs: Bytes, prompt_tokens: int) -> str:
        """Say where the first wrong row is, and whose row it holds instead."""
        page, head, token, _ = (int(index[0]) for index in np.nonzero(differs))
        held = buffer.pages[live.slots[page], head, token]
        size = buffer.pages.shape[2]
        place = (
            f"layer {buffer.layer_id} {buffer.role} head {buffer.heads.lo + head} "
            f"token {int(live.ordinals[page]) * size + token}"
        )
        return f"{place} holds {self._whose(held, prompt_tokens)}"

    def _whose(self, row: Bytes, prompt_tokens: int) -> str:
        if (row == POISON).all():
            return "poison: nothing was written there"
        if not row.any():
            return "zeros"
        start = row[: min(8, row.size)].tobytes()
        tokens = np.arange(prompt_tokens, dtype=np.uint64)
        for layer, role, heads in {(b.layer_id, b.role, (b.heads.lo, b.heads.hi)) for b in self._buffers}:
            words = mix(layer, self._roles[role], np.arange(*heads, dtype=np.uint64), tokens)
            found = np.argwhere(words == np.frombuffer(start.ljust(8, b"\0"), dtype=np.uint64)[0])
            if row.size >= 8 and len(found):
                return f"the row of layer {layer} {role} head {heads[0] + int(found[0][0])} token {int(found[0][1])}"
        return f"unknown bytes {start.hex()}"
