"""The result of a GPU benchmark for people: a table on a terminal, and one for a page."""

from __future__ import annotations

from typing import Any

from rich.console import Console
from rich.table import Table

_COLUMNS = ("case", "what", "value", "min", "max", "floor", "of floor", "target", "met")


def print_gpu_result(console: Console, result: dict[str, Any]) -> None:
    """Print every row, and what was checked."""
    table = Table(title=f"{result['benchmark']} on {result['environment']['device']}")
    for column in _COLUMNS:
        table.add_column(column, justify="left" if column in ("case", "what", "target", "met") else "right")
    for row in result["rows"]:
        table.add_row(*_cells(row))
    console.print(table)
    for case in result["cases"]:
        stages = ", ".join(f"{name} {micros:.0f}" for name, micros in case["stages_us"].items())
        console.print(
            f"{case['name']}: path {case['path']}; {case['rounds']} rounds of {case['bytes']} bytes, "
            f"{case['checked_bytes']} bytes checked, {case['mismatched_bytes']} wrong; medians in us: {stages}"
        )


def gpu_markdown(result: dict[str, Any]) -> str:
    """Return the rows as a table of a page."""
    lines = ["| " + " | ".join(_COLUMNS) + " |", "|" + "---|" * len(_COLUMNS)]
    lines += ["| " + " | ".join(_cells(row)) + " |" for row in result["rows"]]
    return "\n".join(lines) + "\n"


def _cells(row: dict[str, Any]) -> list[str]:
    unit = row["unit"]
    return [
        row["case"],
        row["what"],
        f"{row['value']:.0f} {unit}",
        f"{row['low']:.0f}",
        f"{row['high']:.0f}",
        "" if row["floor"] is None else f"{row['floor']:.0f}",
        "" if row["ratio"] is None else f"{row['ratio']:.2f}",
        row["target"],
        {True: "yes", False: "no", None: ""}[row["met"]],
    ]


def gpu_page(result: dict[str, Any]) -> str:
    """Return the rows with what they were measured on."""
    environment = result["environment"]
    versions = ", ".join(f"{name} {version}" for name, version in environment["versions"].items())
    facts = (
        f"## {result['benchmark']}\n\n"
        f"{environment['device']}; {environment['system']}, {environment['cpus']} processors, Python "
        f"{environment['python']}, {versions}; commit {environment['commit'] or 'unknown'}.\n"
        f"Command: `unikv bench {result['benchmark']}`.\n\n"
    )
    checked = "".join(
        f"* {case['name']}: path {case['path']}; {case['rounds']} rounds of {case['bytes']} bytes, every byte checked "
        f"after every round, {case['mismatched_bytes']} wrong.\n"
        for case in result["cases"]
    )
    return f"{facts}{gpu_markdown(result)}\n{checked}\n"
