"""A runner without a model: it fills pages with a pattern, and knows every byte that must arrive.

A wrong row is named by what it holds instead: another row, poison (nothing was written there), zeros, or unknown bytes.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import groupby
from typing import Final

import numpy as np
from numpy.typing import NDArray

from transfer.hello import RankCard
from transfer.messages import AuxData
from unikv.cache_manager import UnifiedKVCacheManager
from unikv.errors import InternalError, SpecError, explain
from unikv.ids import NO_PAGE, NULL_SLOT, GroupId, LayerId, RequestId
from unikv.layer_spec import LayerOwner
from unikv.pool_mirror import PoolMirror
from unikv.request import KVCacheRequest
from workers.evidence import name_missing
from workers.page_bytes import BufferBytes, LiveUnits, buffer_bytes, live_units, missing_tokens
from workers.pattern import BITS, Place, Words, expected_rows, owners, read_row, role_number
from workers.prefix_reuse import taken_over
from workers.runner import Decoded, Evidence, OnLayer, PromptPages, Tables

STEP: Final = 0xDD
"""Byte that a padded decode step writes."""
POISON: Final = 0xEE
"""Byte that pages are filled with before a transfer may write them."""
_SHOWN_BYTES: Final = 8


class PatternRunner:
    """Fills and checks pages; those on a device through a mirror of the pools in host memory."""

    background = True

    def __init__(self, *, pad_rows: int = 0) -> None:
        """Make a runner whose decode steps have `pad_rows` rows without a request."""
        self._pad_rows = pad_rows
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
        """Write the pattern of `prompt_tokens` tokens into the request's pages, but for what it has taken over."""
        assert self._manager is not None and self._card is not None
        capacity_tokens = max(self._manager.context_capacity(0, prompt_tokens), request.capacity_tokens)
        # What is published must be there from the start on, whatever has left the window by the end.
        request.resize(capacity_tokens, None if request.committing else prompt_tokens)
        pages = PromptPages(
            request_id=request.request_id,
            tables=request.page_tables(),
            prompt_tokens=prompt_tokens,
            unit_tokens=self._card.tokens_per_block,
            prompt=prompt,
        )
        self._write(pages, taken_over(request), on_layer)
        if request.committing:
            request.commit(prompt[request.committed_tokens :])
        request.resize(history_tokens=prompt_tokens)
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
        first, whose = "", owners(pages.request_id, pages.prompt, pages.prompt_tokens)
        for buffer, live in self._live(pages, with_draft=with_draft):
            rows = expected_rows(buffer, live, whose)
            held = buffer.rows(live)
            valid = np.arange(live.unit_tokens)[None, None, :, None] < live.tokens[:, None, None, None]
            differs = (held != rows) & valid
            missing = missing_tokens(live, pages.prompt_tokens)
            row_bytes = len(buffer.heads) * buffer.row_bytes
            checked += (int(live.tokens.sum()) + missing) * row_bytes
            wrong += int(differs.sum()) + missing * row_bytes
            if differs.any():
                first = first or self._name_first(buffer, live, differs, whose)
            first = first or name_missing(buffer, live)
        return Evidence(checked_bytes=checked, mismatched_bytes=wrong, first_mismatch=first)

    def decode(
        self, request: KVCacheRequest, prompt: tuple[int, ...], first_token: int, draft_valid_from: int, max_new: int
    ) -> Decoded:
        """There is nothing to decode: the first token is all. What takes part in prefix reuse is published."""
        if self._pad_rows:
            self._step_with_padding(request, request.history_tokens)
        if request.committing:
            request.commit(prompt[request.committed_tokens :], is_end=True)
        return Decoded(tokens=(first_token,))

    def _write(self, pages: PromptPages, taken: Mapping[GroupId, int], on_layer: OnLayer | None) -> None:
        """Write every row that has a page, layer by layer, from the first token on that was not taken over."""
        whose = owners(pages.request_id, pages.prompt, pages.prompt_tokens)
        marked: list[LayerId] = []
        if any(taken.values()):
            self._mirror.pull(pages.tables)
        buffers = sorted(self._live(pages, with_draft=True, stale=True), key=lambda pair: pair[0].layer_id)
        for layer_id, roles in groupby(buffers, key=lambda pair: pair[0].layer_id):
            for buffer, live in roles:
                rows, had = expected_rows(buffer, live, whose), taken.get(buffer.group_id, 0)
                starts = np.maximum(0, had - live.units * live.unit_tokens)
                for index, (slot, start, end) in enumerate(zip(live.slots, starts, live.tokens, strict=True)):
                    buffer.pages[slot, :, start:end] = rows[index, :, start:end]
            if on_layer is not None and self._mirror.on_host:
                on_layer(layer_id, pages.prompt_tokens)
            marked.append(layer_id)
        if not self._mirror.on_host:
            self._mirror.push(pages.tables)
            if on_layer is not None:
                for layer_id in marked:
                    on_layer(layer_id, pages.prompt_tokens, self._mirror.mark())

    def _step_with_padding(self, request: KVCacheRequest, position: int) -> None:
        """Write one position as a kernel does that knows batches of a fixed size only: through the block table.

        Raises:
            InternalError: a row without a request reached a page, or the request's own row none.
        """
        assert self._manager is not None and self._card is not None
        place = self._card.position
        block, token = divmod(position, self._card.tokens_per_block)
        if block % place.cp != place.cp_rank:
            return  # another rank has it
        self._mirror.pull(request.page_tables())
        for buffer in self._buffers:
            rows: list[RequestId | None] = [request.request_id, *[None] * self._pad_rows]
            slots = self._manager.block_table(buffer.group_id, rows)[:, block // place.cp]
            table = request.page_table(buffer.group_id)
            own = table[table != NO_PAGE]
            wanted = buffer.pages[own].copy()
            wanted[own == slots[0], :, token] = STEP
            buffer.pages[slots, :, token] = STEP
            if slots[0] == NULL_SLOT or slots[1:].any() or (buffer.pages[own] != wanted).any():
                got, want = slots.tolist(), f"a page, then {self._pad_rows} times the null slot {NULL_SLOT}"
                thing = f"request {request.request_id} group {buffer.group_id}"
                raise InternalError(explain(thing, "slots of a padded step", got, want, "report it"))
        self._mirror.push(request.page_tables())

    def _live(
        self, pages: PromptPages, *, with_draft: bool, stale: bool = False
    ) -> Iterator[tuple[BufferBytes, LiveUnits]]:
        assert self._card is not None
        live = {group: live_units(self._card, group, pages, stale=stale) for group in pages.tables}
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

    def _name_first(self, buffer: BufferBytes, live: LiveUnits, differs: NDArray[np.bool_], whose: Words) -> str:
        """Say where the first wrong row is, and whose row it holds instead."""
        index, head, token, byte = (int(axis[0]) for axis in np.nonzero(differs))
        number = int(live.units[index]) * live.unit_tokens + token
        here = Place(
            request=int(whose[number]),
            role=role_number(buffer.role),
            layer=buffer.layer_id,
            head=buffer.heads.lo + head,
            token=number,
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
