"""Tables fit 80 columns and say what the object says."""

from __future__ import annotations

from io import StringIO
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console, RenderableType

from transfer.hello import Side
from workers import render, render_size
from workers.config import PairConfig
from workers.config_load import load_pair
from workers.dry import layout_report, size_report
from workers.dry_pair import check_report, judge, pages_report, plan_report
from workers.preset_list import presets_report

PAIRS = Path(__file__).parent / "pairs"


def pair(name: str, *overrides: str) -> PairConfig:
    return load_pair(str(PAIRS / f"{name}.yaml"), overrides=overrides, environ={})


def shown(what: RenderableType) -> str:
    """Return `what` as printed on 80 columns, runs of blanks made one, after checking that it fits."""
    console = Console(file=StringIO(), width=80)
    console.print(what)
    text = console.file.getvalue()  # type: ignore[attr-defined]
    assert max(map(len, text.splitlines())) <= 80
    return "\n".join(" ".join(line.split()) for line in text.splitlines())


def test_layout() -> None:
    text = shown(render.layout(layout_report(pair("tp2-tp4"), Side.CONTEXT, 1)))
    assert "context rank 1: 6,144 bytes per token, 32 tokens per block, HND" in text
    assert "1 draft 2-3 2,048 0 optional 64 KiB" in text
    assert "0 0 128 KiB 4 32 KiB key, value of layers 0-1" in text
    assert "0-1 target 4 4-7 2,048" in text


def test_layout_of_many_kinds_of_buffers() -> None:
    text = shown(render.layout(layout_report(pair("mixed"), Side.CONTEXT, 0)))
    assert "key_block_scale" in text
    assert "1 target 2 0-1 256" in text


def test_size() -> None:
    found = size_report(pair("mixed"), Side.GENERATION, tokens=8192, requests=8, quota_bytes=9 << 20)
    text = shown(render_size.pair(found))
    assert "generation rank 0: 8,192 tokens in 8 request(s)" in text
    assert "per request, windows and sinks 131,072 128 KiB" in text
    assert f"tokens that fit into 9 MiB, not rounded to pages: {((9 << 20) - 8 * 131072) // 800:,}" in text
    assert "One request of 1,024 tokens" in text
    assert "1 draft 64 32 KiB 4 131,072" in text
    assert "does not fit: the pools of the pair file hold 0 request(s) of 1,024 tokens" in text


def test_size_of_no_load_has_no_request_to_show() -> None:
    text = shown(render_size.pair(size_report(pair("mixed"), Side.GENERATION)))
    assert "One request" not in text and "tokens of 1 request(s) that fit into these pools: " in text


def test_size_without_a_cap() -> None:
    layers = "model.layers=[{owner: target, kv_heads: 1, head_dim: 16, dtype: float16, window: 64}]"
    found = size_report(pair("mixed", layers, "speculative=null"), Side.GENERATION, quota_bytes=1 << 20)
    assert "tokens that fit into 1 MiB, not rounded to pages: any number" in shown(render_size.pair(found))


def test_check() -> None:
    text = shown(render.check(check_report(judge(pair("tp2-tp4")))))
    assert "ok tokens_per_block instance 32 tokens 32 tokens" in text
    assert text.splitlines()[-1] == "compatible; draft KV travels, heads cut per view (per_view)"


@pytest.mark.parametrize("mode", ["auto", "1"])
def test_check_says_in_words_what_is_wrong(mode: str) -> None:
    text = shown(render.check(check_report(judge(pair("tp2-tp4", f"transfer.draft_kv={mode}")))))
    verdict = "refuse" if mode == "1" else "fallback"
    assert f"{verdict} tp [draft]: tp is 2 on context and 4 on generation; draft KV does not" in text
    outcome = "refused" if mode == "1" else "compatible"
    assert text.splitlines()[-1] == f"{outcome}; draft KV does not travel (off)"


def test_plan() -> None:
    text = shown(render.plan(plan_report(pair("tp2-tp4"))))
    assert "0 1 target 0-1 key, value 2-3 65,536 2" in text
    assert "draft 2-3 key, value 1 32,768" in text
    assert "4 pair(s) of ranks move bytes; draft KV travels, heads cut per view (per_view)" in text


def test_pages() -> None:
    text = shown(render.pages(pages_report(pair("tp2-tp4"), prompt_tokens=2080, cached_tokens=32)))
    assert "prompt of 2,080 tokens, 32 of them already there" in text
    assert "1 draft 2,048 0 64 1-64" in text


def test_pages_that_stay_are_not_said_to_travel() -> None:
    text = shown(render.pages(pages_report(pair("tp2-tp4", "transfer.draft_kv=auto"), prompt_tokens=64)))
    assert "1 draft 2,048 0 0 draft KV stays home (else 0-1)" in text


def test_pages_with_nothing_to_move() -> None:
    assert "0 target full 0 0 none" in shown(render.pages(pages_report(pair("tp2-tp4"), prompt_tokens=0)))


def test_presets() -> None:
    text = shown(render.presets(presets_report()))
    assert "pattern-small Pages filled with a pattern" in text
    assert "cases of pattern-small: tp1-tp1-direct" in text


@given(numbers=st.frozensets(st.integers(0, 60)))
def test_ranges_name_every_number_once(numbers: frozenset[int]) -> None:
    text = render.ranges(numbers)
    named = [part.split("-") for part in text.split(", ")] if text else []
    assert [n for part in named for n in range(int(part[0]), int(part[-1]) + 1)] == sorted(numbers)
    # The fewest ranges: no two of them touch.
    assert all(int(left[-1]) + 1 < int(right[0]) for left, right in pairwise(named))


@pytest.mark.parametrize(
    ("size_bytes", "text"),
    [(0, "0 B"), (1023, "1023 B"), (1024, "1 KiB"), (8704, "8.5 KiB"), (3 << 30, "3 GiB"), (1 << 40, "1024 GiB")],
)
def test_sizes(size_bytes: int, text: str) -> None:
    assert render.size_text(size_bytes) == text
