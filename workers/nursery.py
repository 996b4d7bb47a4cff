"""The parent of a pair's worker processes: it imports what they all need once, then forks them.

Importing torch takes over a second of one core; six workers on a small machine would spend most of a short run on it.
Forked processes also share those pages of memory. A worker that was not forked here (``unikv worker``) runs the same
command and differs in nothing but its start.

::

    launcher  --- stdin: the plan (one JSON line), then nothing until it closes --->  nursery  --- fork --->  workers
              <-- stdout: one JSON line per start {"worker", "pid"} and per end {"worker", "code"} ---

When stdin closes, because the launcher wants so or because it is gone, every worker gets a SIGTERM, and a SIGKILL if
it takes too long. Workers get a SIGTERM from the kernel if the nursery itself is killed.
"""

from __future__ import annotations

import gc
import json
import logging
import os
import select
import signal
import sys
import time
import traceback
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from importlib import import_module
from typing import Any, Final

STOP_S: Final = 10.0
"""How long workers may take to end after they were asked, before they are killed."""
SHARED_IMPORTS: Final = ("workers.cli", "workers.worker_main")
"""What every worker needs. Nothing in them may start a thread or open a device: that does not survive a fork."""


class NurseryDriver:
    """Forks workers, watches them and the launcher, and ends when both are done."""

    def __init__(self, stdin: int, stdout: int) -> None:
        self._stdin, self._stdout = stdin, stdout
        self._children: dict[int, int] = {}
        self._kill_at_s = 0.0

    def run(self) -> None:
        """Read the plan, start everybody, return when the last worker has ended."""
        plan = json.loads(_read_line(self._stdin))
        for module in (*SHARED_IMPORTS, *plan["imports"]):
            import_module(module)
        gc.freeze()  # what is shared stays shared: the collector would write to it
        with _wakeup_on(signal.SIGCHLD, signal.SIGTERM, signal.SIGINT) as wakeup:
            for number, worker in enumerate(plan["workers"]):
                self._start(number, worker["words"], worker["log"], others=(*wakeup, *_logs(plan)))
            for log in _logs(plan):
                os.close(log)
            while self._children:
                self._wait(wakeup[0])

    def _start(self, number: int, words: Sequence[str], log: int, *, others: Iterable[int]) -> None:
        parent = os.getpid()
        pid = os.fork()
        if pid == 0:
            _become_worker([*words, "--parent", str(parent)], log, close={self._stdin, self._stdout, *others})
        self._children[pid] = number
        self._tell(worker=number, pid=pid)

    def _wait(self, wakeup: int) -> None:
        ending = self._kill_at_s > 0.0
        wait_s = max(0.0, self._kill_at_s - time.monotonic()) if ending else None
        ready, _, _ = select.select([wakeup] if ending else [wakeup, self._stdin], [], [], wait_s)
        signals = os.read(wakeup, 64) if wakeup in ready else b""
        closed = self._stdin in ready and not os.read(self._stdin, 64)
        if closed or signal.SIGTERM in signals or signal.SIGINT in signals:
            self._kill_at_s = self._kill_at_s or time.monotonic() + STOP_S
            self._signal(signal.SIGTERM)
        elif ending and time.monotonic() >= self._kill_at_s:
            self._signal(signal.SIGKILL)
        self._reap()

    def _signal(self, number: signal.Signals) -> None:
        for pid in self._children:
            os.kill(pid, number)  # nobody else can have this pid: we have not waited for it

    def _reap(self) -> None:
        for pid in list(self._children):
            found, status = os.waitpid(pid, os.WNOHANG)
            if found:
                self._tell(worker=self._children.pop(pid), code=os.waitstatus_to_exitcode(status))

    def _tell(self, **news: int) -> None:
        with suppress(BrokenPipeError):  # the launcher is gone; stdin says so too
            os.write(self._stdout, json.dumps(news).encode() + b"\n")


def _logs(plan: Mapping[str, Any]) -> list[int]:
    return [worker["log"] for worker in plan["workers"]]


def _read_line(descriptor: int) -> bytes:
    """Read up to a newline, byte by byte no further: what follows belongs to nobody yet."""
    line = b""
    while not line.endswith(b"\n"):
        piece = os.read(descriptor, 1)
        if not piece:
            sys.exit(0)  # the launcher is gone already
        line += piece
    return line


@contextmanager
def _wakeup_on(*signals: signal.Signals) -> Iterator[tuple[int, int]]:
    """Make `signals` readable from a pipe, as bytes with their numbers; yield (read end, write end)."""
    read_end, write_end = os.pipe()
    os.set_blocking(write_end, False)
    signal.set_wakeup_fd(write_end, warn_on_full_buffer=False)
    for number in signals:
        signal.signal(number, lambda *_: None)
    yield read_end, write_end


def _become_worker(words: Sequence[str], log: int, *, close: Iterable[int]) -> None:
    """Turn the forked process into one worker, with a session and a log of its own. Never returns."""
    code = 1
    try:
        signal.set_wakeup_fd(-1)
        for number in (signal.SIGCHLD, signal.SIGTERM):
            signal.signal(number, signal.SIG_DFL)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        os.setsid()
        nothing = os.open(os.devnull, os.O_RDONLY)
        for descriptor, source in ((0, nothing), (1, log), (2, log)):
            os.dup2(source, descriptor)
        for descriptor in {nothing, *close} - {0, 1, 2}:
            os.close(descriptor)
        code = import_module("workers.cli").main(words)
    except SystemExit as error:
        code = error.code if isinstance(error.code, int) else 1
    except BaseException:
        traceback.print_exc()
    finally:
        # Not sys.exit: the frames and exit handlers above us are the nursery's.
        logging.shutdown()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


if __name__ == "__main__":
    NurseryDriver(sys.stdin.fileno(), sys.stdout.fileno()).run()
