"""Host chunks that staged paths gather into: a bounded set, each owned by one message at a time."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from transfer.link import SendTicket
from unikv.errors import ConfigError, InternalError, explain


class ChunkPool(Protocol):
    """Where staged moves get their chunks from."""

    chunk_bytes: int

    def take(self, size_bytes: int) -> NDArray[np.uint8] | None:
        """Return a chunk of at least `size_bytes`, or None while all are on their way."""
        ...

    def give_back(self, chunk: NDArray[np.uint8]) -> None:
        """Take `chunk` back at once: nobody reads it."""
        ...

    def give_back_after(self, chunk: NDArray[np.uint8], ticket: SendTicket) -> None:
        """Take `chunk` back once the link no longer reads it."""
        ...


class HostChunkPool:
    """`chunks` host chunks of `chunk_bytes`. A chunk belongs to its taker until it is given back.

    A page larger than a chunk gets a chunk of its own size: pages are never split.
    """

    def __init__(
        self,
        *,
        chunks: int,
        chunk_bytes: int,
        make: Callable[[int], NDArray[np.uint8]] | None = None,
        forget: Callable[[NDArray[np.uint8]], None] | None = None,
    ) -> None:
        """Make the pool; memory is taken when a chunk is first used.

        Args:
            chunks: how many there may be.
            chunk_bytes: bytes of each.
            make: makes the memory of a chunk, for copiers and carriers that cannot reach just any; None for pageable
                memory.
            forget: hears of memory that is traded in for larger one.

        Raises:
            ConfigError: no chunks, or chunks of no bytes.
        """
        if chunks < 1 or chunk_bytes < 1:
            got = f"{chunks} chunks of {chunk_bytes} bytes"
            raise ConfigError(explain("staging", "size", got, "at least one chunk of one byte", "raise chunk_bytes"))
        self.chunk_bytes = chunk_bytes
        self._make, self._forget = make or _pageable, forget
        self._limit = chunks
        self._made = 0
        self._free: list[NDArray[np.uint8]] = []
        self._flying: deque[tuple[NDArray[np.uint8], SendTicket]] = deque()

    @property
    def in_use(self) -> int:
        """Chunks that are out: being filled or being read by the link."""
        self._collect()
        return self._made - len(self._free)

    def take(self, size_bytes: int) -> NDArray[np.uint8] | None:
        """Return a chunk of at least `size_bytes`, or None while all are on their way."""
        self._collect()
        for index, chunk in enumerate(self._free):
            if chunk.size >= size_bytes:
                return self._free.pop(index)
        if self._made < self._limit:
            self._made += 1
            return self._make(max(size_bytes, self.chunk_bytes))
        if self._free:  # every free chunk is too small for this page size: trade one in
            former = self._free.pop()
            if self._forget is not None:
                self._forget(former)
            return self._make(size_bytes)
        return None

    def give_back(self, chunk: NDArray[np.uint8]) -> None:
        """Take `chunk` back at once: nobody reads it."""
        self._free.append(chunk)

    def give_back_after(self, chunk: NDArray[np.uint8], ticket: SendTicket) -> None:
        """Take `chunk` back once the link no longer reads it."""
        self._flying.append((chunk, ticket))

    def check_integrity(self) -> None:
        """Raise InternalError unless made == free + flying + taken, with no chunk counted twice."""
        known = [id(chunk) for chunk in self._free] + [id(chunk) for chunk, _ in self._flying]
        if len(known) != len(set(known)) or len(known) > self._made:
            terms = f"made {self._made}, free {len(self._free)}, flying {len(self._flying)}"
            raise InternalError(f"staging chunks do not add up: {terms}")

    def _collect(self) -> None:
        still: deque[tuple[NDArray[np.uint8], SendTicket]] = deque()
        while self._flying:
            chunk, ticket = self._flying.popleft()
            if ticket.done():
                self._free.append(chunk)
            else:
                still.append((chunk, ticket))
        self._flying = still


def _pageable(size_bytes: int) -> NDArray[np.uint8]:
    return np.empty(size_bytes, dtype=np.uint8)
