"""Results for a person: tables that fit 80 columns, made from the same objects the machine form is."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import groupby
from typing import Any, Final

from rich.box import SIMPLE_HEAD
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

Result = Mapping[str, Any]

_VERDICT_STYLES: Final = {"ok": "green", "fallback": "yellow", "refuse": "bold red"}
_NUMBERS: Final = {"bytes", "bytes per token", "bytes per page", "lanes", "pages", "page", "slot", "each"}
"""Columns that are aligned to the right."""
_WHOLE: Final = ("check", "layers and ranks", "preset", "verdict")
"""Columns whose words are never broken."""
_DRAFT_KV: Final = {
    "shared": "travels with the target's",
    "per_view": "travels, heads cut per view",
    "off": "does not travel",
}


def layout(result: Result) -> RenderableType:
    """Show groups, pools and layers of one rank."""
    title = f"{result['side']} rank {result['rank']}: {result['bytes_per_token']:,} bytes per token, "
    title += f"{result['tokens_per_block']} tokens per block, {result['kv_layout']}"
    if result["cp"] > 1:
        title += f", blocks {_every(result['cp_rank'], result['cp'])}"
    groups = table("Layer groups", "group", "owner", "layers", "window", "sinks", "reuse", "page")
    for group in result["groups"]:
        groups.add_row(
            str(group["id"]),
            group["owner"],
            ranges(group["layers"]),
            window_text(group["window"]),
            str(group["sink_blocks"]),
            group["reuse"],
            size_text(group["page_bytes"]),
        )
    pools = table("Pools (one slot)", "group", "pool", "slot", "buffers", "each", "holds")
    for pool in result["pools"]:
        pools.add_row(
            str(pool["group"]),
            str(pool["index"]),
            size_text(pool["slot_bytes"]),
            str(len(pool["buffers"])),
            size_text(pool["buffer_bytes"]),
            _buffers(pool["buffers"]),
        )
    layers = table("Layers", "layers", "owner", "heads here", "of the model", "bytes per token")
    for same, items in _runs(result["layers"], "owner", "local_kv_heads", "heads", "bytes_per_token"):
        owner, local, heads, size = same
        layers.add_row(ranges(item["layer"] for item in items), owner, str(local), ranges(range(*heads)), f"{size:,}")
    return Group(Text(title, style="bold"), groups, pools, layers)


def check(result: Result) -> RenderableType:
    """Show every check, then in words what is wrong."""
    shown = table("", "verdict", "check", "about", "context", "generation")
    notes: list[Text] = []
    for row in result["checks"]:
        style = _VERDICT_STYLES[row["verdict"]]
        shown.add_row(
            Text(row["verdict"], style=style), row["name"], row["scope"], Text(row["context"]), Text(row["generation"])
        )
        if row["reason"]:
            notes.append(Text(f"{row['verdict']}  {row['name']} [{row['scope']}]: {row['reason']}", style=style))
    fine = result["compatible"]
    outcome = "compatible" if fine else "refused"
    last = f"{outcome}; draft KV {_draft_kv(result)}"
    return Group(shown, *notes, Text(last, style="bold green" if fine else "bold red"))


def plan(result: Result) -> RenderableType:
    """Show every pair of ranks; slices that differ in their layer only share a line."""
    dealt = any(pair["ordinal_step"] > 1 for pair in result["pairs"])
    blocks = ("blocks",) if dealt else ()
    shown = table("", "from", "to", *blocks, "owner", "layers", "roles", "heads", "bytes per page", "lanes")
    for pair in result["pairs"]:
        ranks = (str(pair["context_rank"]), str(pair["generation_rank"]), str(pair["lanes"]))
        which = _every(pair["ordinal_start"], pair["ordinal_step"])
        for (owner, heads), pieces in _grouped(pair["slices"], "owner", "heads"):
            shown.add_row(
                *ranks[:2],
                *((which,) if dealt else ()),
                owner,
                ranges({piece["layer"] for piece in pieces}),
                ", ".join(dict.fromkeys(piece["role"] for piece in pieces)),
                ranges(range(*heads)),
                f"{sum(piece['bytes_per_page'] for piece in pieces):,}",
                ranks[2],
            )
            ranks, which = ("", "", ""), ""
        shown.add_section()
    moving = f"{len(result['pairs'])} pair(s) of ranks move bytes; draft KV {_draft_kv(result)}"
    note = Text(f"digest {result['digest']}; --json has every slice with its offsets", style="dim")
    return Group(shown, Text(moving, style="bold"), note)


def pages(result: Result) -> RenderableType:
    """Show the ordinals of each group."""
    title = f"prompt of {result['prompt_tokens']:,} tokens, {result['cached_tokens']:,} of them already there"
    shown = table("", "group", "owner", "window", "sinks", "pages", "ordinals that travel")
    for group in result["groups"]:
        ordinals = group["ordinals"]
        text = ranges(ordinals) or "none"
        shown.add_row(
            str(group["id"]),
            group["owner"],
            window_text(group["window"]),
            str(group["sink_blocks"]),
            str(len(ordinals) if group["travels"] else 0),
            text if group["travels"] else f"draft KV stays home (else {text})",
        )
    deal = [
        f"CP rank {rank} of {result['cp']} is sent blocks {_every(rank, result['cp'])}" for rank in range(result["cp"])
    ]
    return Group(Text(title, style="bold"), shown, *map(Text, deal if result["cp"] > 1 else ()))


def _every(start: int, step: int) -> str:
    """Return every `step`-th number as text: ``1, 3, ...``."""
    return f"{start}, {start + step}, ..."


def presets(result: Result) -> RenderableType:
    """Show the shipped pair files: a line on each, then what `--case` may name."""
    shown = table("", "preset", "what it is for", "layers and ranks")
    cases: list[Text] = []
    for preset in result["presets"]:
        shown.add_row(
            preset["name"],
            preset["description"],
            f"{preset['target_layers']} + {preset['draft_layers']} draft\n"
            f"{_parallel(preset['context'])} -> {_parallel(preset['generation'])}",
        )
        if preset["cases"]:
            cases.append(Text(f"cases of {preset['name']}: {', '.join(preset['cases'])}"))
    return Group(shown, *cases)


def ranges(numbers: Iterable[int]) -> str:
    """Return ``0-3, 7`` for 0, 1, 2, 3, 7."""
    ordered = sorted(numbers)
    parts = []
    for _, run in groupby(enumerate(ordered), key=lambda item: item[1] - item[0]):
        values = [value for _, value in run]
        parts.append(f"{values[0]}-{values[-1]}" if len(values) > 1 else str(values[0]))
    return ", ".join(parts)


def size_text(size_bytes: int) -> str:
    """Return a size in the largest unit that keeps it at 1 or more."""
    for unit, bytes_each in (("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10)):
        if size_bytes >= bytes_each:
            return (
                f"{size_bytes / bytes_each:.4g} {unit}"
                if size_bytes % bytes_each
                else f"{size_bytes // bytes_each} {unit}"
            )
    return f"{size_bytes} B"


def table(title: str, *columns: str, header: bool = True) -> Table:
    """Return an empty table in our style."""
    made = Table(title=title or None, title_justify="left", show_header=header, box=SIMPLE_HEAD, pad_edge=False)
    for column in columns:
        made.add_column(
            column,
            justify="right" if column in _NUMBERS else "left",
            overflow="fold",
            no_wrap=column in _WHOLE,
        )
    return made


def _runs(items: Sequence[Result], *keys: str) -> Iterable[tuple[tuple[Any, ...], list[Result]]]:
    """Yield neighbours that agree in `keys` together."""
    for same, run in groupby(items, key=lambda item: tuple(item[key] for key in keys)):
        yield same, list(run)


def _grouped(items: Sequence[Result], *keys: str) -> Iterable[tuple[tuple[Any, ...], list[Result]]]:
    """Yield all items that agree in `keys` together, in order of first appearance."""
    found: dict[str, tuple[tuple[Any, ...], list[Result]]] = {}
    for item in items:
        same = tuple(item[key] for key in keys)
        found.setdefault(repr(same), (same, []))[1].append(item)
    yield from found.values()


def _buffers(buffers: Sequence[Result]) -> str:
    roles = ", ".join(dict.fromkeys(item["role"] for item in buffers))
    return f"{roles} of layers {ranges({item['layer'] for item in buffers})}"


def _draft_kv(result: Result) -> str:
    return f"{_DRAFT_KV[result['draft_kv']]} ({result['draft_kv']})"


def window_text(window: int | None) -> str:
    """Return a window as text."""
    return "full" if window is None else f"{window:,}"


def _parallel(shape: Mapping[str, Any]) -> str:
    split = " ".join(f"{name}{shape[name]}" for name in ("tp", "pp", "cp") if shape[name] != 1) or "1 rank"
    return f"{split} dp" if shape["attention_dp"] else split
