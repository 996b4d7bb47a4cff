"""How bytes reach the peer: `direct` writes its mapped pages, `staged` gathers into chunks that a link carries.

Both are moves: small steps of at most one chunk, so that one thread can copy and listen. A move touches pages from its
first step until `quiet`; stopping a move keeps it from starting further copies, it never takes back a running one.
"""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum, auto
from functools import partial
from typing import Final, Protocol, TypeVar

import numpy as np
from numpy.typing import NDArray

from transfer.carrier import ChunkSource, Parcel
from transfer.copier import Copier, CopyJob, CopyTicket, Region
from transfer.device_bytes import DeviceEvent
from transfer.link import Frame, SendTicket
from transfer.messages import Berth, PairAccount
from transfer.pages import PagePairs, gather_pages
from transfer.plan import CopyProgram, Lane, gather_lanes
from unikv.errors import CopyError, UnikvError
from unikv.ids import GroupId, LayerId

_T = TypeVar("_T")

Regions = Mapping[GroupId, Mapping[int, Region]]
"""Regions of one rank: by group id, then by pool index."""

CREDITS: Final = 4
"""Chunks of one request a context rank may have under way to one generation rank before it hears of their arrival."""


class MoveState(Enum):
    """What a step of a move found."""

    RUNNING = auto()
    WAITING = auto()
    DONE = auto()


class Move(Protocol):
    """One request's bytes on their way from one context rank to one generation rank."""

    @property
    def quiet(self) -> bool:
        """Whether no copy of this move is in flight. One whose copy is in doubt is never quiet again."""
        ...

    def step(self) -> MoveState:
        """Do at most one chunk of work.

        Raises:
            Exception: whatever a copier or link raises; the move is over. `quiet` says whether bytes may still move.
        """
        ...

    @property
    def copying(self) -> bool:
        """Whether a copy is in flight, as far as the last step saw: its end comes without any message."""
        ...

    def stop(self) -> None:
        """Start no further copies."""
        ...

    def credit(self, chunks: int) -> None:
        """The peer has taken `chunks` chunks off the link; never more than `CREDITS` are kept."""
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


class BatchQueue:
    """Cuts the pages of every group pair into batches, as they are ready, of at most `chunk_bytes` (or one page).

    Args:
        ready: how many pages of a group pair may be copied, from its first one on.
        complete: whether all of them may, and the rest of the request is there too.
        after: device events behind which the pages of a group pair are written; None: the device's default stream.
    """

    def __init__(
        self,
        program: CopyProgram,
        pages: Sequence[PagePairs],
        chunk_bytes: int,
        *,
        ready: Callable[[int], int] | None = None,
        complete: Callable[[], bool] = lambda: True,
        after: Callable[[int], Sequence[DeviceEvent] | None] = lambda _: None,
    ) -> None:
        self._pairs, self._pages = program.pairs, pages
        self._chunk_bytes = chunk_bytes
        self._ready = ready or (lambda number: len(pages[number]))
        self._complete = complete
        self.after = after
        self._next = [0] * len(program.pairs)

    @property
    def over(self) -> bool:
        """Whether every batch was taken and no more can come."""
        # First whether it is complete: pages that are there by then count as taken only if they were.
        return self._complete() and all(
            taken == len(pages) for taken, pages in zip(self._next, self._pages, strict=True)
        )

    def take(self) -> Batch | None:
        """Return the first batch that is ready, None if none is."""
        for number, pair in enumerate(self._pairs):
            first = self._next[number]
            count = min(self._ready(number) - first, max(1, self._chunk_bytes // pair.page_bytes))
            if count > 0:
                self._next[number] += count
                return Batch(number, first, count, count * pair.page_bytes)
        return None


def lanes_by_pair(program: CopyProgram) -> tuple[tuple[Lane, ...], ...]:
    """Return the lanes of every group pair, in the order of the pairs."""
    return tuple(tuple(lane for lane in program.lanes if lane.pair == number) for number in range(len(program.pairs)))


def layers_by_pair(program: CopyProgram) -> tuple[tuple[LayerId, ...], ...]:
    """Return the layers whose bytes each group pair moves."""
    layers: list[set[LayerId]] = [set() for _ in program.pairs]
    for piece in program.slices:
        layers[piece.pair].add(piece.layer_id)
    return tuple(tuple(sorted(members)) for members in layers)


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


class CopyInFlight:
    """At most one copy, from its submission until it has landed, failed, or turned out to be in doubt.

    A refusal of ours means that nothing was copied. An error nobody foresaw proves nothing, so it counts as doubt.
    """

    def __init__(self) -> None:
        self._ticket: CopyTicket | None = None
        self._error: Exception | None = None
        self._in_doubt = False

    @property
    def in_doubt(self) -> bool:
        """Whether bytes may land at any time from now on."""
        return self._in_doubt

    @property
    def quiet(self) -> bool:
        """Whether it is certain that no byte moves. Never raises."""
        with contextlib.suppress(Exception):  # kept for `landed`
            self.landed()
        return self._ticket is None and not self._in_doubt

    def start(self, copier: Copier, job: CopyJob) -> None:
        """Submit `job`; raise what the copier raises."""
        self._ticket = self._watch(lambda: copier.submit(job))

    def landed(self) -> bool:
        """Return whether the copy is over; raise what it raised, again and again."""
        if self._error is not None:
            raise self._error
        if self._ticket is not None and self._watch(self._ticket.done):
            self._ticket = None
        return self._ticket is None

    def _watch(self, call: Callable[[], _T]) -> _T:
        try:
            return call()
        except Exception as error:
            self._ticket, self._error = None, error
            self._in_doubt = error.in_doubt if isinstance(error, CopyError) else not isinstance(error, UnikvError)
            raise


class DirectMove:
    """Copies straight into the peer's mapped pages.

    Args:
        lanes: the program's lanes by group pair, if they are known: copiers recognise them.
        under_way: copies that may run at one time. With more than one, a step starts everything that is ready.
    """

    def __init__(
        self,
        program: CopyProgram,
        pages: Sequence[PagePairs],
        *,
        source: Regions,
        destination: Regions,
        copier: Copier,
        todo: BatchQueue,
        lanes: Sequence[Sequence[Lane]] | None = None,
        under_way: int = 1,
    ) -> None:
        self._program, self._pages = program, pages
        self._lanes = lanes or lanes_by_pair(program)
        self._source, self._destination = source, destination
        self._copier = copier
        self._todo = todo
        self._ledger = _Ledger(program)
        self._copies: list[CopyInFlight] = []
        self._under_way = under_way
        self._stopped = False

    @property
    def quiet(self) -> bool:
        """Whether no copy is in flight."""
        return all(copy.quiet for copy in self._copies)

    @property
    def copying(self) -> bool:
        """Whether a copy is in flight."""
        return bool(self._copies)

    def step(self) -> MoveState:
        """Submit what is ready, as long as not too much is under way."""
        self._copies = [copy for copy in self._copies if not copy.landed()]
        started = False
        while len(self._copies) < self._under_way and not self._stopped and (batch := self._todo.take()) is not None:
            self._submit(batch)
            started = True
        if started:
            return MoveState.RUNNING
        if self._copies:
            return MoveState.WAITING
        return MoveState.DONE if self._stopped or self._todo.over else MoveState.WAITING

    def _submit(self, batch: Batch) -> None:
        pair = self._program.pairs[batch.pair]
        job = CopyJob(
            lanes=self._lanes[batch.pair],
            source=self._source[pair.src_group],
            destination=self._destination[pair.dst_group],
            pages=slice_pages(self._pages[batch.pair], batch.first, batch.count),
            after=self._todo.after(batch.pair),
        )
        copy = CopyInFlight()
        self._copies.append(copy)
        copy.start(self._copier, job)
        self._ledger.add(batch)

    def stop(self) -> None:
        """Start no further copies."""
        self._stopped = True

    def credit(self, chunks: int) -> None:
        """Do nothing: the direct path has no chunks."""

    def account(self) -> tuple[PairAccount, ...]:
        """Return pages and bytes submitted so far, per group pair."""
        return self._ledger.account()


SendChunk = Callable[[Batch, Frame, Berth | None], SendTicket]
"""Sends the message of one chunk of packed pages to the peer this move is for, with its bytes or where they are."""


class StagedMove:
    """Gathers pages into chunks and sends them, as long as chunks and credits last."""

    def __init__(
        self,
        program: CopyProgram,
        pages: Sequence[PagePairs],
        *,
        source: Regions,
        copier: Copier,
        carrier: ChunkSource,
        todo: BatchQueue,
        send: SendChunk,
    ) -> None:
        self._program, self._pages, self._source = program, pages, source
        self._lanes = tuple(gather_lanes(program, number) for number in range(len(program.pairs)))
        self._copier, self._carrier, self._chunks, self._send = copier, carrier, carrier.chunks, send
        self._todo = todo
        self._next: Batch | None = None
        self._ledger = _Ledger(program)
        self._credits = CREDITS
        self._copy = CopyInFlight()
        self._gathering: tuple[Batch, NDArray[np.uint8]] | None = None
        self._parcels: deque[Parcel] = deque()
        self._stopped = False

    @property
    def quiet(self) -> bool:
        """Whether no gather reads our pages."""
        return self._copy.quiet

    @property
    def copying(self) -> bool:
        """Whether a gather is in flight."""
        return self._gathering is not None

    def step(self) -> MoveState:
        """Send the chunk that is gathered, or gather the next one."""
        if self._gathering is not None:
            return self._send_gathered()
        self._see_parcels()
        self._next = self._next or (None if self._stopped else self._todo.take())
        if self._stopped or self._next is None:
            # The last word must not come before the last chunk.
            over = self._stopped or (self._todo.over and not self._parcels)
            return MoveState.DONE if over else MoveState.WAITING
        if not self._credits or not self._carrier.room():
            return MoveState.WAITING
        batch = self._next
        chunk = self._chunks.take(batch.bytes)
        if chunk is None:
            return MoveState.WAITING
        self._gathering, self._next = (batch, chunk), None
        try:
            self._gather(batch, chunk)
        except BaseException:
            self._drop_chunk()
            raise
        return self._send_gathered()

    def stop(self) -> None:
        """Start no further gathers; a chunk that is gathered is not sent, one that is sent not announced."""
        self._stopped = True
        self._drop_parcels()

    def credit(self, chunks: int) -> None:
        """The peer has taken `chunks` chunks off the link."""
        self._credits = min(CREDITS, self._credits + max(0, chunks))

    def account(self) -> tuple[PairAccount, ...]:
        """Return pages and bytes sent so far, per group pair."""
        return self._ledger.account()

    def _gather(self, batch: Batch, chunk: NDArray[np.uint8]) -> None:
        pair = self._program.pairs[batch.pair]
        packed = Region(memory=chunk, slot_stride_bytes=pair.page_bytes, num_slots=batch.count)
        job = CopyJob(
            lanes=self._lanes[batch.pair],
            source=self._source[pair.src_group],
            destination={0: packed},
            pages=gather_pages(self._pages[batch.pair], batch.first, batch.count),
            after=self._todo.after(batch.pair),
        )
        self._copy.start(self._copier, job)

    def _send_gathered(self) -> MoveState:
        assert self._gathering is not None
        batch, chunk = self._gathering
        try:
            if not self._copy.landed():
                return MoveState.WAITING
        except BaseException:
            self._drop_chunk()
            raise
        self._gathering = None
        if self._stopped:
            self._chunks.give_back(chunk)
            return MoveState.DONE
        self._parcels.append(self._carrier.send(chunk, batch.bytes, partial(self._send, batch)))
        self._credits -= 1
        self._ledger.add(batch)
        return MoveState.RUNNING

    def _see_parcels(self) -> None:
        """Forget the parcels that were announced; raise what became of one that will not be."""
        try:
            while self._parcels and self._parcels[0].announced():
                self._parcels.popleft()
        except BaseException:
            self._drop_parcels()
            raise

    def _drop_parcels(self) -> None:
        for parcel in self._parcels:
            parcel.drop()
        self._parcels.clear()

    def _drop_chunk(self) -> None:
        """Give the chunk of a failed gather back, unless bytes may still land in it: then it is never used again."""
        assert self._gathering is not None
        if self._copy.quiet:
            self._chunks.give_back(self._gathering[1])
        self._gathering = None
