"""`unikv launch`: all workers of a pair, watched until somebody ends them or one dies."""

from __future__ import annotations

import signal
from collections.abc import Sequence
from pathlib import Path
from types import FrameType

from rich.console import Console
from rich.table import Table

from workers.config import PairConfig
from workers.pair_run import RunningPair


def launch_and_watch(pair: PairConfig, arguments: Sequence[str], console: Console, log_dir: Path | None) -> int:
    """Start a pair and wait for Ctrl-C (exit code 0) or the first death (1). Leaves no process behind.

    Raises:
        IncompatiblePeerError: the gate refuses the pair.
        LinkBrokenError: a worker did not come up.
    """
    previous = signal.signal(signal.SIGTERM, _interrupt)
    try:
        with console.status("starting workers"):
            running = RunningPair(pair, arguments, log_dir=log_dir)
        with running:
            console.print(_table(running))
            console.print("serving; Ctrl-C ends it")
            return _watch(running, console)
    except KeyboardInterrupt:
        console.print("ended")
        return 0
    finally:
        signal.signal(signal.SIGTERM, previous)


def _watch(running: RunningPair, console: Console) -> int:
    while True:
        running.client.poll(0.2)
        deaths = running.fleet.deaths()
        if deaths:
            for death in deaths:
                console.print(f"[red]{death.side} rank {death.rank} died: {death.reason}[/red]\n{death.tail}")
            return 1


def _table(running: RunningPair) -> Table:
    table = Table(title=f"{running.pair.name}: draft KV {running.draft_kv or 'off'}", title_justify="left")
    for name in ("context rank", "generation rank", "path", "reason"):
        table.add_column(name)
    for path in running.paths:
        table.add_row(str(path.context_rank), str(path.generation_rank), path.path, path.reason)
    return table


def _interrupt(_number: int, _frame: FrameType | None) -> None:
    raise KeyboardInterrupt
