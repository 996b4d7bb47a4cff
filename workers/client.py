"""The caller's end of the control link: attaches to every worker, sends work, hands reports back."""

from __future__ import annotations

import logging
import secrets
import time
from collections.abc import Callable, Iterable
from types import TracebackType
from typing import Final, Self

from transfer.hello import Side
from transfer.link import PeerGone
from transfer.link_zmq import ZmqLink
from unikv.errors import LinkBrokenError, RemoteProtocolError, explain
from workers.control import CODEC, Attach, ControlMessage, DecodeReport, PromptReport, Ready
from workers.rendezvous import Rendezvous

_log = logging.getLogger(__name__)

_POLL_S: Final = 0.1
WorkerName = tuple[Side, int]
Report = PromptReport | DecodeReport | Ready


class FleetClient:
    """Talks to all workers of one pair. One thread uses it; a context manager."""

    def __init__(self) -> None:
        self._link = ZmqLink(connect_timeout_s=30.0)
        self._incarnation = secrets.token_hex(16)
        self._addresses: dict[WorkerName, str] = {}
        self._gone: dict[WorkerName, str] = {}
        self.ready: dict[WorkerName, Ready] = {}

    @property
    def gone(self) -> dict[WorkerName, str]:
        """Workers whose control link broke, with the reason."""
        return dict(self._gone)

    def attach(
        self, rendezvous: Rendezvous, ranks: dict[Side, int], *, timeout_s: float, alive: Callable[[], None]
    ) -> None:
        """Find every worker and wait until all are ready; `alive` is called meanwhile and may raise.

        Raises:
            LinkBrokenError: a worker did not come up within `timeout_s`.
        """
        deadline_s = time.monotonic() + timeout_s
        for side, count in ranks.items():
            addresses = self._find(rendezvous, side, count, deadline_s, alive)
            self._addresses |= {(side, rank): address for rank, address in enumerate(addresses)}
        for address in self._addresses.values():
            self._link.connect(address)
            self._send_to(address, Attach(reply_to=self._link.address))
        while len(self.ready) < len(self._addresses):
            alive()
            if time.monotonic() > deadline_s or self._gone:
                missing = ", ".join(
                    f"{side} {rank}" for side, rank in sorted(self._addresses.keys() - self.ready.keys())
                )
                raise LinkBrokenError(explain("workers", "not ready", missing, f"all within {timeout_s} s", "see logs"))
            self.poll(_POLL_S)

    def send(self, side: Side, message: ControlMessage) -> None:
        """Send `message` to every rank of a side that is still there."""
        for (other, _), address in self._addresses.items():
            if other is side:
                self._send_to(address, message)

    def poll(self, timeout_s: float = _POLL_S) -> list[PromptReport | DecodeReport]:
        """Return the reports that arrived, waiting up to `timeout_s` for the first."""
        reports: list[PromptReport | DecodeReport] = []
        for event in self._link.poll(timeout_s):
            if isinstance(event, PeerGone):
                self._lose(event)
                continue
            try:
                message = CODEC.decode(event.frames).message
            except RemoteProtocolError as error:
                _log.warning("dropped a report: %s", error)
                continue
            if isinstance(message, Ready):
                self.ready[(Side(message.side), message.rank)] = message
            elif isinstance(message, PromptReport | DecodeReport):
                reports.append(message)
        return reports

    def close(self) -> None:
        """Close the link; workers that lose their caller end by themselves."""
        self._link.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _find(
        self, rendezvous: Rendezvous, side: Side, count: int, deadline_s: float, alive: Callable[[], None]
    ) -> Iterable[str]:
        while True:
            alive()
            try:
                return rendezvous.find("control", side, count, timeout_s=1.0)
            except LinkBrokenError:
                if time.monotonic() > deadline_s:
                    raise

    def _send_to(self, address: str, message: ControlMessage) -> None:
        try:
            self._link.send(address, CODEC.encode(message, incarnation=self._incarnation, rank=0))
        except LinkBrokenError as error:
            _log.info("%s not sent: %s", type(message).__name__, error)

    def _lose(self, event: PeerGone) -> None:
        for name, address in self._addresses.items():
            if address == event.address:
                self._gone[name] = event.reason
