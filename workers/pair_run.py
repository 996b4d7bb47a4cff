"""One run of one pair: workers up, a workload through them, workers down."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Self

from transfer.gate import check_instances, require_compatible
from transfer.gate_report import GateReport
from transfer.hello import Side
from unikv.errors import LinkBrokenError
from workers.addresses import choose_address
from workers.client import FleetClient
from workers.config import PairConfig
from workers.control import PathReport, Stop
from workers.fleet import Death, FleetManager
from workers.rendezvous import Rendezvous, host_of
from workers.routing import RouteManager, num_workers
from workers.topology import check_carrier, check_device, dry_cards
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
        ConfigError: a side wants a device that no worker can be started on, or a carrier that is not installed.
        IncompatiblePeerError: the two sides do not fit; the text has every failed check.
    """
    for side in Side:
        check_device(pair.side(side))
    check_carrier(pair)
    report = check_instances(dry_cards(pair, Side.CONTEXT), dry_cards(pair, Side.GENERATION))
    require_compatible(report)
    return report


class RunningPair:
    """The workers of a pair, attached and ready. A context manager: leaving it ends them all.

    Attributes:
        fleet: the processes.
        client: the link to them.
        routes: which of them serve which request; jobs without a route go where it is their turn.
    """

    def __init__(
        self,
        pair: PairConfig,
        pair_arguments: Sequence[str],
        *,
        log_dir: Path | None = None,
        rendezvous_url: str | None = None,
    ) -> None:
        """Start the workers, or find those that others started, and wait until they are ready.

        Args:
            rendezvous_url: where workers that others started are announced; they go on when we leave. None starts them.

        Raises:
            ConfigError: the files of ``transfer.curve`` are not what they should be.
            IncompatiblePeerError: the gate refuses the pair.
            LinkBrokenError: a worker died or did not come up; the text has the end of its log.
        """
        judge(pair)
        self.pair = pair
        self.ranks = {side: num_workers(pair.side(side)) for side in Side}
        with ExitStack() as stack:
            meet = Rendezvous.reserve() if rendezvous_url is None else Rendezvous.join(rendezvous_url)
            rendezvous, ours = stack.enter_context(meet), rendezvous_url is None
            self.client = self._make_client(rendezvous.url, owner=ours)
            stack.callback(self.client.close)
            self.fleet = FleetManager()
            if ours:
                stack.callback(self.fleet.stop)
                stack.callback(self._ask_to_stop)
                self.fleet.start(pair, rendezvous.url, pair_arguments, log_dir)
                rendezvous.open()  # takes a second, in which the workers come up
            self.client.attach(rendezvous, self.ranks, timeout_s=ATTACH_S, alive=self._check_alive)
            self._stack = stack.pop_all()
        self.routes = RouteManager.of_pair(pair)
        first_id = 1 if rendezvous_url is None else secrets.randbits(48) + 1
        self._workload = WorkloadDriver(
            self.client, self.ranks, self.fleet.deaths, routes=self.routes, first_id=first_id
        )

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

    def _make_client(self, rendezvous_url: str, *, owner: bool) -> FleetClient:
        transfer = self.pair.transfer
        address = choose_address(host_of(rendezvous_url), listen=transfer.listen, advertise=transfer.advertise)
        keys, silence_s = transfer.curve_keys(), transfer.peer_silence_s
        return FleetClient(owner=owner, curve=keys, address=address, silence_s=silence_s)

    def _ask_to_stop(self) -> None:
        for side in (Side.GENERATION, Side.CONTEXT):
            self.client.send(side, Stop(reason="the run is over"))

    def _check_alive(self) -> None:
        deaths = self.fleet.deaths()
        if deaths:
            death = deaths[0]
            raise LinkBrokenError(f"{death.side} rank {death.rank} ended during start ({death.reason}):\n{death.tail}")
