"""The gate on one pair of ranks: every check with both values, the draft decision, merging, and totality."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from transfer.gate import (
    DraftKV,
    GateCheck,
    GateReport,
    Verdict,
    check,
    format_report,
    require_compatible,
)
from transfer.hello import (
    DraftKVMode,
    GroupCard,
    HostIdentity,
    MemoryExport,
    ParallelPosition,
    PathKind,
    PoolCard,
    RankCard,
    Side,
    SpeculativeCard,
    StorageCard,
)
from transfer.plan import compile_program
from unikv.errors import IncompatiblePeerError
from unikv.ids import GroupId, LayerId
from unikv.layer_spec import KEY, KEY_BLOCK_SCALE, VALUE, KVLayout, LayerOwner, ReusePolicy
from unikv.ranges import Span
from unikv.views import KVView, ViewEntry

TARGET_LAYERS, DRAFT_LAYERS = 4, 2
SPECULATION = SpeculativeCard(method="draft_model", max_draft_tokens=7, block_width=7, num_extra_kv_tokens=6)
HOST = HostIdentity(hostname="alpha", boot_id="b00710af", pid_namespace="4026531836", pid=100)
Mutation = Callable[[RankCard], RankCard]


def view(group: int, owner: LayerOwner, layers: range, *, heads: int, head_dim: int, dtype: str = "bfloat16") -> KVView:
    row_bytes = head_dim * 2
    buffer_bytes = heads * 32 * row_bytes
    keys = [(layer, role) for layer in layers for role in (KEY, VALUE)]
    return KVView(
        group_id=GroupId(group),
        pool_index=0,
        owner=owner,
        roles=(KEY, VALUE),
        heads=Span(0, heads),
        replica=0,
        replicas=1,
        total_heads=heads,
        head_dim=head_dim,
        dtype=dtype,
        kv_layout=KVLayout.HND,
        tokens_per_block=32,
        row_bytes=row_bytes,
        entries=tuple(
            ViewEntry(layer_id=LayerId(layer), role=role, offset_bytes=i * buffer_bytes)
            for i, (layer, role) in enumerate(keys)
        ),
    )


def card(side: Side) -> RankCard:
    """A rank of one: target and drafter differ in heads, head_dim, window and layer count."""
    draft_range = range(TARGET_LAYERS, TARGET_LAYERS + DRAFT_LAYERS)
    views = (
        view(0, LayerOwner.TARGET, range(TARGET_LAYERS), heads=8, head_dim=128),
        view(1, LayerOwner.DRAFT, draft_range, heads=4, head_dim=64),
    )
    groups = (
        GroupCard(
            group_id=GroupId(0),
            owner=LayerOwner.TARGET,
            window=None,
            sink_blocks=0,
            reuse_policy=ReusePolicy.REQUIRED,
        ),
        GroupCard(
            group_id=GroupId(1),
            owner=LayerOwner.DRAFT,
            window=2048,
            sink_blocks=1,
            reuse_policy=ReusePolicy.OPTIONAL,
        ),
    )
    pools = tuple(
        PoolCard(
            group_id=v.group_id,
            pool_index=0,
            storage=i,
            slot_stride_bytes=v.buffer_bytes * len(v.entries),
            num_slots=9,
        )
        for i, v in enumerate(views)
    )
    return RankCard(
        incarnation="i",
        instance=side.value,
        side=side,
        position=ParallelPosition(),
        address="",
        device="cpu",
        kv_layout=KVLayout.HND,
        tokens_per_block=32,
        num_target_layers=TARGET_LAYERS,
        num_draft_layers=DRAFT_LAYERS,
        groups=groups,
        storages=tuple(StorageCard(size_bytes=pool.slot_stride_bytes * 9) for pool in pools),
        pools=pools,
        views=views,
        speculative=SPECULATION,
        draft_kv=DraftKVMode.AUTO,
        path=PathKind.AUTO,
    )


CONTEXT, GENERATION = card(Side.CONTEXT), card(Side.GENERATION)


def with_view(number: int, **changes: Any) -> Mutation:
    def change(card: RankCard) -> RankCard:
        views = list(card.views)
        views[number] = replace(views[number], **changes)
        return replace(card, views=tuple(views))

    return change


def with_group(number: int, **changes: Any) -> Mutation:
    def change(card: RankCard) -> RankCard:
        groups = list(card.groups)
        groups[number] = replace(groups[number], **changes)
        return replace(card, groups=tuple(groups))

    return change


def with_card(**changes: Any) -> Mutation:
    return lambda card: replace(card, **changes)


def with_position(**changes: Any) -> Mutation:
    return lambda card: replace(card, position=replace(card.position, **changes))


def with_speculation(**changes: Any) -> Mutation:
    return lambda card: replace(card, speculative=replace(SPECULATION, **changes))


def with_page(tokens: int) -> Mutation:
    """Another page size everywhere; sinks keep their tokens where whole blocks allow it."""

    def change(card: RankCard) -> RankCard:
        def scaled(size: int) -> int:
            return size * tokens // card.tokens_per_block

        return replace(
            card,
            tokens_per_block=tokens,
            views=tuple(
                replace(
                    view,
                    tokens_per_block=tokens,
                    entries=tuple(replace(e, offset_bytes=scaled(e.offset_bytes)) for e in view.entries),
                )
                for view in card.views
            ),
            groups=tuple(
                replace(group, sink_blocks=group.sink_blocks * card.tokens_per_block // tokens) for group in card.groups
            ),
            pools=tuple(replace(pool, slot_stride_bytes=scaled(pool.slot_stride_bytes)) for pool in card.pools),
            storages=tuple(replace(storage, size_bytes=scaled(storage.size_bytes)) for storage in card.storages),
        )

    return change


def without_draft(card: RankCard) -> RankCard:
    return replace(card, num_draft_layers=0, views=card.views[:1], groups=card.groups[:1], pools=card.pools[:1])


def with_layout(layout: KVLayout) -> Mutation:
    def change(card: RankCard) -> RankCard:
        return replace(card, kv_layout=layout, views=tuple(replace(view, kv_layout=layout) for view in card.views))

    return change


def key_only(number: int) -> Mutation:
    def change(card: RankCard) -> RankCard:
        entries = tuple(entry for entry in card.views[number].entries if entry.role == KEY)
        return with_view(number, entries=entries, roles=(KEY,))(card)

    return change


def with_extra_role(card: RankCard) -> RankCard:
    index = replace(
        card.views[0],
        pool_index=1,
        roles=("index_key",),
        dtype="bytes",
        head_dim=0,
        heads=Span(0, 1),
        total_heads=1,
        row_bytes=256,
        entries=(ViewEntry(layer_id=LayerId(2), role="index_key", offset_bytes=0),),
    )
    pool = replace(card.pools[0], pool_index=1)
    return replace(card, views=(*card.views, index), pools=(*card.pools, pool))


def exported(host: HostIdentity = HOST) -> Mutation:
    export = MemoryExport(kind="memfd", pid=100, fd=7, inode=3)
    return lambda card: replace(
        card, host=host, storages=tuple(replace(storage, export=export) for storage in card.storages)
    )


def rows(report: GateReport, name: str) -> list[GateCheck]:
    return [row for row in report.checks if row.name == name]


def failed(report: GateReport) -> set[tuple[str, str]]:
    return {(row.name, row.verdict.value) for row in report.checks if row.verdict is not Verdict.OK}


def test_good_pair_passes_with_every_check_listed_and_no_reasons() -> None:
    report = check(CONTEXT, GENERATION)
    assert report.compatible
    assert report.draft_kv is DraftKV.SHARED
    assert [row.reason for row in report.checks if row.reason] == []
    assert {row.name for row in report.checks} == ALL_NAMES
    assert {row.scope for row in report.checks} == {
        "instance",
        "draft",
        "layers 0-3",
        "layers 0-3 key, value",
        "draft layers 4-5",
        "draft layers 4-5 key, value",
    }


ALL_NAMES = {
    *("sides", "protocol_version", "card", "cp", "tokens_per_block", "kv_layout", "target_layers", "checksum", "path"),
    *("path_direct", "aux_draft_tokens", "draft_layers", "speculative", "speculative_method", "max_draft_tokens"),
    *("block_width", "tp", "attention_dp", "owner", "kv_factor", "roles", "window", "sink_tokens", "reuse_policy"),
    *("dtype", "head_dim", "row_bytes", "total_heads", "capabilities", "draft_kv"),
}


# name of the failed row, its scope, mutation of the generation card, both values, the key to change
TARGET_MISMATCHES = [
    ("protocol_version", "instance", with_card(protocol_version=2), "1", "2", "same unikv version"),
    ("tokens_per_block", "instance", with_page(48), "32 tokens", "48 tokens", "tokens_per_block"),
    ("target_layers", "instance", with_card(num_target_layers=5), "4", "5", "target layers"),
    ("checksum", "instance", with_card(checksum="page"), "off", "page", "transfer.checksum"),
    ("path", "instance", with_card(path=PathKind.ZMQ), "auto", "zmq", "transfer.path"),
    ("dtype", "layers 0-3 key, value", with_view(0, dtype="float16"), "bfloat16", "float16", "layers[].dtype"),
    ("head_dim", "layers 0-3 key, value", with_view(0, head_dim=64), "128", "64", "layers[].head_dim"),
    ("row_bytes", "layers 0-3 key, value", with_view(0, row_bytes=128), "256 B", "128 B", "layers[].head_dim"),
    ("total_heads", "layers 0-3 key, value", with_view(0, total_heads=16), "8", "16", "layers[].kv_heads"),
    ("kv_factor", "layers 0-3", key_only(0), "2", "1", "layers[].kv_factor"),
    ("roles", "layer 2", with_extra_role, "none", "index_key", "extra buffers"),
    ("window", "layers 0-3", with_group(0, window=4096), "full", "4096 tokens", "layers[].window"),
    ("sink_tokens", "layers 0-3", with_group(0, sink_blocks=2), "0 tokens", "64 tokens", "layers[].sink_tokens"),
]


@pytest.mark.parametrize(
    ("name", "scope", "mutate", "ours", "theirs", "key"), TARGET_MISMATCHES, ids=[row[0] for row in TARGET_MISMATCHES]
)
def test_target_mismatch_is_refused_with_both_values(
    name: str, scope: str, mutate: Mutation, ours: str, theirs: str, key: str
) -> None:
    report = check(CONTEXT, mutate(GENERATION))
    row = next(row for row in rows(report, name) if row.scope == scope)
    assert not report.compatible
    assert (row.verdict, row.context, row.generation) == (Verdict.REFUSE, ours, theirs)
    assert f"is {ours} on context and {theirs} on generation; " in row.reason
    assert key in row.reason
    assert {name for name, verdict in failed(report) if verdict == "refuse"} == {name}


@pytest.mark.parametrize(
    ("name", "scope", "mutate", "ours", "theirs", "key"), TARGET_MISMATCHES, ids=[row[0] for row in TARGET_MISMATCHES]
)
def test_target_mismatch_is_refused_whichever_side_differs(
    name: str, scope: str, mutate: Mutation, ours: str, theirs: str, key: str
) -> None:
    del ours, theirs, key
    report = check(mutate(CONTEXT), GENERATION)
    assert (name, "refuse") in failed(report)
    assert {row.scope for row in report.refused} == {scope}


DRAFT_MISMATCHES = [
    ("draft_layers", "draft", with_card(num_draft_layers=3), "2", "3", "draft layers"),
    ("speculative", "draft", with_card(speculative=None), "present", "absent", "speculative section"),
    ("speculative_method", "draft", with_speculation(method="mtp"), "draft_model", "mtp", "speculative.method"),
    ("max_draft_tokens", "draft", with_speculation(max_draft_tokens=9), "7", "9", "speculative.max_draft_tokens"),
    ("block_width", "draft", with_speculation(block_width=8), "7", "8", "speculative.block_width"),
    ("tp", "draft", with_position(tp=4), "1", "4", "parallel.tp"),
    ("attention_dp", "draft", with_position(attention_dp=True), "false", "true", "parallel.attention_dp"),
    ("tokens_per_block", "draft", with_page(16), "32 tokens", "16 tokens", "tokens_per_block"),
    ("dtype", "draft layers 4-5 key, value", with_view(1, dtype="float16"), "bfloat16", "float16", "layers[].dtype"),
    ("head_dim", "draft layers 4-5 key, value", with_view(1, head_dim=32), "64", "32", "layers[].head_dim"),
    ("row_bytes", "draft layers 4-5 key, value", with_view(1, row_bytes=64), "128 B", "64 B", "layers[].dtype"),
    ("total_heads", "draft layers 4-5 key, value", with_view(1, total_heads=8), "4", "8", "layers[].kv_heads"),
    ("kv_factor", "draft layers 4-5", key_only(1), "2", "1", "layers[].kv_factor"),
    ("window", "draft layers 4-5", with_group(1, window=1024), "2048 tokens", "1024 tokens", "layers[].window"),
    ("sink_tokens", "draft layers 4-5", with_group(1, sink_blocks=0), "32 tokens", "0 tokens", "layers[].sink_tokens"),
]
SPLIT_NAMES = {"tp", "attention_dp", "tokens_per_block"}
draft_mismatches = pytest.mark.parametrize(
    ("name", "scope", "mutate", "ours", "theirs", "key"), DRAFT_MISMATCHES, ids=[row[0] for row in DRAFT_MISMATCHES]
)


@draft_mismatches
def test_draft_mismatch_keeps_draft_home_and_target_going(
    name: str, scope: str, mutate: Mutation, ours: str, theirs: str, key: str
) -> None:
    report = check(CONTEXT, mutate(GENERATION))
    row = next(row for row in rows(report, name) if row.scope == scope)
    assert report.compatible
    assert report.draft_kv is DraftKV.OFF
    assert (row.verdict, row.context, row.generation) == (Verdict.FALLBACK, ours, theirs)
    assert f"is {ours} on context and {theirs} on generation; draft KV does not travel, " in row.reason
    assert key in row.reason
    (decision,) = rows(report, "draft_kv")
    assert decision.verdict is Verdict.FALLBACK
    assert name in decision.reason
    assert ("per_view" in decision.reason) == (name in SPLIT_NAMES)
    assert ("per_view" in row.reason) == (name in SPLIT_NAMES)


@draft_mismatches
def test_required_draft_refuses_what_auto_tolerates(
    name: str, scope: str, mutate: Mutation, ours: str, theirs: str, key: str
) -> None:
    del ours, theirs
    require = with_card(draft_kv=DraftKVMode.REQUIRE)
    report = check(require(CONTEXT), require(mutate(GENERATION)))
    refused = {(row.name, row.scope): row.reason for row in report.refused}
    assert report.draft_kv is DraftKV.OFF
    assert key in refused[name, scope]
    assert "draft KV cannot travel" in refused["draft_kv", "draft"]
    assert name in refused["draft_kv", "draft"]


@draft_mismatches
def test_switched_off_draft_may_differ(
    name: str, scope: str, mutate: Mutation, ours: str, theirs: str, key: str
) -> None:
    del key
    off = with_card(draft_kv=DraftKVMode.OFF)
    report = check(off(CONTEXT), off(mutate(GENERATION)))
    row = next(row for row in rows(report, name) if row.scope == scope)
    assert report.compatible
    assert report.draft_kv is DraftKV.OFF
    assert (row.verdict, row.reason, row.context, row.generation) == (Verdict.OK, "", ours, theirs)
    assert {row.name for row in report.checks if row.verdict is not Verdict.OK} <= {"aux_draft_tokens"}


@draft_mismatches
def test_per_view_lifts_split_obstacles_and_no_others(
    name: str, scope: str, mutate: Mutation, ours: str, theirs: str, key: str
) -> None:
    del ours, theirs, key
    per_view = with_card(draft_kv=DraftKVMode.PER_VIEW)
    report = check(per_view(CONTEXT), per_view(mutate(GENERATION)))
    row = next(row for row in rows(report, name) if row.scope == scope)
    assert report.compatible
    lifted = name in SPLIT_NAMES
    assert report.draft_kv is (DraftKV.PER_VIEW if lifted else DraftKV.OFF)
    assert row.verdict is (Verdict.OK if lifted else Verdict.FALLBACK)
    assert rows(report, "draft_kv")[0].verdict is row.verdict


def test_everything_is_listed_at_once() -> None:
    bad = GENERATION
    for _, _, mutate, *_ in (*TARGET_MISMATCHES, *DRAFT_MISMATCHES):
        bad = mutate(bad)
    report = check(CONTEXT, with_card(speculative=None)(bad))
    names = {name for name, verdict in failed(report) if verdict == "refuse"}
    assert names >= {row[0] for row in TARGET_MISMATCHES} - {"tokens_per_block"}
    fallbacks = {name for name, verdict in failed(report) if verdict == "fallback"}
    assert fallbacks >= {row[0] for row in DRAFT_MISMATCHES}
    assert {row.name for row in report.checks} == ALL_NAMES


# situation -> draft_kv and whether the pair is compatible, per mode in the order of DraftKVMode
def same(card: RankCard) -> RankCard:
    return card


def incapable(card: RankCard) -> RankCard:
    return replace(card, capabilities=(), position=replace(card.position, tp=2))


def tp_and_window(card: RankCard) -> RankCard:
    return with_group(1, window=1024)(with_position(tp=2)(card))


SHARED, SPLIT, OFF = DraftKV.SHARED, DraftKV.PER_VIEW, DraftKV.OFF
DECISIONS: list[tuple[str, Mutation, Mutation, dict[str, tuple[DraftKV, str]]]] = [
    ("equal", same, same, {"auto": (SHARED, "ok"), "1": (SHARED, "ok"), "per_view": (SHARED, "ok")}),
    (
        "unequal tp",
        same,
        with_position(tp=2),
        {"auto": (OFF, "fallback"), "1": (OFF, "refuse"), "per_view": (SPLIT, "ok")},
    ),
    (
        "unequal tp, one side not able",
        same,
        incapable,
        {"auto": (OFF, "fallback"), "1": (OFF, "refuse"), "per_view": (OFF, "fallback")},
    ),
    (
        "unequal tp and window",
        same,
        tp_and_window,
        {"auto": (OFF, "fallback"), "1": (OFF, "refuse"), "per_view": (OFF, "fallback")},
    ),
    (
        "draft on generation only",
        without_draft,
        same,
        {"auto": (OFF, "fallback"), "1": (OFF, "refuse"), "per_view": (OFF, "fallback")},
    ),
    (
        "draft on context only",
        same,
        without_draft,
        {"auto": (OFF, "fallback"), "1": (OFF, "refuse"), "per_view": (OFF, "fallback")},
    ),
    ("no draft layers", without_draft, without_draft, {"auto": (OFF, "ok"), "1": (OFF, "ok"), "per_view": (OFF, "ok")}),
]


@pytest.mark.parametrize("mode", list(DraftKVMode))
@pytest.mark.parametrize(("ours", "theirs", "table"), [row[1:] for row in DECISIONS], ids=[row[0] for row in DECISIONS])
def test_draft_decision_table(
    mode: DraftKVMode, ours: Mutation, theirs: Mutation, table: dict[str, tuple[DraftKV, str]]
) -> None:
    ask = with_card(draft_kv=mode)
    report = check(ask(ours(CONTEXT)), ask(theirs(GENERATION)))
    draft_kv, verdict = table.get(mode.value, (OFF, "ok"))
    (row,) = rows(report, "draft_kv")
    assert (report.draft_kv, row.verdict.value) == (draft_kv, verdict)
    assert report.compatible == (verdict != "refuse")
    assert row.context.startswith(f"{mode.value}: {draft_kv.value} (")
    assert bool(row.reason) == (verdict != "ok")


def test_unequal_modes_are_refused_naming_both() -> None:
    report = check(CONTEXT, with_card(draft_kv=DraftKVMode.OFF)(GENERATION))
    (row,) = report.refused
    assert row.name == "draft_kv"
    assert row.reason.startswith("transfer.draft_kv is auto on context and 0 on generation; ")
    assert "UNIKV_SHARED_DRAFT_KV" in row.reason
    assert report.draft_kv is DraftKV.OFF


def test_unequal_modes_do_not_matter_without_draft_layers() -> None:
    report = check(without_draft(CONTEXT), with_card(draft_kv=DraftKVMode.OFF)(without_draft(GENERATION)))
    assert report.compatible


def test_missing_capability_is_named_where_it_was_needed() -> None:
    per_view = with_card(draft_kv=DraftKVMode.PER_VIEW)
    report = check(per_view(CONTEXT), per_view(incapable(GENERATION)))
    (row,) = rows(report, "capabilities")
    assert row.verdict is Verdict.FALLBACK
    assert "capability per_view_heads is per_view_heads on context and none on generation" in row.reason
    assert rows(check(CONTEXT, incapable(GENERATION)), "capabilities")[0].verdict is Verdict.OK


def test_no_hint_at_per_view_where_it_would_not_help() -> None:
    for generation in (incapable(GENERATION), tp_and_window(GENERATION)):
        report = check(CONTEXT, generation)
        assert [row.reason for row in report.checks if "per_view" in row.reason] == []


def test_model_free_speculation_on_one_side_is_no_mismatch() -> None:
    ngram = with_card(speculative=replace(SPECULATION, method="ngram", max_draft_tokens=4))
    report = check(ngram(without_draft(CONTEXT)), with_card(speculative=None)(without_draft(GENERATION)))
    assert report.compatible
    assert failed(report) == {("aux_draft_tokens", "fallback")}


def test_swapped_sides_are_refused() -> None:
    report = check(GENERATION, CONTEXT)
    (row,) = report.refused
    assert row.name == "sides"
    assert row.reason.startswith("sides is generation on context and context on generation; ")


@pytest.mark.parametrize(
    ("ours", "theirs", "word"),
    [(2, 1, "set context.parallel.cp: 1"), (2, 2, "only the generation side may split the sequence")],
)
def test_context_parallelism_of_the_context_side_is_refused_by_name(ours: int, theirs: int, word: str) -> None:
    report = check(with_position(cp=ours)(CONTEXT), with_position(cp=theirs)(GENERATION))
    (row,) = report.refused
    assert (row.name, row.context, row.generation) == ("cp", str(ours), str(theirs))
    assert word in row.reason


def test_context_parallelism_of_the_generation_side_wants_equal_pages() -> None:
    assert check(CONTEXT, with_position(cp=2)(GENERATION)).compatible
    (row,) = check(CONTEXT, with_page(16)(with_position(cp=2)(GENERATION))).refused
    assert row.name == "cp"
    assert "set the same tokens_per_block on both sides" in row.reason


def test_page_sizes_that_divide_are_fine_and_said_so() -> None:
    report = check(CONTEXT, with_page(16)(GENERATION))
    whole, draft = rows(report, "tokens_per_block")
    assert (whole.verdict, whole.context, whole.generation) == (Verdict.OK, "32 tokens (2 pages of 16)", "16 tokens")
    assert (draft.scope, draft.verdict) == ("draft", Verdict.FALLBACK)
    assert [row.name for row in report.checks if row.name == "sink_tokens" and row.verdict is not Verdict.OK] == []


def test_unequal_layouts_are_converted() -> None:
    report = check(CONTEXT, with_layout(KVLayout.NHD)(GENERATION))
    (row,) = rows(report, "kv_layout")
    assert (row.verdict, row.context, row.generation) == (Verdict.OK, "HND", "NHD")
    assert report.draft_kv is DraftKV.SHARED


def test_reuse_policy_is_shown_and_never_held_against_a_pair() -> None:
    report = check(CONTEXT, with_group(0, reuse_policy=ReusePolicy.PRIVATE)(GENERATION))
    target = next(row for row in rows(report, "reuse_policy") if row.scope == "layers 0-3")
    assert (target.verdict, target.context, target.generation) == (Verdict.OK, "required", "private")


def test_owner_mismatch_is_refused_even_with_draft_off() -> None:
    off = with_card(draft_kv=DraftKVMode.OFF)
    stolen = with_group(1, owner=LayerOwner.TARGET)(with_view(1, owner=LayerOwner.TARGET)(GENERATION))
    report = check(off(CONTEXT), off(stolen))
    (row,) = report.refused
    assert (row.name, row.scope, row.context, row.generation) == ("owner", "layers 4-5", "draft", "target")


def test_slot_counts_may_differ() -> None:
    pools = tuple(replace(pool, num_slots=37) for pool in GENERATION.pools)
    assert failed(check(CONTEXT, replace(GENERATION, pools=pools))) == set()


def test_layers_only_one_rank_holds_are_not_compared() -> None:
    stage = replace(GENERATION, views=(replace(GENERATION.views[0], entries=GENERATION.views[0].entries[:4]),))
    report = check(CONTEXT, stage)
    assert report.compatible
    assert [row.scope for row in rows(report, "dtype")] == ["layers 0-1 key, value"]


def test_equal_findings_share_a_row_and_others_do_not() -> None:
    odd = GENERATION.views[0]
    plain = replace(odd, entries=tuple(e for e in odd.entries if (e.layer_id, e.role) != (1, VALUE)))
    other = replace(odd, dtype="float16", entries=odd.entries[3:4])
    report = check(CONTEXT, replace(GENERATION, views=(plain, other, GENERATION.views[1])))
    scopes = {row.scope: row.verdict for row in rows(report, "dtype")}
    assert scopes == {
        "layers 0, 2-3 key, value": Verdict.OK,
        "layer 1 key": Verdict.OK,
        "layer 1 value": Verdict.REFUSE,
        "draft layers 4-5 key, value": Verdict.OK,
    }


def test_scales_are_compared_with_their_own_geometry() -> None:
    def scales(card: RankCard, row_bytes: int) -> RankCard:
        view = replace(
            card.views[0],
            pool_index=1,
            roles=(KEY_BLOCK_SCALE,),
            dtype="float8_e4m3fn",
            row_bytes=row_bytes,
            entries=(ViewEntry(layer_id=LayerId(0), role=KEY_BLOCK_SCALE, offset_bytes=0),),
        )
        pool = replace(card.pools[0], pool_index=1)
        return replace(card, views=(*card.views, view), pools=(*card.pools, pool))

    assert check(scales(CONTEXT, 8), scales(GENERATION, 8)).compatible
    (row,) = check(scales(CONTEXT, 8), scales(GENERATION, 4)).refused
    assert (row.name, row.scope) == ("row_bytes", "layer 0 key_block_scale")


@pytest.mark.parametrize(
    ("mutate", "problem"),
    [
        (with_view(0, group_id=GroupId(9)), "names group 9, which the card lacks"),
        (with_view(0, pool_index=3), "names pool 3 of group 0, which the card lacks"),
        (with_view(0, tokens_per_block=64), "has 64 tokens a block, the card 32"),
        (with_view(0, kv_layout=KVLayout.NHD), "has layout NHD, the card HND"),
        (with_view(0, heads=Span(4, 12)), "holds heads up to 12 of 8"),
        (with_group(0, owner=LayerOwner.DRAFT), "is of owner target, its group of owner draft"),
        (lambda card: replace(card, views=(*card.views, card.views[0])), "view 2 repeats layer 0 key"),
        (
            lambda card: replace(card, views=(*card.views, replace(card.views[0], group_id=GroupId(1)))),
            "view 2 puts layer 0 into a second group",
        ),
        (with_card(tokens_per_block=0), "tokens_per_block is 0"),
    ],
)
def test_card_that_contradicts_itself_is_refused(mutate: Mutation, problem: str) -> None:
    report = check(CONTEXT, mutate(GENERATION))
    (row,) = rows(report, "card")
    assert row.verdict is Verdict.REFUSE
    assert row.context == "consistent"
    assert problem in row.generation


@pytest.mark.parametrize(
    ("host", "export", "device", "obstacle"),
    [
        (HOST, True, "cpu", ""),
        (replace(HOST, pid=200), True, "cpu", ""),
        (replace(HOST, boot_id="other"), True, "cpu", "different hosts"),
        (replace(HOST, pid_namespace="1"), True, "cpu", "different process namespaces"),
        (HOST, True, "cuda:1", "different kinds of device"),
        (HOST, False, "cpu", "does not export its memory"),
    ],
)
@pytest.mark.parametrize("path", list(PathKind))
def test_direct_path(host: HostIdentity, export: bool, device: str, obstacle: str, path: PathKind) -> None:
    context = replace(CONTEXT, host=HOST, path=path)
    generation = exported(host)(GENERATION) if export else replace(GENERATION, host=host)
    (row,) = rows(check(context, replace(generation, path=path, device=device)), "path_direct")
    harm = {PathKind.DIRECT: Verdict.REFUSE, PathKind.AUTO: Verdict.FALLBACK}.get(path, Verdict.OK)
    assert row.verdict is (harm if obstacle else Verdict.OK)
    assert obstacle in row.reason or row.verdict is Verdict.OK


def test_direct_path_is_not_checked_in_a_dry_run() -> None:
    direct = with_card(path=PathKind.DIRECT)
    (row,) = rows(check(direct(CONTEXT), direct(GENERATION)), "path_direct")
    assert (row.verdict, row.context, row.generation) == (Verdict.OK, "not checked (dry run)", "not checked (dry run)")


def test_draft_tokens_without_room_are_announced() -> None:
    report = check(CONTEXT, with_speculation(max_draft_tokens=4)(GENERATION))
    (row,) = rows(report, "aux_draft_tokens")
    assert (row.verdict, row.context, row.generation) == (Verdict.FALLBACK, "up to 7", "room for 4")
    assert "dropped" in row.reason


def test_require_compatible_raises_every_refusal() -> None:
    require_compatible(check(CONTEXT, GENERATION))
    report = check(CONTEXT, with_card(checksum="page")(with_view(0, dtype="float16")(GENERATION)))
    with pytest.raises(IncompatiblePeerError) as caught:
        require_compatible(report)
    assert len(caught.value.mismatches) == 2
    assert "refused by 2 check(s) of the gate; align the two sides" in str(caught.value)
    assert "checksum [instance]: checksum is off on context and page on generation" in str(caught.value)
    assert "dtype [layers 0-3 key, value]: layers 0-3 key, value: dtype is bfloat16 on context" in str(caught.value)


def test_report_as_text() -> None:
    text = format_report(check(CONTEXT, with_card(checksum="page")(GENERATION)))
    lines = text.splitlines()
    assert lines[0].startswith("gate: refused by 1 of ")
    assert lines[0].endswith("; draft KV shared")
    at = next(i for i, line in enumerate(lines) if "checksum [instance]" in line)
    assert lines[at] == "  refuse    checksum [instance]: context off, generation page"
    assert lines[at + 1].strip().startswith("checksum is off on context and page on generation; ")
    assert format_report(check(CONTEXT, GENERATION)).startswith("gate: passed ")


def test_rows_are_plain_text() -> None:
    for row in check(CONTEXT, GENERATION).checks:
        assert json.loads(json.dumps([row.name, row.scope, row.context, row.generation, row.verdict, row.reason]))


MUTATIONS: list[Mutation] = [
    *(row[2] for row in TARGET_MISMATCHES),
    *(row[2] for row in DRAFT_MISMATCHES),
    with_layout(KVLayout.NHD),
    with_page(16),
    with_page(128),
    without_draft,
    incapable,
    exported(),
    with_card(draft_kv=DraftKVMode.PER_VIEW),
    with_card(draft_kv=DraftKVMode.REQUIRE),
    with_card(draft_kv=DraftKVMode.OFF),
    with_card(tokens_per_block=0),
    with_card(views=()),
    with_card(groups=()),
    with_card(path=PathKind.DIRECT),
    with_card(device=""),
]


@st.composite
def cards(draw: st.DrawFn, side: Side) -> RankCard:
    result = card(side)
    for mutate in draw(st.lists(st.sampled_from(MUTATIONS), max_size=6)):
        # Some mutations need views an earlier one took away; then the card simply stays as it is.
        try:
            result = mutate(result)
        except (IndexError, ZeroDivisionError):
            continue
    return result


@given(cards(Side.CONTEXT), cards(Side.GENERATION))
def test_gate_is_total_and_its_report_coherent(context: RankCard, generation: RankCard) -> None:
    report = check(context, generation)
    keys = [(row.name, row.scope, row.context, row.generation) for row in report.checks]
    assert len(keys) == len(set(keys))
    for row in report.checks:
        assert (row.verdict is Verdict.OK) == (row.reason == "")
        assert row.verdict is Verdict.OK or _both_values(row) in row.reason
    assert report.compatible == (not report.refused)
    assert format_report(report)


def _both_values(row: GateCheck) -> str:
    """Return what a reason must contain; the decision row compares the modes that open its texts."""
    values = (row.context, row.generation)
    ours, theirs = (value.partition(":")[0] for value in values) if row.name == "draft_kv" else values
    return f" is {ours} on context and {theirs} on generation; "


@given(cards(Side.CONTEXT), cards(Side.GENERATION))
def test_verdicts_do_not_depend_on_who_is_context(context: RankCard, generation: RankCard) -> None:
    one_way = check(context, generation)
    other_way = check(replace(generation, side=Side.CONTEXT), replace(context, side=Side.GENERATION))
    directed = {"sides", "cp", "aux_draft_tokens", "path_direct"}
    assert one_way.draft_kv is other_way.draft_kv
    assert {
        (r.name, r.scope, r.context, r.generation, r.verdict) for r in one_way.checks if r.name not in directed
    } == {(r.name, r.scope, r.generation, r.context, r.verdict) for r in other_way.checks if r.name not in directed}


@given(cards(Side.CONTEXT))
def test_sound_card_agrees_with_its_mirror(context: RankCard) -> None:
    report = check(context, replace(context, side=Side.GENERATION))
    bad = {row.name for row in report.refused}
    allowed = {"card", "cp", "path_direct", "tokens_per_block" if context.tokens_per_block < 1 else "card"}
    if context.draft_kv is DraftKVMode.REQUIRE and context.speculative is None:
        allowed |= {"speculative", "draft_kv"}
    assert bad <= allowed


@given(cards(Side.CONTEXT), cards(Side.GENERATION))
def test_pairs_the_gate_lets_through_can_be_compiled(context: RankCard, generation: RankCard) -> None:
    report = check(context, generation)
    if report.compatible:
        program = compile_program(context, generation, with_draft=report.draft_kv is not DraftKV.OFF)
        drafts = {piece.owner for piece in program.slices} & {LayerOwner.DRAFT}
        assert not drafts or report.draft_kv is not DraftKV.OFF
