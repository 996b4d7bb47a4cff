"""What the memory of this machine can do, measured in the run that compares itself with it."""

from __future__ import annotations

import statistics
import time
from typing import Final

import numpy as np

FLOOR_BYTES: Final = 256 * 1024**2
"""Size of one measured copy: well past every cache."""
_ROUNDS: Final = 5


def memcpy_gb_per_s() -> float:
    """Return the rate of one thread copying `FLOOR_BYTES`, the median of some rounds after a warm-up (GB = 10^9)."""
    source, target = np.ones(FLOOR_BYTES, dtype=np.uint8), np.zeros(FLOOR_BYTES, dtype=np.uint8)
    np.copyto(target, source)
    rates = []
    for _ in range(_ROUNDS):
        started_s = time.perf_counter()
        np.copyto(target, source)
        rates.append(FLOOR_BYTES / (time.perf_counter() - started_s) / 1e9)
    return statistics.median(rates)
