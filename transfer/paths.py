"""How bytes reach the peer: `direct` writes its mapped pages, `staged` gathers into chunks that a link carries.

Both are moves: small steps of at most one chunk, so that one thread can copy and listen. A move touches pages from its
first step until `quiet`; stopping a move keeps it from starting further copies, it never takes back a running one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum, auto
from typing import Final, Protocol

import numpy as np
from numpy.typing import NDArray

from transfer.copier import Copier, CopyJob, CopyTicket, Region
from transfer.gate_checks import why_not_direct
from transfer.gate_facts import header_facts
from transfer.hello import PathKind, RankCard
from transfer.link import Frame, SendTicket
from transfer.messages import PairAccount
from transfer.pages import PagePairs, gather_pages
from transfer.plan import CopyProgram, Lane, gather_lanes
from transfer.staging import ChunkPool
from unikv.errors import IncompatiblePeerError
from unikv.ids import GroupId

Regions = Mapping[GroupId, Mapping[int, Region]]
"""Regions of one rank: by group id, then by pool index."""

CREDITS: Final = 4
"""Chunks of one request a context rank may have under way to one generation rank before it hears of their arrival."""


def choose_path(context: RankCard, generation: RankCard) -> tuple[PathKind, str]:
    """Return the path this pair of ranks takes, and the reason for the log.

    Raises:
        IncompatiblePeerError: the path that was asked for cannot be taken; a slower one is never taken silently.
    """
    asked = context.path
    hindrance = why_not_direct(header_facts(context), header_facts(generation))
    if asked is PathKind.ZMQ:
        return PathKind.ZMQ, "asked for"
    if asked is PathKind.AUTO:
        return (PathKind.ZMQ, hindrance) if hindrance else (PathKind.DIRECT, "the peer's pools can be mapped")
    if asked is PathKind.DIRECT and not hindrance:
        return PathKind.DIRECT, "asked for"
    why = hindrance or f"this release carries no {asked} path"
    raise IncompatiblePeerError(f"path {asked} is not possible", mismatches=(f"{why}; set transfer.path: auto",))


class MoveState(Enum):
    """What a step of a move found."""

    RUNNING = auto()
    WAITING = auto()
    DONE = auto()


class Move(Protocol):
    """One request's bytes on their way from one context rank to one generation rank."""

    @property
    def quiet(self) -> bool:
        """Whether no copy of this move is in flight."""
        ...

    def step(self) -> MoveState:
        """Do at most one chunk of work; raise CopyError where a copy failed."""
        ...

    def stop(self) -> None:
        """Start no further copies."""
        ...

    def credit(self, chunks: int) -> None:
        """The peer has taken `chunks` chunks off the link."""
        ...

    def account(self) -> tuple[PairAccount, ...]:
        """Return pages and bytes moved so far, per group pair."""
        ...


@dataclass(frozen=True, slots=True)
class Batch:
    """Consecutive page pairs of one group pair that fit one chunk."""

    pair: int
    first: int
    count: int
    bytes: int


def batches(program: CopyProgram, pages: Sequence[PagePairs], chunk_bytes: int) -> Iterator[Batch]:
    """Cut the pages of every group pair into batches of at most `chunk_bytes` (one page at the least)."""
    for number, pair in enumerate(program.pairs):
        share = max(1, chunk_bytes // pair.page_bytes)
        for first in range(0, len(pages[number]), share):
            count = min(share, len(pages[number]) - first)
            yield Batch(number, first, count, count * pair.page_bytes)


def lanes_by_pair(program: CopyProgram) -> tuple[tuple[Lane, ...], ...]:
    """Return the lanes of every group pair, in the order of the pairs."""
    return tuple(tuple(lane for lane in program.lanes if lane.pair == number) for number in range(len(program.pairs)))


def slice_pages(pages: PagePairs, first: int, count: int) -> PagePairs:
    """Return page pairs ``[first, first + count)``; the arrays are views."""
    end = first + count
    return PagePairs(
        src_slot=pages.src_slot[first:end],
        src_sub=pages.src_sub[first:end],
        dst_slot=pages.dst_slot[first:end],
        dst_sub=pages.dst_sub[first:end],
    )


class _Ledger:
    """Counts what was moved, per group pair."""

    def __init__(self, program: CopyProgram) -> None:
        self._pages = [0] * len(program.pairs)
        self._bytes = [0] * len(program.pairs)

    def add(self, batch: Batch) -> None:
        self._pages[batch.pair] += batch.count
        self._bytes[batch.pair] += batch.bytes

    def account(self) -> tuple[PairAccount, ...]:
        return tuple(
            PairAccount(pair=number, pages=pages, bytes=size)
            for number, (pages, size) in enumerate(zip(self._pages, self._bytes, strict=True))
        )


class DirectMove:
    """Copies straight into the peer's mapped pages."""

    def __init__(
        self,
        program: CopyProgram,
        pages: Sequence[PagePairs],
        *,
        source: Regions,
        destination: Regions,
        copier: Copier,
        chunk_bytes: int,
    ) -> None:
        self._program, self._pages = program, pages
        self._lanes = lanes_by_pair(program)
        self._source, self._destination = source, destination
        self._copier = copier
        self._todo = batches(program, pages, chunk_bytes)
        self._ledger = _Ledger(program)
        self._running: CopyTicket | None = None
        self._stopped = False

    @property
    def quiet(self) -> bool:
        """Whether no copy is in flight."""
        return self._running is None or self._running.done()

    def step(self) -> MoveState:
        """Submit the next batch once the last one has landed."""
        if self._running is not None:
            if not self._running.done():
                return MoveState.WAITING
            self._running = None
        batch = None if self._stopped else next(self._todo, None)
        if batch is None:
            return MoveState.DONE
        pair = self._program.pairs[batch.pair]
        job = CopyJob(
            lanes=self._lanes[batch.pair],
            source=self._source[pair.src_group],
            destination=self._destination[pair.dst_group],
            pages=slice_pages(self._pages[batch.pair], batch.first, batch.count),
        )
        self._running = self._copier.submit(job)
        self._ledger.add(batch)
        return MoveState.RUNNING

    def stop(self) -> None:
        """Start no further copies."""
        self._stopped = True

    def credit(self, chunks: int) -> None:
        """Do nothing: the direct path has no chunks."""

    def account(self) -> tuple[PairAccount, ...]:
        """Return pages and bytes submitted so far, per group pair."""
        return self._ledger.account()


SendChunk = Callable[[Batch, Frame], SendTicket]
"""Sends one chunk of packed pages to the peer this move is for."""


class StagedMove:
    """Gathers pages into chunks and sends them, as long as chunks and credits last."""

    def __init__(
        self,
        program: CopyProgram,
        pages: Sequence[PagePairs],
        *,
        source: Regions,
        copier: Copier,
        chunks: ChunkPool,
        send: SendChunk,
    ) -> None:
        self._program, self._pages, self._source = program, pages, source
        self._lanes = tuple(gather_lanes(program, number) for number in range(len(program.pairs)))
        self._copier, self._chunks, self._send = copier, chunks, send
        self._todo = batches(program, pages, chunks.chunk_bytes)
        self._next = next(self._todo, None)
        self._ledger = _Ledger(program)
        self._credits = CREDITS
        self._gathering: tuple[Batch, NDArray[np.uint8], CopyTicket] | None = None
        self._stopped = False

    @property
    def quiet(self) -> bool:
        """Whether no gather reads our pages."""
        return self._gathering is None or self._gathering[2].done()

    def step(self) -> MoveState:
        """Send the chunk that is gathered, or gather the next one."""
        if self._gathering is not None:
            return self._send_gathered()
        if self._stopped or self._next is None:
            return MoveState.DONE
        if not self._credits:
            return MoveState.WAITING
        batch = self._next
        chunk = self._chunks.take(batch.bytes)
        if chunk is None:
            return MoveState.WAITING
        self._gathering = (batch, chunk, self._gather(batch, chunk))
        self._next = next(self._todo, None)
        return self._send_gathered()

    def stop(self) -> None:
        """Start no further gathers; a chunk that is gathered is not sent."""
        self._stopped = True

    def credit(self, chunks: int) -> None:
        """The peer has taken `chunks` chunks off the link."""
        self._credits += chunks

    def account(self) -> tuple[PairAccount, ...]:
        """Return pages and bytes sent so far, per group pair."""
        return self._ledger.account()

    def _gather(self, batch: Batch, chunk: NDArray[np.uint8]) -> CopyTicket:
        pair = self._program.pairs[batch.pair]
        packed = Region(memory=chunk, slot_stride_bytes=pair.page_bytes, num_slots=batch.count)
        job = CopyJob(
            lanes=self._lanes[batch.pair],
            source=self._source[pair.src_group],
            destination={0: packed},
            pages=gather_pages(self._pages[batch.pair], batch.first, batch.count),
        )
        return self._copier.submit(job)

    def _send_gathered(self) -> MoveState:
        assert self._gathering is not None
        batch, chunk, ticket = self._gathering
        if not ticket.done():
            return MoveState.WAITING
        self._gathering = None
        if self._stopped:
            self._chunks.give_back(chunk)
            return MoveState.DONE
        try:
            ticket_of_link = self._send(batch, chunk.data[: batch.bytes])
        except BaseException:
            self._chunks.give_back(chunk)
            raise
        self._chunks.give_back_after(chunk, ticket_of_link)
        self._credits -= 1
        self._ledger.add(batch)
        return MoveState.RUNNING
