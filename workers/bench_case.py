"""One case of the benchmark: what is run, and what is said about it."""

from __future__ import annotations

import re
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from workers.config import PairConfig
from workers.control import PathReport
from workers.fleet import Death
from workers.pair_run import PairRun, RunningPair
from workers.workload import Job, RequestRecord

_LONGEST_FOLDER: Final = 100

Progress = Callable[[str, int, int], None]
"""Called with what is running, how many of it are finished and how many there are."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BenchRequest:
    """What to run.

    Attributes:
        source: pair file or preset.
        overrides, case: as in `load_pair`; without a case every case of the file's matrix runs.
        log_dir: where worker logs go; None for a temporary directory.
        rendezvous_url: where workers that others started are announced; None starts workers here.
    """

    source: str
    overrides: tuple[str, ...] = ()
    case: str | None = None
    log_dir: Path | None = None
    rendezvous_url: str | None = None

    def arguments(self, case: str | None, extra: Sequence[str] = ()) -> list[str]:
        """Return the worker's command-line arguments that name the same pair."""
        words = [self.source]
        for override in [*self.overrides, *extra]:
            words += ["--set", override]
        return [*words, "--case", case] if case else words


def run_pair(
    request: BenchRequest,
    pair: PairConfig,
    name: str | None,
    jobs: Sequence[Job],
    progress: Progress,
    *,
    extra: Sequence[str] = (),
    label: str = "",
) -> PairRun:
    """Bring the workers of one case up, run `jobs`, take them down."""
    title = label or name or pair.name
    finished = 0
    progress(title, 0, len(jobs))

    def on_finished(_record: RequestRecord) -> None:
        nonlocal finished
        finished += 1
        progress(title, finished, len(jobs))

    log_dir = request.log_dir / _folder_name(title) if request.log_dir else None
    arguments, url = request.arguments(name, extra), request.rendezvous_url
    with RunningPair(pair, arguments, log_dir=log_dir, rendezvous_url=url) as running:
        return running.run(jobs, on_finished)


def _folder_name(title: str) -> str:
    """Return a name for the logs of one case that stays below the directory it is put in."""
    return re.sub(r"[^\w.+, -]", "_", title)[:_LONGEST_FOLDER].lstrip(".") or "case"


def pattern_jobs(pair: PairConfig) -> list[Job]:
    """Return the workload of a pair without a model: lengths spread evenly over its range, longest last."""
    low, high = pair.workload.prompt_tokens
    count = pair.workload.requests
    lengths = [low + (high - low) * index // max(1, count - 1) for index in range(count)]
    if count == 1:
        lengths = [high]
    return [Job(prompt=(), prompt_tokens=length, max_new_tokens=1) for length in lengths]


def case_result(
    name: str, pair: PairConfig, run: PairRun, records: Sequence[RequestRecord], floor: float
) -> dict[str, Any]:
    """Return one case's share of the result."""
    requests = [_request_entry(name, record) for record in records]
    return {
        "name": name,
        "config": pair.resolved(),
        "draft_kv": run.draft_kv,
        "path": [_path_entry(path) for path in run.paths],
        "requests": requests,
        "deaths": [_death_entry(death) for death in run.deaths],
        "summary": summarise(requests, floor),
    }


def summarise(requests: Sequence[dict[str, Any]], floor: float) -> dict[str, Any]:
    """Return the summary of some requests; rates are over the moves of the requests that arrived."""
    rates = [entry["gb_per_s"] for entry in requests if entry["gb_per_s"]]
    latencies = sorted(entry["total_s"] for entry in requests if entry["verified"])
    median = statistics.median(rates) if rates else 0.0
    return {
        "requests": len(requests),
        "verified": sum(entry["verified"] for entry in requests),
        "mismatched_bytes": sum(entry["mismatched_bytes"] for entry in requests),
        "bytes": sum(entry["bytes"] for entry in requests),
        "gb_per_s": {"median": median, "min": min(rates, default=0.0), "max": max(rates, default=0.0)},
        "floor_gb_per_s": floor,
        "floor": "one thread copying 256 MiB, median of 5, same run",
        "ratio_to_floor": median / floor,
        "latency_s": {name: percentile(latencies, share) for name, share in _PERCENTILES},
    }


_PERCENTILES: Final = (("p50", 0.5), ("p90", 0.9), ("p99", 0.99))


def percentile(ordered: Sequence[float], share: float) -> float:
    """Return the smallest of `ordered` values that at least `share` of them do not exceed; 0.0 without values."""
    if not ordered:
        return 0.0
    return ordered[min(len(ordered) - 1, max(0, -int(-share * len(ordered) // 1) - 1))]


def _request_entry(case: str, record: RequestRecord) -> dict[str, Any]:
    stages = record.stages()
    verified, mismatched, first = record.verification()
    return {
        "id": record.request_id,
        "case": case,
        "prompt_tokens": record.job.prompt_tokens,
        "cached_tokens": record.cached_tokens(),
        "bytes": record.bytes,
        "target_bytes": record.bytes - record.draft_bytes,
        "draft_bytes": record.draft_bytes,
        "prefill_s": record.prefill_s,
        "stages": stages,
        "total_s": sum(stages.values()),
        "exposed_s": record.exposed_s(),
        "gb_per_s": record.bytes / stages["move_s"] / 1e9 if stages["move_s"] else 0.0,
        "ttft_s": record.ttft_s(),
        "verified": verified,
        "mismatched_bytes": mismatched,
        "first_mismatch": first if mismatched else "",
        "error": record.reason,
    }


def _path_entry(path: PathReport) -> dict[str, Any]:
    return {
        "context_rank": path.context_rank,
        "generation_rank": path.generation_rank,
        "path": path.path,
        "reason": path.reason,
    }


def _death_entry(death: Death) -> dict[str, Any]:
    return {"side": death.side, "rank": death.rank, "reason": death.reason, "log": death.tail}
