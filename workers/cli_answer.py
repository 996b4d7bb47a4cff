"""What the dry commands do before and after their work: load the pair, show the answer or write it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from rich.console import Console, RenderableType

from workers.config import PairConfig
from workers.config_load import load_pair
from workers.json_output import check_target, write_json

Report = Mapping[str, Any]


def load(pair: str, case: str | None, overrides: list[str] | None, json: str | None) -> PairConfig:
    """Return the pair, after checking that its answer can be written.

    Raises:
        ConfigError: the pair is wrong, or nothing can be written there.
    """
    check_json(json)
    return load_pair(pair, overrides=overrides or (), case=case)


def check_json(json: str | None) -> None:
    """Check that an answer can be written to `json`, None for a table.

    Raises:
        ConfigError: it cannot.
    """
    if json is not None:
        check_target(json)


def answer(report: Report, json: str | None, show: Callable[[Report], RenderableType]) -> None:
    """Print the table, or write the JSON object and print nothing else."""
    if json is None:
        Console().print(show(report))
    else:
        write_json(report, json)
