"""The memory of the pools, and tensors that look into it. The only module of the manager that knows torch.

One storage per (pool group, pool), all slots one behind the other::

    storage   | slot 0 (null) | slot 1 | ... | slot N-1 |        N * slot_bytes bytes, base aligned to 256 bytes

On a CPU a storage is a memfd: shared memory without a name in any file system. Another process of the same user maps
it through ``/proc/<pid>/fd/<fd>``, and when the last process that has it open or mapped is gone, however it went, the
kernel takes the memory back. On CUDA a storage is an allocation of its own, outside torch's caching allocator, so that
its base is known and other processes can open it (`unikv/cuda_driver.py`).
"""

from __future__ import annotations

import fcntl
import mmap
import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from unikv.cuda_driver import CudaAllocation, CudaError, driver
from unikv.errors import LocalProtocolError, SpecError, explain
from unikv.geometry import TensorGeometry
from unikv.ids import GroupId
from unikv.layout import CacheLayout

__all__ = ["BASE_ALIGNMENT_BYTES", "CudaExport", "MemfdExport", "PoolStorage", "Tensor", "device_count", "parse_device"]

BASE_ALIGNMENT_BYTES: Final = 256
"""Every storage starts at a multiple of this: enough for the widest vector loads and for CUDA IPC."""

_TORCH_DTYPES: Final = {
    "float32": torch.float32,
    "float16": torch.float16,
    "bfloat16": torch.bfloat16,
    "float8_e4m3fn": torch.float8_e4m3fn,
    "uint8": torch.uint8,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class MemfdExport:
    """Where another process of the same user finds one storage: open ``/proc/<pid>/fd/<fd>`` and map it.

    Attributes:
        pid: process that owns the storage.
        fd: its descriptor there.
        inode: what the opened file must have as its inode number; a number may have been closed and given to
            another file in the meantime.
        size_bytes: bytes of the storage.
    """

    pid: int
    fd: int
    inode: int
    size_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class CudaExport:
    """How another process of the same host opens one storage: the allocation by its handle, the storage in it.

    Attributes:
        pid: process that owns the storage.
        handle: 64 bytes that CUDA opens the allocation by.
        offset_bytes: where in the allocation the storage begins.
        device_uuid: the device that holds it, named alike in every process.
        size_bytes: bytes of the storage.
    """

    pid: int
    handle: bytes
    offset_bytes: int
    device_uuid: str
    size_bytes: int


class PoolStorage:
    """Memory of all pool groups of one manager, zeroed, fixed in size and place for the life of the manager.

    Tensors and arrays handed out share this memory. After `close` they stay usable, and each storage goes back to the
    system with the last one that looks into it; nobody else can find the memory any more by then.
    """

    def __init__(self, layout: CacheLayout, slots_per_pool_group: Sequence[int], *, device: str = "cpu") -> None:
        """Allocate the pools.

        Args:
            layout: groups and pools; groups with one pool group share its storages.
            slots_per_pool_group: slots of each pool group, the null slot included.
            device: "cpu", "cuda" or "cuda:<index>".

        Raises:
            SpecError: the device is none of these, or the memory cannot be had; what was allocated is freed again.
        """
        self.device = parse_device(device)
        self._numbers: dict[tuple[GroupId, int], int] = {}
        self._slot_bytes: list[int] = []
        self._memfds: list[int] = []
        self._allocations: list[CudaAllocation] = []
        self._storages: tuple[Tensor, ...] | None = ()
        try:
            self._allocate(layout, slots_per_pool_group)
        except BaseException:
            self.close()
            raise

    @property
    def storages(self) -> tuple[Tensor, ...]:
        """One-dimensional uint8 tensors, one per (pool group, pool).

        Raises:
            LocalProtocolError: the storage is closed.
        """
        if self._storages is None:
            raise LocalProtocolError(
                explain("pool storage", "state", "closed", "open", "use it before the manager closes")
            )
        return self._storages

    def storage_of(self, group_id: GroupId, pool_index: int) -> int:
        """Return the number of the storage that holds pool `pool_index` of a layer group."""
        return self._numbers[group_id, pool_index]

    def slot_stride_bytes(self, storage: int) -> int:
        """Return the distance between two slots of a storage."""
        return self._slot_bytes[storage]

    def exports(self) -> tuple[MemfdExport | CudaExport, ...]:
        """Return how another process maps each storage.

        Raises:
            LocalProtocolError: the storage is closed.
            CudaError: the device's driver gives no handles.
        """
        if self.device.type == "cuda":
            return tuple(self._cuda_export(number) for number in range(len(self.storages)))
        return tuple(
            MemfdExport(pid=os.getpid(), fd=fd, inode=os.fstat(fd).st_ino, size_bytes=tensor.numel())
            for fd, tensor in zip(self._memfds, self.storages, strict=True)
        )

    def _cuda_export(self, storage: int) -> CudaExport:
        memory = self._allocations[storage]
        handle, offset_bytes = memory.export()
        return CudaExport(
            pid=os.getpid(),
            handle=handle,
            offset_bytes=offset_bytes,
            device_uuid=driver().uuid(memory.device),
            size_bytes=memory.size_bytes,
        )

    def numpy(self, storage: int) -> NDArray[np.uint8]:
        """Return a storage as a writable ``[N * slot_bytes]`` array over the same memory.

        Raises:
            SpecError: the storage is not in host memory.
            LocalProtocolError: the storage is closed.
        """
        tensor = self.storages[storage]
        if tensor.device.type != "cpu":
            raise SpecError(explain("pool storage", "device", str(self.device), "cpu", "use `storages` on a device"))
        array: NDArray[np.uint8] = tensor.numpy()
        return array

    def tensor(self, geometry: TensorGeometry) -> Tensor:
        """Return the tensor that `geometry` describes, over the pool it names; it shares the memory.

        Packed NVFP4 data is uint8. float8 tensors cannot be filled by index on every device: fill a uint8 view of them.

        Raises:
            LocalProtocolError: the storage is closed.
        """
        storage = self.storages[self.storage_of(geometry.group_id, geometry.pool_index)]
        typed = storage.view(_TORCH_DTYPES[geometry.dtype])
        return typed.as_strided(geometry.shape, geometry.strides, geometry.storage_offset)

    def close(self) -> None:
        """Let go of the memory and close its descriptors. Safe to call twice."""
        self._storages = None
        self._allocations.clear()
        while self._memfds:
            os.close(self._memfds.pop())

    def _allocate(self, layout: CacheLayout, slots_per_pool_group: Sequence[int]) -> None:
        tensors: list[Tensor] = []
        first_of_pool_group: dict[int, int] = {}
        for group in layout.groups:
            if group.pool_group not in first_of_pool_group:
                first_of_pool_group[group.pool_group] = len(tensors)
                num_slots = slots_per_pool_group[group.pool_group]
                self._slot_bytes += [pool.slot_bytes for pool in group.pools]
                tensors += [self._zeroed(num_slots * pool.slot_bytes) for pool in group.pools]
            first = first_of_pool_group[group.pool_group]
            self._numbers |= {(group.group_id, pool.index): first + pool.index for pool in group.pools}
        self._storages = tuple(tensors)

    def _zeroed(self, size_bytes: int) -> Tensor:
        try:
            tensor = self._zeroed_memfd(size_bytes) if self.device.type == "cpu" else self._zeroed_device(size_bytes)
        except (OSError, OverflowError, CudaError, torch.OutOfMemoryError) as error:
            thing = f"pool storage on {self.device}"
            cure = f"choose a smaller pool ({error})"
            raise SpecError(explain(thing, "size_bytes", size_bytes, "memory that is free", cure)) from error
        if tensor.data_ptr() % BASE_ALIGNMENT_BYTES:
            want = f"a multiple of {BASE_ALIGNMENT_BYTES}"
            raise SpecError(explain("pool storage", "base address", tensor.data_ptr(), want, "report the torch build"))
        return tensor

    def _zeroed_memfd(self, size_bytes: int) -> Tensor:
        fd = os.memfd_create("unikv-pool", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        self._memfds.append(fd)
        os.ftruncate(fd, size_bytes)
        # A peer that maps the pool must not be able to shorten it under us: touching the lost part is a SIGBUS.
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL)
        # Populated now, so that the first transfer does not pay for the page faults.
        memory = mmap.mmap(fd, size_bytes, flags=mmap.MAP_SHARED | mmap.MAP_POPULATE)
        # The tensor keeps the mapping alive, and the mapping is never closed by hand: torch gives the buffer back at
        # once and goes on using the address, so a closed mapping would turn every view into a crash.
        return torch.frombuffer(memory, dtype=torch.uint8)

    def _zeroed_device(self, size_bytes: int) -> Tensor:
        device = torch.device("cuda", self.device.index or 0)
        with torch.cuda.device(device):
            memory = CudaAllocation(device.index, size_bytes)
            self._allocations.append(memory)
            tensor = torch.as_tensor(memory, device=device)  # keeps `memory` alive
            tensor.zero_()
            torch.cuda.synchronize(device)  # peers may write from now on
        return tensor


def device_count() -> int:
    """Return how many CUDA devices torch finds; 0 without CUDA."""
    return torch.cuda.device_count()


def parse_device(device: str) -> torch.device:
    """Return the torch device of a text: "cpu", "cuda" or "cuda:<index>".

    Raises:
        SpecError: any other text, or CUDA where torch finds none.
    """
    kind, _, index = device.partition(":")
    if device not in ("cpu", "cuda") and not (kind == "cuda" and index.isdecimal()):
        raise SpecError(explain("pool storage", "device", device, '"cpu", "cuda" or "cuda:<index>"', "name a device"))
    if kind == "cuda" and int(index or 0) >= torch.cuda.device_count():
        got = f"{device} of {torch.cuda.device_count()} CUDA device(s)"
        raise SpecError(
            explain("pool storage", "device", got, "a device torch finds", "use one that exists, or the cpu")
        )
    return torch.device(device)
