"""Device memory and device events as the plain values that regions and jobs carry: an address, a length, a handle."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceBytes:
    """Bytes on a device. Borrowed, unless `keep` owns them.

    Attributes:
        pointer: address of the first byte.
        size: number of bytes.
        keep: whatever must stay alive for the memory to stay.
    """

    pointer: int
    size: int
    keep: Any = None

    def __getitem__(self, part: slice) -> DeviceBytes:
        """Return consecutive bytes of these."""
        start, stop, _ = part.indices(self.size)
        return DeviceBytes(pointer=self.pointer + start, size=max(0, stop - start), keep=self.keep)


class DeviceEvent(Protocol):
    """A point in a device's work that copies can wait for there, without the host.

    torch's recorded events are such: torch calls the handle so.
    """

    @property
    def cuda_event(self) -> int:
        """The event's handle; valid as long as this object is."""
        ...
