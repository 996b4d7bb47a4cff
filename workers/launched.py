"""Which worker of a pair this process is: as the command line says, else as the launcher numbered it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from transfer.hello import Side
from unikv.errors import ConfigError, explain
from workers.config import PairConfig
from workers.config_env import LaunchEnvironment, read_launch
from workers.rendezvous import host_of
from workers.routing import num_workers


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerPlace:
    """A worker's place.

    Attributes:
        url: of the rendezvous.
        serve: this process hosts it.
        several_hosts: the launcher started workers on other hosts too.
    """

    side: Side
    rank: int
    url: str
    serve: bool = False
    several_hosts: bool = False


def place_worker(
    pair: PairConfig,
    side: Side | None,
    rank: int | None,
    url: str | None,
    *,
    environ: Mapping[str, str] | None = None,
) -> WorkerPlace:
    """Return which worker this is.

    With `side`, rank and url, the environment does not matter. With `side` alone a launcher started that side; without
    it a launcher started both, context ranks first.

    Args:
        pair: the pair file.
        side, rank, url: what the command line says; None where it does not.
        environ: environment to read; None for the process's own.

    Raises:
        ConfigError: something is said nowhere, or the launcher started another number of workers than the pair has.
    """
    if url is not None:
        host_of(url)
    if side is not None and rank is not None and url is not None:
        return WorkerPlace(side=side, rank=rank, url=url)
    if rank is not None and side is None:
        raise ConfigError(explain("worker", "--side", None, "a side, as there is --rank", "pass --side"))
    launch = read_launch(environ)
    if rank is None:
        side, rank = _place(pair, side, launch)
    assert side is not None
    return WorkerPlace(
        side=side,
        rank=rank,
        url=url or launch.rendezvous,
        serve=url is None and not launch.hosts_store and launch.rank == 0,
        several_hosts=launch.several_hosts,
    )


def _place(pair: PairConfig, side: Side | None, launch: LaunchEnvironment) -> tuple[Side, int]:
    sides = tuple(Side) if side is None else (side,)
    counts = [num_workers(pair.side(each)) for each in sides]
    if launch.world_size != sum(counts):
        want = " + ".join(f"{count} {each}" for each, count in zip(sides, counts, strict=True)) + " rank(s)"
        cure = "give torchrun as many processes in all (--nnodes x --nproc-per-node), or change parallel"
        raise ConfigError(explain("environment", "WORLD_SIZE", launch.world_size, want, cure))
    if side is None and launch.rank >= counts[0]:
        return Side.GENERATION, launch.rank - counts[0]
    return sides[0], launch.rank
