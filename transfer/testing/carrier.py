"""What every carrier must do, as tests: the contract of `transfer.carrier` in a form that can fail.

Subclass `CarrierConformance` under a name that pytest collects and say how to make the two ends::

    class TestMyCarrier(CarrierConformance):
        def make_ends(self, num_chunks, chunk_bytes):
            return CarrierEnds(source=..., sink=..., pool=..., poll=..., vacate=..., lose=...)

The link between the ends is a list: what the source announces is read by the sink when a test says so.
"""

# ruff: noqa: D102 - the names of the tests are their documentation
from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

import numpy as np

from transfer.carrier import ChunkSink, ChunkSource, Parcel
from transfer.link import Frame, SendTicket
from transfer.messages import Berth
from transfer.staging import HostChunkPool
from unikv.errors import LinkBrokenError, RemoteProtocolError

PATIENCE_S: Final = 30.0
CHUNK_BYTES: Final = 64 * 1024
NUM_CHUNKS: Final = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class CarrierEnds:
    """Both ends of one carrier.

    Attributes:
        pool: the chunks of `source`.
        poll: looks after what is under way; returns whether anything is.
        vacate: tells the source that berths, by their serials, were read; None for a carrier without berths.
        lose: tells the source that the peer is gone; None where only `announce` can tell.
    """

    source: ChunkSource
    sink: ChunkSink
    pool: HostChunkPool
    poll: Callable[[], bool]
    vacate: Callable[[tuple[int, ...]], None] | None = None
    lose: Callable[[str], None] | None = None


class _Ticket:
    def __init__(self) -> None:
        self.over = False

    def done(self) -> bool:
        return self.over


class AnnouncementManager:
    """The link between the two ends: what was announced, and what the link still reads."""

    def __init__(self) -> None:
        self.announced: list[tuple[Frame, Berth | None]] = []
        self.tickets: list[_Ticket] = []
        self.broken = False

    def announce(self, payload: Frame, berth: Berth | None) -> SendTicket:
        """Take one announcement, or raise as a link whose peer is gone."""
        if self.broken:
            raise LinkBrokenError("the peer is gone")
        self.announced.append((payload, berth))
        self.tickets.append(_Ticket())
        return self.tickets[-1]


class CarrierConformance:
    """Base class of a carrier's test class; see the module."""

    def make_ends(self, num_chunks: int, chunk_bytes: int) -> CarrierEnds:
        """Return two connected ends; the source's pool has `num_chunks` chunks of `chunk_bytes`."""
        raise NotImplementedError

    def setup_method(self) -> None:
        """Make the ends and the list between them."""
        self.ends = self.make_ends(NUM_CHUNKS, CHUNK_BYTES)
        self.link = AnnouncementManager()
        self.numbers = np.random.default_rng(5)

    def send(self, size_bytes: int) -> tuple[bytes, Parcel]:
        """Fill a chunk and send it; return its bytes and the parcel."""
        chunk = self.ends.pool.take(size_bytes)
        assert chunk is not None and chunk.size >= size_bytes
        chunk[:size_bytes] = self.numbers.integers(0, 256, size_bytes, np.uint8)
        sent = chunk[:size_bytes].tobytes()
        return sent, self.ends.source.send(chunk, size_bytes, self.link.announce)

    def until(self, condition: Callable[[], bool]) -> None:
        """Poll until `condition` holds."""
        deadline_s = time.monotonic() + PATIENCE_S
        while not condition():
            self.ends.poll()
            assert time.monotonic() < deadline_s, "the carrier never got there"

    def read(self, number: int) -> bytes:
        """Return the bytes of an announced chunk as the sink sees them."""
        payload, berth = self.link.announced[number]
        return bytes(self.ends.sink.read(memoryview(payload), berth))

    def free(self, number: int) -> None:
        """Let both ends have their memory back: the link has sent the announcement, the sink has read the bytes."""
        self.link.tickets[number].over = True
        _, berth = self.link.announced[number]
        if berth is not None and self.ends.vacate is not None:
            self.ends.vacate((berth.serial,))

    # what arrives

    def test_every_byte_arrives_before_its_announcement(self) -> None:
        for number, size_bytes in enumerate((1, 17, 4096, CHUNK_BYTES)):
            sent, parcel = self.send(size_bytes)
            self.until(parcel.announced)
            assert self.read(number) == sent
            self.free(number)

    def test_announcements_come_in_the_order_of_the_sends(self) -> None:
        sent: list[bytes] = []
        parcels: list[Parcel] = []
        while self.ends.source.room() and len(sent) < NUM_CHUNKS:
            data, parcel = self.send(100 + len(sent))
            sent.append(data)
            parcels.append(parcel)
        self.until(lambda: all(parcel.announced() for parcel in parcels))
        assert len(sent) > 1
        assert [self.read(number) for number in range(len(sent))] == sent

    def test_bytes_stay_until_the_sink_says_that_it_has_read_them(self) -> None:
        sent: list[bytes] = []
        for number in range(4 * NUM_CHUNKS):
            if not self.ends.source.room():
                break
            data, parcel = self.send(CHUNK_BYTES)
            sent.append(data)
            self.until(parcel.announced)
            if self.ends.vacate is not None:
                self.link.tickets[number].over = True
            elif len(sent) == NUM_CHUNKS:
                break
        assert [self.read(number) for number in range(len(sent))] == sent

    # what comes back

    def test_room_comes_back_when_the_sink_has_read(self) -> None:
        for number in range(3 * NUM_CHUNKS):
            assert self.ends.source.room()
            sent, parcel = self.send(CHUNK_BYTES)
            self.until(parcel.announced)
            assert self.read(number) == sent
            self.free(number)

    def test_every_chunk_comes_back_to_the_pool(self) -> None:
        for _ in range(4):
            _, parcel = self.send(10)
            self.until(parcel.announced)
        for number in range(4):
            self.free(number)
        self.until(lambda: self.ends.pool.in_use == 0)
        self.ends.pool.check_integrity()

    # what goes wrong

    def test_a_peer_that_is_gone_is_an_error_and_costs_no_chunk(self) -> None:
        self.link.broken = True
        error = None
        try:
            _, parcel = self.send(10)
            self.until(parcel.announced)
        except LinkBrokenError as broken:
            error = broken
        assert error is not None and "gone" in str(error)
        self.until(lambda: self.ends.pool.in_use == 0)

    def test_a_berth_that_does_not_exist_is_refused(self) -> None:
        for berth in (Berth(index=-1, serial=1, bytes=1), Berth(index=0, serial=1, bytes=1 << 40)):
            refused = False
            try:
                self.ends.sink.read(memoryview(b""), berth)
            except RemoteProtocolError as error:
                refused = "berth" in str(error)
            assert refused

    def test_a_parcel_that_is_dropped_costs_neither_room_nor_chunk(self) -> None:
        for _ in range(2 * NUM_CHUNKS):
            assert self.ends.source.room()
            _, parcel = self.send(10)
            parcel.drop()
            self.until(lambda: self.ends.vacate is None or self.ends.pool.in_use == 0)
            for number in range(len(self.link.announced)):
                if not self.link.tickets[number].over:
                    self.free(number)
        assert self.ends.pool.in_use == 0

    def test_a_lost_peer_ends_parcels_and_further_sends(self) -> None:
        if self.ends.lose is None:
            return
        self.ends.lose("generation rank 3 is gone")
        refused = False
        try:
            self.send(10)
        except LinkBrokenError as error:
            refused = "rank 3" in str(error)
        assert refused and self.ends.pool.in_use == 0
