"""The receiver's books for one request and one context rank: what must come, and what came."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from transfer.copier import Copier, CopyJob, CopyTicket, Region
from transfer.generation_peers import ContextPeer
from transfer.messages import Chunk, PairAccount
from transfer.pages import SlotArray, expected_pages, scatter_pages
from transfer.paths import Regions
from unikv.errors import RemoteProtocolError, explain
from unikv.ids import GroupId

_NONE = np.empty(0, dtype=np.int32)


class Delivery:
    """Plans, receives and audits one context rank's share of one request.

    On the direct path the peer writes our pages itself and only `audit` is used; on staged paths `scatter` puts every
    chunk where it belongs.
    """

    def __init__(self, peer: ContextPeer, tables: Mapping[GroupId, SlotArray], prompt_tokens: int) -> None:
        self._peer, self._tables, self._prompt_tokens = peer, tables, prompt_tokens
        self._want = tuple(
            expected_pages(pair, tables.get(pair.dst_group, _NONE), prompt_tokens) for pair in peer.program.pairs
        )
        self._scattered = [0] * len(self._want)
        self._running: list[CopyTicket] = []

    @property
    def bytes(self) -> int:
        """Bytes this peer must deliver."""
        return sum(pages * pair.page_bytes for pages, pair in zip(self._want, self._peer.program.pairs, strict=True))

    @property
    def draft_bytes(self) -> int:
        """The share of `bytes` that belongs to draft layers."""
        pairs = zip(self._want, self._peer.program.pairs, strict=True)
        return sum(pages * pair.page_bytes for pages, pair in pairs if pair.owner == "draft")

    def scatter(self, chunk: Chunk, regions: Regions, copier: Copier) -> None:
        """Copy one chunk into our pages; the payload must stay until `landed`.

        Raises:
            RemoteProtocolError: the chunk is not the next one of its group pair, or has another size than it says.
            CopyError: the copy was refused.
        """
        self._check(chunk)
        pair = self._peer.program.pairs[chunk.pair]
        table = self._tables[pair.dst_group]
        job = CopyJob(
            lanes=self._peer.scatter[chunk.pair],
            source={0: Region(memory=_bytes(chunk), slot_stride_bytes=pair.page_bytes, num_slots=chunk.pages)},
            destination=regions[pair.dst_group],
            pages=scatter_pages(pair, table, self._prompt_tokens, chunk.first_page, chunk.pages),
        )
        self._running.append(copier.submit(job))
        self._scattered[chunk.pair] += chunk.pages

    def landed(self) -> bool:
        """Return whether every chunk received so far is in our pages."""
        self._running = [ticket for ticket in self._running if not ticket.done()]
        return not self._running

    def audit(self, account: Sequence[PairAccount]) -> str:
        """Return what is wrong with the peer's account, or "" when it is what we planned."""
        moved = {item.pair: (item.pages, item.bytes) for item in account}
        for number, (want, pair) in enumerate(zip(self._want, self._peer.program.pairs, strict=True)):
            planned = (want, want * pair.page_bytes)
            if moved.pop(number, (0, 0)) != planned or len(account) != len(self._want):
                got = next(
                    (f"{item.pages} pages, {item.bytes} bytes" for item in account if item.pair == number), "none"
                )
                return self._short(number, got, f"{planned[0]} pages, {planned[1]} bytes")
            if self._peer.path != "direct" and self._scattered[number] != want:
                return self._short(number, f"{self._scattered[number]} pages received", f"{want} pages")
        return f"coverage: the account names unknown group pairs {sorted(moved)}" if moved else ""

    def _short(self, number: int, got: str, want: str) -> str:
        pair = self._peer.program.pairs[number]
        thing = f"delivery of context rank {self._peer.card.rank}, group {pair.src_group} -> {pair.dst_group}"
        return explain(thing, "coverage", got, want, "the request is failed and its pages are not used")

    def _check(self, chunk: Chunk) -> None:
        thing = f"chunk of request {chunk.request_id} from context rank {self._peer.card.rank}"
        cure = "the chunk is dropped"
        if not 0 <= chunk.pair < len(self._want):
            raise RemoteProtocolError(explain(thing, "group pair", chunk.pair, f"in [0, {len(self._want)})", cure))
        next_page, want = self._scattered[chunk.pair], self._want[chunk.pair]
        if chunk.first_page != next_page or not 1 <= chunk.pages <= want - next_page:
            got = f"pages [{chunk.first_page}, {chunk.first_page + chunk.pages})"
            raise RemoteProtocolError(explain(thing, "range", got, f"a range from {next_page} up to {want}", cure))
        size = chunk.pages * self._peer.program.pairs[chunk.pair].page_bytes
        if len(chunk.payload) != size:
            raise RemoteProtocolError(explain(thing, "payload bytes", len(chunk.payload), f"{size}", cure))


def _bytes(chunk: Chunk) -> np.ndarray[tuple[int], np.dtype[np.uint8]]:
    return np.frombuffer(chunk.payload, dtype=np.uint8)
