"""The worker processes of one pair: started, watched, ended. Nothing of them outlives the fleet."""

from __future__ import annotations

import json
import logging
import os
import select
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, Final, Self

from transfer.hello import Side
from workers.config import PairConfig
from workers.nursery import STOP_S
from workers.routing import num_workers

_log = logging.getLogger(__name__)

NURSERY: Final = "workers.nursery"
_TAIL_LINES: Final = 12
_TAIL_BYTES: Final = 16 * 1024


@dataclass(slots=True)
class WorkerProcess:
    """One rank's process.

    Attributes:
        rank: its number on its side, counted through all instances.
        pid: its process id; 0 until it was started.
        code: its exit code once it has ended, negative for a signal.
    """

    side: Side
    rank: int
    log: IO[bytes]
    pid: int = 0
    code: int | None = None

    @property
    def name(self) -> str:
        """What people call it."""
        return f"{self.side} rank {self.rank}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Death:
    """A worker that ended although nobody asked it to.

    Attributes:
        orderly: it ended with exit code 0, because somebody else asked it to.
        tail: the last lines it logged.
    """

    side: Side
    rank: int
    reason: str
    orderly: bool
    tail: str


class FleetManager:
    """All workers of both sides. A context manager: leaving it ends every process it started."""

    def __init__(self) -> None:
        self.workers: list[WorkerProcess] = []
        self._nursery: subprocess.Popen[bytes] | None = None
        self._nursery_log: IO[bytes] | None = None
        self._stack = ExitStack()
        self._deaths: list[Death] = []
        self._unclean: list[Death] = []
        self._unread = b""

    def start(self, pair: PairConfig, rendezvous_url: str, pair_arguments: Sequence[str], log_dir: Path | None) -> None:
        """Start every rank of both sides; returns before they are up.

        Args:
            pair: the resolved pair.
            rendezvous_url: where they meet.
            pair_arguments: how a worker's command line names the same pair (source, ``--case``, ``--set``).
            log_dir: where their logs go, one file each; None for files that end with the fleet.
        """
        plan: dict[str, Any] = {"imports": [], "workers": []}
        for side in (Side.CONTEXT, Side.GENERATION):
            for rank in range(num_workers(pair.side(side))):
                worker = WorkerProcess(side, rank, self._open_log(f"{side}-{rank}", log_dir))
                self.workers.append(worker)
                words = ["worker", *pair_arguments, "--side", side, "--rank", str(rank)]
                words += ["--rendezvous", rendezvous_url]
                plan["workers"].append({"words": words, "log": worker.log.fileno()})
        self._nursery_log = self._open_log("start", log_dir)
        self._nursery = subprocess.Popen(
            [sys.executable, "-m", NURSERY],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._nursery_log,
            pass_fds=[worker.log.fileno() for worker in self.workers],
            # A session of its own: Ctrl-C reaches the launcher alone, which then ends the workers in order.
            start_new_session=True,
        )
        stdin, stdout = self._pipes()
        os.set_blocking(stdout.fileno(), False)
        with suppress(BrokenPipeError):  # `deaths` tells what became of it
            stdin.write(json.dumps(plan).encode() + b"\n")
            stdin.flush()

    def deaths(self) -> tuple[Death, ...]:
        """Return the workers that ended so far without being asked to by `stop`, first death first."""
        nursery_code = None if self._nursery is None else self._nursery.poll()
        for worker in self._news():
            self._deaths.append(_death(worker, _manner(worker.code), _tail(worker.log)))
        if nursery_code is not None and self._nursery_log is not None:
            # It ends after its last worker; before that it takes all workers with it.
            known = {(death.side, death.rank) for death in self._deaths}
            for worker in self.workers:
                if (worker.side, worker.rank) not in known:
                    tail = _tail(worker.log if worker.pid else self._nursery_log)
                    self._deaths.append(_death(worker, f"its parent ended with {_manner(nursery_code)}", tail))
        return tuple(self._deaths)

    def deaths_of(self, suspects: Iterable[tuple[Side, int]], *, timeout_s: float) -> tuple[Death, ...]:
        """Return what `deaths` does, but first wait for the `suspects`, those whose link broke, up to `timeout_s`.

        A link breaks before its process can be waited for. A suspect that lives on is no death.
        """
        missing, deadline_s = set(suspects), time.monotonic() + timeout_s
        while missing := missing - {(death.side, death.rank) for death in self.deaths()}:
            left_s = deadline_s - time.monotonic()
            if self._nursery is None or left_s <= 0:
                break
            select.select([self._pipes()[1]], [], [], left_s)
        return tuple(self._deaths)

    def unclean(self) -> tuple[Death, ...]:
        """Return the workers that `stop` asked to end and that did not end well, such as with pages still in use."""
        return tuple(self._unclean)

    def stop(self) -> None:
        """Ask everybody to end, wait, kill whoever does not. Idempotent."""
        if self._nursery is not None:
            self.deaths()
            nursery, (stdin, stdout) = self._nursery, self._pipes()
            with suppress(BrokenPipeError):
                stdin.close()  # the nursery does the rest, whatever becomes of us
            try:
                nursery.wait(STOP_S + 5.0)
            except subprocess.TimeoutExpired:
                _log.error("the workers' parent does not end; killing it")
                nursery.kill()
                nursery.wait()
            for worker in self._news():
                if worker.code:
                    self._unclean.append(_death(worker, _manner(worker.code), _tail(worker.log)))
                    _log.warning("%s ended with %s", worker.name, _manner(worker.code))
            stdout.close()
            self._nursery = None
        self._stack.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_exc: object) -> None:
        self.stop()

    def _open_log(self, name: str, log_dir: Path | None) -> IO[bytes]:
        if log_dir is None:
            return self._stack.enter_context(tempfile.TemporaryFile(prefix="unikv-"))
        log_dir.mkdir(parents=True, exist_ok=True)
        return self._stack.enter_context((log_dir / f"{name}.log").open("w+b"))

    def _pipes(self) -> tuple[IO[bytes], IO[bytes]]:
        assert self._nursery is not None and self._nursery.stdin is not None and self._nursery.stdout is not None
        return self._nursery.stdin, self._nursery.stdout

    def _news(self) -> Iterator[WorkerProcess]:
        """Read what the nursery wrote; yield the workers that have ended since."""
        if self._nursery is None:
            return
        _, stdout = self._pipes()
        self._unread += stdout.read() or b""
        *lines, self._unread = self._unread.split(b"\n")
        for line in lines:
            news = json.loads(line)
            worker = self.workers[news["worker"]]
            if "pid" in news:
                worker.pid = news["pid"]
            else:
                worker.code = news["code"]
                yield worker


def _death(worker: WorkerProcess, reason: str, tail: str) -> Death:
    return Death(side=worker.side, rank=worker.rank, reason=reason, orderly=worker.code == 0, tail=tail)


def _manner(code: int | None) -> str:
    """Return how a process ended, in words."""
    return f"signal {signal.Signals(-code).name}" if code is not None and code < 0 else f"exit code {code}"


def _tail(log: IO[bytes]) -> str:
    """Return the last lines of a log that other processes write."""
    size = os.fstat(log.fileno()).st_size
    text = os.pread(log.fileno(), _TAIL_BYTES, max(0, size - _TAIL_BYTES)).decode(errors="replace")
    return "\n".join(text.splitlines()[-_TAIL_LINES:])
