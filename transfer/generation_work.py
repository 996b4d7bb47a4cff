"""What a generation rank does for its requests: carries out what their sessions decide, and settles what has landed."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial

from transfer.copier import Copier
from transfer.delivery import Delivery
from transfer.exchange import Clock, Exchange, PeerKey
from transfer.generation_session import ENDED_LEGS, Action, Do, GenerationSession, Leg
from transfer.link import Frame
from transfer.messages import AuxData, Cancel, Chunk, Credit, Done, StageTimes, Vacate, Withdraw
from transfer.outcome import LegReport, Outcome, TransferHandle
from transfer.paths import Regions
from unikv.errors import RemoteProtocolError, UnikvError
from unikv.ids import RequestId

_log = logging.getLogger(__name__)


@dataclass(slots=True, kw_only=True)
class GenerationRequest:
    """Everything of one request on this rank.

    Attributes:
        asks: the encoded ask for every peer, until it is sent.
        settling: last words of peers whose chunks have not all landed.
        releasing: no peer touches our pages any more; only copies of our own may.
        broken: a bug of ours left its session in an unknown state: nothing more is done for it, nothing released.
    """

    session: GenerationSession
    handle: TransferHandle
    created_s: float
    deliveries: Mapping[PeerKey, Delivery]
    asks: dict[PeerKey, list[Frame]]
    last_word_s: float
    aux: AuxData | None = None
    times: dict[PeerKey, StageTimes] = field(default_factory=dict)
    settling: dict[PeerKey, Done] = field(default_factory=dict)
    releasing: bool = False
    broken: bool = False


class GenerationWork:
    """Receives, audits and releases for the requests of one generation rank.

    Trouble with one request stays with that request. Where it is in doubt whether one of our own copies still runs,
    the request has failed, but its pages are never called quiet: only the end of the process frees them.

    Args:
        requests: the open requests by id; a released one is taken out.
        max_draft_tokens: draft tokens this rank has room for; further ones of a peer are cut off.
    """

    def __init__(
        self,
        exchange: Exchange,
        requests: dict[RequestId, GenerationRequest],
        regions: Regions,
        copier: Copier,
        clock: Clock,
        *,
        max_draft_tokens: int,
    ) -> None:
        self._exchange, self._rank, self._requests = exchange, exchange.card.rank, requests
        self._regions, self._copier, self._clock = regions, copier, clock
        self._max_draft_tokens = max_draft_tokens
        self._attended: set[RequestId] = set()

    def do(self, request: GenerationRequest, decide: Callable[[], list[Action]]) -> None:
        """Let `decide` feed the request's session, and carry out what the session returns. Never raises."""
        if request.broken:
            return
        try:
            for action in decide():
                self._act(request, action)
        except Exception as error:
            self._break(request, error)

    def attended(self) -> list[GenerationRequest]:
        """Return the requests that copies of ours, or a release that waits for them, make `look_after` worth a call."""
        found = (self._requests.get(request_id) for request_id in list(self._attended))
        return [request for request in found if request is not None]

    def receive(self, request: GenerationRequest, chunk: Chunk, key: PeerKey) -> None:
        """Copy one chunk into our pages; a chunk that is wrong ends the request."""
        self.do(request, partial(request.session.heard, key))
        if request.session.leg(key) is not Leg.ASKED:  # it crossed our cancel; pages are not to be written any more
            request.deliveries[key].refuse(chunk)
            self._vacate(request.deliveries[key])
            return
        try:
            self._attended.add(request.session.request_id)
            request.deliveries[key].scatter(chunk, self._regions, self._copier)
        except Exception as error:
            text, foreseen = str(error) or repr(error), isinstance(error, UnikvError)
            self._exchange.refuse("chunk" if isinstance(error, RemoteProtocolError) else "copy", text)
            if not foreseen:
                _log.error("generation rank %d: a copy failed in an unforeseen way", self._rank, exc_info=error)
            self.do(request, partial(request.session.cancel, text))
        self.look_after(request)

    def finish(self, request: GenerationRequest, done: Done, key: PeerKey) -> None:
        """Hear the last word of a peer; its books are closed once its last chunk has landed."""
        request.settling[key] = done
        self.look_after(request)

    def look_after(self, request: GenerationRequest) -> bool:
        """Return credits, close books, release: whatever ended copies allow. Never raises.

        Returns:
            Whether copies of ours run on.
        """
        if request.broken:
            return False
        try:
            copying = self._look_after(request)
            if not copying and not request.releasing:
                self._attended.discard(request.session.request_id)
            return copying
        except Exception as error:
            self._break(request, error)
            return False

    def _look_after(self, request: GenerationRequest) -> bool:
        copying = False
        for key, delivery in request.deliveries.items():
            self._vacate(delivery)  # before the credit, which lets the next chunk come
            self._return_credits(request, key, delivery.take_landed())
            if delivery.failure and key not in request.settling and not request.session.failed:
                self.do(request, partial(request.session.cancel, delivery.failure))
            if not delivery.landed():
                copying = True
            elif key in request.settling:
                self._settle(request, key)
        if request.releasing:
            self._release(request)
        return copying

    def remind(self, request: GenerationRequest, registered: Callable[[PeerKey], bool]) -> None:
        """Say again what a peer has not answered: its answer may be lost, or what we said.

        Args:
            registered: whether a peer is one of ours now; one in doubt can only be asked once it is again.
        """
        if request.broken:
            return
        for key in request.session.peers(Leg.CANCELLING, Leg.IN_DOUBT):
            if request.session.leg(key) is Leg.CANCELLING:
                self._send_cancel(request, key)
            elif registered(key):
                self.cancel_again(request, key)
        for key in request.session.peers(Leg.WITHDRAWING):
            self._send_withdraw(request, key)

    def cancel_again(self, request: GenerationRequest, key: PeerKey) -> None:
        """Ask a peer that came back to stop what it may still do for its former self."""
        if request.session.leg(key) is Leg.IN_DOUBT:
            (self._send_cancel if request.session.failed else self._send_withdraw)(request, key)

    def _act(self, request: GenerationRequest, action: Action) -> None:
        match action:
            case Action(Do.SEND_ASK, peer) if peer is not None:
                self._exchange.post(request.deliveries[peer].peer.address, request.asks.pop(peer))
            case Action(Do.SEND_CANCEL, peer) if peer is not None:
                self._send_cancel(request, peer)
            case Action(Do.SEND_WITHDRAW, peer) if peer is not None:
                self._send_withdraw(request, peer)
            case Action(Do.REPORT):
                self._report(request)
            case Action(Do.RELEASE):
                request.releasing = True
                self._attended.add(request.session.request_id)
                self._release(request)

    def _break(self, request: GenerationRequest, error: Exception) -> None:
        """Give up a request whose session is in an unknown state: it has failed, and is never called quiet."""
        _log.exception("generation rank %d: request %d is broken", self._rank, request.session.request_id)
        request.broken = True
        if request.handle.outcome is None:
            reason = f"generation rank {self._rank}: {error!r}"
            request.handle.decide(Outcome(request_id=request.session.request_id, reason=reason))

    def _return_credits(self, request: GenerationRequest, key: PeerKey, chunks: int) -> None:
        if chunks and request.session.leg(key) is Leg.ASKED:
            session = request.session
            credit = Credit(request_id=session.request_id, epoch=session.epoch, chunks=chunks)
            self._exchange.send(request.deliveries[key].peer.address, credit)

    def _vacate(self, delivery: Delivery) -> None:
        if serials := delivery.take_vacant():
            self._exchange.send(delivery.peer.address, Vacate(serials=serials))

    def _settle(self, request: GenerationRequest, key: PeerKey) -> None:
        done, session = request.settling.pop(key), request.session
        if session.leg(key) in ENDED_LEGS:
            return
        request.last_word_s = self._clock()
        request.times[key] = done.times
        wrong = request.deliveries[key].audit(done.account) or self._take_aux(request, done, key)
        self.do(request, lambda: session.bad_delivery(key, wrong) if wrong else session.settled(key))

    def _take_aux(self, request: GenerationRequest, done: Done, key: PeerKey) -> str:
        """Keep what travels beside the KV; several ranks may send it, but only the same."""
        if done.aux is None:
            return ""
        aux = replace(done.aux, draft_tokens=done.aux.draft_tokens[: self._max_draft_tokens])
        if request.aux is not None and request.aux != aux:
            return f"context rank {key[1]} sent other aux data than the ranks before it"
        request.aux = aux
        return ""

    def _send_cancel(self, request: GenerationRequest, key: PeerKey) -> None:
        session = request.session
        cancel = Cancel(
            request_id=session.request_id,
            epoch=session.epoch,
            reason=session.reason,
            reply_to=self._exchange.link.address,
        )
        self._exchange.send(request.deliveries[key].peer.address, cancel)

    def _send_withdraw(self, request: GenerationRequest, key: PeerKey) -> None:
        session = request.session
        withdraw = Withdraw(request_id=session.request_id, epoch=session.epoch, reply_to=self._exchange.link.address)
        self._exchange.send(request.deliveries[key].peer.address, withdraw)

    def _report(self, request: GenerationRequest) -> None:
        session, now_s = request.session, self._clock()
        if session.failed:
            _log.warning("generation rank %d: request %d failed: %s", self._rank, session.request_id, session.reason)
        legs = tuple(
            LegReport(
                peer=key[1],
                path=delivery.peer.path,
                bytes=delivery.bytes,
                draft_bytes=delivery.draft_bytes,
                times=request.times.get(key),
            )
            for key, delivery in request.deliveries.items()
            if not session.withdrawn(key)
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

    def _release(self, request: GenerationRequest) -> None:
        request_id = request.session.request_id
        if all(delivery.quiet for delivery in request.deliveries.values()):
            request.releasing = False
            for delivery in request.deliveries.values():
                self._vacate(delivery)
            self._attended.discard(request_id)
            del self._requests[request_id]
            request.handle.settle_quiet()
        elif all(delivery.landed() for delivery in request.deliveries.values()):
            request.releasing = False
            text = "generation rank %d: request %d: nobody knows whether a copy still runs; its pages stay: %s"
            _log.error(text, self._rank, request_id, request.session.reason)
