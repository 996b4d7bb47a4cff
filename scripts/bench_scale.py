"""How the cost of control grows with the fleet: messages per request, time per message, memory per known peer.

    python scripts/bench_scale.py [--contexts 1000] [--generations 64] [--requests 10000] [--json FILE]

Real engines in one process, with a clock in steps and pages without memory: what a copy costs is not in here. Times are
processor time of this process, of one thread. Prints one table per question; docs/scale.md says what they mean.
"""

from __future__ import annotations

import argparse
import gc
import json
import logging
import platform
import time
import tracemalloc
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from transfer.testing.scale import FleetDriver

TP = 8
PROMPT_TOKENS = 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One fleet, and what its requests cost.

    Attributes:
        context_ranks, generation_ranks: ranks of each side.
        in_flight: requests that were open at once.
        pairs: pairs of ranks that met.
        meet_us: processor time of one meeting, both sides.
        messages_per_request: of all ranks, without hellos.
        messages_per_leg: of one pair of ranks for one request.
        message_us: processor time to handle one message, moves included.
    """

    context_ranks: int
    generation_ranks: int
    requests: int
    in_flight: int
    pairs: int
    meet_us: float
    messages_per_request: float
    messages_per_leg: float
    message_us: float


def run_fleet(contexts: int, generations: int, requests: int, in_flight: int, *, layers: int = 2) -> Row:
    """Run `requests` through a fleet of so many ranks a side, `in_flight` at a time, over all pairs of instances."""
    fleet = FleetDriver(contexts // TP, generations // TP, tp=TP, layers=layers)
    try:
        for number in range(min(requests, len(fleet.contexts) * len(fleet.generations))):
            fleet.connect(*_pair(fleet, number))
        meetings, meet_s = fleet.tally.messages["Hello"], fleet.tally.busy_s
        before = fleet.tally.total
        for first in range(0, requests, in_flight):
            for number in range(first, min(first + in_flight, requests)):
                fleet.start(*_pair(fleet, number), PROMPT_TOKENS)
            fleet.run()
            if left := fleet.settle():
                raise SystemExit(f"{left} requests of {in_flight} did not arrive")
        messages = fleet.tally.total - before
        return Row(
            context_ranks=contexts,
            generation_ranks=generations,
            requests=requests,
            in_flight=in_flight,
            pairs=meetings,
            meet_us=meet_s / max(1, meetings) * 1e6,
            messages_per_request=messages / requests,
            messages_per_leg=messages / requests / TP,
            message_us=(fleet.tally.busy_s - meet_s) / messages * 1e6,
        )
    finally:
        fleet.close()


def _pair(fleet: FleetDriver, number: int) -> tuple[int, int]:
    """Return the instances of request `number`: every pair has its turn, neighbours differ on both sides."""
    turn, context = divmod(number, len(fleet.contexts))
    return context, (context + turn) % len(fleet.generations)


def peer_bytes(layers: int, peers: int = 32) -> dict[str, Any]:
    """Return what one known peer of a model of `layers` layers costs each side, in bytes."""
    fleet = FleetDriver(1 + peers // TP, 1 + peers // TP, tp=TP, layers=layers)
    try:
        fleet.connect(0, 0)  # the first of its kind costs more, once
        gc.collect()
        tracemalloc.start()
        for number in range(1, 1 + peers // TP):
            fleet.connect(number, 0)
            fleet.connect(0, number)
        gc.collect()
        used, _ = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        met = 2 * (peers // TP) * TP * TP
        return {"layers": layers, "pairs": met, "bytes_per_pair": used / met}
    finally:
        fleet.close()


def show(console: Console, title: str, rows: list[dict[str, Any]]) -> None:
    """Print rows of one shape."""
    table = Table(title=title)
    for name in rows[0]:
        table.add_column(name, justify="right")
    for row in rows:
        table.add_row(*(f"{value:,.1f}" if isinstance(value, float) else f"{value:,}" for value in row.values()))
    console.print(table)


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--contexts", type=int, default=1000, help=f"context ranks, a multiple of {TP}")
    parser.add_argument("--generations", type=int, default=64, help=f"generation ranks, a multiple of {TP}")
    parser.add_argument("--requests", type=int, default=10_000)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    logging.disable(logging.CRITICAL)
    console, began_s = Console(width=130), time.perf_counter()
    requests = min(1000, options.requests)
    counts = [count for count in (10, 100, 1000, 10_000) if count <= options.requests]
    sizes = [size for size in (8, 80, 400, 1000) if size < options.contexts]
    stages: dict[str, Callable[[], list[Any]]] = {
        "fleet": lambda: [asdict(run_fleet(size, options.generations, requests, 100)) for size in sizes],
        "in_flight": lambda: [asdict(run_fleet(TP, TP, count, count)) for count in counts],
        "peers": lambda: [peer_bytes(layers) for layers in (2, 32, 64)],
        "whole": lambda: [asdict(run_fleet(options.contexts, options.generations, options.requests, 1000))],
    }
    result: dict[str, Any] = {"python": platform.python_version()}
    for title, measure in stages.items():
        result[title] = measure()
        show(console, title, result[title])
    console.print(f"{time.perf_counter() - began_s:.0f} s in all")
    if options.json:
        options.json.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
