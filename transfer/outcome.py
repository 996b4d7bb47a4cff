"""What callers of an endpoint hold: a handle with an outcome, and the separate fact that the pages are quiet."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from dataclasses import dataclass

from transfer.messages import AuxData, StageTimes
from unikv.ids import RequestId

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class LegReport:
    """What one pair of ranks did for one request.

    Attributes:
        peer: rank of the other side.
        bytes: useful bytes moved, of them `draft_bytes` in draft layers.
        times: seconds per stage on the context side; None where the peer sent none.
    """

    peer: int
    path: str
    bytes: int
    draft_bytes: int
    times: StageTimes | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """How a transfer ended on this rank.

    Attributes:
        reason: empty on success; else why it failed, with the rank that failed.
        aux: what travelled beside the KV (generation side, on success).
        settle_s: from the last peer's last word to usable pages (generation side).
        total_s: from the call to the outcome.
    """

    request_id: RequestId
    reason: str = ""
    legs: tuple[LegReport, ...] = ()
    aux: AuxData | None = None
    settle_s: float = 0.0
    total_s: float = 0.0

    @property
    def ok(self) -> bool:
        """Whether every byte is where it belongs."""
        return not self.reason


class TransferHandle:
    """One transfer as its caller sees it. Written by the endpoint's thread, read from any.

    Two facts arrive separately: the *outcome* (success or failure, final), and *quiet* (no copy and no peer can touch
    the request's pages any more: only then may they be reused). On success quiet comes with the outcome on the
    generation side.

    `on_change` runs in the endpoint's thread after either fact; what it raises is logged and goes no further.
    """

    def __init__(self, request_id: RequestId, on_change: Callable[[], None] | None = None) -> None:
        self.request_id = request_id
        self._on_change = on_change or (lambda: None)
        self._decided = threading.Event()
        self._quiet = threading.Event()
        self._outcome: Outcome | None = None

    @property
    def outcome(self) -> Outcome | None:
        """The outcome, or None while it is open."""
        return self._outcome

    @property
    def quiet(self) -> bool:
        """Whether the pages may be reused."""
        return self._quiet.is_set()

    def wait(self, timeout_s: float | None = None) -> Outcome | None:
        """Wait for the outcome; None when `timeout_s` passes first."""
        self._decided.wait(timeout_s)
        return self._outcome

    def wait_quiet(self, timeout_s: float | None = None) -> bool:
        """Wait until the pages may be reused; False when `timeout_s` passes first."""
        return self._quiet.wait(timeout_s)

    def decide(self, outcome: Outcome) -> None:
        """Set the outcome (endpoint only)."""
        self._outcome = outcome
        self._decided.set()
        self._tell()

    def settle_quiet(self) -> None:
        """Say that the pages are free of the transfer (endpoint only)."""
        self._quiet.set()
        self._tell()

    def _tell(self) -> None:
        try:
            self._on_change()
        except Exception:
            _log.exception("request %d: the caller's callback failed", self.request_id)
