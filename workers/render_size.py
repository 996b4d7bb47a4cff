"""The answers of `unikv size`, for a person."""

from __future__ import annotations

from collections.abc import Iterable

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from workers.render import Result, size_text, table, window_text


def pair(result: Result) -> RenderableType:
    """Show costs, what a load takes in whole pages, and what fits."""
    title = f"{result['side']} rank {result['rank']}: {result['tokens']:,} tokens in {result['requests']:,} request(s)"
    costs = table("", "what", "bytes", "", header=False)
    rows = [
        ("per token, layers without a window", result["bytes_per_token"]),
        ("per token in prefill, all layers", result["context_bytes_per_token"]),
        ("per request, windows and sinks", result["fixed_bytes_per_request"]),
        ("the load, not rounded to pages", result["quota_bytes"]),
    ]
    if result["tokens_per_request"]:
        rows.append((f"the load in whole pages, {result['headroom_tokens']} tokens ahead", result["resident_bytes"]))
    for name, value in (*rows, ("pools of the pair file", result["pool_bytes"])):
        costs.add_row(name, f"{value:,}", size_text(value))
    return Group(Text(title, style="bold"), costs, *_fits(result), *_one_request(result))


def model(result: Result) -> RenderableType:
    """Show what requests cost and how many fit, with the drafter and without."""
    head = f"{result['model']}: requests of {result['tokens']:,} tokens in {size_text(result['memory_bytes'])} "
    head += f"per rank, tp {result['tp']}, {result['tokens_per_block']} tokens per block"
    if result["draft_tokens"]:
        head += f", {result['draft_tokens']} drafts a step"
    layers = table("Layers of the models", "owner", "layers", "windows", "KV heads", "head dim", "stores", "dtype")
    for entry in result["layers"]:
        stored = "K and V" if entry["kv_factor"] == 2 else "latent"
        windows = ", ".join(f"{part['layers']} x {window_text(part['window'])}" for part in entry["windows"])
        heads = f"{entry['local_kv_heads']} of {entry['kv_heads']}"
        layers.add_row(
            entry["owner"], str(entry["count"]), windows, heads, str(entry["head_dim"]), stored, entry["dtype"]
        )
    note = "in whole pages, drafts and null pages included; weights and activations are not"
    return Group(Text(head, style="bold"), layers, _needs(result), *_groups(result), Text(note, style="dim"))


def _needs(result: Result) -> Table:
    named = (("with the drafter", result["with_draft"]), ("target alone", result["without_draft"]))
    cases = [(name, case) for name, case in named if case is not None]
    needs = table("What fits, per rank", "", *(name for name, _ in cases))
    for column in needs.columns[1:]:
        column.justify = "right"
    for name, key, show in (
        ("bytes per token, layers without a window", "bytes_per_token", _count),
        ("bytes per token in prefill, all layers", "context_bytes_per_token", _count),
        ("bytes per request, windows and sinks", "fixed_bytes_per_request", size_text),
        ("a request", "request_bytes", size_text),
        ("null pages, once", "null_bytes", size_text),
        ("a context chunk in windows, once", "chunk_bytes", size_text),
        (f"pools for {result['requests']:,} request(s)", "pool_bytes", size_text),
        ("requests that fit", "requests", _count),
        ("longest request that fits, in tokens", "longest_request_tokens", _count),
    ):
        if key != "chunk_bytes" or result["iteration_tokens"]:
            style = "bold" if key == "requests" else ""
            needs.add_row(name, *(show(case[key]) for _, case in cases), style=style)
    return needs


def _fits(result: Result) -> Iterable[Text]:
    load = result["requests_for_pool"]
    if result["tokens_per_request"]:
        fine = load >= result["requests"]
        text = f"{'fits' if fine else 'does not fit'}: the pools of the pair file hold {load:,} request(s) of "
        yield Text(f"{text}{result['tokens_per_request']:,} tokens", style="green" if fine else "red")
    yield Text(f"tokens of {result['requests']:,} request(s) that fit into these pools: {result['tokens_for_pool']:,}")
    quota = result["given_quota_bytes"]
    if quota is not None:
        held = result["tokens_for_quota"]
        found = "any number" if held is None else f"{held:,}"
        yield Text(f"tokens that fit into {size_text(quota)}, not rounded to pages: {found}")


def _one_request(result: Result) -> Iterable[RenderableType]:
    if result["tokens_per_request"]:
        yield from _groups({**result, "tokens": result["tokens_per_request"]})


def _groups(result: Result) -> Iterable[RenderableType]:
    groups = table(f"One request of {result['tokens']:,} tokens", "group", "owner", "window", "page", "pages", "bytes")
    for group in result["groups"]:
        groups.add_row(
            str(group["id"]),
            group["owner"],
            window_text(group["window"]),
            size_text(group["page_bytes"]),
            f"{group['pages_per_request']:,}",
            f"{group['bytes']:,}",
        )
    yield groups


def _count(value: int) -> str:
    return f"{value:,}"
