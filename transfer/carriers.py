"""The carriers of one rank, each made when a pair of ranks first takes its path."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from itertools import count
from typing import Final

import numpy as np
from numpy.typing import NDArray

from transfer.carrier import ChunkSink, ChunkSource
from transfer.carrier_nixl import NixlSink, NixlSource
from transfer.carrier_zmq import LinkSink, LinkSource
from transfer.exchange import PeerKey
from transfer.generation_peers import ContextPeer
from transfer.hello import PathKind, RankCard
from transfer.messages import Chunk
from transfer.nixl_agent import NixlSession
from transfer.options import TransferOptions
from transfer.staging import HostChunkPool
from transfer.wire import MAX_PAYLOAD_BYTES
from unikv.errors import LinkBrokenError, RemoteProtocolError, explain

PROGRESS_S: Final = 0.0005
"""Longest sleep of a rank whose peers write into berths of its own, while requests are open."""


class SourceManager:
    """The sending ends of a context rank.

    Attributes:
        chunks: staging chunks of all moves whose chunks go over the link.
    """

    def __init__(
        self, options: TransferOptions, name: str, make: Callable[[int], NDArray[np.uint8]] | None = None
    ) -> None:
        """Make them; what needs memory or threads waits for the first peer that wants it.

        Args:
            options: sizes and numbers of chunks.
            name: of the rank, for logs.
            make: makes the memory of chunks, where the rank's copier cannot reach just any.
        """
        self._options, self._name, self._make = options, name, make
        self.chunks = HostChunkPool(chunks=options.staging_chunks, chunk_bytes=_chunk_bytes(options), make=make)
        self._link = LinkSource(self.chunks)
        self._session: NixlSession | None = None
        self._registered: HostChunkPool | None = None
        self._sources: dict[PeerKey, tuple[bytes, NixlSource]] = {}
        self._left: dict[PeerKey, NixlSource] = {}
        self._serials = count(1)

    def source(self, key: PeerKey, path: PathKind, landing: bytes) -> ChunkSource:
        """Return the end that brings chunks to a peer.

        Args:
            key: the peer.
            path: the staged path it is on.
            landing: where its berths are, from its ask.

        Raises:
            RemoteProtocolError: the landing is none, or another one than before.
            LinkBrokenError: writes of the peer's former connection are still under way.
            ConfigError: NIXL does not start.
        """
        if path is not PathKind.NIXL or not landing:  # no berths: nothing will come, or it may come in messages
            return self._link
        self._let_go()
        if key in self._left:
            raise LinkBrokenError(f"generation rank {key[1]} came back while chunks were on their way to its berths")
        known = self._sources.get(key)
        if known is None:
            session, chunks = self._open()
            known = self._sources[key] = landing, NixlSource(session, chunks, landing, self._serials)
        if known[0] != landing:
            want = "the berths of its first ask"
            raise RemoteProtocolError(explain(f"generation rank {key[1]}", "landing", "others", want, "keep them"))
        return known[1]

    def vacate(self, key: PeerKey, serials: tuple[int, ...]) -> None:
        """A peer has read what was in these berths.

        Raises:
            RemoteProtocolError: it was never told of one of them.
        """
        if key not in self._sources:
            want = "a peer whose chunks have berths"
            raise RemoteProtocolError(explain("vacated berths", "sender", f"rank {key[1]}", want, "say it once"))
        self._sources[key][1].vacate(serials)

    def leave(self, key: PeerKey, reason: str) -> None:
        """A peer is lost; it is forgotten once no write to it is under way."""
        _, source = self._sources.pop(key, (b"", None))
        if source is not None:
            source.leave(reason)
            self._left[key] = source

    def poll(self) -> bool:
        """Announce what has arrived; return whether anything is under way that somebody waits for."""
        flying = False
        for _, source in self._sources.values():
            flying |= source.poll()
        return self._let_go() or flying

    def _let_go(self) -> bool:
        """Forget who left and has nothing under way; return whether somebody waits for what is."""
        wanted = False
        for key, source in list(self._left.items()):
            wanted |= source.poll()
            if not source.flying:
                del self._left[key]
                source.part()
        return wanted

    def close(self) -> None:
        """Give everything up."""
        self._sources.clear()
        self._left.clear()
        if self._session is not None:
            self._session.close()
            self._session = self._registered = None

    def _open(self) -> tuple[NixlSession, HostChunkPool]:
        if self._session is None or self._registered is None:
            make = self._make
            self._session = session = NixlSession(self._name)
            self._registered = HostChunkPool(
                chunks=self._options.staging_chunks,
                chunk_bytes=_chunk_bytes(self._options),
                make=session.memory if make is None else lambda size_bytes: session.register(make(size_bytes)),
                forget=session.forget,
            )
        return self._session, self._registered


class SinkManager:
    """The receiving ends of a generation rank."""

    def __init__(self, options: TransferOptions, card: RankCard) -> None:
        self._options, self._name = options, f"generation-{card.instance}-{card.rank}"
        self._link = LinkSink()
        self._session: NixlSession | None = None
        self._sinks: dict[PeerKey, NixlSink] = {}

    def landing(self, peer: ContextPeer) -> bytes:
        """Return what asks to `peer` say about berths: nothing where its chunks come in messages.

        Raises:
            ConfigError: NIXL does not start.
        """
        if peer.path is not PathKind.NIXL or not peer.program.pairs:
            return b""
        if peer.key not in self._sinks:
            self._session = self._session or NixlSession(self._name)
            largest = max(pair.page_bytes for pair in peer.program.pairs)
            self._sinks[peer.key] = NixlSink(self._session, max(_chunk_bytes(self._options), largest))
        return self._sinks[peer.key].landing

    @property
    def longest_sleep_s(self) -> float:
        """How long the rank may sleep while requests are open."""
        return PROGRESS_S if self._session is not None else math.inf

    def progress(self) -> None:
        """Do what peers need of us to write; to be called in every turn."""
        if self._session is not None:
            self._session.progress()

    def read(self, chunk: Chunk, key: PeerKey) -> Chunk:
        """Return `chunk` with its bytes as payload, wherever they are.

        Raises:
            RemoteProtocolError: they are nowhere.
        """
        sink: ChunkSink = self._sinks.get(key, self._link)
        return replace(chunk, payload=sink.read(chunk.payload, chunk.berth))

    def close(self) -> None:
        """Give everything up."""
        self._sinks.clear()
        if self._session is not None:
            self._session.close()
            self._session = None


def _chunk_bytes(options: TransferOptions) -> int:
    return min(options.chunk_bytes, MAX_PAYLOAD_BYTES)
