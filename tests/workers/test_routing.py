"""Routes: who serves a request, how requests are dealt, and what a dead worker takes with it."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from transfer.hello import Side
from unikv.errors import LocalProtocolError
from workers.config_load import load_pair
from workers.routing import RankGroup, Route, RouteManager, WorkerName, num_workers, place_of

WritePair = Callable[..., str]


def manager_of(write_pair: WritePair, **changes: object) -> RouteManager:
    return RouteManager.of_pair(load_pair(write_pair(**changes), environ={}))


def route_of(*route: Route | None) -> list[tuple[tuple[int, ...], tuple[int, ...]]]:
    """The workers of both sides of each route."""
    assert all(route)
    return [(item.ranks(Side.CONTEXT), item.ranks(Side.GENERATION)) for item in route if item]


def lone_groups(side: Side, count: int, each: int = 1) -> list[RankGroup]:
    """Groups of one rank, `each` of them to an instance."""
    groups = []
    for number in range(count):
        instance = number // each
        mates = frozenset((side, instance * each + mate) for mate in range(each))
        groups.append(
            RankGroup(instance=instance, data_rank=number % each, workers=frozenset({(side, number)}), mates=mates)
        )
    return groups


def test_one_instance_is_one_group_of_all_its_ranks(write_pair: WritePair) -> None:
    manager = manager_of(
        write_pair, context__parallel={"tp": 2, "pp": 2}, generation__parallel={"tp": 2}, speculative=None
    )
    assert route_of(*(manager.take() for _ in range(3))) == [((0, 1, 2, 3), (0, 1))] * 3


def test_instances_are_dealt_in_turn_until_all_pairs_have_met(write_pair: WritePair) -> None:
    manager = manager_of(write_pair, context__instances=2, generation__instances=2, generation__parallel={"tp": 2})
    found = [manager.take() for _ in range(4)]
    assert route_of(*found) == [((0,), (0, 1)), ((1,), (2, 3)), ((0,), (2, 3)), ((1,), (0, 1))]
    assert [(route.context_instance, route.context_data_rank) for route in found if route] == [
        (0, 0),
        (1, 0),
        (0, 0),
        (1, 0),
    ]


def test_data_parallel_ranks_are_groups_of_their_own_with_all_stages(write_pair: WritePair) -> None:
    parallel = {"tp": 2, "pp": 2, "attention_dp": True}
    told = manager_of(write_pair, context__instances=2, context__parallel=parallel)
    found = [told.take() for _ in range(4)]
    # Stage-major ranks: data-parallel rank 0 of an instance has ranks 0 and 2.
    assert [ranks for ranks, _ in route_of(*found)] == [(0, 2), (1, 3), (4, 6), (5, 7)]
    assert [(route.context_instance, route.context_data_rank) for route in found if route] == [
        (0, 0),
        (0, 1),
        (1, 0),
        (1, 1),
    ]
    untold = manager_of(write_pair, context__parallel=parallel, workload__tell_data_rank=False)
    assert [route.context_data_rank for _ in range(2) if (route := untold.take())] == [None, None]


@given(st.integers(1, 5), st.integers(1, 5), st.integers(0, 30))
def test_every_pair_of_groups_meets_and_nobody_has_more_than_a_share(sources: int, targets: int, before: int) -> None:
    manager = RouteManager(
        {Side.CONTEXT: lone_groups(Side.CONTEXT, sources), Side.GENERATION: lone_groups(Side.GENERATION, targets)}
    )
    for _ in range(before):
        manager.take()
    found = route_of(*(manager.take() for _ in range(2 * sources * targets)))
    assert set(found) == {((source,), (target,)) for source in range(sources) for target in range(targets)}
    for side, groups in ((0, sources), (1, targets)):
        counts = [sum(pair[side] == (number,) for pair in found) for number in range(groups)]
        assert max(counts) - min(counts) <= 2


@given(st.integers(1, 3), st.integers(1, 3), st.data())
def test_what_relies_on_the_dead_is_left_out_and_nothing_else(sources: int, targets: int, data: st.DataObject) -> None:
    """Two data-parallel ranks to an instance: with one of them the other is gone."""
    groups = {
        Side.CONTEXT: lone_groups(Side.CONTEXT, 2 * sources, 2),
        Side.GENERATION: lone_groups(Side.GENERATION, 2 * targets, 2),
    }
    everybody = sorted(name for side in groups.values() for group in side for name in group.workers)
    dead: set[WorkerName] = data.draw(st.sets(st.sampled_from(everybody)))
    manager = RouteManager(groups)
    found = [manager.take(dead) for _ in range(8 * sources * targets)]
    alive = {side: {group.workers for group in groups[side] if group.mates.isdisjoint(dead)} for side in groups}
    wanted = {source | target for source in alive[Side.CONTEXT] for target in alive[Side.GENERATION]}
    assert {route.workers for route in found if route} == wanted
    assert (None in found) == (not wanted)


def test_the_caller_picks(write_pair: WritePair) -> None:
    manager = manager_of(write_pair, context__instances=2, generation__instances=3)
    assert route_of(manager.pick(context=1, generation=2), manager.pick(context=1, generation=0)) == [
        ((1,), (2,)),
        ((1,), (0,)),
    ]
    with pytest.raises(LocalProtocolError, match=r"route: generation group is 3, expected in \[0, 3\)"):
        manager.pick(context=0, generation=3)


def test_a_route_without_context_keeps_the_generation_group(write_pair: WritePair) -> None:
    route = manager_of(write_pair, context__instances=2, generation__parallel={"tp": 2}).pick(context=1, generation=0)
    local = route.without_context()
    assert (local.ranks(Side.CONTEXT), local.ranks(Side.GENERATION)) == ((), (0, 1))
    assert (local.context_instance, local.relies_on) == (None, local.workers)


def test_workers_are_numbered_through_the_instances(write_pair: WritePair) -> None:
    side = load_pair(write_pair(context__instances=3, context__parallel={"tp": 2}), environ={}).context
    assert num_workers(side) == 6
    assert [(instance, place.rank) for instance, place in (place_of(side, worker) for worker in range(6))] == [
        (0, 0),
        (0, 1),
        (1, 0),
        (1, 1),
        (2, 0),
        (2, 1),
    ]
