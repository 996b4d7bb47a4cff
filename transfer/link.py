"""A link moves messages between processes: lists of byte frames, whole and in order per peer, or a broken peer.

One link is one endpoint of its own: it receives at `address` and connects out to other links' addresses. Only one
thread may use a link; `wake` alone is safe from any thread.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

Frame = bytes | bytearray | memoryview


@dataclass(frozen=True, slots=True)
class Received:
    """A whole message. `peer` is the sending link's `name`; frames are owned by the receiver."""

    peer: str
    frames: tuple[memoryview, ...]


@dataclass(frozen=True, slots=True)
class PeerGone:
    """The link at `address`, to which we had connected, is gone. Sent once; connecting again starts afresh.

    What it sent before it left may arrive before or after this event.
    """

    address: str
    reason: str


LinkEvent = Received | PeerGone


class SendTicket(Protocol):
    """Tells when the frames of one send may be changed again."""

    def done(self) -> bool:
        """Return True once the link no longer reads the frames."""
        ...


class Link(Protocol):
    """The contract; `transfer.testing.link` has its conformance suite."""

    @property
    def name(self) -> str:
        """Unguessable name of this link, what peers see as `Received.peer`."""
        ...

    @property
    def address(self) -> str:
        """Where other links reach this one."""
        ...

    def connect(self, address: str) -> None:
        """Prepare to send to the link at `address`; does nothing where that is already so. Never blocks.

        Raises:
            LinkClosedError: this link is closed.
        """
        ...

    def disconnect(self, address: str) -> None:
        """Forget `address`; unsent messages to it are dropped, no PeerGone follows."""
        ...

    def send(self, address: str, frames: Sequence[Frame]) -> SendTicket:
        """Queue one message. The link may read the frames until the ticket is done.

        Raises:
            LinkClosedError: this link is closed.
            LinkBrokenError: `address` is gone or was never connected.
        """
        ...

    def poll(self, timeout_s: float) -> list[LinkEvent]:
        """Return what arrived, waiting up to `timeout_s` for the first event or a `wake`; [] when nothing did."""
        ...

    def wake(self) -> None:
        """Make a running or the next `poll` return early. Safe from any thread, also after close."""
        ...

    def close(self) -> None:
        """Send what is queued (for at most one second), then free everything. Idempotent."""
        ...

    def abort(self) -> None:
        """Free everything at once; queued messages are lost. Idempotent."""
        ...
