"""Drives requests through a fleet: keeps `concurrency` of them open and joins the reports of all ranks."""

from __future__ import annotations

import itertools
import time
from collections import deque
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Final, Protocol

from transfer.hello import Side
from unikv.ids import RequestId
from workers.client import Report
from workers.control import ControlMessage, GiveUp, Proceed, PromptReport, RunDecode, RunPrompt
from workers.fleet import Death
from workers.request_record import CANCELLED, Job, RequestRecord
from workers.routing import Route, RouteManager, WorkerName

__all__ = ["GRACE_S", "Job", "RequestRecord", "WorkloadDriver"]

GRACE_S: Final = 2.0
"""How long the survivors of a dead worker may take to report what became of the open requests."""
POLL_S: Final = 0.1
"""Longest wait for reports."""


class Client(Protocol):
    """What a workload needs of `workers.client.FleetClient`."""

    @property
    def gone(self) -> dict[WorkerName, str]:
        """Workers whose control link broke, with the reason."""
        ...

    def send(self, side: Side, message: ControlMessage, ranks: Collection[int] | None = None) -> None:
        """Send to every rank of a side, or to `ranks` of it."""
        ...

    def poll(self, timeout_s: float = POLL_S) -> list[Report]:
        """Return the reports that arrived, waiting up to `timeout_s` for the first."""
        ...


class WorkloadDriver:
    """Runs jobs through the workers of one pair. It may run several workloads, one after the other.

    Args:
        client: the link to the workers.
        ranks: how many workers each side has.
        deaths: which workers have ended so far.
        first_id: request ids are counted from here. Workers remember the ids of requests that are over: who attaches
            to workers that others used before chooses a number that none of them can have reached.
        routes: where requests go; None: every request to all workers.
        clock: seconds that only grow.
    """

    def __init__(
        self,
        client: Client,
        ranks: Mapping[Side, int],
        deaths: Callable[[], Sequence[Death]],
        *,
        first_id: int = 1,
        routes: RouteManager | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._client, self._deaths, self._clock = client, deaths, clock
        self._routes = routes or RouteManager.of_ranks(ranks)
        self._ids = itertools.count(first_id)  # never the same twice
        self._open: dict[RequestId, RequestRecord] = {}
        self._given_up: set[RequestId] = set()
        self._doomed: dict[RequestId, float] = {}

    def run(
        self, jobs: Iterable[Job], *, concurrency: int, timeout_s: float, on_finished: Callable[[RequestRecord], None]
    ) -> list[RequestRecord]:
        """Run `jobs`; return a record of each, in order.

        Requests of a dead worker fail; the run goes on while there are instances without any, and ends early where
        there are none, or all are silent.

        Args:
            concurrency: requests open at one time.
            timeout_s: longest silence of all workers.
            on_finished: called as requests finish, for progress.
        """
        waiting, records, stuck = deque(jobs), list[RequestRecord](), False
        news_s = self._clock()
        while (waiting and not stuck) or self._open:
            while waiting and not stuck and len(self._open) < concurrency and self._may_begin(waiting[0], records):
                route = self._route(waiting[0], records)
                if route is None:
                    stuck = True
                else:
                    records.append(self._submit(waiting.popleft(), route))
            reports = self._client.poll(self._cancel_due())
            news_s = self._clock() if reports else news_s
            for report in reports:
                self._take(report)
            self._give_up_on_dead()
            self._finish(on_finished)
            if self._clock() - news_s > timeout_s:
                break
        verdict = self._verdict(self._dead()) or f"no worker reported anything for {timeout_s:g} s"
        for record in list(self._open.values()):
            self._abandon(record, verdict)
        return [*records, *(self._unsent(job, verdict) for job in waiting)]

    def _may_begin(self, job: Job, records: Sequence[RequestRecord]) -> bool:
        return job.after is None or records[job.after].request_id not in self._open

    def _route(self, job: Job, records: Sequence[RequestRecord]) -> Route | None:
        """Return where a request goes: where the caller wants it, where the one before it left its prefix, or on."""
        dead = self._dead().keys()
        if job.route is not None:
            return job.route
        before = None if job.after is None else records[job.after].route
        return before if before is not None and before.relies_on.isdisjoint(dead) else self._routes.take(dead)

    def _submit(self, job: Job, route: Route) -> RequestRecord:
        route = route.without_context() if job.local else route
        record = RequestRecord(RequestId(next(self._ids)), job, self._clock(), route)
        self._open[record.request_id] = record
        # Both sides at once: pages are reserved while the prompt is computed, and move the moment it is.
        decode = RunDecode(
            request_id=record.request_id,
            prompt=job.prompt,
            prompt_tokens=job.prompt_tokens,
            max_new_tokens=job.max_new_tokens,
            verify=True,
            context_instance=route.context_instance,
            context_data_rank=route.context_data_rank,
            hold=job.hold and not job.local,
        )
        prompt = RunPrompt(
            request_id=record.request_id, prompt=job.prompt, prompt_tokens=job.prompt_tokens, verify=True
        )
        self._client.send(Side.GENERATION, decode, route.ranks(Side.GENERATION))
        self._client.send(Side.CONTEXT, prompt, route.ranks(Side.CONTEXT))
        return record

    def _take(self, report: Report) -> None:
        record = self._open.get(report.request_id)
        if record is None:
            return  # of a run that is over
        record.add(report)
        context = {(side, rank) for side, rank in record.workers if side is Side.CONTEXT}
        if record.job.hold and isinstance(report, PromptReport) and context <= record.reporters():
            message = Proceed(request_id=record.request_id)
            self._client.send(Side.GENERATION, message, record.ranks(Side.GENERATION))
        if report.reason:
            # The other ranks need not wait for what cannot come any more.
            self._give_up([record.request_id], record.reason)

    def _give_up(self, request_ids: Iterable[RequestId], reason: str) -> None:
        for request_id in request_ids:
            if request_id not in self._given_up:
                self._given_up.add(request_id)
                for side in Side:
                    message = GiveUp(request_id=request_id, reason=reason)
                    self._client.send(side, message, self._open[request_id].ranks(side))

    def _cancel_due(self) -> float:
        """Cancel what the caller wants to be cancelled by now; return how long nothing else is due."""
        left_s = POLL_S
        for record in self._open.values():
            if record.job.cancel_after_s is not None and not record.cancelled:
                due_s = record.submitted_s + record.job.cancel_after_s - self._clock()
                if due_s <= 0:
                    record.cancelled = True
                    self._give_up([record.request_id], CANCELLED)
                else:
                    left_s = min(left_s, due_s)
        return left_s

    def _give_up_on_dead(self) -> None:
        """Give up what needs a dead worker, and stop waiting for what its survivors do not report in time."""
        dead = self._dead()
        for record in list(self._open.values()):
            lost = {name: fate for name, fate in dead.items() if name in record.workers}
            if lost:
                since_s = self._doomed.setdefault(record.request_id, self._clock())
                self._give_up([record.request_id], self._verdict(lost))
                if self._clock() - since_s > GRACE_S:
                    self._abandon(record, self._verdict(lost))

    def _finish(self, on_finished: Callable[[RequestRecord], None]) -> None:
        """Close the records of requests on which every rank that lives has reported."""
        dead = self._dead()
        for record in list(self._open.values()):
            missing = record.workers - record.reporters()
            if missing <= dead.keys():
                record.abandoned = self._verdict({name: dead[name] for name in sorted(missing)})
                record.finished_s = self._clock()
                self._forget(record)
                on_finished(record)

    def _forget(self, record: RequestRecord) -> None:
        del self._open[record.request_id]
        self._given_up.discard(record.request_id)
        self._doomed.pop(record.request_id, None)

    def _dead(self) -> dict[WorkerName, str]:
        """Return who is dead or gone, and of what."""
        deaths = {(death.side, death.rank): f"died ({death.reason})" for death in self._deaths()}
        return {name: f"is gone ({reason})" for name, reason in self._client.gone.items()} | deaths

    def _verdict(self, dead: Mapping[WorkerName, str]) -> str:
        return "; ".join(f"{side} rank {rank} {fate}" for (side, rank), fate in dead.items())

    def _abandon(self, record: RequestRecord, verdict: str) -> None:
        self._give_up([record.request_id], verdict)
        record.abandoned = verdict
        self._forget(record)

    def _unsent(self, job: Job, verdict: str) -> RequestRecord:
        record = RequestRecord(RequestId(next(self._ids)), job, self._clock())
        record.abandoned = verdict
        return record
