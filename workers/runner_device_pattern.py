"""The pattern of `workers/pattern.py` written and checked where the pools are, for benchmarks of many gigabytes.

Same bytes, computed by torch on the pools' device; tests compare the two on a CPU.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final

import torch

from transfer.hello import RankCard
from unikv.ids import NO_PAGE, RequestId
from unikv.layer_spec import KVLayout
from unikv.views import KVView, ViewEntry
from workers.page_bytes import live_units
from workers.pattern import BITS, request_number, role_number
from workers.runner import PromptPages, Tables

POISON: Final = 0xEE
_WORD_BYTES: Final = 8
_STEP: Final = 0x9E3779B97F4A7C15
_FACTORS: Final = (0xBF58476D1CE4E5B9, 0x94D049BB133111EB)
_SHIFTS: Final = (30, 27, 31)


@dataclass(frozen=True, slots=True)
class _Buffer:
    view: KVView
    entry: ViewEntry
    pages: torch.Tensor
    """uint8 ``[slots, heads, tokens_per_block, row_bytes]``, over the pool."""


class DevicePattern:
    """Fills, poisons and checks the pages of one rank. Borrows its storages."""

    def __init__(self, card: RankCard, storages: Sequence[torch.Tensor]) -> None:
        """Look into the storages of `card`, in its order."""
        self._card, self._storages = card, storages
        self._device = storages[0].device
        self._buffers = tuple(_buffers(card, storages))

    def fill(self, pages: PromptPages, pattern_id: RequestId) -> None:
        """Write the pattern of request `pattern_id` into the pages of a prompt, their last tokens included."""
        for buffer, units, slots, _ in self._live(pages):
            buffer.pages[slots] = self._rows(buffer, units, pattern_id)

    def poison(self, tables: Tables) -> None:
        """Overwrite whole slots with what no pattern looks like."""
        for pool in self._card.pools:
            table = tables[pool.group_id]
            slots = torch.from_numpy(table[table != NO_PAGE].astype("int64")).to(self._device)
            rows = self._storages[pool.storage].view(-1, pool.slot_stride_bytes)
            rows.index_fill_(0, slots, POISON)

    def mismatches(self, pages: PromptPages, pattern_id: RequestId, *, with_draft: bool = True) -> tuple[int, int]:
        """Return how many bytes of the live pages are wrong, and how many were looked at."""
        wrong, checked = torch.zeros((), dtype=torch.int64, device=self._device), 0
        for buffer, units, slots, tokens in self._live(pages):
            if buffer.view.owner == "draft" and not with_draft:
                continue
            places = torch.arange(pages.unit_tokens, device=self._device)
            valid = (places[None, :] < tokens[:, None])[:, None, :, None]
            differs = (buffer.pages[slots] != self._rows(buffer, units, pattern_id)) & valid
            wrong += differs.sum()
            checked += int(tokens.sum()) * len(buffer.view.heads) * buffer.view.row_bytes
        return int(wrong.item()), checked

    def _live(self, pages: PromptPages) -> Iterator[tuple[_Buffer, torch.Tensor, torch.Tensor, torch.Tensor]]:
        assert pages.unit_tokens == self._card.tokens_per_block
        live = {group: live_units(self._card, group, pages) for group in pages.tables}
        for buffer in self._buffers:
            found = live[buffer.view.group_id]
            columns = (found.units, found.slots, found.tokens)
            units, slots, tokens = (torch.from_numpy(c.astype("int64")).to(self._device) for c in columns)
            yield buffer, units, slots, tokens

    def _rows(self, buffer: _Buffer, units: torch.Tensor, pattern_id: RequestId) -> torch.Tensor:
        """Return uint8 ``[units, heads, tokens_per_block, row_bytes]``."""
        view, device = buffer.view, self._device
        common = request_number(pattern_id)
        for field, number in (("role", role_number(buffer.entry.role)), ("layer", buffer.entry.layer_id)):
            common = common << BITS[field] | number
        common <<= BITS["head"] + BITS["token"]
        heads = torch.arange(view.heads.lo, view.heads.hi, device=device) << BITS["token"]
        steps = torch.arange(view.tokens_per_block, device=device)
        tokens = units[:, None] * view.tokens_per_block + steps
        places = _signed(common) | heads[None, :, None] | tokens[:, None, :]
        words = torch.arange(-(-view.row_bytes // _WORD_BYTES), device=device) * _signed(_STEP)
        rows = (_scramble(places)[..., None] + words).view(torch.uint8)
        return rows[..., : view.row_bytes]


def _buffers(card: RankCard, storages: Sequence[torch.Tensor]) -> Iterator[_Buffer]:
    for view in card.views:
        pool = card.pool(view.group_id, view.pool_index)
        heads, tokens, row = len(view.heads), view.tokens_per_block, view.row_bytes
        by_head, by_token = (tokens * row, row) if view.kv_layout is KVLayout.HND else (row, heads * row)
        for entry in view.entries:
            yield _Buffer(
                view,
                entry,
                storages[pool.storage].as_strided(
                    (pool.num_slots, heads, tokens, row),
                    (pool.slot_stride_bytes, by_head, by_token, 1),
                    pool.offset_bytes + entry.offset_bytes,
                ),
            )


def _scramble(places: torch.Tensor) -> torch.Tensor:
    """`workers.pattern.scramble` in signed arithmetic, which wraps to the same bits."""
    words = places + _signed(_STEP)
    for shift, factor in zip(_SHIFTS, _FACTORS, strict=False):
        words = (words ^ _shifted(words, shift)) * _signed(factor)
    return words ^ _shifted(words, _SHIFTS[-1])


def _shifted(words: torch.Tensor, shift: int) -> torch.Tensor:
    """Shift right and fill up with zeros."""
    return (words >> shift) & ((1 << 64 - shift) - 1)


def _signed(word: int) -> int:
    return word - (1 << 64) if word >> 63 else word
