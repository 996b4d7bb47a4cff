"""The benchmark's result for a person: one line per request, one per case, the verdict last."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

_MIB = 1024**2


def print_result(console: Console, result: dict[str, Any]) -> None:
    """Print tables of `result` and a verdict."""
    with_model = "generation" in result
    for case in result["cases"] if with_model else ():
        console.print(_model_requests(case))
        console.print(_acceptance(case["generation"]))
    if with_model and len(result["cases"]) > 1:
        console.print(_side_by_side(result["cases"]))
    if not with_model:
        console.print(_cases(result["cases"]))
    console.print(_totals(result))
    if any("nixl" in case for case in result["cases"]):
        console.print(_ranges(result["cases"]))
        console.print(_rival(result["cases"]))
    for line in _troubles(result):
        console.print(Text(line, style="red"))


def verdict(result: dict[str, Any], *, fine: bool) -> Text:
    """Return the last line."""
    summary = result["summary"]
    text = f"{summary['verified']}/{summary['requests'] - summary['cancelled']} requests verified byte by byte"
    text += f", {summary['mismatched_bytes']} bytes wrong"
    text += f", {summary['cancelled']} cancelled" if summary["cancelled"] else ""
    if len(result["cases"]) > 1:
        text += f"; {sum(case['ok'] for case in result['cases'])}/{len(result['cases'])} cases passed"
    if "generation" in result:
        same = result["generation"]["tokens_identical_to_aggregated"]
        text += f", tokens {'identical to' if same else 'DIFFER from'} the aggregated run"
    return Text(("PASS  " if fine else "FAIL  ") + text, style="bold green" if fine else "bold red")


def _cases(cases: Sequence[dict[str, Any]]) -> RenderableType:
    table = Table(
        title="Transfer, verified byte by byte", title_justify="left", box=SIMPLE_HEAD, padding=0, pad_edge=False
    )
    for name, justify in (
        ("case", "left"), ("draft", "left"), ("ok", "right"), ("MiB", "right"),
        ("GB/s", "right"), ("memcpy", "right"), ("", "right"), ("thr", "right"),
        ("p50 ms", "right"), ("p99 ms", "right"),
    ):  # fmt: skip
        table.add_column(name, justify=justify, no_wrap=True)  # type: ignore[arg-type]
    for case in cases:
        summary = case["summary"]
        wanted = summary["requests"] - summary["cancelled"]
        table.add_row(
            Text(case["name"]),
            case["draft_kv"],
            Text(f"{summary['verified']}/{wanted}", style="green" if case["ok"] else "red"),
            f"{summary['bytes'] / _MIB:.0f}",
            f"{summary['gb_per_s']['median']:.2f}",
            f"{summary['floor_gb_per_s']:.2f}",
            f"{100 * summary['ratio_to_floor']:.0f}%",
            str(case["threads"]),
            f"{1e3 * summary['latency_s']['p50']:.2f}",
            f"{1e3 * summary['latency_s']['p99']:.2f}",
        )
    return table


def _rival(cases: Sequence[dict[str, Any]]) -> RenderableType:
    """Return NIXL's rates on the same pages: a descriptor per buffer of a layer, and per longest run."""
    compared = [case for case in cases if "nixl" in case]
    if absent := next((case["nixl"]["absent"] for case in compared if case["nixl"]["absent"]), ""):
        return Text(f"NIXL alone was not measured: {absent}")
    table = Table(title="NIXL alone, one WRITE", title_justify="left", box=SIMPLE_HEAD, padding=0, pad_edge=False)
    for name in ("case", "GB/s", "NIXL", "ratio", "merged", "ratio"):
        table.add_column(name, justify="left" if name == "case" else "right", no_wrap=True)
    for case in compared:
        rival = case["nixl"]
        rates = (f"{rival[key]['median']:.2f}" for key in ("gb_per_s", "merged_gb_per_s"))
        ratios = (f"{rival[key]:.1f} x" for key in ("ratio", "merged_ratio"))
        cells = [cell for pair in zip(rates, ratios, strict=True) for cell in pair]
        table.add_row(Text(case["name"]), f"{case['summary']['gb_per_s']['median']:.2f}", *cells)
    legend = (
        "NIXL: the better of progress thread on and off, a descriptor per buffer of a layer; merged: per longest run"
    )
    return Group(table, Text(legend))


def _ranges(cases: Sequence[dict[str, Any]]) -> RenderableType:
    """Return how far single requests lie apart, and from the memcpy beside each."""
    title = "Lowest and highest of single requests"
    table = Table(title=title, title_justify="left", box=SIMPLE_HEAD, padding=0, pad_edge=False)
    for name in ("case", "GB/s", "of memcpy"):
        table.add_column(name, justify="left" if name == "case" else "right", no_wrap=True)
    for case in cases:
        rate, ratio = case["summary"]["gb_per_s"], case["summary"]["ratio"]
        table.add_row(
            Text(case["name"]),
            f"{rate['min']:.2f} to {rate['max']:.2f}",
            f"{100 * ratio['min']:.0f} to {100 * ratio['max']:.0f} %",
        )
    return table


def _model_requests(case: dict[str, Any]) -> RenderableType:
    title = Text(f"{case['name']}: one line per prompt; cached on context/generation side; wait from prefill's end")
    table = Table(title=title, title_justify="left")
    for name in ("prompt", "cached", "TTFT s", "wait ms", "MiB", "GB/s", "bytes", "tokens", "drafts"):
        table.add_column(name, justify="right")
    for entry in case["requests"]:
        ok, same = entry["verified"], entry["tokens_identical"]
        table.add_row(
            str(entry["prompt_tokens"]),
            "{context}/{generation}".format(**entry["cached_tokens"]),
            "-" if entry["ttft_s"] is None else f"{entry['ttft_s']:.2f}",
            f"{1e3 * entry['exposed_s']:.1f}",
            f"{entry['bytes'] / _MIB:.1f}",
            f"{entry['gb_per_s']:.2f}",
            Text("ok" if ok else "WRONG", style="green" if ok else "red"),
            Text("same" if same else "DIFFER", style="green" if same else "red"),
            f"{100 * entry['acceptance']:.0f} %",
        )
    return table


def _side_by_side(cases: Sequence[dict[str, Any]]) -> RenderableType:
    """Return what the same prompts waited for in every case: a row for each prompt, two columns for each case."""
    table = Table(title="Side by side", title_justify="left", box=SIMPLE_HEAD, padding=(0, 1))
    table.add_column("prompt", justify="right")
    for case in cases:
        table.add_column(f"{case['name']}\nTTFT s", justify="right")
        table.add_column("\nwait ms", justify="right")
    for entries in zip(*(case["requests"] for case in cases), strict=False):
        cells = [str(entries[0]["prompt_tokens"])]
        for entry in entries:
            cells.append("-" if entry["ttft_s"] is None else f"{entry['ttft_s']:.2f}")
            cells.append(f"{1e3 * entry['exposed_s']:.1f}")
        table.add_row(*cells)
    return table


def _acceptance(generation: dict[str, Any]) -> RenderableType:
    table = Table(title="Speculative decoding", title_justify="left")
    for name in ("processes", "drafts accepted", "tokens/step", "tokens"):
        table.add_column(name, justify="left" if name == "processes" else "right")
    rows = (
        ("one process", "aggregated", generation["tokens_identical_to_generate"], "generate"),
        ("two, draft KV moved", "shared", generation["tokens_identical_to_aggregated"], "aggregated"),
        ("two, draft KV left out", "not_shared", generation["tokens_identical_without_draft_kv"], "aggregated"),
    )
    for title, key, same, other in rows:
        share, length = generation["acceptance"][key], generation["acceptance_length"][key]
        table.add_row(
            title,
            "-" if share is None else f"{100 * share:.1f} %",
            "-" if length is None else f"{length:.2f}",
            "-" if same is None else ("= " if same else "DIFFER from ") + other,
        )
    return table


def _totals(result: dict[str, Any]) -> RenderableType:
    summary = result["summary"]
    rates, latency = summary["gb_per_s"], summary["latency_s"]
    lines = [
        f"moved {summary['bytes'] / _MIB:.1f} MiB; per request {rates['median']:.2f} GB/s median "
        f"({rates['min']:.2f} to {rates['max']:.2f}), {1e3 * latency['p50']:.2f} ms p50, "
        f"{1e3 * latency['p99']:.2f} ms p99",
        f"floor {summary['floor_gb_per_s']:.2f} GB/s ({summary['floor']})",
    ]
    if "generation" in result:
        ttft = result["generation"]["ttft_s"]
        lines.append(f"time to first token {ttft['p50']:.2f} s p50, {ttft['p99']:.2f} s p99")
    return Group(*(Text(line) for line in lines))


def _troubles(result: dict[str, Any]) -> list[str]:
    """Say what went wrong, each thing once."""
    lines = []
    for case in result["cases"]:
        if case["error"]:
            lines.append(f"{case['name']}: {case['error']}")
        for death in case["deaths"]:
            lines.append(f"{case['name']}: {death['side']} rank {death['rank']} died: {death['reason']}")
            lines += [f"    {line}" for line in death["log"].splitlines()[-5:]]
        troubled: dict[str, list[int]] = {}
        for entry in case["requests"]:
            if (text := entry["error"] or entry["first_mismatch"]) and not entry["cancelled"]:
                troubled.setdefault(text, []).append(entry["id"])
        for text, ids in troubled.items():
            which = f"request {ids[0]}" + (f" and {len(ids) - 1} more" if len(ids) > 1 else "")
            lines.append(f"{case['name']} {which}: {text}")
    return lines
