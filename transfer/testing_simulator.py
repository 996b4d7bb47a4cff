"""Runs a pair of instances in this thread: real layouts, cards, engines, links and copies, and a clock that is stepped.

Every rank has its memory full of noise. Slots are dealt out at random, requests are published and asked for in any
order, and turns of engines come in any order, too. At the end every byte of every rank is compared with what the
oracle says: right where something was to arrive, as it was everywhere else, on both sides.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
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
from transfer.readiness import ReadinessManager
from transfer.testing_case import InstanceShape, LayerKind, PairCase, RequestCase
from transfer.testing_oracle import (
    Numbers,
    RankFacts,
    Spread,
    addresses,
    all_ranks,
    expected_writes,
    truth,
    wanted_blocks,
)
from transfer.testing_oracle_gate import draft_travels, refusals
from transfer.testing_random import smaller
from unikv.budget import PoolBudget
from unikv.cache_manager import UnifiedKVCacheManager
from unikv.ids import NO_PAGE, GroupId, LayerId, RequestId
from unikv.layer_spec import KVCacheLayerSpec, KVDtype, KVLayout, LayerOwner, ReusePolicy
from unikv.layout import CacheLayout, build_layout

MOST_ROUNDS: Final = 4000
SPARE_SLOTS: Final = 4
STEP_S: Final = 0.001


class SimulationError(AssertionError):
    """The pair did something else than the oracle says."""


class StepClock:
    """A clock that moves only when it is told to."""

    def __init__(self) -> None:
        self.now_s = 1000.0

    def __call__(self) -> float:
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

    def _reserve(
        self, manager: UnifiedKVCacheManager, number: int, request: RequestCase, blocks: int
    ) -> list[Numbers]:
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


class Simulation:
    """One pair from start to end. Use as a context manager; `run` raises SimulationError where the oracle disagrees.

    Args:
        case: the pair.
    """

    def __init__(self, case: PairCase) -> None:
        self.case = case
        self.clock = StepClock()
        self.draw = Random(case.seed ^ 0x5EED)
        self.noise = np.random.default_rng(case.seed)
        self.refused: frozenset[str] = frozenset()
        self._network = MemoryNetwork()
        self._stack = ExitStack()
        self._options = TransferOptions(chunk_bytes=case.chunk_bytes, staging_chunks=case.staging_chunks)
        self.contexts: list[SimRank] = []
        self.generations: list[SimRank] = []

    def __enter__(self) -> Simulation:
        try:
            self.contexts = [self._start(Side.CONTEXT, facts) for facts in all_ranks(self.case.context)]
            self.generations = [self._start(Side.GENERATION, facts) for facts in all_ranks(self.case.generation)]
        except BaseException:
            self._stack.close()
            raise
        return self

    def __exit__(self, *error: object) -> None:
        self._stack.close()

    def run(self) -> None:
        """Connect everybody, run all requests, compare all bytes."""
        self._connect()
        if self.refused:
            self._compare()
            return
        steps = [self._steps(number, request) for number, request in enumerate(self.case.requests)]
        self._play([step for own in steps for step in own])
        self._settle()
        self._account()
        self._compare()

    # --- making ranks ---------------------------------------------------------------------------------------------

    def _start(self, side: Side, facts: RankFacts) -> SimRank:
        shape = facts.shape
        blocks = [-(-request.prompt // shape.tpb) + request.tail_blocks for request in self.case.requests]
        sharing = [sum(group.memory == memory for group in facts.groups) for memory in range(len(facts.groups))]
        slots = 1 + sum(blocks) * max(sharing) + SPARE_SLOTS
        stride = {number: size + shape.pad_bytes for number, size in enumerate(facts.slot_bytes)}
        spread = Spread(stride=stride, base_bytes=shape.base_bytes)
        sizes = [shape.base_bytes + slots * size for size in stride.values()]
        manager = self._manager(facts, slots) if self.case.managed else None
        arrays, exports = self._memory(sizes, side, shape) if manager is None else _memory_of(manager)
        link = self._network.link()
        card = _spread_out(self._card(side, facts, slots, link.address, exports), spread, arrays)
        for array in arrays:
            array[:] = self.noise.integers(0, 256, size=len(array), dtype=np.uint8)
        engine = (ContextEngine if side is Side.CONTEXT else GenerationEngine)(
            link, card, local_regions(card, arrays), HostCopier(), self._options, self.clock
        )
        self._stack.callback(link.close)
        self._stack.callback(engine.close)
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

        self._stack.callback(close)
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
            self._stack.callback(os.close, fd)
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

    # --- running --------------------------------------------------------------------------------------------------

    def _connect(self) -> None:
        for rank in self.generations:
            rank.peers = [rank.engine.register(peer.card.address) for peer in self.contexts]
        self._until(lambda: all(peer.decided for rank in self.generations for peer in rank.peers), "hellos")
        answers = [peer for rank in self.generations for peer in rank.peers]
        names = [check.name for peer in answers if peer.answer for check in peer.answer.report.refused]
        unexplained = [peer.refusal for peer in answers if peer.refusal and not (peer.answer and names)]
        want = refusals(self.case)
        if frozenset(names) != want or unexplained:
            text = f"the gate refuses for {sorted(set(names))} {unexplained[:1]}, the oracle for {sorted(want)}"
            raise SimulationError(text)
        self.refused = want

    def _steps(self, number: int, request: RequestCase) -> list[Iterator[None]]:
        """Return what happens to one request, as two scripts, one per side."""
        sources = [rank for rank in self.contexts if number in rank.tables]
        targets = [rank for rank in self.generations if number in rank.tables]
        scripts = [self._publish(rank, number, request) for rank in sources]
        asks = [self._ask(rank, number, request, sources) for rank in targets]
        if request.ask_first:
            return [_one_after_another([*asks, _together(scripts)])]
        return [*scripts, *asks]

    def _publish(self, rank: SimRank, number: int, request: RequestCase) -> Iterator[None]:
        table = rank.table(number, lambda group: self._kept(rank, group, request))
        handle = rank.handles[number] = TransferHandle(RequestId(number))
        if not request.early:
            for layer in rank.facts.layers:
                self._fill(rank, number, request, layer, 0, None)
            rank.engine.publish(handle, table, request.prompt, None)
            return
        readiness = ReadinessManager(request.prompt, complete=False)
        rank.engine.publish(handle, table, request.prompt, None, readiness)
        yield
        done = 0
        while done < request.prompt:
            first, done = done, min(request.prompt, done + self.draw.randint(1, request.prompt))
            for layer in sorted(rank.facts.layers):
                self._fill(rank, number, request, layer, first, done if done < request.prompt else None)
                readiness.mark(LayerId(layer), done)
                yield
        rank.engine.finish(RequestId(number), None)

    def _kept(self, rank: SimRank, index: int, request: RequestCase) -> Numbers:
        """Return the blocks the context side still has: some of those that left the window are gone."""
        group, tpb = rank.facts.groups[index], rank.facts.shape.tpb
        blocks = np.arange(-(-request.prompt // tpb) + request.tail_blocks)
        if group.window is None or rank.manager is not None:
            return blocks
        stale = ((blocks + 1) * tpb <= request.prompt + 1 - group.window) & (blocks >= group.sink_blocks)
        kept: Numbers = blocks[~stale | (self.noise.random(len(blocks)) < 0.3)]
        return kept

    def _fill(
        self, rank: SimRank, number: int, request: RequestCase, layer: int, first: int, end: int | None
    ) -> None:
        """Compute the KV of one layer for tokens ``[first, end)``; None: to the end of the pages."""
        for (own, role), place in rank.facts.places.items():
            if own != layer:
                continue
            slots = rank.tables[number][place.group]
            tokens = np.arange(first, len(slots) * rank.facts.shape.tpb if end is None else end)
            tokens = tokens[slots[tokens // rank.facts.shape.tpb] != NO_PAGE]
            places = addresses(rank.facts, place, rank.spread, slots[tokens // rank.facts.shape.tpb], tokens)
            values = truth(number, layer, role, place.heads, tokens, place.row_bytes)
            rank.arrays[place.storage][places] = values
            rank.expected[place.storage][places] = values

    def _ask(self, rank: SimRank, number: int, request: RequestCase, sources: list[SimRank]) -> Iterator[None]:
        yield
        asked = sources if request.told else self.contexts
        groups = rank.facts.groups
        table = rank.table(number, lambda group: wanted_blocks(rank.facts, groups[group], request))
        handle = rank.handles[number] = TransferHandle(RequestId(number))
        rank.engine.receive(handle, table, request.prompt, [peer.card.address for peer in asked])

    def _play(self, scripts: list[Iterator[None]]) -> None:
        """Advance scripts and engines in random order until all scripts are over."""
        everybody = [*self.contexts, *self.generations]
        while scripts:
            script = self.draw.choice(scripts)
            if next(script, self) is self:
                scripts.remove(script)
            for rank in self.draw.sample(everybody, self.draw.randint(0, len(everybody))):
                self._turn(rank)

    def _settle(self) -> None:
        handles = [handle for rank in (*self.contexts, *self.generations) for handle in rank.handles.values()]
        self._until(lambda: all(handle.quiet for handle in handles), "requests")
        for handle in handles:
            if handle.outcome is None or not handle.outcome.ok:
                raise SimulationError(f"request {handle.request_id} ended with {handle.outcome}")
        for rank in (*self.contexts, *self.generations):
            if not rank.engine.drained() or rank.engine._exchange.refused:
                raise SimulationError(f"{rank.card.side} rank {rank.card.rank}: {rank.engine._exchange.refused}")

    def _until(self, over: Callable[[], bool], what: str) -> None:
        everybody = [*self.contexts, *self.generations]
        for _ in range(MOST_ROUNDS):
            if over():
                return
            self.draw.shuffle(everybody)
            for rank in everybody:
                self._turn(rank)
        raise SimulationError(f"{what} are not over after {MOST_ROUNDS} rounds")

    def _turn(self, rank: SimRank) -> None:
        self.clock.now_s += STEP_S
        rank.engine.turn(0.0)

    # --- judging --------------------------------------------------------------------------------------------------

    def _account(self) -> None:
        """Put what must have arrived into the expected memory, and compare the counts of bytes."""
        with_draft, peer = draft_travels(self.case), self.case.context
        for rank in self.generations:
            for number in rank.tables:
                want = {False: 0, True: 0}
                request, tables = self.case.requests[number], rank.tables[number]
                for draft, storage, places, values in expected_writes(
                    rank.facts, rank.spread, number, request, peer, tables
                ):
                    if draft and not with_draft:
                        continue
                    rank.expected[storage][places] = values
                    want[draft] += values.size
                outcome = rank.handles[number].outcome
                legs = outcome.legs if outcome else ()
                got = (sum(leg.bytes for leg in legs), sum(leg.draft_bytes for leg in legs))
                if got != (want[False] + want[True], want[True]):
                    text = f"generation rank {rank.card.rank}, request {number}: {got} bytes in all and of draft layers"
                    raise SimulationError(f"{text} are reported, the oracle counts {want}")

    def _compare(self) -> None:
        for rank in (*self.contexts, *self.generations):
            for storage, (array, want) in enumerate(zip(rank.arrays, rank.expected, strict=True)):
                wrong = np.flatnonzero(array != want)
                if len(wrong):
                    raise SimulationError(_explain(rank, storage, wrong))


def _explain(rank: SimRank, storage: int, wrong: Numbers) -> str:
    """Say whose bytes are wrong: the first of them by slot, request, layer and role."""
    at = int(wrong[0]) - rank.spread.base_bytes
    slot, inside = divmod(at, rank.spread.stride[storage])
    owner = [
        f"layer {layer} {role}"
        for (layer, role), place in rank.facts.places.items()
        if place.storage == storage and place.offset <= inside
    ]
    holders = [
        f"request {number} group {group} ordinal {list(slots).index(slot)}"
        for number, tables in rank.tables.items()
        for group, slots in enumerate(tables)
        if storage in rank.facts.groups[group].storages and slot in slots
    ]
    text = f"{rank.card.side} rank {rank.card.rank}: {len(wrong)} bytes of storage {storage} are not what they must be;"
    where = ", ".join(holders) or "which nobody has"
    return f"{text} the first is byte {inside} of slot {slot} ({where}), perhaps of {' or '.join(owner) or 'nobody'}"


def _memory_of(manager: UnifiedKVCacheManager) -> tuple[list[NDArray[np.uint8]], list[MemoryExport | None]]:
    exports = [
        None if own is None else MemoryExport(kind="memfd", pid=own.pid, fd=own.fd, inode=own.inode)
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


def _one_after_another(scripts: list[Iterator[None]]) -> Iterator[None]:
    for script in scripts:
        yield from script


def _together(scripts: list[Iterator[None]]) -> Iterator[None]:
    """Advance all scripts in turn."""
    while scripts:
        scripts = [script for script in scripts if next(script, scripts) is not scripts]
        yield


def simulate(case: PairCase) -> frozenset[str]:
    """Run one pair.

    Returns:
        The checks that refused it, rightly; empty where everything arrived.

    Raises:
        SimulationError: something happened that the oracle does not say.
    """
    with Simulation(case) as simulation:
        simulation.run()
        return simulation.refused


def failure(case: PairCase) -> Exception | None:
    """Return what went wrong with one pair, or None."""
    try:
        simulate(case)
    except Exception as error:
        return error
    return None


def minimal(case: PairCase, most_runs: int = 400) -> tuple[PairCase, Exception | None]:
    """Return the smallest case found that fails with the same kind of error as `case`, and that error."""
    error, runs, progress = failure(case), 0, True
    while error is not None and progress:
        progress = False
        for candidate in smaller(case):
            runs += 1
            if runs > most_runs:
                return case, error
            other = failure(candidate)
            if type(other) is type(error):
                case, error, progress = candidate, other, True
                break
    return case, error


def report(case: PairCase) -> str:
    """Return the error of a failing case and the smallest case that fails alike, as text to repeat it from."""
    small, error = minimal(case)
    return f"seed {case.seed}: {error}\nsmallest pair that fails alike:\n{small.describe()}"
