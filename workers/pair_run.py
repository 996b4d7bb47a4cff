"""One run of one pair: workers up, a workload through them, workers down."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Self

from transfer.gate import check_instances, require_compatible
from transfer.gate_report import GateReport
from transfer.hello import Side
from unikv.errors import LinkBrokenError
from workers.client import FleetClient
from workers.config import PairConfig
from workers.control import PathReport, Stop
from workers.fleet import Death, FleetManager
from workers.rendezvous import Rendezvous
from workers.topology import check_device, dry_cards, positions
from workers.workload import Job, RequestRecord, WorkloadDriver

ATTACH_S: Final = 120.0
"""Longest bring-up: importing and loading a model on a busy machine takes tens of seconds."""
DEATH_S: Final = 2.0
"""Longest time from a broken link to the news that its process has ended."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PairRun:
    """What one run of a workload through a pair yielded."""

    records: tuple[RequestRecord, ...]
    paths: tuple[PathReport, ...]
    draft_kv: str
    deaths: tuple[Death, ...]


def judge(pair: PairConfig) -> GateReport:
    """Run the gate before anything starts.

    Raises:
        ConfigError: a side wants a device that no worker can be started on.
        IncompatiblePeerError: the two sides do not fit; the text has every failed check.
    """
    for side in Side:
        check_device(pair.side(side))
    report = check_instances(dry_cards(pair, Side.CONTEXT), dry_cards(pair, Side.GENERATION))
    require_compatible(report)
    return report


class RunningPair:
    """The workers of a pair, attached and ready. A context manager: leaving it ends them all.

    Attributes:
        fleet: the processes.
        client: the link to them.
    """

    def __init__(self, pair: PairConfig, pair_arguments: Sequence[str], *, log_dir: Path | None = None) -> None:
        """Start the workers and wait until they are ready.

        Raises:
            ConfigError: the files of ``transfer.curve`` are not what they should be.
            IncompatiblePeerError: the gate refuses the pair.
            LinkBrokenError: a worker died or did not come up; the text has the end of its log.
        """
        judge(pair)
        keys = pair.transfer.curve_keys()
        self.pair = pair
        self.ranks = {side: len(positions(pair.side(side))) for side in Side}
        with ExitStack() as stack:
            rendezvous = stack.enter_context(Rendezvous.reserve())
            self.client = FleetClient(curve=keys)
            stack.callback(self.client.close)
            self.fleet = FleetManager()
            stack.callback(self.fleet.stop)
            stack.callback(self._ask_to_stop)
            self.fleet.start(pair, rendezvous.url, pair_arguments, log_dir)
            rendezvous.open()  # takes a second, in which the workers come up
            self.client.attach(rendezvous, self.ranks, timeout_s=ATTACH_S, alive=self._check_alive)
            self._stack = stack.pop_all()
        self._workload = WorkloadDriver(self.client, self.ranks, self.fleet.deaths)

    @property
    def paths(self) -> tuple[PathReport, ...]:
        """Which path every pair of ranks with bytes to move took."""
        return tuple(path for ready in self.client.ready.values() for path in ready.paths)

    @property
    def draft_kv(self) -> str:
        """Whether draft KV travels, as the generation ranks found."""
        verdicts = {ready.draft_kv for (side, _), ready in self.client.ready.items() if side is Side.GENERATION}
        return "off" if "off" in verdicts else min(verdicts, default="")

    def run(self, jobs: Sequence[Job], on_finished: Callable[[RequestRecord], None] = lambda _: None) -> PairRun:
        """Run a workload and return its records, also where workers die on the way. May be called again."""
        records = self._workload.run(
            jobs,
            concurrency=self.pair.workload.concurrency,
            timeout_s=2 * self.pair.transfer.timeout_s,
            on_finished=on_finished,
        )
        deaths = self.fleet.deaths_of(self.client.gone, timeout_s=DEATH_S)
        return PairRun(records=tuple(records), paths=self.paths, draft_kv=self.draft_kv, deaths=deaths)

    def close(self) -> None:
        """End the workers, then the link to them. Idempotent."""
        self._stack.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_exc: object) -> None:
        self.close()

    def _ask_to_stop(self) -> None:
        for side in (Side.GENERATION, Side.CONTEXT):
            self.client.send(side, Stop(reason="the run is over"))

    def _check_alive(self) -> None:
        deaths = self.fleet.deaths()
        if deaths:
            death = deaths[0]
            raise LinkBrokenError(f"{death.side} rank {death.rank} ended during start ({death.reason}):\n{death.tail}")
