"""The gate on whole instances: merged rows, rank scopes, coverage, completeness and speed."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from transfer.cards import build_card
from transfer.gate import DraftKV, GateCheck, GateReport, Verdict, check, check_instances
from transfer.hello import (
    DraftKVMode,
    GroupCard,
    ParallelPosition,
    PathKind,
    PoolCard,
    RankCard,
    Side,
    SpeculativeCard,
)
from unikv.ids import GroupId, LayerId
from unikv.layer_spec import KEY, VALUE, KVCacheLayerSpec, KVDtype, KVLayout, LayerOwner, ReusePolicy
from unikv.layout import build_layout
from unikv.ranges import head_shard, stage_layers
from unikv.views import KVView, ViewEntry

SPECULATION = SpeculativeCard(method="draft_model", max_draft_tokens=7, block_width=7, num_extra_kv_tokens=6)
TARGET_HEADS, DRAFT_HEADS = 8, 4
Cards = list[RankCard]


def view(group: int, owner: LayerOwner, layers: range, position: ParallelPosition) -> KVView:
    total, head_dim = (TARGET_HEADS, 128) if owner is LayerOwner.TARGET else (DRAFT_HEADS, 64)
    shard = head_shard(total, 1, 0) if position.attention_dp else head_shard(total, position.tp, position.tp_rank)
    buffer_bytes = len(shard.heads) * 32 * head_dim * 2
    return KVView(
        group_id=GroupId(group),
        pool_index=0,
        owner=owner,
        roles=(KEY, VALUE),
        heads=shard.heads,
        replica=shard.replica,
        replicas=shard.replicas,
        total_heads=total,
        head_dim=head_dim,
        dtype="bfloat16",
        kv_layout=KVLayout.HND,
        tokens_per_block=32,
        row_bytes=head_dim * 2,
        entries=tuple(
            ViewEntry(layer_id=LayerId(layer), role=role, offset_bytes=(2 * i + j) * buffer_bytes)
            for i, layer in enumerate(layers)
            for j, role in enumerate((KEY, VALUE))
        ),
    )


def group(number: int, owner: LayerOwner, window: int | None) -> GroupCard:
    return GroupCard(
        group_id=GroupId(number), owner=owner, window=window, sink_blocks=0, reuse_policy=ReusePolicy.REQUIRED
    )


def rank_card(side: Side, position: ParallelPosition, layers: int, drafts: int, mode: DraftKVMode) -> RankCard:
    """Target layers are dealt to the stages, draft layers live on the last one."""
    stage = stage_layers(layers, position.pp, position.pp_rank)
    views = [view(0, LayerOwner.TARGET, range(stage.lo, stage.hi), position)]
    groups = [group(0, LayerOwner.TARGET, None)]
    if drafts and position.pp_rank == position.pp - 1:
        views.append(view(1, LayerOwner.DRAFT, range(layers, layers + drafts), position))
        groups.append(group(1, LayerOwner.DRAFT, 2048))
    return RankCard(
        incarnation="i",
        instance=side.value,
        side=side,
        position=position,
        address="",
        device="cpu",
        kv_layout=KVLayout.HND,
        tokens_per_block=32,
        num_target_layers=layers,
        num_draft_layers=drafts,
        groups=tuple(groups),
        storages=(),
        pools=tuple(
            PoolCard(group_id=v.group_id, pool_index=0, storage=0, slot_stride_bytes=1, num_slots=9) for v in views
        ),
        views=tuple(views),
        speculative=SPECULATION if drafts else None,
        draft_kv=mode,
        path=PathKind.AUTO,
    )


def instance(
    side: Side,
    *,
    tp: int = 1,
    pp: int = 1,
    attention_dp: bool = False,
    layers: int = 6,
    drafts: int = 2,
    mode: DraftKVMode = DraftKVMode.AUTO,
) -> Cards:
    positions = [
        ParallelPosition(tp=tp, tp_rank=t, pp=pp, pp_rank=p, attention_dp=attention_dp)
        for p in range(pp)
        for t in range(tp)
    ]
    return [rank_card(side, position, layers, drafts, mode) for position in positions]


def context(**shape: object) -> Cards:
    return instance(Side.CONTEXT, **shape)  # type: ignore[arg-type]


def generation(**shape: object) -> Cards:
    return instance(Side.GENERATION, **shape)  # type: ignore[arg-type]


def rows(report: GateReport, name: str) -> list[GateCheck]:
    return [row for row in report.checks if row.name == name]


def change(cards: Cards, rank: int, edit: Callable[[RankCard], RankCard]) -> Cards:
    return [edit(card) if card.rank == rank else card for card in cards]


def edit_view(card: RankCard, number: int, **changes: object) -> RankCard:
    views = list(card.views)
    views[number] = replace(views[number], **changes)  # type: ignore[arg-type]
    return replace(card, views=tuple(views))


@pytest.mark.parametrize(("ours", "theirs"), [((1, 1), (1, 1)), ((2, 2), (2, 2)), ((2, 1), (2, 3)), ((8, 3), (8, 2))])
def test_equal_tp_shares_draft_whatever_the_stages(ours: tuple[int, int], theirs: tuple[int, int]) -> None:
    report = check_instances(context(tp=ours[0], pp=ours[1]), generation(tp=theirs[0], pp=theirs[1]))
    assert report.compatible
    assert report.draft_kv is DraftKV.SHARED
    assert [row.name for row in report.checks if row.reason] == []


@pytest.mark.parametrize("shape", [{"tp": 2}, {"pp": 3}, {"tp": 2, "pp": 2}])
def test_rows_that_agree_appear_once_and_without_ranks(shape: dict[str, int]) -> None:
    report = check_instances(context(**shape), generation(**shape))
    assert [row.scope for row in report.checks if "rank" in row.scope] == []
    assert [row.scope for row in rows(report, "dtype")] == ["layers 0-5 key, value", "draft layers 6-7 key, value"]
    assert [row.scope for row in rows(report, "checksum")] == ["instance"]
    assert len({(row.name, row.scope) for row in report.checks}) == len(report.checks)


def test_instances_of_one_rank_say_what_the_pair_says_and_more() -> None:
    ours, theirs = context(), generation()
    pair, whole = check(ours[0], theirs[0]), check_instances(ours, theirs)
    assert set(pair.checks) <= set(whole.checks)
    assert {row.name for row in whole.checks} - {row.name for row in pair.checks} == {"ranks", "coverage"}


def test_a_rank_that_differs_is_named() -> None:
    odd = change(generation(tp=2), 0, lambda card: edit_view(card, 0, dtype="float16"))
    report = check_instances(context(tp=2), odd)
    dtype = {row.scope: (row.verdict, row.generation) for row in rows(report, "dtype")}
    assert dtype == {
        "context ranks 0-1 -> generation rank 0, layers 0-5 key, value": (Verdict.REFUSE, "float16"),
        "context ranks 0-1 -> generation rank 1, layers 0-5 key, value": (Verdict.OK, "bfloat16"),
        "draft layers 6-7 key, value": (Verdict.OK, "bfloat16"),
    }
    (row,) = report.refused
    assert row.reason.startswith("context ranks 0-1 -> generation rank 0, layers 0-5 key, value: dtype is bfloat16 on")


def test_a_rank_wide_difference_is_named_with_its_ranks() -> None:
    odd = change(context(tp=4), 2, lambda card: replace(card, checksum="page"))
    report = check_instances(odd, generation(tp=4))
    checksum = {row.scope: row.verdict for row in rows(report, "checksum")}
    assert checksum == {
        "context rank 2 -> generation ranks 0-3, instance": Verdict.REFUSE,
        "context ranks 0-1, 3 -> generation ranks 0-3, instance": Verdict.OK,
    }


def test_draft_is_as_weak_as_its_weakest_pair() -> None:
    odd = change(generation(tp=2, pp=2), 3, lambda card: edit_view(card, 1, head_dim=32))
    ours = context(tp=2, pp=2)
    single = {check(one, other).draft_kv for one in ours for other in odd}
    report = check_instances(ours, odd)
    assert single == {DraftKV.SHARED, DraftKV.OFF}
    assert report.draft_kv is DraftKV.OFF
    assert len(rows(report, "draft_kv")) == 1
    assert report.compatible


@pytest.mark.parametrize(
    ("mode", "draft_kv", "compatible"),
    [
        (DraftKVMode.AUTO, DraftKV.OFF, True),
        (DraftKVMode.REQUIRE, DraftKV.OFF, False),
        (DraftKVMode.OFF, DraftKV.OFF, True),
        (DraftKVMode.PER_VIEW, DraftKV.PER_VIEW, True),
    ],
)
def test_unequal_tp(mode: DraftKVMode, draft_kv: DraftKV, compatible: bool) -> None:
    report = check_instances(context(tp=2, mode=mode), generation(tp=4, mode=mode))
    assert (report.draft_kv, report.compatible) == (draft_kv, compatible)


def test_modes_that_differ_inside_one_instance_are_refused() -> None:
    odd = change(generation(tp=2), 1, lambda card: replace(card, draft_kv=DraftKVMode.OFF))
    report = check_instances(context(tp=2), odd)
    (row,) = report.refused
    assert row.name == "draft_kv"
    assert "is auto on context and 0 and auto on generation; " in row.reason


def test_heads_nobody_holds_are_refused() -> None:
    report = check_instances(context(tp=4)[:3], generation(tp=2, mode=DraftKVMode.AUTO))
    refused = {row.scope: (row.context, row.generation) for row in report.refused if row.name == "coverage"}
    assert refused == {"layers 0-5 key, value": ("heads 0-5", "heads 0-7")}
    (ranks,) = rows(report, "ranks")
    assert (ranks.verdict, ranks.context, ranks.generation) == (Verdict.REFUSE, "3 of 4", "2 of 2")
    draft = next(row for row in rows(report, "coverage") if row.scope.startswith("draft"))
    assert (draft.verdict, draft.context, draft.generation) == (Verdict.FALLBACK, "heads 0-2", "heads 0-3")


def test_layers_nobody_holds_are_refused() -> None:
    report = check_instances(context(pp=3)[:2], generation())
    refused = {row.scope: row.context for row in report.refused if row.name == "coverage"}
    assert refused == {"layers 4-5 key, value": "none", "draft layers 6-7 key, value": "none"}
    assert "give the context side every layer" in next(r.reason for r in report.refused if r.name == "coverage")


@pytest.mark.parametrize(("mode", "verdict"), [(DraftKVMode.AUTO, Verdict.FALLBACK), (DraftKVMode.OFF, Verdict.OK)])
def test_draft_layers_on_generation_alone_stay_home(mode: DraftKVMode, verdict: Verdict) -> None:
    report = check_instances(context(drafts=0, mode=mode), generation(mode=mode))
    coverage = {row.scope: row.verdict for row in rows(report, "coverage")}
    assert coverage == {"layers 0-5 key, value": Verdict.OK, "draft layers 6-7 key, value": verdict}
    assert report.compatible


def test_layers_only_the_context_side_holds_are_no_gap() -> None:
    report = check_instances(context(), generation(drafts=0))
    assert report.compatible
    assert [row.scope for row in rows(report, "coverage")] == ["layers 0-5 key, value"]


@pytest.mark.parametrize(
    ("cards", "text"),
    [
        ([], "0 cards of 0 parallel shapes"),
        (context(tp=2)[:1], "1 of 2"),
        ([*context(tp=2)[:1], *context(tp=2)[:1]], "1 of 2"),
        ([*context(tp=2), *context(tp=2)], "2 of 2"),
        ([context(tp=2)[0], context(tp=4)[1]], "2 cards of 2 parallel shapes"),
    ],
    ids=["none", "one missing", "one twice", "all twice", "mixed shapes"],
)
def test_incomplete_instances_are_refused(cards: Sequence[RankCard], text: str) -> None:
    report = check_instances(cards, generation(tp=2))
    (row,) = rows(report, "ranks")
    assert (row.verdict, row.context) == (Verdict.REFUSE, text)
    assert f"ranks is {text} on context and 2 of 2 on generation; " in row.reason


def test_attention_data_parallel_ranks_cover_each_other() -> None:
    report = check_instances(context(tp=4), generation(tp=2, attention_dp=True))
    assert report.compatible
    assert {row.name for row in report.checks if row.verdict is Verdict.FALLBACK} == {"tp", "attention_dp", "draft_kv"}


def test_large_instances_are_quick() -> None:
    ours, theirs = context(tp=8, pp=8, layers=96), generation(tp=8, pp=8, layers=96)
    start = time.perf_counter()
    report = check_instances(ours, theirs)
    elapsed_s = time.perf_counter() - start
    assert report.compatible
    assert len(ours) == len(theirs) == 64
    assert len(report.checks) < 60
    assert elapsed_s < 2.0


shapes = st.fixed_dictionaries(
    {
        "tp": st.sampled_from([1, 2, 4]),
        "pp": st.integers(1, 2),
        "attention_dp": st.booleans(),
        "drafts": st.integers(0, 2),
        "mode": st.sampled_from(list(DraftKVMode)),
    }
)


@settings(deadline=None)
@given(shapes, shapes)
def test_instances_refuse_what_some_pair_refuses(ours: dict[str, object], theirs: dict[str, object]) -> None:
    left, right = context(**ours), generation(**theirs)
    whole = check_instances(left, right)
    pairs = [check(one, other) for one in left for other in right]
    strength = [DraftKV.OFF, DraftKV.PER_VIEW, DraftKV.SHARED]
    assert whole.compatible == all(pair.compatible for pair in pairs)
    assert strength.index(whole.draft_kv) == min(strength.index(pair.draft_kv) for pair in pairs)
    assert {row.name for row in whole.checks} - {row.name for pair in pairs for row in pair.checks} == {
        "ranks",
        "coverage",
    }


def laid_out(side: Side, *, tp: int, dtype: KVDtype, layout: KVLayout = KVLayout.HND, page: int = 32) -> Cards:
    """Cards of a real layout: full and windowed target layers with an index key, and a windowed drafter."""

    def spec(layer: int, rank: int, owner: LayerOwner, window: int | None) -> KVCacheLayerSpec:
        heads = TARGET_HEADS if owner is LayerOwner.TARGET else DRAFT_HEADS
        return KVCacheLayerSpec(
            layer_id=LayerId(layer),
            owner=owner,
            num_kv_heads=len(head_shard(heads, tp, rank).heads),
            total_num_kv_heads=heads,
            head_dim=64,
            dtype=dtype if owner is LayerOwner.TARGET else KVDtype.BFLOAT16,
            window=window,
            extra_buffers={"index_key": 64} if owner is LayerOwner.TARGET else {},
        )

    def one(rank: int) -> RankCard:
        specs = [spec(layer, rank, LayerOwner.TARGET, 256 if layer % 2 else None) for layer in range(4)]
        specs += [spec(layer, rank, LayerOwner.DRAFT, 128) for layer in range(4, 6)]
        arranged = build_layout(specs, tokens_per_block=page, max_seq_len=4096, kv_layout=layout)
        return build_card(
            arranged,
            side=side,
            position=ParallelPosition(tp=tp, tp_rank=rank),
            num_slots=9,
            incarnation="i",
            instance=side.value,
            speculative=SPECULATION,
            draft_kv=DraftKVMode.PER_VIEW,
            num_target_layers=4,
            num_draft_layers=2,
        )

    return [one(rank) for rank in range(tp)]


@pytest.mark.parametrize("dtype", [KVDtype.BFLOAT16, KVDtype.FLOAT8_E4M3FN, KVDtype.NVFP4])
def test_real_layouts_of_unequal_tp_layout_and_page_size_pass(dtype: KVDtype) -> None:
    ours = laid_out(Side.CONTEXT, tp=2, dtype=dtype)
    theirs = laid_out(Side.GENERATION, tp=4, dtype=dtype, layout=KVLayout.NHD, page=16)
    report = check_instances(ours, theirs)
    assert [row.reason for row in report.checks if row.reason] == []
    assert report.draft_kv is DraftKV.PER_VIEW
    windows = {row.scope: row.context for row in rows(report, "window")}
    assert windows == {"layers 0, 2": "full", "layers 1, 3": "256 tokens", "draft layers 4-5": "128 tokens"}


def test_real_layouts_of_unequal_dtype_are_refused_for_the_target_alone() -> None:
    ours = laid_out(Side.CONTEXT, tp=2, dtype=KVDtype.NVFP4)
    theirs = laid_out(Side.GENERATION, tp=2, dtype=KVDtype.BFLOAT16)
    report = check_instances(ours, theirs)
    assert {(row.name, row.scope) for row in report.refused} == {
        ("roles", "layers 0-3"),
        ("dtype", "layers 0-3 key, value"),
        ("row_bytes", "layers 0-3 key, value"),
    }
    assert report.draft_kv is DraftKV.SHARED
