"""The main loop of a worker process: control messages, transfers that changed, and a clean end."""

from __future__ import annotations

import logging
import os
import signal
import time
from abc import ABC, abstractmethod
from types import FrameType
from typing import Final

from transfer.link import PeerGone, Received
from unikv.errors import LinkBrokenError, RemoteProtocolError, UnikvError
from workers.control import (
    CODEC,
    Attach,
    ControlMessage,
    DigestReport,
    EvidenceReport,
    LegRecord,
    Ready,
    RunDecode,
    RunPrompt,
    Stop,
)
from workers.rank_runtime import RankRuntime
from workers.rendezvous import Rendezvous
from workers.runner import Evidence, Runner

_log = logging.getLogger(__name__)

_POLL_S: Final = 0.5
"""Longest wait for a control message; changed transfers wake the loop earlier."""
BACKGROUND_NICE: Final = 10
"""Niceness of a main thread whose work must not disturb the transfer's thread."""
DRAIN_S: Final = 5.0
"""Longest wait for open transfers when the worker ends."""


class Worker(ABC):
    """One rank of one side. Its main thread runs the model and owns the cache; transfers run in the endpoint's thread."""

    def __init__(self, runtime: RankRuntime, runner: Runner, rendezvous: Rendezvous) -> None:
        self.runtime, self.runner, self.rendezvous = runtime, runner, rendezvous
        self._caller = ""
        self._stopping = ""

    def run(self) -> int:
        """Serve until a Stop message, a signal, or the caller's end; return the process's exit code."""
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self._on_signal)
        self.rendezvous.announce("control", self.runtime.side, self.runtime.rank, self.runtime.control.address)
        if self.runner.background:
            os.nice(BACKGROUND_NICE)  # this thread alone: on Linux niceness belongs to threads
        _log.info("%s rank %d serves", self.runtime.side, self.runtime.rank)
        while not self._stopping or self.busy():
            if self._stopping:
                self.give_up(self._stopping)
            self._turn(0.0 if self.runnable() else _POLL_S)
        _log.info("%s rank %d ends: %s", self.runtime.side, self.runtime.rank, self._stopping)
        return 0

    def report(self, message: ControlMessage) -> None:
        """Send a report to the caller; where it is gone the log keeps it."""
        if not self._caller:
            _log.warning("no caller to report %s to", type(message).__name__)
            return
        frames = CODEC.encode(message, incarnation=self.runtime.card.incarnation, rank=self.runtime.rank)
        try:
            self.runtime.control.send(self._caller, frames)
        except LinkBrokenError as error:
            _log.warning("report not sent: %s", error)

    def wake(self) -> None:
        """Make the loop look at its transfers. Safe from any thread."""
        self.runtime.control.wake()

    @abstractmethod
    def ready(self) -> Ready:
        """Connect to the other side where that is ours to do, and say what came of it."""

    @abstractmethod
    def handle(self, message: RunPrompt | RunDecode) -> None:
        """Take a piece of work."""

    @abstractmethod
    def advance(self) -> None:
        """Do what has become possible: finish transfers, start waiting work."""

    @abstractmethod
    def runnable(self) -> bool:
        """Whether `advance` has work that needs no further event."""

    @abstractmethod
    def busy(self) -> bool:
        """Whether pages are still in use."""

    @abstractmethod
    def give_up(self, reason: str) -> None:
        """Fail everything that is open."""

    def _turn(self, timeout_s: float) -> None:
        for event in self.runtime.control.poll(timeout_s):
            if isinstance(event, Received):
                self._receive(event)
            else:
                self._lose(event)
        self.advance()

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
                self._stopping = message.reason
            case RunPrompt() | RunDecode():
                self.handle(message)
            case _:
                _log.warning("dropped a control message: %s does not go to a worker", type(message).__name__)

    def _attach(self, message: Attach) -> None:
        self._caller = message.reply_to
        self.runtime.control.connect(self._caller)
        self.report(self.ready())

    def _lose(self, event: PeerGone) -> None:
        if event.address == self._caller:
            self._caller = ""
            self._stopping = f"the caller is gone: {event.reason}"

    def _on_signal(self, number: int, _frame: FrameType | None) -> None:
        self._stopping = f"signal {signal.Signals(number).name}"
        self.wake()


def evidence_report(evidence: Evidence) -> EvidenceReport:
    """Return `evidence` in its wire form: digests of one (layer, role, head) joined."""
    rows: dict[tuple[int, str, int], list[tuple[int, bytes]]] = {}
    for (layer, role, head, ordinal), digest in evidence.digests.items():
        rows.setdefault((layer, role, head), []).append((ordinal, digest))
    return EvidenceReport(
        checked_bytes=evidence.checked_bytes,
        mismatched_bytes=evidence.mismatched_bytes,
        first_mismatch=evidence.first_mismatch,
        digests=tuple(
            DigestReport(
                layer=layer,
                role=role,
                head=head,
                ordinals=tuple(ordinal for ordinal, _ in row),
                digests=b"".join(digest for _, digest in row),
            )
            for (layer, role, head), row in rows.items()
        ),
    )


def now_s() -> float:
    """Return the host's monotonic clock, which all processes of one host share."""
    return time.monotonic()


__all__ = ["DRAIN_S", "LegRecord", "UnikvError", "Worker", "evidence_report", "now_s"]
