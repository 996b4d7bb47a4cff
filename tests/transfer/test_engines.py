"""Both engines stepped by hand over in-memory links: time, cancels, forgeries, lost peers, copies that fail."""

from __future__ import annotations

import logging
import random
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest

from transfer import context_moves, context_requests
from transfer.context_door import MAX_STRANGERS
from transfer.context_engine import ContextEngine
from transfer.copier import CopyJob, CopyTicket
from transfer.copy_host import HostCopier
from transfer.exchange import MAX_REASON_BYTES, REMIND_S, Exchange
from transfer.generation_engine import GenerationEngine
from transfer.generation_peers import Registration
from transfer.hello import CAPABILITY_NIXL, ParallelPosition, PathKind, RankCard, Side
from transfer.link import PeerGone
from transfer.link_memory import MemoryLink, MemoryNetwork
from transfer.messages import (
    Ask,
    AuxData,
    Cancel,
    CancelAck,
    Chunk,
    Credit,
    Done,
    Failed,
    Goodbye,
    GroupTable,
    Hello,
    HelloAck,
    Message,
    PairAccount,
    Reregister,
    StageTimes,
)
from transfer.nixl_agent import why_no_nixl
from transfer.options import TransferOptions
from transfer.outcome import TransferHandle
from transfer.readiness import ReadinessManager
from transfer.testing.ranks import GatedCopier, SmallRank
from unikv.errors import CopyError, InternalError, LinkBrokenError, LocalProtocolError
from unikv.ids import NO_PAGE, GroupId, LayerId, RequestId

TOKENS = 40  # 10 target pages and 6 live draft pages: 16 chunks of one page
TIMEOUT_S = 30.0
QUIET_ROUNDS = 10
PATIENCE_S = 10.0  # on the real clock, for carriers that work by themselves
NO_TIME = StageTimes(queue_s=0.0, plan_s=0.0, move_s=0.0)


class Clock:
    """A clock that a test sets."""

    def __init__(self) -> None:
        self.now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


@dataclass
class Node:
    """One engine with its rank, link and clock."""

    engine: Any
    rank: SmallRank
    link: MemoryLink
    clock: Clock

    @property
    def address(self) -> str:
        return self.rank.card.address

    @property
    def refused(self) -> dict[str, int]:
        return dict(self.engine._exchange.refused)

    def turn(self) -> bool:
        return bool(self.engine.turn(0.0))


class World:
    """A network of engines that run only when a test lets them."""

    def __init__(self, path: PathKind) -> None:
        self.path = path
        self.network = MemoryNetwork()
        self.nodes: list[Node] = []
        self.spare: list[SmallRank] = []

    def context(self, copier: HostCopier | None = None, **fields: Any) -> Node:
        return self._node(ContextEngine, Side.CONTEXT, copier, **fields)

    def generation(self, copier: HostCopier | None = None, **fields: Any) -> Node:
        return self._node(GenerationEngine, Side.GENERATION, copier, **fields)

    def _node(
        self,
        kind: type,
        side: Side,
        copier: HostCopier | None,
        *,
        address: str | None = None,
        edit: Callable[[RankCard], RankCard] = lambda card: card,
        options: dict[str, Any] | None = None,
        **fields: Any,
    ) -> Node:
        link, clock = self.network.link(address), Clock()
        rank = SmallRank(side, link.address, path=self.path, **fields)
        if self.path is PathKind.NIXL:
            rank.card = replace(rank.card, capabilities=(*rank.card.capabilities, CAPABILITY_NIXL))
        rank.card = edit(rank.card)
        settings = TransferOptions(**({"chunk_bytes": 1, "timeout_s": TIMEOUT_S} | (options or {})))
        engine = kind(link, rank.card, rank.regions, copier or HostCopier(), settings, clock)
        self.nodes.append(Node(engine, rank, link, clock))
        return self.nodes[-1]

    def stranger(self, side: Side = Side.GENERATION) -> Exchange:
        """A rank nobody has registered, that says what a test wants."""
        link = self.network.link()
        rank = SmallRank(side, link.address, path=self.path)
        if self.path is PathKind.NIXL:
            rank.card = replace(rank.card, capabilities=(*rank.card.capabilities, CAPABILITY_NIXL))
        self.spare.append(rank)
        return Exchange(link, rank.card)

    def settle(self, rounds: int = 60) -> None:
        """Let every engine run until all is said and done."""
        deadline_s, left = time.monotonic() + PATIENCE_S, rounds
        while left and time.monotonic() < deadline_s:
            busy = [node.turn() for node in self.nodes]
            # A carrier that does its work by itself is waited for, and what it has brought needs some rounds more.
            waited_for = self.path is PathKind.NIXL and any(busy)
            left = max(left - 1, QUIET_ROUNDS if waited_for else 0)

    def connect(self, generation: Node, *contexts: Node) -> list[Registration]:
        pending = [generation.engine.register(context.address) for context in contexts]
        self.settle(3)
        assert all(registration.peer for registration in pending), pending
        return pending

    def pair(self, context_copier: HostCopier | None = None, generation_copier: HostCopier | None = None) -> tuple:
        context, generation = self.context(context_copier), self.generation(generation_copier)
        self.connect(generation, context)
        return context, generation

    def remove(self, node: Node) -> None:
        """End a node without a word."""
        self.nodes.remove(node)
        node.link.abort()
        self.spare.append(node.rank)

    def close(self) -> None:
        for node in self.nodes:
            node.engine.close()
            node.link.close()
            node.rank.close()
        for rank in self.spare:
            rank.close()


NIXL = pytest.param(PathKind.NIXL, marks=pytest.mark.skipif(bool(why_no_nixl()), reason=why_no_nixl()))


@pytest.fixture(params=[PathKind.DIRECT, PathKind.ZMQ, NIXL])
def world(request: pytest.FixtureRequest) -> Iterator[World]:
    made = World(request.param)
    yield made
    made.close()


@pytest.fixture
def staged_world() -> Iterator[World]:
    made = World(PathKind.ZMQ)
    yield made
    made.close()


@pytest.fixture
def direct_world() -> Iterator[World]:
    made = World(PathKind.DIRECT)
    yield made
    made.close()


def publish(context: Node, request_id: int, tokens: int = TOKENS, aux: AuxData | None = None) -> TransferHandle:
    handle = TransferHandle(RequestId(request_id))
    table = context.rank.table(tokens)
    context.rank.fill(table, tokens)
    context.engine.publish(handle, table, tokens, aux)
    return handle


def receive(
    generation: Node,
    request_id: int,
    *contexts: Node,
    tokens: int = TOKENS,
    first_slot: int = 20,
    table: dict[GroupId, np.ndarray] | None = None,
) -> TransferHandle:
    handle = TransferHandle(RequestId(request_id))
    table = generation.rank.table(tokens, first_slot) if table is None else table
    generation.engine.receive(handle, table, tokens, [context.address for context in contexts])
    return handle


def say(sender: Node, receiver: Node, message: Message) -> None:
    """Let `sender` say something its engine would not."""
    sender.engine._exchange.send(receiver.address, message)


def epoch_of(generation: Node, request_id: int) -> int:
    return int(generation.engine._requests[request_id].session.epoch)


def reason_of(handle: TransferHandle) -> str:
    return handle.outcome.reason if handle.outcome else "still open"


def assert_served(world: World, context: Node, generation: Node, request_id: int = 900) -> None:
    """Move one more request, and look at every byte."""
    got = receive(generation, request_id, context, first_slot=40)
    sent = publish(context, request_id)
    world.settle()
    assert (reason_of(got), reason_of(sent)) == ("", "") and got.quiet and sent.quiet
    assert generation.rank.wrong_rows(generation.rank.table(TOKENS, 40), TOKENS) == 0


def cut(node: Node, address: str) -> None:
    """Break the connection from `node` to `address`; whoever is there lives on."""
    node.link._forget(address)
    node.link._inbox.append(PeerGone(address, "the cable was cut"))


# --- early: pages leave while KV is computed --------------------------------------------------------------------------


def publish_early(context: Node, request_id: int, tokens: int = TOKENS) -> tuple[TransferHandle, ReadinessManager]:
    handle, readiness = TransferHandle(RequestId(request_id)), ReadinessManager(tokens, complete=False)
    context.engine.publish(handle, context.rank.table(tokens), tokens, None, readiness)
    return handle, readiness


def compute(context: Node, readiness: ReadinessManager, tokens: int) -> None:
    """Write and mark the first tokens of both layers."""
    context.rank.fill(context.rank.table(tokens), tokens)
    for layer in (LayerId(0), LayerId(1)):
        readiness.mark(layer, tokens)


def first_pages(generation: Node, tokens: int) -> int:
    """Wrong rows in the target's pages of the first tokens."""
    table = generation.rank.table(tokens, 20)
    return generation.rank.wrong_rows({**table, GroupId(1): np.full_like(table[GroupId(1)], NO_PAGE)}, tokens)


@pytest.mark.parametrize("ask_first", [False, True])
def test_pages_leave_as_their_tokens_are_ready_and_no_sooner(world: World, ask_first: bool) -> None:
    context, generation = world.pair()
    got = receive(generation, 1, context) if ask_first else None
    sent, readiness = publish_early(context, 1)
    got = got or receive(generation, 1, context)
    world.settle()
    assert not generation.rank.touched()
    compute(context, readiness, 17)  # four blocks of 4, and one token of the fifth
    world.settle()
    pages = generation.rank.arrays[0].reshape(-1, generation.rank.layout.groups[0].page_bytes)
    assert [bool(pages[slot].any()) for slot in range(20, 26)] == [True] * 4 + [False] * 2
    compute(context, readiness, TOKENS)
    world.settle()
    assert got.outcome is None and sent.outcome is None, "what travels beside the KV is not there"
    context.engine.finish(RequestId(1), AuxData(first_tokens=(7,), prompt_tokens=TOKENS))
    world.settle()
    assert (reason_of(got), reason_of(sent)) == ("", "") and got.quiet and sent.quiet
    assert got.outcome is not None and got.outcome.aux is not None and got.outcome.aux.first_tokens == (7,)
    assert generation.rank.wrong_rows(generation.rank.table(TOKENS, 20), TOKENS) == 0


def test_a_layer_waits_for_itself_alone(world: World) -> None:
    context, generation = world.pair()
    receive(generation, 1, context)
    _, readiness = publish_early(context, 1)
    context.rank.fill(context.rank.table(TOKENS), TOKENS)
    readiness.mark(LayerId(0), TOKENS)
    world.settle()
    assert generation.rank.arrays[0].any() and not generation.rank.arrays[1].any()
    readiness.mark(LayerId(1), TOKENS)
    context.engine.finish(RequestId(1), None)
    world.settle()
    assert generation.rank.wrong_rows(generation.rank.table(TOKENS, 20), TOKENS) == 0


def test_who_wants_no_page_still_waits_for_the_end(world: World) -> None:
    context, generation = world.pair()
    table = {group: np.full_like(row, NO_PAGE) for group, row in generation.rank.table(TOKENS, 20).items()}
    got = receive(generation, 1, context, table=table)
    publish_early(context, 1)
    world.settle()
    assert got.outcome is None
    context.engine.finish(RequestId(1), AuxData(first_tokens=(3,), prompt_tokens=TOKENS))
    world.settle()
    assert got.outcome is not None and got.outcome.aux is not None and got.outcome.aux.first_tokens == (3,)


@pytest.mark.parametrize("ending", ["fail", "cancel", "lost"])
def test_a_request_that_ends_while_it_is_computed_is_quiet_and_forgotten(world: World, ending: str) -> None:
    context, generation = world.pair()
    got = receive(generation, 1, context)
    sent, readiness = publish_early(context, 1)
    compute(context, readiness, 17)
    world.settle()
    if ending == "fail":
        context.engine.fail(RequestId(1), "the model is broken")
    elif ending == "cancel":
        generation.engine.cancel(RequestId(1), "nobody wants it")
    else:
        world.remove(generation)
    world.settle()
    assert sent.quiet and reason_of(sent)
    if ending != "lost":
        assert got.quiet and reason_of(got)
    context.engine.finish(RequestId(1), None)  # the model's thread did not know
    world.settle()
    assert context.engine.drained()
    if ending != "lost":
        assert_served(world, context, generation)


def test_what_cannot_travel_fails_an_early_request(world: World) -> None:
    context, generation = world.pair()
    got = receive(generation, 1, context)
    sent, readiness = publish_early(context, 1)
    compute(context, readiness, TOKENS)
    with pytest.raises(LocalProtocolError):
        context.engine.finish(RequestId(1), AuxData(first_tokens=(2**70,), prompt_tokens=TOKENS))
    world.settle()
    assert reason_of(got) and sent.quiet and got.quiet


def test_a_time_out_ends_a_prompt_that_is_never_computed(world: World) -> None:
    context, generation = world.pair()
    got = receive(generation, 1, context)
    sent, _ = publish_early(context, 1)
    world.settle(3)
    context.clock.now_s += TIMEOUT_S + 1
    generation.clock.now_s += TIMEOUT_S + 1
    world.settle()
    assert reason_of(sent) and sent.quiet and reason_of(got)


# --- the plain case ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("ask_first", [False, True])
def test_a_request_is_moved_and_both_sides_forget_it(world: World, ask_first: bool) -> None:
    context, generation = world.pair()
    sent = None if ask_first else publish(context, 1)
    got = receive(generation, 1, context)
    world.settle(3)
    sent = sent or publish(context, 1)
    world.settle()
    assert (reason_of(sent), reason_of(got)) == ("", "") and sent.quiet and got.quiet
    assert generation.rank.wrong_rows(generation.rank.table(TOKENS, 20), TOKENS) == 0
    assert generation.engine.drained() and context.engine.drained()
    assert not list(context.engine._requests)
    assert context.refused == generation.refused == {}


def test_a_full_prefix_hit_settles_without_a_byte(world: World) -> None:
    context, generation = world.pair()
    table = {group: np.full_like(slots, -1) for group, slots in generation.rank.table(TOKENS).items()}
    for wanted in (table, {}):
        request_id = 1 + len(wanted)
        got, sent = receive(generation, request_id, context, table=wanted), publish(context, request_id)
        world.settle(5)
        assert (reason_of(got), reason_of(sent)) == ("", "") and got.quiet and sent.quiet
    assert not generation.rank.touched()


def test_an_ask_carries_only_the_groups_its_peer_writes(world: World) -> None:
    context, generation = world.pair()
    context.link._inbox.clear()
    seen: list[Ask] = []
    context.engine._on_ask = lambda ask, key: seen.append(ask)
    extra = generation.rank.table(TOKENS) | {GroupId(7): np.arange(1, 11, dtype=np.int32)}
    receive(generation, 1, context, table=extra)
    world.settle(1)
    assert [table.group_id for table in seen[0].tables] == sorted(generation.rank.table(TOKENS))


# --- time -------------------------------------------------------------------------------------------------------------


def test_a_request_nobody_publishes_times_out_and_is_quiet_once_that_is_acknowledged(world: World) -> None:
    context, generation = world.pair()
    got = receive(generation, 1, context)
    world.settle(3)
    generation.clock.now_s += TIMEOUT_S - 0.001
    world.settle(3)
    assert got.outcome is None
    generation.clock.now_s += 0.001
    generation.turn()
    assert "timed out on the generation side" in reason_of(got) and not got.quiet
    context.turn()
    assert not got.quiet
    generation.turn()
    assert got.quiet and generation.engine.drained()
    late = publish(context, 1)
    assert "timed out on the generation side" in reason_of(late) and late.quiet


def test_a_published_request_nobody_asks_for_times_out_without_any_other_traffic(world: World) -> None:
    context, generation = world.pair()
    handles = [publish(context, 1)]
    context.clock.now_s += 10
    handles.append(publish(context, 2))
    context.clock.now_s += TIMEOUT_S - 10
    context.turn()
    assert "timed out on the context side (KV ready; nobody asked)" in reason_of(handles[0]) and handles[0].quiet
    assert handles[1].outcome is None  # each has its own deadline
    got = receive(generation, 1, context)
    world.settle(3)
    assert "is over on the context side: timed out" in reason_of(got) and got.quiet
    context.clock.now_s += 10
    context.turn()
    assert handles[1].quiet


def test_a_request_whose_kv_never_comes_times_out_on_the_context_side_too(world: World) -> None:
    context, generation = world.pair()
    got = receive(generation, 1, context)
    world.settle(2)
    context.clock.now_s += TIMEOUT_S
    world.settle(3)
    assert "timed out on the context side (no KV" in reason_of(got) and got.quiet


def test_a_timeout_in_mid_move_waits_for_the_running_copy(world: World) -> None:
    copier = GatedCopier(passing=2)
    context, generation = world.pair(copier)
    got, sent = receive(generation, 1, context), publish(context, 1)
    world.settle(5)
    context.clock.now_s += TIMEOUT_S
    world.settle(5)
    assert "timed out on the context side" in reason_of(sent) and not sent.quiet
    assert got.outcome is None
    copier.open = True
    world.settle(5)
    assert sent.quiet and got.quiet and "timed out on the context side" in reason_of(got)
    assert copier.submitted == 3


# --- asks that come late, twice, or under another epoch ---------------------------------------------------------------


def asked_for(generation: Node, request_id: int, **changes: Any) -> Ask:
    tables = generation.rank.table(TOKENS, 20)
    plain = Ask(
        request_id=RequestId(request_id),
        epoch=5,
        reply_to=generation.address,
        prompt_tokens=TOKENS,
        tables=tuple(GroupTable(group_id=group, slots=slots) for group, slots in tables.items()),
    )
    return replace(plain, **changes)


def test_a_duplicate_ask_changes_nothing_before_while_and_after(world: World) -> None:
    copier = GatedCopier(passing=2)
    context, generation = world.pair(copier)
    got = receive(generation, 1, context)
    again = asked_for(generation, 1, epoch=epoch_of(generation, 1))
    world.settle(1)
    say(generation, context, again)
    world.settle(2)
    sent = publish(context, 1)
    world.settle(5)
    say(generation, context, again)
    world.settle(5)
    copier.open = True
    world.settle()
    assert (reason_of(got), reason_of(sent)) == ("", "") and got.quiet and sent.quiet
    assert copier.submitted == 16 and context.refused == {}
    say(generation, context, again)
    world.settle(3)
    assert context.refused == {"ask": 1} and generation.refused == {"late": 1}


def test_an_ask_under_another_epoch_is_refused_and_the_first_goes_on(world: World) -> None:
    context, generation = world.pair()
    got = receive(generation, 1, context)
    world.settle(1)
    say(generation, context, asked_for(generation, 1, epoch=epoch_of(generation, 1) + 1))
    world.settle(2)
    assert context.refused == {"ask": 1} and generation.refused == {"late": 1} and got.outcome is None
    sent = publish(context, 1)
    world.settle()
    assert (reason_of(got), reason_of(sent)) == ("", "")


# --- cancel before, while, after --------------------------------------------------------------------------------------


def test_cancel_before_the_kv_exists(world: World) -> None:
    context, generation = world.pair()
    got = receive(generation, 1, context)
    world.settle(2)
    generation.engine.cancel(RequestId(1), "the user went away")
    assert reason_of(got) == "the user went away" and not got.quiet
    world.settle(2)
    assert got.quiet
    sent = publish(context, 1)
    assert "the user went away" in reason_of(sent) and sent.quiet


def test_cancel_while_bytes_move_is_acknowledged_when_the_last_copy_has_landed(world: World) -> None:
    copier = GatedCopier(passing=2)
    context, generation = world.pair(copier)
    got, sent = receive(generation, 1, context), publish(context, 1)
    world.settle(5)
    generation.engine.cancel(RequestId(1), "the user went away")
    world.settle(10)
    assert "the user went away" in reason_of(sent) and not sent.quiet and not got.quiet
    assert not context.engine.drained() and not generation.engine.drained()
    copier.open = True
    world.settle(5)
    assert sent.quiet and got.quiet and copier.submitted == 3
    assert_served(world, context, generation)


def test_cancel_after_the_end_changes_nothing_and_is_acknowledged(world: World) -> None:
    context, generation = world.pair()
    got, sent = receive(generation, 1, context), publish(context, 1)
    epoch = epoch_of(generation, 1)
    world.settle()
    generation.engine.cancel(RequestId(1), "too late")
    say(generation, context, Cancel(request_id=RequestId(1), epoch=epoch, reason="too late"))
    world.settle(3)
    assert (reason_of(got), reason_of(sent)) == ("", "")
    assert context.refused == generation.refused == {}


def test_a_cancel_that_overtakes_its_ask_wins(world: World) -> None:
    """Published, asked for over a connection that is slow to die, and cancelled over the next one."""
    copier = GatedCopier(passing=99)
    context, generation = world.pair(copier)
    sent = publish(context, 1)
    say(generation, context, Cancel(request_id=RequestId(1), epoch=5, reason="never mind"))
    world.settle(2)
    assert "never mind" in reason_of(sent) and sent.quiet
    say(generation, context, asked_for(generation, 1))
    world.settle(5)
    assert context.refused == {"ask": 1} and copier.submitted == 0 and not generation.rank.touched()


def test_our_own_side_gives_up_in_mid_move(world: World) -> None:
    copier = GatedCopier(passing=2)
    context, generation = world.pair(copier)
    got, sent = receive(generation, 1, context), publish(context, 1)
    world.settle(5)
    context.engine.fail(RequestId(1), "preempted")
    assert reason_of(sent) == "preempted" and not sent.quiet
    copier.open = True
    world.settle(5)
    assert reason_of(got) == "preempted" and got.quiet and sent.quiet


def test_one_leg_that_cannot_start_keeps_the_others_from_starting(world: World) -> None:
    copier = GatedCopier(passing=99)
    context = world.context(copier)
    halves = [world.generation(position=ParallelPosition(tp=2, tp_rank=rank)) for rank in range(2)]
    for half in halves:
        world.connect(half, context)
    got = [receive(half, 1, context, tokens=tokens) for half, tokens in zip(halves, (TOKENS + 1, TOKENS), strict=True)]
    world.settle(3)
    sent = publish(context, 1)
    world.settle(5)
    assert copier.submitted == 0 and "prompt_tokens is 41, expected 40" in reason_of(sent) and sent.quiet
    assert all("prompt_tokens is 41" in reason_of(handle) and handle.quiet for handle in got)


# --- forged messages to a context rank --------------------------------------------------------------------------------


def slots_of(*values: int) -> tuple[GroupTable, ...]:
    return (GroupTable(group_id=GroupId(0), slots=np.array(values, dtype=np.int32)),)


FORGED_TABLES = {
    "null slot": (slots_of(0, 1), "slot of ordinal 0 is 0"),
    "out of range": (slots_of(1, 64), "slot of ordinal 1 is 64"),
    "negative": (slots_of(1, -2), "slot of ordinal 1 is -2"),
    "duplicate": (slots_of(3, 5, 3), "slot of ordinals 0, 2 is 3"),
    "too long": (slots_of(*range(1, 52)), "length of the page table is 51"),
    "unknown group": ((GroupTable(group_id=GroupId(9), slots=np.array([1], dtype=np.int32)),), "group is 9"),
}


@pytest.mark.parametrize("name", FORGED_TABLES)
def test_a_forged_page_table_is_refused_before_any_copy(world: World, name: str) -> None:
    copier = GatedCopier(passing=99)
    context, generation = world.context(copier, options={"max_blocks": 50}), world.generation()
    world.connect(generation, context)
    sent = publish(context, 1)
    tables, says = FORGED_TABLES[name]
    heard: list[Failed] = []
    generation.engine._on_request_message = lambda message, key: heard.append(message)
    say(generation, context, asked_for(generation, 1, tables=tables))
    world.settle(3)
    del generation.engine._on_request_message
    assert context.refused == {"ask": 1} and copier.submitted == 0 and not generation.rank.touched()
    assert says in heard[0].reason and heard[0].epoch == 5
    got = receive(generation, 1, context)
    world.settle()
    assert (reason_of(got), reason_of(sent)) == ("", "")  # the honest ask of the same request is served


@pytest.mark.parametrize("tokens", [TOKENS - 1, TOKENS + 1, -1, 2**62])
def test_a_wrong_prompt_length_fails_the_request_and_copies_nothing(world: World, tokens: int) -> None:
    copier = GatedCopier(passing=99)
    context, generation = world.pair(copier)
    sent = publish(context, 1)
    say(generation, context, asked_for(generation, 1, prompt_tokens=tokens))
    world.settle(3)
    assert f"prompt_tokens is {tokens}, expected {TOKENS}" in reason_of(sent) and sent.quiet
    assert copier.submitted == 0
    copier.open = True
    assert_served(world, context, generation)


def test_a_table_that_ends_early_fails_the_request(world: World) -> None:
    context, generation = world.pair()
    sent = publish(context, 1)
    say(generation, context, asked_for(generation, 1, tables=slots_of(1, 2)))
    world.settle(3)
    assert "length of the generation page table is 2" in reason_of(sent) and sent.quiet
    assert_served(world, context, generation)


def test_an_unregistered_rank_is_asked_to_register(world: World) -> None:
    context, generation = world.pair()
    stranger = world.stranger()
    stranger.link.connect(context.address)
    stranger.send(context.address, asked_for(generation, 1, reply_to=stranger.link.address))
    stranger.send(context.address, Cancel(request_id=RequestId(1), epoch=5, reason="mine"))
    stranger.send(context.address, Credit(request_id=RequestId(1), epoch=5, chunks=1))
    stranger.send(context.address, Goodbye(reason="never met"))
    world.settle(3)
    heard: list[Message] = []
    stranger.events(0.0, lambda envelope: heard.append(envelope.message), lambda event: None)
    assert [type(message) for message in heard] == [Reregister]
    assert context.refused == {"unregistered": 2, "credit": 1} and not list(context.engine._requests)
    stranger.link.close()
    assert_served(world, context, generation)


def test_the_card_of_another_rank_is_refused(world: World) -> None:
    context, generation = world.pair()
    other = world.stranger()
    say(generation, context, Hello(card=other.card))
    world.settle(2)
    assert context.refused == {"protocol": 1}
    assert [peer.key for peer in context.engine._peers.all()] == [(generation.rank.card.incarnation, 0)]
    other.link.close()
    assert_served(world, context, generation)


@pytest.mark.parametrize("chunks", [0, -1, -(2**62)])
def test_credits_that_are_none_are_counted_and_change_nothing(world: World, chunks: int) -> None:
    context, generation = world.pair()
    got, sent = receive(generation, 1, context), publish(context, 1)
    context.turn()
    say(generation, context, Credit(request_id=RequestId(1), epoch=epoch_of(generation, 1), chunks=chunks))
    world.settle()
    assert context.refused == {"credit": 1}
    assert (reason_of(got), reason_of(sent)) == ("", "")


def test_credits_for_nothing_are_counted(world: World) -> None:
    context, generation = world.pair()
    say(generation, context, Credit(request_id=RequestId(77), epoch=1, chunks=4))
    sent = publish(context, 1)
    say(generation, context, Credit(request_id=RequestId(1), epoch=1, chunks=4))
    world.settle(2)
    assert context.refused == {"credit": 2} and sent.outcome is None
    assert_served(world, context, generation)


def test_credits_never_let_more_chunks_out_than_agreed(staged_world: World) -> None:
    context, generation = staged_world.pair()
    got, sent = receive(generation, 1, context), publish(context, 1)
    context.turn()
    say(generation, context, Credit(request_id=RequestId(1), epoch=epoch_of(generation, 1), chunks=10**6))
    for _ in range(12):
        context.turn()
    on_the_way = len(generation.link._inbox)
    assert on_the_way <= 2 * 4  # the four it had, and four again
    staged_world.settle()
    assert (reason_of(got), reason_of(sent)) == ("", "")


@pytest.mark.parametrize(
    "message",
    [
        Failed(request_id=RequestId(1), epoch=1, reason="?"),
        CancelAck(request_id=RequestId(1), epoch=1),
        Reregister(reason="?"),
        Done(request_id=RequestId(1), epoch=1, account=(), aux=None, times=NO_TIME),
        Chunk(request_id=RequestId(1), epoch=1, pair=0, first_page=0, pages=1, payload=memoryview(b"abc")),
    ],
    ids=lambda message: type(message).__name__,
)
def test_what_does_not_go_to_a_context_rank_is_counted(world: World, message: Message) -> None:
    context, generation = world.pair()
    say(generation, context, message)
    world.settle(2)
    assert context.refused == {"unexpected": 1}
    assert_served(world, context, generation)


# --- forged messages to a generation rank -----------------------------------------------------------------------------


def page_bytes(generation: Node, context: Node) -> list[int]:
    return [pair.page_bytes for pair in generation.engine._door.peer_at(context.address).program.pairs]


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"first_page": -1}, "range is 'pages [-1, 0)'"),
        ({"first_page": 1}, "range is 'pages [1, 2)'"),
        ({"pages": 11}, "range is 'pages [0, 11)'"),
        ({"pages": 0}, "range is 'pages [0, 0)'"),
        ({"pair": 5}, "group pair is 5"),
        ({"pair": -1}, "group pair is -1"),
        ({"payload": memoryview(b"short")}, "payload bytes is 5"),
    ],
)
def test_a_forged_chunk_fails_its_request_and_writes_nothing(
    staged_world: World, changes: dict[str, Any], says: str
) -> None:
    context, generation = staged_world.pair()
    got = receive(generation, 1, context)
    payload = memoryview(bytes(page_bytes(generation, context)[0]))
    true = Chunk(request_id=RequestId(1), epoch=epoch_of(generation, 1), pair=0, first_page=0, pages=1, payload=payload)
    say(context, generation, replace(true, **changes))
    staged_world.settle(4)
    assert says in reason_of(got) and got.quiet and generation.refused == {"chunk": 1}
    assert not generation.rank.touched()
    assert_served(staged_world, context, generation)


def test_a_chunk_on_the_direct_path_fails_its_request(direct_world: World) -> None:
    context, generation = direct_world.pair()
    got = receive(generation, 1, context)
    payload = memoryview(bytes(page_bytes(generation, context)[0]))
    true = Chunk(request_id=RequestId(1), epoch=epoch_of(generation, 1), pair=0, first_page=0, pages=1, payload=payload)
    say(context, generation, true)
    direct_world.settle(4)
    assert "path is 'direct'" in reason_of(got) and got.quiet


def test_words_for_a_settled_leg_are_counted_and_change_nothing(world: World) -> None:
    contexts = [world.context(position=ParallelPosition(tp=2, tp_rank=rank)) for rank in range(2)]
    generation = world.generation()
    world.connect(generation, *contexts)
    got, sent = receive(generation, 1, *contexts), publish(contexts[0], 1)
    world.settle()
    assert got.outcome is None and reason_of(sent) == ""  # rank 1 is still to come
    epoch = epoch_of(generation, 1)
    forged: list[Message] = [
        Chunk(request_id=RequestId(1), epoch=epoch, pair=0, first_page=0, pages=1, payload=memoryview(b"!")),
        Done(request_id=RequestId(1), epoch=epoch, account=(), aux=AuxData(first_tokens=(9,)), times=NO_TIME),
        Failed(request_id=RequestId(1), epoch=epoch, reason="after all"),
        CancelAck(request_id=RequestId(1), epoch=epoch),
    ]
    for message in forged:
        say(contexts[0], generation, message)
    world.settle(3)
    assert generation.refused == {"late": 3} and got.outcome is None
    publish(contexts[1], 1)
    world.settle()
    assert reason_of(got) == "" and got.quiet
    assert generation.rank.wrong_rows(generation.rank.table(TOKENS, 20), TOKENS) == 0


def test_words_for_another_epoch_or_from_another_rank_are_counted(world: World) -> None:
    context, generation = world.pair()
    bystander = world.context()
    world.connect(generation, bystander)
    got = receive(generation, 1, context)
    epoch = epoch_of(generation, 1)
    say(context, generation, Failed(request_id=RequestId(1), epoch=epoch + 1, reason="of another attempt"))
    say(bystander, generation, Failed(request_id=RequestId(1), epoch=epoch, reason="none of my business"))
    say(context, generation, Failed(request_id=RequestId(2), epoch=epoch, reason="unknown"))
    world.settle(2)
    assert generation.refused == {"late": 3} and got.outcome is None
    publish(context, 1)
    world.settle()
    assert reason_of(got) == ""


@pytest.mark.parametrize("pages", [9, 11, None])
def test_a_done_with_another_account_fails_with_the_coverage(world: World, pages: int | None) -> None:
    context, generation = world.pair()
    got = receive(generation, 1, context)
    sizes = page_bytes(generation, context)
    account = () if pages is None else (PairAccount(pair=0, pages=pages, bytes=pages * sizes[0]),)
    done = Done(request_id=RequestId(1), epoch=epoch_of(generation, 1), account=account, aux=None, times=NO_TIME)
    say(context, generation, done)
    world.settle(2)
    assert "coverage" in reason_of(got) and got.quiet


def test_an_acknowledgement_nobody_asked_for_fails_the_request(world: World) -> None:
    context, generation = world.pair()
    got = receive(generation, 1, context)
    say(context, generation, CancelAck(request_id=RequestId(1), epoch=epoch_of(generation, 1)))
    world.settle(2)
    assert "acknowledged a cancel that nobody sent" in reason_of(got) and got.quiet


@pytest.mark.parametrize("message", [Goodbye(reason="?"), Reregister(reason="?")], ids=["goodbye", "reregister"])
def test_a_stranger_cannot_say_goodbye_for_others(world: World, message: Message) -> None:
    context, generation = world.pair()
    got = receive(generation, 1, context)
    stranger = world.stranger(Side.CONTEXT)
    stranger.link.connect(generation.address)
    stranger.send(generation.address, message)
    world.settle(2)
    assert got.outcome is None
    stranger.link.close()
    publish(context, 1)
    world.settle()
    assert reason_of(got) == ""


def test_an_answer_nobody_waits_for_is_refused(world: World) -> None:
    context, generation = world.pair()
    stranger = world.stranger(Side.CONTEXT)
    stranger.link.connect(generation.address)
    peer = generation.engine._door.peer_at(context.address)
    ack = HelloAck(
        card=stranger.card, report=peer.report, digest=peer.program.digest, path=peer.path, path_reason="forged"
    )
    stranger.send(generation.address, ack)
    stranger.send(generation.address, replace(ack, card=context.rank.card))
    generation.turn()
    assert generation.refused == {"protocol": 2}
    assert generation.engine._door.peer_at(context.address) is peer
    stranger.link.close()


# --- what travels beside the KV ---------------------------------------------------------------------------------------


def test_ranks_that_send_other_aux_data_fail_the_request(world: World) -> None:
    contexts = [world.context(position=ParallelPosition(tp=2, tp_rank=rank)) for rank in range(2)]
    generation = world.generation()
    world.connect(generation, *contexts)
    got = receive(generation, 1, *contexts)
    for number, context in enumerate(contexts):
        publish(context, 1, aux=AuxData(first_tokens=(number,)))
    world.settle()
    assert "sent other aux data" in reason_of(got) and got.quiet and got.outcome is not None and got.outcome.aux is None


def test_draft_tokens_beyond_our_room_are_cut(world: World) -> None:
    context, generation = world.pair()
    got = receive(generation, 1, context)
    publish(context, 1, aux=AuxData(first_tokens=(5, 6, 7, 8), draft_tokens=(1, 2, 3, 4, 5)))
    world.settle()
    assert got.outcome is not None and got.outcome.aux == AuxData(first_tokens=(5, 6, 7, 8), draft_tokens=(1, 2, 3))


@pytest.mark.parametrize("aux", [AuxData(first_tokens=(2**70,)), AuxData(prompt_tokens=1.5)])  # type: ignore[arg-type]
def test_aux_data_that_cannot_travel_is_refused_when_it_is_published(world: World, aux: AuxData) -> None:
    context, generation = world.pair()
    with pytest.raises(LocalProtocolError, match="message Done: aux"):
        publish(context, 1, aux=aux)
    assert_served(world, context, generation, 1)


def test_a_request_that_cannot_travel_is_refused_before_anybody_is_asked(world: World) -> None:
    context, generation = world.pair()
    with pytest.raises(LocalProtocolError, match="message Ask: request_id is -1"):
        receive(generation, -1, context)
    with pytest.raises(LocalProtocolError, match="message Ask: tables"):
        receive(generation, 1, context, table={GroupId(0): np.arange(1, 11, dtype=np.int64)})  # type: ignore[dict-item]
    assert generation.engine.drained()
    assert_served(world, context, generation, 1)


def test_a_reason_too_long_to_travel_is_cut(world: World) -> None:
    context, generation = world.pair()
    got = receive(generation, 1, context)
    world.settle(2)
    context.engine.fail(RequestId(1), "ü" * 100_000 + "\ud800")
    world.settle(2)
    assert got.quiet and reason_of(got).startswith("üüü") and len(reason_of(got).encode()) <= MAX_REASON_BYTES


# --- lost words are said again ----------------------------------------------------------------------------------------


def pass_reminder(world: World) -> None:
    for node in world.nodes:
        node.clock.now_s += REMIND_S
    world.settle()


@pytest.mark.parametrize("lost", ["cancel", "acknowledgement"])
def test_a_cancel_is_said_again_until_it_is_acknowledged(world: World, lost: str) -> None:
    context, generation = world.pair()
    got = receive(generation, 1, context)
    world.settle(3)
    generation.engine.cancel(RequestId(1), "nobody wants it")
    if lost == "cancel":
        context.link._inbox.clear()
    else:
        context.turn()
        generation.link._inbox.clear()
    world.settle()
    assert got.outcome is not None and not got.quiet
    pass_reminder(world)
    assert got.quiet and generation.engine.drained()
    assert_served(world, context, generation)


def test_a_hello_is_said_again_until_it_is_answered(world: World) -> None:
    context, generation = world.context(), world.generation()
    registration = generation.engine.register(context.address)
    context.link._inbox.clear()
    world.settle()
    assert not registration.decided
    pass_reminder(world)
    assert registration.peer is not None
    assert_served(world, context, generation)


def test_a_rank_in_doubt_is_greeted_again_and_says_that_it_is_quiet(world: World) -> None:
    context, generation = world.pair()
    got, sent = receive(generation, 1, context), publish(context, 1)
    cut(generation, context.address)
    generation.turn()
    assert "the cable was cut" in reason_of(got)
    pass_reminder(world)
    pass_reminder(world)
    assert got.quiet and generation.engine.drained()
    if world.path is PathKind.DIRECT:  # else nothing was in doubt, and the context side waits for credits
        assert sent.quiet
        assert_served(world, context, generation)


def test_a_stranger_that_cancels_is_asked_to_say_hello(world: World) -> None:
    context, generation = world.pair()
    got = receive(generation, 1, context)
    world.settle(3)
    context.engine._door._lose((generation.rank.card.incarnation, 0), "forgotten")
    context.turn()
    generation.link._inbox.clear()  # nobody told it
    generation.engine.cancel(RequestId(1), "nobody wants it")
    world.settle()
    pass_reminder(world)
    assert got.quiet and generation.engine.drained()
    assert_served(world, context, generation)


# --- peers that go and come back --------------------------------------------------------------------------------------


def test_an_idle_peer_that_leaves_is_no_warning(world: World, caplog: pytest.LogCaptureFixture) -> None:
    context, generation = world.pair()
    other = world.generation()
    world.connect(other, context)
    with caplog.at_level(logging.INFO):
        generation.engine.close()
        world.settle(2)
        world.remove(other)
        world.settle(2)
    told = [record.getMessage() for record in caplog.records]
    assert any("said goodbye" in line for line in told) and any("is gone" in line for line in told)
    assert not [record for record in caplog.records if record.levelno >= logging.WARNING]


def test_a_peer_that_leaves_with_a_request_open_is_a_warning(world: World, caplog: pytest.LogCaptureFixture) -> None:
    context, generation = world.pair()
    receive(generation, 1, context)
    world.settle(2)
    generation.engine.close()
    world.settle(2)
    assert any("said goodbye" in record.getMessage() for record in caplog.records if record.levelname == "WARNING")


def test_a_generation_rank_that_says_goodbye_in_mid_move_releases_the_pages_after_the_copy(world: World) -> None:
    copier = GatedCopier(passing=2)
    context, generation = world.pair(copier)
    receive(generation, 1, context)
    sent = publish(context, 1)
    world.settle(5)
    memory = next(iter(context.engine._peers.all())).memory
    generation.engine.close()
    world.settle(3)
    assert "said goodbye" in reason_of(sent) and not sent.quiet
    if memory is not None:
        assert memory.regions(GroupId(0))  # still mapped: a copy may touch it
    copier.open = True
    world.settle(3)
    assert sent.quiet and not context.engine._peers.all() and not context.engine._peers.leaving()
    if memory is not None:
        with pytest.raises(LocalProtocolError, match="closed"):
            memory.regions(GroupId(0))


def test_a_context_rank_that_says_goodbye_is_quiet_and_remembered_with_its_reason(world: World) -> None:
    context, generation = world.pair()
    got = receive(generation, 1, context)
    world.settle(2)
    context.engine.shut_down("maintenance")
    context.engine.close()
    generation.turn()
    assert "maintenance" in reason_of(got) and got.quiet
    with pytest.raises(LinkBrokenError, match=r"context rank 0 said goodbye: maintenance; connect to an instance"):
        receive(generation, 2, context)


def test_a_lost_context_rank_on_the_direct_path_is_quiet_when_its_process_is_proven_dead(
    direct_world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    context, generation = direct_world.pair()
    got = receive(generation, 1, context)
    direct_world.settle(2)
    direct_world.remove(context)
    direct_world.settle(5)
    assert "is gone" in reason_of(got) and not got.quiet and not generation.engine.drained()
    monkeypatch.setattr("transfer.generation_door.process_is_gone", lambda host: host == context.rank.card.host)
    generation.turn()
    assert got.quiet and generation.engine.drained()


def test_a_lost_context_rank_on_the_staged_path_is_quiet_at_once(staged_world: World) -> None:
    context, generation = staged_world.pair()
    got = receive(generation, 1, context)
    staged_world.settle(2)
    staged_world.remove(context)
    generation.turn()
    assert "is gone" in reason_of(got) and got.quiet
    with pytest.raises(LinkBrokenError, match=r"context rank 0 is gone: .*; connect to an instance that is there"):
        receive(generation, 2, context)


def test_last_words_of_a_lost_peer_prove_that_it_is_quiet(direct_world: World) -> None:
    context, generation = direct_world.pair()
    got = receive(generation, 1, context)
    direct_world.settle(1)
    cut(generation, context.address)
    generation.turn()
    assert not got.quiet
    context.engine.fail(RequestId(1), "no more")
    generation.turn()
    assert got.quiet


def test_a_context_rank_that_lost_its_peer_calls_it_back_and_everything_becomes_quiet(world: World) -> None:
    """The way back breaks in mid move: no cancel could be answered any more, and nobody has died."""
    copier = GatedCopier(passing=2)
    context, generation = world.pair(copier)
    got, sent = receive(generation, 1, context), publish(context, 1)
    world.settle(5)
    cut(context, generation.address)
    world.settle(5)
    assert "is gone: the cable was cut" in reason_of(sent) and not sent.quiet
    assert got.outcome is None
    copier.open = True
    world.settle(8)
    assert sent.quiet and got.quiet and "lost its connection" in reason_of(got)
    assert_served(world, context, generation)


def test_coming_back_proves_nothing_while_the_old_copy_runs(direct_world: World) -> None:
    """The way there breaks in mid move; the generation rank says hello again while the context rank still copies."""
    copier = GatedCopier(passing=2)
    context, generation = direct_world.pair(copier)
    got, sent = receive(generation, 1, context), publish(context, 1)
    direct_world.settle(5)
    cut(generation, context.address)
    generation.turn()
    assert "cable" in reason_of(got) and not got.quiet
    direct_world.connect(generation, context)
    direct_world.settle(5)
    assert not got.quiet and not sent.quiet  # the context rank was told to stop, and its copy still runs
    copier.open = True
    direct_world.settle(5)
    assert got.quiet and sent.quiet and copier.submitted == 3
    assert_served(direct_world, context, generation)


def test_a_hello_of_a_peer_that_is_being_let_go_is_answered_when_its_copies_are_over(direct_world: World) -> None:
    copier = GatedCopier(passing=2)
    context, generation = direct_world.pair(copier)
    receive(generation, 1, context)
    publish(context, 1)
    direct_world.settle(5)
    cut(context, generation.address)
    context.turn()
    say(generation, context, asked_for(generation, 2))  # a stranger now: told to come back
    direct_world.settle(5)
    with pytest.raises(LocalProtocolError, match="no answer yet"):
        receive(generation, 3, context)
    copier.open = True
    direct_world.settle(5)
    assert len(context.engine._peers.all()) == 1 and not context.engine._peers.leaving()
    assert_served(direct_world, context, generation)


def test_a_peer_the_context_rank_forgot_registers_again_and_is_served(world: World) -> None:
    context, generation = world.pair()
    key = (generation.rank.card.incarnation, 0)
    context.engine._peers.leave(key)
    context.engine._peers.forget(key)
    got = receive(generation, 1, context)
    world.settle(6)
    assert "does not know you" in reason_of(got) and got.quiet
    assert_served(world, context, generation)


@pytest.mark.parametrize("noticed", ["first", "last", "never"])
def test_a_restarted_peer_at_the_same_address_replaces_the_old_one(world: World, noticed: str) -> None:
    """The loss of the old process may be noticed before the new one says hello, with it, or not at all."""
    copier = GatedCopier(passing=2)
    context, old = world.pair(copier)
    receive(old, 1, context)
    sent = publish(context, 1)
    world.settle(5)
    memory = context.engine._peers.all()[0].memory
    world.remove(old)
    new = world.generation(address=old.address)
    registration = new.engine.register(context.address)
    if noticed == "last":
        context.link._inbox.rotate(-1)
        assert isinstance(context.link._inbox[-1], PeerGone)
    elif noticed == "never":
        context.link._inbox.popleft()
    world.settle(3)
    assert registration.peer is not None
    assert [peer.key for peer in context.engine._peers.all()] == [(new.rank.card.incarnation, 0)]
    assert sent.outcome is not None and not sent.quiet and "generation rank 0" in reason_of(sent)
    copier.open = True
    world.settle(3)
    assert sent.quiet and not context.engine._peers.leaving()
    if memory is not None:
        with pytest.raises(LocalProtocolError, match="closed"):
            memory.regions(GroupId(0))
    assert_served(world, context, new)


def test_a_restarted_context_rank_at_the_same_address_replaces_the_old_one(direct_world: World) -> None:
    old, generation = direct_world.pair()
    got = receive(generation, 1, old)
    direct_world.settle(2)
    direct_world.remove(old)
    generation.link._inbox.clear()  # nobody noticed
    generation.link.connect(old.address)
    new = direct_world.context(address=old.address)
    peer = generation.engine._door.peer_at(old.address)
    ack = HelloAck(
        card=new.rank.card, report=peer.report, digest=peer.program.digest, path=peer.path, path_reason="anew"
    )
    new.link.connect(generation.address)
    say(new, generation, ack)
    generation.turn()
    assert "another process took the address" in reason_of(got) and not got.quiet
    assert generation.engine._door.peer_at(new.address).card == new.rank.card


def test_a_dying_peer_is_not_expected_by_the_requests_of_its_successor(world: World) -> None:
    """Same instance, other address: while the old copies drain, only the new process is waited for."""
    copier = GatedCopier(passing=2)
    context, old = world.pair(copier)
    receive(old, 1, context)
    sent = publish(context, 1)
    world.settle(5)
    old.engine.close()
    new = world.generation()
    world.connect(new, context)
    assert context.engine._peers.leaving()
    copier.open = True
    got, again = receive(new, 2, context), publish(context, 2)
    world.settle()
    assert (reason_of(got), reason_of(again)) == ("", "") and sent.quiet


# --- handshakes that fail ---------------------------------------------------------------------------------------------


def _pools(card: RankCard, **changes: Any) -> RankCard:
    return replace(card, pools=tuple(replace(pool, **changes) for pool in card.pools))


def _exports(card: RankCard, **changes: Any) -> RankCard:
    storages = [replace(s, export=replace(s.export, **changes)) for s in card.storages if s.export is not None]
    return replace(card, storages=tuple(storages))


MALFORMED = {
    "pools that hold no slot": (lambda card: _pools(card, slot_stride_bytes=8), "slot"),
    "pools larger than their storage": (lambda card: _pools(card, num_slots=10**9), "end of the last slot in bytes"),
    "pools in a storage that is not there": (lambda card: _pools(card, storage=17), "missing"),
    "pools of another group": (lambda card: _pools(card, group_id=GroupId(40)), "the gate refused"),
    "no tokens in a block": (lambda card: replace(card, tokens_per_block=0), "the gate refused"),
    "a descriptor that is something else": (lambda card: _exports(card, inode=1), "inode"),
}


@pytest.mark.parametrize("name", MALFORMED)
def test_a_malformed_card_is_answered_with_a_refusal(direct_world: World, name: str) -> None:
    edit, says = MALFORMED[name]
    context, generation = direct_world.pair()
    wrong = direct_world.generation(edit=edit)
    registration = wrong.engine.register(context.address)
    direct_world.settle(3)
    assert registration.decided and registration.peer is None and says in registration.refusal
    assert len(context.engine._peers.all()) == 1
    assert_served(direct_world, context, generation)


def test_a_card_that_breaks_our_own_code_is_answered_too(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    context, generation = world.context(), world.generation()

    def broken(*cards: RankCard) -> None:
        raise KeyError("nobody foresaw this card")

    monkeypatch.setattr("transfer.context_peers.judge", broken)
    registration = generation.engine.register(context.address)
    world.settle(3)
    assert "nobody foresaw this card" in registration.refusal


def test_a_generation_rank_that_cannot_accept_takes_its_hello_back(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    context, generation = world.context(), world.generation()

    def broken(*args: object) -> None:
        raise KeyError("nobody foresaw this answer")

    monkeypatch.setattr("transfer.generation_door.accept", broken)
    registration = generation.engine.register(context.address)
    world.settle(3)
    assert "nobody foresaw this answer" in registration.refusal
    assert not context.engine._peers.all()  # so that no request waits for a rank that will never ask


# --- copies that fail -------------------------------------------------------------------------------------------------


class FailsOnce(HostCopier):
    """Fails copy number `at`, at submission or afterwards; all others are good."""

    def __init__(self, error: Exception, at: int = 3, *, later: bool = False) -> None:
        super().__init__()
        self._error, self._at, self._later, self.submitted = error, at, later, 0

    def submit(self, job: CopyJob) -> CopyTicket:
        self.submitted += 1
        if self.submitted != self._at:
            return super().submit(job)
        if not self._later:
            raise self._error
        return self  # type: ignore[return-value]

    def done(self) -> bool:
        raise self._error


CERTAIN = CopyError("the copy broke", in_doubt=False)
DOUBTS = [CopyError("the copy broke", in_doubt=True), OSError("the copy broke")]


@pytest.mark.parametrize("later", [False, True])
def test_a_failed_copy_of_the_context_rank_fails_its_request_alone(world: World, later: bool) -> None:
    context, generation = world.pair(FailsOnce(CERTAIN, later=later))
    got, sent = receive(generation, 1, context), publish(context, 1)
    world.settle(10)
    for handle in (got, sent):
        assert "context rank 0: the copy broke" in reason_of(handle) and handle.quiet
    assert context.engine._moves.carriers.chunks.in_use == 0
    assert_served(world, context, generation)


@pytest.mark.parametrize("later", [False, True])
@pytest.mark.parametrize("error", DOUBTS, ids=["in doubt", "unforeseen"])
def test_pages_whose_copy_is_in_doubt_are_never_released_and_service_goes_on(
    world: World, error: Exception, later: bool
) -> None:
    context, generation = world.pair(FailsOnce(error, later=later))
    got, sent = receive(generation, 1, context), publish(context, 1)
    world.settle(10)
    assert "the copy broke" in reason_of(sent) and not sent.quiet
    generation.clock.now_s += TIMEOUT_S
    world.settle(10)
    assert not sent.quiet and not context.engine.drained()
    # Packing is ours alone; only on the direct path may bytes still land in the peer's pages.
    assert got.outcome is not None and got.quiet is (world.path is not PathKind.DIRECT)
    assert_served(world, context, generation)
    context.engine.shut_down("over")
    world.settle(5)
    assert not context.engine.drained() and not sent.quiet


@pytest.mark.parametrize("later", [False, True])
@pytest.mark.parametrize("error", [CERTAIN, *DOUBTS], ids=["certain", "in doubt", "unforeseen"])
def test_a_failed_copy_of_the_generation_rank_fails_its_request_alone(
    staged_world: World, error: Exception, later: bool
) -> None:
    context, generation = staged_world.pair(None, FailsOnce(error, later=later))
    got, sent = receive(generation, 1, context), publish(context, 1)
    staged_world.settle()
    assert "the copy broke" in reason_of(got) and "the copy broke" in reason_of(sent) and sent.quiet
    assert got.quiet is (error is CERTAIN) and generation.engine.drained() is (error is CERTAIN)
    assert_served(staged_world, context, generation)


def test_pages_are_not_released_while_a_copy_of_our_own_still_writes_them(staged_world: World) -> None:
    copier = GatedCopier(passing=2)
    context, generation = staged_world.pair(None, copier)
    got, sent = receive(generation, 1, context), publish(context, 1)
    staged_world.settle(20)
    assert copier.submitted == 2 + 4  # credits come back for what has landed, not for what has arrived
    generation.engine.cancel(RequestId(1), "the user went away")
    staged_world.settle(5)
    assert sent.quiet and not got.quiet  # the peer has let go, we have not
    copier.open = True
    staged_world.settle(2)
    assert got.quiet


def test_a_last_word_waits_for_the_chunks_before_it(staged_world: World) -> None:
    copier = GatedCopier(passing=14)
    context, generation = staged_world.pair(None, copier)
    got, sent = receive(generation, 1, context), publish(context, 1)
    staged_world.settle()
    assert reason_of(sent) == "" and got.outcome is None and generation.engine.copying()
    copier.open = True
    staged_world.settle(2)
    assert reason_of(got) == "" and got.quiet


@pytest.mark.parametrize("side", ["context", "generation"])
def test_a_bug_in_one_request_leaves_the_engine_and_all_others_alone(
    world: World, monkeypatch: pytest.MonkeyPatch, side: str
) -> None:
    context, generation = world.pair()
    got, sent = receive(generation, 1, context), publish(context, 1)

    def broken(*args: object) -> list[object]:
        raise InternalError("no transition", story=["so it began"])

    with monkeypatch.context() as patch:
        name = "transfer.context_session.ContextSession.moved"
        patch.setattr(name if side == "context" else "transfer.generation_session.GenerationSession.settled", broken)
        world.settle()
    victim = sent if side == "context" else got
    assert "no transition" in reason_of(victim) and not victim.quiet
    assert_served(world, context, generation)
    assert not victim.quiet


# --- bounds -----------------------------------------------------------------------------------------------------------


def test_books_stay_bounded_under_random_asks_and_cancels(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(context_requests, "MAX_WAITING", 256)
    monkeypatch.setattr(context_requests, "MAX_ENDED", 256)
    context, generation = world.pair()
    dice = random.Random(7)
    sent = publish(context, 1)  # an honest request in the middle of it all
    for _ in range(10):
        for _ in range(1000):
            number = RequestId(dice.randrange(1000, 2**40))
            if dice.random() < 0.5:
                say(generation, context, Cancel(request_id=number, epoch=1, reason="?"))
            else:
                say(generation, context, asked_for(generation, number, tables=slots_of(1)))
        context.turn()
        generation.turn()
        assert len(context.engine._requests._open) <= 256 + 1 and len(context.engine._requests._ended) <= 256
    got = receive(generation, 1, context)
    world.settle()
    assert (reason_of(got), reason_of(sent)) == ("", "")
    context.clock.now_s += TIMEOUT_S
    world.settle(2)
    assert not context.engine._requests._open


def test_connections_to_strangers_stay_bounded(world: World) -> None:
    context, generation = world.pair()
    stranger = world.stranger()
    stranger.link.connect(context.address)
    for number in range(500):
        stranger.send(context.address, asked_for(generation, number, reply_to=f"memory://nobody-{number}"))
        if number % 50 == 0:
            context.turn()
    context.turn()
    assert len(context.link._outgoing) <= MAX_STRANGERS + 1
    stranger.link.close()
    assert_served(world, context, generation)


# --- shutdown ---------------------------------------------------------------------------------------------------------


def test_a_context_rank_that_shuts_down_refuses_and_drains(world: World) -> None:
    copier = GatedCopier(passing=2)
    context, generation = world.pair(copier)
    got, sent = receive(generation, 1, context), publish(context, 1)
    world.settle(5)
    context.engine.shut_down("maintenance")
    late = publish(context, 2)
    assert reason_of(late) == "maintenance" and late.quiet and not context.engine.drained()
    asked = receive(generation, 3, context)
    world.settle(3)
    assert reason_of(asked) == "maintenance" and asked.quiet and not sent.quiet and not got.quiet
    copier.open = True
    world.settle(3)
    assert context.engine.drained() and reason_of(got) == reason_of(sent) == "maintenance"


def test_a_generation_rank_that_shuts_down_takes_nothing_new_and_drains(world: World) -> None:
    context, generation = world.pair()
    got = receive(generation, 1, context)
    world.settle(2)
    generation.engine.shut_down("maintenance")
    late = receive(generation, 2, context)
    assert reason_of(late) == "maintenance" and late.quiet and not got.quiet
    world.settle(2)
    assert got.quiet and generation.engine.drained()


def test_an_abandoned_engine_decides_everything_and_calls_nothing_quiet(world: World) -> None:
    context, generation = world.pair()
    sent, got = publish(context, 1), receive(generation, 2, context)
    pending = generation.engine.register("memory://nobody")
    for node in (context, generation):
        node.engine.abandon("the device fell off the bus")
    assert reason_of(sent) == reason_of(got) == pending.refusal == "the device fell off the bus"
    assert not sent.quiet and not got.quiet


# --- many moves towards one peer --------------------------------------------------------------------------------------


@pytest.mark.parametrize("ending", ["served", "cancelled"])
def test_more_moves_than_run_at_a_time_all_end_in_order(
    world: World, ending: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(context_moves, "RUNNING_PER_PEER", 2)
    copier = GatedCopier(passing=0) if ending == "cancelled" else None
    context, generation = world.pair(copier)
    got = [receive(generation, number, context, first_slot=20) for number in range(1, 7)]
    sent = [publish(context, number) for number in range(1, 7)]
    world.settle(4)
    assert len(context.engine._moves.running()) <= 2
    assert world.path is PathKind.NIXL or not context.engine.drained()  # that carrier is waited for
    if ending == "cancelled":  # those whose turn has not come hear it at once
        for number in range(3, 7):
            generation.engine.cancel(RequestId(number), "nobody wants it")
        world.settle()
        assert [handle.quiet for handle in got] == [False] * 2 + [True] * 4
        assert copier is not None
        copier.open = True
    world.settle(200)
    assert [reason_of(handle) == "" for handle in got] == [True] * 2 + [ending == "served"] * 4
    assert all(handle.quiet for handle in (*got, *sent)) and context.engine.drained()
    assert len(context.engine._moves) == 0 and not context.engine._moves._at_peer and not context.engine._moves._queued
