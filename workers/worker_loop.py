"""The main loop of a worker process: control messages, work that waits for pages, and a clean end."""

from __future__ import annotations

import logging
import math
import os
import signal
import time
from abc import ABC, abstractmethod
from collections import deque
from dataclasses import dataclass, replace
from types import FrameType
from typing import Final, Generic, TypeVar

from transfer.link import PeerGone, Received
from unikv.errors import (
    CapacityError,
    LinkBrokenError,
    LocalProtocolError,
    RemoteProtocolError,
    SpecError,
    UnikvError,
    explain,
)
from unikv.ids import RequestId
from workers.control import (
    CODEC,
    Attach,
    ControlMessage,
    DecodeReport,
    GiveUp,
    Proceed,
    PromptReport,
    Ready,
    RunDecode,
    RunPrompt,
    Stop,
)
from workers.rank_runtime import RankRuntime
from workers.rendezvous import Rendezvous
from workers.runner import PromptPages, Runner, Tables

_log = logging.getLogger(__name__)

POLL_S: Final = 0.5
"""Longest wait for a control message; changed transfers wake the loop earlier."""
ENDING_POLL_S: Final = 0.05
BACKGROUND_NICE: Final = 10
"""Niceness of a main thread whose work must not disturb the transfer's thread."""
DRAIN_S: Final = 2.0
"""How long transfers that are open may go on when the worker was told to end; then they fail."""
QUIET_S: Final = 3.0
"""How long peers may take after that to let go of our pages."""
CLOSE_S: Final = 1.0
"""How long the endpoint may take to close then."""
MAX_REASON_CHARACTERS: Final = 4000

W = TypeVar("W", RunPrompt, RunDecode)


@dataclass(frozen=True, slots=True)
class _Waiting(Generic[W]):
    work: W
    since_s: float


class Worker(ABC, Generic[W]):
    """One rank of one side.

    The main thread runs the model and owns the cache; transfers run in the endpoint's thread. Work is taken in the
    order in which it came, as pages allow: on both sides alike, so that neither waits for what the other has not begun.
    """

    work_type: type[W]
    takes_all: bool
    """Whether to take everything there is room for before looking at messages again (taking is quick)."""

    def __init__(self, runtime: RankRuntime, runner: Runner, rendezvous: Rendezvous) -> None:
        self.runtime, self.runner, self.rendezvous = runtime, runner, rendezvous
        sides = runtime.pair.context, runtime.pair.generation
        self._unit_tokens = math.gcd(*(side.tokens_per_block for side in sides))
        self._waiting: deque[_Waiting[W]] = deque()
        self._short_of_pages = self._more = False
        self._caller, self._owned = "", False
        self._next_caller: Attach | None = None
        self._stopping, self._drained_by_s, self._gave_up = "", 0.0, False

    def run(self) -> int:
        """Serve until a Stop message, a signal, or the end of an owning caller; return the process's exit code.

        The code is 0 where everything that was open came to its end, 1 where a peer may still touch our pages.
        """
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self._on_signal)
        self.rendezvous.announce("control", self.runtime.side, self.runtime.rank, self.runtime.control.address)
        if self.runner.background:
            os.nice(BACKGROUND_NICE)  # this thread alone: on Linux niceness belongs to threads
        _log.info("%s rank %d serves", self.runtime.side, self.runtime.rank)
        while not self._over():
            idle_s = ENDING_POLL_S if self._stopping else POLL_S
            self._turn(0.0 if self._runnable() else idle_s)
        in_use = self.in_use()
        fate = f"; {len(in_use)} request(s) not quiet" if in_use else ""
        _log.info("%s rank %d ends: %s%s", self.runtime.side, self.runtime.rank, self._stopping, fate)
        return 1 if in_use else 0

    def wake(self) -> None:
        """Make the loop look at its transfers. Safe from any thread and from signal handlers."""
        self.runtime.control.wake()

    def report(self, message: Ready | PromptReport | DecodeReport) -> None:
        """Send a report to the caller; where it is gone the log says so."""
        if not self._caller:
            _log.warning("no caller to send a %s to", type(message).__name__)
            return
        try:
            self._send(message)
        except LocalProtocolError as error:
            if isinstance(message, Ready):
                raise
            _log.error("report cut short: %s", error)
            reason = (message.reason or str(error))[:MAX_REASON_CHARACTERS]
            self._send(replace(message, reason=reason, evidence=None))
        except LinkBrokenError as error:
            _log.warning("report not sent: %s", error)

    def pages_freed(self) -> None:
        """Try again what waits for pages."""
        self._short_of_pages = False

    def prompt_pages(self, work: W, tables: Tables) -> PromptPages:
        """Return the pages of a request as something to look at."""
        return PromptPages(
            request_id=work.request_id,
            tables=tables,
            prompt_tokens=work.prompt_tokens,
            unit_tokens=self._unit_tokens,
            prompt=work.prompt,
        )

    def proceed(self, request_id: RequestId) -> None:
        """Look at a request that was held; there is none but on the generation side."""

    # --- what the two sides do differently ------------------------------------------------------------------------

    @abstractmethod
    def ready(self) -> Ready:
        """Say what there is to say to a caller that has attached."""

    @abstractmethod
    def capacity_tokens(self, work: W) -> int:
        """Return how many positions a request needs pages for."""

    @abstractmethod
    def take(self, work: W) -> bool:
        """Begin with a request, or refuse it; return False (nothing was done) where pages in use must come back."""

    @abstractmethod
    def refuse(self, work: W, reason: str) -> None:
        """Report that a request failed before its transfer began."""

    @abstractmethod
    def settle(self) -> bool:
        """Do one round of what changed transfers have made possible; return whether there is more."""

    @abstractmethod
    def stop_transfer(self, request_id: RequestId, reason: str) -> None:
        """Fail the transfer of a request that `in_use` names."""

    @abstractmethod
    def in_use(self) -> tuple[RequestId, ...]:
        """Return the requests whose pages a transfer or we may still touch."""

    # --- the loop ---------------------------------------------------------------------------------------------------

    def _runnable(self) -> bool:
        return self._more or (bool(self._waiting) and not self._short_of_pages)

    def _turn(self, timeout_s: float) -> None:
        for event in self.runtime.control.poll(timeout_s):
            if isinstance(event, Received):
                self._receive(event)
            else:
                self._lose(event)
        self._drop_overdue()
        while self._waiting and not self._short_of_pages:
            if self.take(self._waiting[0].work):
                self._waiting.popleft()
            else:
                self._short_of_pages = True
            if not self.takes_all:
                break
        self._more = self.settle()

    def _receive(self, event: Received) -> None:
        try:
            message = CODEC.decode(event.frames).message
        except RemoteProtocolError as error:
            _log.warning("dropped a control message: %s", error)
            return
        match message:
            case Attach():
                self._attach(message)
            case Stop():
                self._stopping = self._stopping or message.reason or "asked to stop"
            case Proceed():
                self.proceed(message.request_id)
            case GiveUp():
                self._give_up(message.request_id, message.reason)
            case RunPrompt() | RunDecode():
                self._accept(message)
            case _:
                _log.warning("dropped a control message: %s does not go to a worker", type(message).__name__)

    def _accept(self, message: RunPrompt | RunDecode) -> None:
        known = {waiting.work.request_id for waiting in self._waiting} | set(self.in_use())
        if not isinstance(message, self.work_type) or message.request_id in known:
            _log.warning("dropped a %s: request %d is open, or not ours", type(message).__name__, message.request_id)
        elif self._stopping:
            self.refuse(message, f"{self.runtime.side} rank {self.runtime.rank} is ending: {self._stopping}")
        elif reason := self._never_fits(message):
            self.refuse(message, reason)
        else:
            self._waiting.append(_Waiting(message, now_s()))

    def _never_fits(self, work: W) -> str:
        """Return why a request can never have its pages, "" where it can: such a one does not wait for its turn."""
        longest = self.runtime.pair.side(self.runtime.side).max_seq_len
        if not 1 <= work.prompt_tokens <= longest:
            thing, want = f"request {work.request_id}", f"in [1, {longest}]"
            return explain(thing, "prompt_tokens", work.prompt_tokens, want, "shorten it, or raise max_seq_len")
        try:
            self.runtime.manager.check_fits(self.capacity_tokens(work), work.prompt_tokens)
        except (CapacityError, SpecError) as error:
            return f"request {work.request_id}: {error}"
        return ""

    def _attach(self, message: Attach) -> None:
        if self._caller and self._caller != message.reply_to:
            # It may be gone, and we hear of that a moment later.
            _log.warning("a caller at %s waits: the one at %s is still there", message.reply_to, self._caller)
            self._next_caller = message
            return
        self._caller, self._owned = message.reply_to, message.owner
        self.runtime.control.connect(self._caller)
        self.report(self.ready())

    def _lose(self, event: PeerGone) -> None:
        if event.address != self._caller:
            return
        reason = f"the caller is gone: {event.reason}"
        _log.warning("%s rank %d: %s", self.runtime.side, self.runtime.rank, reason)
        self._caller = ""
        self._give_everything_up(reason)
        if self._owned:
            self._stopping = self._stopping or reason
        elif self._next_caller is not None:
            caller, self._next_caller = self._next_caller, None
            self._attach(caller)

    def _send(self, message: ControlMessage) -> None:
        frames = CODEC.encode(message, incarnation=self.runtime.card.incarnation, rank=self.runtime.rank)
        self.runtime.control.send(self._caller, frames)

    # --- ways for a request to fail without its transfer ------------------------------------------------------------

    def _drop_overdue(self) -> None:
        limit_s = self.runtime.pair.transfer.timeout_s
        overdue = [waiting for waiting in self._waiting if now_s() - waiting.since_s > limit_s]
        for waiting in overdue:
            self._waiting.remove(waiting)
            place = f"{self.runtime.side} rank {self.runtime.rank}"
            self.refuse(waiting.work, f"{place}: no pages within {limit_s:g} s; enlarge the pool or send less at once")

    def _give_up(self, request_id: RequestId, reason: str) -> None:
        """Fail a request, wherever it is; one that is not open is over already."""
        for waiting in [item for item in self._waiting if item.work.request_id == request_id]:
            self._waiting.remove(waiting)
            self.refuse(waiting.work, reason)
        if request_id in self.in_use():
            self.stop_transfer(request_id, reason)

    def _give_everything_up(self, reason: str) -> None:
        for request_id in (*(waiting.work.request_id for waiting in self._waiting), *self.in_use()):
            self._give_up(request_id, reason)

    # --- the end ----------------------------------------------------------------------------------------------------

    def _over(self) -> bool:
        """Whether to leave the loop: at once, or when what is open has ended or had its time."""
        if not self._stopping:
            return False
        reason = f"{self.runtime.side} rank {self.runtime.rank} is ending: {self._stopping}"
        if not self._drained_by_s:
            self._drained_by_s = now_s() + DRAIN_S
            for waiting in list(self._waiting):
                self._give_up(waiting.work.request_id, reason)
        if not self.in_use():
            return True
        if now_s() > self._drained_by_s and not self._gave_up:
            self._gave_up = True
            self._give_everything_up(reason)
        return now_s() > self._drained_by_s + QUIET_S

    def _on_signal(self, number: int, _frame: FrameType | None) -> None:
        """Take note; the next signal of this kind ends the process at once."""
        signal.signal(number, signal.SIG_DFL)
        self._stopping = self._stopping or f"signal {signal.Signals(number).name}"
        self.wake()


def describe(error: Exception, what: str) -> str:
    """Return an error as the reason of a failed request. Whatever a model raises is that request's end, not ours."""
    if isinstance(error, UnikvError):
        return f"{what}: {error}"
    _log.error("%s failed", what, exc_info=error)
    return f"{what}: {type(error).__name__}: {error}"


def now_s() -> float:
    """Return the host's monotonic clock, which all processes of one host share."""
    return time.monotonic()
