"""Situations that easily move wrong bytes without a word: whole instances, every byte judged by the oracle."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest

from transfer.testing.case import InstanceShape, LayerKind, PairCase, RequestCase
from transfer.testing.oracle import all_ranks
from transfer.testing.oracle_gate import draft_travels
from transfer.testing.simulator import Simulation, SimulationError, simulate

SPECULATION = ("draft_model", 3, 3)


@pytest.fixture(autouse=True)
def quiet() -> Iterator[None]:
    logging.disable(logging.CRITICAL)
    yield
    logging.disable(logging.NOTSET)


def pair(
    *kinds: LayerKind, context: dict[str, Any], generation: dict[str, Any], requests: Any = None, **fields: Any
) -> PairCase:
    """Return a pair of two shapes of one model, all target layers on one stage unless `stages` says otherwise."""
    targets = sum(kind.count for kind in kinds if not kind.draft)
    speculation = SPECULATION if any(kind.draft for kind in kinds) else None
    base = InstanceShape(kinds=kinds, stages=(targets,), speculation=speculation, draft_kv="per_view")
    return PairCase(
        context=replace(base, **context),
        generation=replace(base, **generation),
        requests=tuple(requests or (RequestCase(prompt=11),)),
        **fields,
    )


def run(case: PairCase) -> Simulation:
    """Run a pair that must come through; return it for a closer look (its memory is let go of)."""
    with Simulation(case) as simulation:
        simulation.run()
    assert not simulation.refused
    return simulation


def sent(simulation: Simulation, rank: int = 0) -> dict[int, int]:
    """Return the bytes a generation rank got of request 0, by context rank."""
    outcome = simulation.generations[rank].handles[0].outcome
    assert outcome is not None
    return {leg.peer: leg.bytes for leg in outcome.legs if leg.bytes}


TARGET, DRAFT = LayerKind(heads=16), LayerKind(heads=8, draft=True, window=7, policy="optional")
MLA = LayerKind(heads=1, kv_factor=1, head_dim=24)
PATHS = pytest.mark.parametrize("path", ["direct", "zmq"])


@PATHS
@pytest.mark.parametrize("target", [TARGET, MLA], ids=["16 heads", "one latent head"])
@pytest.mark.parametrize(("ctx_tp", "gen_tp"), [(16, 8), (8, 4), (4, 8)])
def test_a_drafter_is_cut_by_its_own_heads(path: str, target: LayerKind, ctx_tp: int, gen_tp: int) -> None:
    case = pair(target, DRAFT, context={"tp": ctx_tp, "path": path}, generation={"tp": gen_tp, "path": path})
    assert draft_travels(case)
    drafts = [rank.handles[0].outcome.legs for rank in run(case).generations]  # type: ignore[union-attr]
    assert all(sum(leg.draft_bytes for leg in legs) > 0 for legs in drafts)


def test_context_pages_stay_until_the_last_generation_rank_has_them() -> None:
    """Latent target and drafter with heads go to different ranks; no rank's pages are free before the last has read."""
    case = pair(MLA, replace(DRAFT, window=None), context={"tp": 4, "path": "zmq"}, generation={"tp": 8, "path": "zmq"})
    with Simulation(case) as simulation:
        simulation._connect()
        scripts = simulation.scripts(0)
        simulation._play(scripts[:4])  # four context ranks publish
        simulation._play(scripts[4:-1])
        for _ in range(200):
            for rank in (*simulation.contexts, *simulation.generations):
                simulation._turn(rank)
        last = simulation.generations[-1]
        waiting = [rank for rank in simulation.contexts if not rank.handles[0].quiet]
        assert waiting
        assert all(rank.handles[0].outcome is None for rank in waiting)
        simulation._play(scripts[-1:])
        simulation._settle()
        assert last.handles[0].quiet
        simulation._account()
        simulation._compare()


@PATHS
def test_fewer_heads_than_context_ranks_arrive_whole_and_once(path: str) -> None:
    """Two heads on four ranks, four heads on eight: half of the ranks have nothing to send, and no byte is missing."""
    for heads, tp in ((2, 4), (4, 8)):
        kind = LayerKind(heads=heads, head_dim=16)
        simulation = run(pair(kind, context={"tp": tp, "path": path}, generation={"path": path}))
        head_bytes = 3 * 4 * 2 * 16 * 2  # 3 blocks of 4 tokens, K and V, 16 elements of 2 bytes
        assert sent(simulation) == {2 * head: head_bytes for head in range(heads)}


def test_more_generation_ranks_than_heads_take_them_in_blocks() -> None:
    case = pair(LayerKind(heads=2), context={}, generation={"tp": 4})
    assert [rank.places[0, "key"].heads for rank in all_ranks(case.generation)] == [(0,), (0,), (1,), (1,)]
    run(case)


@PATHS
@pytest.mark.parametrize("layouts", [("HND", "NHD"), ("NHD", "HND"), ("NHD", "NHD")])
@pytest.mark.parametrize(("ctx_tp", "gen_tp"), [(2, 4), (4, 1), (3, 2)])
def test_attention_kernels_may_want_different_orders(
    path: str, layouts: tuple[str, str], ctx_tp: int, gen_tp: int
) -> None:
    heads = 12 if 3 in (ctx_tp, gen_tp) else 8
    shapes = [{"layout": layout, "path": path} for layout in layouts]
    run(pair(LayerKind(heads=heads), context=shapes[0] | {"tp": ctx_tp}, generation=shapes[1] | {"tp": gen_tp}))


def test_layers_lie_in_any_order_on_each_rank() -> None:
    kinds = (LayerKind(count=3, heads=4), LayerKind(count=2, heads=4, kv_factor=1), replace(DRAFT, count=2))
    for order in range(1, 6):
        run(pair(*kinds, context={"order": order}, generation={"tp": 2, "order": 7 * order}))


@pytest.mark.parametrize(("ctx_tp", "gen_tp"), [(4, 1), (1, 4), (4, 2)])
def test_roles_that_share_a_pool_on_one_side_alone_meet_by_name(ctx_tp: int, gen_tp: int) -> None:
    """With one head a rank K, V and index keys have one size and share a pool; with more they do not."""
    kind = LayerKind(count=2, heads=4, head_dim=16, extras={"index_key": 32})
    case = pair(kind, context={"tp": ctx_tp}, generation={"tp": gen_tp})
    pools = [len(all_ranks(shape)[0].slot_bytes) for shape in (case.context, case.generation)]
    assert sorted(pools) == [1, 2] if 4 in (ctx_tp, gen_tp) else pools == [2, 2]
    run(case)


def test_every_layer_keeps_its_own_dtype() -> None:
    """The first layer has no heads, the others a dtype each, the drafter another."""
    kinds = (
        LayerKind(heads=0, extras={"state": 20}),
        LayerKind(heads=4, dtype="nvfp4", head_dim=32),
        LayerKind(heads=4, dtype="float8_e4m3fn"),
        replace(DRAFT, dtype="bfloat16"),
    )
    run(pair(*kinds, context={"tp": 2}, generation={"tp": 4}))


@PATHS
@pytest.mark.parametrize("early", [False, True])
def test_pages_for_drafts_change_nothing_on_either_side(path: str, early: bool) -> None:
    """More pages than the prompt has on the context side; a tail that crosses a page on the generation side."""
    for prompt in (8, 9, 11, 12):
        for tail in (0, 1, 2):
            request = RequestCase(prompt=prompt, tail_blocks=tail, early=early)
            run(pair(TARGET, DRAFT, context={"path": path}, generation={"path": path}, requests=[request]))


@pytest.mark.parametrize("cached", [0, 8, 9, 16, 31])
@pytest.mark.parametrize("selected", [False, True])
def test_a_cached_prefix_shifts_no_page(cached: int, selected: bool) -> None:
    """Also where a drafter's group was not taken over and comes in full, beside target pages that stay home."""
    request = RequestCase(prompt=31, cached_tokens=cached, optional_selected=selected)
    wide = replace(DRAFT, window=18)
    simulation = run(pair(TARGET, wide, context={"tpb": 8}, generation={"tpb": 4}, requests=[request]))
    legs = simulation.generations[0].handles[0].outcome.legs  # type: ignore[union-attr]
    target, draft = (
        [(leg.bytes - leg.draft_bytes) // (16 * 2 * 2 * 16) for leg in legs],
        [leg.draft_bytes // (8 * 2 * 2 * 16) for leg in legs],
    )
    assert target == [32 - cached // 4 * 4]
    assert draft == [20 if not selected else 32 - max(12, cached // 4 * 4)]


@PATHS
def test_window_pages_follow_their_ordinals_while_a_prompt_is_computed(path: str) -> None:
    """Chunks of the prompt leave one by one; what has left the window at the end never leaves."""
    kinds = (LayerKind(count=3, heads=2), LayerKind(count=2, heads=2, window=9, sinks=4), DRAFT)
    for seed in range(8):
        requests = [RequestCase(prompt=45, early=True), RequestCase(prompt=30, early=True, ask_first=True)]
        shape = {"path": path, "bands": 3}
        run(pair(*kinds, context=shape, generation={"path": path}, requests=requests, seed=seed, chunk_bytes=64))


def test_chunks_are_as_large_as_all_views_of_a_page_and_every_writer_has_its_own() -> None:
    """Uneven stages, copies of heads, a latent layer and scales over the staged path, in chunks smaller than a page."""
    kinds = (LayerKind(count=2, heads=2, dtype="nvfp4"), MLA, LayerKind(heads=4, extras={"index_key": 5}), DRAFT)
    context = {"tp": 4, "stages": (3, 1), "path": "zmq"}
    for chunk_bytes in (64, 4096):
        case = pair(*kinds, context=context, generation={"path": "zmq"}, chunk_bytes=chunk_bytes, staging_chunks=1)
        run(case)


@pytest.mark.parametrize("attention_dp", [False, True])
@pytest.mark.parametrize("side", ["context", "generation"])
def test_a_drafter_on_one_side_alone_leaves_its_pages_and_the_target_goes(attention_dp: bool, side: str) -> None:
    base = pair(
        TARGET,
        DRAFT,
        context={"tp": 2, "attention_dp": attention_dp, "draft_kv": "auto"},
        generation={"tp": 2, "attention_dp": attention_dp, "draft_kv": "auto"},
    )
    bare = replace(getattr(base, side), kinds=(TARGET,), speculation=None)
    case = replace(base, **{side: bare})
    assert not draft_travels(case)
    legs = run(case).generations[0].handles[0].outcome.legs  # type: ignore[union-attr]
    assert [leg.draft_bytes for leg in legs] == [0] * len(legs)
    required = {name: replace(getattr(case, name), draft_kv="1") for name in ("context", "generation")}
    assert {"draft_kv", "draft_layers", "speculative"} <= simulate(replace(case, **required))


@pytest.mark.parametrize("tpb", [16, 64, 128])
def test_draft_kv_travels_whatever_the_page_size(tpb: int) -> None:
    requests = [RequestCase(prompt=tpb + 3)]
    shape = {"tpb": tpb, "draft_kv": "1"}
    case = pair(
        LayerKind(heads=2, head_dim=2), replace(DRAFT, heads=2), context=shape, generation=shape, requests=requests
    )
    assert draft_travels(case)
    run(case)


def test_a_page_nobody_may_read_is_never_sent() -> None:
    """A slot that is gone (on the host, or dropped) is no page: the request fails on both sides and nothing is read."""
    case = pair(LayerKind(heads=2), context={}, generation={})
    with Simulation(case) as simulation:
        simulation._connect()
        simulation.contexts[0].tables[0][0][1] = -1
        simulation._play(simulation.scripts(0))
        with pytest.raises(SimulationError, match="context has no page for ordinal 1"):
            simulation._settle()
        handles = [rank.handles[0] for rank in (*simulation.contexts, *simulation.generations)]
        assert all(handle.quiet and handle.outcome and not handle.outcome.ok for handle in handles)


@pytest.mark.parametrize("first_tokens", [0, 1])
def test_a_request_without_a_first_token_ends_like_any_other(first_tokens: int) -> None:
    requests = [RequestCase(prompt=9, first_tokens=first_tokens), RequestCase(prompt=5, first_tokens=1)]
    simulation = run(pair(TARGET, context={"tp": 2}, generation={}, requests=requests))
    found = [simulation.generations[0].handles[number].outcome.aux for number in range(2)]  # type: ignore[union-attr]
    assert [aux and len(aux.first_tokens) for aux in found] == [first_tokens, 1]
