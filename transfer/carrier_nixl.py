"""The carrier between hosts: NIXL writes whole chunks into registered memory of the peer, by RDMA where there is any.

A generation rank keeps a few *berths* for every context rank, each as large as a chunk, and tells where they are in its
asks. A context rank gathers into registered chunks, writes each with a single descriptor into a free berth, and
announces it over the link once NIXL has reported the write complete. The link's message rather than NIXL's own
notification announces it because it stays in order with the messages around it, the last word above all, and because
it wakes a receiver that sleeps, where notifications would have to be polled for.

No agent has NIXL's progress thread, which spins: it takes up to a core from the model for as long as the process lives,
and on few cores it halves the rate. The sender polls while it has writes under way; the receiver, whose help is needed
by connections and by transports without RDMA, does a little in every turn while requests are open.
"""

from __future__ import annotations

import struct
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from transfer.carrier import Announce
from transfer.messages import Berth
from transfer.nixl_agent import NixlSession, NixlWrite, address_of
from transfer.staging import HostChunkPool
from unikv.errors import LinkBrokenError, LocalProtocolError, RemoteProtocolError, explain

NUM_BERTHS: Final = 4
"""Berths of one context rank at one generation rank: as many chunks as one request may have under way."""
MAX_BERTHS: Final = 1024
_LANDING: Final = struct.Struct("<QIQ")


@dataclass(frozen=True, slots=True, kw_only=True)
class Landing:
    """Where the berths of one context rank are, as it travels in an ask."""

    address: int
    num_berths: int
    berth_bytes: int
    agent: bytes

    def pack(self) -> bytes:
        """Return the wire form."""
        return _LANDING.pack(self.address, self.num_berths, self.berth_bytes) + self.agent

    @staticmethod
    def unpack(data: bytes) -> Landing:
        """Read what `pack` wrote.

        Raises:
            RemoteProtocolError: it is not that.
        """
        if len(data) <= _LANDING.size:
            want = "berths and the agent they are registered with"
            raise RemoteProtocolError(explain("ask", "landing", f"{len(data)} bytes", want, "name berths in every ask"))
        address, num_berths, berth_bytes = _LANDING.unpack_from(data)
        if not (1 <= num_berths <= MAX_BERTHS and berth_bytes >= 1 and address + num_berths * berth_bytes < 1 << 64):
            got, want = f"{num_berths} berths of {berth_bytes} bytes", f"1 to {MAX_BERTHS} that fit into memory"
            raise RemoteProtocolError(explain("ask", "landing", got, want, "correct the ask"))
        return Landing(address=address, num_berths=num_berths, berth_bytes=berth_bytes, agent=data[_LANDING.size :])


class NixlSink:
    """The berths a generation rank keeps for one context rank.

    They stay registered and in place until the session ends, also when that rank is lost: nobody could say that a last
    write of it is over.
    """

    def __init__(self, session: NixlSession, berth_bytes: int, num_berths: int = NUM_BERTHS) -> None:
        self._memory = session.memory(num_berths * berth_bytes)
        self._berth_bytes, self._num_berths = berth_bytes, num_berths
        self.landing = Landing(
            address=address_of(self._memory),
            num_berths=num_berths,
            berth_bytes=berth_bytes,
            agent=session.describe(self._memory),
        ).pack()

    def read(self, payload: memoryview, berth: Berth | None) -> memoryview:
        """Return the bytes in the berth, or the payload where there is none.

        Raises:
            RemoteProtocolError: no such berth, or more bytes than it has.
        """
        if berth is None:
            return payload
        if not 0 <= berth.index < self._num_berths or not 0 <= berth.bytes <= self._berth_bytes:
            got = f"{berth.bytes} bytes in berth {berth.index}"
            want = f"at most {self._berth_bytes} bytes in one of {self._num_berths} berths"
            raise RemoteProtocolError(explain("chunk", "berth", got, want, "the chunk is dropped"))
        first = berth.index * self._berth_bytes
        return self._memory[first : first + berth.bytes].data


class NixlParcel:
    """One chunk on its way into a berth."""

    def __init__(self, write: NixlWrite, chunk: NDArray[np.uint8], berth: Berth, announce: Announce) -> None:
        self.write, self.chunk, self.berth, self.announce = write, chunk, berth, announce
        self.wanted, self.told = True, False
        self.error: LinkBrokenError | None = None

    def announced(self) -> bool:
        """Return whether the peer was told of it. Raises LinkBrokenError as `Parcel`."""
        if self.error is not None:
            raise self.error
        return self.told

    def drop(self) -> None:
        """Do not announce it."""
        self.wanted = False


class NixlSource:
    """Writes chunks into the berths that one peer keeps for us."""

    def __init__(self, session: NixlSession, chunks: HostChunkPool, landing: bytes, serials: Iterator[int]) -> None:
        """Meet the peer.

        Args:
            session: our agent.
            chunks: memory registered with it.
            landing: the berths, as the peer's sink describes them.
            serials: numbers nobody has used before.

        Raises:
            RemoteProtocolError: `landing` is not what a sink describes.
        """
        where = Landing.unpack(landing)
        self.chunks, self._session, self._landing = chunks, session, where
        self._name = session.meet(where.agent)
        self._free = list(range(where.num_berths))
        self._serials, self._held = serials, dict[int, int]()
        self._flying: deque[NixlParcel] = deque()
        self._gone = ""

    @property
    def chunk_bytes(self) -> int:
        """Most bytes of one chunk of several pages."""
        return min(self.chunks.chunk_bytes, self._landing.berth_bytes)

    def room(self) -> bool:
        """Return whether a berth is free, or the peer is gone, which `send` says."""
        return bool(self._free or self._gone)

    def send(self, chunk: NDArray[np.uint8], size_bytes: int, announce: Announce) -> NixlParcel:
        """Start the write; `poll` ends it. Raises as `ChunkSource.send`."""
        try:
            if self._gone:
                raise LinkBrokenError(self._gone)
            if not self._free or size_bytes > self._landing.berth_bytes:
                got = f"{size_bytes} bytes with {len(self._free)} berths free"
                want = f"at most {self._landing.berth_bytes} bytes, and room"
                raise LocalProtocolError(explain("chunk", "berth", got, want, "use one chunk_bytes on both sides"))
            index = self._free.pop()
            address = self._landing.address + index * self._landing.berth_bytes
            write = self._session.write(self._name, chunk, size_bytes, address)
        except BaseException:
            self.chunks.give_back(chunk)
            raise
        parcel = NixlParcel(write, chunk, Berth(index=index, serial=next(self._serials), bytes=size_bytes), announce)
        self._flying.append(parcel)
        self.poll()
        return parcel

    @property
    def flying(self) -> int:
        """Writes under way."""
        return len(self._flying)

    def poll(self) -> bool:
        """Announce what has arrived, in order; return whether a write is under way that somebody waits for."""
        while self._flying and self._ended(self._flying[0]):
            self._flying.popleft()
        return any(parcel.wanted and parcel.error is None for parcel in self._flying)

    def vacate(self, serials: tuple[int, ...]) -> None:
        """The peer has read these berths; they may be written again.

        Raises:
            RemoteProtocolError: it holds nothing under one of the numbers; the others count.
        """
        unknown = [serial for serial in serials if serial not in self._held]
        self._free += [self._held.pop(serial) for serial in {*serials} - {*unknown}]
        if unknown:
            want = "those of chunks it was told of"
            raise RemoteProtocolError(explain("vacated berths", "serials", unknown, want, "vacate each once"))

    def leave(self, reason: str) -> None:
        """The peer is gone: announce nothing, send nothing; writes under way end as they may."""
        self._gone = reason
        for parcel in self._flying:
            parcel.error = parcel.error or LinkBrokenError(reason)

    def part(self) -> None:
        """Forget the peer's agent; no write may be under way."""
        self._session.part(self._name)

    def _ended(self, parcel: NixlParcel) -> bool:
        try:
            if not parcel.write.done():
                return False
        except LinkBrokenError as error:  # its berth is never used again: what is in it is unknown
            parcel.error = parcel.error or error
            self.chunks.give_back(parcel.chunk)
            return True
        self.chunks.give_back(parcel.chunk)
        if parcel.error is not None or not parcel.wanted:
            self._free.append(parcel.berth.index)
            return True
        self._held[parcel.berth.serial] = parcel.berth.index
        try:
            parcel.announce(b"", parcel.berth)
            parcel.told = True
        except LinkBrokenError as error:
            parcel.error = error
        return True
