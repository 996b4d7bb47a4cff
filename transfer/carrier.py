"""A carrier brings staged chunks from one rank's memory to another's: what every one of them promises.

A context rank has a `ChunkSource` per peer, a generation rank a `ChunkSink`. Between them is a link for messages, which
carriers do not know: a source is told how to announce a chunk, and announces each one once its bytes can be read.
`transfer.testing.carrier` has the conformance suite.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from transfer.link import Frame, SendTicket
from transfer.messages import Berth
from transfer.staging import ChunkPool

Announce = Callable[[Frame, Berth | None], SendTicket]
"""Tells the peer of a chunk: its bytes (empty where they went another way), and the berth they are in (or None).

Raises LinkBrokenError where the peer is gone.
"""


class Parcel(Protocol):
    """One chunk on its way."""

    def announced(self) -> bool:
        """Return whether the peer was told of it.

        Raises:
            LinkBrokenError: it was not and will not be: the bytes did not arrive, or the peer is gone.
        """
        ...

    def drop(self) -> None:
        """Do not announce it if that is not done yet: nobody wants the bytes. Its memory is looked after."""
        ...


class ChunkSource(Protocol):
    """The sending end towards one peer. Used by one thread, which polls its manager while parcels are under way."""

    @property
    def chunks(self) -> ChunkPool:
        """Where the memory of chunks comes from; a source sends no other."""
        ...

    @property
    def chunk_bytes(self) -> int:
        """Most bytes of one chunk of several pages."""
        ...

    def room(self) -> bool:
        """Return whether the peer has a place for one more chunk now."""
        ...

    def send(self, chunk: NDArray[np.uint8], size_bytes: int, announce: Announce) -> Parcel:
        """Bring the first `size_bytes` of `chunk` to the peer, and `announce` them then, in the order of the sends.

        The chunk belongs to the source from now on, also where this raises; it goes back to the pool by itself.

        Raises:
            LinkBrokenError: the peer is gone.
            LocalProtocolError: there is no room, or the chunk is larger than a place at the peer.
        """
        ...


class ChunkSink(Protocol):
    """The receiving end of one rank."""

    def read(self, payload: memoryview, berth: Berth | None) -> memoryview:
        """Return the bytes of an announced chunk; they stay as they are until the berth is vacated.

        Raises:
            RemoteProtocolError: there is no such berth, or the chunk does not fit it.
        """
        ...
