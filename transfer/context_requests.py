"""The requests of a context rank: open ones, and the ended ones that late asks must hear about."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

from transfer.context_session import ContextSession
from transfer.device_bytes import DeviceEvent
from transfer.exchange import PeerKey
from transfer.messages import Ask, AuxData
from transfer.outcome import LegReport, TransferHandle
from transfer.pages import SlotArray
from transfer.paths import Move
from transfer.readiness import ReadinessManager
from unikv.ids import GroupId, RequestId

MAX_ENDED: Final = 4096
"""Ended requests that are remembered, so that a late ask hears why it is too late."""
MAX_WAITING: Final = 4096
"""Requests asked for before their KV exists; beyond that the oldest is refused, never one that is being moved."""


@dataclass(slots=True)
class LegWork:
    """What one generation rank asked for, and how far its move is.

    Attributes:
        asked_s, planned_s, moving_s: when it asked, when its pages were paired, when its first copy began (0.0: not
            yet), on the engine's clock.
        plan_s: how long pairing took.
        busy_s: time spent in steps that moved something.
    """

    ask: Ask
    asked_s: float
    planned_s: float = 0.0
    plan_s: float = 0.0
    moving_s: float = 0.0
    busy_s: float = 0.0
    move: Move | None = None


@dataclass(slots=True)
class ContextRequest:
    """Everything of one request on a context rank. Until `handle` is set its KV is not ready.

    Attributes:
        ready_s, complete_s: when it was published, and when all of its KV was there.
        written: device events behind which its KV is; None: the device's default stream.
        readiness: how far the KV is; None where all of it was there when the request was published.
        broken: a bug of ours left its session in an unknown state: nothing more is done for it, nothing released.
    """

    session: ContextSession
    created_s: float
    handle: TransferHandle | None = None
    tables: Mapping[GroupId, SlotArray] = field(default_factory=dict)
    prompt_tokens: int = 0
    ready_s: float = 0.0
    complete_s: float = 0.0
    written: Sequence[DeviceEvent] | None = None
    aux: AuxData | None = None
    legs: dict[PeerKey, LegWork] = field(default_factory=dict)
    reports: list[LegReport] = field(default_factory=list)
    broken: bool = False
    readiness: ReadinessManager | None = None


class RequestBook:
    """Open and ended requests by id; both are bounded."""

    def __init__(self) -> None:
        self._open: OrderedDict[RequestId, ContextRequest] = OrderedDict()
        self._ended: OrderedDict[RequestId, str] = OrderedDict()
        self._waiting: dict[RequestId, None] = {}

    def __iter__(self) -> Iterator[ContextRequest]:
        """Iterate over a snapshot of the open requests, oldest first."""
        return iter(list(self._open.values()))

    def get(self, request_id: RequestId) -> ContextRequest | None:
        """Return an open request."""
        return self._open.get(request_id)

    def ended(self, request_id: RequestId) -> str | None:
        """Return why a request is over, None where it is open or unknown (or ended long ago)."""
        return self._ended.get(request_id)

    def open(self, request: ContextRequest) -> ContextRequest:
        """Add an open request, whose KV is not ready."""
        self._open[request.session.request_id] = request
        self._waiting[request.session.request_id] = None
        return request

    def overdue_waiter(self) -> ContextRequest | None:
        """Return the oldest request that waits for KV where too many do, else None."""
        return self._open[next(iter(self._waiting))] if len(self._waiting) >= MAX_WAITING else None

    def published(self, request_id: RequestId) -> None:
        """Note that an open request waits for KV no more."""
        self._waiting.pop(request_id, None)

    def forget(self, request_id: RequestId) -> None:
        """Drop a request that is not ours after all: whoever asks again is heard."""
        self._open.pop(request_id, None)
        self._waiting.pop(request_id, None)

    def end(self, request_id: RequestId, reason: str) -> None:
        """Close a request, or remember one that never opened. The first reason stays."""
        self.forget(request_id)
        self._ended.setdefault(request_id, reason)
        while len(self._ended) > MAX_ENDED:
            self._ended.popitem(last=False)
