"""The receiving process of a comparison with NIXL: memory that another process writes into, told by lines of JSON."""

from __future__ import annotations

import json
import select
import sys
from hashlib import blake2b
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from transfer.nixl_agent import NixlSession, address_of

POISON: Final = 0xEE
"""Byte the memory is filled with before every write."""


def digest(memory: NDArray[np.uint8]) -> str:
    """Return what two equal memories have in common."""
    return blake2b(memory.data, digest_size=16).hexdigest()


def serve(session: NixlSession, memory: NDArray[np.uint8], *, helps: bool) -> None:
    """Answer ``poison`` and ``digest`` until the input ends; between them do what NIXL wants, if it has no thread."""
    _say({"agent": session.describe(memory).hex(), "address": address_of(memory)})
    while True:
        readable, _, _ = select.select([sys.stdin], [], [], 0.0 if helps else None)
        if not readable:
            session.progress()
            continue
        word = sys.stdin.readline().strip()
        if not word:
            return
        if word == "poison":
            memory[:] = POISON
        _say({"digest": digest(memory) if word == "digest" else ""})


def _say(answer: dict[str, Any]) -> None:
    sys.stdout.write(json.dumps(answer) + "\n")
    sys.stdout.flush()


def main() -> None:
    """Serve memory of the size in the first argument; the second says whether NIXL has a thread."""
    size_bytes, threaded = int(sys.argv[1]), sys.argv[2] == "1"
    session = NixlSession("rival-target", progress_thread=threaded)
    memory = session.memory(size_bytes)
    memory[:] = POISON
    serve(session, memory, helps=not threaded)
    session.close()


if __name__ == "__main__":
    main()
