"""GPU memory of a peer process on the same host, mapped for kernels on a GPU of ours (CUDA IPC).

A handle opens a whole allocation, which may hold several storages; so mappings are shared, counted, and end with their
last user. Memory of this very process is not opened (CUDA refuses that): its pointer serves.

A mapping outlives the process whose memory it is: a copy that runs while the peer dies lands in memory of nobody.
Whoever holds a `MappedDeviceStorage` closes it when no copy into it runs any more.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass
from functools import cache
from typing import Final

from transfer.device_bytes import DeviceBytes
from transfer.hello import MemoryExport, StorageCard
from unikv.cuda_driver import HANDLE_BYTES, CudaError, driver, own_allocation
from unikv.errors import LinkBrokenError, LocalProtocolError, RemoteProtocolError, explain

CUDA: Final = "cuda"
"""The kind of export this module maps."""

Key = tuple[str, int, bytes]
"""(incarnation of the peer, our device, handle): a handle alone might be another process's by now."""


@dataclass(slots=True)
class _Mapping:
    pointer: int
    users: int


class IpcMappingManager:
    """The allocations of peers that are mapped in this process. Safe from any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._mappings: dict[Key, _Mapping] = {}

    def __len__(self) -> int:
        return len(self._mappings)

    def take(self, key: Key) -> int:
        """Return where the base of the allocation is mapped, and count one more user.

        Raises:
            CudaError: it cannot be opened.
        """
        with self._lock:
            mapping = self._mappings.get(key)
            if mapping is None:
                mapping = self._mappings[key] = _Mapping(driver().open_handle(key[1], key[2]), 0)
            mapping.users += 1
            return mapping.pointer

    def give_back(self, key: Key) -> None:
        """Count one user less; the last one closes the mapping."""
        with self._lock:
            mapping = self._mappings[key]
            mapping.users -= 1
            if not mapping.users:
                del self._mappings[key]
                driver().close_handle(key[1], mapping.pointer)


@cache
def ipc_mappings() -> IpcMappingManager:
    """Return the mappings of this process."""
    return IpcMappingManager()


class MappedDeviceStorage:
    """One storage of a peer, as bytes that kernels on one of our devices can write."""

    def __init__(self, storage: StorageCard, *, incarnation: str, device: int, thing: str = "storage") -> None:
        """Map `storage`.

        Args:
            storage: the peer's card of one storage.
            incarnation: the peer's.
            device: number of our device whose kernels write.
            thing: what error messages call it.

        Raises:
            RemoteProtocolError: the card offers no GPU memory, or less than it says.
            LinkBrokenError: it cannot be opened: the peer is gone, or the devices cannot reach one another.
        """
        export = storage.export
        if export is None or export.kind != CUDA or len(export.handle) != HANDLE_BYTES:
            got = None if export is None else f"{export.kind} with a handle of {len(export.handle)} bytes"
            want = f"{CUDA} with a handle of {HANDLE_BYTES} bytes"
            raise RemoteProtocolError(explain(thing, "export", got, want, "use a staged path to this peer"))
        self._thing, self._key = thing, (incarnation, device, export.handle)
        self._mapped = False
        self._bytes: DeviceBytes | None = None
        try:
            self._bytes = self._own(export, storage.size_bytes) or self._open(export, storage.size_bytes)
        except CudaError as error:
            cure = "the peer is gone, or its GPU cannot be reached; use a staged path"
            raise LinkBrokenError(explain(thing, "export", str(error), "memory that can be mapped", cure)) from error

    @property
    def array(self) -> DeviceBytes:
        """The bytes. They end with `close`, whoever holds them.

        Raises:
            LocalProtocolError: the mapping is closed.
        """
        if self._bytes is None:
            raise LocalProtocolError(explain(self._thing, "state", "closed", "open", "map the storage again"))
        return self._bytes

    def close(self) -> None:
        """Give the mapping up; no copy into it may run. Idempotent."""
        self._bytes = None
        if self._mapped:
            self._mapped = False
            ipc_mappings().give_back(self._key)

    def _own(self, export: MemoryExport, size_bytes: int) -> DeviceBytes | None:
        memory = own_allocation(export.handle)
        if memory is None:
            return None
        driver().enable_access(self._key[1], memory.device)
        self._check(export.offset_bytes, size_bytes, memory.size_bytes)
        return DeviceBytes(pointer=memory.pointer + export.offset_bytes, size=size_bytes, keep=memory)

    def _open(self, export: MemoryExport, size_bytes: int) -> DeviceBytes:
        base = ipc_mappings().take(self._key)
        self._mapped = True
        try:
            self._check(export.offset_bytes, size_bytes, driver().size_of(self._key[1], base))
        except BaseException:
            self.close()
            raise
        return DeviceBytes(pointer=base + export.offset_bytes, size=size_bytes)

    def _check(self, offset_bytes: int, size_bytes: int, there_bytes: int) -> None:
        """Refuse a storage that is not inside the allocation: a kernel that leaves it costs the process its GPU."""
        if offset_bytes < 0 or size_bytes < 1 or offset_bytes + size_bytes > there_bytes:
            got = f"{size_bytes} bytes from byte {offset_bytes} on"
            cure = "correct the card of that peer"
            raise RemoteProtocolError(explain(self._thing, "size", got, f"at most {there_bytes} bytes", cure))


def device_number(device: str) -> int:
    """Return the number in ``cuda:<number>``; 0 where there is none."""
    return int(device.partition(":")[2] or 0)


def reachable_devices(device: int) -> tuple[str, ...]:
    """Return the devices of this process whose memory kernels on `device` can write, itself first."""
    cuda = driver()
    others = [other for other in range(cuda.device_count()) if other != device and cuda.can_access(device, other)]
    return tuple(cuda.uuid(other) for other in [device, *others])
