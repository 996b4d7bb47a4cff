"""What the memory of this machine can do, measured in the run that compares itself with it."""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Final

import numpy as np

FLOOR_BYTES: Final = 256 * 1024**2
"""Size of one measured copy: well past every cache."""
_ROUNDS: Final = 5
_IDLE_LOOKS: Final = 3
_LOOK_S: Final = 0.005
_IDLE_S: Final = 5.0


class FloorSession:
    """Two buffers that one thread copies between, to time it now and again (GB = 10^9).

    The memory is the process's own and, where the system has huge pages, in such: the fastest copy there is.
    """

    def __init__(self, size_bytes: int = FLOOR_BYTES) -> None:
        self._source = np.ones(size_bytes, dtype=np.uint8)
        self._target = np.zeros(size_bytes, dtype=np.uint8)
        np.copyto(self._target, self._source)

    def sample(self) -> float:
        """Return the rate of one copy."""
        started_s = time.perf_counter()
        np.copyto(self._target, self._source)
        return self._source.size / (time.perf_counter() - started_s) / 1e9


def memcpy_gb_per_s() -> float:
    """Return the rate of one thread copying `FLOOR_BYTES`, the median of some rounds after a warm-up (GB = 10^9)."""
    floor = FloorSession()
    return statistics.median(floor.sample() for _ in range(_ROUNDS))


def wait_until_idle(pids: Iterable[int]) -> None:
    """Return once no thread of these processes wants a core, or after some seconds.

    What is timed must not share the memory with what clears up behind the request before it.
    """
    processes, looks, deadline_s = tuple(pids), 0, time.monotonic() + _IDLE_S
    while looks < _IDLE_LOOKS and time.monotonic() < deadline_s:
        looks = 0 if any(_is_running(pid) for pid in processes) else looks + 1
        time.sleep(_LOOK_S)


def _is_running(pid: int) -> bool:
    """Return whether a thread of the process runs or waits for a core; False for one that is gone."""
    try:
        stats = [path.read_text() for path in Path(f"/proc/{pid}/task").glob("*/stat")]
    except (FileNotFoundError, ProcessLookupError):
        return False
    return any(stat.rpartition(")")[2].split()[0] == "R" for stat in stats)
