"""The worker processes of one pair: started, watched, ended. Nothing of them outlives the fleet."""

from __future__ import annotations

import logging
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from transfer.hello import Side
from workers.config import PairConfig
from workers.topology import positions

_log = logging.getLogger(__name__)

STOP_S: Final = 10.0
"""How long workers may take to end after they were asked, before they are killed."""
_TAIL_LINES: Final = 12


@dataclass(slots=True)
class WorkerProcess:
    """One rank's process."""

    side: Side
    rank: int
    process: subprocess.Popen[bytes]
    log: Path

    @property
    def name(self) -> str:
        """What people call it."""
        return f"{self.side} rank {self.rank}"

    def tail(self) -> str:
        """Return the last lines it logged."""
        lines = self.log.read_text(errors="replace").splitlines()
        return "\n".join(lines[-_TAIL_LINES:])


@dataclass(frozen=True, slots=True, kw_only=True)
class Death:
    """A worker that ended although nobody asked it to."""

    side: Side
    rank: int
    reason: str
    tail: str


@dataclass(slots=True)
class Fleet:
    """All workers of both sides. A context manager: leaving it ends every process it started."""

    workers: list[WorkerProcess] = field(default_factory=list)
    _stack: ExitStack = field(default_factory=ExitStack)
    _deaths: dict[str, Death] = field(default_factory=dict)

    def start(self, pair: PairConfig, rendezvous_url: str, pair_arguments: Sequence[str], log_dir: Path | None) -> None:
        """Start every rank of both sides.

        Args:
            pair: the resolved pair.
            rendezvous_url: where they meet.
            pair_arguments: how a worker's command line names the same pair (source, ``--case``, ``--set``).
            log_dir: where their logs go; None for a temporary directory that ends with the fleet.
        """
        directory = log_dir or Path(self._stack.enter_context(tempfile.TemporaryDirectory(prefix="unikv-")))
        directory.mkdir(parents=True, exist_ok=True)
        for side in (Side.CONTEXT, Side.GENERATION):
            for position in positions(pair.side(side)):
                self._start_one(side, position.rank, rendezvous_url, pair_arguments, directory)

    def deaths(self) -> tuple[Death, ...]:
        """Return the workers that died so far, first death first."""
        for worker in self.workers:
            code = worker.process.poll()
            if code is not None and worker.name not in self._deaths:
                reason = f"signal {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
                self._deaths[worker.name] = Death(side=worker.side, rank=worker.rank, reason=reason, tail=worker.tail())
        return tuple(self._deaths.values())

    def stop(self) -> None:
        """Ask everybody to end, wait, kill whoever does not. Idempotent."""
        for worker in self.workers:
            if worker.process.poll() is None:
                worker.process.terminate()
        deadline_s = time.monotonic() + STOP_S
        for worker in self.workers:
            try:
                worker.process.wait(max(0.0, deadline_s - time.monotonic()))
            except subprocess.TimeoutExpired:
                _log.warning("%s does not end; killing it", worker.name)
                worker.process.kill()
                worker.process.wait()
        self._stack.close()

    def __enter__(self) -> Fleet:
        return self

    def __exit__(self, *_exc: object) -> None:
        self.stop()

    def _start_one(
        self, side: Side, rank: int, rendezvous_url: str, pair_arguments: Sequence[str], directory: Path
    ) -> None:
        log = directory / f"{side}-{rank}.log"
        command = [
            sys.executable, "-m", "workers", "worker", *pair_arguments,
            "--side", side, "--rank", str(rank), "--rendezvous", rendezvous_url,
            "--parent", str(os.getpid()),
        ]  # fmt: skip
        with log.open("wb") as output:
            # A session of its own: Ctrl-C reaches the launcher alone, which then ends the workers in order.
            process = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT, start_new_session=True
            )
        self.workers.append(WorkerProcess(side, rank, process, log))
