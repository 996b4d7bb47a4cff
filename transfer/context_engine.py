"""The context rank's engine: hears asks, moves pages, answers. Single-threaded; `turn` does everything."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial

from transfer.context_door import ContextDoor
from transfer.context_moves import MoveQueue
from transfer.context_peers import ContextPeers, GenerationPeer
from transfer.context_requests import ContextRequest, LegWork, RequestBook
from transfer.context_session import ENDED_LEGS, ContextSession
from transfer.context_work import ContextWork
from transfer.copier import Copier
from transfer.deadlines import DeadlineManager
from transfer.device_bytes import DeviceEvent
from transfer.exchange import Clock, Exchange, PeerKey, legible
from transfer.hello import RankCard
from transfer.link import Link
from transfer.messages import (
    Ask,
    AuxData,
    Cancel,
    CancelAck,
    Credit,
    Done,
    Envelope,
    Failed,
    Goodbye,
    Hello,
    StageTimes,
    Vacate,
    Withdraw,
)
from transfer.options import TransferOptions
from transfer.outcome import Outcome, TransferHandle
from transfer.pages import SlotArray, validate_table
from transfer.paths import Regions
from transfer.readiness import ReadinessManager
from unikv.errors import LocalProtocolError, RemoteProtocolError, explain
from unikv.ids import GroupId, RequestId


class ContextEngine:
    """Serves one context rank's pages to generation ranks."""

    def __init__(
        self, link: Link, card: RankCard, regions: Regions, copier: Copier, options: TransferOptions, clock: Clock
    ) -> None:
        self.link = link
        self._exchange = Exchange(link, card)
        self._card, self._options, self._clock = card, options, clock
        self._peers = ContextPeers(card)
        self._moves = MoveQueue(regions, copier, options, f"context-{card.instance}-{card.rank}")
        self._requests = RequestBook()
        self._work = ContextWork(self._exchange, self._peers, self._moves, self._requests, clock)
        self._door = ContextDoor(self._exchange, self._peers, on_lost=self._on_lost, touches=self._moves.touches)
        self._deadlines = DeadlineManager()
        self._unsure: dict[RequestId, None] = {}
        self._shutting_down = ""

    # --- called between turns -------------------------------------------------------------------------------------

    def publish(
        self,
        handle: TransferHandle,
        tables: Mapping[GroupId, SlotArray],
        prompt_tokens: int,
        aux: AuxData | None,
        readiness: ReadinessManager | None = None,
        written: Sequence[DeviceEvent] | None = None,
    ) -> None:
        """The KV of a request is complete in our pages, or will be; move it to whoever asks, as it becomes ready.

        Raises:
            LocalProtocolError: the request is published already, or its id or `aux` cannot travel.
        """
        request_id = handle.request_id
        known = self._requests.get(request_id)
        if known is not None and known.handle is not None:
            raise LocalProtocolError(
                explain(f"request {request_id}", "state", "published", "new", "use every request id once")
            )
        self._check_can_travel(request_id, aux)
        if reason := self._shutting_down or self._requests.ended(request_id):
            handle.decide(Outcome(request_id=request_id, reason=reason))
            handle.settle_quiet()
            return
        request = known or self._open(request_id)
        request.session.deadline_s = self._clock() + self._options.timeout_s
        request.handle, request.tables, request.prompt_tokens, request.aux = handle, tables, prompt_tokens, aux
        request.readiness, request.written = readiness, written
        self._requests.published(request_id)
        request.ready_s = request.complete_s = self._clock()
        self._work.do(request, request.session.kv_ready)

    def finish(self, request_id: RequestId, aux: AuxData | None) -> None:
        """All KV of a request that was published early is there, and `aux`. One that has failed meanwhile stays so.

        Raises:
            LocalProtocolError: `aux` cannot travel; the request has failed with that reason.
        """
        request = self._requests.get(request_id)
        if request is None or request.readiness is None:
            return
        try:
            self._check_can_travel(request_id, aux)
        except LocalProtocolError as error:
            self.fail(request_id, str(error))
            raise
        request.aux, request.complete_s = aux, self._clock()
        request.session.deadline_s = self._clock() + self._options.timeout_s
        request.readiness.finish()

    def fail(self, request_id: RequestId, reason: str) -> None:
        """Give a request up, published or not: whoever asks for it hears `reason`."""
        reason = legible(reason)
        request = self._requests.get(request_id)
        if request is None:
            self._requests.end(request_id, reason)
        else:
            self._work.do(request, partial(request.session.fail, reason))

    def shut_down(self, reason: str) -> None:
        """Fail everything open; what moves is drained first."""
        self._shutting_down = reason = legible(reason)
        for request in self._requests:
            self._work.do(request, partial(request.session.fail, reason))

    def drained(self) -> bool:
        """Return whether no copy touches any page."""
        return not len(self._moves)

    def abandon(self, reason: str) -> None:
        """The engine is broken: decide every handle, call no page quiet."""
        for request in self._requests:
            if request.handle is not None and request.handle.outcome is None:
                request.handle.decide(Outcome(request_id=request.session.request_id, reason=reason))

    def close(self) -> None:
        """Say goodbye where nothing of ours touches a peer any more, and unmap. The driver calls it last.

        First the copier, which waits a while for copies that run, then the memory they write.
        """
        if self.drained():
            for address in {peer.card.address for peer in self._peers.all()}:
                self._exchange.send(address, Goodbye(reason=self._shutting_down or "closed"))
        self._moves.close()
        self._peers.close()

    # --- one turn -------------------------------------------------------------------------------------------------

    def turn(self, timeout_s: float) -> bool:
        """Handle what arrived, do one chunk of work; return whether more work is runnable."""
        self._exchange.events(timeout_s, self._on_message, self._door.gone)
        self._watch_time(self._clock())
        flying = self._moves.carriers.poll()  # first: it may let a move go on
        busy = self._work.advance() or flying
        self._door.let_go()
        if self._door.answer_hellos():
            self._expect_again()
        return busy

    def copying(self) -> bool:
        """Return whether a copy runs beside us."""
        return self._moves.copying()

    def expecting(self) -> bool:
        """Return True: a peer may ask at any time."""
        return True

    def _watch_time(self, now_s: float) -> None:
        """Give up what is late."""
        for request_id in self._deadlines.due(now_s):
            request = self._requests.get(request_id)
            if request is None:
                continue
            if request.session.deadline_s > now_s:  # it was put off
                self._deadlines.add(request_id, request.session.deadline_s)
            else:
                self._work.do(request, partial(request.session.tick, now_s))

    def _on_message(self, envelope: Envelope) -> None:
        message, key = envelope.message, (envelope.incarnation, envelope.rank)
        match message:
            case Hello():
                self._door.hello(message, key)
            case Ask():
                self._on_ask(message, key)
            case Cancel():
                self._on_cancel(message, key)
            case Withdraw():
                self._on_withdraw(message, key)
            case Credit():
                self._on_credit(message, key)
            case Vacate():
                self._moves.carriers.vacate(key, message.serials)
            case Goodbye():
                self._door.goodbye(key, message.reason)
            case _:
                self._exchange.refuse("unexpected", f"{type(message).__name__} does not go to a context rank")

    def _on_ask(self, ask: Ask, key: PeerKey) -> None:
        peer = self._peers.get(key)
        if peer is None:
            self._exchange.refuse("unregistered", f"request {ask.request_id} from an unregistered rank {key[1]}")
            self._turn_away(ask.reply_to)
            return
        try:
            reason = self._refusal(ask, peer)
        except RemoteProtocolError as error:
            reason = str(error)
        if reason:
            self._exchange.refuse("ask", reason)
            self._work.tell(peer, Failed(request_id=ask.request_id, epoch=ask.epoch, reason=reason))
            return
        request = self._requests.get(ask.request_id) or self._open(ask.request_id)
        if key not in request.legs:
            request.legs[key] = LegWork(ask=ask, asked_s=self._clock())
        self._work.do(request, partial(request.session.asked, key))
        self._expect(request)

    def _turn_away(self, address: str) -> None:
        """Ask a stranger to say hello."""
        if address:
            self._door.turn_away(address, "this context rank does not know you")

    def _refusal(self, ask: Ask, peer: GenerationPeer) -> str:
        """Return why `ask` cannot be served, or "" (also for a repetition, which changes nothing)."""
        if self._shutting_down:
            return self._shutting_down
        ended = self._requests.ended(ask.request_id)
        if ended is not None:
            return f"request {ask.request_id} is over on the context side: {ended}"
        request = self._requests.get(ask.request_id)
        leg = request.legs.get(peer.key) if request else None
        if leg is not None and leg.ask.epoch != ask.epoch:
            return f"request {ask.request_id} is being asked for under another epoch"
        if request is not None and request.broken and leg is None:
            return f"request {ask.request_id} failed on the context side"
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
            self._turn_away(cancel.reply_to)
            return
        request = self._requests.get(cancel.request_id)
        leg = request.legs.get(key) if request else None
        if request is not None and (leg is None or leg.ask.epoch == cancel.epoch):
            # Without a leg its ask may still be under way on an older connection; then it finds the request failed.
            self._work.do(request, partial(request.session.peer_cancelled, key, cancel.reason))
        elif request is None and self._requests.ended(cancel.request_id) is None:
            self._requests.end(cancel.request_id, f"cancelled by generation rank {key[1]}: {cancel.reason}")
        if leg is None or leg.ask.epoch != cancel.epoch:  # nothing of this attempt moves, or ever will
            self._work.tell(peer, CancelAck(request_id=cancel.request_id, epoch=cancel.epoch))

    def _on_withdraw(self, withdraw: Withdraw, key: PeerKey) -> None:
        peer = self._peers.get(key)
        if peer is None:
            self._exchange.refuse("unregistered", f"withdrawal from an unregistered rank {key[1]}")
            self._turn_away(withdraw.reply_to)
            return
        request = self._requests.get(withdraw.request_id)
        leg = request.legs.get(key) if request else None
        if request is None or leg is None or leg.ask.epoch != withdraw.epoch or request.session.forget(key):
            self._work.tell(peer, CancelAck(request_id=withdraw.request_id, epoch=withdraw.epoch))
            if request is not None and leg is not None and leg.ask.epoch == withdraw.epoch:
                del request.legs[key]
                if not request.legs:
                    self._requests.forget(withdraw.request_id)
        else:
            reason = "another context rank has sent it as well"
            self._work.do(request, partial(request.session.peer_cancelled, key, reason))

    def _on_credit(self, credit: Credit, key: PeerKey) -> None:
        request = self._requests.get(credit.request_id)
        leg = request.legs.get(key) if request else None
        if credit.chunks < 1:
            self._exchange.refuse("credit", f"{credit.chunks} chunks for request {credit.request_id}")
        elif leg is not None and leg.move is not None and leg.ask.epoch == credit.epoch:
            leg.move.credit(credit.chunks)
        elif self._peers.get(key) is None or self._requests.ended(credit.request_id) is None:
            # The credits for the last chunks always come after the end; these do not.
            self._exchange.refuse("credit", f"for request {credit.request_id}, which moves nothing to rank {key[1]}")

    def _on_lost(self, key: PeerKey, reason: str) -> bool:
        was_busy = False
        self._moves.carriers.leave(key, reason)
        for request in self._requests:
            if key in request.legs or key in (self._expected_by(request) or ()):
                was_busy |= request.session.leg(key) not in ENDED_LEGS
                self._work.do(request, partial(request.session.peer_lost, key, reason))
        return was_busy

    # --- requests -------------------------------------------------------------------------------------------------

    def _open(self, request_id: RequestId) -> ContextRequest:
        overdue = self._requests.overdue_waiter()
        if overdue is not None:
            self._work.do(overdue, partial(overdue.session.fail, "too many requests wait for their KV"))
        now_s = self._clock()
        session = ContextSession(request_id, now_s + self._options.timeout_s)
        self._deadlines.add(request_id, session.deadline_s)
        return self._requests.open(ContextRequest(session=session, created_s=now_s))

    def _check_can_travel(self, request_id: RequestId, aux: AuxData | None) -> None:
        """Refuse what could not be sent when the bytes have moved."""
        times = StageTimes(queue_s=0.0, plan_s=0.0, move_s=0.0)
        self._exchange.pack(Done(request_id=request_id, epoch=0, account=(), aux=aux, times=times))

    def _expected_by(self, request: ContextRequest) -> frozenset[PeerKey] | None:
        for key in request.legs:
            peer = self._peers.get(key)
            if peer is not None:
                return self._peers.expected(peer)
        return None

    def _expect(self, request: ContextRequest) -> None:
        expected = self._expected_by(request)
        if expected is None:
            self._unsure[request.session.request_id] = None
        elif not request.session.reported:
            self._work.do(request, partial(request.session.expect, expected))

    def _expect_again(self) -> None:
        """Somebody said hello: look at the requests of which we do not know yet who will ask for them."""
        unsure, self._unsure = self._unsure, {}
        for request_id in unsure:
            request = self._requests.get(request_id)
            if request is not None:
                self._expect(request)
