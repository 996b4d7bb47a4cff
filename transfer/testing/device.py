"""Twins of a GPU on the host: the engine of a device copier, and a driver whose memory other processes can open.

They do what the real ones promise, with host memory: an allocation is a memory file, its handle says where to find it,
tiles are copied when they are launched. With `HostEngine.hold` copies stay under way until they are let go.
"""

from __future__ import annotations

import ctypes
import os
import struct
from collections.abc import Mapping
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from transfer.copy_tiles import TILE
from transfer.device_bytes import DeviceBytes
from transfer.hello import MemoryExport, StorageCard
from transfer.mapped_storage import MEMFD, MappedStorage
from unikv.cuda_driver import HANDLE_BYTES, CudaError
from unikv.errors import explain

_HANDLE: Final = struct.Struct("<qqQQ")


class HostEngine:
    """`transfer.copy_device.DeviceEngine` on host memory.

    Args:
        tile_vectors: as of a kernel; small numbers give many tiles.
        reaches_everything: whether any host array counts as pinned.
    """

    def __init__(self, *, tile_vectors: int = 256, num_streams: int = 2, reaches_everything: bool = True) -> None:
        self.tile_vectors, self.num_streams = tile_vectors, num_streams
        self.hold = False
        self.launches = 0
        self.waited_for: list[Any] = []
        self.broken = ""
        self._reaches_everything = reaches_everything
        self._pinned: list[tuple[int, int]] = []
        self._held: list[tuple[Any, ...]] = []
        self._open_events: set[int] = set()
        self._last_event = 0

    def adopt_thread(self) -> None:
        """Do nothing: every thread reaches host memory."""

    def reaches(self, array: NDArray[Any]) -> bool:
        """Return whether `array` is memory of `pinned`, or everything may be touched."""
        at = array.__array_interface__["data"][0]
        return self._reaches_everything or any(lo <= at and at + array.nbytes <= hi for lo, hi in self._pinned)

    def pinned(self, size_bytes: int) -> NDArray[np.uint8]:
        """Return host memory."""
        memory = np.zeros(size_bytes, np.uint8)
        at = memory.__array_interface__["data"][0]
        self._pinned.append((at, at + size_bytes))
        return memory

    def allocate(self, size_bytes: int) -> DeviceBytes:
        """Return host memory that counts as the device's."""
        memory = np.zeros(size_bytes, np.uint8)
        return DeviceBytes(pointer=memory.__array_interface__["data"][0], size=size_bytes, keep=memory)

    def copy_in(self, stream: int, target: DeviceBytes, source: NDArray[Any]) -> None:
        """Copy at once."""
        assert source.nbytes <= target.size and stream < self.num_streams
        ctypes.memmove(target.pointer, source.__array_interface__["data"][0], source.nbytes)

    def launch(
        self, stream: int, width: int, tiles: DeviceBytes, rows: tuple[DeviceBytes, int], shifts: tuple[int, int]
    ) -> None:
        """Copy every tile of every page by its definition, or keep the launch back."""
        if self.broken:
            raise RuntimeError(self.broken)
        self.launches += 1
        table = np.frombuffer(ctypes.string_at(tiles.pointer, tiles.size), TILE)
        slots = np.frombuffer(ctypes.string_at(rows[0].pointer, 16 * rows[1]), np.int32).reshape(-1, 4)
        work = (table, slots, width, shifts)
        if self.hold:
            self._held.append(work)
        else:
            _copy(*work)

    def let_go(self) -> None:
        """Carry out what was kept back, and hold nothing from now on."""
        self.hold = False
        held, self._held = self._held, []
        for work in held:
            _copy(*work)
        self._open_events.clear()

    def new_event(self) -> int:
        """Return a number."""
        self._last_event += 1
        return self._last_event

    def record(self, event: Any, stream: int | None) -> None:
        """Let the event happen now, or when copies are let go; the default stream is always idle."""
        if self.hold and stream is not None:
            self._open_events.add(event)
        else:
            self._open_events.discard(event)

    def wait(self, stream: int, event: Any) -> None:
        """Note the event."""
        self.waited_for.append(event)

    def happened(self, event: Any) -> bool:
        """Return whether nothing is held back before the event."""
        if self.broken:
            raise RuntimeError(self.broken)
        return event not in self._open_events

    def elapsed_s(self, start: Any, end: Any) -> float:
        """Return the time of a device that is infinitely fast."""
        return 0.0

    def close(self) -> None:
        """Do nothing."""


def _copy(tiles: NDArray[Any], rows: NDArray[np.int32], width: int, shifts: tuple[int, int]) -> None:
    for tile in tiles:
        numbers = np.arange(int(tile["vectors"]))
        row = numbers * int(tile["magic"]) >> 32 if tile["magic"] else numbers
        column = numbers - row * int(tile["row_vectors"])
        of, to = (row * int(tile[f"{side}_row"]) + column * width for side in ("src", "dst"))
        for src_slot, src_sub, dst_slot, dst_sub in rows.tolist():
            src = int(tile["src"]) + shifts[0] + src_slot * int(tile["src_slot"]) + src_sub * int(tile["src_sub"])
            dst = int(tile["dst"]) + shifts[1] + dst_slot * int(tile["dst_slot"]) + dst_sub * int(tile["dst_sub"])
            for far, near in zip(of.tolist(), to.tolist(), strict=True):
                ctypes.memmove(dst + near, src + far, width)


class HostDriver:
    """`unikv.cuda_driver.DeviceMemoryDriver` on host memory, across processes of one user.

    Args:
        devices: how many there seem to be.
        apart: pairs of devices that cannot touch one another's memory.
    """

    def __init__(self, devices: int = 1, apart: frozenset[tuple[int, int]] = frozenset()) -> None:
        self._devices, self._apart = devices, apart
        self._memory: dict[int, tuple[int, MappedStorage]] = {}
        self._opened: dict[int, MappedStorage] = {}
        self.opened_ever = 0

    @property
    def open_handles(self) -> int:
        """How many allocations of others are mapped now."""
        return len(self._opened)

    @property
    def allocations(self) -> int:
        """How many allocations of our own exist."""
        return len(self._memory)

    def device_count(self) -> int:
        """Return how many devices there seem to be."""
        return self._devices

    def uuid(self, device: int) -> str:
        """Return a name that is the same in every process."""
        return f"{device:032x}"

    def can_access(self, device: int, peer: int) -> bool:
        """Return whether the pair is not apart."""
        return (device, peer) not in self._apart

    def enable_access(self, device: int, peer: int) -> None:
        """Check that it is possible."""
        if not self.can_access(device, peer):
            raise CudaError(explain("host driver", "peer", peer, f"one that {device} can access", "stage"))

    def allocate(self, device: int, size_bytes: int) -> int:
        """Return the address of a new memory file."""
        fd = os.memfd_create("unikv-twin")
        os.ftruncate(fd, size_bytes)
        export = MemoryExport(kind=MEMFD, pid=os.getpid(), fd=fd, inode=os.fstat(fd).st_ino)
        storage = MappedStorage(StorageCard(size_bytes=size_bytes, export=export))
        pointer = int(storage.array.__array_interface__["data"][0])
        self._memory[pointer] = fd, storage
        return pointer

    def free(self, device: int, pointer: int) -> None:
        """Give the memory back."""
        fd, storage = self._memory.pop(pointer)
        storage.close()
        os.close(fd)

    def handle_of(self, device: int, pointer: int) -> tuple[bytes, int]:
        """Return process, descriptor, inode and size, and the offset of `pointer` in its allocation."""
        for base, (fd, storage) in self._memory.items():
            if base <= pointer < base + storage.array.size:
                packed = _HANDLE.pack(os.getpid(), fd, os.fstat(fd).st_ino, storage.array.size)
                return packed.ljust(HANDLE_BYTES, b"\0"), pointer - base
        raise CudaError(explain("host driver", "pointer", pointer, "an allocation", "allocate it here"))

    def size_of(self, device: int, pointer: int) -> int:
        """Return the size of what begins at `pointer`."""
        found = self._opened.get(pointer) or self._memory[pointer][1]
        return int(found.array.size)

    def open_handle(self, device: int, handle: bytes) -> int:
        """Map the memory file the handle names."""
        pid, fd, inode, size_bytes = _HANDLE.unpack_from(handle)
        if pid == os.getpid():
            raise CudaError(explain("host driver", "handle", "our own", "another process's", "use the pointer"))
        export = MemoryExport(kind=MEMFD, pid=pid, fd=fd, inode=inode)
        storage = MappedStorage(StorageCard(size_bytes=size_bytes, export=export))
        pointer = int(storage.array.__array_interface__["data"][0])
        self._opened[pointer] = storage
        self.opened_ever += 1
        return pointer

    def close_handle(self, device: int, pointer: int) -> None:
        """Unmap."""
        self._opened.pop(pointer).close()


def host_view(memory: DeviceBytes | Mapping[str, Any]) -> NDArray[np.uint8]:
    """Return twin memory as an array, to fill and to look at."""
    assert isinstance(memory, DeviceBytes)
    cells: Any = (ctypes.c_uint8 * memory.size).from_address(memory.pointer)
    cells.keep = memory.keep
    return np.ctypeslib.as_array(cells)
