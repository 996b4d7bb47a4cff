"""What became of one request, joined from the reports of all ranks of both sides."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Final

from transfer.hello import Side
from unikv.ids import RequestId
from workers.control import DecodeReport, PromptReport
from workers.evidence import compare
from workers.evidence_report import read_evidence
from workers.routing import Route, WorkerName
from workers.runner import Digest, DigestKey

CANCELLED: Final = "the caller has cancelled it"
"""Reason of a request that its caller gave up."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """One request of a workload.

    Attributes:
        prompt: token ids; empty for runners that need a length only.
        hold: let generation ranks look at what arrived only once nothing of the request moves, so that moves are timed
            without verification beside them.
        after: number of the job, counted from 0 in its workload, that must be over before this one begins, and whose
            route it takes.
        local: the generation side computes the prompt itself.
        route: where the caller wants it to go; None: where it is its turn.
        cancel_after_s: cancel it so long after it was submitted, if it is still open then.
    """

    prompt: tuple[int, ...]
    prompt_tokens: int
    max_new_tokens: int
    hold: bool = False
    after: int | None = None
    local: bool = False
    route: Route | None = None
    cancel_after_s: float | None = None


@dataclass(slots=True)
class RequestRecord:
    """One request on all ranks, filled in as reports arrive.

    Attributes:
        route: who takes part, on both sides; None where it was never sent.
        submitted_s, finished_s: on the host's monotonic clock; `finished_s` is 0.0 while reports are missing.
        prompts, decodes: reports by rank.
        cancelled: the caller has cancelled it while it was open.
        abandoned: why nobody waits for more reports, empty where all came.
    """

    request_id: RequestId
    job: Job
    submitted_s: float
    route: Route | None = None
    prompts: dict[int, PromptReport] = field(default_factory=dict)
    decodes: dict[int, DecodeReport] = field(default_factory=dict)
    cancelled: bool = False
    abandoned: str = ""
    finished_s: float = 0.0
    _failures: list[str] = field(default_factory=list)

    @property
    def workers(self) -> frozenset[WorkerName]:
        """Everybody who takes part."""
        return frozenset() if self.route is None else self.route.workers

    def ranks(self, side: Side) -> tuple[int, ...]:
        """Return the workers of one side that take part, ascending."""
        return () if self.route is None else self.route.ranks(side)

    @property
    def reason(self) -> str:
        """Why the request failed, "" where it did not: the first rank's reason that is not just another's cancel."""
        telling = [reason for reason in self._failures if "cancelled by" not in reason]
        return next(iter([*telling, *self._failures]), self.abandoned)

    @property
    def was_cancelled(self) -> bool:
        """Whether the caller's cancelling is all that ended it."""
        return bool(self.cancelled and self._failures) and all(CANCELLED in reason for reason in self._failures)

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

    def cached_tokens(self) -> dict[str, int]:
        """Return how many leading tokens each side had already: those that every rank of it had."""
        return {
            "context": min((report.cached_tokens for report in self.prompts.values()), default=0),
            "generation": min((report.cached_tokens for report in self.decodes.values()), default=0),
        }

    def add(self, report: PromptReport | DecodeReport) -> None:
        """Take a rank's report; a rank reports once, and its first word counts."""
        if isinstance(report, PromptReport):
            new = self.prompts.setdefault(report.rank, report) is report
        else:
            new = self.decodes.setdefault(report.rank, report) is report
        if new and report.reason:
            self._failures.append(report.reason)

    def reporters(self) -> set[WorkerName]:
        """Return the ranks that have reported."""
        return {(Side.CONTEXT, rank) for rank in self.prompts} | {(Side.GENERATION, rank) for rank in self.decodes}

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

    def exposed_s(self) -> float:
        """Return seconds from the moment all KV was there to the last copy, of the slowest pair of ranks."""
        times = [leg.times for report in self.decodes.values() for leg in report.legs if leg.times is not None]
        return max((time.exposed_s for time in times), default=0.0)

    def ttft_s(self) -> float | None:
        """Return seconds from submission to usable pages and a first token on the generation side."""
        usable = [report.usable_s for report in self.decodes.values() if report.tokens]
        return max(usable) - self.submitted_s if usable and not self.reason else None

    def verification(self) -> tuple[bool, int, str]:
        """Return (every byte proven, bytes not proven, the first such place).

        Pages of the context side count as well: a transfer must leave them as they are.
        """
        known: dict[DigestKey, Digest] = {}
        checked = mismatched = 0
        places: list[str] = []
        for rank, prompt in sorted(self.prompts.items()):
            if prompt.evidence is not None:
                seen = read_evidence(prompt.evidence)
                known |= seen.digests
                mismatched += seen.mismatched_bytes
                places += [f"context rank {rank}: {seen.first_mismatch}"] if seen.first_mismatch else []
        for rank, decode in sorted(self.decodes.items()):
            if decode.evidence is None:
                places.append(f"generation rank {rank}: no evidence")
                continue
            seen = read_evidence(decode.evidence)
            wrong, place = compare(known, seen)
            checked, mismatched = checked + seen.checked_bytes, mismatched + wrong
            places += [f"generation rank {rank}: {place}"] if place else []
        return not self.reason and checked > 0 and not places, mismatched, next(iter(places), "")
