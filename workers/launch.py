"""`unikv launch`: all workers of a pair, watched until somebody ends them or one dies."""

from __future__ import annotations

import signal
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Final

from rich.console import Console
from rich.table import Table
from rich.text import Text

from workers.config import PairConfig
from workers.fleet import Death
from workers.pair_run import RunningPair

_WATCH_S: Final = 0.2


def launch_and_watch(pair: PairConfig, arguments: Sequence[str], console: Console, log_dir: Path | None) -> int:
    """Start a pair and wait for its end; return the exit code. Leaves no process behind.

    The code is 0 after Ctrl-C or SIGTERM, and where a worker was ended by a signal it could handle; 1 where one died.

    Raises:
        IncompatiblePeerError: the gate refuses the pair.
        LinkBrokenError: a worker did not come up.
    """
    with _interruptible():
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


def _watch(running: RunningPair, console: Console) -> int:
    while not (deaths := running.fleet.deaths()):
        running.client.poll(_WATCH_S)
    for death in deaths:
        console.print(_obituary(death), markup=False)
    return 0 if all(death.orderly for death in deaths) else 1


def _obituary(death: Death) -> str:
    name = f"{death.side} rank {death.rank}"
    return f"{name} was ended" if death.orderly else f"{name} died: {death.reason}\n{death.tail}"


def _table(running: RunningPair) -> Table:
    table = Table(title=Text(f"{running.pair.name}: draft KV {running.draft_kv or 'off'}"), title_justify="left")
    for name in ("context rank", "generation rank", "path", "reason"):
        table.add_column(name)
    for path in running.paths:
        table.add_row(str(path.context_rank), str(path.generation_rank), path.path, Text(path.reason))
    return table


@contextmanager
def _interruptible() -> Iterator[None]:
    """Let SIGTERM do what Ctrl-C does."""
    previous = signal.signal(signal.SIGTERM, _interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, previous)


def _interrupt(_number: int, _frame: FrameType | None) -> None:
    raise KeyboardInterrupt
