"""The only loop: joins a link, a clock and an engine, and lets other threads ask for things.

An engine is single-threaded and does everything in `turn`; the driver gives it a thread. Calls from other threads are
queued and run between turns, so nothing in an engine needs a lock.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Callable
from typing import Final, Protocol, TypeVar

from transfer.link import Link
from unikv.errors import InternalError, LinkClosedError, LocalProtocolError, explain

_log = logging.getLogger(__name__)
_T = TypeVar("_T")

IDLE_POLL_S: Final = 0.05
"""Longest wait for a message: also how late a deadline or the death of a peer's process can be noticed."""


class Engine(Protocol):
    """What the driver drives."""

    link: Link

    def turn(self, timeout_s: float) -> bool:
        """Handle what arrived (waiting up to `timeout_s`), do one step of work; return whether more is waiting."""
        ...

    def shut_down(self, reason: str) -> None:
        """Fail what is open, tell the peers, stop copies. The link is still open."""
        ...

    def drained(self) -> bool:
        """Return whether no copy and no peer can touch our pages any more."""
        ...

    def abandon(self, reason: str) -> None:
        """The engine is broken: decide every open handle as failed, call no page quiet."""
        ...

    def close(self) -> None:
        """Free what the engine holds; the link closes right after."""
        ...


class TransferDriver:
    """Runs one engine in a thread of its own until `close`."""

    def __init__(self, engine: Engine, *, name: str) -> None:
        self._engine = engine
        self._calls: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._closing = threading.Event()
        self._failure: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def call(self, function: Callable[[], _T], *, timeout_s: float = 30.0) -> _T:
        """Run `function` between two turns of the engine and return what it returns or raise what it raises.

        Raises:
            LinkClosedError: the driver is closed.
            LocalProtocolError: the engine did not get to it within `timeout_s`.
            InternalError: the engine's thread died.
        """
        self._check_alive()
        box: queue.SimpleQueue[tuple[bool, object]] = queue.SimpleQueue()

        def job() -> None:
            try:
                box.put((True, function()))
            except BaseException as error:
                box.put((False, error))

        self._calls.put(job)
        self._engine.link.wake()
        try:
            fine, value = box.get(timeout=timeout_s)
        except queue.Empty:
            self._check_alive()
            want = f"an answer within {timeout_s} s"
            text = explain("transfer driver", "call", "no answer", want, "look for a copy that blocks")
            raise LocalProtocolError(text) from None
        if not fine:
            raise value  # type: ignore[misc]  # it is an exception by construction
        return value  # type: ignore[return-value]

    def close(self, reason: str, *, drain_s: float = 5.0) -> bool:
        """Shut the engine down, drain for up to `drain_s`, close the link; True when everything drained. Idempotent."""
        if self._thread.is_alive():
            deadline_s = time.monotonic() + drain_s
            try:
                self.call(lambda: self._engine.shut_down(reason), timeout_s=drain_s)
                while not self.call(self._engine.drained, timeout_s=drain_s) and time.monotonic() < deadline_s:
                    self._closing.wait(IDLE_POLL_S)
            except (LinkClosedError, LocalProtocolError, InternalError):
                _log.warning("transfer driver: shut down without draining")
            self._closing.set()
            self._engine.link.wake()
            self._thread.join(timeout=drain_s)
        return self._failure is None and self._engine.drained()

    def _run(self) -> None:
        busy = False
        try:
            while not self._closing.is_set():
                called = self._run_calls()  # a call may have made work that no event announces
                busy = self._engine.turn(0.0 if busy or called else IDLE_POLL_S)
        except BaseException as error:
            self._failure = error
            _log.exception("transfer driver: the engine failed")
            self._engine.abandon(f"the transfer engine failed: {error!r}")
        finally:
            self._engine.close()
            self._engine.link.close()

    def _run_calls(self) -> bool:
        """Run the calls that wait; return whether there were any."""
        ran = False
        while True:
            try:
                job = self._calls.get_nowait()
            except queue.Empty:
                return ran
            job()
            ran = True

    def _check_alive(self) -> None:
        if self._failure is not None:
            raise InternalError(f"transfer driver: the engine failed: {self._failure!r}") from self._failure
        if not self._thread.is_alive() or self._closing.is_set():
            raise LinkClosedError(explain("transfer driver", "state", "closed", "open", "make a new endpoint"))
