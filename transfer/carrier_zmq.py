"""The carrier every pair of ranks has: chunks travel inside the messages of the link."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from transfer.carrier import Announce
from transfer.messages import Berth
from transfer.staging import HostChunkPool
from unikv.errors import RemoteProtocolError, explain


class _Sent:
    """A parcel that was announced the moment it was sent."""

    def announced(self) -> bool:
        """Return True: the message is queued."""
        return True

    def drop(self) -> None:
        """Do nothing: it cannot be taken back."""


class LinkSource:
    """Sends chunks as payloads of messages. The pool may be shared by the sources of all peers."""

    def __init__(self, chunks: HostChunkPool) -> None:
        self.chunks = chunks

    @property
    def chunk_bytes(self) -> int:
        """Most bytes of one chunk of several pages."""
        return self.chunks.chunk_bytes

    def room(self) -> bool:
        """Return True: the link queues."""
        return True

    def send(self, chunk: NDArray[np.uint8], size_bytes: int, announce: Announce) -> _Sent:
        """Send the chunk with its announcement; it goes back to the pool once the link no longer reads it.

        Raises:
            LinkBrokenError: the peer is gone.
        """
        try:
            ticket = announce(chunk[:size_bytes].data, None)
        except BaseException:
            self.chunks.give_back(chunk)
            raise
        self.chunks.give_back_after(chunk, ticket)
        return _Sent()


class LinkSink:
    """Takes chunks out of messages."""

    def read(self, payload: memoryview, berth: Berth | None) -> memoryview:
        """Return the payload itself.

        Raises:
            RemoteProtocolError: the bytes are said to be elsewhere.
        """
        if berth is not None:
            cure = "send chunks with their message"
            raise RemoteProtocolError(explain("chunk", "berth", berth.index, "none on this path", cure))
        return payload
