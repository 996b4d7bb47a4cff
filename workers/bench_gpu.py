"""Benchmarks of the direct path between two processes on GPUs, each row beside its floor of the same run.

The process that runs this is the generation rank, a child is the context rank; both use the endpoints that serving
uses. Before every request its pages are poisoned, after it every live byte is compared with the pattern that names
layer, role, head and token, all on the device. Copies are timed by events on the copying stream, requests by the host's
clock from the call to the outcome.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any, Final

from transfer.hello import Side
from transfer.outcome import Outcome
from unikv.errors import InternalError, LinkBrokenError
from unikv.ids import RequestId
from unikv.request import KVCacheRequest
from workers.bench import environment
from workers.bench_case import Progress, percentile
from workers.bench_gpu_context import PATIENCE_S, prompt_pages
from workers.config import PairConfig
from workers.config_load import load_pair, pair_cases
from workers.rank_runtime import RankRuntime
from workers.runner import Tables
from workers.runner_device_floor import DeviceFloor, device_name, wait_for_device
from workers.runner_device_pattern import DevicePattern
from workers.topology import check_device
from workers.worker_main import SWITCH_INTERVAL_S

GPU_PREFIX: Final = "gpu-"
"""Presets whose name begins so run here."""
WARM_UPS: Final = 10
FLOOR_ROUNDS: Final = 15
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


def is_gpu_bench(source: str) -> bool:
    """Return whether a preset's benchmark is one of these."""
    return source.startswith(GPU_PREFIX) and "/" not in source and "." not in source


def run_gpu_bench(source: str, overrides: Sequence[str], case: str | None, progress: Progress) -> dict[str, Any]:
    """Run every case of a GPU preset and return the result.

    Raises:
        ConfigError: a pair file's mistake, or no device.
        LinkBrokenError: the context process did not come up, or died.
    """
    sys.setswitchinterval(SWITCH_INTERVAL_S)
    whole = load_pair(source, overrides=overrides, case=case)
    for side in Side:
        check_device(whole.side(side))
    cases = []
    for name in [case] if case else pair_cases(whole) or [None]:
        pair = load_pair(source, overrides=overrides, case=name)
        cases.append(
            _run_case(pair, name or source, {"source": source, "overrides": [*overrides], "case": name}, progress)
        )
    return {
        "benchmark": source,
        "environment": environment() | {"device": cases[0]["device"]},
        "cases": cases,
        "rows": [row for entry in cases for row in entry["rows"]],
    }


def gpu_bench_succeeded(result: dict[str, Any]) -> bool:
    """Return whether every byte of every run was right; missed targets are shown, and are not failures."""
    return all(entry["mismatched_bytes"] == 0 and entry["failed"] == 0 for entry in result["cases"])


class _ContextProcess:
    """The child, asked and answered line by line."""

    def __init__(self, what: dict[str, Any]) -> None:
        arguments = json.dumps(what | {"parent": os.getpid()})
        self._process = subprocess.Popen(
            [sys.executable, "-m", "workers.bench_gpu_context", arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self.address: str = self._hear()["address"]

    def __call__(self, do: str, **arguments: Any) -> dict[str, Any]:
        assert self._process.stdin is not None
        self._process.stdin.write(f"{json.dumps({'do': do, **arguments})}\n")
        self._process.stdin.flush()
        return self._hear()

    def close(self) -> None:
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.close()
        try:
            self._process.wait(PATIENCE_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._process.stdout.close()

    def _hear(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise LinkBrokenError(f"the benchmark's context process ended with {self._process.wait(PATIENCE_S)}")
        facts: dict[str, Any] = json.loads(line)
        return facts


class _Bench:
    """One case: two processes, and the same prompts moved again and again."""

    def __init__(self, pair: PairConfig, what: dict[str, Any], stack: ExitStack) -> None:
        self.context = _ContextProcess(what)
        stack.callback(self.context.close)
        self._runtime = stack.enter_context(RankRuntime(pair, Side.GENERATION, 0, instance="generation-0"))
        self.device = self._runtime.card.device
        self._pattern = DevicePattern(self._runtime.card, self._runtime.manager.pools.storages)
        self._endpoint = self._runtime.generation_endpoint(lambda: None)
        stack.callback(self._endpoint.close)
        self._instance = self._endpoint.connect([self.context.address])
        self.path = f"{self._instance.ranks[0].path} ({self._instance.ranks[0].path_reason})"
        self.tokens = pair.workload.prompt_tokens[1]
        self._count = pair.workload.concurrency
        self._requests: list[tuple[KVCacheRequest, Tables]] = []
        stack.callback(self._drop)
        self._next_id = self._count * 1000
        self.wrong_bytes = self.checked_bytes = self.failed = 0
        self.context("reserve", count=self._count, tokens=self.tokens)
        manager = self._runtime.manager
        for number in range(self._count):
            request = manager.create_request(RequestId(number))
            request.resize(manager.generation_capacity(self.tokens, 0), self.tokens)
            self._requests.append((request, request.page_tables()))

    def round(self) -> tuple[float, list[Outcome], list[float]]:
        """Move all prompts once; return the seconds it took, the outcomes and the device times of the copies."""
        ids = list(range(self._next_id, self._next_id + self._count))
        self._next_id += self._count
        for _, tables in self._requests:
            self._pattern.poison(tables)
        wait_for_device(self.device)
        self.context("publish", ids=ids)
        started_s = time.perf_counter()
        handles = [
            self._endpoint.receive(RequestId(i), tables, self.tokens, instance=self._instance)
            for i, (_, tables) in zip(ids, self._requests, strict=True)
        ]
        outcomes = [handle.wait(PATIENCE_S) for handle in handles]
        took_s = time.perf_counter() - started_s
        copies: list[float] = self.context("end", ids=ids)["copy_s"]
        found = [outcome for outcome in outcomes if outcome is not None and outcome.ok]
        self.failed += len(outcomes) - len(found)
        for outcome in outcomes:
            if outcome is None or not outcome.ok:
                raise InternalError(f"a request of the benchmark failed: {outcome and outcome.reason}")
        return took_s, found, copies

    def check(self) -> None:
        """Compare every live byte of all prompts with the pattern."""
        unit = self._runtime.card.tokens_per_block
        for number, (_, tables) in enumerate(self._requests):
            pages = prompt_pages(number, tables, self.tokens, unit)
            wrong, checked = self._pattern.mismatches(pages, RequestId(number))
            self.wrong_bytes += wrong
            self.checked_bytes += checked

    def _drop(self) -> None:
        for request, _ in self._requests:
            request.close()


def _run_case(pair: PairConfig, name: str, what: dict[str, Any], progress: Progress) -> dict[str, Any]:
    rounds = max(1, pair.workload.requests // pair.workload.concurrency)
    rounds = max(rounds, 20) if pair.workload.concurrency > 1 else rounds
    with ExitStack() as stack:
        bench = _Bench(pair, what, stack)
        for _ in range(WARM_UPS):
            bench.round()
        size_bytes = sum(leg.bytes for outcome in bench.round()[1] for leg in outcome.legs)
        floor = DeviceFloor(bench.device, size_bytes)
        floors, took, outcomes, copies = [], [], [], []
        for number in range(rounds):
            progress(name, number, rounds)
            one_s, found, copied = bench.round()
            bench.check()
            took.append(one_s)
            outcomes += found
            copies.append(sum(copied))
            if number < FLOOR_ROUNDS:
                floors.append(floor.copy_s())
        progress(name, rounds, rounds)
        floor_s = statistics.median(floors)
        rows = _load_rows if pair.workload.concurrency > 1 else _single_rows
        return {
            "name": name,
            "path": bench.path,
            "device": device_name(bench.device),
            "bytes": size_bytes,
            "rounds": rounds,
            "checked_bytes": bench.checked_bytes,
            "mismatched_bytes": bench.wrong_bytes,
            "failed": bench.failed,
            "stages_us": _stages(outcomes),
            "rows": [_as_dict(row) for row in rows(name, size_bytes, took, copies, floor_s)],
        }


def _single_rows(
    name: str, size_bytes: int, took: Sequence[float], copies: Sequence[float], floor_s: float
) -> list[GpuRow]:
    rows = []
    if any(copies):
        rates = [size_bytes / copy_s / 1e9 for copy_s in copies if copy_s]
        least = COPY_TARGETS.get(name)
        ratio = floor_s / statistics.median(c for c in copies if c)
        rows.append(
            GpuRow(
                case=name, what="copy on the device", value=statistics.median(rates), unit="GB/s",
                low=min(rates), high=max(rates), floor=size_bytes / floor_s / 1e9, ratio=ratio,
                target="" if least is None else f">= {least:.2f} of the device copy",
                met=None if least is None else ratio >= least,
            )
        )  # fmt: skip
    micros = sorted(1e6 * one for one in took)
    limits = LATENCY_TARGETS_US.get(name)
    for number, (label, share) in enumerate((("p50", 0.5), ("p99", 0.99))):
        value, most = percentile(micros, share), None if limits is None else limits[number]
        rows.append(
            GpuRow(
                case=name, what=f"request to usable pages, {label}", value=value, unit="us",
                low=micros[0], high=micros[-1], floor=1e6 * floor_s, ratio=1e6 * floor_s / value,
                target="" if most is None else f"<= {most:g} us", met=None if most is None else value <= most,
            )
        )  # fmt: skip
    return rows


def _load_rows(
    name: str, size_bytes: int, took: Sequence[float], copies: Sequence[float], floor_s: float
) -> list[GpuRow]:
    rates = [size_bytes / one / 1e9 for one in took]
    ratio = floor_s / statistics.median(took)
    target = f">= {LOAD_TARGET:.2f} of the device copy"
    return [
        GpuRow(
            case=name, what="all requests together", value=statistics.median(rates), unit="GB/s",
            low=min(rates), high=max(rates), floor=size_bytes / floor_s / 1e9, ratio=ratio,
            target=target, met=ratio >= LOAD_TARGET,
        )
    ]  # fmt: skip


def _stages(outcomes: Sequence[Outcome]) -> dict[str, float]:
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


def _as_dict(row: GpuRow) -> dict[str, Any]:
    return {field: getattr(row, field) for field in GpuRow.__slots__}
