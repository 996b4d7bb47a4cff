"""Copy programs against a brute-force oracle that knows single heads and tokens, and nothing of lanes.

Whole instances are built in numpy: every context rank holds the rows of its heads, every generation rank holds canary
bytes. The lanes of all programs are then run one row at a time, and each generation byte is compared with the row of
its layer, role, head and token: written exactly once where it is wanted, never touched anywhere else.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from transfer.cards import build_card
from transfer.hello import DraftKVMode, ParallelPosition, PathKind, Side
from transfer.pages import expected_pages, gather_pages, pair_pages, scatter_pages
from transfer.plan import compile_program, gather_lanes, scatter_lanes, writers_for
from unikv.ids import NO_PAGE, LayerId
from unikv.layer_spec import KVCacheLayerSpec, KVDtype, KVLayout, LayerOwner
from unikv.layout import build_layout

CANARY = 0xA5
HEAD_DIM = 16
ROW_BYTES = {KVDtype.FLOAT32: 64, KVDtype.BFLOAT16: 32, KVDtype.FLOAT8_E4M3FN: 16, KVDtype.NVFP4: 8}
SLOTS = 40


@dataclass(frozen=True)
class Part:
    """Equal layers of the model."""

    count: int
    heads: int
    owner: LayerOwner
    dtype: KVDtype
    kv_factor: int
    window: int | None
    sinks: int
    extras: dict[str, int] = field(default_factory=dict)


@dataclass(frozen=True)
class SideShape:
    """How one instance is split and laid out."""

    tp: int
    pp: int
    cp: int
    data_parallel: bool
    tpb: int
    layout: KVLayout


@dataclass(frozen=True)
class Case:
    model: tuple[Part, ...]
    context: SideShape
    generation: SideShape
    prompt: int
    with_draft: bool
    seed: int
    chunk: int
    """Pages per staged chunk; 0 copies directly."""

    @property
    def unit(self):
        return min(self.context.tpb, self.generation.tpb)


def layers_of(model):
    """(layer id, part) of every layer."""
    flat = [part for part in model for _ in range(part.count)]
    return list(enumerate(flat))


def heads_on(total, tp, tp_rank):
    """Global heads of a rank, written down independently."""
    return [h for h in range(total) if (h * tp // total == tp_rank if tp <= total else tp_rank * total // tp == h)]


def stage_of(layer, num_layers, pp):
    sizes = [num_layers // pp + (stage < num_layers % pp) for stage in range(pp)]
    return next(stage for stage in range(pp) if layer < sum(sizes[: stage + 1]))


def roles_of(part):
    """(role, bytes of a row, heads in all) of every buffer of a layer; extras are one replicated row per token."""
    standard = [("key", "key_block_scale"), ("value", "value_block_scale")][: part.kv_factor]
    found = [(data, ROW_BYTES[part.dtype], part.heads) for data, _ in standard]
    if part.dtype is KVDtype.NVFP4:
        found += [(scale, HEAD_DIM // 16, part.heads) for _, scale in standard]
    return found + [(role, size, 1) for role, size in part.extras.items()]


class RankMemory:
    """One rank: its card, its bytes, how often each was written, and a page table per group."""

    def __init__(self, case, side, shape, position, rng):
        self.case, self.shape, self.position = case, shape, position
        targets = sum(part.count for part in case.model if part.owner is LayerOwner.TARGET)
        tp, rank = (1, 0) if shape.data_parallel else (shape.tp, position.tp_rank)
        self.parts = {}
        for layer, part in layers_of(case.model):
            stage = stage_of(layer, targets, shape.pp) if part.owner is LayerOwner.TARGET else shape.pp - 1
            if stage == position.pp_rank:
                self.parts[layer] = part
        self.heads = {layer: heads_on(part.heads, tp, rank) for layer, part in self.parts.items()}
        self.layout = build_layout(
            [self._spec(layer, part) for layer, part in self.parts.items()],
            tokens_per_block=shape.tpb,
            max_seq_len=None,
            kv_layout=shape.layout,
        )
        self.card = build_card(
            self.layout,
            side=side,
            position=position,
            num_slots=SLOTS * len(self.layout.groups),
            incarnation="i",
            instance=side.value,
            draft_kv=DraftKVMode.AUTO,
            path=PathKind.AUTO,
            num_target_layers=targets,
            num_draft_layers=len(layers_of(case.model)) - targets,
        )
        self.bytes = [np.full(card.size_bytes, CANARY, dtype=np.uint8) for card in self.card.storages]
        self.writes = [np.zeros(card.size_bytes, dtype=np.int64) for card in self.card.storages]
        self.tables = self._tables(rng)

    def _spec(self, layer, part):
        return KVCacheLayerSpec(
            layer_id=LayerId(layer),
            owner=part.owner,
            num_kv_heads=len(self.heads[layer]),
            total_num_kv_heads=part.heads,
            head_dim=HEAD_DIM,
            dtype=part.dtype,
            kv_factor=part.kv_factor,
            window=part.window,
            sink_tokens=part.sinks,
            extra_buffers=part.extras,
        )

    def _tables(self, rng):
        """Random distinct slots; blocks of other context-parallel ranks have no place here."""
        blocks = -(-self.case.prompt // self.shape.tpb) + int(rng.integers(0, 2))
        free = {group.pool_group: list(rng.permutation(np.arange(1, SLOTS))) for group in self.layout.groups}
        tables = {}
        for group in self.layout.groups:
            slots = np.array([free[group.pool_group].pop() for _ in range(blocks)], dtype=np.int32)
            tables[group.group_id] = slots[self.position.cp_rank :: self.shape.cp].copy()
        return tables

    def ordinals(self, group):
        """Which blocks of the sequence the places of a table are."""
        return self.position.cp_rank + self.shape.cp * np.arange(len(self.tables[group]))

    def drop(self, rng, chance, only_stale):
        """Take pages away: cached ones on the generation side, evicted ones on the context side."""
        for group in self.layout.groups:
            table = self.tables[group.group_id]
            for place, ordinal in enumerate(self.ordinals(group.group_id)):
                end = (ordinal + 1) * self.shape.tpb
                stale = group.window is not None and end <= self.case.prompt + 1 - group.window
                if rng.random() < chance and (not only_stale or (stale and ordinal >= group.sink_blocks)):
                    table[place] = NO_PAGE

    def rows(self, layer, role, row_bytes, heads):
        """Yield (global head, token, storage, first byte) of every row of a buffer that has a page."""
        group = next(g for g in self.layout.groups if layer in g.layer_ids)
        buffer = next(b for pool in group.pools for b in pool.buffers if (b.layer_id, b.role) == (layer, role))
        pool = next(p for p in self.card.pools if (p.group_id, p.pool_index) == (group.group_id, buffer.pool_index))
        tpb = self.shape.tpb
        for ordinal, slot in zip(self.ordinals(group.group_id), self.tables[group.group_id], strict=True):
            if slot == NO_PAGE:
                continue
            for local, head in enumerate(heads):
                for t in range(tpb):
                    row = local * tpb + t if self.shape.layout is KVLayout.HND else t * len(heads) + local
                    first = int(slot) * pool.slot_stride_bytes + buffer.offset_bytes + row * row_bytes
                    yield head, ordinal * tpb + t, pool.storage, first

    def buffers(self):
        """Yield (layer, part, role, bytes of a row, global heads here) of every buffer of this rank."""
        for layer, part in self.parts.items():
            for role, row_bytes, heads in roles_of(part):
                yield layer, part, role, row_bytes, self.heads[layer] if heads == part.heads > 1 else range(heads)


def truth(layer, role, row_bytes, heads, tokens):
    """What the row of every head and token of a buffer holds: ``[heads, tokens, row_bytes]``."""
    rng = np.random.default_rng([layer, *role.encode()])
    return rng.integers(0, 256, size=(heads, tokens, row_bytes), dtype=np.uint8)


def fill(rank):
    tokens = rank.case.prompt + 2 * rank.shape.tpb
    for layer, part, role, row_bytes, heads in rank.buffers():
        values = truth(layer, role, row_bytes, part.heads, tokens)
        for head, token, storage, first in rank.rows(layer, role, row_bytes, heads):
            rank.bytes[storage][first : first + row_bytes] = values[head, token]


def run_lanes(lanes, pages, source, destination):
    """Copy one run at a time. `source` and `destination` give (bytes, slot stride, writes) of a pool index."""
    for page in range(len(pages)):
        for lane in lanes:
            src, src_stride, _ = source(lane.src_pool)
            dst, dst_stride, writes = destination(lane.dst_pool)
            for i in range(lane.outer.count):
                for j in range(lane.inner.count):
                    a = int(pages.src_slot[page]) * src_stride + int(pages.src_sub[page]) * lane.src_sub_stride
                    a += lane.src_offset + i * lane.outer.src_stride + j * lane.inner.src_stride
                    b = int(pages.dst_slot[page]) * dst_stride + int(pages.dst_sub[page]) * lane.dst_sub_stride
                    b += lane.dst_offset + i * lane.outer.dst_stride + j * lane.inner.dst_stride
                    assert a + lane.run_bytes <= len(src)
                    assert b + lane.run_bytes <= len(dst)
                    dst[b : b + lane.run_bytes] = src[a : a + lane.run_bytes]
                    writes[b : b + lane.run_bytes] += 1


def pools_of(rank, group):
    def region(index):
        pool = rank.card.pool(group, index)
        return rank.bytes[pool.storage], pool.slot_stride_bytes, rank.writes[pool.storage]

    return region


def move(program, source, target, chunk):
    """Run a whole program, directly or through staging chunks of `chunk` pages, and check its account."""
    for number, pair in enumerate(program.pairs):
        src_table, dst_table = source.tables[pair.src_group], target.tables[pair.dst_group]
        prompt = source.case.prompt
        pages = pair_pages(pair, src_table, dst_table, prompt)
        before = sum(int(writes.sum()) for writes in target.writes)
        from_pool, to_pool = pools_of(source, pair.src_group), pools_of(target, pair.dst_group)
        if not chunk:
            run_lanes([lane for lane in program.lanes if lane.pair == number], pages, from_pool, to_pool)
        for first in range(0, len(pages) if chunk else 0, chunk or 1):
            staged = np.full(chunk * pair.page_bytes, CANARY, dtype=np.uint8)
            once = np.zeros(len(staged), dtype=np.int64)
            region = (staged, pair.page_bytes, once)
            out = gather_pages(pages, first, chunk)
            run_lanes(gather_lanes(program, number), out, from_pool, lambda _, region=region: region)
            assert np.all(once[: len(out) * pair.page_bytes] == 1)
            assert not once[len(out) * pair.page_bytes :].any()
            back = scatter_pages(pair, dst_table, prompt, first, chunk)
            run_lanes(scatter_lanes(program, number), back, lambda _, region=region: region, to_pool)
        moved = sum(int(writes.sum()) for writes in target.writes) - before
        assert moved == expected_pages(pair, dst_table, prompt) * pair.page_bytes


def is_live(case, part, token):
    """Whether the unit of a token travels: it holds prompt tokens, and one of them can still be read."""
    unit = case.unit
    first = token - token % unit
    if first >= case.prompt:
        return False
    if part.window is None or first + unit > case.prompt + 1 - part.window:
        return True
    sides = (case.context.tpb, case.generation.tpb)
    return first < min(-(-part.sinks // tpb) * tpb for tpb in sides)


def check(rank):
    """Every wanted byte right and written once; every other byte a canary, never written."""
    case = rank.case
    expected = [np.full_like(memory, CANARY) for memory in rank.bytes]
    counts = [np.zeros_like(writes) for writes in rank.writes]
    for layer, part, role, row_bytes, heads in rank.buffers():
        if part.owner is LayerOwner.DRAFT and not case.with_draft:
            continue
        values = truth(layer, role, row_bytes, part.heads, case.prompt + 2 * case.context.tpb)
        for head, token, storage, first in rank.rows(layer, role, row_bytes, heads):
            if is_live(case, part, token):
                expected[storage][first : first + row_bytes] = values[head, token]
                counts[storage][first : first + row_bytes] = 1
    for number, memory in enumerate(rank.bytes):
        assert np.array_equal(rank.writes[number], counts[number]), f"storage {number}: bytes written 0 or many times"
        assert np.array_equal(memory, expected[number]), f"storage {number}: wrong bytes"


def positions(shape):
    for pp_rank in range(shape.pp):
        for tp_rank in range(shape.tp):
            for cp_rank in range(shape.cp):
                yield ParallelPosition(
                    tp=shape.tp,
                    tp_rank=tp_rank,
                    pp=shape.pp,
                    pp_rank=pp_rank,
                    cp=shape.cp,
                    cp_rank=cp_rank,
                    attention_dp=shape.data_parallel,
                )


def transfer_everything(case):
    rng = np.random.default_rng(case.seed)
    holder = int(rng.integers(0, case.context.tp))
    contexts = []
    for position in positions(case.context):
        if case.context.data_parallel and position.tp_rank != holder:
            continue
        rank = RankMemory(case, Side.CONTEXT, case.context, position, rng)
        rank.drop(rng, 0.5, only_stale=True)
        fill(rank)
        contexts.append(rank)
    places = list(positions(case.generation))
    for index in rng.permutation(len(places))[:4]:
        target = RankMemory(case, Side.GENERATION, case.generation, places[index], rng)
        target.drop(rng, 0.2, only_stale=False)
        programs = [compile_program(rank.card, target.card, with_draft=case.with_draft) for rank in contexts]
        for source, program in zip(contexts, programs, strict=True):
            assert sum(lane.page_bytes for lane in program.lanes) == sum(s.bytes_per_page for s in program.slices)
            move(program, source, target, case.chunk)
        cards = [rank.card for rank in contexts]
        writers = writers_for(target.card, cards, with_draft=case.with_draft)
        assert writers == tuple(program.context_rank for program in programs if program.slices)
        check(target)


def divides(heads, tp):
    return heads % tp == 0 or tp % heads == 0


@st.composite
def parts(draw, owner):
    window = draw(st.one_of(st.none(), st.integers(1, 12)))
    return Part(
        count=draw(st.integers(1, 2)),
        heads=draw(st.sampled_from([1, 2, 3, 4, 6, 8, 12, 16])),
        owner=owner,
        dtype=draw(st.sampled_from(sorted(ROW_BYTES))),
        kv_factor=draw(st.integers(1, 2)),
        window=window,
        sinks=0 if window is None else draw(st.integers(0, 5)),
        extras=draw(st.sampled_from([{}, {}, {"index_key": 16}, {"index_key": 5, "state": 32}])),
    )


@st.composite
def cases(draw):
    model = [draw(parts(LayerOwner.TARGET)) for _ in range(draw(st.integers(1, 2)))]
    if draw(st.booleans()):
        model.append(draw(parts(LayerOwner.DRAFT)))
    legal = [tp for tp in range(1, 17) if all(divides(part.heads, tp) for part in model)]
    targets = sum(part.count for part in model if part.owner is LayerOwner.TARGET)
    unit, ratio = draw(st.sampled_from([1, 2, 4])), draw(st.sampled_from([1, 1, 2, 4]))
    sizes = draw(st.permutations([unit, unit * ratio]))
    shapes = [
        SideShape(
            tp=draw(st.sampled_from(legal)),
            pp=draw(st.integers(1, targets)),
            cp=draw(st.sampled_from([1, 1, 2])) if ratio == 1 else 1,
            data_parallel=draw(st.sampled_from([False, False, True])),
            tpb=tpb,
            layout=draw(st.sampled_from(list(KVLayout))),
        )
        for tpb in sizes
    ]
    return Case(
        model=tuple(model),
        context=shapes[0],
        generation=shapes[1],
        prompt=draw(st.integers(1, 13)),
        with_draft=draw(st.booleans()),
        seed=draw(st.integers(0, 2**32 - 1)),
        chunk=draw(st.sampled_from([0, 0, 1, 3])),
    )


@settings(max_examples=200, deadline=None)
@given(cases())
def test_every_generation_byte_has_exactly_one_source(case):
    transfer_everything(case)


TARGET = Part(count=3, heads=6, owner=LayerOwner.TARGET, dtype=KVDtype.BFLOAT16, kv_factor=2, window=None, sinks=0)
DRAFT = Part(count=1, heads=3, owner=LayerOwner.DRAFT, dtype=KVDtype.NVFP4, kv_factor=2, window=5, sinks=1)
PLAIN = SideShape(tp=1, pp=1, cp=1, data_parallel=False, tpb=4, layout=KVLayout.HND)
BOTH = Case(model=(TARGET, DRAFT), context=PLAIN, generation=PLAIN, prompt=11, with_draft=True, seed=7, chunk=0)


def test_uneven_tensor_and_pipeline_splits_with_layouts_and_page_sizes_crossed():
    """TP3 x PP2, NHD, pages of 2 tokens into TP6 x PP3, HND, pages of 4: draft heads replicated on one side only."""
    context = replace(PLAIN, tp=3, pp=2, tpb=2, layout=KVLayout.NHD)
    generation = replace(PLAIN, tp=6, pp=3)
    transfer_everything(replace(BOTH, context=context, generation=generation))
    transfer_everything(replace(BOTH, context=generation, generation=context, chunk=3))


def test_tp3_to_tp2_by_single_heads():
    model = (replace(TARGET, heads=6),)
    for chunk in (0, 2):
        for ctx_tp, gen_tp in ((3, 2), (2, 3)):
            context, generation = replace(PLAIN, tp=ctx_tp), replace(PLAIN, tp=gen_tp, layout=KVLayout.NHD)
            transfer_everything(replace(BOTH, model=model, context=context, generation=generation, chunk=chunk))


def test_replicas_on_both_sides_by_single_heads():
    model = (replace(TARGET, heads=4, extras={"index_key": 5}), replace(DRAFT, heads=2))
    for ctx_tp, gen_tp in ((8, 4), (4, 8), (16, 8), (8, 16)):
        context, generation = replace(PLAIN, tp=ctx_tp), replace(PLAIN, tp=gen_tp)
        transfer_everything(replace(BOTH, model=model, context=context, generation=generation))


def test_layers_in_another_physical_order_meet_by_number():
    """The slot order of layers is a matter of each rank: no offset may be guessed from a layer's number."""
    source = RankMemory(BOTH, Side.CONTEXT, PLAIN, ParallelPosition(), np.random.default_rng(1))
    target = RankMemory(BOTH, Side.GENERATION, PLAIN, ParallelPosition(), np.random.default_rng(2))
    view = target.card.views[0]
    offsets = [entry.offset_bytes for entry in view.entries]
    turned = tuple(replace(e, offset_bytes=o) for e, o in zip(view.entries, reversed(offsets), strict=True))
    card = replace(target.card, views=(replace(view, entries=turned), *target.card.views[1:]))
    program = compile_program(source.card, card, with_draft=True)
    assert {(s.src_offset, s.dst_offset) for s in program.slices if s.owner is LayerOwner.TARGET} == {
        (a, b) for a, b in zip(offsets, reversed(offsets), strict=True)
    }
    lanes = [lane for lane in program.lanes if lane.pair == 0]
    assert sum(lane.page_bytes for lane in lanes) == program.pairs[0].page_bytes
    assert {(lane.src_offset, lane.dst_offset) for lane in lanes} <= {
        (s.src_offset, s.dst_offset) for s in program.slices
    }
