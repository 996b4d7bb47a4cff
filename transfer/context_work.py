"""What a context rank does for its requests: carries out what their sessions decide, and moves their bytes."""

from __future__ import annotations

import logging
from collections.abc import Callable

from transfer.context_moves import MoveQueue
from transfer.context_peers import ContextPeers, GenerationPeer
from transfer.context_requests import ContextRequest, RequestBook
from transfer.context_session import Action, Do, Leg
from transfer.exchange import Clock, Exchange, PeerKey
from transfer.link import Frame, SendTicket
from transfer.messages import Ask, Berth, CancelAck, Chunk, Done, Failed, StageTimes
from transfer.outcome import LegReport, Outcome
from transfer.paths import Batch, MoveState, SendChunk
from unikv.errors import LinkBrokenError, UnikvError

_log = logging.getLogger(__name__)


class ContextWork:
    """Moves, answers and outcomes of one context rank.

    Trouble with one request stays with that request. Where it is in doubt whether a copy still runs, the request has
    failed, but its pages are never released and its peer never hears that they are quiet, until a process ends.
    """

    def __init__(
        self, exchange: Exchange, peers: ContextPeers, moves: MoveQueue, requests: RequestBook, clock: Clock
    ) -> None:
        self._exchange, self._rank = exchange, exchange.card.rank
        self._peers, self._moves, self._requests, self._clock = peers, moves, requests, clock

    def do(self, request: ContextRequest, decide: Callable[[], list[Action]]) -> None:
        """Let `decide` feed the request's session, and carry out what the session returns. Never raises."""
        if request.broken:
            return
        try:
            self._do(request, decide())
        except Exception as error:
            self._break(request, error)

    def advance(self) -> bool:
        """Give the first move that can run one step, or all of them where copies run beside us; return whether one did.

        On a device a step only starts copies, and those of one round start together.
        """
        if self._moves.asynchronous:
            with self._moves.together():
                states = [self._step(request, key) for request, key in self._moves.running()]
            return any(state is not MoveState.WAITING for state in states)
        for request, key in self._moves.running():
            state = self._step(request, key)
            if state is not MoveState.WAITING:
                return True
        return False

    def tell(self, peer: GenerationPeer, message: Done | Failed | CancelAck) -> None:
        """Send an answer."""
        self._exchange.send(peer.card.address, message)

    def _do(self, request: ContextRequest, actions: list[Action]) -> None:
        for action in actions:
            if action.peer is not None:
                self._do_for_leg(request, action.do, action.peer)
            elif action.do is Do.REPORT:
                self._report(request)
            else:
                self._release(request)

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

    def _break(self, request: ContextRequest, error: Exception) -> None:
        """Give up a request whose session is in an unknown state: it has failed, and is never called quiet."""
        reason = f"context rank {self._rank}: {error!r}"
        _log.exception("context rank %d: request %d is broken", self._rank, request.session.request_id)
        request.broken = True
        for leg in request.legs.values():
            if leg.move is not None:
                leg.move.stop()
        if request.handle is None:  # its KV never was ready, so nothing of it moves
            self._requests.end(request.session.request_id, reason)
        elif request.handle.outcome is None:
            request.handle.decide(Outcome(request_id=request.session.request_id, reason=reason))

    # --- moves ----------------------------------------------------------------------------------------------------

    def _start_move(self, request: ContextRequest, key: PeerKey) -> None:
        if request.session.leg(key) is not Leg.MOVING:
            # Another leg failed while the actions for all of them were being carried out.
            self._do(request, request.session.move_stopped(key))
            return
        leg, peer = request.legs[key], self._peers.get(key)
        started_s = self._clock()
        try:
            assert peer is not None  # a leg moves for registered peers only
            leg.move = self._moves.make(request, leg.ask, peer, self._chunk_sender(leg.ask, peer))
        except Exception as error:  # nothing was copied yet, so whatever it is, this request alone fails
            self._log_unforeseen(error)
            self._do(request, request.session.move_failed(key, f"context rank {self._rank}: {error}"))
            return
        leg.planned_s = self._clock()
        leg.plan_s = leg.planned_s - started_s
        self._moves.add(request, key)

    def _chunk_sender(self, ask: Ask, peer: GenerationPeer) -> SendChunk:
        def send(batch: Batch, payload: Frame, berth: Berth | None) -> SendTicket:
            chunk = Chunk(
                request_id=ask.request_id,
                epoch=ask.epoch,
                pair=batch.pair,
                first_page=batch.first,
                pages=batch.count,
                payload=memoryview(payload),
                berth=berth,
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
            self._moves.run_now(request, key)

    def _step(self, request: ContextRequest, key: PeerKey) -> MoveState:
        leg = request.legs[key]
        assert leg.move is not None
        started_s = self._clock()
        leg.moving_s = leg.moving_s or started_s
        try:
            state = leg.move.step()
        except Exception as error:
            self._step_failed(request, key, error)
            return MoveState.DONE
        if state is not MoveState.WAITING:
            leg.busy_s += self._clock() - started_s
        if state is MoveState.DONE:
            self._moves.remove(request, key)
            draining = request.session.leg(key) is not Leg.MOVING
            over = request.session.move_stopped if draining else request.session.moved
            self.do(request, lambda: over(key))
        return state

    def _step_failed(self, request: ContextRequest, key: PeerKey, error: Exception) -> None:
        move, reason = request.legs[key].move, f"context rank {self._rank}: {error}"
        self._log_unforeseen(error)
        if move is None or move.quiet:
            self._moves.remove(request, key)
            self.do(request, lambda: request.session.move_failed(key, reason))
            return
        self._moves.keep_in_doubt(request, key)
        text = "context rank %d: request %d: nobody knows whether a copy still runs; its pages are never released: %s"
        _log.error(text, self._rank, request.session.request_id, error)
        self.do(request, lambda: request.session.fail(reason))
        peer = self._peers.get(key)
        if peer is not None and peer.memory is None:  # the copy is ours alone: the peer's pages are not in doubt
            self._send_failed(request, key)

    def _log_unforeseen(self, error: Exception) -> None:
        if not isinstance(error, UnikvError):
            _log.error("context rank %d: a move failed in an unforeseen way", self._rank, exc_info=error)

    # --- answers --------------------------------------------------------------------------------------------------

    def _send_done(self, request: ContextRequest, key: PeerKey) -> None:
        leg, peer = request.legs[key], self._peers.get(key)
        assert leg.move is not None
        account = leg.move.account()
        times = StageTimes(
            queue_s=leg.moving_s - leg.plan_s - max(leg.asked_s, request.ready_s),
            plan_s=leg.plan_s,
            # A move that waits for layers is not slow.
            move_s=self._clock() - leg.moving_s if request.readiness is None else leg.busy_s,
            exposed_s=self._clock() - max(leg.asked_s, request.complete_s),
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
        self.tell(peer, Done(request_id=ask.request_id, epoch=ask.epoch, account=account, aux=request.aux, times=times))

    def _send_failed(self, request: ContextRequest, key: PeerKey) -> None:
        peer, ask = self._peers.get(key), request.legs[key].ask
        if peer is not None:
            reason = request.session.leg_reason(key)
            self.tell(peer, Failed(request_id=ask.request_id, epoch=ask.epoch, reason=reason))

    def _send_cancel_ack(self, request: ContextRequest, key: PeerKey) -> None:
        peer, leg = self._peers.get(key), request.legs.get(key)
        if peer is not None and leg is not None:
            self.tell(peer, CancelAck(request_id=leg.ask.request_id, epoch=leg.ask.epoch))

    def _report(self, request: ContextRequest) -> None:
        session = request.session
        if session.failed:
            _log.warning("context rank %d: request %d failed: %s", self._rank, session.request_id, session.reason)
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
        self._requests.end(request.session.request_id, request.session.reason or "it was sent")
        if request.handle is not None:
            request.handle.settle_quiet()
