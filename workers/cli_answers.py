"""What the dry commands do alike: load a pair after checking where the answer goes, and give the answer."""

from __future__ import annotations

from collections.abc import Callable

from rich.console import Console, RenderableType

from unikv.errors import ConfigError, explain
from workers import dry
from workers.config import PairConfig
from workers.config_load import load_pair
from workers.config_values import parse_size_bytes
from workers.json_output import check_target, write_json


def load(pair: str, case: str | None, overrides: list[str] | None, json: str | None) -> PairConfig:
    """Return the pair, after checking that its answer can be written."""
    check_json(json)
    return load_pair(pair, overrides=overrides or (), case=case)


def check_json(json: str | None) -> None:
    """Check that an answer can be written."""
    if json is not None:
        check_target(json)


def answer(report: dry.Report, json: str | None, show: Callable[[dry.Report], RenderableType]) -> None:
    """Print the table, or write the JSON object and print nothing else."""
    if json is None:
        Console().print(show(report))
    else:
        write_json(report, json)


def size_bytes(option: str, text: str) -> int:
    """Return a size such as 8GiB in bytes.

    Raises:
        ConfigError: it is none; the text names the option.
    """
    try:
        return parse_size_bytes(text)
    except ValueError:
        want = "a size in B, KiB, MiB or GiB"
        raise ConfigError(explain("size", option, text, want, "write for example 8GiB")) from None
