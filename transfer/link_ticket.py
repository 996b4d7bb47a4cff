"""When the frames of one send may be changed again, for links whose library tracks frames."""

from __future__ import annotations

from typing import Protocol


class Tracker(Protocol):
    """What the library says of one frame it did not copy."""

    @property
    def done(self) -> bool:
        """Whether the library has let go of the frame."""
        ...


class TrackedTicket:
    """Done once no frame waits in the link and the library has let go of all it did not copy."""

    __slots__ = ("trackers", "waiting")

    def __init__(self) -> None:
        self.waiting = True
        self.trackers: list[Tracker] = []

    def done(self) -> bool:
        """Return True once nobody reads the frames."""
        return not self.waiting and all(tracker.done for tracker in self.trackers)
