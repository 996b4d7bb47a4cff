"""Memory of GPUs as numbers: plain allocations, handles other processes open, and who reaches whom.

The CUDA driver through the C library that comes with every GPU driver; nothing is imported and nothing happens before
the first call. Allocations are plain ones (``cuMemAlloc``): the base of each is known, and any process of the host may
open it. Allocators that cut large segments up, or that map memory piece by piece, give neither.

Contexts are the primary ones of their devices, which torch and CuPy use as well; none is left current.
"""

from __future__ import annotations

import ctypes
import threading
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Final, Protocol

from unikv.errors import SpecError, explain

HANDLE_BYTES: Final = 64
"""Length of what another process opens an allocation by."""
_LAZY_PEER_ACCESS: Final = 1
_PEER_ACCESS_ALREADY_ENABLED: Final = 704


class DeviceMemoryDriver(Protocol):
    """What is asked of a driver; the twin in `transfer.testing.device` passes for one without a GPU."""

    def device_count(self) -> int:
        """Return how many devices this process sees."""
        ...

    def uuid(self, device: int) -> str:
        """Return what identifies a device in every process, in hexadecimal digits."""
        ...

    def can_access(self, device: int, peer: int) -> bool:
        """Return whether kernels on `device` can read and write memory of `peer`."""
        ...

    def enable_access(self, device: int, peer: int) -> None:
        """Let kernels on `device` touch memory of `peer` from now on. Idempotent."""
        ...

    def allocate(self, device: int, size_bytes: int) -> int:
        """Return the address of new memory."""
        ...

    def free(self, device: int, pointer: int) -> None:
        """Give memory back that `allocate` returned."""
        ...

    def handle_of(self, device: int, pointer: int) -> tuple[bytes, int]:
        """Return the handle of the allocation `pointer` lies in, and how far behind its base that is."""
        ...

    def size_of(self, device: int, pointer: int) -> int:
        """Return how many bytes of its allocation lie at and behind `pointer`."""
        ...

    def open_handle(self, device: int, handle: bytes) -> int:
        """Return where the base of another process's allocation is mapped, for kernels on `device`."""
        ...

    def close_handle(self, device: int, pointer: int) -> None:
        """Unmap what `open_handle` returned."""
        ...


class CudaError(SpecError):
    """A call of the driver failed."""


class _Handle(ctypes.Structure):
    _fields_ = (("reserved", ctypes.c_char * HANDLE_BYTES),)


class CudaDriver:
    """The real driver. One per process; see `driver`.

    Raises:
        CudaError: there is no driver, or it finds no device it can use.
    """

    def __init__(self) -> None:
        try:
            self._library: Any = ctypes.CDLL("libcuda.so.1")
        except OSError as error:
            raise CudaError(explain("cuda driver", "library", str(error), "libcuda.so.1", "use device: cpu")) from error
        self._contexts: dict[int, ctypes.c_void_p] = {}
        self._call("cuInit", 0)

    def device_count(self) -> int:
        """Return how many devices this process sees."""
        count = ctypes.c_int()
        self._call("cuDeviceGetCount", ctypes.byref(count))
        return count.value

    def uuid(self, device: int) -> str:
        """Return what identifies a device (or a slice of one) in every process."""
        found = (ctypes.c_ubyte * 16)()
        self._call("cuDeviceGetUuid_v2", ctypes.byref(found), ctypes.c_int(device))
        return bytes(found).hex()

    def can_access(self, device: int, peer: int) -> bool:
        """Return whether kernels on `device` can touch memory of `peer`; its own it always can."""
        if device == peer:
            return True
        able = ctypes.c_int()
        self._call("cuDeviceCanAccessPeer", ctypes.byref(able), ctypes.c_int(device), ctypes.c_int(peer))
        return bool(able.value)

    def enable_access(self, device: int, peer: int) -> None:
        """Let kernels on `device` touch memory of `peer` from now on."""
        if device == peer:
            return
        other = self._context(peer)
        with self._current(device):
            self._call("cuCtxEnablePeerAccess", other, ctypes.c_uint(0), fine=(_PEER_ACCESS_ALREADY_ENABLED,))

    def allocate(self, device: int, size_bytes: int) -> int:
        """Return the address of new memory, a multiple of 256."""
        pointer = ctypes.c_uint64()
        with self._current(device):
            self._call("cuMemAlloc_v2", ctypes.byref(pointer), ctypes.c_size_t(size_bytes))
        return pointer.value

    def free(self, device: int, pointer: int) -> None:
        """Give memory back; waits for kernels that use it."""
        with self._current(device):
            self._call("cuMemFree_v2", ctypes.c_uint64(pointer))

    def handle_of(self, device: int, pointer: int) -> tuple[bytes, int]:
        """Return the handle of the allocation `pointer` lies in, and the pointer's distance from its base."""
        handle = _Handle()
        with self._current(device):
            base, _ = self._range(pointer)
            self._call("cuIpcGetMemHandle", ctypes.byref(handle), ctypes.c_uint64(base))
        return ctypes.string_at(ctypes.addressof(handle), HANDLE_BYTES), pointer - base

    def size_of(self, device: int, pointer: int) -> int:
        """Return how many bytes of its allocation lie at and behind `pointer`, mapped or our own."""
        with self._current(device):
            base, size = self._range(pointer)
        return base + size - pointer

    def open_handle(self, device: int, handle: bytes) -> int:
        """Map another process's allocation; where it is on another device, access to that is switched on."""
        wanted, pointer = _Handle(), ctypes.c_uint64()
        ctypes.memmove(ctypes.addressof(wanted), handle, HANDLE_BYTES)
        with self._current(device):
            self._call("cuIpcOpenMemHandle_v2", ctypes.byref(pointer), wanted, ctypes.c_uint(_LAZY_PEER_ACCESS))
        return pointer.value

    def close_handle(self, device: int, pointer: int) -> None:
        """Unmap what `open_handle` returned."""
        with self._current(device):
            self._call("cuIpcCloseMemHandle", ctypes.c_uint64(pointer))

    def _range(self, pointer: int) -> tuple[int, int]:
        base, size = ctypes.c_uint64(), ctypes.c_size_t()
        where = ctypes.c_uint64(pointer)
        self._call("cuMemGetAddressRange_v2", ctypes.byref(base), ctypes.byref(size), where)
        return base.value, size.value

    def _context(self, device: int) -> ctypes.c_void_p:
        """Return the primary context, kept for the life of the process as torch keeps it."""
        if device not in self._contexts:
            context = ctypes.c_void_p()
            self._call("cuDevicePrimaryCtxRetain", ctypes.byref(context), ctypes.c_int(device))
            self._contexts[device] = context
        return self._contexts[device]

    @contextmanager
    def _current(self, device: int) -> Iterator[None]:
        self._call("cuCtxPushCurrent_v2", self._context(device))
        try:
            yield
        finally:
            self._call("cuCtxPopCurrent_v2", ctypes.byref(ctypes.c_void_p()))

    def _call(self, name: str, *arguments: object, fine: tuple[int, ...] = ()) -> None:
        code = int(getattr(self._library, name)(*arguments))
        if code and code not in fine:
            text = ctypes.c_char_p()
            self._library.cuGetErrorString(ctypes.c_int(code), ctypes.byref(text))
            got = f"{code} ({(text.value or b'no text').decode(errors='replace')})"
            raise CudaError(explain("cuda driver", name, got, "0", "look at the device with nvidia-smi"))


class CudaAllocation:
    """Device memory that goes back when the last user of this object lets go. Torch and CuPy can look into it.

    Attributes:
        device, pointer, size_bytes: where it is and how long.
    """

    def __init__(self, device: int, size_bytes: int) -> None:
        """Allocate; what the memory holds is undefined.

        Raises:
            CudaError: the device has not that much.
        """
        self.device, self.size_bytes = device, size_bytes
        self.pointer = driver().allocate(device, size_bytes)
        self._export: tuple[bytes, int] | None = None
        ending = weakref.finalize(self, driver().free, device, self.pointer)
        ending.atexit = False  # the process takes its memory along, and kernels may still run then

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        """Describe the memory as bytes, without a stream to wait for."""
        return {"shape": (self.size_bytes,), "typestr": "|u1", "data": (self.pointer, False), "version": 2}

    def export(self) -> tuple[bytes, int]:
        """Return the handle for other processes and the offset of our memory behind what they open.

        Within this process `own_allocation` finds the memory by the same handle: a driver opens no handle of its own.
        """
        if self._export is None:
            self._export = driver().handle_of(self.device, self.pointer)
            _exported[self._export[0]] = self
        return self._export


_exported: weakref.WeakValueDictionary[bytes, CudaAllocation] = weakref.WeakValueDictionary()
_lock = threading.Lock()
_installed: list[DeviceMemoryDriver] = []


def own_allocation(handle: bytes) -> CudaAllocation | None:
    """Return the allocation of this process that `handle` names, None where it is another's or gone."""
    return _exported.get(handle)


def driver() -> DeviceMemoryDriver:
    """Return the driver of this process, loaded at the first call.

    Raises:
        CudaError: there is none.
    """
    with _lock:
        if not _installed:
            _installed.append(CudaDriver())
        return _installed[-1]


@contextmanager
def installed(other: DeviceMemoryDriver) -> Iterator[None]:
    """Use another driver than the real one meanwhile: for tests on machines without a GPU."""
    with _lock:
        _installed.append(other)
    try:
        yield
    finally:
        with _lock:
            _installed.remove(other)
