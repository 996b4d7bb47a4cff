"""Who comes to a context rank and who leaves it: hellos, goodbyes, lost peers, and strangers that must say hello."""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Callable
from typing import Final

from transfer.context_peers import ContextPeers
from transfer.exchange import Exchange, PeerKey
from transfer.hello import RankCard
from transfer.link import PeerGone
from transfer.messages import Hello, HelloAck, Reregister
from transfer.peer_memory import process_is_gone
from unikv.errors import RemoteProtocolError, explain

_log = logging.getLogger(__name__)

MAX_STRANGERS: Final = 64
"""Addresses of strangers we keep a connection to so that they hear our answer; the oldest is dropped for a new one."""


class ContextDoor:
    """Lets generation ranks in and out.

    Args:
        on_lost: tells the requests that a registered peer is lost; returns whether any of them was open towards it.
        touches: whether a copy towards a peer may still be running.
    """

    def __init__(
        self,
        exchange: Exchange,
        peers: ContextPeers,
        *,
        on_lost: Callable[[PeerKey, str], bool],
        touches: Callable[[PeerKey], bool],
    ) -> None:
        self._exchange, self._link, self._peers = exchange, exchange.link, peers
        self._on_lost, self._touches = on_lost, touches
        self._hellos: dict[PeerKey, RankCard] = {}
        self._cut_off: set[PeerKey] = set()
        self._strangers: OrderedDict[str, None] = OrderedDict()

    def hello(self, message: Hello, key: PeerKey) -> None:
        """Note a hello; `answer_hellos` answers it once everything that arrived with it is handled.

        The loss of an old connection to the same address may be among that, and must not hit the new peer.

        Raises:
            RemoteProtocolError: the card is not the sender's.
        """
        card = message.card
        if (card.incarnation, card.rank) != key:
            raise RemoteProtocolError(
                explain("hello", "card", card.rank, f"the sender's rank {key[1]}", "send your own")
            )
        self._hellos[key] = card

    def answer_hellos(self) -> bool:
        """Answer every hello that waits; return whether there was any.

        A process that we lost and that comes back is answered when our copies of its former life are over: the answer
        tells it that an acknowledged cancel will be the whole truth about its pages.
        """
        ready = [key for key in self._hellos if not self._peers.is_leaving(key)]
        for key in ready:
            self._answer(self._hellos.pop(key))
        return bool(ready)

    def turn_away(self, address: str, reason: str) -> None:
        """Ask the stranger at `address` to say hello."""
        self._meet(address)
        self._exchange.send(address, Reregister(reason=reason))

    def goodbye(self, key: PeerKey, reason: str) -> None:
        """A generation rank ends in an orderly way."""
        self._hellos.pop(key, None)
        self._lose(key, f"generation rank {key[1]} said goodbye: {reason}")

    def gone(self, event: PeerGone) -> None:
        """The connection to an address broke: whoever was there is lost, dead or not."""
        self._strangers.pop(event.address, None)
        for peer in self._peers.at(event.address):
            self._cut_off.add(peer.key)
            self._lose(peer.key, f"generation rank {peer.card.rank} is gone: {event.reason}")

    def let_go(self) -> None:
        """Forget who left and is not touched any more. One that only lost its connection hears that it must come back.

        Without that, a live process would wait for the answer to a cancel that we take for a stranger's.
        """
        for peer in self._peers.leaving():
            if self._touches(peer.key):
                continue
            self._peers.forget(peer.key)
            address, cut_off = peer.card.address, peer.key in self._cut_off
            self._cut_off.discard(peer.key)
            if cut_off and peer.key not in self._hellos and not process_is_gone(peer.card.host):
                self.turn_away(address, "this context rank lost its connection to you")
            elif not self._peers.at(address) and address not in self._strangers:
                self._link.disconnect(address)

    def _answer(self, card: RankCard) -> None:
        self._replace_at(card)
        self._link.connect(card.address)
        answer = self._peers.register(card)
        if isinstance(answer, HelloAck):
            self._strangers.pop(card.address, None)
        else:
            self._meet(card.address)
        self._exchange.send(card.address, answer)

    def _replace_at(self, card: RankCard) -> None:
        """Lose the former process at this address, with the connection to it and all that waits on it."""
        former = [peer for peer in self._peers.at(card.address) if peer.card.incarnation != card.incarnation]
        for peer in former:
            self._lose(peer.key, f"another process took the address of generation rank {peer.card.rank}")
        if former:
            self._link.disconnect(card.address)

    def _lose(self, key: PeerKey, reason: str) -> None:
        if self._peers.get(key) is None:
            return
        was_busy = self._on_lost(key, reason)
        self._peers.leave(key)
        level = logging.WARNING if was_busy else logging.INFO
        _log.log(level, "context rank %d: %s", self._exchange.card.rank, reason)

    def _meet(self, address: str) -> None:
        """Connect to a stranger; the connections to strangers are bounded."""
        self._link.connect(address)
        self._strangers[address] = None
        self._strangers.move_to_end(address)
        while len(self._strangers) > MAX_STRANGERS:
            oldest, _ = self._strangers.popitem(last=False)
            if not self._peers.at(oldest):
                self._link.disconnect(oldest)
