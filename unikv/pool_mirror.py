"""Pages of pools as arrays the host can read and write, wherever the pools are.

On a CPU the arrays are the pools. On a device they are a mirror of the pools' size in host memory, made at the first
use: `pull` brings slots over, `push` takes what was written there back. For filling and checking, not for serving.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from unikv.buffers import PoolStorage, Tensor
from unikv.ids import NO_PAGE, GroupId
from unikv.layout import CacheLayout, PoolLayout

Slots = NDArray[np.int32]
"""Slots of one layer group: int32, ``[n]``."""


class PoolMirror:
    """The bytes of one manager's pools, as the host sees them. Borrows the pools.

    Attributes:
        on_host: the arrays are the pools themselves, so that `pull` and `push` have nothing to do.
    """

    def __init__(self, layout: CacheLayout, pools: PoolStorage) -> None:
        """Look at `pools`, whose layout is `layout`; nothing is copied yet."""
        self._layout, self._pools = layout, pools
        self.on_host = pools.device.type == "cpu"

    @cached_property
    def arrays(self) -> tuple[NDArray[np.uint8], ...]:
        """One-dimensional arrays, one per storage."""
        if self.on_host:
            return tuple(self._pools.numpy(number) for number in range(len(self._pools.storages)))
        return tuple(np.zeros(storage.numel(), dtype=np.uint8) for storage in self._pools.storages)

    def pull(self, tables: Mapping[GroupId, Slots]) -> None:
        """Make the arrays show what is in these slots now; waits for the device's default stream."""
        for pool, slots, mirror in self._rows(tables):
            mirror[slots] = self._device_rows(pool).index_select(0, self._index(slots)).cpu().numpy()

    def push(self, tables: Mapping[GroupId, Slots]) -> None:
        """Write what the arrays show of these slots to the pools, on the device's default stream."""
        for pool, slots, mirror in self._rows(tables):
            rows = torch.from_numpy(mirror[slots]).to(self._pools.device)
            self._device_rows(pool).index_copy_(0, self._index(slots), rows)

    def push_all(self) -> None:
        """Write everything the arrays show to the pools."""
        if not self.on_host:
            for storage, array in zip(self._pools.storages, self.arrays, strict=True):
                storage.copy_(torch.from_numpy(array))

    def mark(self) -> Any:
        """Return an event behind everything that was pushed, None on a CPU, where it is there at once."""
        if self.on_host:
            return None
        event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        event.record(torch.cuda.current_stream(self._pools.device))
        return event

    def _rows(self, tables: Mapping[GroupId, Slots]) -> list[tuple[PoolLayout, Slots, NDArray[np.uint8]]]:
        if self.on_host:
            return []
        found = []
        for group_id, table in tables.items():
            slots = table[table != NO_PAGE]
            for pool in self._layout.group(group_id).pools if len(slots) else ():
                array = self.arrays[self._pools.storage_of(group_id, pool.index)]
                found.append((pool, slots, array.reshape(-1, pool.slot_bytes)))
        return found

    def _device_rows(self, pool: PoolLayout) -> Tensor:
        return self._pools.storages[self._pools.storage_of(pool.group_id, pool.index)].view(-1, pool.slot_bytes)

    def _index(self, slots: Slots) -> Tensor:
        return torch.from_numpy(slots.astype(np.int64)).to(self._pools.device)
