"""The context ranks a generation rank talks to: hellos and answers, goodbyes, lost peers, and those in doubt."""

from __future__ import annotations

import logging
from collections import OrderedDict
from typing import Final, Protocol

from transfer.exchange import Exchange, PeerKey
from transfer.generation_peers import ContextPeer, Registration, accept
from transfer.hello import PathKind, RankCard
from transfer.link import PeerGone
from transfer.messages import Goodbye, Hello, HelloAck, HelloNack, Vacate
from transfer.peer_memory import process_is_gone
from unikv.errors import LinkBrokenError, LocalProtocolError, RemoteProtocolError, UnikvError, explain

_log = logging.getLogger(__name__)

MAX_LEFT: Final = 256
"""Ranks that have left and are remembered with their reasons."""


class DoorListener(Protocol):
    """Who must hear what happens to peers: the engine, for its requests."""

    def peer_lost(self, peer: ContextPeer, reason: str, *, quiet: bool) -> bool:
        """`peer` is lost (`quiet`: it certainly writes no more); return whether a request was open towards it."""
        ...

    def peer_back(self, peer: ContextPeer) -> None:
        """A lost `peer` whose writes were in doubt answered a new hello: it can be asked to let go."""
        ...

    def peer_quiet(self, key: PeerKey) -> None:
        """A lost peer certainly writes no more."""
        ...

    def in_doubt(self, key: PeerKey) -> bool:
        """Return whether any request still waits for proof that this peer is quiet."""
        ...


class GenerationDoor:
    """Registers with context ranks, and finds out when a lost one can no longer write our pages."""

    def __init__(self, exchange: Exchange, card: RankCard, listener: DoorListener) -> None:
        self._exchange, self._link, self._card, self._listener = exchange, exchange.link, card, listener
        self._registrations: dict[str, Registration] = {}
        self._in_doubt: dict[PeerKey, ContextPeer] = {}
        self._left: OrderedDict[str, str] = OrderedDict()

    def register(self, address: str) -> Registration:
        """Say hello to the context rank at `address`; the returned registration is decided by later turns."""
        known = self._registrations.get(address)
        if known is not None and not known.refusal:
            return known
        registration = self._registrations[address] = Registration(address)
        self._left.pop(address, None)
        self._say_hello(address)
        return registration

    def _say_hello(self, address: str) -> None:
        self._link.connect(address)
        self._exchange.send(address, Hello(card=self._card))

    def peer_at(self, address: str) -> ContextPeer:
        """Return the accepted peer at `address`.

        Raises:
            LocalProtocolError: nobody has connected to it.
            LinkBrokenError: it has left; the text says how.
        """
        registration = self._registrations.get(address)
        if registration is None and address in self._left:
            raise LinkBrokenError(f"{self._left[address]}; connect to an instance that is there")
        if registration is None or registration.peer is None:
            got = registration.refusal or "no answer yet" if registration else "unknown"
            raise LocalProtocolError(
                explain(f"context rank at {address}", "registration", got, "accepted", "connect to the instance first")
            )
        return registration.peer

    def tell(self, key: PeerKey, message: Vacate) -> None:
        """Send something to a peer, unless it is none any more."""
        peer = self._known(key)
        if peer is not None:
            self._exchange.send(peer.address, message)

    def answered(self, answer: HelloAck | HelloNack, key: PeerKey) -> None:
        """A context rank answered a hello.

        Raises:
            RemoteProtocolError: nobody said hello there, the card is not the sender's, or it refuses what it granted.
        """
        address = answer.card.address
        registration = self._registrations.get(address)
        if registration is None or (answer.card.incarnation, answer.card.rank) != key:
            raise RemoteProtocolError(
                explain("answer to a hello", "address", address, "one we said hello to", "answer with your own card")
            )
        if isinstance(answer, HelloAck):
            self._accept(registration, answer)
        elif registration.peer is None:
            registration.answer, registration.refusal = answer, answer.reason
        else:
            raise RemoteProtocolError(
                explain(f"context rank {key[1]}", "answer to a hello", "no", "yes, as before", "answer once")
            )

    def reregister(self, key: PeerKey, reason: str) -> None:
        """A context rank does not know us: what it did for us is lost; say hello again."""
        peer = self._known(key)
        if peer is not None:
            self._lose(peer, f"context rank {key[1]}: {reason}", quiet=peer.path is not PathKind.DIRECT)
            del self._registrations[peer.address]
            self.register(peer.address)

    def goodbye(self, key: PeerKey, reason: str) -> None:
        """A context rank ends in an orderly way; it says so when it touches our pages no more."""
        peer = self._known(key)
        if peer is not None:
            self._lose(peer, f"context rank {key[1]} said goodbye: {reason}", quiet=True)
            self._forget(peer.address, f"context rank {key[1]} said goodbye: {reason}")
            self._link.disconnect(peer.address)

    def gone(self, event: PeerGone) -> None:
        """The connection to an address broke."""
        registration = self._registrations.get(event.address)
        if registration is None:
            return
        registration.refusal = registration.refusal or f"gone: {event.reason}"
        peer = registration.peer
        who = f"context rank at {event.address}" if peer is None else f"context rank {peer.card.rank}"
        self._forget(event.address, f"{who} is gone: {event.reason}")
        if peer is not None:
            self._lose(peer, f"context rank {peer.card.rank} is gone: {event.reason}", quiet=is_quiet(peer))

    def watch(self) -> None:
        """Look whether those in doubt can be proven quiet by now."""
        for key, peer in list(self._in_doubt.items()):
            if self._listener.in_doubt(key) and not is_quiet(peer):
                continue
            del self._in_doubt[key]
            self._listener.peer_quiet(key)

    def remind(self) -> None:
        """Say hello again where there is no answer, and to those in doubt: they alone can say that they are quiet."""
        for registration in list(self._registrations.values()):
            if not registration.decided:
                self._say_hello(registration.address)
        for peer in self._in_doubt.values():
            known = self._registrations.get(peer.address)
            if known is None or known.refusal:
                self.register(peer.address)

    def is_registered(self, key: PeerKey) -> bool:
        """Return whether `key` is an accepted peer."""
        return self._known(key) is not None

    def give_up(self, reason: str) -> None:
        """Decide every hello that waits for an answer: none will be heard."""
        for registration in self._registrations.values():
            if not registration.decided:
                registration.refusal = reason

    def say_goodbye(self, reason: str) -> None:
        """Tell every accepted peer that we leave."""
        for registration in self._registrations.values():
            if registration.peer is not None:
                self._exchange.send(registration.address, Goodbye(reason=reason))

    def _accept(self, registration: Registration, answer: HelloAck) -> None:
        former = registration.peer
        try:
            peer = accept(self._card, registration.address, answer)
        except Exception as error:
            if not isinstance(error, UnikvError):
                _log.exception("generation rank %d: the card of a context rank is not understood", self._card.rank)
            if former is None:
                registration.refusal = str(error) or repr(error)
                self._exchange.send(registration.address, Goodbye(reason=registration.refusal))
            return
        if former is not None and former.key != peer.key:
            reason = f"another process took the address of context rank {former.card.rank}"
            self._lose(former, reason, quiet=is_quiet(former))
        registration.peer = peer
        if peer.key in self._in_doubt:
            self._listener.peer_back(peer)

    def _forget(self, address: str, reason: str) -> None:
        """Drop a registration; whoever still asks for the address hears why."""
        del self._registrations[address]
        self._left[address] = reason
        self._left.move_to_end(address)
        while len(self._left) > MAX_LEFT:
            self._left.popitem(last=False)

    def _lose(self, peer: ContextPeer, reason: str, *, quiet: bool) -> None:
        was_busy = self._listener.peer_lost(peer, reason, quiet=quiet)
        level = logging.WARNING if was_busy else logging.INFO
        _log.log(level, "generation rank %d: %s", self._card.rank, reason)
        if was_busy and not quiet:
            self._in_doubt[peer.key] = peer

    def _known(self, key: PeerKey) -> ContextPeer | None:
        peers = (registration.peer for registration in self._registrations.values())
        return next((peer for peer in peers if peer is not None and peer.key == key), None)


def is_quiet(peer: ContextPeer) -> bool:
    """Return whether it is proven that a lost `peer` writes our pages no more: it never did, or its process is gone."""
    return peer.path is not PathKind.DIRECT or process_is_gone(peer.card.host)
