"""The generation rank's engine: asks, receives, audits, settles. Single-threaded; `turn` does everything."""

from __future__ import annotations

import logging
import secrets
from collections.abc import Iterable, Mapping
from functools import partial
from typing import Final

from transfer.carriers import SinkManager
from transfer.copier import Copier
from transfer.deadlines import DeadlineManager, Pace
from transfer.delivery import Delivery
from transfer.exchange import REMIND_S, Clock, Exchange, PeerKey, legible
from transfer.generation_door import GenerationDoor
from transfer.generation_peers import ContextPeer, Registration
from transfer.generation_session import ENDED_LEGS, GenerationSession, Leg
from transfer.generation_work import GenerationRequest, GenerationWork
from transfer.hello import RankCard
from transfer.link import Link
from transfer.messages import (
    Ask,
    CancelAck,
    Chunk,
    Done,
    Envelope,
    Failed,
    Goodbye,
    GroupTable,
    HelloAck,
    HelloNack,
    Reregister,
    Vacate,
)
from transfer.options import TransferOptions
from transfer.outcome import Outcome, TransferHandle
from transfer.pages import SlotArray
from transfer.paths import Regions
from unikv.errors import LocalProtocolError, explain
from unikv.ids import GroupId, RequestId

_log = logging.getLogger(__name__)

EPOCH_BITS: Final = 63


class GenerationEngine:
    """Fetches requests into one generation rank's pages."""

    def __init__(
        self, link: Link, card: RankCard, regions: Regions, copier: Copier, options: TransferOptions, clock: Clock
    ) -> None:
        self.link = link
        self._exchange = Exchange(link, card)
        self._copier, self._options, self._clock = copier, options, clock
        self._requests: dict[RequestId, GenerationRequest] = {}
        room = card.speculative.max_draft_tokens if card.speculative else 0
        self._work = GenerationWork(
            self._exchange, self._requests, regions, copier, clock, max_draft_tokens=max(0, room)
        )
        self._door = GenerationDoor(self._exchange, card, self)
        self._sinks = SinkManager(options, card)
        self._leads = card.position.leads_group
        self._restless: dict[RequestId, None] = {}
        self._deadlines, self._reminders = DeadlineManager(), Pace(REMIND_S)
        self._shutting_down = ""
        self._copying = False

    # --- called between turns -------------------------------------------------------------------------------------

    def register(self, address: str) -> Registration:
        """Say hello to the context rank at `address`; the returned registration is decided by later turns."""
        return self._door.register(address)

    def receive(
        self,
        handle: TransferHandle,
        tables: Mapping[GroupId, SlotArray],
        prompt_tokens: int,
        addresses: Iterable[str],
    ) -> None:
        """Ask the registered context ranks at `addresses` for a request.

        Raises:
            LocalProtocolError: the request is being received already, a peer is not registered, a table ends before
                the prompt does, or the request cannot travel. Nobody was asked then.
        """
        request_id = handle.request_id
        if request_id in self._requests:
            raise LocalProtocolError(
                explain(f"request {request_id}", "state", "being received", "new", "use every request id once")
            )
        if self._shutting_down:
            handle.decide(Outcome(request_id=request_id, reason=self._shutting_down))
            handle.settle_quiet()
            return
        peers = [self._door.peer_at(address) for address in addresses]
        now_s, epoch = self._clock(), 1 + secrets.randbits(EPOCH_BITS - 1)
        # The first rank of a group asks everybody: those with nothing to send must hear that the request is fetched.
        wanted = {peer.key: peer for peer in peers if peer.program.lanes or self._leads}
        request = GenerationRequest(
            session=GenerationSession(request_id, epoch, now_s + self._options.timeout_s),
            handle=handle,
            created_s=now_s,
            deliveries={key: Delivery(peer, tables, prompt_tokens) for key, peer in wanted.items()},
            asks={
                key: self._exchange.pack(self._ask(peer, request_id, epoch, prompt_tokens, tables))
                for key, peer in wanted.items()
            },
            last_word_s=now_s,
        )
        self._requests[request_id] = request
        self._deadlines.add(request_id, request.session.deadline_s)
        groups = {key: peer.card.position.data_rank for key, peer in wanted.items()}
        self._work.do(request, partial(request.session.start, groups))

    def cancel(self, request_id: RequestId, reason: str) -> None:
        """Give a request up; its pages are quiet once every peer has said so."""
        request = self._requests.get(request_id)
        if request is not None:
            self._work.do(request, partial(request.session.cancel, legible(reason)))

    def shut_down(self, reason: str) -> None:
        """Cancel everything open, and take nothing new."""
        self._shutting_down = reason = legible(reason)
        for request in list(self._requests.values()):
            self._work.do(request, partial(request.session.cancel, reason))

    def drained(self) -> bool:
        """Return whether no peer can touch our pages any more."""
        return not self._requests

    def abandon(self, reason: str) -> None:
        """The engine is broken: decide every handle and every hello, call no page quiet."""
        self._door.give_up(reason)
        for request in self._requests.values():
            if request.handle.outcome is None:
                request.handle.decide(Outcome(request_id=request.session.request_id, reason=reason))

    def close(self) -> None:
        """Say goodbye and free what the engine holds. The driver calls it last."""
        reason = self._shutting_down or "closed"
        self._door.give_up(reason)
        self._door.say_goodbye(reason)
        self._copier.close()
        self._sinks.close()

    # --- one turn -------------------------------------------------------------------------------------------------

    def turn(self, timeout_s: float) -> bool:
        """Handle what arrived, settle what has landed; return whether more work is runnable."""
        self._sinks.progress()
        if self._requests:
            timeout_s = min(timeout_s, self._sinks.longest_sleep_s)
        self._exchange.events(timeout_s, self._on_message, self._door.gone)
        self._copying = self._look_after()
        self._watch_time(self._clock())
        self._door.watch()
        return False

    def copying(self) -> bool:
        """Return whether copies of ours run beside us."""
        return self._copying

    def expecting(self) -> bool:
        """Return whether a request is open."""
        return bool(self._requests)

    def _look_after(self) -> bool:
        """Look after the requests that copies of ours run for; return whether there are any."""
        for request_id in list(self._restless):
            request = self._requests.get(request_id)
            if request is None or not self._work.look_after(request):
                del self._restless[request_id]
        return bool(self._restless)

    def _watch_time(self, now_s: float) -> None:
        """Give up what is late; now and then say again what nobody has answered."""
        for request_id in self._deadlines.due(now_s):
            request = self._requests.get(request_id)
            if request is not None:
                self._work.do(request, partial(request.session.tick, now_s))
        if self._reminders.due(now_s):
            for request in list(self._requests.values()):
                self._work.remind(request, self._door.is_registered)
            self._door.remind()

    def _on_message(self, envelope: Envelope) -> None:
        message, key = envelope.message, (envelope.incarnation, envelope.rank)
        match message:
            case HelloAck() | HelloNack():
                self._door.answered(message, key)
            case Reregister():
                self._door.reregister(key, message.reason)
            case Goodbye():
                self._door.goodbye(key, message.reason)
            case Chunk():
                self._on_request_message(self._sinks.read(message, key), key)
            case Done() | Failed() | CancelAck():
                self._on_request_message(message, key)
            case _:
                self._exchange.refuse("unexpected", f"{type(message).__name__} does not go to a generation rank")

    def _on_request_message(self, message: Chunk | Done | Failed | CancelAck, key: PeerKey) -> None:
        request = self._requests.get(message.request_id)
        leg = request.session.leg(key) if request is not None and request.session.epoch == message.epoch else None
        if request is None or leg in (None, *ENDED_LEGS) or (key in request.settling and isinstance(message, Chunk)):
            self._on_late(message, key)
            return
        match message:
            case Chunk():
                self._work.receive(request, message, key)
                self._restless[message.request_id] = None
            case Done():
                self._work.finish(request, message, key)
                self._restless[message.request_id] = None
            case Failed():
                self._work.do(request, partial(request.session.peer_failed, key, message.reason))
            case CancelAck():
                self._work.do(request, partial(request.session.cancel_acked, key))

    def _on_late(self, message: Chunk | Done | Failed | CancelAck, key: PeerKey) -> None:
        if isinstance(message, Chunk) and message.berth is not None:
            self._door.tell(key, Vacate(serials=(message.berth.serial,)))
        text = f"{type(message).__name__} for request {message.request_id}, which is not open"
        if isinstance(message, CancelAck):
            _log.debug("%s: the peer's last word crossed our cancel", text)
        else:
            self._exchange.refuse("late", text)

    def _ask(
        self,
        peer: ContextPeer,
        request_id: RequestId,
        epoch: int,
        prompt_tokens: int,
        tables: Mapping[GroupId, SlotArray],
    ) -> Ask:
        """Return what `peer` is asked: only the page tables its program writes into."""
        groups = {pair.dst_group for pair in peer.program.pairs}
        return Ask(
            request_id=request_id,
            epoch=epoch,
            reply_to=self.link.address,
            prompt_tokens=prompt_tokens,
            tables=tuple(GroupTable(group_id=group, slots=tables[group]) for group in sorted(groups & set(tables))),
            landing=self._sinks.landing(peer),
        )

    # --- what the door tells --------------------------------------------------------------------------------------

    def peer_lost(self, peer: ContextPeer, reason: str, *, quiet: bool) -> bool:
        """Tell every request of `peer`; return whether one was open towards it."""
        was_busy = False
        for request in list(self._requests.values()):
            was_busy |= request.session.leg(peer.key) not in (None, *ENDED_LEGS)
            self._work.do(request, partial(request.session.peer_lost, peer.key, reason, quiet=quiet))
        return was_busy

    def peer_back(self, peer: ContextPeer) -> None:
        """Cancel again what `peer` may still be doing: its acknowledgement is the proof that it is quiet."""
        for request in list(self._requests.values()):
            self._work.cancel_again(request, peer.key)

    def peer_quiet(self, key: PeerKey) -> None:
        """Release what waited for the proof that a lost peer is quiet."""
        for request in list(self._requests.values()):
            if request.session.leg(key) is Leg.IN_DOUBT:
                self._work.do(request, partial(request.session.peer_quiet, key))

    def in_doubt(self, key: PeerKey) -> bool:
        """Return whether a request waits for that proof."""
        return any(request.session.leg(key) is Leg.IN_DOUBT for request in self._requests.values())
