"""Whole instances of many shapes: who is asked, who sends, which bytes arrive, and that everybody hears of the end."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import pytest

from transfer import ContextEndpoint, GenerationEndpoint, TransferOptions
from transfer.copy_host import HostCopier
from transfer.generation_endpoint import ContextInstance
from transfer.hello import DraftKVMode, ParallelPosition, PathKind, Side
from transfer.link_memory import MemoryLink, MemoryNetwork
from transfer.outcome import TransferHandle
from transfer.testing.ranks import SmallRank
from unikv.errors import IncompatiblePeerError, LinkBrokenError, LocalProtocolError
from unikv.ids import GroupId, RequestId

TOKENS = 45  # 12 blocks; the drafter's window of 24 tokens leaves blocks 5 to 11
BLOCK_BYTES = 4 * 8 * 2
"""One head of one of K and V of the target layer in one block."""
DRAFT_BYTES = 7 * 2 * 4 * 16 * 4
PATIENCE_S = 10.0

Tables = dict[GroupId, Any]


@dataclass
class Member:
    """One rank with its endpoint."""

    rank: SmallRank
    link: MemoryLink
    endpoint: Any

    def publish(self, number: int) -> TransferHandle:
        table = self.rank.table(TOKENS, 1 + 13 * (number % 4))
        self.rank.fill(table, TOKENS)
        return self.endpoint.publish(RequestId(number), table, TOKENS)

    def open_requests(self) -> int:
        return len(list(self.endpoint._engine._requests))


class Instances:
    """Makes instances on one network and closes them."""

    def __init__(self, path: PathKind) -> None:
        self.path, self.network, self.stack = path, MemoryNetwork(), ExitStack()

    def start(self, side: Side, ranks: Sequence[int] | None = None, *, name: str = "", **fields: Any) -> list[Member]:
        """Start an instance, or only some `ranks` of it. Fields are parallel sizes, or what the card says."""
        shape = {key: fields.pop(key) for key in ("tp", "pp", "cp", "attention_dp") if key in fields}
        options = TransferOptions(chunk_bytes=256, timeout_s=fields.pop("timeout_s", PATIENCE_S))
        world = ParallelPosition(**shape)
        places = [
            ParallelPosition(tp_rank=tp_rank, pp_rank=pp_rank, cp_rank=cp_rank, **shape)
            for pp_rank in range(world.pp)
            for tp_rank in range(world.tp)
            for cp_rank in range(world.cp)
        ]
        kind = ContextEndpoint if side is Side.CONTEXT else GenerationEndpoint
        members = []
        for place in places if ranks is None else [places[rank] for rank in ranks]:
            link = self.network.link()
            rank = SmallRank(side, link.address, path=self.path, position=place, instance=name or f"{side}-0", **fields)
            self.stack.callback(rank.close)
            endpoint = kind(rank.card, link=link, regions=rank.regions, copier=HostCopier(), options=options)
            self.stack.callback(endpoint.close)
            members.append(Member(rank, link, endpoint))
        return members


@pytest.fixture(params=[PathKind.DIRECT, PathKind.ZMQ])
def instances(request: pytest.FixtureRequest) -> Iterator[Instances]:
    made = Instances(request.param)
    with made.stack:
        yield made


def connect(generation: Sequence[Member], context: Sequence[Member]) -> list[ContextInstance]:
    return [member.endpoint.connect([other.rank.card.address for other in context]) for member in generation]


@dataclass
class Fetch:
    """What one generation rank fetches."""

    member: Member
    table: Tables
    handle: TransferHandle

    def assert_arrived(self) -> None:
        outcome = self.handle.wait(PATIENCE_S)
        assert outcome is not None and outcome.ok, outcome
        assert self.handle.wait_quiet(PATIENCE_S)
        assert self.member.rank.wrong_rows(self.table, TOKENS) == 0

    def bytes_by_peer(self) -> dict[int, int]:
        assert self.handle.outcome is not None
        return {leg.peer: leg.bytes - leg.draft_bytes for leg in self.handle.outcome.legs}


def fetch(
    members: Sequence[Member], known: Sequence[ContextInstance], number: int, data_rank: int | None = None
) -> list[Fetch]:
    found = []
    for member, instance in zip(members, known, strict=True):
        table = member.rank.table(TOKENS, 1 + 13 * (number % 4))
        handle = member.endpoint.receive(RequestId(number), table, TOKENS, instance=instance, data_rank=data_rank)
        found.append(Fetch(member, table, handle))
    return found


def assert_ended_well(handles: Sequence[TransferHandle]) -> None:
    for handle in handles:
        outcome = handle.wait(PATIENCE_S)
        assert outcome is not None and outcome.ok, outcome
        assert handle.wait_quiet(PATIENCE_S)


# --- ranks that have nothing to send ---------------------------------------------------------------------------------


def test_context_ranks_without_bytes_hear_that_a_request_is_over(instances: Instances) -> None:
    """Four ranks, two heads, each on two ranks: one of two sends, and all are told."""
    contexts = instances.start(Side.CONTEXT, tp=4)
    generations = instances.start(Side.GENERATION, tp=1)
    [fetched] = fetch(generations, connect(generations, contexts), 1)
    sent = [member.publish(1) for member in contexts]
    assert_ended_well(sent)
    fetched.assert_arrived()
    assert fetched.bytes_by_peer() == {0: 2 * 12 * BLOCK_BYTES, 1: 0, 2: 2 * 12 * BLOCK_BYTES, 3: 0}
    assert [member.open_requests() for member in [*contexts, *generations]] == [0] * 5


# --- attention data parallelism --------------------------------------------------------------------------------------


@pytest.mark.parametrize("data_rank", [2, 3])
def test_generation_data_ranks_are_served_by_replicas_in_turn(instances: Instances, data_rank: int) -> None:
    """Eight context ranks hold four heads twice; data rank d is served by replica d % 2 of each head."""
    contexts = instances.start(Side.CONTEXT, tp=8, target_heads=4)
    # The caller routes a request to one data rank; the others need not even be there.
    [member] = instances.start(Side.GENERATION, [data_rank], tp=8, attention_dp=True, target_heads=4)
    sent = [context.publish(1) for context in contexts]
    [fetched] = fetch([member], connect([member], contexts), 1)
    fetched.assert_arrived()
    assert_ended_well(sent)
    share = 2 * 12 * BLOCK_BYTES
    assert fetched.bytes_by_peer() == {rank: share if rank % 2 == data_rank % 2 else 0 for rank in range(8)}


@pytest.mark.parametrize("told", [True, False])
@pytest.mark.parametrize("ask_first", [True, False])
def test_the_context_data_rank_with_the_request_serves_all_heads(
    instances: Instances, told: bool, ask_first: bool
) -> None:
    """Four context ranks with all eight heads each serve four generation ranks with two; who is not told asks all."""
    contexts = instances.start(Side.CONTEXT, tp=4, attention_dp=True, target_heads=8)
    generations = instances.start(Side.GENERATION, tp=4, target_heads=8)
    known = connect(generations, contexts)
    for number, holder in ((1, 2), (2, 0)):
        sent = [] if ask_first else [contexts[holder].publish(number)]
        fetched = fetch(generations, known, number, holder if told else None)
        sent += [contexts[holder].publish(number)] if ask_first else []
        assert_ended_well(sent)
        for one in fetched:
            one.assert_arrived()
            assert one.bytes_by_peer() == {holder: 2 * 2 * 12 * BLOCK_BYTES}
            assert one.handle.outcome is not None and one.handle.outcome.legs[0].draft_bytes in (DRAFT_BYTES, 0)
    assert [member.open_requests() for member in [*contexts, *generations]] == [0] * 8


def test_both_sides_split_requests_and_not_heads(instances: Instances) -> None:
    contexts = instances.start(Side.CONTEXT, tp=2, attention_dp=True)
    generations = instances.start(Side.GENERATION, tp=2, attention_dp=True)
    known = connect(generations, contexts)
    for number, (source, target) in enumerate([(0, 0), (0, 1), (1, 0), (1, 1)]):
        sent = contexts[source].publish(number)
        [fetched] = fetch([generations[target]], [known[target]], number)
        fetched.assert_arrived()
        assert_ended_well([sent])


def test_a_context_rank_that_never_has_the_request_keeps_nothing(instances: Instances) -> None:
    contexts = instances.start(Side.CONTEXT, tp=2, attention_dp=True)
    generations = instances.start(Side.GENERATION, tp=1)
    known = connect(generations, contexts)
    for number in range(200):
        sent = contexts[1].publish(number)
        [fetched] = fetch(generations, known, number)
        fetched.assert_arrived()
        assert_ended_well([sent])
    idle = contexts[0].endpoint._engine._requests
    assert (len(list(idle)), len(idle._ended)) == (0, 0)


def test_a_failed_prefill_is_heard_by_who_asked_everybody(instances: Instances) -> None:
    contexts = instances.start(Side.CONTEXT, tp=2, attention_dp=True)
    generations = instances.start(Side.GENERATION, tp=1)
    [fetched] = fetch(generations, connect(generations, contexts), 1)
    contexts[1].endpoint.fail(RequestId(1), "the prompt is too long")
    outcome = fetched.handle.wait(PATIENCE_S)
    assert outcome is not None and "the prompt is too long" in outcome.reason
    assert fetched.handle.wait_quiet(PATIENCE_S)


def test_a_cancel_reaches_whoever_will_have_the_request(instances: Instances) -> None:
    contexts = instances.start(Side.CONTEXT, tp=2, attention_dp=True)
    generations = instances.start(Side.GENERATION, tp=1)
    [fetched] = fetch(generations, connect(generations, contexts), 1)
    generations[0].endpoint.cancel(RequestId(1), "the user went away")
    assert fetched.handle.wait_quiet(PATIENCE_S)
    for member in contexts:
        handle = member.publish(1)
        assert handle.wait_quiet(PATIENCE_S)
        assert handle.outcome is not None and "the user went away" in handle.outcome.reason


def test_two_data_ranks_with_one_request_are_an_error(instances: Instances) -> None:
    contexts = instances.start(Side.CONTEXT, tp=2, attention_dp=True)
    generations = instances.start(Side.GENERATION, tp=1)
    known = connect(generations, contexts)
    sent = [member.publish(1) for member in contexts]
    [fetched] = fetch(generations, known, 1)
    outcome = fetched.handle.wait(PATIENCE_S)
    assert outcome is not None
    assert fetched.handle.wait_quiet(PATIENCE_S)
    assert all(handle.wait_quiet(PATIENCE_S) for handle in sent)
    if not outcome.ok:  # one of them may have been stopped before it sent anything
        assert "both sent it; route a request to one of them" in outcome.reason


def test_a_lost_data_rank_fails_only_requests_that_may_be_its_own(instances: Instances) -> None:
    contexts = instances.start(Side.CONTEXT, tp=2, attention_dp=True)
    generations = instances.start(Side.GENERATION, tp=1)
    known = connect(generations, contexts)
    [told] = fetch(generations, known, 1, 0)
    [asked] = fetch(generations, known, 2)
    contexts[1].endpoint.close("gone fishing")
    outcome = asked.handle.wait(PATIENCE_S)
    assert outcome is not None and "gone fishing" in outcome.reason
    assert asked.handle.wait_quiet(PATIENCE_S)
    sent = contexts[0].publish(1)
    told.assert_arrived()
    assert_ended_well([sent])


def test_a_data_rank_that_does_not_exist_is_refused(instances: Instances) -> None:
    contexts = instances.start(Side.CONTEXT, tp=2, attention_dp=True)
    generations = instances.start(Side.GENERATION, tp=1)
    known = connect(generations, contexts)
    with pytest.raises(LocalProtocolError, match=r"context instance context-0: data_rank is 2, expected in \[0, 2\)"):
        fetch(generations, known, 1, 2)


@pytest.mark.parametrize(
    ("mode", "verdict", "travels"), [("auto", "off", False), ("per_view", "per_view", True), ("0", "off", False)]
)
def test_unequal_attention_data_parallelism_keeps_draft_kv_home_unless_cut_per_view(
    instances: Instances, mode: str, verdict: str, travels: bool
) -> None:
    draft_kv = DraftKVMode(mode)
    contexts = instances.start(Side.CONTEXT, tp=2, attention_dp=True, draft_kv=draft_kv)
    generations = instances.start(Side.GENERATION, tp=2, draft_kv=draft_kv)
    known = connect(generations, contexts)
    assert {instance.draft_kv.value for instance in known} == {verdict}
    sent = contexts[1].publish(1)
    fetched = fetch(generations, known, 1, 1)
    assert_ended_well([sent, *(one.handle for one in fetched)])
    drafts = [leg.draft_bytes for one in fetched for leg in one.handle.outcome.legs]  # type: ignore[union-attr]
    assert drafts == [DRAFT_BYTES if travels else 0] * 2


def test_draft_kv_that_must_travel_refuses_unequal_attention_data_parallelism(instances: Instances) -> None:
    contexts = instances.start(Side.CONTEXT, tp=2, attention_dp=True, draft_kv=DraftKVMode.REQUIRE)
    generations = instances.start(Side.GENERATION, tp=2, draft_kv=DraftKVMode.REQUIRE)
    with pytest.raises(IncompatiblePeerError, match=r"attention_dp \[draft\].*parallel.attention_dp on both sides"):
        connect(generations, contexts)


# --- context parallelism of the generation side ----------------------------------------------------------------------


@pytest.mark.parametrize("shape", [{"cp": 2}, {"cp": 3}, {"tp": 2, "cp": 2}, {"cp": 16}], ids=str)
@pytest.mark.parametrize("context_tp", [1, 2])
def test_context_parallel_ranks_get_the_blocks_dealt_to_them(
    instances: Instances, shape: dict[str, int], context_tp: int
) -> None:
    contexts = instances.start(Side.CONTEXT, tp=context_tp)
    generations = instances.start(Side.GENERATION, **shape)
    known = connect(generations, contexts)
    sent = [member.publish(1) for member in contexts]
    fetched = fetch(generations, known, 1)
    assert_ended_well(sent)
    for one in fetched:
        one.assert_arrived()
        position = one.member.rank.card.position
        blocks = len(range(position.cp_rank, 12, position.cp))
        assert sum(one.bytes_by_peer().values()) == 2 * blocks * BLOCK_BYTES * (2 // position.tp)
    assert {len(row) for one in fetched for row in one.table.values()} <= {12 // shape["cp"], -(-12 // shape["cp"])}


def test_context_parallelism_of_the_context_side_is_refused_by_name(instances: Instances) -> None:
    contexts = instances.start(Side.CONTEXT, [0], cp=2)
    generations = instances.start(Side.GENERATION, tp=1)
    with pytest.raises(IncompatiblePeerError, match=r"cp \[instance\]: cp is 2 on context .* set context.parallel.cp"):
        connect(generations, contexts)


# --- several instances -----------------------------------------------------------------------------------------------


def test_requests_go_to_any_of_several_instances_on_both_sides(instances: Instances) -> None:
    """Two context and two generation instances of different shapes, every pair of them in use at the same time."""
    shapes = ({"tp": 2}, {"tp": 1})
    contexts = [instances.start(Side.CONTEXT, name=f"context-{n}", **shape) for n, shape in enumerate(shapes)]
    generations = [instances.start(Side.GENERATION, name=f"generation-{n}", **shape) for n, shape in enumerate(shapes)]
    known = [[connect(generation, context) for context in contexts] for generation in generations]
    sent, fetched = [], []
    for number, (source, target) in enumerate([(0, 0), (1, 0), (0, 1), (1, 1)]):
        sent += [member.publish(number) for member in contexts[source]]
        fetched += fetch(generations[target], known[target][source], number)
    assert_ended_well(sent)
    for one in fetched:
        one.assert_arrived()


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")  # of the lost one
@pytest.mark.parametrize("orderly", [True, False])
def test_a_lost_context_instance_does_not_disturb_the_other(instances: Instances, orderly: bool) -> None:
    contexts = [instances.start(Side.CONTEXT, name=f"context-{n}", tp=2) for n in range(2)]
    generations = instances.start(Side.GENERATION, tp=1)
    known = [connect(generations, context) for context in contexts]
    [lost], [kept] = fetch(generations, known[0], 1), fetch(generations, known[1], 2)
    for member in contexts[0]:
        if orderly:
            member.endpoint.close("gone fishing")
        else:
            member.link.abort()
    outcome = lost.handle.wait(PATIENCE_S)
    assert outcome is not None and ("gone fishing" if orderly else "is gone") in outcome.reason
    sent = [member.publish(2) for member in contexts[1]]
    kept.assert_arrived()
    assert_ended_well(sent)
    with pytest.raises(LinkBrokenError, match="gone fishing" if orderly else "is gone"):
        fetch(generations, known[0], 3)
    sent = [member.publish(4) for member in contexts[1]]
    fetch(generations, known[1], 4)[0].assert_arrived()
    assert_ended_well(sent)
    generations[0].endpoint.close(drain_s=0.1)  # pages that a process we cannot see dead may write stay in doubt


def test_a_lost_generation_instance_does_not_disturb_the_other(instances: Instances) -> None:
    contexts = instances.start(Side.CONTEXT, tp=2)
    generations = [instances.start(Side.GENERATION, name=f"generation-{n}", tp=1) for n in range(2)]
    known = [connect(generation, contexts) for generation in generations]
    [lost], [kept] = fetch(generations[0], known[0], 1), fetch(generations[1], known[1], 2)
    generations[0][0].endpoint.close("gone fishing")
    assert lost.handle.wait_quiet(PATIENCE_S)
    failed = [member.publish(1) for member in contexts]
    sent = [member.publish(2) for member in contexts]
    kept.assert_arrived()
    assert_ended_well(sent)
    assert all(handle.wait_quiet(PATIENCE_S) and not handle.outcome.ok for handle in failed)  # type: ignore[union-attr]
