"""The device copier on CUDA: `transfer.copy_device` over streams, events and one kernel of CuPy's.

Everything that is queued comes back at once: uploads come from pinned memory and go ahead of the kernel on its stream,
completion is an event that is asked, and nothing synchronises a stream or the device.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import cupy
import numpy as np
from numpy.typing import NDArray

from transfer.copy_device import DeviceCopier
from transfer.copy_tiles import VECTORS_BYTES
from transfer.device_bytes import DeviceBytes
from unikv.errors import ConfigError, CopyError, explain

_SOURCE: Final = Path(__file__).with_name("copy_kernel.cu")
_UNREGISTERED: Final = 0
"""cudaMemoryTypeUnregistered."""
_NOT_READY: Final = 600
"""cudaErrorNotReady."""
_HOST_TO_DEVICE: Final = 1
_DISABLE_TIMING: Final = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class KernelShape:
    """How the kernel is compiled.

    Attributes:
        threads: threads of a block.
        steps: vectors every thread has in flight; a tile has ``threads * steps``.
        cache: 0 leaves caching to the hardware, 1 marks loads and stores as streaming, 2 the loads alone.
    """

    threads: int = 64
    steps: int = 8
    cache: int = 1

    def __post_init__(self) -> None:
        if self.threads not in (32, 64, 128, 256, 512) or not 1 <= self.steps <= 16 or self.cache not in (0, 1, 2):
            want = "32 to 512 threads (a power of two), 1 to 16 steps, cache 0 to 2"
            raise ConfigError(explain("kernel", "shape", self, want, "leave it out for the default"))


class CudaEngine:
    """One CUDA device. See `transfer.copy_device.DeviceEngine` for the contract.

    Args:
        device: its number in this process.
        shape: how the kernel is compiled.
        timed: make events that can be timed.

    Raises:
        CopyError: there is no such device, or the kernel does not compile for it.
    """

    num_streams = 4

    def __init__(self, device: int, shape: KernelShape, *, timed: bool) -> None:
        self._shape = shape
        self._events: list[int] = []
        self._runtime = cupy.cuda.runtime
        self._device, self._threads = device, (shape.threads,)
        self.tile_vectors = shape.threads * shape.steps
        self._event_flags = 0 if timed else _DISABLE_TIMING
        try:
            self._runtime.setDevice(device)
            self._streams = [cupy.cuda.Stream(non_blocking=True) for _ in range(self.num_streams)]
            self._kernels: dict[int, Any] = {}
            self.kernel(VECTORS_BYTES[0])
        except (self._runtime.CUDARuntimeError, cupy.cuda.compiler.CompileException) as error:
            text = explain("cuda copier", "device", device, "a CUDA device", f"see `unikv doctor` ({error})")
            raise CopyError(text, in_doubt=False) from error

    def adopt_thread(self) -> None:
        """Make the device current in the calling thread."""
        if self._runtime.getDevice() != self._device:
            self._runtime.setDevice(self._device)

    def reaches(self, array: NDArray[Any]) -> bool:
        """Return whether this host memory is pinned."""
        if array.size == 0:
            return True
        address = int(array.__array_interface__["data"][0])
        try:
            return bool(self._runtime.pointerGetAttributes(address).type != _UNREGISTERED)
        except self._runtime.CUDARuntimeError:
            return False

    def pinned(self, size_bytes: int) -> NDArray[np.uint8]:
        """Return pinned memory."""
        return np.frombuffer(cupy.cuda.alloc_pinned_memory(size_bytes), dtype=np.uint8, count=size_bytes)

    def allocate(self, size_bytes: int) -> DeviceBytes:
        """Return device memory."""
        memory = cupy.cuda.alloc(size_bytes)
        return DeviceBytes(pointer=int(memory.ptr), size=size_bytes, keep=memory)

    def copy_in(self, stream: int, target: DeviceBytes, source: NDArray[Any]) -> None:
        """Queue the copy of pinned memory to the device."""
        address = int(source.__array_interface__["data"][0])
        ptr = self._streams[stream].ptr
        self._runtime.memcpyAsync(target.pointer, address, source.nbytes, _HOST_TO_DEVICE, ptr)

    def launch(
        self, stream: int, width: int, tiles: DeviceBytes, rows: tuple[DeviceBytes, int], shifts: tuple[int, int]
    ) -> None:
        """Queue the kernel."""
        arguments = tuple(map(np.int64, (tiles.pointer, rows[0].pointer, *shifts)))
        grid = (tiles.size // _TILE_BYTES, rows[1])
        self.kernel(width)(grid, self._threads, arguments, stream=self._streams[stream])

    def kernel(self, width: int) -> Any:
        """Return the kernel for one vector width; its first use compiles it, or finds it in CuPy's cache."""
        if width not in self._kernels:
            self._kernels[width] = _compile(width, self._shape)
        return self._kernels[width]

    def new_event(self) -> int:
        """Return a new event's handle."""
        event = int(self._runtime.eventCreateWithFlags(self._event_flags))
        self._events.append(event)
        return event

    def record(self, event: int, stream: int | None) -> None:
        """Record an event on a stream of ours, or on the device's default stream."""
        self._runtime.eventRecord(event, 0 if stream is None else self._streams[stream].ptr)

    def wait(self, stream: int, event: int) -> None:
        """Let a stream of ours wait for an event."""
        self._runtime.streamWaitEvent(self._streams[stream].ptr, event)

    def happened(self, event: int) -> bool:
        """Return whether an event has happened.

        Raises:
            CUDARuntimeError: something queued before it failed.
        """
        status = self._runtime.eventQuery(event)
        if status not in (0, _NOT_READY):
            raise self._runtime.CUDARuntimeError(status)
        return bool(status == 0)

    def elapsed_s(self, start: int, end: int) -> float:
        """Return the time between two events that have happened."""
        return float(self._runtime.eventElapsedTime(start, end)) / 1e3

    def close(self) -> None:
        """Let go of events, streams and kernels."""
        while self._events:
            self._runtime.eventDestroy(self._events.pop())
        self._streams, self._kernels = [], {}


_TILE_BYTES: Final = 64


def _compile(width: int, shape: KernelShape) -> Any:
    options = (
        f"-DVECTOR={width}",
        f"-DTHREADS={shape.threads}",
        f"-DSTEPS={shape.steps}",
        f"-DCACHE={shape.cache}",
        "-std=c++14",
    )
    return cupy.RawModule(code=_SOURCE.read_text(), options=options).get_function("copy_tiles").kernel


class CudaCopier(DeviceCopier):
    """Copies between memory of CUDA devices, peers' mapped memory included, and pinned host memory."""

    def __init__(self, device: int = 0, *, shape: KernelShape | None = None, timed: bool = False) -> None:
        """Make a copier whose kernels run on `device`.

        Args:
            device: its number in this process.
            shape: how the kernel is compiled; None for what was found best.
            timed: measure every batch on the device.

        Raises:
            CopyError: there is no such device, or the kernel does not compile for it.
        """
        engine = CudaEngine(device, shape or KernelShape(), timed=timed)
        super().__init__(engine, timed=timed)
        if shape is None:  # for serving: nobody should wait for a compiler in the middle of a request
            for width in VECTORS_BYTES:
                engine.kernel(width)
