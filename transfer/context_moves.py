"""The moves of a context rank: made from an ask, run first come, first served, one chunk at a time."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Final

import numpy as np

from transfer.carriers import SourceManager
from transfer.context_peers import GenerationPeer
from transfer.context_requests import ContextRequest
from transfer.copier import Copier, is_asynchronous, together
from transfer.copy_device import DeviceCopier
from transfer.device_bytes import DeviceEvent
from transfer.exchange import PeerKey
from transfer.messages import Ask
from transfer.options import TransferOptions
from transfer.pages import PagePairs, SlotArray, page_ends, pair_pages
from transfer.paths import BatchQueue, DirectMove, Move, Regions, SendChunk, StagedMove, layers_by_pair
from unikv.errors import RemoteProtocolError, explain
from unikv.ids import GroupId

DIRECT_STEP_CHUNKS: Final = 8
"""Chunks a direct move copies in one step. Nothing has to hold them, and a host's memcpy is a third faster once it is
long enough to write past the caches (tens of MiB); at memory speed a step still takes milliseconds only."""

RUNNING_PER_PEER: Final = 32
"""Moves towards one peer that run at one time; further ones wait for their turn."""
DEVICE_STEP_BYTES: Final = 2 * 1024**3
"""Most bytes of one copy on a device: a millisecond, in which the host does other things."""
DEVICE_COPIES: Final = 64
"""Copies one move may have under way on a device."""

_NO_SLOTS = np.empty(0, dtype=np.int32)
_NO_PAGES = PagePairs(src_slot=_NO_SLOTS, src_sub=_NO_SLOTS, dst_slot=_NO_SLOTS, dst_sub=_NO_SLOTS)


_MoveKey = tuple[int, PeerKey]


class MoveQueue:
    """Makes moves over our regions and keeps them in the order in which they may run.

    Attributes:
        carriers: what brings staged chunks to peers.
        asynchronous: copies run while the host goes on, so that several moves may be under way.
    """

    def __init__(self, regions: Regions, copier: Copier, options: TransferOptions, name: str) -> None:
        self._regions, self._copier, self._options = regions, copier, options
        self.asynchronous = is_asynchronous(copier)
        make = copier.host_chunk if isinstance(copier, DeviceCopier) else None
        self.carriers = SourceManager(options, name, make)
        self._running: dict[_MoveKey, tuple[ContextRequest, PeerKey]] = {}
        self._queued: dict[PeerKey, dict[_MoveKey, tuple[ContextRequest, PeerKey]]] = {}
        self._at_peer: Counter[PeerKey] = Counter()
        self._in_doubt: list[tuple[ContextRequest, PeerKey]] = []

    def __len__(self) -> int:
        return len(self._running) + sum(map(len, self._queued.values())) + len(self._in_doubt)

    def running(self) -> tuple[tuple[ContextRequest, PeerKey], ...]:
        """Return a snapshot of the running moves. First come, first served: finishing one early beats fairness here.

        Of a peer with many, the first `RUNNING_PER_PEER` run: a turn looks at every running move, and a peer that takes
        nothing off the link must not make it long.
        """
        return tuple(self._running.values())

    def copying(self) -> bool:
        """Return whether a copy is in flight, whose end no message announces."""
        return any(_is_copying(*item) for item in self._running.values())

    def together(self) -> AbstractContextManager[None]:
        """Return a context in which moves that step share the start of their copies."""
        return together(self._copier)

    def add(self, request: ContextRequest, key: PeerKey) -> None:
        """Let the move of this leg run, when it is its turn."""
        if self._at_peer[key] < RUNNING_PER_PEER:
            self._run(request, key)
        else:
            self._queued.setdefault(key, {})[id(request), key] = (request, key)

    def run_now(self, request: ContextRequest, key: PeerKey) -> None:
        """Let a move run out of turn: it was stopped, and has only to say so."""
        if self._queued.get(key, {}).pop((id(request), key), None):
            self._run(request, key)

    def remove(self, request: ContextRequest, key: PeerKey) -> None:
        """Take a move out that is over; the next of its peer may run."""
        if self._running.pop((id(request), key), None) is None:
            return
        self._at_peer[key] -= 1
        queued = self._queued.get(key)
        if queued and self._at_peer[key] < RUNNING_PER_PEER:
            self._run(*queued.pop(next(iter(queued))))
        if not queued:
            self._queued.pop(key, None)
        if not self._at_peer[key]:
            del self._at_peer[key]

    def _run(self, request: ContextRequest, key: PeerKey) -> None:
        self._running[id(request), key] = (request, key)
        self._at_peer[key] += 1

    def keep_in_doubt(self, request: ContextRequest, key: PeerKey) -> None:
        """Take a move out that runs no more, and of which nobody knows whether its last copy still lands.

        It counts as touching its peer for ever: the pages of both sides stay as they are until a process ends.
        """
        self.remove(request, key)
        self._in_doubt.append((request, key))

    def touches(self, key: PeerKey) -> bool:
        """Return whether a move towards this peer is still running or queued, or in doubt."""
        return key in self._at_peer or any(moving == key for _, moving in self._in_doubt)

    def make(self, request: ContextRequest, ask: Ask, peer: GenerationPeer, send: SendChunk) -> Move:
        """Pair the pages of both sides and return the move along the peer's path.

        Raises:
            RemoteProtocolError: the ask does not fit the prompt or the program.
            LocalProtocolError: our side lacks a page that is wanted.
            ConfigError: the carrier of the peer's path does not start.
        """
        if ask.prompt_tokens != request.prompt_tokens:
            want = f"{request.prompt_tokens}, as on the context side"
            thing = f"request {ask.request_id} from generation rank {peer.card.rank}"
            raise RemoteProtocolError(explain(thing, "prompt_tokens", ask.prompt_tokens, want, "send the same prompt"))
        pages = self._pair(request, {table.group_id: table.slots for table in ask.tables}, peer)
        if peer.memory is None:
            carrier = self.carriers.source(peer.key, peer.path, ask.landing)
            todo = self._queue(request, ask, peer, pages, carrier.chunk_bytes)
            return StagedMove(
                peer.program,
                pages,
                source=self._regions,
                copier=self._copier,
                carrier=carrier,
                todo=todo,
                send=send,
            )
        memory, groups = peer.memory, {pair.dst_group for pair in peer.program.pairs}
        return DirectMove(
            peer.program,
            pages,
            source=self._regions,
            destination={group: memory.regions(group) for group in groups},
            copier=self._copier,
            todo=self._queue(request, ask, peer, pages, self._direct_step_bytes),
            lanes=peer.lanes,
            under_way=DEVICE_COPIES if self.asynchronous else 1,
        )

    @property
    def _direct_step_bytes(self) -> int:
        return DEVICE_STEP_BYTES if self.asynchronous else DIRECT_STEP_CHUNKS * self._options.chunk_bytes

    def _queue(
        self, request: ContextRequest, ask: Ask, peer: GenerationPeer, pages: Sequence[PagePairs], chunk_bytes: int
    ) -> BatchQueue:
        """Return the batches of a move: all at once, or as the request's KV is computed."""
        readiness, program = request.readiness, peer.program
        if readiness is None:
            written = request.written
            return BatchQueue(program, pages, chunk_bytes, after=lambda _: written)
        layers = layers_by_pair(program)

        def after(number: int) -> Sequence[DeviceEvent] | None:
            return readiness.after(layers[number])

        if readiness.complete:
            return BatchQueue(program, pages, chunk_bytes, after=after)
        wanted = {table.group_id: table.slots for table in ask.tables}
        ends = [page_ends(pair, wanted.get(pair.dst_group, _NO_SLOTS), ask.prompt_tokens) for pair in program.pairs]

        def ready(number: int) -> int:
            return int(np.searchsorted(ends[number], readiness.tokens(layers[number]), side="right"))

        return BatchQueue(program, pages, chunk_bytes, ready=ready, complete=lambda: readiness.complete, after=after)

    def _pair(
        self, request: ContextRequest, wanted: Mapping[int, SlotArray], peer: GenerationPeer
    ) -> tuple[PagePairs, ...]:
        return tuple(
            pair_pages(pair, _table(request, pair.src_group), wanted[pair.dst_group], request.prompt_tokens)
            if pair.dst_group in wanted
            else _NO_PAGES
            for pair in peer.program.pairs
        )

    def close(self) -> None:
        """Free the copier and the carriers."""
        self.carriers.close()
        self._copier.close()


def _is_copying(request: ContextRequest, key: PeerKey) -> bool:
    leg = request.legs.get(key)
    return leg is not None and leg.move is not None and leg.move.copying


def _table(request: ContextRequest, group: GroupId) -> SlotArray:
    return request.tables.get(group, _NO_SLOTS)
