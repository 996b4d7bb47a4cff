"""Drives requests through a fleet: keeps `concurrency` of them open and joins the reports of all ranks."""

from __future__ import annotations

import itertools
import time
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import Final, Protocol

from transfer.hello import Side
from unikv.ids import RequestId
from workers.client import Report
from workers.control import ControlMessage, GiveUp, RunDecode, RunPrompt
from workers.fleet import Death
from workers.request_record import Job, RequestRecord
from workers.routing import Route, WorkerName

__all__ = ["GRACE_S", "Job", "RequestRecord", "WorkloadDriver"]

GRACE_S: Final = 2.0
"""How long the survivors of a dead worker may take to report what became of the open requests."""


class Client(Protocol):
    """What a workload needs of `workers.client.FleetClient`."""

    @property
    def gone(self) -> dict[WorkerName, str]:
        """Workers whose control link broke, with the reason."""
        ...

    def send(self, side: Side, message: ControlMessage, ranks: Collection[int] | None = None) -> None:
        """Send to every rank of a side, or to `ranks` of it."""
        ...

    def poll(self) -> list[Report]:
        """Return the reports that arrived."""
        ...


class WorkloadDriver:
    """Runs jobs through the workers of one pair. It may run several workloads, one after the other.

    Args:
        client: the link to the workers.
        ranks: how many workers each side has.
        deaths: which workers have ended so far.
        first_id: request ids are counted from here. Workers remember the ids of requests that are over: who attaches
            to workers that others used before chooses a number that none of them can have reached.
        routes: where requests go, one after the other; None: every request to all workers.
        clock: seconds that only grow.
    """

    def __init__(
        self,
        client: Client,
        ranks: Mapping[Side, int],
        deaths: Callable[[], Sequence[Death]],
        *,
        first_id: int = 1,
        routes: Iterator[Route] | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._client, self._deaths, self._clock = client, deaths, clock
        everybody = frozenset((side, rank) for side, count in ranks.items() for rank in range(count))
        self._routes = routes or itertools.repeat(Route(workers=everybody))
        self._ids = itertools.count(first_id)  # never the same twice
        self._open: dict[RequestId, RequestRecord] = {}
        self._given_up: set[RequestId] = set()

    def run(
        self, jobs: Iterable[Job], *, concurrency: int, timeout_s: float, on_finished: Callable[[RequestRecord], None]
    ) -> list[RequestRecord]:
        """Run `jobs`; return a record of each, in order. A dead worker or silence ends the run early.

        Args:
            concurrency: requests open at one time.
            timeout_s: longest silence of all workers.
            on_finished: called as requests finish, for progress.
        """
        waiting, records = deque(jobs), list[RequestRecord]()
        news_s, death_s = self._clock(), 0.0
        while (waiting and not death_s) or self._open:
            while waiting and len(self._open) < concurrency and not death_s and self._may_begin(waiting[0], records):
                records.append(self._submit(waiting.popleft()))
            reports = self._client.poll()
            news_s = self._clock() if reports else news_s
            for report in reports:
                self._take(report)
            if not death_s and self._dead():
                death_s = self._clock()
                self._give_up([*self._open], self._verdict())
            self._finish(on_finished)
            if self._clock() - news_s > timeout_s or (death_s and self._clock() - death_s > GRACE_S):
                break
        verdict = self._verdict() or f"no worker reported anything for {timeout_s:g} s"
        self._abandon(verdict)
        return [*records, *(self._unsent(job, verdict) for job in waiting)]

    def _may_begin(self, job: Job, records: Sequence[RequestRecord]) -> bool:
        return job.after is None or records[job.after].request_id not in self._open

    def _submit(self, job: Job) -> RequestRecord:
        route = next(self._routes)
        record = RequestRecord(RequestId(next(self._ids)), job, self._clock(), route.workers)
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
        if report.reason:
            # The other ranks need not wait for what cannot come any more.
            self._give_up([record.request_id], record.reason)

    def _give_up(self, request_ids: Iterable[RequestId], reason: str) -> None:
        for request_id in request_ids:
            if request_id not in self._given_up:
                self._given_up.add(request_id)
                for side in Side:
                    ranks = [rank for other, rank in self._open[request_id].workers if other is side]
                    self._client.send(side, GiveUp(request_id=request_id, reason=reason), ranks)

    def _finish(self, on_finished: Callable[[RequestRecord], None]) -> None:
        """Close the records of requests on which every rank that lives has reported."""
        dead = self._dead()
        for record in list(self._open.values()):
            missing = record.workers - record.reporters()
            if missing <= dead.keys():
                record.abandoned = self._verdict() if missing else ""
                record.finished_s = self._clock()
                self._forget(record)
                on_finished(record)

    def _forget(self, record: RequestRecord) -> None:
        del self._open[record.request_id]
        self._given_up.discard(record.request_id)

    def _dead(self) -> dict[WorkerName, str]:
        """Return who is dead or gone, and of what."""
        deaths = {(death.side, death.rank): f"died ({death.reason})" for death in self._deaths()}
        return {name: f"is gone ({reason})" for name, reason in self._client.gone.items()} | deaths

    def _verdict(self) -> str:
        return "; ".join(f"{side} rank {rank} {fate}" for (side, rank), fate in self._dead().items())

    def _abandon(self, verdict: str) -> None:
        self._give_up([*self._open], verdict)
        for record in list(self._open.values()):
            record.abandoned = verdict
            self._forget(record)

    def _unsent(self, job: Job, verdict: str) -> RequestRecord:
        record = RequestRecord(RequestId(next(self._ids)), job, self._clock())
        record.abandoned = verdict
        return record
