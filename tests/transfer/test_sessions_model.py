"""Random walks of whole pairs of instances over links and copiers that fail: pages are never touched after their end.

The machine knows nothing of sessions. It keeps what a caller keeps, handles and pages, and looks at bytes: the pages
of a quiet request on a generation rank never change again; those on a context rank are overwritten at once, so that a
copy that still reads them cannot go unnoticed. Copies that are held happen when they are released, not before.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import pytest
from hypothesis import note, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from transfer import context_door, generation_door
from transfer.context_engine import ContextEngine
from transfer.copy_host import HostCopier
from transfer.generation_engine import GenerationEngine
from transfer.hello import HostIdentity, ParallelPosition, PathKind, Side
from transfer.link_memory import MemoryNetwork
from transfer.options import TransferOptions
from transfer.outcome import TransferHandle
from transfer.peer_memory import own_host_identity
from transfer.readiness import ReadinessManager
from transfer.testing.faults import Fault, FaultyCopier, FaultyLink, ScriptedFaults, SteppingClock
from transfer.testing.ranks import TOKENS_PER_BLOCK, SmallRank
from unikv.errors import LinkBrokenError, LocalProtocolError
from unikv.ids import LayerId, RequestId

TIMEOUT_S = 30.0
TOKENS = 9
BLOCKS = -(-TOKENS // TOKENS_PER_BLOCK)
REQUESTS = 8
WALKS = settings().max_examples  # 60 in the ci profile, thousands in the long one
SLOTS = 2 + BLOCKS * REQUESTS
JUNK = 0xEE
REQUEST, NUMBER, SIDE = st.integers(0, REQUESTS - 1), st.integers(0, 1), st.sampled_from(Side)
LAYERS = (LayerId(0), LayerId(1))


@dataclass
class Node:
    """One rank: its engine, and what its caller has."""

    side: Side
    rank: SmallRank
    engine: Any
    link: FaultyLink
    copier: FaultyCopier
    messages: ScriptedFaults
    copies: ScriptedFaults
    handles: dict[int, TransferHandle] = field(default_factory=dict)
    early: dict[int, ReadinessManager] = field(default_factory=dict)
    kept: dict[int, list[np.ndarray]] = field(default_factory=dict)

    def table(self, request: int) -> dict[Any, Any]:
        return self.rank.table(TOKENS, 1 + BLOCKS * request)

    def pages(self, request: int) -> list[np.ndarray]:
        """The bytes of a request's pages, as views."""
        first = 1 + BLOCKS * request
        return [array.reshape(SLOTS, -1)[first : first + BLOCKS] for array in self.rank.arrays]


class Sessions(RuleBasedStateMachine):
    """See the module."""

    tp = 1
    path = PathKind.DIRECT

    def __init__(self) -> None:
        super().__init__()
        self.clock, self.network = SteppingClock(), MemoryNetwork()
        self.dead: set[int] = set()
        self.next_pid = 10_000_000
        self.nodes: list[Node] = []
        self.graves: list[SmallRank] = []
        self.doubted = False
        self.real = generation_door.process_is_gone
        for door in (context_door, generation_door):
            door.process_is_gone = self.is_gone  # type: ignore[attr-defined]

    def is_gone(self, host: HostIdentity | None) -> bool:
        return host is not None and host.pid in self.dead

    @initialize(holding=st.lists(st.booleans(), min_size=4, max_size=4))
    def begin(self, holding: list[bool]) -> None:
        for side in Side:
            for tp_rank in range(self.tp):
                self.nodes.append(self.node(side, tp_rank, None))
        for node in self.generations():
            self.register(node)
        self.settle(6)
        for node, hold in zip(self.nodes, holding, strict=False):
            node.copies.usual = Fault.HOLD if hold else Fault.PASS

    def node(self, side: Side, tp_rank: int, address: str | None) -> Node:
        messages, copies = ScriptedFaults(), ScriptedFaults()
        link = FaultyLink(self.network.link(address), messages)
        copier = FaultyCopier(HostCopier(), copies)
        self.next_pid += 1
        host = replace(own_host_identity(), pid=self.next_pid)
        position = ParallelPosition(tp=self.tp, tp_rank=tp_rank)
        rank = SmallRank(side, link.address, path=self.path, position=position, num_slots=SLOTS, host=host)
        kind = ContextEngine if side is Side.CONTEXT else GenerationEngine
        options = TransferOptions(chunk_bytes=1, timeout_s=TIMEOUT_S)
        engine = kind(link, rank.card, rank.regions, copier, options, self.clock)
        return Node(side, rank, engine, link, copier, messages, copies)

    def contexts(self) -> list[Node]:
        return [node for node in self.nodes if node.side is Side.CONTEXT]

    def generations(self) -> list[Node]:
        return [node for node in self.nodes if node.side is Side.GENERATION]

    def pick(self, side: Side, number: int) -> Node:
        return [node for node in self.nodes if node.side is side][number % self.tp]

    def register(self, node: Node) -> None:
        for context in self.contexts():
            node.engine.register(context.rank.card.address)

    def turn(self, node: Node) -> None:
        node.engine.turn(0.0)
        assert node.engine._exchange.refused["internal"] == 0
        self.look(node)

    def settle(self, rounds: int) -> None:
        for _ in range(rounds):
            for node in self.nodes:
                self.turn(node)

    def look(self, node: Node) -> None:
        """Do what a caller does when a handle changes, and remember what must stay."""
        for request, handle in node.handles.items():
            if not handle.quiet or request in node.kept:
                continue
            assert handle.outcome is not None, "quiet without an outcome"
            if node.side is Side.GENERATION:
                if handle.outcome.ok:
                    assert node.rank.wrong_rows(node.table(request), TOKENS) == 0, f"request {request}: wrong bytes"
            else:
                for pages in node.pages(request):
                    pages[:] = JUNK
            node.kept[request] = [pages.copy() for pages in node.pages(request)]

    # --- callers --------------------------------------------------------------------------------------------------

    @rule(
        request=REQUEST,
        early=st.booleans(),
        late=st.booleans(),
        rounds=st.integers(0, 8),
        fault=st.sampled_from([*Fault][:4]),
        passing=st.integers(0, 6),
    )
    def serve(self, request: int, early: bool, late: bool, rounds: int, fault: Fault, passing: int) -> None:
        """Begin a request everywhere, and let it go on for a while; `fault` befalls a message of a context rank."""
        messages = self.contexts()[0].messages
        messages.disarm()
        messages.arm(*[Fault.PASS] * passing, fault)
        for number in range(self.tp):
            if late:
                self.receive(request, number)
            self.publish(request, number, early)
            self.receive(request, number)
        self.settle(rounds)

    @rule(request=REQUEST, number=NUMBER, early=st.booleans())
    def publish(self, request: int, number: int, early: bool) -> None:
        node = self.pick(Side.CONTEXT, number)
        if request in node.handles:
            return
        handle, readiness = TransferHandle(RequestId(request)), None
        if early:
            readiness = node.early[request] = ReadinessManager(TOKENS, complete=False)
        else:
            node.rank.fill(node.table(request), TOKENS)
        node.engine.publish(handle, node.table(request), TOKENS, None, readiness)
        node.handles[request] = handle
        self.look(node)

    @rule(request=REQUEST, number=NUMBER, tokens=st.sampled_from([1, TOKENS // 2, TOKENS, TOKENS]))
    def compute(self, request: int, number: int, tokens: int) -> None:
        """Go on with one of the prompts that are being computed, if there are any."""
        node = self.pick(Side.CONTEXT, number)
        begun = [known for known in node.early if not node.handles[known].quiet]
        if not begun:
            return
        request = begun[request % len(begun)]
        readiness = node.early[request]
        node.rank.fill(node.table(request), tokens)
        for layer in LAYERS:
            readiness.mark(layer, tokens)
        if tokens == TOKENS:
            node.engine.finish(RequestId(request), None)
            del node.early[request]

    @rule(request=REQUEST, number=NUMBER)
    def receive(self, request: int, number: int) -> None:
        node = self.pick(Side.GENERATION, number)
        if request in node.handles:
            return
        handle = TransferHandle(RequestId(request))
        addresses = [context.rank.card.address for context in self.contexts()]
        try:
            node.engine.receive(handle, node.table(request), TOKENS, addresses)
        except (LocalProtocolError, LinkBrokenError):
            self.register(node)
            return
        node.handles[request] = handle
        self.look(node)

    @rule(request=REQUEST, number=NUMBER, side=SIDE, fault=st.sampled_from([*Fault][:4]))
    def give_up(self, request: int, number: int, side: Side, fault: Fault) -> None:
        """End a request that may be open; what is said of it first suffers `fault`."""
        node = self.pick(side, number)
        open_ones = [known for known, handle in node.handles.items() if not handle.quiet] or [request]
        request = open_ones[request % len(open_ones)]
        node.messages.arm(fault)
        end = node.engine.fail if side is Side.CONTEXT else node.engine.cancel
        end(RequestId(request), "given up")
        self.look(node)

    # --- time and turns -------------------------------------------------------------------------------------------

    @rule(number=NUMBER, side=SIDE, times=st.integers(1, 4))
    def run(self, number: int, side: Side, times: int) -> None:
        for _ in range(times):
            self.turn(self.pick(side, number))

    @rule(rounds=st.integers(1, 8))
    def run_all(self, rounds: int) -> None:
        self.settle(rounds)

    @rule(seconds=st.sampled_from([0.01, 1.5, 7.0, TIMEOUT_S + 1]))
    def pass_time(self, seconds: float) -> None:
        self.clock.advance(seconds)

    # --- faults ---------------------------------------------------------------------------------------------------

    @rule(
        number=NUMBER,
        side=SIDE,
        fault=st.sampled_from([Fault.DROP, Fault.DUPLICATE, Fault.HOLD, Fault.CUT]),
        passing=st.integers(0, 4),
    )
    def disturb_messages(self, number: int, side: Side, fault: Fault, passing: int) -> None:
        self.pick(side, number).messages.arm(*[Fault.PASS] * passing, fault)

    @rule(
        number=NUMBER,
        side=SIDE,
        fault=st.sampled_from([Fault.DROP, Fault.HOLD, Fault.HOLD, Fault.CORRUPT, Fault.CUT]),
        passing=st.integers(0, 1),
    )
    def disturb_copies(self, number: int, side: Side, fault: Fault, passing: int) -> None:
        self.pick(side, number).copies.arm(*[Fault.PASS] * passing, fault)
        self.doubted |= fault is Fault.CUT

    @rule(number=NUMBER, side=SIDE, usual=st.sampled_from([Fault.PASS, Fault.HOLD]))
    def hold_copies(self, number: int, side: Side, usual: Fault) -> None:
        self.pick(side, number).copies.usual = usual

    @rule(number=NUMBER, side=SIDE)
    def release_messages(self, number: int, side: Side) -> None:
        self.pick(side, number).link.release()

    @rule(number=NUMBER, side=SIDE)
    def release_copies(self, number: int, side: Side) -> None:
        self.pick(side, number).copier.release()

    @rule(number=NUMBER, side=SIDE)
    def late_copies(self, number: int, side: Side) -> None:
        node = self.pick(side, number)
        node.copier.release_in_doubt()

    @precondition(lambda self: self.next_pid < 10_000_000 + 2 * self.tp + 3)
    @rule(number=NUMBER, side=SIDE)
    def restart(self, number: int, side: Side) -> None:
        """Kill a process and start it again at its address."""
        node = self.pick(side, number)
        note(f"restart {node.side} {node.rank.card.rank}")
        self.dead.add(node.rank.card.host.pid)  # type: ignore[union-attr]
        node.copier.drop()
        node.link.abort()
        self.graves.append(node.rank)
        fresh = self.node(side, node.rank.card.rank, node.rank.card.address)
        self.nodes[self.nodes.index(node)] = fresh
        if side is Side.GENERATION:
            self.register(fresh)

    # --- what must always be so -----------------------------------------------------------------------------------

    @invariant()
    def quiet_pages_stay_as_they_are(self) -> None:
        for node in self.nodes:
            for request, kept in node.kept.items():
                for was, pages in zip(kept, node.pages(request), strict=True):
                    assert np.array_equal(was, pages), f"{node.side} request {request}: touched after its end"

    @invariant()
    def nothing_reads_pages_that_are_given_back(self) -> None:
        for node in self.contexts():
            for job in node.copier.pending():
                for slot in job.pages.src_slot:
                    handle = node.handles.get((int(slot) - 1) // BLOCKS)
                    assert handle is None or not handle.quiet, f"request {handle.request_id}: read after its end"

    @invariant()
    def null_pages_stay_empty(self) -> None:
        for node in self.nodes:
            for array in node.rank.arrays:
                pages = array.reshape(SLOTS, -1)
                assert not pages[0].any() and not pages[-1].any(), f"{node.side}: a page of nobody was written"

    def teardown(self) -> None:
        try:
            if self.nodes:
                self.everything_ends()
        finally:
            for door in (context_door, generation_door):
                door.process_is_gone = self.real  # type: ignore[attr-defined]
            for node in self.nodes:
                node.engine.close()
                node.link.abort()
                node.rank.close()
            for rank in self.graves:
                rank.close()

    def everything_ends(self) -> None:
        """No more faults: then every request ends, and only a copy in doubt keeps pages."""
        for node in self.nodes:
            node.messages.disarm()
            node.copies.disarm()
            node.link.release()
            node.copier.release()
        self.settle(40)
        for _ in range(4):
            self.clock.advance(TIMEOUT_S / 2 + 1)
            self.settle(20)
        self.quiet_pages_stay_as_they_are()
        for node in self.nodes:
            for request, handle in node.handles.items():
                assert handle.outcome is not None, f"{node.side} {node.rank.card.rank}: request {request} never ends"
                if not self.doubted:
                    assert handle.quiet, f"{node.side} request {request} never quiet: {handle.outcome.reason}"
            if not self.doubted:
                assert node.engine.drained()


class DirectSessions(Sessions):
    """One rank a side, pages written by the peer."""


class StagedSessions(Sessions):
    """One rank a side, chunks over the link."""

    path = PathKind.ZMQ


class DirectInstances(Sessions):
    """Two ranks a side."""

    tp = 2


class StagedInstances(Sessions):
    """Two ranks a side, chunks over the link."""

    tp, path = 2, PathKind.ZMQ


MACHINES = [(DirectSessions, 120), (StagedSessions, 120), (DirectInstances, 50), (StagedInstances, 50)]
"""And how many walks of each, in the ci profile."""


@pytest.mark.timeout(3000)  # the long profile, and the search for a short way to a failure
@pytest.mark.parametrize(("machine", "share"), MACHINES, ids=lambda value: getattr(value, "__name__", ""))
def test_no_page_is_touched_after_its_end_and_nothing_lives_for_ever(machine: type[Sessions], share: int) -> None:
    logging.disable(logging.CRITICAL)
    try:
        run_state_machine_as_test(
            machine, settings=settings(max_examples=max(1, WALKS * share // 60), stateful_step_count=60)
        )
    finally:
        logging.disable(logging.NOTSET)
