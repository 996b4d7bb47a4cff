"""The generation rank's engine: asks, receives, audits, settles. Single-threaded; `turn` does everything."""

from __future__ import annotations

import logging
import secrets
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Final

from transfer.copier import Copier
from transfer.delivery import Delivery
from transfer.exchange import Clock, Exchange, PeerKey
from transfer.generation_peers import ContextPeer, accept
from transfer.generation_session import Action, Do, GenerationSession, Leg
from transfer.hello import PathKind, RankCard
from transfer.link import Link, PeerGone
from transfer.messages import (
    Ask,
    AuxData,
    Cancel,
    CancelAck,
    Chunk,
    Credit,
    Done,
    Envelope,
    Failed,
    Goodbye,
    GroupTable,
    Hello,
    HelloAck,
    HelloNack,
    Reregister,
    StageTimes,
)
from transfer.options import TransferOptions
from transfer.outcome import LegReport, Outcome, TransferHandle
from transfer.pages import SlotArray
from transfer.paths import Regions
from transfer.peer_memory import process_is_gone
from unikv.errors import CopyError, LocalProtocolError, RemoteProtocolError, UnikvError, explain
from unikv.ids import GroupId, RequestId

_log = logging.getLogger(__name__)

EPOCH_BITS: Final = 63


@dataclass(slots=True)
class Registration:
    """What became of one hello: open, accepted (`peer`) or refused (`refusal`, with the gate's report)."""

    address: str
    peer: ContextPeer | None = None
    answer: HelloNack | None = None
    refusal: str = ""

    @property
    def decided(self) -> bool:
        """Whether the peer has answered, or cannot."""
        return self.peer is not None or bool(self.refusal)


@dataclass(slots=True)
class _Request:
    """Everything of one request on this rank."""

    session: GenerationSession
    handle: TransferHandle
    created_s: float
    tables: Mapping[GroupId, SlotArray]
    prompt_tokens: int
    deliveries: dict[PeerKey, Delivery]
    aux: AuxData | None = None
    times: dict[PeerKey, StageTimes] = field(default_factory=dict)
    last_word_s: float = 0.0
    settling: dict[PeerKey, Done] = field(default_factory=dict)


class GenerationEngine:
    """Fetches requests into one generation rank's pages."""

    def __init__(
        self, link: Link, card: RankCard, regions: Regions, copier: Copier, options: TransferOptions, clock: Clock
    ) -> None:
        self.link = link
        self._exchange = Exchange(link, card)
        self._card, self._regions, self._copier, self._options, self._clock = card, regions, copier, options, clock
        self._registrations: dict[str, Registration] = {}
        self._requests: dict[RequestId, _Request] = {}
        self._in_doubt: dict[PeerKey, ContextPeer] = {}
        self._shutting_down = ""

    # --- called between turns -------------------------------------------------------------------------------------

    def register(self, address: str) -> Registration:
        """Say hello to the context rank at `address`; the returned registration is decided by later turns."""
        known = self._registrations.get(address)
        if known is not None and not known.refusal:
            return known
        registration = self._registrations[address] = Registration(address)
        self.link.connect(address)
        self._exchange.send(address, Hello(card=self._card))
        return registration

    def receive(
        self,
        handle: TransferHandle,
        tables: Mapping[GroupId, SlotArray],
        prompt_tokens: int,
        addresses: Iterable[str],
    ) -> None:
        """Ask the registered context ranks at `addresses` for a request.

        Raises:
            LocalProtocolError: the request is being received already, or a peer is not registered.
        """
        request_id = handle.request_id
        if request_id in self._requests:
            raise LocalProtocolError(
                explain(f"request {request_id}", "state", "being received", "new", "use every request id once")
            )
        peers = [self._peer_at(address) for address in addresses]
        now_s = self._clock()
        request = _Request(
            session=GenerationSession(
                request_id, 1 + secrets.randbits(EPOCH_BITS - 1), now_s + self._options.timeout_s
            ),
            handle=handle,
            created_s=now_s,
            tables=dict(tables),
            prompt_tokens=prompt_tokens,
            deliveries={peer.key: Delivery(peer, tables, prompt_tokens) for peer in peers if peer.program.lanes},
            last_word_s=now_s,
        )
        self._requests[request_id] = request
        self._do(request, request.session.start(request.deliveries))

    def cancel(self, request_id: RequestId, reason: str) -> None:
        """Give a request up; its pages are quiet once every peer has said so."""
        request = self._requests.get(request_id)
        if request is not None:
            self._do(request, request.session.cancel(reason))

    def shut_down(self, reason: str) -> None:
        """Cancel everything open, say goodbye to idle peers."""
        self._shutting_down = reason
        for request in list(self._requests.values()):
            self._do(request, request.session.cancel(reason))

    def drained(self) -> bool:
        """Return whether no peer can touch our pages any more."""
        return not self._requests

    def abandon(self, reason: str) -> None:
        """The engine is broken: decide every handle, call no page quiet."""
        for request in self._requests.values():
            if request.handle.outcome is None:
                request.handle.decide(Outcome(request_id=request.session.request_id, reason=reason))

    def close(self) -> None:
        """Say goodbye and free what the engine holds. The driver calls it last."""
        for registration in self._registrations.values():
            if registration.peer is not None:
                self._exchange.send(registration.address, Goodbye(reason=self._shutting_down or "closed"))
        self._copier.close()

    # --- one turn -------------------------------------------------------------------------------------------------

    def turn(self, timeout_s: float) -> bool:
        """Handle what arrived, settle what has landed; return whether more work is runnable."""
        self._exchange.events(timeout_s, self._on_message, self._on_gone)
        now_s = self._clock()
        for request in list(self._requests.values()):
            for key in list(request.settling):
                self._settle(request, key)
            self._do(request, request.session.tick(now_s))
        self._watch_the_lost()
        return any(request.settling for request in self._requests.values())

    def _on_message(self, envelope: Envelope) -> None:
        message, key = envelope.message, (envelope.incarnation, envelope.rank)
        match message:
            case HelloAck() | HelloNack():
                self._on_answer(message, key)
            case Reregister():
                self._on_reregister(key, message.reason)
            case Goodbye():
                self._lose(key, f"context rank {key[1]} said goodbye: {message.reason}", quiet=True)
            case Chunk() | Done() | Failed() | CancelAck():
                self._on_request_message(message, key)
            case _:
                self._exchange.refuse("unexpected", f"{type(message).__name__} does not go to a generation rank")

    def _on_answer(self, answer: HelloAck | HelloNack, key: PeerKey) -> None:
        address = answer.card.address
        registration = self._registrations.get(address)
        if registration is None or (answer.card.incarnation, answer.card.rank) != key:
            raise RemoteProtocolError(
                explain("answer to a hello", "address", address, "one we said hello to", "answer with your own card")
            )
        if isinstance(answer, HelloNack):
            registration.answer, registration.refusal = answer, answer.reason
            return
        try:
            registration.peer = accept(self._card, address, answer)
        except UnikvError as error:
            registration.refusal = str(error)
            return
        # An answer to a new hello proves that the peer has let go of what it did for our old registration.
        if self._in_doubt.pop(key, None) is not None:
            self._everywhere_quiet(key)

    def _on_request_message(self, message: Chunk | Done | Failed | CancelAck, key: PeerKey) -> None:
        request = self._requests.get(message.request_id)
        if request is None or request.session.epoch != message.epoch or key not in request.deliveries:
            self._exchange.refuse(
                "late", f"{type(message).__name__} for request {message.request_id}, which is not open"
            )
            return
        match message:
            case Chunk():
                self._on_chunk(request, message, key)
            case Done():
                request.settling[key] = message
                self._settle(request, key)
            case Failed():
                self._do(request, request.session.peer_failed(key, message.reason))
            case CancelAck():
                self._do(request, request.session.cancel_acked(key))

    def _on_chunk(self, request: _Request, chunk: Chunk, key: PeerKey) -> None:
        if request.session.leg(key) is not Leg.ASKED:
            return  # it crossed our cancel; the pages are not to be written any more
        try:
            request.deliveries[key].scatter(chunk, self._regions, self._copier)
        except (RemoteProtocolError, CopyError) as error:
            self._exchange.refuse("chunk", str(error))
            self._do(request, request.session.cancel(str(error)))
            return
        credit = Credit(request_id=chunk.request_id, epoch=chunk.epoch, chunks=1)
        self._exchange.send(self._address(key), credit)

    def _settle(self, request: _Request, key: PeerKey) -> None:
        """Close the books of one peer once its last chunk has landed."""
        delivery = request.deliveries[key]
        if not delivery.landed():
            return
        done = request.settling.pop(key)
        request.last_word_s = self._clock()
        request.times[key] = done.times
        wrong = delivery.audit(done.account) or self._take_aux(request, done, key)
        session = request.session
        self._do(request, session.bad_delivery(key, wrong) if wrong else session.settled(key))

    def _take_aux(self, request: _Request, done: Done, key: PeerKey) -> str:
        """Keep what travels beside the KV; several ranks may send it, but only the same."""
        if done.aux is None or done.aux == request.aux:
            return ""
        if request.aux is not None:
            return f"context rank {key[1]} sent other aux data than the ranks before it"
        request.aux = done.aux
        return ""

    # --- peers that go --------------------------------------------------------------------------------------------

    def _on_gone(self, event: PeerGone) -> None:
        registration = self._registrations.pop(event.address, None)
        if registration is None:
            return
        registration.refusal = registration.refusal or f"gone: {event.reason}"
        peer = registration.peer
        if peer is not None:
            reason = f"context rank {peer.card.rank} is gone: {event.reason}"
            self._lose(peer.key, reason, quiet=self._is_quiet(peer), peer=peer)

    def _on_reregister(self, key: PeerKey, reason: str) -> None:
        peer = self._known(key)
        if peer is None:
            return
        self._lose(key, f"context rank {key[1]}: {reason}", quiet=peer.path is not PathKind.DIRECT, peer=peer)
        self._registrations.pop(peer.address, None)
        self.register(peer.address)

    def _lose(self, key: PeerKey, reason: str, *, quiet: bool, peer: ContextPeer | None = None) -> None:
        peer = peer or self._known(key)
        if peer is None:
            return
        _log.warning("generation rank %d: %s", self._card.rank, reason)
        for request in list(self._requests.values()):
            self._do(request, request.session.peer_lost(key, reason, quiet=quiet))
        if not quiet:
            self._in_doubt[key] = peer

    def _is_quiet(self, peer: ContextPeer) -> bool:
        """Return whether it is proven that `peer` writes our pages no more."""
        return peer.path is not PathKind.DIRECT or process_is_gone(peer.card.host)

    def _watch_the_lost(self) -> None:
        for key, peer in list(self._in_doubt.items()):
            if self._is_quiet(peer):
                del self._in_doubt[key]
                self._everywhere_quiet(key)

    def _everywhere_quiet(self, key: PeerKey) -> None:
        for request in list(self._requests.values()):
            if request.session.leg(key) is Leg.IN_DOUBT:
                self._do(request, request.session.peer_quiet(key))

    # --- helpers --------------------------------------------------------------------------------------------------

    def _known(self, key: PeerKey) -> ContextPeer | None:
        peers = (registration.peer for registration in self._registrations.values())
        return next((peer for peer in peers if peer is not None and peer.key == key), None)

    def _address(self, key: PeerKey) -> str:
        peer = self._known(key)
        return peer.address if peer is not None else ""

    def _peer_at(self, address: str) -> ContextPeer:
        registration = self._registrations.get(address)
        if registration is None or registration.peer is None:
            got = registration.refusal or "no answer yet" if registration else "unknown"
            raise LocalProtocolError(
                explain(f"context rank at {address}", "registration", got, "accepted", "connect to the instance first")
            )
        return registration.peer

    def _do(self, request: _Request, actions: list[Action]) -> None:
        for action in actions:
            match action.do:
                case Do.SEND_ASK:
                    self._send_ask(request, action.peer)  # type: ignore[arg-type]
                case Do.SEND_CANCEL:
                    self._send_cancel(request, action.peer)  # type: ignore[arg-type]
                case Do.REPORT:
                    self._report(request)
                case Do.RELEASE:
                    del self._requests[request.session.request_id]
                    request.handle.settle_quiet()

    def _send_ask(self, request: _Request, key: PeerKey) -> None:
        session = request.session
        ask = Ask(
            request_id=session.request_id,
            epoch=session.epoch,
            reply_to=self.link.address,
            prompt_tokens=request.prompt_tokens,
            tables=tuple(GroupTable(group_id=group, slots=slots) for group, slots in request.tables.items()),
        )
        self._exchange.send(self._address(key), ask)

    def _send_cancel(self, request: _Request, key: PeerKey) -> None:
        session = request.session
        cancel = Cancel(request_id=session.request_id, epoch=session.epoch, reason=session.reason)
        self._exchange.send(self._address(key), cancel)

    def _report(self, request: _Request) -> None:
        session, now_s = request.session, self._clock()
        if session.failed:
            _log.warning(
                "generation rank %d: request %d failed: %s", self._card.rank, session.request_id, session.reason
            )
        peers = {key: self._known(key) for key in request.deliveries}
        legs = tuple(
            LegReport(
                peer=key[1],
                path=peers[key].path if peers[key] else "",  # type: ignore[union-attr]
                bytes=delivery.bytes,
                draft_bytes=delivery.draft_bytes,
                times=request.times.get(key),
            )
            for key, delivery in request.deliveries.items()
        )
        request.handle.decide(
            Outcome(
                request_id=session.request_id,
                reason=session.reason,
                legs=legs,
                aux=None if session.failed else request.aux,
                settle_s=now_s - request.last_word_s,
                total_s=now_s - request.created_s,
            )
        )
