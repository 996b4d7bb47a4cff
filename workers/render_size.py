"""The plan of a model's cache for a person: 80 columns."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from workers.render import size_text

Result = Mapping[str, Any]


def model_size(result: Result) -> RenderableType:
    """Show what the model keeps, what requests cost, and what fits."""
    lines = [_model("target", result["target"])]
    if result["draft"] is not None:
        lines.append(_model("draft", result["draft"]))
    return Group(*lines, _load(result), _costs(result), _groups(result), *_answers(result))


def _model(name: str, model: Result) -> Text:
    heads = f"{model['kv_heads']} KV head(s)"
    if model["local_kv_heads"] != model["kv_heads"]:
        heads += f", {model['local_kv_heads']} here"
    kind = "" if model["kv_factor"] == 2 else ", keys only"
    windows = ", ".join(
        f"{part['layers']} of {'full attention' if part['window'] is None else 'window ' + format(part['window'], ',')}"
        for part in model["windows"]
    )
    text = f"{name}: {model['model_type']}, {model['layers']} layer(s) ({windows}), {heads} x {model['head_dim']}"
    return Text(f"{text}, {model['dtype']}{kind}")


def _load(result: Result) -> Text:
    text = f"tp {result['tp']}, {result['tokens_per_block']} tokens per block, up to {result['max_seq_len']:,} tokens"
    if result["draft_tokens"]:
        text += f", {result['draft_tokens']} drafts a step"
    if result["iteration_tokens"]:
        text += f", {result['iteration_tokens']:,} tokens in prefill"
    return Text(f"{text}. Per rank:")


def _costs(result: Result) -> Table:
    cases = [("with drafter", result["with_draft"]), ("target alone", result["without_draft"])]
    cases = [(name, case) for name, case in cases if case is not None]
    table = Table(box=SIMPLE_HEAD, pad_edge=False)
    table.add_column(f"requests of {result['tokens_per_request']:,} tokens", overflow="fold")
    for name, _ in cases:
        table.add_column(name, justify="right")
    asked = result["requests"]
    for name, key, show in (
        ("bytes per token, layers without a window", "bytes_per_token", _count),
        ("bytes per token, all layers", "context_bytes_per_token", _count),
        ("windows and sinks of a request", "fixed_bytes_per_request", size_text),
        ("one request, in whole pages", "bytes_per_request", size_text),
        ("null pages, once", "null_bytes", size_text),
        ("one context chunk in windows, once", "chunk_bytes", size_text),
        (f"pools for {asked:,} request(s)", "pool_bytes", size_text),
    ):
        if key != "chunk_bytes" or result["iteration_tokens"]:
            table.add_row(name, *(show(case[key]) for _, case in cases))
    if result["memory_bytes"] is not None:
        table.add_section()
        memory = size_text(result["memory_bytes"])
        fits = [Text(_count(case["requests_that_fit"]), style="bold") for _, case in cases]
        table.add_row(Text(f"requests that fit into {memory}", style="bold"), *fits)
        table.add_row("tokens in them", *(_count(case["tokens_that_fit"]) for _, case in cases))
        table.add_row(
            "longest single request, in tokens", *(_count(case["longest_request_tokens"]) for _, case in cases)
        )
    return table


def _groups(result: Result) -> Table:
    title = "One request, by layer group"
    table = Table(title=title, title_justify="left", box=SIMPLE_HEAD, pad_edge=False)
    for column in ("group", "owner", "layers", "window", "page", "pages", "bytes"):
        table.add_column(column, justify="left" if column in ("owner", "window") else "right", overflow="fold")
    for group in result["groups"]:
        table.add_row(
            str(group["id"]),
            group["owner"],
            str(group["layers"]),
            "full" if group["window"] is None else _count(group["window"]),
            size_text(group["page_bytes"]),
            _count(group["pages_per_request"]),
            size_text(group["bytes"]),
        )
    return table


def _answers(result: Result) -> list[Text]:
    if result["memory_bytes"] is None:
        return [Text("--memory SIZE tells how many requests fit into SIZE", style="dim")]
    if result["with_draft"] is None or not result["without_draft"]["requests_that_fit"]:
        return []
    alone, both = (result[key]["requests_that_fit"] for key in ("without_draft", "with_draft"))
    return [Text(f"the drafter takes the place of {alone - both:,} of {alone:,} request(s)")]


def _count(value: int) -> str:
    return f"{value:,}"
