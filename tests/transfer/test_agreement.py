"""What is worked out once for all pairs of a kind is what every pair would find for itself."""

from dataclasses import fields, replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from transfer.agreement import judge, plan_of, shared
from transfer.gate import check
from transfer.gate_report import DraftKV
from transfer.hello import DraftKVMode, HostIdentity, ParallelPosition, PathKind, RankCard, Side
from transfer.plan import compile_program, scatter_lanes
from transfer.testing.ranks import SmallRank
from unikv.layer_spec import KVLayout


def card(side: Side, tp: int = 1, tp_rank: int = 0, **facts: Any) -> RankCard:
    rank = SmallRank(side, f"memory://{side}{tp_rank}", position=ParallelPosition(tp=tp, tp_rank=tp_rank), **facts)
    try:
        return rank.card
    finally:
        rank.close()


CONTEXT, GENERATION = card(Side.CONTEXT), card(Side.GENERATION)
OTHER_FACTS: dict[str, Any] = {
    "tokens_per_block": 8,
    "kv_layout": KVLayout.NHD,
    "num_target_layers": 7,
    "num_draft_layers": 9,
    "speculative": None,
    "draft_kv": list(DraftKVMode)[-1],
    "path": PathKind.ZMQ,
    "checksum": "page",
    "layer_bands": 2,
    "capabilities": (),
    "device": "cuda:0",
    "reach": ("a device",),
    "protocol_version": 99,
    "position": ParallelPosition(tp=2, tp_rank=1),
    "host": HostIdentity(hostname="h", boot_id="b", pid_namespace="n", pid=1),
    "groups": (),
    "views": (),
    "pools": (),
    "storages": (),
}
SAME_KIND: dict[str, Any] = {"incarnation": "cd" * 8, "instance": "another", "address": "memory://elsewhere"}


def test_every_fact_of_a_card_is_in_one_of_the_two_lists() -> None:
    assert {field.name for field in fields(RankCard)} - {"side"} == set(OTHER_FACTS) | set(SAME_KIND)


@pytest.mark.parametrize("name", OTHER_FACTS)
@pytest.mark.parametrize("side", list(Side))
def test_a_card_that_differs_in_a_fact_is_judged_anew(name: str, side: Side) -> None:
    judge(CONTEXT, GENERATION)
    changed = {Side.CONTEXT: CONTEXT, Side.GENERATION: GENERATION}
    changed[side] = replace(changed[side], **{name: OTHER_FACTS[name]})
    pair = changed[Side.CONTEXT], changed[Side.GENERATION]
    assert judge(*pair) == check(*pair)


@given(st.dictionaries(st.sampled_from(sorted(SAME_KIND)), st.text(max_size=5)))
def test_processes_of_a_kind_share_report_plan_and_large_parts(differences: dict[str, str]) -> None:
    twin = replace(GENERATION, **differences)
    assert judge(CONTEXT, twin) is judge(CONTEXT, GENERATION)
    report = judge(CONTEXT, GENERATION)
    assert plan_of(CONTEXT, twin, report) is plan_of(CONTEXT, GENERATION, report)
    kept = shared(twin)
    assert kept == twin and kept.views is shared(GENERATION).views and kept.groups is shared(GENERATION).groups


def test_allocations_of_a_kind_are_alike_wherever_they_are() -> None:
    first, *others = GENERATION.storages
    assert first.export is not None
    elsewhere = replace(first.export, pid=1, fd=2, inode=3, handle=b"h", offset_bytes=64)
    twin = replace(GENERATION, storages=(replace(first, export=elsewhere), *others))
    assert judge(CONTEXT, twin) is judge(CONTEXT, GENERATION) and shared(twin).storages == twin.storages
    another_device = replace(first, export=replace(first.export, device="other"))
    assert judge(CONTEXT, replace(GENERATION, storages=(another_device, *others))) is not judge(CONTEXT, GENERATION)


@pytest.mark.parametrize("with_draft", [True, False])
@pytest.mark.parametrize("tp_rank", [0, 1])
def test_a_plan_is_the_program_with_its_lanes_sorted(tp_rank: int, with_draft: bool) -> None:
    generation = card(Side.GENERATION, tp=2, tp_rank=tp_rank)
    report = judge(CONTEXT, generation)
    assert report.draft_kv is not DraftKV.OFF
    plan = plan_of(CONTEXT, generation, report if with_draft else replace(report, draft_kv=DraftKV.OFF))
    assert plan.program == compile_program(CONTEXT, generation, with_draft=with_draft)
    assert [lane for lanes in plan.lanes for lane in lanes] == sorted(plan.program.lanes, key=lambda lane: lane.pair)
    assert plan.scatter == tuple(scatter_lanes(plan.program, number) for number in range(len(plan.program.pairs)))
