"""The receiver's books for one request and one context rank: what must come, and what came."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from transfer.copier import Copier, CopyJob, Region
from transfer.generation_peers import ContextPeer
from transfer.hello import PathKind
from transfer.messages import Chunk, PairAccount
from transfer.pages import PagePairs, SlotArray, expected_pages, scatter_pages
from transfer.paths import CopyInFlight, Regions, slice_pages
from unikv.errors import RemoteProtocolError, explain
from unikv.ids import GroupId

_NONE = np.empty(0, dtype=np.int32)


class Delivery:
    """Plans, receives and audits one context rank's share of one request.

    On the direct path the peer writes our pages itself and only `audit` is used; on staged paths `scatter` puts every
    chunk where it belongs.
    """

    def __init__(self, peer: ContextPeer, tables: Mapping[GroupId, SlotArray], prompt_tokens: int) -> None:
        self.peer = peer
        self._tables, self._prompt_tokens = tables, prompt_tokens
        self._want = tuple(
            expected_pages(pair, tables.get(pair.dst_group, _NONE), prompt_tokens) for pair in peer.program.pairs
        )
        self._scattered = [0] * len(self._want)
        self._pages: dict[int, PagePairs] = {}
        self._running: list[tuple[CopyInFlight, Chunk]] = []
        self._landed_chunks = 0
        self._vacant: list[int] = []
        self._failure = ""
        self._in_doubt = False

    @property
    def bytes(self) -> int:
        """Bytes this peer must deliver."""
        return sum(pages * pair.page_bytes for pages, pair in zip(self._want, self.peer.program.pairs, strict=True))

    @property
    def draft_bytes(self) -> int:
        """The share of `bytes` that belongs to draft layers."""
        pairs = zip(self._want, self.peer.program.pairs, strict=True)
        return sum(pages * pair.page_bytes for pages, pair in pairs if pair.owner == "draft")

    @property
    def failure(self) -> str:
        """Why a chunk could not be copied into our pages, "" while none failed."""
        return self._failure

    @property
    def quiet(self) -> bool:
        """Whether no copy of ours touches the pages. Never again once a copy is in doubt."""
        return self.landed() and not self._in_doubt

    @property
    def in_doubt(self) -> bool:
        """Whether a failed copy of ours may still write our pages."""
        return self._in_doubt

    def scatter(self, chunk: Chunk, regions: Regions, copier: Copier) -> None:
        """Start to copy one chunk into our pages; its payload is kept until it has landed.

        Raises:
            RemoteProtocolError: the chunk is not the next one of its group pair, or has another size than it says, or
                the peer is to write our pages itself.
            Exception: what the copier raises; `in_doubt` says whether its copy may still land.
        """
        self._check(chunk)
        pair = self.peer.program.pairs[chunk.pair]
        packed = np.arange(chunk.pages, dtype=np.int32)
        ours = slice_pages(self._all_pages(chunk.pair), chunk.first_page, chunk.pages)
        job = CopyJob(
            lanes=self.peer.scatter[chunk.pair],
            source={0: Region(memory=_bytes(chunk), slot_stride_bytes=pair.page_bytes, num_slots=chunk.pages)},
            destination=regions[pair.dst_group],
            pages=PagePairs(
                src_slot=packed, src_sub=np.zeros_like(packed), dst_slot=ours.dst_slot, dst_sub=ours.dst_sub
            ),
        )
        copy = CopyInFlight()
        try:
            copy.start(copier, job)
        except Exception as error:
            self._note(copy, error)
            self._vacate(copy, chunk)
            raise
        self._running.append((copy, chunk))
        self._scattered[chunk.pair] += chunk.pages

    def landed(self) -> bool:
        """Return whether every chunk received so far is in our pages, or has failed."""
        still = []
        for copy, chunk in self._running:
            try:
                over = copy.landed()
            except Exception as error:
                self._note(copy, error)
                self._vacate(copy, chunk)
                continue
            self._landed_chunks += over
            if over:
                self._vacate(copy, chunk)
            else:
                still.append((copy, chunk))
        self._running = still
        return not still

    def take_landed(self) -> int:
        """Return how many chunks landed since the last call: as many credits are due."""
        self.landed()
        chunks, self._landed_chunks = self._landed_chunks, 0
        return chunks

    def take_vacant(self) -> tuple[int, ...]:
        """Return the serials of the berths that were read since the last call, or will not be."""
        self.landed()
        serials, self._vacant = tuple(self._vacant), []
        return serials

    def refuse(self, chunk: Chunk) -> None:
        """Take note of a chunk that is not scattered: its berth, if it has one, is vacant."""
        if chunk.berth is not None:
            self._vacant.append(chunk.berth.serial)

    def audit(self, account: Sequence[PairAccount]) -> str:
        """Return what is wrong with the peer's account or our copies, or "" when all is as we planned."""
        if self._failure:
            return self._failure
        unknown = sorted({item.pair for item in account} - set(range(len(self._want))))
        if unknown:
            return f"coverage: the account names unknown group pairs {unknown}"
        for number, (want, pair) in enumerate(zip(self._want, self.peer.program.pairs, strict=True)):
            items = [item for item in account if item.pair == number]
            if [(item.pages, item.bytes) for item in items] != [(want, want * pair.page_bytes)]:
                got = " and ".join(f"{item.pages} pages, {item.bytes} bytes" for item in items) or "none"
                return self._short(number, got, f"{want} pages, {want * pair.page_bytes} bytes")
            if self.peer.path is not PathKind.DIRECT and self._scattered[number] != want:
                return self._short(number, f"{self._scattered[number]} pages received", f"{want} pages")
        return ""

    def _note(self, copy: CopyInFlight, error: Exception) -> None:
        self._failure = self._failure or f"a chunk of context rank {self.peer.card.rank} was not copied: {error}"
        self._in_doubt |= copy.in_doubt

    def _vacate(self, copy: CopyInFlight, chunk: Chunk) -> None:
        if not copy.in_doubt:
            self.refuse(chunk)

    def _all_pages(self, number: int) -> PagePairs:
        """Return all pages of one group pair, worked out once."""
        if number not in self._pages:
            pair = self.peer.program.pairs[number]
            table, want = self._tables[pair.dst_group], self._want[number]
            self._pages[number] = scatter_pages(pair, table, self._prompt_tokens, 0, want)
        return self._pages[number]

    def _short(self, number: int, got: str, want: str) -> str:
        pair = self.peer.program.pairs[number]
        thing = f"delivery of context rank {self.peer.card.rank}, group {pair.src_group} -> {pair.dst_group}"
        return explain(thing, "coverage", got, want, "the request is failed and its pages are not used")

    def _check(self, chunk: Chunk) -> None:
        thing = f"chunk of request {chunk.request_id} from context rank {self.peer.card.rank}"
        cure = "the chunk is dropped"
        if self.peer.path is PathKind.DIRECT:
            raise RemoteProtocolError(explain(thing, "path", PathKind.DIRECT, "one that sends chunks", cure))
        if not 0 <= chunk.pair < len(self._want):
            raise RemoteProtocolError(explain(thing, "group pair", chunk.pair, f"in [0, {len(self._want)})", cure))
        next_page, want = self._scattered[chunk.pair], self._want[chunk.pair]
        if chunk.first_page != next_page or not 1 <= chunk.pages <= want - next_page:
            got = f"pages [{chunk.first_page}, {chunk.first_page + chunk.pages})"
            raise RemoteProtocolError(explain(thing, "range", got, f"a range from {next_page} up to {want}", cure))
        size = chunk.pages * self.peer.program.pairs[chunk.pair].page_bytes
        if len(chunk.payload) != size:
            raise RemoteProtocolError(explain(thing, "payload bytes", len(chunk.payload), f"{size}", cure))


def _bytes(chunk: Chunk) -> np.ndarray[tuple[int], np.dtype[np.uint8]]:
    return np.frombuffer(chunk.payload, dtype=np.uint8)
