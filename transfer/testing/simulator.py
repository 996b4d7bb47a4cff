"""Runs a pair of instances in this thread: real layouts, cards, engines, links and copies, and a clock that is stepped.

Every rank has its memory full of noise. Slots are dealt out at random, requests are published and asked for in any
order, and turns of engines come in any order, too. At the end every byte of every rank is compared with what the
oracle says: right where something was to arrive, as it was everywhere else, on both sides.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Final

import numpy as np

from transfer.hello import Side
from transfer.messages import AuxData
from transfer.outcome import Outcome, TransferHandle
from transfer.readiness import ReadinessManager
from transfer.testing.case import PairCase, RequestCase
from transfer.testing.oracle import Numbers, addresses, all_ranks, expected_writes, truth, wanted_blocks
from transfer.testing.oracle_gate import draft_travels, refusals
from transfer.testing.sim_ranks import SimRank, SimRankManager
from unikv.ids import NO_PAGE, LayerId, RequestId

MOST_ROUNDS: Final = 4000
STEP_S: Final = 0.001


class SimulationError(AssertionError):
    """The pair did something else than the oracle says."""


class Simulation:
    """One pair from start to end. Use as a context manager; `run` raises SimulationError where the oracle disagrees.

    Args:
        case: the pair.
    """

    def __init__(self, case: PairCase) -> None:
        self.case = case
        self.refused: frozenset[str] = frozenset()
        self.contexts: list[SimRank] = []
        self.generations: list[SimRank] = []
        self._ranks = SimRankManager(case)
        self.draw, self.noise, self.clock = self._ranks.draw, self._ranks.noise, self._ranks.clock

    def __enter__(self) -> Simulation:
        try:
            self.contexts = [self._ranks.start(Side.CONTEXT, facts) for facts in all_ranks(self.case.context)]
            self.generations = [self._ranks.start(Side.GENERATION, facts) for facts in all_ranks(self.case.generation)]
        except BaseException:
            self._ranks.stack.close()
            raise
        return self

    def __exit__(self, *error: object) -> None:
        self._ranks.stack.close()

    def run(self) -> None:
        """Connect everybody, run all requests, compare all bytes."""
        self._connect()
        if self.refused:
            self._compare()
            return
        steps = [self.scripts(number) for number in range(len(self.case.requests))]
        self._play([step for own in steps for step in own])
        self._settle()
        self._account()
        self._compare()

    # --- running --------------------------------------------------------------------------------------------------

    def _connect(self) -> None:
        for rank in self.generations:
            rank.peers = [rank.engine.register(peer.card.address) for peer in self.contexts]
        self._until(lambda: all(peer.decided for rank in self.generations for peer in rank.peers), "hellos")
        answers = [peer for rank in self.generations for peer in rank.peers]
        names = [check.name for peer in answers if peer.answer for check in peer.answer.report.refused]
        unexplained = [peer.refusal for peer in answers if peer.refusal and not (peer.answer and names)]
        want = refusals(self.case)
        if frozenset(names) != want or unexplained:
            text = f"the gate refuses for {sorted(set(names))} {unexplained[:1]}, the oracle for {sorted(want)}"
            raise SimulationError(text)
        self.refused = want

    def scripts(self, number: int) -> list[Iterator[None]]:
        """Return what happens to one request, as scripts: context ranks publish, then generation ranks ask."""
        request = self.case.requests[number]
        sources = [rank for rank in self.contexts if number in rank.tables]
        targets = [rank for rank in self.generations if number in rank.tables]
        scripts = [self._publish(rank, number, request) for rank in sources]
        asks = [self._ask(rank, number, request, sources) for rank in targets]
        if request.ask_first:
            return [_one_after_another([*asks, _together(scripts)])]
        return [*scripts, *asks]

    def _publish(self, rank: SimRank, number: int, request: RequestCase) -> Iterator[None]:
        table = rank.table(number, lambda group: self._kept(rank, group, request))
        handle = rank.handles[number] = TransferHandle(RequestId(number))
        if not request.early:
            for layer in rank.facts.layers:
                self._fill(rank, number, request, layer, 0, None)
            rank.engine.publish(handle, table, request.prompt, _aux(request))
            return
        readiness = ReadinessManager(request.prompt, complete=False)
        rank.engine.publish(handle, table, request.prompt, None, readiness)
        yield
        done = 0
        while done < request.prompt:
            first, done = done, min(request.prompt, done + self.draw.randint(1, request.prompt))
            for layer in sorted(rank.facts.layers):
                self._fill(rank, number, request, layer, first, done if done < request.prompt else None)
                readiness.mark(LayerId(layer), done)
                yield
        rank.engine.finish(RequestId(number), _aux(request))

    def _kept(self, rank: SimRank, index: int, request: RequestCase) -> Numbers:
        """Return the blocks the context side still has: some of those that left the window are gone."""
        group, tpb = rank.facts.groups[index], rank.facts.shape.tpb
        blocks = np.arange(-(-request.prompt // tpb) + request.tail_blocks)
        if group.window is None or rank.manager is not None:
            return blocks
        stale = ((blocks + 1) * tpb <= request.prompt + 1 - group.window) & (blocks >= group.sink_blocks)
        kept: Numbers = blocks[~stale | (self.noise.random(len(blocks)) < 0.3)]
        return kept

    def _fill(self, rank: SimRank, number: int, request: RequestCase, layer: int, first: int, end: int | None) -> None:
        """Compute the KV of one layer for tokens ``[first, end)``; None: to the end of the pages."""
        for (own, role), place in rank.facts.places.items():
            if own != layer:
                continue
            slots = rank.tables[number][place.group]
            tokens = np.arange(first, len(slots) * rank.facts.shape.tpb if end is None else end)
            tokens = tokens[slots[tokens // rank.facts.shape.tpb] != NO_PAGE]
            places = addresses(rank.facts, place, rank.spread, slots[tokens // rank.facts.shape.tpb], tokens)
            values = truth(number, layer, role, place.heads, tokens, place.row_bytes)
            rank.arrays[place.storage][places] = values
            rank.expected[place.storage][places] = values

    def _ask(self, rank: SimRank, number: int, request: RequestCase, sources: list[SimRank]) -> Iterator[None]:
        yield
        asked = sources if request.told else self.contexts
        groups = rank.facts.groups
        table = rank.table(number, lambda group: wanted_blocks(rank.facts, groups[group], request))
        handle = rank.handles[number] = TransferHandle(RequestId(number))
        rank.engine.receive(handle, table, request.prompt, [peer.card.address for peer in asked])

    def _play(self, scripts: list[Iterator[None]]) -> None:
        """Advance scripts and engines in random order until all scripts are over."""
        everybody = [*self.contexts, *self.generations]
        while scripts:
            script = self.draw.choice(scripts)
            if next(script, self) is self:
                scripts.remove(script)
            for rank in self.draw.sample(everybody, self.draw.randint(0, len(everybody))):
                self._turn(rank)

    def _settle(self) -> None:
        handles = [handle for rank in (*self.contexts, *self.generations) for handle in rank.handles.values()]
        self._until(lambda: all(handle.quiet for handle in handles), "requests")
        for handle in handles:
            if handle.outcome is None or not handle.outcome.ok:
                raise SimulationError(f"request {handle.request_id} ended with {handle.outcome}")
        for rank in (*self.contexts, *self.generations):
            if not rank.engine.drained() or rank.engine._exchange.refused:
                raise SimulationError(f"{rank.card.side} rank {rank.card.rank}: {rank.engine._exchange.refused}")

    def _until(self, over: Callable[[], bool], what: str) -> None:
        everybody = [*self.contexts, *self.generations]
        for _ in range(MOST_ROUNDS):
            if over():
                return
            self.draw.shuffle(everybody)
            for rank in everybody:
                self._turn(rank)
        raise SimulationError(f"{what} are not over after {MOST_ROUNDS} rounds")

    def _turn(self, rank: SimRank) -> None:
        self.clock.now_s += STEP_S
        rank.engine.turn(0.0)

    # --- judging --------------------------------------------------------------------------------------------------

    def _account(self) -> None:
        """Put what must have arrived into the expected memory, and compare the counts of bytes."""
        with_draft, peer = draft_travels(self.case), self.case.context
        for rank in self.generations:
            for number in rank.tables:
                want = {False: 0, True: 0}
                request, tables = self.case.requests[number], rank.tables[number]
                for draft, storage, places, values in expected_writes(
                    rank.facts, rank.spread, number, request, peer, tables
                ):
                    if draft and not with_draft:
                        continue
                    rank.expected[storage][places] = values
                    want[draft] += values.size
                outcome = rank.handles[number].outcome
                legs = outcome.legs if outcome else ()
                self._check_aux(rank, request, outcome)
                got = (sum(leg.bytes for leg in legs), sum(leg.draft_bytes for leg in legs))
                if got != (want[False] + want[True], want[True]):
                    text = f"generation rank {rank.card.rank}, request {number}: {got} bytes in all and of draft layers"
                    raise SimulationError(f"{text} are reported, the oracle counts {want}")

    def _check_aux(self, rank: SimRank, request: RequestCase, outcome: Outcome | None) -> None:
        room = rank.facts.shape.speculation[1] if rank.facts.shape.speculation else 0
        sent = _aux(request)
        want = replace(sent, draft_tokens=sent.draft_tokens[:room])
        if outcome is None or outcome.aux != (want if outcome.legs else None):
            raise SimulationError(f"generation rank {rank.card.rank}: {outcome} came with other tokens than {want}")

    def _compare(self) -> None:
        for rank in (*self.contexts, *self.generations):
            for storage, (array, want) in enumerate(zip(rank.arrays, rank.expected, strict=True)):
                wrong = np.flatnonzero(array != want)
                if len(wrong):
                    raise SimulationError(_explain(rank, storage, wrong))


def _explain(rank: SimRank, storage: int, wrong: Numbers) -> str:
    """Say whose bytes are wrong: the first of them by slot, request, layer and role."""
    at = int(wrong[0]) - rank.spread.base_bytes
    slot, inside = divmod(at, rank.spread.stride[storage])
    owner = [
        f"layer {layer} {role}"
        for (layer, role), place in rank.facts.places.items()
        if place.storage == storage and place.offset <= inside
    ]
    holders = [
        f"request {number} group {group} ordinal {list(slots).index(slot)}"
        for number, tables in rank.tables.items()
        for group, slots in enumerate(tables)
        if storage in rank.facts.groups[group].storages and slot in slots
    ]
    text = f"{rank.card.side} rank {rank.card.rank}: {len(wrong)} bytes of storage {storage} are not what they must be;"
    where = ", ".join(holders) or "which nobody has"
    return f"{text} the first is byte {inside} of slot {slot} ({where}), perhaps of {' or '.join(owner) or 'nobody'}"


def _aux(request: RequestCase) -> AuxData:
    first, drafts = (tuple(range(7, 7 + count)) for count in (request.first_tokens, request.draft_tokens))
    return AuxData(first_tokens=first, draft_tokens=drafts, prompt_tokens=request.prompt)


def _one_after_another(scripts: list[Iterator[None]]) -> Iterator[None]:
    for script in scripts:
        yield from script


def _together(scripts: list[Iterator[None]]) -> Iterator[None]:
    """Advance all scripts in turn."""
    while scripts:
        scripts = [script for script in scripts if next(script, scripts) is not scripts]
        yield


def simulate(case: PairCase) -> frozenset[str]:
    """Run one pair.

    Returns:
        The checks that refused it, rightly; empty where everything arrived.

    Raises:
        SimulationError: something happened that the oracle does not say.
    """
    with Simulation(case) as simulation:
        simulation.run()
        return simulation.refused
