"""The caller's end of the control link: attaches to every worker, sends work, hands reports back."""

from __future__ import annotations

import logging
import secrets
import time
from collections.abc import Callable, Collection, Mapping
from typing import Final, Self

from transfer.hello import Side
from transfer.link import PeerGone, Received
from transfer.link_curve import CurveKeys
from transfer.link_zmq import ZmqLink
from unikv.errors import LinkBrokenError, RemoteProtocolError, explain
from workers.addresses import ON_LOOPBACK, LinkAddress
from workers.control import CODEC, Attach, ControlMessage, DecodeReport, PromptReport, Ready
from workers.rendezvous import Rendezvous
from workers.routing import WorkerName

_log = logging.getLogger(__name__)

_POLL_S: Final = 0.1
_LOOK_S: Final = 0.01
"""Pause between two looks for workers that are not up yet."""
CONNECT_S: Final = 30.0

Report = PromptReport | DecodeReport


class FleetClient:
    """Talks to all workers of one pair. One thread uses it; a context manager.

    Args:
        owner: the workers are ours: they end when we go.
        curve: keys of the link; None where the workers' links have none.
        address: where workers send their reports.
        silence_s: a worker that has been silent for so long is gone; None for the link's own limit.

    Attributes:
        ready: what each attached worker said of itself.
    """

    def __init__(
        self,
        *,
        owner: bool = True,
        curve: CurveKeys | None = None,
        address: LinkAddress = ON_LOOPBACK,
        silence_s: float | None = None,
    ) -> None:
        self._owner = owner
        self._link = ZmqLink(
            address.bind,
            advertise=address.advertise,
            connect_timeout_s=CONNECT_S,
            curve=curve,
            silence_s=silence_s,
        )
        self._incarnation = secrets.token_hex(16)
        self._addresses: dict[WorkerName, str] = {}
        self._gone: dict[WorkerName, str] = {}
        self._closed = False
        self.ready: dict[WorkerName, Ready] = {}

    @property
    def gone(self) -> dict[WorkerName, str]:
        """Workers whose control link broke, with the reason."""
        return dict(self._gone)

    def attach(
        self, rendezvous: Rendezvous, ranks: Mapping[Side, int], *, timeout_s: float, alive: Callable[[], None]
    ) -> None:
        """Find every worker, attach to it, and wait until all are ready; `alive` is called meanwhile and may raise.

        Raises:
            LinkBrokenError: a worker did not come up within `timeout_s`, or went away.
        """
        deadline_s = time.monotonic() + timeout_s
        names = [(side, rank) for side, count in ranks.items() for rank in range(count)]
        while len(self.ready) < len(names):
            alive()
            self._look(rendezvous, ranks)
            self.poll(_LOOK_S)
            if self._gone:
                (side, rank), reason = next(iter(self._gone.items()))
                raise LinkBrokenError(f"{side} rank {rank} went away during start: {reason}; see its log")
            if time.monotonic() > deadline_s:
                missing = ", ".join(f"{side} {rank}" for side, rank in names if (side, rank) not in self.ready)
                want = f"all within {timeout_s:g} s"
                raise LinkBrokenError(explain("workers", "not ready", missing, want, "see their logs"))

    def send(self, side: Side, message: ControlMessage, ranks: Collection[int] | None = None) -> None:
        """Send `message` to every rank of a side, or those in `ranks`, that is still there."""
        for (other, rank), address in self._addresses.items():
            if other is side and (ranks is None or rank in ranks):
                self._send_to(address, message)

    def poll(self, timeout_s: float = _POLL_S) -> list[Report]:
        """Return the reports that arrived, waiting up to `timeout_s` for the first."""
        events = self._link.poll(timeout_s)
        messages = [self._read(event) for event in events if isinstance(event, Received)]
        for event in events:
            if isinstance(event, PeerGone):
                self._lose(event)
        return [message for message in messages if isinstance(message, PromptReport | DecodeReport)]

    def close(self) -> None:
        """Close the link; workers that are ours end by themselves. Idempotent."""
        self._closed = True
        self._link.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_exc: object) -> None:
        self.close()

    def _look(self, rendezvous: Rendezvous, ranks: Mapping[Side, int]) -> None:
        """Attach to whoever has announced itself since the last look."""
        for side, count in ranks.items():
            if sum(other is side for other, _ in self._addresses) == count:
                continue
            for rank, address in rendezvous.known("control", side, count).items():
                if (side, rank) not in self._addresses:
                    self._addresses[side, rank] = address
                    self._link.connect(address)
                    self._send_to(address, Attach(reply_to=self._link.address, owner=self._owner))

    def _read(self, event: Received) -> ControlMessage | None:
        try:
            message = CODEC.decode(event.frames).message
        except RemoteProtocolError as error:
            _log.warning("dropped a report: %s", error)
            return None
        if isinstance(message, Ready) and (message.side, message.rank) in self._addresses:
            self.ready[message.side, message.rank] = message
        return message

    def _send_to(self, address: str, message: ControlMessage) -> None:
        if self._closed:
            return
        try:
            self._link.send(address, CODEC.encode(message, incarnation=self._incarnation, rank=0))
        except LinkBrokenError as error:
            _log.info("%s not sent: %s", type(message).__name__, error)

    def _lose(self, event: PeerGone) -> None:
        for name, address in self._addresses.items():
            if address == event.address:
                self._gone[name] = event.reason
