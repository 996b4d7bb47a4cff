"""What every link checks in the same way: is it open, is this its thread, can this message travel."""

from __future__ import annotations

import secrets
import threading
from collections.abc import Sequence
from typing import Final

from transfer.link import Frame
from unikv.errors import LinkBrokenError, LinkClosedError, LocalProtocolError, explain

MAX_FRAME_BYTES: Final = 256 * 1024**2
"""Longest frame a link carries; a peer that sends a longer one is cut off."""
MAX_MESSAGE_FRAMES: Final = 4096
"""Most frames of one message; a longer message is dropped on arrival."""
CONNECT_TIMEOUT_S: Final = 10.0
"""How long a link waits for a listener at an address it was told to connect to."""
CLOSE_TIMEOUT_S: Final = 1.0
"""How long `close` goes on sending what is queued."""
MAX_WAIT_S: Final = 3600.0
"""Longest single wait; a longer or infinite time-out of `poll` is waited for in turns."""
NAME_BYTES: Final = 16


def new_name() -> str:
    """Return an unguessable name for a link: 32 hexadecimal digits."""
    return secrets.token_hex(NAME_BYTES)


def check_frames(frames: Sequence[Frame], address: str) -> None:
    """Refuse a message no link can carry.

    Raises:
        LocalProtocolError: no frame at all, too many, or one that is too long.
    """
    if not 1 <= len(frames) <= MAX_MESSAGE_FRAMES:
        want = f"1 to {MAX_MESSAGE_FRAMES}"
        raise LocalProtocolError(explain(f"message to {address}", "frames", len(frames), want, "split the message"))
    longest = max(map(_frame_bytes, frames))
    if longest > MAX_FRAME_BYTES:
        want = f"<= {MAX_FRAME_BYTES} bytes"
        raise LocalProtocolError(explain(f"message to {address}", "longest frame", longest, want, "send chunks"))


def broken(address: str) -> LinkBrokenError:
    """Return the error of a send to an address that is gone, or that was never connected."""
    return LinkBrokenError(
        explain(f"link to {address}", "state", "gone or never connected", "connected", "connect to it again")
    )


def closed(address: str) -> LinkClosedError:
    """Return the error of a call on a closed link."""
    return LinkClosedError(explain(f"link {address}", "state", "closed", "open", "make a new link"))


class ThreadGuard:
    """Remembers the first thread that polls a link; no other one may use it then, except to close it."""

    def __init__(self) -> None:
        self._owner: int | None = None

    def adopt(self) -> None:
        """Make the calling thread the owner if there is none yet."""
        if self._owner is None:
            self._owner = threading.get_ident()

    def check(self, address: str) -> None:
        """Refuse a call from another thread than the owner.

        Raises:
            LocalProtocolError: another thread polls this link.
        """
        caller = threading.get_ident()
        if self._owner not in (None, caller):
            want = f"thread {self._owner}, which polls it"
            cure = "use a link in one thread, and wake it from others"
            raise LocalProtocolError(explain(f"link {address}", "calling thread", caller, want, cure))


def _frame_bytes(frame: Frame) -> int:
    return frame.nbytes if isinstance(frame, memoryview) else len(frame)
