"""Links, copiers and clocks that fail on purpose, for tests of engines and of whoever uses them.

A `FaultyLink` and a `FaultyCopier` stand in front of real ones and ask a plan what to do with each message and copy.
`SeededFaults` draws from a seed, so that a run can be repeated; `ScriptedFaults` does what a test says next.

=============  ========================================  ==================================================
fault          of a message                              of a copy
=============  ========================================  ==================================================
PASS           it travels                                it is made at once
DROP           it is lost                                it is refused; nothing was copied
DUPLICATE      it travels twice                          (as PASS)
HOLD           it travels when `release` says so,        it is made, and over, when `release` says so
               others overtake it meanwhile
CORRUPT        one bit of one frame is flipped           it fails after half of it was made; it is over
CUT            it is lost, and with it the connection    nobody knows whether it was or will be made
=============  ========================================  ==================================================
"""

from __future__ import annotations

import contextlib
import random
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Final, Protocol

from transfer.copier import Copier, CopyJob, CopyTicket
from transfer.link import Frame, Link, LinkEvent, PeerGone, SendTicket
from transfer.link_guard import broken
from transfer.paths import slice_pages
from unikv.errors import ConfigError, CopyError, LinkBrokenError, explain


class Fault(StrEnum):
    """What happens to one message or copy; see the table above."""

    PASS = "pass"  # noqa: S105 - no password
    DROP = "drop"
    DUPLICATE = "duplicate"
    HOLD = "hold"
    CORRUPT = "corrupt"
    CUT = "cut"


class FaultPlan(Protocol):
    """Says what happens next."""

    def next(self) -> Fault:
        """Return the fate of the message or copy at hand."""
        ...

    def pick(self, below: int) -> int:
        """Return a number in ``[0, below)``: which byte and bit a CORRUPT flips."""
        ...


class SeededFaults:
    """Draws faults with fixed rates from a seed.

    Args:
        rates: probability of each fault; what is left to 1 is PASS.

    Raises:
        ConfigError: a rate is negative, or they sum to more than 1.

    Attributes:
        counts: how often each fault was drawn.
    """

    def __init__(self, seed: int, rates: Mapping[Fault, float]) -> None:
        if min(rates.values(), default=0.0) < 0 or sum(rates.values()) > 1:
            raise ConfigError(explain("faults", "rates", dict(rates), "from 0, and at most 1 in all", "lower them"))
        self._random = random.Random(seed)  # noqa: S311 - repeatable on purpose
        self._faults, self._weights = list(rates), list(rates.values())
        self._rest = 1 - sum(self._weights)
        self.counts: dict[Fault, int] = dict.fromkeys(Fault, 0)

    def next(self) -> Fault:
        """Return the next fault."""
        fault = self._random.choices([*self._faults, Fault.PASS], [*self._weights, self._rest])[0]
        self.counts[fault] += 1
        return fault

    def pick(self, below: int) -> int:
        """Return the next number."""
        return self._random.randrange(below)


class ScriptedFaults:
    """Does what it was told: faults in the order in which they were armed, and `usual` when there is none."""

    def __init__(self, usual: Fault = Fault.PASS) -> None:
        self.usual = usual
        self._armed: deque[Fault] = deque()

    def arm(self, *faults: Fault) -> None:
        """Let `faults` happen next, one each."""
        self._armed.extend(faults)

    def disarm(self) -> None:
        """Let nothing happen any more."""
        self._armed.clear()
        self.usual = Fault.PASS

    def next(self) -> Fault:
        """Return the next fault."""
        return self._armed.popleft() if self._armed else self.usual

    def pick(self, below: int) -> int:
        """Return the last number there is."""
        return below - 1


class _Sent:
    """The ticket of a message whose frames were copied or dropped."""

    def done(self) -> bool:
        return True


_SENT: Final = _Sent()


class FaultyLink:
    """A link in front of another one; see `transfer.link.Link` for the contract. It owns the other one.

    Faults are those of sending. A cut is seen by this side alone, as with a link whose other direction still stands.
    """

    def __init__(self, inner: Link, plan: FaultPlan) -> None:
        self._inner, self._plan = inner, plan
        self._held: list[tuple[str, list[bytes]]] = []
        self._events: list[LinkEvent] = []

    @property
    def name(self) -> str:
        """Name of the link behind."""
        return self._inner.name

    @property
    def address(self) -> str:
        """Address of the link behind."""
        return self._inner.address

    @property
    def held(self) -> int:
        """How many messages wait for `release`."""
        return len(self._held)

    def connect(self, address: str) -> None:
        """Connect."""
        self._inner.connect(address)

    def disconnect(self, address: str) -> None:
        """Disconnect; what is held for `address` is lost."""
        self._held = [item for item in self._held if item[0] != address]
        self._inner.disconnect(address)

    def send(self, address: str, frames: Sequence[Frame]) -> SendTicket:
        """Send, or do to the message what the plan says."""
        fault = self._plan.next()
        if fault is Fault.PASS:
            return self._inner.send(address, frames)
        copied = [bytes(frame) for frame in frames]
        if fault is Fault.DUPLICATE:
            self._inner.send(address, copied)
            return self._inner.send(address, copied)
        if fault is Fault.CORRUPT:
            return self._inner.send(address, self._corrupted(copied))
        if fault is Fault.CUT:
            self._inner.disconnect(address)
            self._events.append(PeerGone(address, "the connection was cut on purpose"))
            self._inner.wake()
            raise broken(address)
        if fault is Fault.HOLD:
            self._held.append((address, copied))
        return _SENT

    def release(self) -> int:
        """Send what is held, in order, and return how many messages went; what has no connection now is lost.

        They may be of a connection that was cut since: messages on the way arrive late, beside those of the next one.
        """
        held, self._held = self._held, []
        sent = 0
        for address, frames in held:
            with contextlib.suppress(LinkBrokenError):
                self._inner.send(address, frames)
                sent += 1
        return sent

    def poll(self, timeout_s: float) -> list[LinkEvent]:
        """Poll the link behind, after cuts of our own."""
        events, self._events = self._events, []
        return [*self._inner.poll(0.0 if events else timeout_s), *events]

    def wake(self) -> None:
        """Wake the link behind."""
        self._inner.wake()

    def close(self) -> None:
        """Close; what is held is lost."""
        self._held.clear()
        self._inner.close()

    def abort(self) -> None:
        """Abort; what is held is lost."""
        self._held.clear()
        self._inner.abort()

    def _corrupted(self, frames: list[bytes]) -> list[bytes]:
        filled = [number for number, frame in enumerate(frames) if frame]
        if filled:
            number = filled[self._plan.pick(len(filled))]
            frame = bytearray(frames[number])
            frame[self._plan.pick(len(frame))] ^= 1 << self._plan.pick(8)
            frames[number] = bytes(frame)
        return frames


@dataclass(slots=True)
class _HeldCopy:
    """A copy that is made later; also its ticket."""

    job: CopyJob
    ticket: CopyTicket | None = None

    def done(self) -> bool:
        return self.ticket is not None and self.ticket.done()


class _Broken:
    """The ticket of a copy that failed."""

    def __init__(self, text: str, *, in_doubt: bool) -> None:
        self._text, self._in_doubt = text, in_doubt

    def done(self) -> bool:
        raise CopyError(self._text, in_doubt=self._in_doubt)


class FaultyCopier:
    """A copier in front of another one, which it owns; see `transfer.copier.Copier` for the contract."""

    def __init__(self, inner: Copier, plan: FaultPlan) -> None:
        self._inner, self._plan = inner, plan
        self._held: list[_HeldCopy] = []
        self._in_doubt: list[CopyJob] = []

    @property
    def held(self) -> int:
        """How many copies wait for `release`."""
        return len(self._held)

    @property
    def in_doubt(self) -> int:
        """How many copies failed without anybody knowing what they still do."""
        return len(self._in_doubt)

    def pending(self) -> list[CopyJob]:
        """Return the copies that may still be made."""
        return [copy.job for copy in self._held] + self._in_doubt

    def submit(self, job: CopyJob) -> CopyTicket:
        """Copy, or do what the plan says."""
        fault = self._plan.next()
        if fault is Fault.DROP:
            raise CopyError("copier: refused on purpose; nothing was copied", in_doubt=False)
        if fault is Fault.HOLD:
            self._held.append(_HeldCopy(job))
            return self._held[-1]
        if fault is Fault.CORRUPT:
            half = len(job.pages) // 2
            if half:
                self._inner.submit(replace(job, pages=slice_pages(job.pages, 0, half)))
            return _Broken("copier: failed half way on purpose", in_doubt=False)
        if fault is Fault.CUT:
            self._in_doubt.append(job)
            return _Broken("copier: the device does not answer, on purpose", in_doubt=True)
        return self._inner.submit(job)

    def release(self) -> int:
        """Make the copies that are held; return how many."""
        held, self._held = self._held, []
        for copy in held:
            copy.ticket = self._inner.submit(copy.job)
        return len(held)

    def release_in_doubt(self) -> int:
        """Make the copies nobody knows about, as a device that answers late after all; return how many."""
        jobs, self._in_doubt = self._in_doubt, []
        for job in jobs:
            self._inner.submit(job)
        return len(jobs)

    def drop(self) -> None:
        """Forget what is held and in doubt: the process that copied is gone."""
        self._held.clear()
        self._in_doubt.clear()

    def close(self) -> None:
        """Close the copier behind; what is held is never made."""
        self.drop()
        self._inner.close()


class SteppingClock:
    """A clock that moves when told to; call it for the time in seconds."""

    def __init__(self, now_s: float = 100.0) -> None:
        self.now_s = now_s

    def __call__(self) -> float:
        """Return the time."""
        return self.now_s

    def advance(self, seconds: float) -> None:
        """Let time pass.

        Raises:
            ConfigError: time cannot go back.
        """
        if seconds < 0:
            raise ConfigError(explain("clock", "step", seconds, ">= 0 s", "time only goes on"))
        self.now_s += seconds
