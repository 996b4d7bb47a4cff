"""Random pairs of whole instances in one thread, every byte of every rank against an oracle that knows no lane."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import settings

from transfer.testing.case import InstanceShape, LayerKind, PairCase, RequestCase
from transfer.testing.oracle import all_ranks
from transfer.testing.oracle_gate import draft_travels, refusals
from transfer.testing.random_pairs import features, random_case
from transfer.testing.shrink import failure, minimal, report
from transfer.testing.simulator import Simulation, SimulationError, simulate

PAIRS = 500 if settings().max_examples < 1000 else 20_000
PORTION = 50


@pytest.fixture(autouse=True)
def quiet() -> Iterator[None]:
    """Every pair logs its paths and refusals: nothing to read here."""
    logging.disable(logging.CRITICAL)
    yield
    logging.disable(logging.NOTSET)


@pytest.mark.parametrize("first", range(0, PAIRS, PORTION))
def test_every_byte_of_random_pairs_is_where_the_oracle_says(first: int) -> None:
    for seed in range(first, first + PORTION):
        case = random_case(seed)
        if failure(case) is not None:
            pytest.fail(report(case), pytrace=False)


def test_the_random_pairs_have_everything_in_them_and_most_may_talk() -> None:
    accepted = [case for case in map(random_case, range(PAIRS)) if not refusals(case)]
    counts = Counter(feature for case in accepted for feature in features(case))
    assert len(accepted) > 0.7 * PAIRS
    assert len(counts) == 28
    assert min(counts.values()) >= 0.02 * PAIRS, counts.most_common()
    assert Counter(map(draft_travels, accepted))[True] > 0.15 * PAIRS


PLAIN = LayerKind(count=2, heads=4, window=6, policy="optional")
SIDE = InstanceShape(kinds=(PLAIN,), stages=(2,))
PAIR = PairCase(context=SIDE, generation=replace(SIDE, tp=2), requests=(RequestCase(prompt=11, early=True),), seed=3)


def test_a_byte_out_of_place_is_reported_with_its_owner() -> None:
    with Simulation(PAIR) as simulation:
        simulation.run()
        rank = simulation.generations[1]
        slot = int(rank.tables[0][0][2])
        rank.arrays[0][slot * rank.spread.stride[0]] ^= 1
        with pytest.raises(SimulationError, match=rf"rank 1: 1 bytes .* byte 0 of slot {slot} \(request 0 group 0 ord"):
            simulation._compare()


def test_a_failing_pair_is_reported_by_its_smallest_relative(monkeypatch: pytest.MonkeyPatch) -> None:
    """A fault that needs nothing but a window leaves nothing but a window."""
    monkeypatch.setattr("transfer.pages.stale_blocks", lambda tokens, window, sinks, size: range(0))
    case = next(case for case in map(random_case, range(200)) if isinstance(failure(case), SimulationError))
    small, error = minimal(case)
    assert isinstance(error, SimulationError)
    assert len(small.describe().splitlines()) <= 6
    assert "window=" in small.describe()


def test_the_same_seed_gives_the_same_pair() -> None:
    assert random_case(77) == random_case(77)
    assert random_case(77).describe() == random_case(77).describe()
    assert len({random_case(seed).describe() for seed in range(50)}) == 50


def test_the_oracle_places_heads_as_the_worked_examples_do() -> None:
    """Four heads: two ranks hold slices, eight ranks hold copies, in blocks and not in turn."""
    split = [rank.places[0, "key"].heads for rank in all_ranks(replace(SIDE, tp=2))]
    copied = [rank.places[0, "key"].heads for rank in all_ranks(replace(SIDE, tp=8))]
    assert split == [(0, 1), (2, 3)]
    assert copied == [(0,), (0,), (1,), (1,), (2,), (2,), (3,), (3,)]


def test_nothing_is_written_where_the_gate_refuses() -> None:
    other = replace(PAIR, generation=replace(PAIR.generation, kinds=(replace(PLAIN, dtype="float16"),)))
    assert simulate(other) == {"dtype"}
    with Simulation(other) as simulation:
        before = [array.copy() for rank in simulation.generations for array in rank.arrays]
        simulation.run()
        after = [array for rank in simulation.generations for array in rank.arrays]
        assert all(np.array_equal(*pair) for pair in zip(before, after, strict=True))
