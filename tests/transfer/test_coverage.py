"""All programs together: every generation head has exactly one writer, or a sentence says which has not."""

from __future__ import annotations

import pytest

from transfer.cards import build_card
from transfer.coverage import coverage_gaps
from transfer.hello import DraftKVMode, ParallelPosition, PathKind, Side
from transfer.plan import compile_program
from unikv.ids import LayerId
from unikv.layer_spec import KVCacheLayerSpec, KVDtype, LayerOwner
from unikv.layout import build_layout
from unikv.ranges import head_shard


def card(side, layers, position, heads=4, draft=()):
    specs = [
        KVCacheLayerSpec(
            layer_id=LayerId(layer),
            owner=LayerOwner.DRAFT if layer in draft else LayerOwner.TARGET,
            num_kv_heads=len(head_shard(heads, position.tp, position.tp_rank).heads),
            total_num_kv_heads=heads,
            head_dim=16,
            dtype=KVDtype.BFLOAT16,
            kv_factor=1,
        )
        for layer in layers
    ]
    return build_card(
        build_layout(specs, tokens_per_block=4, max_seq_len=None),
        side=side,
        position=position,
        num_slots=4,
        incarnation="i",
        instance="n",
        draft_kv=DraftKVMode.AUTO,
        path=PathKind.AUTO,
        num_target_layers=len(layers) - len(draft),
        num_draft_layers=len(draft),
    )


def context(layers, draft=(), **parallel):
    return card(Side.CONTEXT, layers, ParallelPosition(**parallel), draft=draft)


def gaps(generation, contexts, *, with_draft=True):
    programs = [compile_program(source, generation, with_draft=with_draft) for source in contexts]
    return coverage_gaps(generation, programs, with_draft=with_draft)


GENERATION = card(Side.GENERATION, range(3), ParallelPosition(tp=2, tp_rank=1))


@pytest.mark.parametrize("tp", [1, 2, 4, 8, 12])
def test_a_whole_instance_leaves_no_gap(tp):
    assert gaps(GENERATION, [context(range(3), tp=tp, tp_rank=rank) for rank in range(tp)]) == ()


def test_missing_writers_are_named():
    """Eight ranks hold four heads; without ranks 4 and 6 half of the bytes never come, whatever the others report."""
    found = gaps(GENERATION, [context(range(2), tp=8, tp_rank=rank) for rank in (0, 2, 5, 6, 7)])
    assert [text.split(";")[0] for text in found] == [
        "generation rank 1: context ranks that write a head of layer 0 key is '0 or 1', expected exactly 1",
        "generation rank 1: context ranks that write a head of layer 1 key is '0 or 1', expected exactly 1",
        "generation rank 1: context ranks that write a head of layer 2 key is '0', expected exactly 1",
    ]


def test_two_writers_are_named():
    """Two stages both believe layer 1 to be theirs."""
    stages = [context((0, 1), pp=2, pp_rank=0), context((1, 2), pp=2, pp_rank=1)]
    (text,) = gaps(GENERATION, stages)
    assert "write a head of layer 1 key is '2', expected exactly 1; let the context ranks hold every layer" in text


def test_missing_draft_counts_only_when_it_travels():
    generation = card(Side.GENERATION, range(2), ParallelPosition(), draft=(1,))
    target_only = [context((0,))]
    assert gaps(generation, target_only, with_draft=False) == ()
    assert len(gaps(generation, target_only)) == 1
    assert gaps(generation, [context((0, 1), draft=(1,))]) == ()


def test_context_parallel_ranks_cover_the_ordinals_together():
    generation = card(Side.GENERATION, range(2), ParallelPosition(cp=2, cp_rank=1))
    contexts = [context(range(2), cp=3, cp_rank=rank) for rank in range(3)]
    assert gaps(generation, contexts) == ()
    assert len(gaps(generation, contexts[:2])) == 2
