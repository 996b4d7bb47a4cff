"""Small facts of a worker's process: it dies with its parent, and its log lines say who speaks."""

from __future__ import annotations

import ctypes
import logging
import os
import signal
import sys
from typing import Final

_PR_SET_PDEATHSIG: Final = 1


def die_with_parent(parent_pid: int) -> None:
    """Ask the kernel for a SIGTERM when the parent goes, so that a killed launcher leaves nobody behind (Linux).

    Exits at once where the parent is gone already: the request would come too late.
    """
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, int(signal.SIGTERM), 0, 0, 0)
    if os.getppid() != parent_pid:
        sys.exit(0)


def set_up_logging(who: str, *, verbose: bool = False) -> None:
    """Log to stderr, one line per fact, each naming its process."""
    logging.basicConfig(
        level=logging.DEBUG if verbose else logging.INFO,
        format=f"%(asctime)s {who} %(levelname)s %(message)s",
        stream=sys.stderr,
        force=True,
    )
