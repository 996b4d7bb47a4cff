"""Drives requests through a fleet: keeps `concurrency` of them open and joins the reports of all ranks."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Final

from transfer.hello import Side
from unikv.ids import RequestId
from workers.client import FleetClient
from workers.control import DecodeReport, EvidenceReport, PromptReport, RunDecode, RunPrompt
from workers.evidence import DIGEST_BYTES, DigestKey, compare
from workers.fleet import Death
from workers.runner import Evidence

GRACE_S: Final = 2.0
"""How long the survivors of a dead worker may take to report what became of the open requests."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """One request of a workload; `prompt` is empty for runners that need a length only."""

    prompt: tuple[int, ...]
    prompt_tokens: int
    max_new_tokens: int


@dataclass(slots=True)
class RequestRecord:
    """What became of one request on all ranks."""

    request_id: RequestId
    job: Job
    submitted_s: float
    prompts: dict[int, PromptReport] = field(default_factory=dict)
    decodes: dict[int, DecodeReport] = field(default_factory=dict)
    abandoned: str = ""
    finished_s: float = 0.0

    @property
    def reason(self) -> str:
        """Why the request failed, "" where it did not: the most telling of the ranks' reasons."""
        reports: list[PromptReport | DecodeReport] = [*self.prompts.values(), *self.decodes.values()]
        reasons = [report.reason for report in reports if report.reason]
        return next((reason for reason in reasons if "cancelled by" not in reason), "") or (
            reasons[0] if reasons else self.abandoned
        )

    @property
    def tokens(self) -> tuple[int, ...]:
        """Tokens the request produced: those of the rank that decoded."""
        return max((report.tokens for report in self.decodes.values()), key=len, default=())

    @property
    def bytes(self) -> int:
        """Useful bytes moved, over all pairs of ranks."""
        return sum(leg.bytes for report in self.decodes.values() for leg in report.legs)

    @property
    def draft_bytes(self) -> int:
        """Those of `bytes` that belong to draft layers."""
        return sum(leg.draft_bytes for report in self.decodes.values() for leg in report.legs)

    @property
    def prefill_s(self) -> float:
        """Seconds the slowest context rank computed."""
        return max((report.prefill_s for report in self.prompts.values()), default=0.0)

    def stages(self) -> dict[str, float]:
        """Return seconds per stage: of the slowest rank, moves of one context rank one after the other."""
        by_context: dict[int, float] = {}
        queue_s = plan_s = 0.0
        for report in self.decodes.values():
            for leg in report.legs:
                if leg.times is not None:
                    by_context[leg.peer] = by_context.get(leg.peer, 0.0) + leg.times.move_s
                    queue_s, plan_s = max(queue_s, leg.times.queue_s), max(plan_s, leg.times.plan_s)
        settle_s = max((report.settle_s for report in self.decodes.values()), default=0.0)
        move_s = max(by_context.values(), default=0.0)
        return {"queue_s": queue_s, "plan_s": plan_s, "move_s": move_s, "settle_s": settle_s}

    def ttft_s(self) -> float | None:
        """Return seconds from submission to usable pages and a first token on the generation side."""
        usable = [report.usable_s for report in self.decodes.values() if report.tokens]
        return max(usable) - self.submitted_s if usable and not self.reason else None

    def verification(self) -> tuple[bool, int, str]:
        """Return (every byte proven, bytes not proven, the first such place)."""
        known: dict[DigestKey, bytes] = {}
        for prompt in self.prompts.values():
            known |= _digests(prompt.evidence)
        checked = mismatched = 0
        first = ""
        for decode in self.decodes.values():
            if decode.evidence is None:
                return False, mismatched, first or "no evidence"
            wrong, place = compare(known, _evidence(decode.evidence))
            checked, mismatched, first = checked + decode.evidence.checked_bytes, mismatched + wrong, first or place
        return not self.reason and checked > 0 and mismatched == 0, mismatched, first


class Workload:
    """Runs jobs through the workers of one pair."""

    def __init__(self, client: FleetClient, ranks: dict[Side, int], deaths: Callable[[], Sequence[Death]]) -> None:
        self._client, self._ranks, self._deaths = client, ranks, deaths

    def run(
        self, jobs: Iterable[Job], *, concurrency: int, timeout_s: float, on_finished: Callable[[RequestRecord], None]
    ) -> list[RequestRecord]:
        """Run `jobs`; return a record of each, in order. A dead worker or silence ends the run early.

        Args:
            concurrency: requests open at one time.
            timeout_s: longest silence of all workers.
            on_finished: called as requests finish, for progress.
        """
        waiting = list(enumerate(jobs, start=1))
        waiting.reverse()
        records: dict[RequestId, RequestRecord] = {}
        open_: dict[RequestId, RequestRecord] = {}
        last_news_s, dead_since_s = time.monotonic(), 0.0
        while waiting or open_:
            while waiting and len(open_) < concurrency and not dead_since_s:
                record = self._submit(RequestId(waiting[-1][0]), waiting.pop()[1])
                records[record.request_id] = open_[record.request_id] = record
            for report in self._client.poll():
                last_news_s = time.monotonic()
                self._take(report, open_, on_finished)
            if not dead_since_s and (self._deaths() or self._client.gone):
                dead_since_s = time.monotonic()
            verdict = self._give_up(dead_since_s, last_news_s, timeout_s)
            if verdict:
                self._abandon([*open_.values(), *self._unsent(waiting, records)], verdict)
                break
        return list(records.values())

    def _submit(self, request_id: RequestId, job: Job) -> RequestRecord:
        record = RequestRecord(request_id, job, time.monotonic())
        prompt = {"prompt": job.prompt, "prompt_tokens": job.prompt_tokens, "verify": True}
        # Both sides at once: pages are reserved while the prompt is computed, and move the moment it is.
        self._client.send(
            Side.GENERATION,
            RunDecode(request_id=request_id, max_new_tokens=job.max_new_tokens, **prompt),  # type: ignore[arg-type]
        )
        self._client.send(Side.CONTEXT, RunPrompt(request_id=request_id, **prompt))  # type: ignore[arg-type]
        return record

    def _take(
        self,
        report: PromptReport | DecodeReport,
        open_: dict[RequestId, RequestRecord],
        on_finished: Callable[[RequestRecord], None],
    ) -> None:
        record = open_.get(report.request_id)
        if record is None:
            return
        if isinstance(report, PromptReport):
            record.prompts[report.rank] = report
        else:
            record.decodes[report.rank] = report
        if len(record.prompts) == self._ranks[Side.CONTEXT] and len(record.decodes) == self._ranks[Side.GENERATION]:
            record.finished_s = time.monotonic()
            del open_[record.request_id]
            on_finished(record)

    def _give_up(self, dead_since_s: float, last_news_s: float, timeout_s: float) -> str:
        now_s = time.monotonic()
        if dead_since_s and now_s - dead_since_s > GRACE_S:
            deaths = [f"{death.side} rank {death.rank} died ({death.reason})" for death in self._deaths()]
            gone = [f"{side} rank {rank} is gone ({reason})" for (side, rank), reason in self._client.gone.items()]
            return "; ".join(deaths or gone)
        return f"no worker reported anything for {timeout_s} s" if now_s - last_news_s > timeout_s else ""

    def _unsent(
        self, waiting: Sequence[tuple[int, Job]], records: dict[RequestId, RequestRecord]
    ) -> list[RequestRecord]:
        unsent = [RequestRecord(RequestId(number), job, time.monotonic()) for number, job in reversed(waiting)]
        records.update({record.request_id: record for record in unsent})
        return unsent

    def _abandon(self, records: Iterable[RequestRecord], verdict: str) -> None:
        for record in records:
            record.abandoned = verdict


def _digests(report: EvidenceReport | None) -> dict[DigestKey, bytes]:
    found: dict[DigestKey, bytes] = {}
    for row in report.digests if report else ():
        for index, ordinal in enumerate(row.ordinals):
            digest = row.digests[index * DIGEST_BYTES : (index + 1) * DIGEST_BYTES]
            found[row.layer, row.role, row.head, ordinal] = digest
    return found


def _evidence(report: EvidenceReport) -> Evidence:
    return Evidence(
        checked_bytes=report.checked_bytes,
        mismatched_bytes=report.mismatched_bytes,
        first_mismatch=report.first_mismatch,
        digests=_digests(report),
    )
