"""Links inside one process: the twin of the ZeroMQ link for tests, simulations and dry runs.

Frames are not copied before the receiver polls, so that a sender that changes them before its ticket is done corrupts
its message here just as it would on a socket.
"""

from __future__ import annotations

import itertools
import math
import threading
import time
from collections import deque
from collections.abc import Iterable, Sequence

from transfer.link import Frame, LinkEvent, PeerGone, Received, SendTicket
from transfer.link_guard import (
    CLOSE_TIMEOUT_S,
    CONNECT_TIMEOUT_S,
    MAX_WAIT_S,
    ThreadGuard,
    broken,
    check_frames,
    closed,
    new_name,
)
from unikv.errors import ConfigError, explain


class _Parcel:
    """A message on its way, and its own ticket."""

    __slots__ = ("_copied", "_frames", "_peer")

    def __init__(self, peer: str, frames: Sequence[Frame]) -> None:
        self._peer = peer
        self._frames: tuple[Frame, ...] | None = tuple(frames)
        self._copied: tuple[memoryview, ...] | None = None

    def done(self) -> bool:
        return self._frames is None

    def copy(self) -> None:
        """Let go of the sender's memory, keeping the message."""
        if self._frames is not None:
            self._copied = tuple([memoryview(bytearray(frame)) for frame in self._frames])
            self._frames = None

    def drop(self) -> None:
        """Let go of the sender's memory; a message nobody has copied is lost."""
        self._frames = None

    def open(self) -> Received | None:
        """Hand the message over, once: the sender may keep its ticket for long, and must not keep the bytes with it."""
        self.copy()
        copied, self._copied = self._copied, None
        return None if copied is None else Received(self._peer, copied)


class _OutgoingSession:
    """One address a link connected to. Without a target it waits for a listener until `give_up_at_s`."""

    __slots__ = ("backlog", "give_up_at_s", "target")

    def __init__(self, target: MemoryLink | None, give_up_at_s: float) -> None:
        self.target = target
        self.give_up_at_s = give_up_at_s
        self.backlog: list[_Parcel] = []


class MemoryNetwork:
    """Where in-process links find each other. Links of different networks do not.

    Args:
        connect_timeout_s: how long a link waits for a listener at an address.
    """

    def __init__(self, *, connect_timeout_s: float = CONNECT_TIMEOUT_S) -> None:
        self.connect_timeout_s = connect_timeout_s
        self._changed = threading.Condition()
        self._links: dict[str, MemoryLink] = {}
        self._numbers = itertools.count()

    def link(self, address: str | None = None) -> MemoryLink:
        """Return a new link at `address` (``memory://...``), or at an address nobody uses.

        Raises:
            ConfigError: another open link has this address.
        """
        with self._changed:
            place = address or f"memory://{next(self._numbers)}"
            if place in self._links:
                raise ConfigError(explain("link", "address", place, "an address nobody uses", "choose another one"))
            link = self._links[place] = MemoryLink(self, place, self._changed)
            for other in self._links.values():
                other._meet(link)
            self._changed.notify_all()
            return link

    def find(self, address: str) -> MemoryLink | None:
        """Return the open link at `address`."""
        return self._links.get(address)

    def others(self) -> Iterable[MemoryLink]:
        """Return every open link."""
        return self._links.values()

    def remove(self, address: str) -> None:
        """Forget the link at `address`."""
        del self._links[address]


class MemoryLink:
    """One in-process link; made by `MemoryNetwork.link`. See `transfer.link.Link` for the contract."""

    def __init__(self, network: MemoryNetwork, address: str, changed: threading.Condition) -> None:
        self._network, self._address, self._changed = network, address, changed
        self._name = new_name()
        self._guard = ThreadGuard()
        self._closed = False
        self._woken = False
        self._inbox: deque[_Parcel | PeerGone] = deque()
        self._outgoing: dict[str, _OutgoingSession] = {}
        self._sent: list[_Parcel] = []
        self._look_at = 64

    @property
    def name(self) -> str:
        """Unguessable name, what peers see as `Received.peer`."""
        return self._name

    @property
    def address(self) -> str:
        """Where other links of the network reach this one."""
        return self._address

    def connect(self, address: str) -> None:
        """Prepare to send to `address`; a listener may appear there later."""
        with self._changed:
            self._check()
            if address not in self._outgoing:
                give_up_at_s = time.monotonic() + self._network.connect_timeout_s
                self._outgoing[address] = _OutgoingSession(self._network.find(address), give_up_at_s)

    def disconnect(self, address: str) -> None:
        """Forget `address`; messages that wait for a listener there are dropped."""
        with self._changed:
            self._check()
            self._forget(address)

    def send(self, address: str, frames: Sequence[Frame]) -> SendTicket:
        """Queue one message; the ticket is done once the receiver has polled it."""
        with self._changed:
            self._check()
            check_frames(frames, address)
            if address not in self._outgoing:
                raise broken(address)
            parcel = _Parcel(self._name, frames)
            self._sent.append(parcel)
            if len(self._sent) > self._look_at:  # seldom, so that sending costs the same however much is under way
                self._sent = [sent for sent in self._sent if not sent.done()]
                self._look_at = 64 + 2 * len(self._sent)
            outgoing = self._outgoing[address]
            (outgoing.backlog if outgoing.target is None else outgoing.target._inbox).append(parcel)
            self._changed.notify_all()
            return parcel

    def poll(self, timeout_s: float) -> list[LinkEvent]:
        """Return what arrived, waiting for it up to `timeout_s` seconds."""
        with self._changed:
            self._guard.adopt()
            self._check()
            deadline_s = time.monotonic() + timeout_s
            while True:
                now_s = time.monotonic()
                self._give_up(now_s)
                if self._inbox or self._woken or now_s >= deadline_s:
                    return self._take()
                self._changed.wait(min(deadline_s - now_s, self._next_give_up_s() - now_s, MAX_WAIT_S))

    def wake(self) -> None:
        """Make a running or the next `poll` return early; from any thread, also after close."""
        with self._changed:
            self._woken = True
            self._changed.notify_all()

    def close(self) -> None:
        """Hand over what is queued, waiting at most a second for listeners, then go away."""
        with self._changed:
            deadline_s = time.monotonic() + CLOSE_TIMEOUT_S
            while not self._closed and any(outgoing.backlog for outgoing in self._outgoing.values()):
                if not self._changed.wait(deadline_s - time.monotonic()):
                    break
            for parcel in self._sent:
                parcel.copy()
            self._leave()

    def abort(self) -> None:
        """Go away at once; messages nobody has polled yet are lost."""
        with self._changed:
            self._leave()

    def _check(self) -> None:
        if self._closed:
            raise closed(self._address)
        self._guard.check(self._address)

    def _meet(self, other: MemoryLink) -> None:
        """Hand over what waited for a listener at the address of `other`."""
        outgoing = self._outgoing.get(other.address)
        if outgoing is not None and outgoing.target is None:
            outgoing.target = other
            other._inbox.extend(outgoing.backlog)
            outgoing.backlog.clear()

    def _lose(self, other: MemoryLink) -> None:
        outgoing = self._outgoing.get(other.address)
        if outgoing is not None and outgoing.target is other:
            self._forget(other.address)
            self._inbox.append(PeerGone(other.address, "the peer closed its link"))

    def _forget(self, address: str) -> None:
        outgoing = self._outgoing.pop(address, None)
        for parcel in outgoing.backlog if outgoing else ():
            parcel.drop()

    def _give_up(self, now_s: float) -> None:
        for address, outgoing in list(self._outgoing.items()):
            if outgoing.target is None and now_s >= outgoing.give_up_at_s:
                self._forget(address)
                reason = f"no listener within {self._network.connect_timeout_s:g} s"
                self._inbox.append(PeerGone(address, reason))

    def _next_give_up_s(self) -> float:
        waiting = [outgoing.give_up_at_s for outgoing in self._outgoing.values() if outgoing.target is None]
        return min(waiting, default=math.inf)

    def _take(self) -> list[LinkEvent]:
        self._woken = False
        opened = [item if isinstance(item, PeerGone) else item.open() for item in self._inbox]
        self._inbox.clear()
        return [event for event in opened if event is not None]

    def _leave(self) -> None:
        """Become closed, tell everybody who connected here, and let go of all memory of others."""
        if self._closed:
            return
        self._closed = True
        self._network.remove(self._address)
        for link in self._network.others():
            link._lose(self)
        for parcel in self._sent:
            parcel.drop()
        for item in self._inbox:
            if isinstance(item, _Parcel):
                item.drop()
        self._inbox.clear()
        self._outgoing.clear()
        self._changed.notify_all()
