"""The shipped pair files, described by themselves."""

from __future__ import annotations

from importlib.resources import files
from itertools import takewhile
from typing import Any

from workers.config import PairConfig
from workers.config_load import load_pair, pair_cases, preset_names


def presets_report() -> dict[str, Any]:
    """Return name, description and shape of every shipped preset."""
    return {"presets": [_preset(load_pair(name, environ={})) for name in preset_names()]}


def description(text: str) -> str:
    """Return the first sentence of the comment a pair file starts with, without its full stop; "" without one."""
    lines = takewhile(lambda line: line.startswith("#"), text.splitlines())
    comment = " ".join(line.lstrip("#").strip() for line in lines)
    return comment.partition(". ")[0].removesuffix(".")


def _preset(pair: PairConfig) -> dict[str, Any]:
    text = (files("workers") / "presets" / f"{pair.source}.yaml").read_text(encoding="utf-8")
    return {
        "name": pair.source,
        "description": description(text),
        "runner": pair.runner.kind,
        "context": pair.context.parallel.model_dump(),
        "generation": pair.generation.parallel.model_dump(),
        "target_layers": pair.context.num_target_layers,
        "draft_layers": pair.context.num_draft_layers,
        "cases": list(pair_cases(pair)),
    }
