"""Ranks of a side: places, layers, heads, pools and cards; and the shipped presets before the gate."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from transfer import gate
from transfer.hello import DraftKVMode, ParallelPosition, PathKind, Side, SpeculativeCard
from unikv.budget import PoolBudget
from unikv.errors import ConfigError
from unikv.layer_spec import KVDtype, KVLayout, LayerOwner
from unikv.ranges import ceil_div
from unikv.speculation import SpeculationShape
from workers.config import PairConfig
from workers.config_load import load_pair, pair_cases, preset_names
from workers.config_side import LayerEntry, ParallelConfig, PoolConfig, SideConfig
from workers.topology import (
    dry_cards,
    pool_budget,
    pool_slots,
    positions,
    rank_card,
    rank_layout,
    rank_specs,
    speculation_shape,
    whole_model,
)

PRESET_CASES = [(name, case) for name in preset_names() for case in (None, *pair_cases(load_pair(name, environ={})))]


def small(*overrides: str, case: str | None = None) -> PairConfig:
    return load_pair("pattern-small", overrides=overrides, case=case, environ={})


def side(
    *, target: tuple[int, int] = (4, 8), draft: tuple[int, int] = (1, 4), pages: int = 16, **parallel: int | bool
) -> SideConfig:
    """A side of (layers, heads) of each owner."""
    layers = [
        LayerEntry(count=count, owner=owner, kv_heads=heads, head_dim=16, dtype=KVDtype.FLOAT16)
        for owner, (count, heads) in ((LayerOwner.TARGET, target), (LayerOwner.DRAFT, draft))
        if count
    ]
    return SideConfig(
        side=Side.CONTEXT,
        source="pair file x.yaml",
        max_seq_len=256,
        tokens_per_block=16,
        layers=tuple(layers),
        parallel=ParallelConfig.model_validate(parallel),
        pool=PoolConfig(pages=pages),
    )


def held(config: SideConfig) -> list[list[int]]:
    return [[spec.layer_id for spec in rank_specs(config, place)] for place in positions(config)]


# ---- places


@given(st.integers(1, 4), st.integers(1, 4), st.integers(1, 3))
def test_positions_are_in_rank_order(tp: int, pp: int, cp: int) -> None:
    places = positions(side(target=(4, 12), draft=(0, 0), tp=tp, pp=pp, cp=cp))
    assert [place.rank for place in places] == list(range(tp * pp * cp))
    assert len(set(places)) == len(places) == places[0].world_size
    assert [(p.pp_rank * tp + p.tp_rank) * cp + p.cp_rank for p in places] == list(range(len(places)))


def test_every_position_knows_of_attention_dp() -> None:
    assert [place.attention_dp for place in positions(side(tp=2, attention_dp=True))] == [True, True]
    assert [place.attention_dp for place in positions(side(tp=2))] == [False, False]


# ---- layers


def test_earlier_stages_take_the_remainder_and_the_last_one_the_draft() -> None:
    assert held(side(target=(5, 8), draft=(2, 4), pp=2)) == [[0, 1, 2], [3, 4, 5, 6]]
    assert held(side(target=(8, 8), draft=(1, 4), pp=3)) == [[0, 1, 2], [3, 4, 5], [6, 7, 8]]


def test_the_ranks_of_a_stage_hold_the_same_layers() -> None:
    assert held(side(target=(3, 8), draft=(1, 4), pp=2, tp=2)) == [[0, 1], [0, 1], [2, 3], [2, 3]]


def test_a_last_stage_may_live_on_draft_layers() -> None:
    assert held(side(target=(2, 8), draft=(1, 4), pp=3)) == [[0], [1], [2]]


@pytest.mark.parametrize(("target", "draft", "pp", "most"), [((2, 8), (0, 0), 3, 2), ((2, 8), (5, 4), 4, 3)])
def test_a_stage_without_layers_is_refused_for_every_rank(
    target: tuple[int, int], draft: tuple[int, int], pp: int, most: int
) -> None:
    config = side(target=target, draft=draft, pp=pp)
    for place in positions(config):
        with pytest.raises(ConfigError, match=rf"x\.yaml: context\.parallel\.pp is {pp}, expected <= {most}.*stage"):
            rank_specs(config, place)


@given(st.integers(1, 9), st.integers(0, 3), st.integers(1, 10), st.sampled_from([1, 2, 4]))
def test_every_layer_is_on_exactly_one_stage(targets: int, drafts: int, pp: int, tp: int) -> None:
    config = side(target=(targets, 4), draft=(drafts, 4), pp=pp, tp=tp)
    if pp > targets + (drafts > 0):
        with pytest.raises(ConfigError, match=r"context\.parallel\.pp"):
            held(config)
        return
    stages = held(config)[::tp]
    assert [layer for stage in stages for layer in stage] == list(range(targets + drafts))
    assert all(stages)
    assert set(range(targets, targets + drafts)) <= set(stages[-1])


# ---- heads


@pytest.mark.parametrize(
    ("tp", "target", "draft"),
    [(1, [8], [4]), (2, [4, 4], [2, 2]), (4, [2] * 4, [1] * 4), (8, [1] * 8, [1] * 8)],
)
def test_heads_are_split_or_replicated(tp: int, target: list[int], draft: list[int]) -> None:
    config = side(target=(1, 8), draft=(1, 4), tp=tp)
    specs = [rank_specs(config, place) for place in positions(config)]
    assert [first.num_kv_heads for first, _ in specs] == target
    assert [second.num_kv_heads for _, second in specs] == draft
    assert {(first.total_heads, second.total_heads) for first, second in specs} == {(8, 4)}


def test_under_attention_dp_every_rank_holds_all_heads() -> None:
    config = side(target=(1, 3), draft=(1, 5), tp=4, attention_dp=True)
    assert [[spec.num_kv_heads for spec in rank_specs(config, place)] for place in positions(config)] == [[3, 5]] * 4


@pytest.mark.parametrize(
    ("parts", "tp", "number", "owner", "heads"),
    [({"target": (1, 8)}, 3, 0, "target", 8), ({"target": (1, 6), "draft": (1, 4)}, 3, 1, "draft", 4)],
)
def test_indivisible_heads_name_entry_heads_and_tp(
    parts: dict[str, tuple[int, int]], tp: int, number: int, owner: str, heads: int
) -> None:
    config = side(tp=tp, **parts)  # type: ignore[arg-type]
    with pytest.raises(ConfigError) as caught:
        rank_specs(config, positions(config)[0])
    text = str(caught.value)
    assert text.startswith("pair file x.yaml: context ")
    assert [part for part in (f"layers[{number}]", owner, f"kv_heads is {heads}", f"tp={tp}") if part not in text] == []


def test_a_rank_has_the_whole_of_a_spec() -> None:
    _, draft = (rank_specs(small().generation, positions(small().generation)[3])[i] for i in (0, -1))
    assert (draft.layer_id, draft.owner, draft.num_kv_heads, draft.total_heads) == (9, LayerOwner.DRAFT, 1, 4)
    assert (draft.head_dim, draft.dtype, draft.window) == (64, KVDtype.FLOAT16, 256)
    assert draft.reuse_policy == "optional"


def test_the_whole_model_is_one_rank() -> None:
    specs = rank_specs(small(case="tp2pp2-tp1-direct").context, whole_model(small().context))
    assert [spec.num_kv_heads for spec in specs] == [8] * 8 + [4] * 2


def test_layers_left_to_a_model_have_no_ranks_yet() -> None:
    pair = load_pair("smollm2", overrides=["model.layers=auto"], environ={})
    with pytest.raises(ConfigError, match=r"context\.layers is 'auto'"):
        rank_specs(pair.context, ParallelPosition())


# ---- memory and speculation


def test_a_layout_has_the_order_of_its_side() -> None:
    pair = small(case="layouts-direct")
    places = [positions(config)[0] for config in (pair.context, pair.generation)]
    assert rank_layout(pair.context, places[0]).kv_layout is KVLayout.NHD
    generation = rank_layout(pair.generation, places[1])
    assert (generation.kv_layout, generation.tokens_per_block) == (KVLayout.HND, 32)
    assert [group.owner for group in generation.groups] == [LayerOwner.TARGET, LayerOwner.DRAFT]


def test_pools_have_the_size_the_file_gives() -> None:
    by_pages = side(pages=16)
    layout = rank_layout(by_pages, positions(by_pages)[0])
    assert pool_budget(by_pages) == PoolBudget(pages=16)
    assert set(pool_slots(by_pages, layout).values()) == {16}
    by_bytes = small("context.pool={bytes: 1MiB}").context
    assert pool_budget(by_bytes) == PoolBudget(bytes=1 << 20)


def test_a_pool_below_one_page_is_refused() -> None:
    config = small("context.pool={bytes: 10}").context
    with pytest.raises(ConfigError, match=r"preset pattern-small: context\.pool: "):
        pool_slots(config, rank_layout(config, positions(config)[0]))


def test_the_speculative_mode_reserves_what_the_file_says() -> None:
    shape = SpeculationShape(max_draft_tokens=7, block_width=7, num_extra_kv_tokens=6)
    assert speculation_shape(small().context) == shape
    assert speculation_shape(small("speculative=null").context) is None


# ---- cards


def test_dry_cards_are_those_of_all_ranks() -> None:
    cards = dry_cards(small(), Side.GENERATION)
    assert [card.rank for card in cards] == [0, 1, 2, 3]
    first = cards[0]
    assert (first.incarnation, first.address, first.device, first.host) == ("dry-run", "", "cpu", None)
    assert (first.side, first.num_target_layers, first.num_draft_layers) == (Side.GENERATION, 8, 2)
    assert (first.draft_kv, first.path, first.checksum) == (DraftKVMode.PER_VIEW, PathKind.DIRECT, "off")
    assert first.speculative == SpeculativeCard(
        method="draft_model", max_draft_tokens=7, block_width=7, num_extra_kv_tokens=6
    )
    assert {pool.num_slots for pool in first.pools} == {160}
    assert all(storage.export is None for storage in first.storages)


def test_every_stage_knows_the_layers_of_the_instance() -> None:
    cards = dry_cards(small("speculative=null", case="tp2pp2-tp1-direct"), Side.CONTEXT)
    assert [(card.num_target_layers, card.num_draft_layers) for card in cards] == [(8, 2)] * 4
    assert [card.speculative for card in cards] == [None] * 4


def test_a_card_of_a_run_says_what_the_run_found() -> None:
    pair = small()
    place = positions(pair.context)[1]
    layout = rank_layout(pair.context, place)
    card = rank_card(
        pair,
        Side.CONTEXT,
        place,
        layout=layout,
        num_slots=9,
        incarnation="i",
        instance="c",
        address="a",
        device="cuda:1",
    )
    assert (card.rank, card.incarnation, card.instance, card.address, card.device) == (1, "i", "c", "a", "cuda:1")
    assert {pool.num_slots for pool in card.pools} == {9}
    assert [storage.size_bytes for storage in card.storages] == [9 * pool.slot_stride_bytes for pool in card.pools]


# ---- the shipped pairs


@pytest.mark.parametrize(("name", "case"), PRESET_CASES)
def test_presets_pass_the_gate(name: str, case: str | None) -> None:
    pair = load_pair(name, case=case, environ={})
    report = gate.check_instances(dry_cards(pair, Side.CONTEXT), dry_cards(pair, Side.GENERATION))
    assert report.compatible, gate.format_report(report)
    # How blocks are dealt does not cut heads.
    alike = pair.context.parallel == pair.generation.parallel.model_copy(update={"cp": 1})
    assert report.draft_kv == ("shared" if alike else "per_view")


def test_the_pattern_preset_covers_each_topology_on_both_paths() -> None:
    shapes = ("tp1-tp1", "tp2-tp4", "tp4-tp1", "tp2pp2-tp1", "tp3-tp2", "layouts")
    assert pair_cases(small()) == tuple(f"{shape}-{path}" for shape in shapes for path in ("direct", "zmq"))
    for case in pair_cases(small()):
        pair = small(case=case)
        assert pair.transfer.path == case.rpartition("-")[2]
        shown = [
            f"tp{config.parallel.tp}" + (f"pp{config.parallel.pp}" if config.parallel.pp > 1 else "")
            for config in (pair.context, pair.generation)
        ]
        assert "-".join(shown) == ("tp1-tp1" if case.startswith("layouts") else case.rpartition("-")[0])


@pytest.mark.parametrize("case", pair_cases(small()))
def test_target_and_draft_of_the_pattern_preset_cannot_be_mixed_up(case: str) -> None:
    target, draft = small(case=case).context.layers or ()
    assert (target.head_dim, target.dtype, target.window) != (draft.head_dim, draft.dtype, draft.window)
    assert target.head_dim != draft.head_dim


@pytest.mark.parametrize("name", preset_names())
def test_the_pools_of_presets_hold_their_workload_and_where_requests_overlap_twice(name: str) -> None:
    pair = load_pair(name, environ={})
    for config in (pair.context, pair.generation):
        shape = speculation_shape(config)
        assert shape is not None
        tokens = pair.workload.prompt_tokens[1] + pair.workload.output_tokens + shape.generation_headroom(True)
        pages = ceil_div(tokens, config.tokens_per_block) * pair.workload.concurrency
        assert config.pool.pages is not None
        assert config.pool.pages > (2 if pair.workload.concurrency > 1 else 1) * pages


def test_presets_are_written_without_a_contradiction() -> None:
    for name in preset_names():
        text = (Path(load_pair.__code__.co_filename).parent / "presets" / f"{name}.yaml").read_text()
        assert not set(yaml.safe_load(text)["model"]) & set(yaml.safe_load(text)["context"])
