"""The scripted disaggregation benchmark: run every case of a pair file, verify every byte, report."""

from __future__ import annotations

import os
import platform
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace
from importlib import metadata
from pathlib import Path
from typing import Any, Final

from unikv.errors import ConfigError, LinkBrokenError, explain
from workers.bench_case import (
    FLOOR_ALTERNATING,
    BenchRequest,
    Progress,
    case_result,
    failed_case,
    pattern_jobs,
    run_beside_floor,
    run_pair,
    summarise,
)
from workers.config import HFRunnerConfig, PairConfig
from workers.config_load import load_pair, pair_cases
from workers.floors import memcpy_gb_per_s
from workers.pair_run import judge
from workers.rival_nixl import compare_with_nixl

WARM_UPS: Final = 1
"""Requests of a pattern workload that run first and do not count: they fault pages in and fill lane caches."""
_AGREES: Final = "acceptance_equals_aggregated"
_VERSIONS: Final = ("unikv", "torch", "numpy", "pyzmq", "msgpack", "transformers", "nixl-cu13")


def run_bench(request: BenchRequest, progress: Progress) -> dict[str, Any]:
    """Run the benchmark and return its result, the JSON object people and scripts read.

    Raises:
        ConfigError: the pair file or a prompt is wrong.
        IncompatiblePeerError: the gate refuses a case; nothing was started.
        LinkBrokenError: workers did not come up. Of several cases that one fails, and the others go on.
    """
    whole = load_pair(request.source, overrides=request.overrides, case=request.case)
    names: Sequence[str | None] = [request.case] if request.case else pair_cases(whole) or [None]
    pairs = [load_pair(request.source, overrides=request.overrides, case=name) for name in names]
    if request.rendezvous_url is not None and (len(pairs) > 1 or isinstance(whole.runner, HFRunnerConfig)):
        want = "a single case without a model: running workers serve one"
        cure = "choose a case with --case, or leave --rendezvous out"
        raise ConfigError(explain("bench", "pair", whole.name, want, cure))
    for pair in pairs:
        judge(pair)
    floor, cases = memcpy_gb_per_s(), []
    for pair, name in zip(pairs, names, strict=True):
        try:
            cases.append(_run_case(request, pair, name, floor, progress))
        except LinkBrokenError as error:
            if len(names) == 1:
                raise
            cases.append(failed_case(name or pair.name, pair, str(error), floor))
    return _result(whole, cases)


def _run_case(
    request: BenchRequest, pair: PairConfig, name: str | None, floor: float, progress: Progress
) -> dict[str, Any]:
    if isinstance(pair.runner, HFRunnerConfig):
        from workers.bench_model import run_model_case  # noqa: PLC0415 - transformers is an extra

        return run_model_case(request, pair, name, floor, progress)
    jobs = pattern_jobs(pair)
    jobs = [replace(jobs[-1], cancel_after_s=None)] * WARM_UPS + jobs
    if pair.workload.concurrency > 1 or pair.workload.cancel is not None:
        run = run_pair(request, pair, name, jobs, progress)
        return case_result(name or pair.name, pair, run, run.records[WARM_UPS:], floor)
    run, floors = run_beside_floor(request, pair, name, jobs, progress)
    case = case_result(name or pair.name, pair, run, run.records[WARM_UPS:], floors[WARM_UPS:])
    if pair.workload.rival == "nixl" and case["ok"]:
        progress(f"{case['name']}, NIXL alone", 0, 1)
        case["nixl"] = compare_with_nixl(pair, case["summary"]["gb_per_s"]["median"])
    return case


def succeeded(result: dict[str, Any]) -> bool:
    """Return whether everything was verified and, with a model, every token agreed."""
    generation = result.get("generation")
    return all(case["ok"] for case in result["cases"]) and (generation is None or bool(generation["ok"]))


def generation_of_all(generations: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return what the first case of a model generated, with the verdicts of all: one wrong token anywhere is wrong."""
    verdicts = ("ok", *(key for key in generations[0] if key.startswith("tokens_identical")), _AGREES)
    said = {key: [entry[key] for entry in generations if entry[key] is not None] for key in verdicts}
    return {**generations[0], **{key: all(values) if values else None for key, values in said.items()}}


def _result(pair: PairConfig, cases: list[dict[str, Any]]) -> dict[str, Any]:
    requests = [entry for case in cases for entry in case["requests"]]
    floor: float | list[float] = cases[0]["summary"]["floor_gb_per_s"]
    if all(case["summary"]["floor"] == FLOOR_ALTERNATING for case in cases):
        floor = [entry["floor_gb_per_s"] for entry in requests]
    result: dict[str, Any] = {
        "environment": environment(),
        "config": pair.resolved(),
        "path": [{"case": case["name"], **path} for case in cases for path in case["path"]],
        "requests": requests,
        "summary": summarise(requests, floor),
        "cases": cases,
    }
    generation = [case["generation"] for case in cases if "generation" in case]
    if generation:
        result["generation"] = generation_of_all(generation)
    return result


def environment() -> dict[str, Any]:
    """Return what the numbers were measured on."""
    return {
        "python": platform.python_version(),
        "system": f"{platform.system()} {platform.release()} {platform.machine()}",
        "cpus": len(os.sched_getaffinity(0)),
        "versions": dict(_versions()),
        "commit": _commit(),
        "command": " ".join(sys.argv),
    }


def _versions() -> Iterator[tuple[str, str]]:
    for name in _VERSIONS:
        try:
            yield name, metadata.version(name)
        except metadata.PackageNotFoundError:
            continue


def _commit() -> str:
    """Return the commit of the source tree, "" outside of one."""
    here = Path(__file__).resolve().parent
    try:
        done = subprocess.run(
            ["git", "-C", str(here), "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False
        )
    except OSError:
        return ""
    return done.stdout.strip()
