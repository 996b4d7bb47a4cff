"""Fleets: worker processes are started from one parent, watched, and ended, whatever happens to whom."""

from __future__ import annotations

import os
import select
import signal
from collections.abc import Callable
from pathlib import Path

import pytest

from transfer.hello import Side
from unikv.errors import LinkBrokenError
from workers.config import PairConfig
from workers.fleet import Death, FleetManager
from workers.pair_run import RunningPair
from workers.rendezvous import Rendezvous

pytestmark = pytest.mark.usefixtures("store_library")

PATIENCE_S = 30.0


def ended(pid: int) -> bool:
    """Wait for the end of a process that is not our child."""
    try:
        descriptor = os.pidfd_open(pid)
    except ProcessLookupError:
        return True
    try:
        return bool(select.select([descriptor], [], [], PATIENCE_S)[0])
    finally:
        os.close(descriptor)


def wait_for(fleet: FleetManager, condition: Callable[[tuple[Death, ...]], bool]) -> tuple[Death, ...]:
    """Read what the fleet's parent says until `condition` holds for the deaths so far."""
    while not condition(deaths := fleet.deaths()):
        assert fleet._nursery is not None and fleet._nursery.stdout is not None
        ready, _, _ = select.select([fleet._nursery.stdout], [], [], PATIENCE_S)
        assert ready, "the fleet's parent is silent"
    return deaths


def all_started(fleet: FleetManager) -> Callable[[tuple[Death, ...]], bool]:
    return lambda _: all(worker.pid for worker in fleet.workers)


@pytest.fixture
def pair(tiny_pair: Callable[..., PairConfig]) -> PairConfig:
    return tiny_pair(context__parallel={"tp": 2})


def test_workers_that_cannot_start_are_deaths_with_their_last_words(pair: PairConfig, tmp_path: Path) -> None:
    with FleetManager() as fleet:
        fleet.start(pair, "tcp://127.0.0.1:1", ["no-such-pair.yaml"], tmp_path / "logs")
        assert [worker.name for worker in fleet.workers] == ["context rank 0", "context rank 1", "generation rank 0"]
        deaths = wait_for(fleet, lambda deaths: len(deaths) == 3)
        assert {(death.side, death.rank) for death in deaths} == {
            (Side.CONTEXT, 0),
            (Side.CONTEXT, 1),
            (Side.GENERATION, 0),
        }
        for death in deaths:
            assert (death.reason, death.orderly) == ("exit code 64", False)
            assert "no-such-pair.yaml" in death.tail
        assert fleet.deaths() == deaths
    assert fleet.deaths() == deaths
    assert sorted(path.name for path in (tmp_path / "logs").iterdir()) == [
        "context-0.log",
        "context-1.log",
        "generation-0.log",
        "start.log",
    ]


def test_a_fleet_ends_what_it_started_even_workers_that_wait(pair: PairConfig) -> None:
    with Rendezvous.reserve() as silent, FleetManager() as fleet:  # workers wait for the store to open
        fleet.start(pair, silent.url, [pair.source], None)
        wait_for(fleet, all_started(fleet))
        pids = [worker.pid for worker in fleet.workers]
        assert len(set(pids)) == 3
        fleet.stop()
        fleet.stop()
        assert not [pid for pid in pids if Path(f"/proc/{pid}").exists()]
        assert fleet.deaths() == (), "who was asked to end has not died"
        ended_badly = {worker.rank: worker.code for worker in fleet.workers if worker.code}
        assert {death.rank for death in fleet.unclean()} == set(ended_badly), "but may have had to be killed"


def test_a_killed_worker_is_a_death_and_the_others_live(pair: PairConfig) -> None:
    with Rendezvous.reserve() as silent, FleetManager() as fleet:
        fleet.start(pair, silent.url, [pair.source], None)
        wait_for(fleet, all_started(fleet))
        os.kill(fleet.workers[1].pid, signal.SIGKILL)
        [death] = fleet.deaths_of([(Side.CONTEXT, 1)], timeout_s=PATIENCE_S)
        assert (death.side, death.rank, death.reason, death.orderly) == (Side.CONTEXT, 1, "signal SIGKILL", False)
        assert [worker.code for worker in fleet.workers] == [None, -9, None]
        assert fleet.deaths_of([(Side.CONTEXT, 0)], timeout_s=0.0) == (death,), "a suspect that lives is no death"


def test_workers_end_with_their_parent(pair: PairConfig) -> None:
    with Rendezvous.reserve() as silent, FleetManager() as fleet:
        fleet.start(pair, silent.url, [pair.source], None)
        wait_for(fleet, all_started(fleet))
        assert fleet._nursery is not None
        fleet._nursery.kill()
        assert all(ended(worker.pid) for worker in fleet.workers)
        fleet._nursery.wait(PATIENCE_S)
        deaths = fleet.deaths()
        assert [death.reason for death in deaths] == ["its parent ended with signal SIGKILL"] * 3


def test_a_parent_that_cannot_start_is_told(pair: PairConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("workers.fleet.NURSERY", "workers.no_such_module")
    with FleetManager() as fleet:
        fleet.start(pair, "tcp://127.0.0.1:1", [pair.source], None)
        assert fleet._nursery is not None
        fleet._nursery.wait(PATIENCE_S)
        deaths = fleet.deaths()
        assert len(deaths) == 3
        assert deaths[0].reason == "its parent ended with exit code 1"
        assert "workers.no_such_module" in deaths[0].tail


def test_a_fleet_that_never_started_can_be_stopped() -> None:
    fleet = FleetManager()
    assert fleet.deaths() == ()
    fleet.stop()


def test_a_worker_that_dies_at_start_ends_the_run_with_the_end_of_its_log(
    tiny_pair: Callable[..., PairConfig], write_pair: Callable[..., str]
) -> None:
    pair = tiny_pair()
    other = write_pair("other", generation__pool={"pages": 24}, generation__device="cuda")
    with pytest.raises(LinkBrokenError, match=r"generation rank 0 ended during start \(exit code 64\):") as caught:
        RunningPair(pair, [other])
    assert "generation worker: device is 'cuda', expected a CUDA device, and torch finds none; " in str(caught.value)
