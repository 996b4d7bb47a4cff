"""The rows of the GPU benchmarks: what was measured, its floor of the same run, and the target."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final

from transfer.outcome import Outcome
from workers.bench_case import percentile

COPY_TARGETS: Final = {
    "gpu-direct": 0.88,
    "hnd-8-to-4-heads": 0.85,
    "nhd-8-to-4-heads": 0.80,
    "nhd-8-to-1-head": 0.75,
}
"""Least share of the device copy's rate, by case."""
LATENCY_TARGETS_US: Final = {"gpu-direct": (600.0, 900.0), "gpu-small": (150.0, 250.0)}
"""Longest request at p50 and p99."""
LOAD_TARGET: Final = 0.60


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuRow:
    """One figure beside its floor. `met` is None where no target was set."""

    case: str
    what: str
    value: float
    unit: str
    low: float
    high: float
    floor: float | None = None
    ratio: float | None = None
    target: str = ""
    met: bool | None = None


STAGED_TARGET: Final = 0.90
"""Least share of a bare stream of frames."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """One round.

    Attributes:
        took_s: from request to usable pages: of every request where one follows another, else of all together.
        outcomes: of every request.
        copies_s: device times of the copies, one for each batch.
    """

    took_s: Sequence[float]
    outcomes: Sequence[Outcome]
    copies_s: Sequence[float]


def make_rows(
    name: str, size_bytes: int, runs: Sequence[Run], floors: Sequence[float], *, staged: bool
) -> list[GpuRow]:
    """Return the rows of a case.

    Args:
        name: of the case, which says what its targets are.
        size_bytes: of one request, or of all that run together.
        runs: what was measured.
        floors: seconds the same bytes took at best.
        staged: the floor is a bare stream, else a plain device copy.
    """
    floor_s = statistics.median(floors)
    if len(runs[0].took_s) < len(runs[0].outcomes):
        return [_rate("all requests together", name, size_bytes, [r.took_s[0] for r in runs], floor_s, LOAD_TARGET)]
    took = [one for run in runs for one in run.took_s]
    if staged:
        return [_rate("request to usable pages", name, size_bytes, took, floor_s, STAGED_TARGET)]
    copies = [copy_s for run in runs for copy_s in _by_request(run)]
    rows = []
    if copies:
        rows.append(_rate("copy on the device", name, size_bytes, copies, floor_s, COPY_TARGETS.get(name)))
    first = [run.took_s[0] for run in runs if len(run.took_s) > 1]
    rest = [one for run in runs for one in run.took_s[1:]] or took
    limits = LATENCY_TARGETS_US.get(name, (None, None))
    rows += [_latency(f"request to usable pages, p{100 * s:.0f}", name, rest, s, floor_s, most)
             for s, most in zip((0.5, 0.99), limits, strict=True)]  # fmt: skip
    if first:
        rows.append(_latency("the same after a pause, p50", name, first, 0.5, floor_s, None))
    return rows


def stage_medians(outcomes: Sequence[Outcome]) -> dict[str, float]:
    """Return the medians of where a request's time went, in microseconds."""
    times = [leg.times for outcome in outcomes for leg in outcome.legs if leg.times is not None]
    stages: dict[str, Callable[[Any], float]] = {
        "queue": lambda t: t.queue_s,
        "plan": lambda t: t.plan_s,
        "move": lambda t: t.move_s,
    }
    found = {stage: 1e6 * statistics.median(read(t) for t in times) for stage, read in stages.items() if times}
    found["settle"] = 1e6 * statistics.median(outcome.settle_s for outcome in outcomes)
    found["total"] = 1e6 * statistics.median(outcome.total_s for outcome in outcomes)
    return found


def as_dict(row: GpuRow) -> dict[str, Any]:
    """Return the row as it is written."""
    return {field: getattr(row, field) for field in GpuRow.__slots__}


def _by_request(run: Run) -> Sequence[float]:
    """Return the device time of every request; of batches that are not one each, the mean."""
    if len(run.copies_s) == len(run.took_s):
        return run.copies_s
    return [sum(run.copies_s) / len(run.took_s)] if run.copies_s else []


def _rate(what: str, name: str, size_bytes: int, took: Sequence[float], floor_s: float, least: float | None) -> GpuRow:
    rates, ratio = [size_bytes / one / 1e9 for one in took], floor_s / statistics.median(took)
    floor = "a bare ZeroMQ stream" if least == STAGED_TARGET else "the device copy"
    return GpuRow(
        case=name,
        what=what,
        value=statistics.median(rates),
        unit="GB/s",
        low=min(rates),
        high=max(rates),
        floor=size_bytes / floor_s / 1e9,
        ratio=ratio,
        target="" if least is None else f">= {least:.2f} of {floor}",
        met=None if least is None else ratio >= least,
    )


def _latency(what: str, name: str, took: Sequence[float], share: float, floor_s: float, most: float | None) -> GpuRow:
    micros = sorted(1e6 * one for one in took)
    value = percentile(micros, share)
    return GpuRow(
        case=name,
        what=what,
        value=value,
        unit="us",
        low=micros[0],
        high=micros[-1],
        floor=1e6 * floor_s,
        ratio=1e6 * floor_s / value,
        target="" if most is None else f"<= {most:g} us",
        met=None if most is None else value <= most,
    )
