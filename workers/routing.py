"""Which workers serve which request: one group of ranks on either side.

Every instance is one group, or under attention data parallelism one group per data-parallel rank. Workers of a side are
numbered through::

    worker = instance * ranks per instance + rank
    group  = instance * data-parallel ranks + data-parallel rank

The caller routes: it may pick both groups itself (`RouteManager.pick`), and whoever does not gets them in turn, so that
every pair of groups meets (`RouteManager.take`). An instance of which a worker has died gets no more requests; the
others go on.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Self

from transfer.hello import ParallelPosition, Side
from unikv.errors import LocalProtocolError, explain
from workers.config import PairConfig, SideConfig
from workers.topology import positions

WorkerName = tuple[Side, int]
"""A side and the number of a worker on it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Route:
    """Where one request goes.

    Attributes:
        workers: everybody who takes part in it, on both sides.
        relies_on: all workers of the two instances.
        context_instance: number of the context instance; None: the generation side computes the prompt itself.
        context_data_rank: data-parallel rank of it; None: the generation side is to find out by asking.
    """

    workers: frozenset[WorkerName]
    relies_on: frozenset[WorkerName]
    context_instance: int | None = 0
    context_data_rank: int | None = 0

    def without_context(self) -> Route:
        """Return the same generation group for a prompt that it computes itself."""
        workers, relies_on = (
            frozenset(name for name in names if name[0] is Side.GENERATION) for names in (self.workers, self.relies_on)
        )
        return Route(workers=workers, relies_on=relies_on, context_instance=None, context_data_rank=None)

    def ranks(self, side: Side) -> tuple[int, ...]:
        """Return the workers of one side, ascending."""
        return tuple(sorted(worker for other, worker in self.workers if other is side))


@dataclass(frozen=True, slots=True, kw_only=True)
class RankGroup:
    """The workers of one side that serve a request together.

    Attributes:
        data_rank: the group's number in its instance.
        mates: the workers of all groups of the instance.
    """

    instance: int
    data_rank: int
    workers: frozenset[WorkerName]
    mates: frozenset[WorkerName]


def num_workers(side: SideConfig) -> int:
    """Return the workers of all instances of a side."""
    return side.instances * side.parallel.world_size


def place_of(side: SideConfig, worker: int) -> tuple[int, ParallelPosition]:
    """Return instance and position of a worker, which must be there."""
    instance, rank = divmod(worker, side.parallel.world_size)
    return instance, positions(side)[rank]


class RouteManager:
    """Gives requests to groups of ranks, in turn.

    ::

        2 context and 2 generation groups       0 -> 0   1 -> 1   0 -> 1   1 -> 0   0 -> 0  ...

    Args:
        groups: of either side, at least one.
        tell_data_rank: whether the generation side learns which data-parallel rank computes a prompt.
    """

    def __init__(self, groups: Mapping[Side, Sequence[RankGroup]], *, tell_data_rank: bool = True) -> None:
        self._sources, self._targets = groups[Side.CONTEXT], groups[Side.GENERATION]
        self._tell_data_rank = tell_data_rank
        self._number = 0

    @classmethod
    def of_pair(cls, pair: PairConfig) -> Self:
        """Return a manager for all instances a pair file describes."""
        groups = {side: _groups(pair.side(side)) for side in Side}
        return cls(groups, tell_data_rank=pair.workload.tell_data_rank)

    @classmethod
    def of_ranks(cls, ranks: Mapping[Side, int]) -> Self:
        """Return a manager for one instance on either side, whose ranks all take part in every request."""
        return cls({side: [_group(side, 0, 0, range(count), range(count))] for side, count in ranks.items()})

    def take(self, dead: Collection[WorkerName] = ()) -> Route | None:
        """Return the next route that relies on nobody in `dead`; None where there is none any more."""
        # So many numbers in a row have every pair of groups among them.
        for _ in range(2 * len(self._sources) * len(self._targets)):
            number, self._number = self._number, self._number + 1
            period = math.lcm(len(self._sources), len(self._targets))
            route = self._join(
                self._sources[number % len(self._sources)],
                self._targets[(number + number // period) % len(self._targets)],
            )
            if route.relies_on.isdisjoint(dead):
                return route
        return None

    def pick(self, *, context: int, generation: int) -> Route:
        """Return the route from one group to another.

        Raises:
            LocalProtocolError: a side has no such group.
        """
        for name, number, groups in (("context", context, self._sources), ("generation", generation, self._targets)):
            if not 0 <= number < len(groups):
                want, cure = f"in [0, {len(groups)})", "count instance * data-parallel ranks + data-parallel rank"
                raise LocalProtocolError(explain("route", f"{name} group", number, want, cure))
        return self._join(self._sources[context], self._targets[generation])

    def _join(self, source: RankGroup, target: RankGroup) -> Route:
        return Route(
            workers=source.workers | target.workers,
            relies_on=source.mates | target.mates,
            context_instance=source.instance,
            context_data_rank=source.data_rank if self._tell_data_rank else None,
        )


def _groups(side: SideConfig) -> list[RankGroup]:
    found, size = list[RankGroup](), side.parallel.world_size
    for instance in range(side.instances):
        mates = range(instance * size, (instance + 1) * size)
        members: dict[int, list[int]] = {}
        for worker, position in zip(mates, positions(side), strict=True):
            members.setdefault(position.data_rank, []).append(worker)
        found += [_group(side.side, instance, rank, workers, mates) for rank, workers in sorted(members.items())]
    return found


def _group(side: Side, instance: int, data_rank: int, workers: Iterable[int], mates: Iterable[int]) -> RankGroup:
    return RankGroup(
        instance=instance,
        data_rank=data_rank,
        workers=frozenset((side, worker) for worker in workers),
        mates=frozenset((side, worker) for worker in mates),
    )
