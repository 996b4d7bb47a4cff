"""The shipped matrix of topologies and loads: all of it through the gate, some of it with processes.

The whole matrix runs with ``unikv bench topologies``, in some minutes.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from transfer.hello import PathKind, Side
from unikv.errors import LinkBrokenError
from unikv.ids import RequestId
from unikv.layer_spec import LayerOwner
from workers import bench
from workers.bench_case import pattern_jobs
from workers.cli import main
from workers.config import PairConfig
from workers.config_load import load_pair, pair_cases
from workers.control import DecodeReport, EvidenceReport
from workers.dry_pair import plan_report
from workers.fleet import Death
from workers.pair_run import PairRun, judge
from workers.request_record import CANCELLED, Job, RequestRecord

PRESET = "topologies"
CASES = pair_cases(load_pair(PRESET, environ={}))
NAMES = tuple(dict.fromkeys(case.rpartition("-")[0] for case in CASES))


@cache
def pair(case: str) -> PairConfig:
    return load_pair(PRESET, case=case, environ={})


def test_every_case_runs_on_both_paths_and_differs_in_nothing_else() -> None:
    assert [f"{name}-{path}" for name in NAMES for path in ("direct", "zmq")] == list(CASES)
    for name in NAMES:
        direct, staged = pair(f"{name}-direct"), pair(f"{name}-zmq")
        assert (direct.transfer.path, staged.transfer.path) == (PathKind.DIRECT, PathKind.ZMQ)
        alike = {"transfer": direct.transfer, "case": direct.case}
        assert staged.model_copy(update=alike) == direct


@pytest.mark.parametrize("name", NAMES)
def test_draft_kv_travels_and_every_head_is_written_once(name: str) -> None:
    config = pair(f"{name}-direct")
    assert judge(config).draft_kv.value in ("shared", "per_view")
    report = plan_report(config, context_dp=0, generation_dp=0)
    written = Counter(
        (item["generation_rank"], piece["layer"], piece["role"], head)
        for item in report["pairs"]
        for piece in item["slices"]
        for head in range(*piece["heads"])
    )
    assert set(written.values()) == {1}
    layers = {layer for _, layer, _, _ in written}
    assert layers == set(range(config.generation.num_target_layers + config.generation.num_draft_layers))


def test_names_mean_what_they_say() -> None:
    for name in NAMES:
        for letters, side in (("ctx", Side.CONTEXT), ("gen", Side.GENERATION)):
            if found := re.search(rf"{letters}((?:[tp]p\d)+)", name):
                sizes = {"tp": 1, "pp": 1} | {kind: int(size) for kind, size in re.findall(r"(tp|pp)(\d)", found[1])}
                shape = pair(f"{name}-zmq").side(side).parallel
                assert {"tp": shape.tp, "pp": shape.pp} == sizes
    data, one = pair("attention_dp-zmq"), pair("attention_dp_one-zmq")
    assert data.context.parallel.attention_dp and data.generation.parallel.attention_dp
    assert one.context.parallel.attention_dp and not one.workload.tell_data_rank
    assert (pair("eagle_2ctx-zmq").context.instances, pair("ctx2_gen2-zmq").generation.instances) == (2, 2)
    assert [pair(f"mtp_{word}-zmq").generation.num_draft_layers for word in ("one", "two")] == [1, 2]
    assert pair("diff_max_tokens-zmq").context.max_seq_len < pair("diff_max_tokens-zmq").generation.max_seq_len
    latent = pair("mtp_two-zmq").generation.layers or ()
    assert {(entry.owner, entry.kv_heads, entry.kv_factor) for entry in latent} == {
        (LayerOwner.TARGET, 1, 1),
        (LayerOwner.DRAFT, 1, 1),
    }


def test_the_loads_are_what_they_should_be() -> None:
    jobs = pattern_jobs(pair("cancel_stress_large-zmq"))
    moments = [job.cancel_after_s for job in jobs if job.cancel_after_s is not None]
    assert (len(jobs), len(moments), len(set(moments))) == (24, 12, 12)
    assert 0 <= min(moments) < 0.02 and 0.1 < max(moments) < 0.2
    first, *others = (job.prompt for job in pattern_jobs(pair("cache_reuse-zmq")))
    assert all(prompt[: len(first)] == first for prompt in others)
    assert others[-1][:400] == others[-2][:400] and others[-1][400:500] != others[-2][400:500]
    assert [job.local for job in pattern_jobs(pair("conditional-zmq"))] == [True] * 3 + [False] * 3
    # Eight requests at once need far more pages than the pool has.
    short = pair("gen_only_insufficient_kv-zmq")
    assert short.workload.concurrency * (short.workload.prompt_tokens[0] // 16) > 4 * (short.generation.pool.pages or 0)


def run(case: str, tmp_path: Path) -> list[dict[str, Any]]:
    """Run one case with processes; return its requests, all of which ended well."""
    file = tmp_path / "result.json"
    assert main(["bench", PRESET, "--case", case, "--json", str(file)]) == 0
    [found] = json.loads(file.read_text())["cases"]
    assert all(entry["verified"] or entry["cancelled"] for entry in found["requests"])
    assert {path["path"] for path in found["path"]} == {case.rpartition("-")[2]}
    requests: list[dict[str, Any]] = found["requests"]
    return requests


@pytest.mark.usefixtures("store_library")
@pytest.mark.parametrize(
    "case", ["ctxtp2_gentp3-direct", "attention_dp_one-zmq", "cp_helix_early-direct", "cuda_graph_padding-zmq"]
)
def test_every_byte_arrives(case: str, tmp_path: Path) -> None:
    requests = run(case, tmp_path)
    assert all(entry["verified"] and entry["bytes"] for entry in requests)


def test_a_case_that_does_not_come_up_fails_and_the_others_go_on(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    def run_pair(_request: object, config: PairConfig, name: str, jobs: Sequence[Job], *_: object) -> PairRun:
        if name == "mtp_one-zmq":
            raise LinkBrokenError("context rank 0 ended during start")
        evidence = EvidenceReport(checked_bytes=1, mismatched_bytes=0, first_mismatch="", digests=())
        records = [RequestRecord(RequestId(number), job, 0.0) for number, job in enumerate(jobs)]
        for record in records:
            if record.job.cancel_after_s is None:
                record.add(DecodeReport(request_id=record.request_id, rank=0, reason="", evidence=evidence))
            else:
                record.cancelled = True
                record.add(DecodeReport(request_id=record.request_id, rank=0, reason=CANCELLED))
        died = (Death(side=Side.CONTEXT, rank=0, reason="exit code 1", orderly=False, tail=""),)
        deaths = died if name == "conditional-direct" else ()
        return PairRun(records=tuple(records), paths=(), draft_kv="shared", deaths=deaths)

    monkeypatch.setattr(bench, "run_pair", run_pair)
    monkeypatch.setattr(bench, "memcpy_gb_per_s", lambda: 10.0)
    file = tmp_path / "result.json"
    assert main(["bench", PRESET, "--json", str(file)]) == 1
    cases = {case["name"]: case for case in json.loads(file.read_text())["cases"]}
    assert tuple(cases) == CASES
    assert {name for name, case in cases.items() if not case["ok"]} == {"mtp_one-zmq", "conditional-direct"}
    assert cases["cancel_stress_small-zmq"]["summary"]["cancelled"] == 12
    shown = capsys.readouterr().out
    assert all(case in shown for case in CASES), "names are never cut"
    assert "mtp_one-zmq: context rank 0 ended during start" in shown
    assert "conditional-direct: context rank 0 died: exit code 1" in shown
    assert f"48 cancelled; {len(CASES) - 2}/{len(CASES)} cases passed" in " ".join(shown.split())
    assert "the caller has cancelled it" not in shown


@pytest.mark.usefixtures("store_library")
def test_cached_prefixes_do_not_travel(tmp_path: Path) -> None:
    requests = run("cache_reuse_dp_early-direct", tmp_path)
    repeated = requests[-1]  # its prompt ran before, to warm up
    assert repeated["cached_tokens"] == {"context": 599, "generation": 592}
    # One target block, and the six or seven blocks in the draft's window, which no other request has at this place.
    assert repeated["bytes"] < 0.1 * 600 * 4 * 2 * 24 * 32 * 2
    assert any(entry["cached_tokens"]["generation"] for entry in requests[:-1])


@pytest.mark.usefixtures("store_library")
def test_cancelled_requests_harm_no_other(tmp_path: Path) -> None:
    requests = run("cancel_stress_small-direct", tmp_path)
    assert any(entry["cancelled"] for entry in requests)
    assert sum(entry["verified"] for entry in requests) >= 12


@pytest.mark.usefixtures("store_library")
def test_short_prompts_stay_where_they_are_decoded(tmp_path: Path) -> None:
    requests = run("conditional-zmq", tmp_path)
    assert [entry["bytes"] > 0 for entry in requests] == [False] * 3 + [True] * 3
