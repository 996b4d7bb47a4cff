"""The host's copies of pages: where idle ones go instead of being dropped, and suspended ones to make room.

One host pool per pool of every pool group. On CUDA the host memory is pinned, and copies run on a stream of their own,
ordered by events: a copy waits for what the current stream has been given before, and the current stream waits for the
copy. So a slot that was stored may be handed out at once, and a slot that was loaded may be used at once.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch

from unikv.buffers import PoolStorage, Tensor
from unikv.cold_codec import ColdCodec, choose_codec
from unikv.errors import SpecError, explain
from unikv.host_tier_options import HostTierOptions
from unikv.layout import CacheLayout, PoolLayout
from unikv.page_moves import Moves, PageMove


class HostTier:
    """Host memory for pages of one manager. The page cache decides what goes in and out."""

    def __init__(self, layout: CacheLayout, pools: PoolStorage, options: HostTierOptions) -> None:
        """Allocate the host memory.

        Args:
            layout: groups and pools.
            pools: the device memory; borrowed.
            options: size and codec.

        Raises:
            SpecError: the codec cannot take these layers, or the memory cannot be had.
        """
        self._layout, self._pools = layout, pools
        self._codec: ColdCodec = choose_codec(options.codec, layout)
        sizes = self._sizes()
        self._slots = _num_pages(options, sum(sizes.values()))
        self._on_cuda = pools.device.type == "cuda"
        self._stream = torch.cuda.Stream(pools.device) if self._on_cuda else None  # type: ignore[no-untyped-call]
        self._memory = {key: self._allocate(size) for key, size in sizes.items()}

    def num_slots(self, pool_group: int) -> int:
        """Return how many pages of a pool group fit."""
        return self._slots

    @property
    def size_bytes(self) -> int:
        """Bytes of host memory."""
        return sum(memory.numel() for memory in self._memory.values())

    def store(self, moves: Moves) -> None:
        """Copy pages from device slots to host slots; the device slots may be written again at once."""
        with self._beside():
            for pool, pages in self._pool_moves(moves):
                sources = torch.tensor([move.source for move in pages], device=self._pools.device)
                rows = self._codec.encode(pool, self._device(pool).index_select(0, sources))
                self._put(self._host(pool), [move.target for move in pages], rows)

    def load(self, moves: Moves) -> None:
        """Copy pages from host slots to device slots; what is queued next on the device sees them."""
        with self._beside():
            for pool, pages in self._pool_moves(moves):
                rows = self._get(self._host(pool), [move.source for move in pages])
                targets = torch.tensor([move.target for move in pages], device=self._pools.device)
                self._device(pool).index_copy_(0, targets, self._codec.decode(pool, rows))

    def close(self) -> None:
        """Give the memory back. Idempotent."""
        if self._stream is not None:
            self._stream.synchronize()
        self._memory = {}

    def _sizes(self) -> dict[tuple[int, int], int]:
        """Return the row bytes of each (pool group, pool): the most that any of its layer groups needs."""
        sizes: dict[tuple[int, int], int] = {}
        for group in self._layout.groups:
            for pool in group.pools:
                key = group.pool_group, pool.index
                sizes[key] = max(sizes.get(key, 0), self._codec.row_bytes(pool))
        return sizes

    def _allocate(self, row_bytes: int) -> Tensor:
        try:
            return torch.zeros((self._slots, row_bytes), dtype=torch.uint8, pin_memory=self._on_cuda)
        except (RuntimeError, MemoryError) as error:
            got = f"{self._slots} pages of {row_bytes} bytes"
            want = "memory the host has" + (" and lets us pin" if self._on_cuda else "")
            raise SpecError(explain("host tier", "size", got, f"{want} ({error})", "ask for fewer pages")) from error

    def _pool_moves(self, moves: Moves) -> Iterator[tuple[PoolLayout, Sequence[PageMove]]]:
        for group_id, pages in moves.items():
            if pages:
                yield from ((pool, pages) for pool in self._layout.group(group_id).pools)

    def _device(self, pool: PoolLayout) -> Tensor:
        return self._pools.storages[self._pools.storage_of(pool.group_id, pool.index)].view(-1, pool.slot_bytes)

    def _host(self, pool: PoolLayout) -> Tensor:
        memory = self._memory[self._layout.group(pool.group_id).pool_group, pool.index]
        return memory[:, : self._codec.row_bytes(pool)]

    def _put(self, host: Tensor, targets: Sequence[int], rows: Tensor) -> None:
        """Write `rows` to the host slots `targets`; on CUDA one asynchronous copy per run of neighbouring slots."""
        if not self._on_cuda:
            host[list(targets)] = rows
            return
        for first, count in _runs(targets):
            start = targets[first]
            host[start : start + count].copy_(rows[first : first + count], non_blocking=True)

    def _get(self, host: Tensor, sources: Sequence[int]) -> Tensor:
        """Return the host slots `sources` on the device."""
        if not self._on_cuda:
            return host[list(sources)]
        rows = torch.empty((len(sources), host.shape[1]), dtype=torch.uint8, device=self._pools.device)
        for first, count in _runs(sources):
            start = sources[first]
            rows[first : first + count].copy_(host[start : start + count], non_blocking=True)
        return rows

    @contextmanager
    def _beside(self) -> Iterator[None]:
        """Run on the side stream, after what the current stream was given, and before what it is given next."""
        if self._stream is None:
            yield
            return
        current = torch.cuda.current_stream(self._pools.device)
        self._stream.wait_stream(current)
        with torch.cuda.stream(self._stream):
            yield
        current.wait_stream(self._stream)


def _num_pages(options: HostTierOptions, page_bytes: int) -> int:
    """Return the pages of every pool group; `page_bytes` is what one page in each of them takes."""
    if options.pages is not None:
        return options.pages
    assert options.bytes is not None  # checked on construction
    if options.bytes < page_bytes:
        want = f">= {page_bytes}, one page of every pool group"
        raise SpecError(explain("host tier", "bytes", options.bytes, want, "give it more, or leave it out"))
    return options.bytes // page_bytes


def _runs(slots: Sequence[int]) -> Iterator[tuple[int, int]]:
    """Yield (first index, count) of every run of slots that follow one another."""
    first = 0
    for index in range(1, len(slots) + 1):
        if index == len(slots) or slots[index] != slots[index - 1] + 1:
            yield first, index - first
            first = index
