"""The benchmark's verdict over several cases, and what it shows of them side by side."""

from __future__ import annotations

from typing import Any

import pytest
from rich.console import Console

from workers.bench import generation_of_all, succeeded
from workers.render_bench import print_result

VERDICTS = (
    "ok",
    "tokens_identical_to_aggregated",
    "tokens_identical_to_generate",
    "tokens_identical_without_draft_kv",
    "acceptance_equals_aggregated",
)


def generation(**changes: Any) -> dict[str, Any]:
    shares = {"aggregated": 0.5, "shared": 0.5, "not_shared": 0.25}
    numbers = {"acceptance": shares, "acceptance_length": shares, "ttft_s": {"p50": 1.0, "p99": 2.0}}
    return {**dict.fromkeys(VERDICTS, True), **numbers, **changes}


@pytest.mark.parametrize("verdict", VERDICTS)
@pytest.mark.parametrize("wrong", [0, 1, 2])
def test_one_wrong_case_of_a_model_makes_the_verdict_wrong(verdict: str, wrong: int) -> None:
    entries = [generation(**({verdict: False} if number == wrong else {})) for number in range(3)]
    joined = generation_of_all(entries)
    assert {name: joined[name] for name in VERDICTS} == {name: name != verdict for name in VERDICTS}
    assert succeeded({"cases": [{"ok": True}], "generation": joined}) == (verdict != "ok")


def test_what_no_case_looked_at_stays_unknown() -> None:
    unknown = generation(tokens_identical_to_generate=None)
    assert generation_of_all([unknown, unknown])["tokens_identical_to_generate"] is None
    assert generation_of_all([unknown, generation()])["tokens_identical_to_generate"] is True


def case(name: str, ttft_s: float | None, exposed_s: float) -> dict[str, Any]:
    entry = {
        **{"prompt_tokens": 321, "cached_tokens": {"context": 0, "generation": 0}, "bytes": 1, "gb_per_s": 1.0},
        **{"verified": True, "tokens_identical": True, "acceptance": 0.5, "error": "", "first_mismatch": ""},
        **{"ttft_s": ttft_s, "exposed_s": exposed_s, "id": 0, "cancelled": False},
    }
    return {"name": name, "requests": [entry], "generation": generation(), "error": "", "deaths": []}


def test_several_cases_of_a_model_stand_side_by_side() -> None:
    rates = {"median": 1.0, "min": 1.0, "max": 1.0}
    summary = {
        **{"bytes": 1, "gb_per_s": rates, "latency_s": {"p50": 0.0, "p99": 0.0}},
        **{"floor_gb_per_s": 1.0, "floor": "memcpy"},
    }
    cases = [case("whole", 1.25, 0.0123), case("early", None, 0.0004)]
    console = Console(record=True, width=80, color_system=None)
    print_result(console, {"cases": cases, "generation": generation(), "summary": summary})
    shown = console.export_text().partition("Side by side")[2]
    assert shown.split("321", 1)[1].split("\n")[0].split() == ["1.25", "12.3", "-", "0.4"]
