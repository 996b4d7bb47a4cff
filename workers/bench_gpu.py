"""Benchmarks of the direct path between two processes on GPUs, each row beside its floor of the same run.

The process that runs this is the generation rank, a child is the context rank; both use the endpoints that serving
uses. Before every request its pages are poisoned, after it every live byte is compared with the pattern that names
layer, role, head and token, all on the device. Copies are timed by events on the copying stream, requests by the host's
clock from the call to the outcome.
"""

from __future__ import annotations

import gc
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack, closing
from functools import partial
from typing import Any, Final

from transfer.hello import PathKind, Side
from transfer.link import Received
from transfer.link_zmq import ZmqLink
from unikv.errors import InternalError, LinkBrokenError
from unikv.ids import RequestId
from unikv.request import KVCacheRequest
from workers.bench import environment
from workers.bench_case import Progress
from workers.bench_gpu_context import PATIENCE_S, prompt_pages
from workers.bench_gpu_rows import Run, as_dict, make_rows, stage_medians
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
WARM_UPS: Final = 4
BURST: Final = 16
"""Requests of a round that follow one another at once, where the pools hold as many: the first of them meets processes
that have slept, the others meet a system at work, and they are different rows."""
FLOOR_ROUNDS: Final = 15
LEAST_ROUNDS: Final = 8


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
        self.address: str = self.hear()["address"]

    def __call__(self, do: str, **arguments: Any) -> dict[str, Any]:
        self.order(do, **arguments)
        return self.hear()

    def order(self, do: str, **arguments: Any) -> None:
        """Say what to do, without waiting for the answer."""
        assert self._process.stdin is not None
        self._process.stdin.write(f"{json.dumps({'do': do, **arguments})}\n")
        self._process.stdin.flush()

    def close(self) -> None:
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.close()
        try:
            self._process.wait(PATIENCE_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._process.stdout.close()

    def hear(self) -> dict[str, Any]:
        """Return the answer to the last order."""
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
        self.staged = self._instance.ranks[0].path is not PathKind.DIRECT
        self.path = f"{self._instance.ranks[0].path} ({self._instance.ranks[0].path_reason})"
        self.tokens = pair.workload.prompt_tokens[1]
        self._one_by_one = pair.workload.concurrency == 1
        self.count = self._burst() if self._one_by_one else pair.workload.concurrency
        self._requests: list[tuple[KVCacheRequest, Tables]] = []
        stack.callback(self._drop)
        self._next_id = self.count * 1000
        self.wrong_bytes = self.checked_bytes = self.failed = 0
        self.context("reserve", count=self.count, tokens=self.tokens)
        manager = self._runtime.manager
        for number in range(self.count):
            request = manager.create_request(RequestId(number))
            request.resize(manager.generation_capacity(self.tokens, 0), self.tokens)
            self._requests.append((request, request.page_tables()))

    def _burst(self) -> int:
        """Return how many prompts the pools hold, up to `BURST`."""
        manager = self._runtime.manager
        blocks = -(-manager.generation_capacity(self.tokens, 0) // self._runtime.card.tokens_per_block)
        return max(1, min(BURST, *(manager.num_free_pages(g.group_id) // blocks for g in manager.layout.groups)))

    def round(self) -> Run:
        """Move all prompts once, together or one after the other."""
        ids = list(range(self._next_id, self._next_id + self.count))
        self._next_id += self.count
        for _, tables in self._requests:
            self._pattern.poison(tables)
        wait_for_device(self.device)
        self.context("publish", ids=ids)
        work = [(RequestId(i), tables) for i, (_, tables) in zip(ids, self._requests, strict=True)]
        took_s, outcomes = [], []
        for part in [[one] for one in work] if self._one_by_one else [work]:
            started_s = time.perf_counter()
            asked = [(i, tables, self.tokens) for i, tables in part]
            handles = self._endpoint.receive_all(asked, instance=self._instance)
            outcomes += [handle.wait(PATIENCE_S) for handle in handles]
            took_s.append(time.perf_counter() - started_s)
        copies: list[float] = self.context("end", ids=ids)["copy_s"]
        found = [outcome for outcome in outcomes if outcome is not None and outcome.ok]
        self.failed += len(outcomes) - len(found)
        for outcome in outcomes:
            if outcome is None or not outcome.ok:
                raise InternalError(f"a request of the benchmark failed: {outcome and outcome.reason}")
        return Run(took_s=took_s, outcomes=found, copies_s=copies)

    def request_bytes(self) -> int:
        """Run once more; return the bytes of one request, or of all that run together."""
        moved = sum(leg.bytes for outcome in self.round().outcomes for leg in outcome.legs)
        return moved // (self.count if self._one_by_one else 1)

    def stream_s(self, frame_bytes: int, frames: int) -> float:
        """Return how long bare frames take from the other process to this one, over a link of the same kind."""
        with closing(ZmqLink()) as link:
            self.context.order("stream", address=link.address, frame_bytes=frame_bytes, frames=frames + 1)
            arrived, first_s = 0, 0.0
            while arrived <= frames:
                for event in link.poll(PATIENCE_S):
                    if not isinstance(event, Received):
                        raise LinkBrokenError(f"the benchmark's stream broke off: {event.reason}")
                    first_s = first_s or time.perf_counter()
                    arrived += 1
            took_s = time.perf_counter() - first_s
        self.context.hear()
        return took_s

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
    with ExitStack() as stack:
        bench = _Bench(pair, what, stack)
        gc.freeze()
        for _ in range(WARM_UPS):
            bench.round()
        size_bytes = bench.request_bytes()
        floor = _floor(bench, pair, size_bytes)
        runs, floors = [], []
        rounds = max(LEAST_ROUNDS, -(-pair.workload.requests // bench.count))
        for number in range(rounds):
            progress(name, number, rounds)
            runs.append(bench.round())
            bench.check()
            if number < FLOOR_ROUNDS:
                floors.append(floor())
        progress(name, rounds, rounds)
        outcomes = [outcome for run in runs for outcome in run.outcomes]
        return {
            "name": name,
            "path": bench.path,
            "device": device_name(bench.device),
            "bytes": size_bytes,
            "rounds": rounds,
            "requests": len(outcomes),
            "checked_bytes": bench.checked_bytes,
            "mismatched_bytes": bench.wrong_bytes,
            "failed": bench.failed,
            "stages_us": stage_medians(outcomes),
            "rows": [as_dict(row) for row in make_rows(name, size_bytes, runs, floors, staged=bench.staged)],
        }


def _floor(bench: _Bench, pair: PairConfig, size_bytes: int) -> Callable[[], float]:
    """Return what takes the time that moving as many bytes takes at best: a plain copy, or a bare stream of frames."""
    if not bench.staged:
        return DeviceFloor(bench.device, size_bytes).copy_s
    frame_bytes = pair.transfer.options().chunk_bytes
    return partial(bench.stream_s, frame_bytes, -(-size_bytes // frame_bytes))
