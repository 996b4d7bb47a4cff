"""What a device copier asks of a device: memory, streams, events, and the kernel over tiles."""

from __future__ import annotations

from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from transfer.device_bytes import DeviceBytes


class DeviceEngine(Protocol):
    """One device: memory, streams, events and the kernel. Handles are whatever the engine makes them.

    Attributes:
        tile_vectors: most vectors of one tile of its kernel.
        num_streams: streams of its own; jobs on different ones may run at the same time.
    """

    tile_vectors: int
    num_streams: int

    def adopt_thread(self) -> None:
        """Make the calling thread able to use the device."""
        ...

    def reaches(self, array: NDArray[Any]) -> bool:
        """Return whether kernels can touch this host memory."""
        ...

    def pinned(self, size_bytes: int) -> NDArray[np.uint8]:
        """Return host memory that kernels can touch; it goes with its last user."""
        ...

    def allocate(self, size_bytes: int) -> DeviceBytes:
        """Return device memory of the engine's own; it goes with its last user."""
        ...

    def copy_in(self, stream: int, target: DeviceBytes, source: NDArray[Any]) -> None:
        """Queue the copy of pinned memory to the device."""
        ...

    def launch(
        self, stream: int, width: int, tiles: DeviceBytes, rows: tuple[DeviceBytes, int], shifts: tuple[int, int]
    ) -> None:
        """Queue the kernel over all of `tiles` for each of `rows` (where they are, and how many)."""
        ...

    def new_event(self) -> Any:
        """Return an event to `record`."""
        ...

    def record(self, event: Any, stream: int | None) -> None:
        """Let `event` happen when everything queued so far is over: on a stream, or (None) on the default stream."""
        ...

    def wait(self, stream: int, event: Any) -> None:
        """Let a stream wait for an event, on the device. Also takes events of others (`DeviceEvent.cuda_event`)."""
        ...

    def happened(self, event: Any) -> bool:
        """Return whether `event` has happened."""
        ...

    def elapsed_s(self, start: Any, end: Any) -> float:
        """Return the time between two events that have happened."""
        ...

    def close(self) -> None:
        """Free streams and events. Nothing runs any more."""
        ...
