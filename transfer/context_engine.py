"""The context rank's engine: hears asks, moves pages, answers. Single-threaded; `turn` does everything."""

from __future__ import annotations

import logging
from collections.abc import Mapping

from transfer.context_moves import MoveQueue
from transfer.context_peers import ContextPeers, GenerationPeer
from transfer.context_requests import ContextRequest, LegWork, RequestBook
from transfer.context_session import Action, ContextSession, Do, Leg
from transfer.copier import Copier
from transfer.exchange import Clock, Exchange, PeerKey
from transfer.hello import RankCard
from transfer.link import Frame, Link, PeerGone, SendTicket
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
    Hello,
    Reregister,
    StageTimes,
)
from transfer.options import TransferOptions
from transfer.outcome import LegReport, Outcome, TransferHandle
from transfer.pages import SlotArray, validate_table
from transfer.paths import Batch, MoveState, Regions, SendChunk
from unikv.errors import CopyError, LinkBrokenError, LocalProtocolError, RemoteProtocolError, UnikvError, explain
from unikv.ids import GroupId, RequestId

_log = logging.getLogger(__name__)


class ContextEngine:
    """Serves one context rank's pages to generation ranks."""

    def __init__(
        self, link: Link, card: RankCard, regions: Regions, copier: Copier, options: TransferOptions, clock: Clock
    ) -> None:
        self.link = link
        self._exchange = Exchange(link, card)
        self._card, self._options, self._clock = card, options, clock
        self._peers = ContextPeers(card)
        self._moves = MoveQueue(regions, copier, options)
        self._requests = RequestBook()
        self._gone: set[PeerKey] = set()
        self._shutting_down = ""

    # --- called between turns -------------------------------------------------------------------------------------

    def publish(
        self,
        handle: TransferHandle,
        tables: Mapping[GroupId, SlotArray],
        prompt_tokens: int,
        aux: AuxData | None,
    ) -> None:
        """The KV of a request is complete in our pages; move it to whoever asks.

        Raises:
            LocalProtocolError: the request is published already, or is over.
        """
        request_id = handle.request_id
        known = self._requests.get(request_id)
        if known is not None and known.handle is not None:
            raise LocalProtocolError(
                explain(f"request {request_id}", "state", "published", "new", "use every request id once")
            )
        if reason := self._shutting_down or self._requests.ended(request_id):
            handle.decide(Outcome(request_id=request_id, reason=reason))
            handle.settle_quiet()
            return
        request = known or self._open(request_id)
        request.session.deadline_s = self._clock() + self._options.timeout_s
        request.handle, request.tables, request.prompt_tokens, request.aux = handle, tables, prompt_tokens, aux
        request.ready_s = self._clock()
        self._do(request, request.session.kv_ready())

    def fail(self, request_id: RequestId, reason: str) -> None:
        """Give a request up, published or not: whoever asks for it hears `reason`."""
        request = self._requests.get(request_id)
        if request is None:
            self._requests.end(request_id, reason)
        else:
            self._do(request, request.session.fail(reason))

    def shut_down(self, reason: str) -> None:
        """Fail everything open; what moves is drained first."""
        self._shutting_down = reason
        for request in self._requests:
            self._do(request, request.session.fail(reason))

    def drained(self) -> bool:
        """Return whether no copy touches any page."""
        return not len(self._moves)

    def abandon(self, reason: str) -> None:
        """The engine is broken: decide every handle, call no page quiet."""
        for request in self._requests:
            if request.handle is not None and request.handle.outcome is None:
                request.handle.decide(Outcome(request_id=request.session.request_id, reason=reason))

    def close(self) -> None:
        """Say goodbye where nothing of ours touches a peer any more, and unmap. The driver calls it last."""
        if self.drained():
            for address in {peer.card.address for peer in self._peers.all()}:
                self._exchange.send(address, Goodbye(reason=self._shutting_down or "closed"))
        self._peers.close()
        self._moves.close()

    # --- one turn -------------------------------------------------------------------------------------------------

    def turn(self, timeout_s: float) -> bool:
        """Handle what arrived, do one chunk of work; return whether more work is runnable."""
        self._exchange.events(timeout_s, self._on_message, self._on_gone)
        now_s = self._clock()
        for request in self._requests:
            self._do(request, request.session.tick(now_s))
        busy = self._advance()
        self._forget_the_gone()
        return busy

    def _on_message(self, envelope: Envelope) -> None:
        message, key = envelope.message, (envelope.incarnation, envelope.rank)
        match message:
            case Hello():
                self._on_hello(message, key)
            case Ask():
                self._on_ask(message, key)
            case Cancel():
                self._on_cancel(message, key)
            case Credit():
                self._on_credit(message, key)
            case Goodbye():
                self._lose(key, f"generation rank {envelope.rank} said goodbye: {message.reason}")
            case _:
                self._exchange.refuse("unexpected", f"{type(message).__name__} does not go to a context rank")

    def _on_hello(self, message: Hello, key: PeerKey) -> None:
        card = message.card
        if (card.incarnation, card.rank) != key:
            raise RemoteProtocolError(
                explain("hello", "card", card.rank, f"the sender's rank {key[1]}", "send your own")
            )
        self.link.connect(card.address)
        self._exchange.send(card.address, self._peers.register(card))
        for request in self._requests:
            self._expect(request)

    def _on_ask(self, ask: Ask, key: PeerKey) -> None:
        peer = self._peers.get(key)
        if peer is None or key in self._gone:
            self._exchange.refuse("unregistered", f"request {ask.request_id} from an unregistered rank {key[1]}")
            self.link.connect(ask.reply_to)
            self._exchange.send(ask.reply_to, Reregister(reason="this context rank does not know you"))
            return
        try:
            reason = self._refusal(ask, peer)
        except RemoteProtocolError as error:
            reason = str(error)
        if reason:
            self._exchange.refuse("ask", reason)
            self._tell(peer, Failed(request_id=ask.request_id, epoch=ask.epoch, reason=reason))
            return
        request = self._requests.get(ask.request_id) or self._open(ask.request_id)
        if key not in request.legs:
            request.legs[key] = LegWork(ask=ask, asked_s=self._clock())
        actions = request.session.asked(key)
        self._do(request, actions)
        self._expect(request)

    def _refusal(self, ask: Ask, peer: GenerationPeer) -> str:
        """Return why `ask` cannot be served, or "" (also for a repetition, which changes nothing)."""
        ended = self._requests.ended(ask.request_id)
        if ended is not None:
            return f"request {ask.request_id} is over on the context side: {ended}"
        request = self._requests.get(ask.request_id)
        leg = request.legs.get(peer.key) if request else None
        if leg is not None and leg.ask.epoch != ask.epoch:
            return f"request {ask.request_id} is being asked for under another epoch"
        for table in ask.tables:
            self._check_table(ask, table.group_id, table.slots, peer.card)
        return ""

    def _check_table(self, ask: Ask, group_id: int, slots: SlotArray, card: RankCard) -> None:
        thing = f"request {ask.request_id} group {group_id} from generation rank {card.rank}"
        pools = [pool for pool in card.pools if pool.group_id == group_id]
        if not pools:
            raise RemoteProtocolError(explain(thing, "group", group_id, "a group of its card", "ask for known groups"))
        num_slots = min(pool.num_slots for pool in pools)
        validate_table(slots, num_slots=num_slots, max_blocks=self._options.max_blocks, thing=thing)

    def _on_cancel(self, cancel: Cancel, key: PeerKey) -> None:
        peer = self._peers.get(key)
        if peer is None:
            self._exchange.refuse("unregistered", f"cancel from an unregistered rank {key[1]}")
            return
        request = self._requests.get(cancel.request_id)
        leg = request.legs.get(key) if request else None
        if request is None or leg is None or leg.ask.epoch != cancel.epoch:
            # Nothing of this attempt is here any more, so nothing of it moves.
            if request is None and self._requests.ended(cancel.request_id) is None:
                self._requests.end(cancel.request_id, f"cancelled by generation rank {key[1]}: {cancel.reason}")
            self._tell(peer, CancelAck(request_id=cancel.request_id, epoch=cancel.epoch))
            return
        self._do(request, request.session.peer_cancelled(key, cancel.reason))

    def _on_credit(self, credit: Credit, key: PeerKey) -> None:
        request = self._requests.get(credit.request_id)
        leg = request.legs.get(key) if request else None
        if leg is not None and leg.move is not None and leg.ask.epoch == credit.epoch:
            leg.move.credit(credit.chunks)

    def _on_gone(self, event: PeerGone) -> None:
        for peer in self._peers.at(event.address):
            self._lose(peer.key, f"generation rank {peer.card.rank} is gone: {event.reason}")

    def _lose(self, key: PeerKey, reason: str) -> None:
        if self._peers.get(key) is None:
            return
        _log.warning("context rank %d: %s", self._card.rank, reason)
        self._gone.add(key)
        for request in self._requests:
            if key in request.legs or key in (self._expected_by(request) or ()):
                self._do(request, request.session.peer_lost(key, reason))

    # --- sessions -------------------------------------------------------------------------------------------------

    def _open(self, request_id: RequestId) -> ContextRequest:
        overdue = self._requests.overdue_waiter()
        if overdue is not None:
            self._do(overdue, overdue.session.fail("too many requests wait for their KV"))
        now_s = self._clock()
        session = ContextSession(request_id, now_s + self._options.timeout_s)
        return self._requests.open(ContextRequest(session=session, created_s=now_s))

    def _expected_by(self, request: ContextRequest) -> frozenset[PeerKey] | None:
        for key in request.legs:
            peer = self._peers.get(key)
            if peer is not None:
                return self._peers.expected(peer.card.instance)
        return None

    def _expect(self, request: ContextRequest) -> None:
        expected = self._expected_by(request)
        if expected is not None and not request.session.reported:
            self._do(request, request.session.expect(expected))

    def _do(self, request: ContextRequest, actions: list[Action]) -> None:
        for action in actions:
            if action.peer is None:
                self._do_for_request(request, action.do)
            else:
                self._do_for_leg(request, action.do, action.peer)

    def _do_for_leg(self, request: ContextRequest, do: Do, key: PeerKey) -> None:
        match do:
            case Do.START_MOVE:
                self._start_move(request, key)
            case Do.STOP_MOVE:
                self._stop_move(request, key)
            case Do.SEND_DONE:
                self._send_done(request, key)
            case Do.SEND_FAILED:
                self._send_failed(request, key)
            case Do.SEND_CANCEL_ACK:
                self._send_cancel_ack(request, key)

    def _do_for_request(self, request: ContextRequest, do: Do) -> None:
        if do is Do.REPORT:
            self._report(request)
        else:
            self._release(request)

    def _start_move(self, request: ContextRequest, key: PeerKey) -> None:
        leg, peer = request.legs[key], self._peers.get(key)
        assert peer is not None  # a leg exists for registered peers only
        started_s = self._clock()
        try:
            leg.move = self._moves.make(request, leg.ask, peer, self._chunk_sender(leg.ask, peer))
        except UnikvError as error:
            self._do(request, request.session.move_failed(key, f"context rank {self._card.rank}: {error}"))
            return
        leg.planned_s = self._clock()
        leg.plan_s = leg.planned_s - started_s
        self._moves.add(request, key)

    def _chunk_sender(self, ask: Ask, peer: GenerationPeer) -> SendChunk:
        def send(batch: Batch, payload: Frame) -> SendTicket:
            chunk = Chunk(
                request_id=ask.request_id,
                epoch=ask.epoch,
                pair=batch.pair,
                first_page=batch.first,
                pages=batch.count,
                payload=memoryview(payload),
            )
            ticket = self._exchange.send(peer.card.address, chunk)
            if ticket is None:
                raise LinkBrokenError(f"generation rank {peer.card.rank} is gone")
            return ticket

        return send

    def _stop_move(self, request: ContextRequest, key: PeerKey) -> None:
        move = request.legs[key].move
        if move is not None:
            move.stop()

    def _advance(self) -> bool:
        """Give the first move that can run one step; return whether one did."""
        for request, key in self._moves.running():
            state = self._step(request, key)
            if state is MoveState.DONE:
                self._moves.remove(request, key)
            if state is not MoveState.WAITING:
                return True
        return False

    def _step(self, request: ContextRequest, key: PeerKey) -> MoveState:
        leg = request.legs[key]
        assert leg.move is not None
        leg.moving_s = leg.moving_s or self._clock()
        try:
            state = leg.move.step()
        except (CopyError, LinkBrokenError) as error:
            if isinstance(error, CopyError) and error.in_doubt:
                raise
            self._do(request, request.session.move_failed(key, f"context rank {self._card.rank}: {error}"))
            return MoveState.DONE
        if state is MoveState.DONE:
            draining = request.session.leg(key) is not Leg.MOVING
            self._do(request, request.session.move_stopped(key) if draining else request.session.moved(key))
        return state

    # --- answers --------------------------------------------------------------------------------------------------

    def _tell(self, peer: GenerationPeer, message: Done | Failed | CancelAck) -> None:
        self._exchange.send(peer.card.address, message)

    def _send_done(self, request: ContextRequest, key: PeerKey) -> None:
        leg, peer = request.legs[key], self._peers.get(key)
        assert leg.move is not None
        account = leg.move.account()
        times = StageTimes(
            queue_s=leg.moving_s - leg.plan_s - max(leg.asked_s, request.ready_s),
            plan_s=leg.plan_s,
            move_s=self._clock() - leg.moving_s,
        )
        if peer is None:
            return
        owners = [pair.owner for pair in peer.program.pairs]
        request.reports.append(
            LegReport(
                peer=key[1],
                path=peer.path,
                bytes=sum(item.bytes for item in account),
                draft_bytes=sum(item.bytes for item in account if owners[item.pair] == "draft"),
                times=times,
            )
        )
        ask = leg.ask
        done = Done(request_id=ask.request_id, epoch=ask.epoch, account=account, aux=request.aux, times=times)
        self._tell(peer, done)

    def _send_failed(self, request: ContextRequest, key: PeerKey) -> None:
        peer, ask = self._peers.get(key), request.legs[key].ask
        if peer is not None:
            reason = request.session.leg_reason(key)
            self._tell(peer, Failed(request_id=ask.request_id, epoch=ask.epoch, reason=reason))

    def _send_cancel_ack(self, request: ContextRequest, key: PeerKey) -> None:
        peer, ask = self._peers.get(key), request.legs[key].ask
        if peer is not None:
            self._tell(peer, CancelAck(request_id=ask.request_id, epoch=ask.epoch))

    def _report(self, request: ContextRequest) -> None:
        session = request.session
        if session.failed:
            _log.warning("context rank %d: request %d failed: %s", self._card.rank, session.request_id, session.reason)
        if request.handle is not None:
            request.handle.decide(
                Outcome(
                    request_id=session.request_id,
                    reason=session.reason,
                    legs=tuple(request.reports),
                    total_s=self._clock() - request.created_s,
                )
            )

    def _release(self, request: ContextRequest) -> None:
        request_id = request.session.request_id
        self._requests.end(request_id, request.session.reason or "it was sent")
        if request.handle is not None:
            request.handle.settle_quiet()

    def _forget_the_gone(self) -> None:
        for key in list(self._gone):
            if not self._moves.touches(key):
                peer = self._peers.get(key)
                self._peers.forget(key)
                self._gone.discard(key)
                if peer is not None and not self._peers.at(peer.card.address):
                    self.link.disconnect(peer.card.address)
