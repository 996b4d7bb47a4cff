"""The only loop: joins a link, a clock and an engine, and lets other threads ask for things.

An engine is single-threaded and does everything in `turn`; the driver gives it a thread. Calls from other threads are
queued and run between turns, so nothing in an engine needs a lock.
"""

from __future__ import annotations

import logging
import math
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Final, Protocol, TypeVar, cast

from transfer.link import Link
from unikv.errors import InternalError, LinkClosedError, LocalProtocolError, explain

_log = logging.getLogger(__name__)
_T = TypeVar("_T")

SPIN_S: Final = 0.0003
"""How long a copy on a device is watched without a pause: most small ones are over by then."""
NAP_S: Final = 0.00005
NAPS_S: Final = 0.002
"""For how long after that the pauses are this short; then they are a message's wait of a millisecond."""
LONG_COPY_POLL_S: Final = 0.001

END_S: Final = 10.0
"""How long the thread may take to end its last turn once it was told to; a turn is short, a busy machine slow."""
IDLE_POLL_S: Final = 0.05
"""Longest wait for a message: also how late a deadline or the death of a peer's process can be noticed."""


class Engine(Protocol):
    """What the driver drives."""

    link: Link

    def turn(self, timeout_s: float) -> bool:
        """Handle what arrived (waiting up to `timeout_s`), do one step of work; return whether more is waiting."""
        ...

    def copying(self) -> bool:
        """Return whether copies run beside the engine; their end must be looked for, since nothing announces it."""
        ...

    def expecting(self) -> bool:
        """Return whether a message may come that somebody waits for."""
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


class _Call:
    """One queued call. It runs once, or never: not after its caller gave up, and not after the driver ended."""

    def __init__(self, function: Callable[[], object]) -> None:
        self._function = function
        self._claim = threading.Lock()
        self._over = threading.Event()
        self._value: object = None
        self._error: BaseException | None = None

    def run(self) -> None:
        """Run the function, unless somebody claimed the call before."""
        if not self._claim.acquire(blocking=False):
            return
        try:
            self._value = self._function()
        except BaseException as error:
            self._error = error
        self._over.set()

    def refuse(self, error: BaseException) -> None:
        """Let the caller raise `error`, unless the call has run."""
        if self._claim.acquire(blocking=False):
            self._error = error
            self._over.set()

    def wait(self, timeout_s: float) -> bool:
        """Wait for the end of the call."""
        return self._over.wait(timeout_s)

    def result(self) -> object:
        """Return or raise what the function did."""
        if self._error is not None:
            raise self._error
        return self._value


class TransferDriver:
    """Runs one engine in a thread of its own until `close`.

    Args:
        engine: what it runs.
        name: of the thread.
        watch_s: see `transfer.options.TransferOptions`.
    """

    def __init__(self, engine: Engine, *, name: str, watch_s: float = 0.0) -> None:
        self._engine, self._watch_s = engine, watch_s
        self._calls: deque[_Call] = deque()
        self._accepting = threading.Lock()
        self._ended = False
        self._closing = threading.Event()
        self._close_once = threading.Lock()
        self._failure: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def call(self, function: Callable[[], _T], *, timeout_s: float = 30.0) -> _T:
        """Run `function` between two turns of the engine and return what it returns or raise what it raises.

        A call that gave up before the engine got to it never runs; one that was running when its time was up ends
        unheard.

        Raises:
            LinkClosedError: the driver is closed.
            LocalProtocolError: the engine did not get to it, or was not ready, within `timeout_s`; or the caller is
                the engine's own thread, which would wait for itself.
            InternalError: the engine's thread died.
        """
        self._check_thread("call")
        call = _Call(function)
        with self._accepting:
            if self._ended or self._closing.is_set():
                raise self._end()
            self._calls.append(call)
        self._engine.link.wake()
        if not call.wait(timeout_s):
            want = f"an answer within {timeout_s} s"
            text = explain("transfer driver", "call", "no answer", want, "look for a copy that blocks")
            call.refuse(LocalProtocolError(text))
            if not call.wait(0.0):  # it is running
                raise LocalProtocolError(text)
        return cast(_T, call.result())

    def close(self, reason: str, *, drain_s: float = 5.0) -> bool:
        """Shut the engine down, drain for up to `drain_s`, close the link; True when everything drained. Idempotent.

        Raises:
            LocalProtocolError: the caller is the engine's own thread.
        """
        self._check_thread("close")
        with self._close_once:
            if not self._closing.is_set():
                self._drain(reason, drain_s)
                self._closing.set()
                self._engine.link.wake()
            self._thread.join(timeout=max(drain_s, END_S))
            return self.ended and self._failure is None and self._engine.drained()

    @property
    def ended(self) -> bool:
        """Whether the thread is gone: nothing of the engine touches its link or its memory any more."""
        return not self._thread.is_alive()

    def _drain(self, reason: str, drain_s: float) -> None:
        deadline_s = time.monotonic() + drain_s
        try:
            self.call(lambda: self._engine.shut_down(reason), timeout_s=drain_s)
            while not self.call(self._engine.drained, timeout_s=drain_s) and time.monotonic() < deadline_s:
                self._closing.wait(min(IDLE_POLL_S, drain_s))
        except (LinkClosedError, LocalProtocolError, InternalError) as error:
            _log.warning("transfer driver: shut down without draining: %s", error)

    def _run(self) -> None:
        busy, patience = False, _Patience(self._watch_s)
        try:
            while not self._closing.is_set():
                called = self._run_calls()  # a call may have made work that no event announces
                wait_s = patience.wait_s(busy=busy or called, copying=self._engine.copying())
                if wait_s and patience.watching() and self._engine.expecting():
                    wait_s = 0.0
                busy = self._engine.turn(wait_s)
        except BaseException as error:
            self._failure = error
            _log.exception("transfer driver: the engine failed")
            self._engine.abandon(f"the transfer engine failed: {error!r}")
        finally:
            self._refuse_calls()
            try:
                self._engine.close()
            finally:
                self._engine.link.close()

    def _run_calls(self) -> bool:
        """Run the calls that wait; return whether there were any."""
        ran = False
        while self._calls:
            self._calls.popleft().run()
            ran = True
        return ran

    def _refuse_calls(self) -> None:
        """Take no further calls, and answer those that came too late."""
        with self._accepting:
            self._ended = True
        while self._calls:
            self._calls.popleft().refuse(self._end())

    def _end(self) -> InternalError | LinkClosedError:
        if self._failure is not None:
            error = InternalError(f"transfer driver: the engine failed: {self._failure!r}")
            error.__cause__ = self._failure
            return error
        return LinkClosedError(explain("transfer driver", "state", "closed", "open", "make a new endpoint"))

    def _check_thread(self, what: str) -> None:
        if threading.current_thread() is self._thread:
            cure = "use the endpoint from your own threads, not from a callback"
            raise LocalProtocolError(explain("transfer driver", f"thread of {what}", "its own", "another one", cure))


class _Patience:
    """How long a turn may wait for messages, and the pauses before it while copies run."""

    def __init__(self, watch_s: float = 0.0) -> None:
        self._watch_s = watch_s
        self._active_s = -math.inf
        self._watching_since_s = 0.0

    def watching(self) -> bool:
        """Return whether something was to do so recently that no pause is made."""
        return self._watch_s > 0 and time.monotonic() - self._active_s < self._watch_s

    def wait_s(self, *, busy: bool, copying: bool) -> float:
        """Return the next turn's timeout; pause first where a copy has run for a while."""
        if self._watch_s and (busy or copying):
            self._active_s = time.monotonic()
        if busy or not copying:
            self._watching_since_s = 0.0
            return 0.0 if busy else IDLE_POLL_S
        now_s = time.monotonic()
        self._watching_since_s = self._watching_since_s or now_s
        watched_s = now_s - self._watching_since_s
        if watched_s < max(SPIN_S, self._watch_s):
            return 0.0
        if watched_s < NAPS_S:
            time.sleep(NAP_S)
            return 0.0
        return LONG_COPY_POLL_S
