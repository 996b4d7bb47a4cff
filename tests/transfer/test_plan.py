"""Copy programs on worked examples: who sends which heads, from where to where, in how many lanes."""

from __future__ import annotations

import itertools
import time
from dataclasses import dataclass, field, replace

import pytest

from transfer.cards import build_card
from transfer.hello import DraftKVMode, ParallelPosition, PathKind, Side
from transfer.plan import compile_program, gather_lanes, scatter_lanes, writers_for
from unikv.errors import SpecError
from unikv.ids import GroupId, LayerId
from unikv.layer_spec import KVCacheLayerSpec, KVDtype, KVLayout, LayerOwner, ReusePolicy
from unikv.layout import build_layout
from unikv.ranges import Span, head_shard, stage_layers

HEAD = 8192
"""Bytes of one head of one K or V page: 32 tokens of 128 bfloat16 elements."""

ROW = 256
"""Bytes of one head of one token there."""


@dataclass(frozen=True)
class Layers:
    """Some equal layers of a model, heads global."""

    count: int = 1
    heads: int = 8
    owner: LayerOwner = LayerOwner.TARGET
    head_dim: int = 128
    dtype: KVDtype = KVDtype.BFLOAT16
    kv_factor: int = 2
    window: int | None = None
    sinks: int = 0
    extras: dict[str, int] = field(default_factory=dict)


def draft(**changes):
    return Layers(owner=LayerOwner.DRAFT, **{"heads": 4, **changes})


def specs_of(model, place):
    """The layer specs of one rank: target layers by stage, the drafter's on the last stage."""
    targets = sum(part.count for part in model if part.owner is LayerOwner.TARGET)
    stage = stage_layers(targets, place.pp, place.pp_rank)
    tp, tp_rank = (1, 0) if place.attention_dp else (place.tp, place.tp_rank)
    layer = 0
    for part in model:
        for _ in range(part.count):
            is_here = layer in stage if part.owner is LayerOwner.TARGET else place.pp_rank == place.pp - 1
            if is_here:
                yield KVCacheLayerSpec(
                    layer_id=LayerId(layer),
                    owner=part.owner,
                    num_kv_heads=len(head_shard(part.heads, tp, tp_rank).heads),
                    total_num_kv_heads=part.heads,
                    head_dim=part.head_dim,
                    dtype=part.dtype,
                    kv_factor=part.kv_factor,
                    window=part.window,
                    sink_tokens=part.sinks,
                    reuse_policy=ReusePolicy.REQUIRED,
                    extra_buffers=part.extras,
                )
            layer += 1


def card(side, model, place=None, *, tpb=32, layout=KVLayout.HND, slots=8, **parallel):
    place = place or ParallelPosition(**parallel)
    return build_card(
        build_layout(specs_of(model, place), tokens_per_block=tpb, max_seq_len=None, kv_layout=layout),
        side=side,
        position=place,
        num_slots=slots,
        incarnation="i",
        instance=side.value,
        draft_kv=DraftKVMode.AUTO,
        path=PathKind.AUTO,
        num_target_layers=sum(part.count for part in model if part.owner is LayerOwner.TARGET),
        num_draft_layers=sum(part.count for part in model if part.owner is LayerOwner.DRAFT),
    )


def ctx(model, **kw):
    return card(Side.CONTEXT, model, **kw)


def gen(model, **kw):
    return card(Side.GENERATION, model, **kw)


def base(of, layer, role):
    """First byte of a buffer inside its slot."""
    return next(e.offset_bytes for v in of.views for e in v.entries if (e.layer_id, e.role) == (layer, role))


def moves(context, generation, layer, role="key", **kw):
    """(source offset, destination offset, bytes) of one buffer, offsets inside the buffer; () where nothing moves."""
    program = compile_program(context, generation, **{"with_draft": True, **kw})
    found = [s for s in program.slices if (s.layer_id, s.role) == (layer, role)]
    assert len(found) <= 1
    return tuple(
        (s.src_offset - base(context, layer, role), s.dst_offset - base(generation, layer, role), s.bytes_per_page)
        for s in found
    )


def routes(model, ctx_tp, gen_tp, layer=0, role="key", **kw):
    """Every (context rank, generation rank): move of one buffer, over all tensor-parallel ranks of two instances."""
    table = {}
    for g in range(gen_tp):
        for c in range(ctx_tp):
            move = moves(ctx(model, tp=ctx_tp, tp_rank=c, **kw), gen(model, tp=gen_tp, tp_rank=g, **kw), layer, role)
            if move:
                table[c, g] = move[0]
    return table


# --- bands of layers -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("bands", [1, 2, 3, 5, 9])
def test_bands_cut_the_same_moves_by_layers(bands):
    model = (Layers(count=5), draft(count=2, window=64))
    context, generation = ctx(model, tp=2, tp_rank=1), gen(model, tp=4, tp_rank=3)
    whole = compile_program(context, generation, with_draft=True)
    banded = compile_program(replace(context, layer_bands=bands), generation, with_draft=True)
    layers = [[piece.layer_id for piece in banded.slices if piece.pair == n] for n in range(len(banded.pairs))]
    assert len(banded.pairs) == min(bands, 5) + min(bands, 2)
    assert sorted(layer for members in layers for layer in members) == sorted(p.layer_id for p in whole.slices)
    assert all(max(a) < min(b) for a, b in itertools.pairwise(sorted(layers)))
    assert banded.page_bytes == whole.page_bytes
    strip = {(p.layer_id, p.role, p.heads, p.src_offset, p.dst_offset, p.bytes_per_page) for p in whole.slices}
    assert {(p.layer_id, p.role, p.heads, p.src_offset, p.dst_offset, p.bytes_per_page) for p in banded.slices} == strip
    assert sum(lane.page_bytes for lane in banded.lanes) == sum(lane.page_bytes for lane in whole.lanes)
    assert (banded.digest == whole.digest) == (bands == 1)


# --- head slices -----------------------------------------------------------------------------------------------------


def test_tp2_to_tp4_with_smaller_draft():
    model = (Layers(), draft())
    halves = {(0, 0): 0, (0, 1): 1, (1, 2): 0, (1, 3): 1}
    for role in ("key", "value"):
        assert routes(model, 2, 4, 0, role) == {k: (h * 2 * HEAD, 0, 2 * HEAD) for k, h in halves.items()}
        assert routes(model, 2, 4, 1, role) == {k: (h * HEAD, 0, HEAD) for k, h in halves.items()}


def test_tp2_to_tp4_names_global_heads():
    model = (Layers(), draft())
    program = compile_program(ctx(model, tp=2, tp_rank=1), gen(model, tp=4, tp_rank=3), with_draft=True)
    assert [(s.layer_id, s.owner, s.role, s.heads) for s in program.slices] == [
        (0, LayerOwner.TARGET, "key", Span(6, 8)),
        (0, LayerOwner.TARGET, "value", Span(6, 8)),
        (1, LayerOwner.DRAFT, "key", Span(3, 4)),
        (1, LayerOwner.DRAFT, "value", Span(3, 4)),
    ]


def test_tp4_to_tp1_has_four_writers():
    assert routes((Layers(),), 4, 1) == {(r, 0): (0, r * 2 * HEAD, 2 * HEAD) for r in range(4)}


def test_equal_tp_with_replicas_pairs_rank_by_rank():
    assert routes((Layers(heads=4),), 8, 8) == {(r, r): (0, 0, HEAD) for r in range(8)}


def test_replicated_heads_have_one_writer_each():
    assert routes((Layers(heads=4),), 8, 2) == {
        (0, 0): (0, 0, HEAD),
        (2, 0): (0, HEAD, HEAD),
        (4, 1): (0, 0, HEAD),
        (6, 1): (0, HEAD, HEAD),
    }
    assert routes((Layers(heads=4),), 8, 1) == {(2 * h, 0): (0, h * HEAD, HEAD) for h in range(4)}
    assert routes((Layers(heads=2),), 4, 1) == {(0, 0): (0, 0, HEAD), (2, 0): (0, HEAD, HEAD)}


def test_generation_replicas_are_served_in_blocks_not_in_turn():
    assert routes((Layers(heads=4),), 2, 8) == {(g // 4, g): (g // 2 % 2 * HEAD, 0, HEAD) for g in range(8)}
    assert routes((Layers(heads=2),), 1, 4) == {(0, g): (g // 2 * HEAD, 0, HEAD) for g in range(4)}


def test_idle_replicas_are_not_contacted():
    model = (Layers(heads=4),)
    assert routes(model, 8, 4) == {(2 * g, g): (0, 0, HEAD) for g in range(4)}
    contexts = [ctx(model, tp=8, tp_rank=r) for r in range(8)]
    assert writers_for(gen(model, tp=4, tp_rank=3), contexts, with_draft=True) == (6,)
    idle = compile_program(contexts[7], gen(model, tp=4, tp_rank=3), with_draft=True)
    assert (idle.pairs, idle.lanes, idle.slices) == ((), (), ())


def test_one_latent_head_is_never_split():
    model = (Layers(heads=1, head_dim=576, dtype=KVDtype.FLOAT8_E4M3FN, kv_factor=1),)
    assert routes(model, 4, 2, tpb=64) == {(0, 0): (0, 0, 36864), (2, 1): (0, 0, 36864)}


@pytest.mark.parametrize("data_rank", range(8))
def test_attention_data_parallelism_rotates_over_the_replicas(data_rank):
    model = (Layers(heads=4),)
    target = gen(model, tp=8, tp_rank=data_rank, attention_dp=True)
    found = {r: moves(ctx(model, tp=8, tp_rank=r), target, 0) for r in range(8)}
    assert {r: m for r, m in found.items() if m} == {2 * h + data_rank % 2: ((0, h * HEAD, HEAD),) for h in range(4)}


def test_context_attention_data_parallelism_sends_from_the_rank_that_holds_the_request():
    model = (Layers(),)
    for holder in range(4):
        source = ctx(model, tp=4, tp_rank=holder, attention_dp=True)
        for g in range(4):
            assert moves(source, gen(model, tp=4, tp_rank=g), 0) == ((g * 2 * HEAD, 0, 2 * HEAD),)


def test_smaller_draft_is_replicated_on_the_generation_side():
    model = (Layers(), draft())
    assert routes(model, 4, 8, 0) == {(g // 2, g): (g % 2 * HEAD, 0, HEAD) for g in range(8)}
    assert routes(model, 4, 8, 1) == {(g // 2, g): (0, 0, HEAD) for g in range(8)}


def test_equal_local_heads_do_not_make_target_and_draft_alike():
    """One local head of both on TP16, but 16 and 8 heads in all."""
    model = (Layers(heads=16), draft(heads=8))
    assert routes(model, 16, 8, 0) == {(r, r // 2): (0, r % 2 * HEAD, HEAD) for r in range(16)}
    assert routes(model, 16, 8, 1) == {(2 * g, g): (0, 0, HEAD) for g in range(8)}


def test_latent_target_with_grouped_query_draft():
    model = (Layers(heads=1, kv_factor=1), draft(heads=8))
    assert routes(model, 8, 4, 0) == {(2 * g, g): (0, 0, HEAD) for g in range(4)}
    assert routes(model, 8, 4, 1) == {(r, r // 2): (0, r % 2 * HEAD, HEAD) for r in range(8)}


def test_tp3_to_tp2_intersects_heads():
    model = (Layers(heads=6),)
    assert routes(model, 3, 2) == {
        (0, 0): (0, 0, 2 * HEAD),
        (1, 0): (0, 2 * HEAD, HEAD),
        (1, 1): (HEAD, 0, HEAD),
        (2, 1): (0, HEAD, 2 * HEAD),
    }
    assert routes(model, 2, 3)[1, 1] == (0, HEAD, HEAD)
    assert len(routes(model, 2, 3)) == 4


@pytest.mark.parametrize("heads", [1, 2, 3, 4, 6, 8, 12, 16])
def test_every_generation_head_has_one_writer(heads):
    """All tensor-parallel pairs up to 16 the heads allow, plain and with attention data parallelism."""
    legal = [tp for tp in range(1, 17) if heads % tp == 0 or tp % heads == 0]
    for ctx_tp in legal:
        contexts = [ctx((Layers(heads=heads),), tp=ctx_tp, tp_rank=r) for r in range(ctx_tp)]
        for gen_tp in legal:
            for rank in {0, gen_tp // 2, gen_tp - 1}:
                for data in {False, gen_tp == ctx_tp}:
                    target = gen((Layers(heads=heads),), tp=gen_tp, tp_rank=rank, attention_dp=data)
                    programs = [compile_program(c, target, with_draft=True) for c in contexts]
                    got = [
                        h for p in programs for s in p.slices if s.role == "key" for h in range(s.heads.lo, s.heads.hi)
                    ]
                    low = 0 if data else rank * heads // gen_tp
                    assert sorted(got) == list(
                        range(low, heads if data else max(low + 1, (rank + 1) * heads // gen_tp))
                    )


def test_extras_are_replicated_and_have_one_writer():
    """An index buffer as large as K at one tensor-parallel size, and not at the other: matched by role all the same."""
    model = (Layers(heads=2, head_dim=64, kv_factor=2, extras={"index_key": 128}),)
    for ctx_tp, gen_tp in ((2, 1), (1, 2), (2, 2), (1, 1)):
        index = routes(model, ctx_tp, gen_tp, 0, "index_key", tpb=16)
        assert index == {(min(g, ctx_tp - 1), g): (0, 0, 2048) for g in range(gen_tp)}
        assert sum(n for _, _, n in routes(model, ctx_tp, gen_tp, 0, "key", tpb=16).values()) == 4096


# --- dtypes ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("rank", range(4))
def test_nvfp4_scales_are_cut_in_their_own_units(rank):
    model = (Layers(dtype=KVDtype.NVFP4),)
    source, target = ctx(model, tp=2, tp_rank=rank // 2), gen(model, tp=4, tp_rank=rank)
    for role, unit in (("key", 2048), ("value", 2048), ("key_block_scale", 256), ("value_block_scale", 256)):
        assert moves(source, target, 0, role) == ((rank % 2 * 2 * unit, 0, 2 * unit),)


def test_draft_of_another_dtype_keeps_its_own_rows():
    model = (Layers(dtype=KVDtype.FLOAT8_E4M3FN), draft(head_dim=64))
    source, target = ctx(model, tpb=16), gen(model, tpb=16)
    assert moves(source, target, 0) == ((0, 0, 8 * 16 * 128),)
    assert moves(source, target, 1) == ((0, 0, 4 * 16 * 128),)


# --- stages ----------------------------------------------------------------------------------------------------------


def test_pp2_to_pp1_writes_layers_by_global_number():
    model = (Layers(count=32),)
    target = gen(model)
    for stage in range(2):
        program = compile_program(ctx(model, pp=2, pp_rank=stage), target, with_draft=True)
        assert {s.layer_id for s in program.slices} == set(range(16 * stage, 16 * stage + 16))
        assert [(lane.src_offset, lane.dst_offset, lane.run_bytes) for lane in program.lanes] == [
            (0, stage * 16 * 2 * 8 * HEAD, 16 * 2 * 8 * HEAD)
        ]


def test_uneven_stages_overlap_where_their_layers_do():
    model = (Layers(count=3),)
    contexts = [ctx(model, pp=2, pp_rank=r) for r in range(2)]
    assert writers_for(gen(model, pp=3, pp_rank=1), contexts, with_draft=True) == (0,)
    assert writers_for(gen(model, pp=3, pp_rank=2), contexts, with_draft=True) == (1,)
    assert writers_for(gen(model), contexts, with_draft=True) == (0, 1)


def test_draft_on_the_last_stage_is_not_taken_for_target_values():
    """Four target layers over two stages plus a draft layer: each buffer meets its own."""
    model = (Layers(count=4, heads=2), draft(heads=2))
    target = gen(model)
    slices = [s for r in range(2) for s in compile_program(ctx(model, pp=2, pp_rank=r), target, with_draft=True).slices]
    assert [(s.layer_id, s.role) for s in slices] == [(layer, role) for layer in range(5) for role in ("key", "value")]
    for s in slices:
        assert s.dst_offset == base(target, s.layer_id, s.role)
    assert {s.owner for s in slices if s.layer_id == 4} == {LayerOwner.DRAFT}


# --- draft -----------------------------------------------------------------------------------------------------------


def test_draft_can_be_left_out():
    model = (Layers(), draft(window=64))
    with_it = compile_program(ctx(model), gen(model), with_draft=True)
    without = compile_program(ctx(model), gen(model), with_draft=False)
    assert [pair.owner for pair in with_it.pairs] == [LayerOwner.TARGET, LayerOwner.DRAFT]
    assert [pair.owner for pair in without.pairs] == [LayerOwner.TARGET]
    assert without.page_bytes == 2 * 8 * HEAD
    assert with_it.digest != without.digest


def test_draft_on_the_generation_side_only_is_left_alone():
    program = compile_program(ctx((Layers(),)), gen((Layers(), draft())), with_draft=False)
    assert {s.layer_id for s in program.slices} == {0}
    program = compile_program(ctx((Layers(), draft())), gen((Layers(),)), with_draft=True)
    assert {s.layer_id for s in program.slices} == {0}


# --- group pairs -----------------------------------------------------------------------------------------------------


def test_groups_pair_by_their_layers_and_carry_windows():
    model = (Layers(count=2), Layers(count=2, window=2048, sinks=40), draft(window=4096))
    program = compile_program(ctx(model), gen(model), with_draft=True)
    assert [(p.src_group, p.dst_group, p.owner, p.window, p.sink_blocks) for p in program.pairs] == [
        (0, 0, LayerOwner.TARGET, None, 0),
        (1, 1, LayerOwner.TARGET, 2048, 2),
        (2, 2, LayerOwner.DRAFT, 4096, 0),
    ]
    assert [p.page_bytes for p in program.pairs] == [4 * 8 * HEAD, 4 * 8 * HEAD, 2 * 4 * HEAD]


def test_groups_numbered_differently_still_meet():
    """Stage 1 holds windowed layers only, so its group 0 is the generation rank's group 1."""
    model = (Layers(count=2), Layers(count=2, window=2048))
    program = compile_program(ctx(model, pp=2, pp_rank=1), gen(model), with_draft=True)
    assert [(p.src_group, p.dst_group, p.window) for p in program.pairs] == [(0, 1, 2048)]
    assert {lane.pair for lane in program.lanes} == {s.pair for s in program.slices} == {0}


def test_context_parallel_ranks_share_ordinals():
    model = (Layers(),)
    shares = {}
    for c in range(2):
        for g in range(4):
            program = compile_program(ctx(model, cp=2, cp_rank=c), gen(model, cp=4, cp_rank=g), with_draft=True)
            for pair in program.pairs:
                shares[c, g] = (pair.ordinal_start, pair.ordinal_step)
    assert shares == {(0, 0): (0, 4), (1, 1): (1, 4), (0, 2): (2, 4), (1, 3): (3, 4)}


# --- lanes -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("layout", list(KVLayout))
def test_whole_slots_are_one_lane(layout):
    model = (Layers(count=32),)
    program = compile_program(
        ctx(model, tp=2, tp_rank=1, layout=layout), gen(model, tp=2, tp_rank=1, layout=layout), with_draft=True
    )
    (lane,) = program.lanes
    assert (lane.run_bytes, lane.outer.count, lane.inner.count, lane.page_bytes) == (2 << 20, 1, 1, 2 << 20)


def test_head_slices_of_equal_buffers_are_rows_of_one_lane():
    """HND: 64 runs of two heads per page. NHD: 64 x 32 runs of two rows, the same bytes."""
    model = (Layers(count=32),)
    for layout, runs, run_bytes in ((KVLayout.HND, 64, 2 * HEAD), (KVLayout.NHD, 64 * 32, 2 * ROW)):
        source, target = ctx(model, tp=2, layout=layout), gen(model, tp=4, tp_rank=1, layout=layout)
        (lane,) = compile_program(source, target, with_draft=True).lanes
        assert (lane.outer.count * lane.inner.count, lane.run_bytes) == (runs, run_bytes)
        assert lane.page_bytes == 64 * 2 * HEAD
        assert lane.src_offset == (2 * HEAD if layout is KVLayout.HND else 2 * ROW)


def test_nhd_slices_are_cut_per_token():
    model = (Layers(heads=4, head_dim=64, kv_factor=1),)
    source = ctx(model, tpb=16, layout=KVLayout.NHD)
    for rank in range(2):
        target = gen(model, tp=2, tp_rank=rank, tpb=16, layout=KVLayout.NHD)
        (lane,) = compile_program(source, target, with_draft=True).lanes
        assert (lane.src_offset, lane.dst_offset, lane.run_bytes) == (rank * 256, 0, 256)
        assert (lane.inner.count, lane.inner.src_stride, lane.inner.dst_stride) == (16, 512, 256)


def test_layouts_may_differ():
    model = (Layers(heads=4, head_dim=64, kv_factor=1),)
    source = ctx(model, tpb=16, layout=KVLayout.HND)
    target = gen(model, tp=2, tp_rank=1, tpb=16, layout=KVLayout.NHD)
    (lane,) = compile_program(source, target, with_draft=True).lanes
    assert (lane.src_offset, lane.dst_offset, lane.run_bytes) == (2 * 2048, 0, 128)
    assert (lane.outer.count, lane.outer.src_stride, lane.outer.dst_stride) == (16, 128, 256)
    assert (lane.inner.count, lane.inner.src_stride, lane.inner.dst_stride) == (2, 2048, 128)


def test_single_head_is_one_run_in_either_layout():
    model = (Layers(heads=1, kv_factor=1),)
    (lane,) = compile_program(ctx(model, layout=KVLayout.HND), gen(model, layout=KVLayout.NHD), with_draft=True).lanes
    assert (lane.run_bytes, lane.outer.count, lane.inner.count) == (HEAD, 1, 1)


def test_sub_pages_step_inside_the_larger_slot():
    model = (Layers(heads=2, kv_factor=1, head_dim=64),)
    program = compile_program(ctx(model, tpb=16), gen(model, tpb=64), with_draft=True)
    (lane,) = program.lanes
    assert (lane.src_sub_stride, lane.dst_sub_stride, lane.run_bytes) == (0, 16 * 128, 16 * 128)
    assert (lane.inner.count, lane.inner.src_stride, lane.inner.dst_stride) == (2, 16 * 128, 64 * 128)
    assert (program.pairs[0].src_tokens, program.pairs[0].dst_tokens, program.pairs[0].page_bytes) == (16, 64, 4096)
    (back,) = compile_program(ctx(model, tpb=64), gen(model, tpb=16), with_draft=True).lanes
    assert (back.src_sub_stride, back.dst_sub_stride) == (16 * 128, 0)


def test_packed_pages_hold_every_lane_once():
    model = (Layers(count=3, dtype=KVDtype.NVFP4), Layers(window=64), draft(window=128))
    program = compile_program(ctx(model), gen(model, tp=2), with_draft=True)
    assert len(program.lanes) > len(program.pairs) == 3
    for number, pair in enumerate(program.pairs):
        gather, scatter = gather_lanes(program, number), scatter_lanes(program, number)
        at = 0
        for out, back, lane in zip(gather, scatter, [x for x in program.lanes if x.pair == number], strict=True):
            assert out.reach("dst", 1) == back.reach("src", 1) == Span(at, at + lane.page_bytes)
            assert (out.dst_pool, back.src_pool, out.dst_sub_stride, back.src_sub_stride) == (0, 0, 0, 0)
            assert out.reach("src", 1) == lane.reach("src", 1)
            assert back.reach("dst", 1) == lane.reach("dst", 1)
            at += lane.page_bytes
        assert at == pair.page_bytes
        assert pair.page_bytes == sum(s.bytes_per_page for s in program.slices if s.pair == number)


# --- digest ----------------------------------------------------------------------------------------------------------


def test_both_ranks_compile_the_same_digest():
    model = (Layers(count=2), draft(window=64))
    one, two = (
        compile_program(ctx(model, tp=2, tp_rank=1), gen(model, tp=4, tp_rank=2), with_draft=True) for _ in range(2)
    )
    assert one == two
    assert len(one.digest) == 32
    assert set(one.digest) <= set("0123456789abcdef")


def test_digest_changes_with_anything_that_matters():
    model = (Layers(count=2), Layers(window=64))
    programs = [
        compile_program(ctx(model), gen(model), with_draft=True),
        compile_program(ctx(model), gen(model, layout=KVLayout.NHD), with_draft=True),
        compile_program(ctx(model), gen((Layers(count=2), Layers(window=96))), with_draft=True),
        compile_program(ctx(model), gen(model, tpb=64), with_draft=True),
        compile_program(ctx(model), gen(model, tp=2), with_draft=True),
        compile_program(ctx(model), gen(model, tp=2, tp_rank=1), with_draft=True),
    ]
    assert len({program.digest for program in programs}) == len(programs)


# --- wrong cards -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("source", "target", "text"),
    [
        (
            Layers(),
            Layers(dtype=KVDtype.FLOAT8_E4M3FN),
            "layer 0 key: dtype is 'bfloat16', expected float8_e4m3fn, as on",
        ),
        (Layers(), Layers(head_dim=64), "layer 0 key: head_dim is 128, expected 64"),
        (Layers(heads=4), Layers(heads=8), "layer 0 key: total_heads is 4, expected 8"),
        (Layers(), draft(heads=8), "layer 0 key: owner is"),
    ],
)
def test_different_geometry_is_refused(source, target, text):
    with pytest.raises(SpecError) as caught:
        compile_program(ctx((source,)), gen((target,)), with_draft=True)
    assert str(caught.value).startswith(text)


def test_pages_that_do_not_divide_are_refused():
    want = "context rank 0: tokens_per_block is 48, expected a divisor or multiple of the generation's 32"
    with pytest.raises(SpecError, match=want):
        compile_program(ctx((Layers(),), tpb=48), gen((Layers(),)), with_draft=True)


def test_unequal_pages_with_context_parallelism_are_refused():
    with pytest.raises(SpecError, match="tokens_per_block is 16, expected 32 under context parallelism"):
        compile_program(ctx((Layers(),), tpb=16, cp=2), gen((Layers(),)), with_draft=True)


def shift(of, bytes_):
    """The card with every buffer moved by some bytes."""
    views = (
        replace(v, entries=tuple(replace(e, offset_bytes=e.offset_bytes + bytes_) for e in v.entries)) for v in of.views
    )
    return replace(of, views=tuple(views))


def test_lane_that_leaves_its_slot_is_refused_on_either_side():
    source, target = ctx((Layers(),)), gen((Layers(),), tp=2, tp_rank=1)
    with pytest.raises(SpecError, match=r"generation rank 1 group 0 pool 0: bytes of a lane is .*slot of 65536 bytes"):
        compile_program(source, shift(target, 1), with_draft=True)
    with pytest.raises(SpecError, match="context rank 0 group 0 pool 0: bytes of a lane"):
        compile_program(shift(source, 1), target, with_draft=True)
    assert compile_program(source, target, with_draft=True).lanes


def test_draft_cut_with_the_targets_heads_is_refused():
    """A draft view that claims the target's eight heads would reach past its buffer."""
    model = (Layers(), draft())
    wrong = gen(model, tp=2)
    views = tuple(replace(v, heads=Span(0, 8)) if v.owner is LayerOwner.DRAFT else v for v in wrong.views)
    with pytest.raises(SpecError, match="group 1 pool 0: first byte of layer 1 value"):
        compile_program(ctx(model), replace(wrong, views=views), with_draft=True)


def test_last_sub_page_counts_in_the_bounds():
    target = gen((Layers(heads=1, kv_factor=1),), tpb=64)
    pools = tuple(replace(pool, slot_stride_bytes=pool.slot_stride_bytes - 1) for pool in target.pools)
    with pytest.raises(SpecError, match="generation rank 0 group 0 pool 0: bytes of a lane"):
        compile_program(ctx((Layers(heads=1, kv_factor=1),)), replace(target, pools=pools), with_draft=True)


def test_overlapping_destination_buffers_are_refused():
    target = gen((Layers(),))
    views = tuple(replace(v, entries=tuple(replace(e, offset_bytes=0) for e in v.entries)) for v in target.views)
    with pytest.raises(
        SpecError, match="generation rank 0 group 0 pool 0: first byte of layer 0 value is 0, expected >= 65536"
    ):
        compile_program(ctx((Layers(),)), replace(target, views=views), with_draft=True)


def test_pool_that_leaves_its_storage_is_refused():
    target = gen((Layers(),))
    pools = tuple(replace(pool, num_slots=pool.num_slots + 1) for pool in target.pools)
    with pytest.raises(SpecError, match="end of the last slot in bytes is 1179648, expected <= the 1048576 bytes"):
        compile_program(ctx((Layers(),)), replace(target, pools=pools), with_draft=True)
    with pytest.raises(SpecError, match="generation rank 0 group 0 pool 0: pool is 'missing'"):
        compile_program(ctx((Layers(),)), replace(target, pools=()), with_draft=True)


def test_buffer_described_twice_is_refused():
    target = gen((Layers(),))
    with pytest.raises(SpecError, match="context rank 0: layer 0 key is 'described twice'"):
        source = ctx((Layers(),))
        compile_program(replace(source, views=source.views * 2), target, with_draft=True)


def test_view_with_another_block_size_is_refused():
    source = ctx((Layers(),))
    with pytest.raises(SpecError, match="context rank 0: tokens_per_block of a view is 32, expected 16"):
        compile_program(replace(source, tokens_per_block=16), gen((Layers(),)), with_draft=True)


@pytest.mark.parametrize(
    ("sinks", "src", "dst", "pages"),
    [(20, 16, 64, 2), (20, 64, 16, 2), (4, 16, 64, 1), (64, 16, 64, 4), (0, 16, 64, 0)],
)
def test_sinks_on_unequal_pages_are_what_both_sides_hold(sinks, src, dst, pages):
    model = (Layers(window=256, sinks=sinks),)
    program = compile_program(ctx(model, tpb=src), gen(model, tpb=dst), with_draft=True)
    assert [pair.sink_blocks for pair in program.pairs] == [pages]


def test_different_sinks_on_unequal_pages_are_refused():
    source, target = ctx((Layers(window=256, sinks=100),), tpb=16), gen((Layers(window=256, sinks=20),), tpb=64)
    with pytest.raises(SpecError, match=r"context rank 0 group 0: sink_blocks is 7, expected .* 1 blocks of 64"):
        compile_program(source, target, with_draft=True)


# --- cards -----------------------------------------------------------------------------------------------------------


def test_card_shares_storages_inside_a_pool_group():
    model = (Layers(count=2), Layers(count=2, window=64), draft(count=1))
    of = ctx(model, slots={GroupId(0): 8, GroupId(1): 8, GroupId(2): 5})
    sizes = {pool.group_id: (pool.storage, pool.num_slots * pool.slot_stride_bytes) for pool in of.pools}
    assert {storage for storage, _ in sizes.values()} == set(range(len(of.storages)))
    for storage, size in sizes.values():
        assert of.storages[storage].size_bytes == size


def test_card_collapses_tensor_parallelism_under_attention_data_parallelism():
    of = gen((Layers(),), tp=4, tp_rank=3, attention_dp=True)
    assert {(v.heads, v.replica, v.replicas) for v in of.views} == {(Span(0, 8), 0, 1)}
    assert (of.rank, of.position.world_size) == (3, 4)


def test_card_refuses_exports_that_do_not_match_the_storages():
    layout = build_layout(specs_of((Layers(),), ParallelPosition()), tokens_per_block=32, max_seq_len=None)
    with pytest.raises(SpecError, match="rank card: number of exports is 3, expected 1, one per storage"):
        build_card(
            layout,
            side=Side.CONTEXT,
            position=ParallelPosition(),
            num_slots=4,
            incarnation="i",
            instance="c",
            num_target_layers=1,
            num_draft_layers=0,
            exports=[None] * 3,
        )


# --- cost ------------------------------------------------------------------------------------------------------------


def test_compiling_a_large_pair_reports_its_time():
    model = (Layers(count=64), draft(count=4, window=2048))
    source, target = ctx(model, tp=8, tp_rank=5), gen(model, tp=16, tp_rank=10)
    times = []
    for _ in range(10):
        begin = time.perf_counter()
        program = compile_program(source, target, with_draft=True)
        times.append(time.perf_counter() - begin)
    print(
        f"compile_program: {len(program.slices)} slices, {len(program.lanes)} lanes in {sorted(times)[5] * 1e3:.2f} ms"
    )
    assert len(program.slices) == 2 * 68
    assert len(program.lanes) == len(program.pairs) == 2
