"""Ranks of the simulator: memory full of noise, a real card and a real engine on a link in this process.

Slots are dealt out at random, or come from a cache of the manager. Between two slots and in front of the first there
may be canaries.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from random import Random
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from transfer.cards import build_card
from transfer.context_engine import ContextEngine
from transfer.copy_host import HostCopier
from transfer.generation_engine import GenerationEngine
from transfer.generation_peers import Registration
from transfer.hello import (
    DraftKVMode,
    MemoryExport,
    ParallelPosition,
    PathKind,
    RankCard,
    Side,
    SpeculativeCard,
    StorageCard,
)
from transfer.link_memory import MemoryNetwork
from transfer.mapped_storage import MappedStorage
from transfer.options import TransferOptions
from transfer.outcome import TransferHandle
from transfer.pages import SlotArray
from transfer.peer_memory import local_regions, own_host_identity
from transfer.testing.case import InstanceShape, LayerKind, PairCase, RequestCase
from transfer.testing.oracle import Numbers, RankFacts, Spread
from unikv.budget import PoolBudget
from unikv.buffers import MemfdExport
from unikv.cache_manager import UnifiedKVCacheManager
from unikv.ids import NO_PAGE, GroupId, LayerId, RequestId
from unikv.layer_spec import KVCacheLayerSpec, KVDtype, KVLayout, LayerOwner, ReusePolicy
from unikv.layout import CacheLayout, build_layout

SPARE_SLOTS: Final = 4


class StepClock:
    """A clock that moves only when it is told to."""

    def __init__(self) -> None:
        self.now_s = 1000.0

    def __call__(self) -> float:
        """Return the time in seconds."""
        return self.now_s


@dataclass
class SimRank:
    """One rank: facts, memory, engine, and what its memory must be like in the end."""

    facts: RankFacts
    card: RankCard
    engine: Any
    arrays: list[NDArray[np.uint8]]
    spread: Spread
    expected: list[NDArray[np.uint8]]
    free: list[list[int]]
    tables: dict[int, list[Numbers]] = field(default_factory=dict)
    handles: dict[int, TransferHandle] = field(default_factory=dict)
    peers: list[Registration] = field(default_factory=list)
    manager: UnifiedKVCacheManager | None = None

    def deal(self, number: int, request: RequestCase) -> None:
        """Take slots for every block of a request in every group."""
        tpb, cp = self.facts.shape.tpb, self.facts.shape.cp
        blocks = -(-request.prompt // tpb) + request.tail_blocks
        if self.manager is not None:
            self.tables[number] = self._reserve(self.manager, number, request, blocks)
            return
        self.tables[number] = []
        for group in self.facts.groups:
            slots = np.full(blocks, NO_PAGE, dtype=np.int64)
            for ordinal in range(self.facts.cp_rank, blocks, cp):
                slots[ordinal] = self.free[group.memory].pop()
            self.tables[number].append(slots)

    def _reserve(self, manager: UnifiedKVCacheManager, number: int, request: RequestCase, blocks: int) -> list[Numbers]:
        """Let the manager reserve a request's pages; what left a window has none."""
        shape = self.facts.shape
        capacity = max(request.prompt, min(blocks * shape.tpb, shape.max_seq_len or 0))
        held = manager.create_request(RequestId(number))
        held.resize(capacity, request.prompt)
        tables = []
        for index in range(len(self.facts.groups)):
            slots = np.full(blocks, NO_PAGE, dtype=np.int64)
            own = held.page_table(GroupId(index))
            slots[self.facts.cp_rank :: shape.cp][: len(own)] = own
            tables.append(slots)
        return tables

    def table(self, number: int, chosen: Callable[[int], Numbers]) -> dict[GroupId, SlotArray]:
        """Return page tables of this rank's blocks with the `chosen` ordinals of every group, and holes elsewhere."""
        found = {}
        for index, slots in enumerate(self.tables[number]):
            masked = np.full(len(slots), NO_PAGE, dtype=np.int32)
            ordinals = chosen(index)
            masked[ordinals] = slots[ordinals]
            found[GroupId(index)] = masked[self.facts.cp_rank :: self.facts.shape.cp].copy()
        return found


def _spec(shape: InstanceShape, facts: RankFacts, layer: int, kind: LayerKind) -> KVCacheLayerSpec:
    return KVCacheLayerSpec(
        layer_id=LayerId(layer),
        owner=LayerOwner.DRAFT if kind.draft else LayerOwner.TARGET,
        num_kv_heads=len(facts.local_heads(kind.heads)),
        total_num_kv_heads=kind.heads,
        head_dim=kind.head_dim,
        dtype=KVDtype(kind.dtype),
        kv_factor=kind.kv_factor,
        window=kind.window,
        sink_tokens=kind.sinks,
        reuse_policy=ReusePolicy(kind.policy),
        extra_buffers=kind.extras,
    )


def layout_of(facts: RankFacts) -> CacheLayout:
    """Return the real layout of a rank."""
    shape = facts.shape
    return build_layout(
        [_spec(shape, facts, layer, kind) for layer, kind in facts.layers.items()],
        tokens_per_block=shape.tpb,
        max_seq_len=shape.max_seq_len,
        kv_layout=KVLayout(shape.layout),
    )


class SimRankManager:
    """Makes the ranks of one case, and frees what they have.

    Attributes:
        draw, noise: randomness of this case; the same for the same seed.
        stack: what is to be closed in the end.
    """

    def __init__(self, case: PairCase) -> None:
        self.case = case
        self.clock = StepClock()
        self.draw = Random(case.seed ^ 0x5EED)  # noqa: S311 - a red run is to be repeated
        self.noise = np.random.default_rng(case.seed)
        self.network = MemoryNetwork()
        self.stack = ExitStack()
        self.options = TransferOptions(chunk_bytes=case.chunk_bytes, staging_chunks=case.staging_chunks)

    def start(self, side: Side, facts: RankFacts) -> SimRank:
        """Return a new rank with its engine, and with slots for the requests that it takes part in."""
        shape = facts.shape
        blocks = [-(-request.prompt // shape.tpb) + request.tail_blocks for request in self.case.requests]
        sharing = [sum(group.memory == memory for group in facts.groups) for memory in range(len(facts.groups))]
        slots = 1 + sum(blocks) * max(sharing) + SPARE_SLOTS
        stride = {number: size + shape.pad_bytes for number, size in enumerate(facts.slot_bytes)}
        spread = Spread(stride=stride, base_bytes=shape.base_bytes)
        sizes = [shape.base_bytes + slots * size for size in stride.values()]
        manager = self._manager(facts, slots) if self.case.managed else None
        arrays, exports = self._memory(sizes, side, shape) if manager is None else _memory_of(manager)
        link = self.network.link()
        card = _spread_out(self._card(side, facts, slots, link.address, exports), spread, arrays)
        for array in arrays:
            array[:] = self.noise.integers(0, 256, size=len(array), dtype=np.uint8)
        engine = (ContextEngine if side is Side.CONTEXT else GenerationEngine)(
            link, card, local_regions(card, arrays), HostCopier(), self.options, self.clock
        )
        self.stack.callback(link.close)
        self.stack.callback(engine.close)
        expected, free = [array.copy() for array in arrays], self._free(facts, slots)
        rank = SimRank(facts, card, engine, arrays, spread, expected, free, manager=manager)
        for number, request in enumerate(self.case.requests):
            if facts.data_rank == self._data_rank(side, request):
                rank.deal(number, request)
        return rank

    def _manager(self, facts: RankFacts, slots: int) -> UnifiedKVCacheManager:
        shape = facts.shape
        manager = UnifiedKVCacheManager(
            [_spec(shape, facts, layer, kind) for layer, kind in facts.layers.items()],
            tokens_per_block=shape.tpb,
            max_seq_len=shape.max_seq_len or 0,
            pool=PoolBudget(pages=slots),
            kv_layout=KVLayout(shape.layout),
            cp_size=shape.cp,
            cp_rank=facts.cp_rank,
        )

        def close() -> None:
            manager.check_integrity()
            for request in list(manager._requests.values()):
                request.close()
            manager.close()

        self.stack.callback(close)
        return manager

    def _free(self, facts: RankFacts, slots: int) -> list[list[int]]:
        """Return free slots of every allocator: in order, backwards or shuffled, so that runs of all lengths occur."""
        found = []
        for _ in range(1 + max(group.memory for group in facts.groups)):
            free = list(range(1, slots))
            how = self.draw.randrange(3)
            if how == 0:
                self.draw.shuffle(free)
            elif how == 1:
                free.reverse()
            found.append(free)
        return found

    def _memory(
        self, sizes: list[int], side: Side, shape: InstanceShape
    ) -> tuple[list[NDArray[np.uint8]], list[MemoryExport | None]]:
        if side is Side.CONTEXT or not shape.exported:
            return [np.empty(size, dtype=np.uint8) for size in sizes], [None] * len(sizes)
        arrays, exports = [], []
        for size in sizes:
            fd = os.memfd_create("unikv-simulator")
            self.stack.callback(os.close, fd)
            os.ftruncate(fd, size)
            export = MemoryExport(kind="memfd", pid=os.getpid(), fd=fd, inode=os.fstat(fd).st_ino)
            exports.append(export)
            arrays.append(MappedStorage(StorageCard(size_bytes=size, export=export)).array)
        return arrays, list(exports)

    def _card(
        self, side: Side, facts: RankFacts, slots: int, address: str, exports: list[MemoryExport | None]
    ) -> RankCard:
        shape, method = facts.shape, facts.shape.speculation
        targets, drafts = shape.counts()
        return build_card(
            layout_of(facts),
            side=side,
            position=ParallelPosition(
                tp=shape.tp,
                tp_rank=facts.tp_rank,
                pp=shape.pp,
                pp_rank=facts.pp_rank,
                cp=shape.cp,
                cp_rank=facts.cp_rank,
                attention_dp=shape.attention_dp,
            ),
            num_slots=slots,
            incarnation=f"{side}-{facts.pp_rank}-{facts.tp_rank}-{facts.cp_rank}",
            instance=f"{side}-0",
            address=address,
            speculative=None
            if method is None
            else SpeculativeCard(
                method=method[0], max_draft_tokens=method[1], block_width=method[2], num_extra_kv_tokens=1
            ),
            draft_kv=DraftKVMode(shape.draft_kv),
            path=PathKind(shape.path),
            num_target_layers=targets,
            num_draft_layers=drafts,
            exports=exports,
            host=own_host_identity(),
            checksum=shape.checksum,
            layer_bands=shape.bands,
        )

    def _data_rank(self, side: Side, request: RequestCase) -> int:
        shape, choice = (
            (self.case.context, request.source) if side is Side.CONTEXT else (self.case.generation, request.target)
        )
        return choice % shape.tp if shape.attention_dp else 0


def _memory_of(manager: UnifiedKVCacheManager) -> tuple[list[NDArray[np.uint8]], list[MemoryExport | None]]:
    exports = [
        MemoryExport(kind="memfd", pid=own.pid, fd=own.fd, inode=own.inode) if isinstance(own, MemfdExport) else None
        for own in manager.pools.exports()
    ]
    return [manager.pools.numpy(number) for number in range(len(exports))], exports


def _spread_out(card: RankCard, spread: Spread, arrays: list[NDArray[np.uint8]]) -> RankCard:
    """Return `card` with pools that begin later and whose slots are further apart."""
    pools = tuple(
        replace(pool, slot_stride_bytes=spread.stride[pool.storage], offset_bytes=spread.base_bytes)
        for pool in card.pools
    )
    storages = tuple(
        replace(storage, size_bytes=len(array)) for storage, array in zip(card.storages, arrays, strict=True)
    )
    return replace(card, pools=pools, storages=storages)
