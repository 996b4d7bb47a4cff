"""A runner without a model: it fills pages with a pattern, and knows every byte that must arrive.

A wrong row is named by what it holds instead: another row, poison (nothing was written there), zeros, or unknown bytes.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import groupby
from typing import Final

import numpy as np
from numpy.typing import NDArray

from transfer.hello import RankCard
from transfer.messages import AuxData
from unikv.cache_manager import UnifiedKVCacheManager
from unikv.errors import SpecError, explain
from unikv.ids import NO_PAGE, NULL_SLOT, LayerId, RequestId
from unikv.layer_spec import LayerOwner
from unikv.pool_mirror import PoolMirror
from unikv.request import KVCacheRequest
from workers.evidence import name_missing
from workers.page_bytes import BufferBytes, LiveUnits, buffer_bytes, live_units, missing_tokens
from workers.pattern import BITS, Place, expected_rows, read_row, request_number, role_number
from workers.runner import Decoded, Evidence, OnLayer, PromptPages, Tables

POISON: Final = 0xEE
"""Byte that pages are filled with before a transfer may write them."""
_SHOWN_BYTES: Final = 8


class PatternRunner:
    """Fills and checks pages; those on a device through a mirror of the pools in host memory."""

    background = True

    def __init__(self) -> None:
        self._manager: UnifiedKVCacheManager | None = None
        self._card: RankCard | None = None
        self._buffers: tuple[BufferBytes, ...] = ()
        self._roles: dict[int, str] = {}

    def bind(self, manager: UnifiedKVCacheManager, card: RankCard) -> None:
        """Use the pages of `manager` from now on; it must outlive the runner's use.

        Raises:
            SpecError: a layer, head or token number is too large for the pattern.
        """
        self._manager, self._card = manager, card
        self._mirror = PoolMirror(manager.layout, manager.pools)
        self._buffers = tuple(buffer_bytes(card, self._mirror.arrays))
        self._roles = {role_number(buffer.role): buffer.role for buffer in self._buffers}
        self._check_limits(manager.layout.max_seq_len or 0)
        for buffer in self._buffers:
            buffer.pages[NULL_SLOT + 1 :] = POISON
        self._mirror.push_all()

    def prefill(
        self,
        request: KVCacheRequest,
        prompt: tuple[int, ...],
        prompt_tokens: int,
        publish_at: int | None = None,
        on_layer: OnLayer | None = None,
    ) -> AuxData:
        """Write the pattern of `prompt_tokens` tokens into the request's pages."""
        assert self._manager is not None and self._card is not None
        request.resize(self._manager.context_capacity(0, prompt_tokens), prompt_tokens)
        pages = PromptPages(
            request_id=request.request_id,
            tables=request.page_tables(),
            prompt_tokens=prompt_tokens,
            unit_tokens=self._card.tokens_per_block,
        )
        marked: list[LayerId] = []
        buffers = sorted(self._live(pages, with_draft=True), key=lambda pair: pair[0].layer_id)
        for layer_id, roles in groupby(buffers, key=lambda pair: pair[0].layer_id):
            for buffer, live in roles:
                rows = expected_rows(buffer, live, pages.request_id)
                for index, (slot, tokens) in enumerate(zip(live.slots, live.tokens, strict=True)):
                    buffer.pages[slot, :, :tokens] = rows[index, :, :tokens]
            if on_layer is not None and self._mirror.on_host:
                on_layer(layer_id, prompt_tokens)
            marked.append(layer_id)
        if not self._mirror.on_host:
            self._mirror.push(pages.tables)
            if on_layer is not None:
                for layer_id in marked:
                    on_layer(layer_id, prompt_tokens, self._mirror.mark())
        return AuxData(first_tokens=(prompt_tokens % 1000,), prompt_tokens=prompt_tokens)

    def discard(self, tables: Tables) -> None:
        """Poison the pages of a request that is over; the next transfer into them finds no old pattern."""
        for buffer in self._buffers:
            slots = tables[buffer.group_id]
            buffer.pages[slots[slots != NO_PAGE]] = POISON
        self._mirror.push(tables)

    def examine(self, pages: PromptPages, *, with_draft: bool) -> Evidence:
        """Compare every live row with what must be there; a page that is missing is wrong in every byte."""
        self._mirror.pull(pages.tables)
        checked = wrong = 0
        first = ""
        for buffer, live in self._live(pages, with_draft=with_draft):
            rows = expected_rows(buffer, live, pages.request_id)
            held = buffer.rows(live)
            valid = np.arange(live.unit_tokens)[None, None, :, None] < live.tokens[:, None, None, None]
            differs = (held != rows) & valid
            missing = missing_tokens(live, pages.prompt_tokens)
            row_bytes = len(buffer.heads) * buffer.row_bytes
            checked += (int(live.tokens.sum()) + missing) * row_bytes
            wrong += int(differs.sum()) + missing * row_bytes
            if differs.any():
                first = first or self._name_first(buffer, live, differs, pages.request_id)
            first = first or name_missing(buffer, live)
        return Evidence(checked_bytes=checked, mismatched_bytes=wrong, first_mismatch=first)

    def decode(
        self, request: KVCacheRequest, prompt: tuple[int, ...], first_token: int, draft_valid_from: int, max_new: int
    ) -> Decoded:
        """There is nothing to decode: the first token is all."""
        return Decoded(tokens=(first_token,))

    def _live(self, pages: PromptPages, *, with_draft: bool) -> Iterator[tuple[BufferBytes, LiveUnits]]:
        assert self._card is not None
        live = {group: live_units(self._card, group, pages) for group in pages.tables}
        for buffer in self._buffers:
            if with_draft or buffer.owner is LayerOwner.TARGET:
                yield buffer, live[buffer.group_id]

    def _check_limits(self, max_seq_len: int) -> None:
        layers = max((buffer.layer_id for buffer in self._buffers), default=0) + 1
        heads = max((buffer.heads.hi for buffer in self._buffers), default=0)
        for field, count in (("layer", layers), ("head", heads), ("token", max_seq_len)):
            if count > 1 << BITS[field]:
                want = f"<= {1 << BITS[field]}"
                raise SpecError(explain("pattern runner", f"{field} count", count, want, "use a smaller pair"))

    def _name_first(self, buffer: BufferBytes, live: LiveUnits, differs: NDArray[np.bool_], request: RequestId) -> str:
        """Say where the first wrong row is, and whose row it holds instead."""
        index, head, token, byte = (int(axis[0]) for axis in np.nonzero(differs))
        here = Place(
            request=request_number(request),
            role=role_number(buffer.role),
            layer=buffer.layer_id,
            head=buffer.heads.lo + head,
            token=int(live.units[index]) * live.unit_tokens + token,
        )
        position = int(live.subs[index]) * live.unit_tokens + token
        held = buffer.pages[live.slots[index], head, position].tobytes()
        return f"{self._name(here)} holds {self._whose(held, here, byte)}"

    def _name(self, place: Place) -> str:
        role = self._roles.get(place.role, f"role {place.role}")
        return f"layer {place.layer} {role} head {place.head} token {place.token}"

    def _whose(self, row: bytes, here: Place, first_wrong: int) -> str:
        if row == bytes([POISON]) * len(row):
            return "poison: nothing was written there"
        if not any(row):
            return "zeros"
        place = read_row(row)
        if place is None:
            return f"unknown bytes, {row[:_SHOWN_BYTES].hex()} first"
        if place == here:
            return f"its own row up to byte {first_wrong}, then {row[first_wrong : first_wrong + _SHOWN_BYTES].hex()}"
        other = "" if place.request == here.request else f" of another request ({place.request} modulo 1024)"
        return f"the row of {self._name(place)}{other}"
