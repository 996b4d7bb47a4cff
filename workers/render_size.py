"""The answers of `unikv size`, for a person."""

from __future__ import annotations

from collections.abc import Iterable

from rich.console import Group, RenderableType
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
    """Show how many requests fit, with and without the drafter."""
    head = f"{result['model']}: requests of {result['tokens']:,} tokens in {size_text(result['memory_bytes'])} "
    head += f"per rank, tp {result['tp']}, {result['tokens_per_block']} tokens per block"
    layers = table("Layers of the models", "owner", "layers", "windowed", "KV heads", "head dim", "stores", "dtype")
    for entry in result["layers"]:
        stored = "K and V" if entry["kv_factor"] == 2 else "latent"
        values = (entry["count"], entry["windowed"], entry["kv_heads"], entry["head_dim"])
        layers.add_row(entry["owner"], *map(str, values), stored, entry["dtype"])
    fits = table("What fits, per rank", "cache", "bytes per token", "a request", "requests", "longest request")
    for name, key in (("target alone", "without_draft"), ("with the drafter", "with_draft")):
        found = result[key]
        if found is not None:
            fits.add_row(
                name,
                f"{found['bytes_per_token']:,}",
                size_text(found["request_bytes"]),
                f"{found['requests']:,}",
                f"{found['longest_request_tokens']:,}",
            )
    note = "in whole pages, drafts and null pages included; weights and activations are not"
    return Group(Text(head, style="bold"), layers, fits, Text(note, style="dim"))


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
        title = f"One request of {result['tokens_per_request']:,} tokens"
        groups = table(title, "group", "owner", "window", "page", "pages", "bytes")
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
