"""One case of the benchmark: what is run, and what is said about it."""

from __future__ import annotations

import math
import re
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any, Final

from workers.config import CancelConfig, PairConfig
from workers.control import PathReport
from workers.fleet import Death
from workers.floors import FloorSession, wait_until_idle
from workers.pair_run import PairRun, RunningPair
from workers.workload import Job, RequestRecord

_LONGEST_FOLDER: Final = 100
FLOOR_ONCE: Final = "one thread copying 256 MiB, median of 5, same run"
FLOOR_ALTERNATING: Final = "one thread copying 256 MiB beside every request, median; the ratio is that of the pairs"
_OWN_TOKENS: Final = 1 << 32
"""Distance of the token ids of prompts where they differ."""
_GOLDEN: Final = (math.sqrt(5) - 1) / 2
"""Multiples of it, modulo 1, spread evenly however many there are."""

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

    arguments, log_dir = request.arguments(name, extra), _log_dir(request, title)
    with RunningPair(pair, arguments, log_dir=log_dir, rendezvous_url=request.rendezvous_url) as running:
        run = running.run(jobs, on_finished)
    return replace(run, deaths=(*run.deaths, *running.fleet.unclean()))


def run_beside_floor(
    request: BenchRequest, pair: PairConfig, name: str | None, jobs: Sequence[Job], progress: Progress
) -> tuple[PairRun, tuple[float, ...]]:
    """Run `jobs` one by one, with a memcpy before, between and after them, while the workers are idle.

    Returns:
        The run, and for every record the mean rate of the copy before it and of the one behind it, in GB/s.
    """
    title, floor = name or pair.name, FloorSession()
    progress(title, 0, len(jobs))
    runs: list[PairRun] = []
    arguments, log_dir = request.arguments(name), _log_dir(request, title)
    with RunningPair(pair, arguments, log_dir=log_dir, rendezvous_url=request.rendezvous_url) as running:
        pids = tuple(worker.pid for worker in running.fleet.workers if worker.pid)
        wait_until_idle(pids)
        samples = [floor.sample()]
        for job in jobs:
            runs.append(running.run([replace(job, hold=True)]))
            wait_until_idle(pids)
            samples.append(floor.sample())
            progress(title, len(runs), len(jobs))
            if runs[-1].deaths:
                break
    records = tuple(record for run in runs for record in run.records)
    floors = tuple(statistics.fmean(around) for around in pairwise(samples))
    deaths = (*runs[-1].deaths, *running.fleet.unclean())
    return replace(runs[-1], records=records, deaths=deaths), floors


def _log_dir(request: BenchRequest, title: str) -> Path | None:
    return request.log_dir / _folder_name(title) if request.log_dir else None


def _folder_name(title: str) -> str:
    """Return a name for the logs of one case that stays below the directory it is put in."""
    return re.sub(r"[^\w.+, -]", "_", title)[:_LONGEST_FOLDER].lstrip(".") or "case"


def pattern_jobs(pair: PairConfig) -> list[Job]:
    """Return the workload of a pair without a model: lengths spread evenly over its range, longest last."""
    workload = pair.workload
    (low, high), count = workload.prompt_tokens, workload.requests
    lengths = [low + (high - low) * index // max(1, count - 1) for index in range(count)]
    if count == 1:
        lengths = [high]
    return [
        Job(
            prompt=_prompt(workload.shared_prefix_tokens, index, length),
            prompt_tokens=length,
            max_new_tokens=1,
            local=length < workload.local_below_tokens,
            cancel_after_s=_cancel_after_s(workload.cancel, index),
        )
        for index, length in enumerate(lengths)
    ]


def _prompt(shared_tokens: int, number: int, length: int) -> tuple[int, ...]:
    """Return tokens that all prompts share as far as `shared_tokens`; none where prompts are lengths only."""
    if not shared_tokens:
        return ()
    own = (1 + number) * _OWN_TOKENS
    return tuple(token if token < shared_tokens else own + token for token in range(length))


def _cancel_after_s(cancel: CancelConfig | None, number: int) -> float | None:
    """Return when to cancel a request: the first at once, the others spread over the time there is, mostly early."""
    if cancel is None:
        return None
    turn, rest = divmod(number + 1, cancel.every)
    return None if rest else cancel.within_s * float((turn - 1) * _GOLDEN % 1) ** 2


def case_result(
    name: str, pair: PairConfig, run: PairRun, records: Sequence[RequestRecord], floor: float | Sequence[float]
) -> dict[str, Any]:
    """Return one case's share of the result.

    It is ok if every request was verified or cancelled, some were verified, and every worker ended well.

    Args:
        floor: rate of one thread's memcpy in GB/s, of the whole run or beside each record.
    """
    floors = [floor] * len(records) if isinstance(floor, float) else floor
    requests = [_request_entry(name, record, rate) for record, rate in zip(records, floors, strict=False)]
    summary = summarise(requests, floor)
    ended = summary["verified"] > 0 and summary["verified"] + summary["cancelled"] == summary["requests"]
    return {
        "name": name,
        "ok": ended and summary["mismatched_bytes"] == 0 and not run.deaths,
        "error": "",
        "config": pair.resolved(),
        "draft_kv": run.draft_kv,
        "path": [_path_entry(path) for path in run.paths],
        "requests": requests,
        "deaths": [_death_entry(death) for death in run.deaths],
        "threads": copying_threads(pair),
        "summary": summary,
    }


def copying_threads(pair: PairConfig) -> int:
    """Return how many threads copy one request at most: those of every rank that writes, or gathers."""
    return pair.transfer.copy_threads * pair.context.parallel.world_size


def failed_case(name: str, pair: PairConfig, error: str, floor: float) -> dict[str, Any]:
    """Return the result of a case whose workers did not come up."""
    run = PairRun(records=(), paths=(), draft_kv="", deaths=())
    return {**case_result(name, pair, run, (), floor), "error": error}


def summarise(requests: Sequence[dict[str, Any]], floor: float | Sequence[float]) -> dict[str, Any]:
    """Return the summary of some requests; rates are over the moves of the requests that arrived.

    Args:
        requests: their entries.
        floor: as in `case_result`.
    """
    rates = [entry["gb_per_s"] for entry in requests if entry["gb_per_s"]]
    ratios = [entry["ratio_to_floor"] for entry in requests if entry["gb_per_s"]]
    latencies = sorted(entry["total_s"] for entry in requests if entry["verified"])
    return {
        "requests": len(requests),
        "verified": sum(entry["verified"] for entry in requests),
        "cancelled": sum(entry["cancelled"] for entry in requests),
        "mismatched_bytes": sum(entry["mismatched_bytes"] for entry in requests),
        "bytes": sum(entry["bytes"] for entry in requests),
        "gb_per_s": _spread(rates),
        "floor_gb_per_s": floor if isinstance(floor, float) else _spread(floor)["median"],
        "floor": FLOOR_ONCE if isinstance(floor, float) else FLOOR_ALTERNATING,
        "ratio_to_floor": _spread(ratios)["median"],
        "ratio": _spread(ratios),
        "latency_s": {name: percentile(latencies, share) for name, share in _PERCENTILES},
    }


def _spread(values: Sequence[float]) -> dict[str, float]:
    if not values:
        return {"median": 0.0, "min": 0.0, "max": 0.0}
    return {"median": statistics.median(values), "min": min(values), "max": max(values)}


_PERCENTILES: Final = (("p50", 0.5), ("p90", 0.9), ("p99", 0.99))


def percentile(ordered: Sequence[float], share: float) -> float:
    """Return the smallest of `ordered` values that at least `share` of them do not exceed; 0.0 without values."""
    if not ordered:
        return 0.0
    return ordered[min(len(ordered) - 1, max(0, -int(-share * len(ordered) // 1) - 1))]


def _request_entry(case: str, record: RequestRecord, floor: float) -> dict[str, Any]:
    stages = record.stages()
    verified, mismatched, first = record.verification()
    rate = record.bytes / stages["move_s"] / 1e9 if stages["move_s"] else 0.0
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
        "gb_per_s": rate,
        "floor_gb_per_s": floor,
        "ratio_to_floor": rate / floor,
        "ttft_s": record.ttft_s(),
        "verified": verified,
        "cancelled": record.was_cancelled,
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
