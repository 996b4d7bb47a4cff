"""What both engines share: sending envelopes, taking events off a link, and surviving whatever arrives."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Final

from transfer.hello import RankCard
from transfer.link import Frame, Link, PeerGone, Received, SendTicket
from transfer.messages import Cancel, Envelope, Failed, Goodbye, HelloNack, Message, Reregister
from transfer.story import PeerKey
from transfer.wire import decode, encode
from unikv.errors import LinkBrokenError, RemoteProtocolError

__all__ = ["Clock", "Exchange", "PeerKey"]

_log = logging.getLogger(__name__)

Clock = Callable[[], float]
"""Seconds on a clock that never goes back."""

REMIND_S: Final = 1.0
"""How often something that must be answered, and is not, is said again."""
MAX_REASON_BYTES: Final = 4096
"""Longest reason that is sent. Reasons quote one another from rank to rank; none may grow until it cannot travel."""


class Exchange:
    """One rank's end of the conversation.

    Attributes:
        refused: messages that were dropped, by reason; nothing a peer sends may do more harm than count here.
    """

    def __init__(self, link: Link, card: RankCard) -> None:
        self.link, self.card = link, card
        self.refused: Counter[str] = Counter()

    def send(self, address: str, message: Message) -> SendTicket | None:
        """Send `message`; None where the peer is gone, whose PeerGone event tells the rest.

        Raises:
            LocalProtocolError: a field of it cannot travel.
        """
        return self.post(address, self.pack(message))

    def pack(self, message: Message) -> list[Frame]:
        """Return the frames of `message` in our name; a reason that is too long is cut.

        Raises:
            LocalProtocolError: a field of it cannot travel.
        """
        match message:
            case Failed() | Cancel() | Goodbye() | Reregister() | HelloNack():
                message = replace(message, reason=legible(message.reason))
            case _:
                pass
        return encode(Envelope(incarnation=self.card.incarnation, rank=self.card.rank, message=message))

    def post(self, address: str, frames: Sequence[Frame]) -> SendTicket | None:
        """Send what `pack` returned; None where the peer is gone."""
        try:
            return self.link.send(address, frames)
        except LinkBrokenError as error:
            _log.info("%s rank %d: a message was not sent: %s", self.card.side, self.card.rank, error)
            return None

    def events(
        self,
        timeout_s: float,
        on_message: Callable[[Envelope], None],
        on_gone: Callable[[PeerGone], None],
    ) -> bool:
        """Hand every waiting event to its handler; a bad message costs its sender that message and nothing else."""
        arrived = self.link.poll(timeout_s)
        for event in arrived:
            if isinstance(event, PeerGone):
                on_gone(event)
            else:
                self._receive(event, on_message)
        return bool(arrived)

    def refuse(self, reason: str, text: str) -> None:
        """Count and log a message that is dropped."""
        self.refused[reason] += 1
        _log.warning("%s rank %d: dropped a message: %s", self.card.side, self.card.rank, text)

    def _receive(self, event: Received, on_message: Callable[[Envelope], None]) -> None:
        try:
            on_message(decode(event.frames))
        except RemoteProtocolError as error:
            self.refuse("protocol", str(error))
        except Exception:
            # Our bug, but one peer's message must not end the service of all others.
            self.refused["internal"] += 1
            _log.exception("%s rank %d: a message handler failed", self.card.side, self.card.rank)


def legible(reason: str) -> str:
    """Return a reason as it can travel and be logged: valid UTF-8, at most `MAX_REASON_BYTES` of it."""
    return reason.encode(errors="replace")[:MAX_REASON_BYTES].decode(errors="ignore")
