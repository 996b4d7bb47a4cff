"""Which workers serve which request: one group of ranks on either side, several groups in turn.

Every instance is one group, or under attention data parallelism one group per data-parallel rank. Workers of a side are
numbered through::

    worker = instance * ranks per instance + rank
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass

from transfer.hello import ParallelPosition, Side
from workers.config import PairConfig, SideConfig
from workers.topology import positions

WorkerName = tuple[Side, int]
"""A side and the number of a worker on it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Route:
    """Where one request goes.

    Attributes:
        workers: everybody who takes part in it, on both sides.
        context_instance: number of the context instance.
        context_data_rank: data-parallel rank of it; None: the generation side is to find out by asking.
    """

    workers: frozenset[WorkerName]
    context_instance: int = 0
    context_data_rank: int | None = 0

    def ranks(self, side: Side) -> tuple[int, ...]:
        """Return the workers of one side, ascending."""
        return tuple(sorted(worker for other, worker in self.workers if other is side))


@dataclass(frozen=True, slots=True)
class _Group:
    instance: int
    data_rank: int
    workers: frozenset[WorkerName]


def num_workers(side: SideConfig) -> int:
    """Return the workers of all instances of a side."""
    return side.instances * side.parallel.world_size


def place_of(side: SideConfig, worker: int) -> tuple[int, ParallelPosition]:
    """Return instance and position of a worker, which must be there."""
    instance, rank = divmod(worker, side.parallel.world_size)
    return instance, positions(side)[rank]


def routes(pair: PairConfig) -> Iterator[Route]:
    """Yield a route for every request, for ever: groups in turn on both sides, until every pair of them has met.

    ::

        2 context and 2 generation groups       0 -> 0   1 -> 1   0 -> 1   1 -> 0   0 -> 0  ...
    """
    sources, targets = (_groups(pair.side(side)) for side in Side)
    period = math.lcm(len(sources), len(targets))
    for number in itertools.count():
        source = sources[number % len(sources)]
        target = targets[(number + number // period) % len(targets)]
        yield Route(
            workers=source.workers | target.workers,
            context_instance=source.instance,
            context_data_rank=source.data_rank if pair.workload.tell_data_rank else None,
        )


def _groups(side: SideConfig) -> list[_Group]:
    found: dict[tuple[int, int], set[WorkerName]] = {}
    for worker in range(num_workers(side)):
        instance, position = place_of(side, worker)
        found.setdefault((instance, position.data_rank), set()).add((side.side, worker))
    return [_Group(*key, frozenset(workers)) for key, workers in found.items()]
