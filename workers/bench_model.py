"""The benchmark's case for a real model: aggregated, disaggregated with shared draft KV, and without it."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import Any

from workers.bench_case import BenchRequest, Progress, case_result, percentile, run_pair
from workers.config import HFRunnerConfig, PairConfig
from workers.config_load import load_pair
from workers.control import DecodeReport
from workers.model_chat import ChatFormat
from workers.model_reference import Reference, num_turns, run_references
from workers.model_store import resolve_model
from workers.pair_run import PairRun
from workers.workload import Job, RequestRecord

WITHOUT_DRAFT = ("transfer.draft_kv=0",)
"""Override of the run that leaves draft KV at home."""


def run_model_case(
    request: BenchRequest, pair: PairConfig, name: str | None, floor: float, progress: Progress
) -> dict[str, Any]:
    """Run one case of a model three times and compare: aggregated, as configured, and without draft KV."""
    jobs, references = _references(pair, progress)
    title = name or pair.name
    shared = run_pair(request, pair, name, jobs, progress, label=f"{title}, disaggregated")
    case = case_result(title, pair, shared, shared.records, floor)
    apart = _run_apart(request, pair, name, jobs, progress)
    case["generation"] = _generation(pair, references, shared, apart)
    _add_tokens(pair, case["requests"], shared.records, references)
    return case


def _references(pair: PairConfig, progress: Progress) -> tuple[list[Job], list[Reference]]:
    title, finished, total = f"{pair.name}, one process (aggregated, generate)", 0, num_turns(pair)
    progress(title, 0, total)

    def on_finished() -> None:
        nonlocal finished
        finished += 1
        progress(title, finished, total)

    return run_references(pair, on_finished)


def _run_apart(
    request: BenchRequest, pair: PairConfig, name: str | None, jobs: Sequence[Job], progress: Progress
) -> PairRun | None:
    """Run the jobs with draft KV left at home; None where there is no drafter."""
    if pair.context.speculative is None or pair.generation.speculative is None:
        return None
    overrides = [*request.overrides, *WITHOUT_DRAFT]
    without = load_pair(request.source, overrides=overrides, case=name, environ={})
    label = f"{name or pair.name}, without draft KV"
    return run_pair(request, without, name, jobs, progress, extra=WITHOUT_DRAFT, label=label)


def _generation(
    pair: PairConfig, references: Sequence[Reference], shared: PairRun, apart: PairRun | None
) -> dict[str, Any]:
    aggregated = [reference.aggregated for reference in references]
    tokens = [tuple(result.tokens) for result in aggregated]
    same = [record.tokens == want for record, want in zip(shared.records, tokens, strict=True)]
    same_apart = [record.tokens == want for record, want in zip(apart.records if apart else (), tokens, strict=False)]
    exact = [ref.generated == ref.aggregated.tokens for ref in references if ref.generated is not None]
    ttft = sorted(value for record in shared.records if (value := record.ttft_s()) is not None)
    acceptance = {
        "aggregated": _share(sum(r.accepted for r in aggregated), sum(r.proposed for r in aggregated)),
        "shared": _acceptance(shared) if shared.draft_kv != "off" else None,
        "not_shared": _acceptance(apart) if apart else None,
    }
    lengths = {
        "aggregated": _mean([n for r in aggregated for n in r.accepted_per_step]),
        "shared": _length(shared) if shared.draft_kv != "off" else None,
        "not_shared": _length(apart) if apart else None,
    }
    agree = acceptance["shared"] is None or acceptance["shared"] == acceptance["aggregated"]
    return {
        "tokens_identical_to_aggregated": all(same) and bool(same),
        "tokens_identical_without_draft_kv": all(same_apart) if apart else None,
        "tokens_identical_to_generate": all(exact) if exact else None,
        "acceptance": acceptance,
        "acceptance_length": lengths,
        "acceptance_equals_aggregated": agree,
        "ttft_s": {"p50": percentile(ttft, 0.5), "p99": percentile(ttft, 0.99)},
        "ok": all(same) and all(same_apart) and all(exact) and agree,
    }


def _add_tokens(
    pair: PairConfig,
    entries: Sequence[dict[str, Any]],
    records: Sequence[RequestRecord],
    references: Sequence[Reference],
) -> None:
    """Add to every request what was generated and whether it is what one process generates."""
    assert isinstance(pair.runner, HFRunnerConfig)
    chat = ChatFormat(resolve_model(pair.runner.model))
    for entry, record, reference in zip(entries, records, references, strict=True):
        entry["tokens"] = list(record.tokens)
        entry["text"] = chat.text(record.tokens)
        entry["tokens_identical"] = record.tokens == tuple(reference.aggregated.tokens)
        entry["acceptance"] = _share(*_counts([record]))
        entry["acceptance_aggregated"] = reference.aggregated.acceptance


def _counts(records: Sequence[RequestRecord]) -> tuple[int, int]:
    decodes = [_decoder(record) for record in records]
    return sum(d.accepted for d in decodes if d), sum(d.proposed for d in decodes if d)


def _decoder(record: RequestRecord) -> DecodeReport | None:
    return max(record.decodes.values(), key=lambda report: len(report.tokens), default=None)


def _acceptance(run: PairRun) -> float:
    return _share(*_counts(run.records))


def _length(run: PairRun) -> float:
    return _mean([n for record in run.records if (d := _decoder(record)) for n in d.accepted_lengths])


def _share(accepted: int, proposed: int) -> float:
    return accepted / proposed if proposed else 0.0


def _mean(accepted: Sequence[int]) -> float:
    """Return tokens per step: the accepted drafts and the target's own."""
    return 1.0 + statistics.fmean(accepted) if accepted else 0.0
