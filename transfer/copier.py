"""A copier moves bytes along lanes. Host and device copiers prove themselves with one conformance suite."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, Protocol

from transfer.device_bytes import DeviceEvent
from transfer.pages import PagePairs
from transfer.plan import Lane

PoolKey = tuple[int, int]
"""(group id, pool index) on one side."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Region:
    """Memory a copier may touch: slots of one pool, or pages of one staging chunk.

    Attributes:
        memory: the bytes. Host copiers take a writable one-dimensional uint8 numpy array, device copiers their own.
            The region borrows it: whoever made the memory keeps it alive until no copy is in flight.
        slot_stride_bytes: distance between slots.
        num_slots: slots that exist; a copier refuses any other slot before it copies anything.
    """

    memory: Any
    slot_stride_bytes: int
    num_slots: int


@dataclass(frozen=True, slots=True, kw_only=True)
class CopyJob:
    """Some pages of one group pair along all its lanes.

    Attributes:
        lanes: lanes of one group pair.
        source, destination: region of every pool index the lanes name, on each side.
        pages: the page pairs to copy.
        after: device events that must have happened before a byte is read; None: whatever was queued on the device's
            default stream before. Copies on the host begin at once, so their source must be complete.

    A copier may recognise lanes and mappings that it has seen by their identity: they are not changed once submitted.
    """

    lanes: Sequence[Lane]
    source: Mapping[int, Region]
    destination: Mapping[int, Region]
    pages: PagePairs
    after: Sequence[DeviceEvent] | None = None


class CopyTicket(Protocol):
    """The fate of one submitted job."""

    def done(self) -> bool:
        """Return True once every byte has landed; raise CopyError where the copy failed."""
        ...


class Copier(Protocol):
    """Runs copy jobs. One thread uses a copier at a time."""

    def submit(self, job: CopyJob) -> CopyTicket:
        """Start one job. The regions must stay valid until the ticket is done.

        Raises:
            CopyError: (in_doubt False) a slot, run or row would leave its region, or the destination rows of one job
                overlap; nothing was copied.
        """
        ...

    def close(self) -> None:
        """Free what the copier holds. Submitted jobs must be done before."""
        ...


def is_asynchronous(copier: Copier) -> bool:
    """Return whether jobs of this copier run while its caller goes on; others are over when `submit` returns."""
    return bool(getattr(copier, "asynchronous", False))


def together(copier: Copier) -> AbstractContextManager[None]:
    """Return a context in which an asynchronous copier collects jobs, to start them with as few launches as it can."""
    if not is_asynchronous(copier):
        return nullcontext()
    joined: AbstractContextManager[None] = copier.together()  # type: ignore[attr-defined]
    return joined
