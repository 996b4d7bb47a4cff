"""Fleets of many ranks in one process: real engines on an in-memory network, pages without memory, a clock in steps.

What is measured is control: messages, time to handle one, and memory per known peer. Copies take no time here.
"""

from __future__ import annotations

import itertools
import time
from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import numpy as np

from transfer.cards import build_card
from transfer.context_engine import ContextEngine
from transfer.copier import CopyJob
from transfer.generation_engine import GenerationEngine
from transfer.hello import DraftKVMode, ParallelPosition, PathKind, RankCard, Side
from transfer.link import Frame, LinkEvent, SendTicket
from transfer.link_memory import MemoryLink, MemoryNetwork
from transfer.options import TransferOptions
from transfer.outcome import TransferHandle
from transfer.peer_memory import local_regions
from transfer.testing.faults import SteppingClock
from unikv.ids import LayerId, RequestId
from unikv.layer_spec import KVCacheLayerSpec, KVDtype, KVLayout, LayerOwner
from unikv.layout import CacheLayout, build_layout
from unikv.ranges import head_shard

TIMEOUT_S: Final = 3600.0
TOKENS_PER_BLOCK: Final = 32
NUM_SLOTS: Final = 4096


class _Done:
    def done(self) -> bool:
        return True


class NoCopier:
    """Says that every copy is over; there is no memory to copy."""

    def submit(self, job: CopyJob) -> _Done:
        """Do nothing."""
        return _Done()

    def close(self) -> None:
        """Do nothing."""


@dataclass(slots=True)
class Tally:
    """What went over the network, and what handling it took.

    Attributes:
        messages: by type.
        turns: turns of engines that had mail or work.
        busy_s: processor time of these turns.
    """

    messages: Counter[str] = field(default_factory=Counter)
    turns: int = 0
    busy_s: float = 0.0

    @property
    def total(self) -> int:
        """All messages."""
        return sum(self.messages.values())


class _CountingLink:
    """A memory link that counts what it sends by message type."""

    def __init__(self, inner: MemoryLink, tally: Tally) -> None:
        self._inner, self._tally = inner, tally
        self.name, self.address = inner.name, inner.address
        self.connect, self.disconnect = inner.connect, inner.disconnect
        self.wake, self.close, self.abort = inner.wake, inner.close, inner.abort

    def send(self, address: str, frames: Sequence[Frame]) -> SendTicket:
        self._tally.messages[_type_of(bytes(frames[0][:64]))] += 1
        return self._inner.send(address, frames)

    def poll(self, timeout_s: float) -> list[LinkEvent]:
        return self._inner.poll(timeout_s)

    @property
    def mail(self) -> bool:
        return bool(self._inner._inbox)


def _type_of(header: bytes) -> str:
    """Return the message type, which follows magic and version as a short msgpack text."""
    start = header.index(b"unikv-transfer") + len(b"unikv-transfer") + 1
    length = header[start] & 0x1F
    return header[start + 1 : start + 1 + length].decode()


def model_layout(layers: int, heads: int, position: ParallelPosition) -> CacheLayout:
    """Return the layout of one rank of a model of `layers` layers with `heads` KV heads of 128 bfloat16 values."""
    shard = head_shard(heads, position.tp, position.tp_rank)
    specs = [
        KVCacheLayerSpec(
            layer_id=LayerId(number),
            owner=LayerOwner.TARGET,
            num_kv_heads=len(shard.heads),
            total_num_kv_heads=heads,
            head_dim=128,
            dtype=KVDtype.BFLOAT16,
        )
        for number in range(layers)
    ]
    return build_layout(specs, tokens_per_block=TOKENS_PER_BLOCK, max_seq_len=1 << 20, kv_layout=KVLayout.HND)


@dataclass(slots=True)
class SimulatedRank:
    """One engine with its link and card."""

    engine: Any
    link: _CountingLink
    card: RankCard
    known: set[str] = field(default_factory=set)


class FleetDriver:
    """Instances of context and generation ranks, and requests through them.

    Args:
        contexts, generations: instances of each side.
        tp: tensor-parallel size of all of them.
        layers, heads: of the model.
    """

    def __init__(self, contexts: int, generations: int, *, tp: int, layers: int = 2, heads: int = 8) -> None:
        self.tally, self.clock = Tally(), SteppingClock()
        self._network = MemoryNetwork()
        self._layouts = [model_layout(layers, heads, ParallelPosition(tp=tp, tp_rank=rank)) for rank in range(tp)]
        self._tp, self._layers = tp, layers
        self.contexts = [self._instance(Side.CONTEXT, number) for number in range(contexts)]
        self.generations = [self._instance(Side.GENERATION, number) for number in range(generations)]
        self._ranks = [rank for instance in (*self.contexts, *self.generations) for rank in instance]
        self._ids = itertools.count()
        self.handles: deque[TransferHandle] = deque()

    def start(self, context: int, generation: int, prompt_tokens: int, *, publish: bool = True) -> None:
        """Begin one request between two instances, every rank of which gets a handle.

        Args:
            publish: whether the KV is there already; else the request stays open until it times out.
        """
        self.connect(context, generation)
        request_id, tables = RequestId(next(self._ids)), self._tables(prompt_tokens)
        addresses = [rank.card.address for rank in self.contexts[context]]
        for rank in self.generations[generation]:
            handle = TransferHandle(request_id)
            self.handles.append(handle)
            rank.engine.receive(handle, tables, prompt_tokens, addresses)
        for rank in self.contexts[context] if publish else ():
            handle = TransferHandle(request_id)
            self.handles.append(handle)
            rank.engine.publish(handle, tables, prompt_tokens, None)

    def connect(self, context: int, generation: int) -> None:
        """Let the ranks of two instances meet, unless they have."""
        addresses = [rank.card.address for rank in self.contexts[context]]
        for rank in self.generations[generation]:
            missing = [address for address in addresses if address not in rank.known]
            for address in missing:
                rank.engine.register(address)
            rank.known.update(missing)
            if missing:
                self.run()

    def run(self) -> None:
        """Turn whoever has mail or work until nobody has."""
        busy: set[int] = set(range(len(self._ranks)))
        while busy:
            busy = {number for number in busy if self._turn(self._ranks[number])}
            busy |= {number for number, rank in enumerate(self._ranks) if rank.link.mail}

    def settle(self) -> int:
        """Forget the handles that succeeded and are quiet, and return how many are left."""
        self.handles = deque(h for h in self.handles if not (h.outcome is not None and h.outcome.ok and h.quiet))
        return len(self.handles)

    def close(self) -> None:
        """End every engine."""
        for rank in self._ranks:
            rank.engine.close()
            rank.link.close()

    def _turn(self, rank: SimulatedRank) -> bool:
        began_s = time.process_time()
        more = bool(rank.engine.turn(0.0))
        self.tally.busy_s += time.process_time() - began_s
        self.tally.turns += 1
        return more

    def _tables(self, prompt_tokens: int) -> dict[Any, Any]:
        blocks = -(-prompt_tokens // TOKENS_PER_BLOCK)
        slots = np.arange(1, blocks + 1, dtype=np.int32)
        return {group.group_id: slots for group in self._layouts[0].groups}

    def _instance(self, side: Side, number: int) -> list[SimulatedRank]:
        return [self._rank(side, number, tp_rank) for tp_rank in range(self._tp)]

    def _rank(self, side: Side, number: int, tp_rank: int) -> SimulatedRank:
        link = _CountingLink(self._network.link(), self.tally)
        layout, position = self._layouts[tp_rank], ParallelPosition(tp=self._tp, tp_rank=tp_rank)
        card = build_card(
            layout,
            side=side,
            position=position,
            num_slots=NUM_SLOTS,
            address=link.address,
            path=PathKind.ZMQ,
            exports=None,
            incarnation=f"{side}-{number}-{tp_rank}",
            instance=f"{side}-{number}",
            speculative=None,
            draft_kv=DraftKVMode.AUTO,
            num_target_layers=self._layers,
            num_draft_layers=0,
            host=None,
        )
        nothing = np.zeros(1, np.uint8)
        arrays = [np.broadcast_to(nothing, (storage.size_bytes,)) for storage in card.storages]
        kind = ContextEngine if side is Side.CONTEXT else GenerationEngine
        options = TransferOptions(timeout_s=TIMEOUT_S, chunk_bytes=1 << 20, staging_chunks=1)
        engine = kind(link, card, local_regions(card, arrays), NoCopier(), options, self.clock)
        return SimulatedRank(engine, link, card)
