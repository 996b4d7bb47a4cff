"""The generation ranks a context rank knows: registered through the gate, with their program, path and memory."""

from __future__ import annotations

import logging
from dataclasses import dataclass

from transfer.agreement import judge, plan_of, shared
from transfer.exchange import PeerKey
from transfer.gate_report import DraftKV, GateReport
from transfer.hello import PathKind, RankCard
from transfer.messages import HelloAck, HelloNack
from transfer.path_choice import choose_path
from transfer.peer_memory import PeerMemory
from transfer.plan import CopyProgram, Lane
from unikv.errors import UnikvError

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationPeer:
    """One registered generation rank.

    Attributes:
        lanes: the program's lanes by group pair.
        memory: its mapped pools on the direct path, None on staged ones.
    """

    card: RankCard
    program: CopyProgram
    lanes: tuple[tuple[Lane, ...], ...]
    path: PathKind
    memory: PeerMemory | None

    @property
    def key(self) -> PeerKey:
        """Who it is, for as long as its process lives."""
        return (self.card.incarnation, self.card.rank)


class ContextPeers:
    """Registers generation ranks and answers their hello. Owns the mappings of their memory.

    A peer that is lost *leaves*: it is no peer any more, but its memory stays mapped until its copies are over.
    """

    def __init__(self, card: RankCard) -> None:
        self._card = card
        self._peers: dict[PeerKey, GenerationPeer] = {}
        self._leaving: dict[PeerKey, GenerationPeer] = {}
        self._sharing: dict[tuple[str, int], dict[PeerKey, GenerationPeer]] = {}

    def register(self, card: RankCard) -> HelloAck | HelloNack:
        """Judge `card`, compile, map; return the answer. Registering the same process again changes nothing.

        Whatever is wrong with the card, its sender gets an answer.
        """
        report = GateReport(checks=(), draft_kv=DraftKV.OFF)
        key = (card.incarnation, card.rank)
        try:
            report = judge(self._card, card)
            if not report.compatible:
                return HelloNack(card=self._card, report=report, reason="the gate refused this pair of ranks")
            peer = self._peers.get(key) or self._open(card, report)
            _, reason = choose_path(self._card, card)
        except Exception as error:
            unforeseen = not isinstance(error, UnikvError | OSError)
            text = "context rank %d: cannot serve generation rank %d: %s"
            _log.warning(text, self._card.rank, card.rank, error, exc_info=unforeseen)
            return HelloNack(card=self._card, report=report, reason=repr(error) if unforeseen else str(error))
        self._peers[key] = peer
        self._sharing.setdefault(_share(peer.card), {})[key] = peer
        return HelloAck(card=self._card, report=report, digest=peer.program.digest, path=peer.path, path_reason=reason)

    def get(self, key: PeerKey) -> GenerationPeer | None:
        """Return the registered peer, None for a stranger and for one that leaves."""
        return self._peers.get(key)

    def leave(self, key: PeerKey) -> None:
        """From now on `key` is a stranger whose memory stays mapped until `forget`."""
        peer = self._leaving[key] = self._peers.pop(key)
        share = _share(peer.card)
        self._sharing[share].pop(key)
        if not self._sharing[share]:
            del self._sharing[share]

    def leaving(self) -> tuple[GenerationPeer, ...]:
        """Return who leaves."""
        return tuple(self._leaving.values())

    def is_leaving(self, key: PeerKey) -> bool:
        """Return whether a lost peer of this key is not forgotten yet."""
        return key in self._leaving

    def all(self) -> tuple[GenerationPeer, ...]:
        """Return everybody registered."""
        return tuple(self._peers.values())

    def at(self, address: str) -> tuple[GenerationPeer, ...]:
        """Return the peers that are reached at `address`."""
        return tuple(peer for peer in self._peers.values() if peer.card.address == address)

    def expected(self, asker: GenerationPeer) -> frozenset[PeerKey] | None:
        """Return who asks us for a request that `asker` asks for; None until all that may have registered.

        These are the ranks of its instance that share the request with it and get bytes from us, and the first of
        them, which asks everybody.
        """
        known = self._sharing.get(_share(asker.card), {}).values()
        if len({peer.card.rank for peer in known}) < asker.card.position.group_size:
            return None
        return frozenset(peer.key for peer in known if peer.program.lanes or peer.card.position.leads_group)

    def forget(self, key: PeerKey) -> None:
        """Drop a peer that left and whose copies are over, and unmap its memory."""
        peer = self._leaving.pop(key, None)
        if peer is not None and peer.memory is not None:
            peer.memory.close()

    def close(self) -> None:
        """Forget everybody."""
        for key in list(self._peers):
            self.leave(key)
        for key in list(self._leaving):
            self.forget(key)

    def _open(self, card: RankCard, report: GateReport) -> GenerationPeer:
        plan = plan_of(self._card, card, report)
        path, reason = choose_path(self._card, card)
        memory = PeerMemory(card, device=self._card.device) if path is PathKind.DIRECT and plan.program.lanes else None
        names = (self._card.rank, card.rank, path, reason, report.draft_kv)
        _log.info("context rank %d -> generation rank %d: path %s (%s), draft KV %s", *names)
        return GenerationPeer(card=shared(card), program=plan.program, lanes=plan.lanes, path=path, memory=memory)


def _share(card: RankCard) -> tuple[str, int]:
    """Return what ranks that receive the same requests have in common."""
    return (card.instance, card.position.data_rank)
