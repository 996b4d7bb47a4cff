"""Feeds decoders and engines whatever a coverage-guided fuzzer can think of (atheris).

    python scripts/fuzz.py wire [--runs N] [--seconds N] [--seed S]       any bytes, as frames of a message
    python scripts/fuzz.py engines [--runs N] [--seconds N] [--seed S]    peers that forge messages, at any moment

`wire`: bytes give a message, which survives a round trip, or a RemoteProtocolError. `engines`: no message and no order
of events makes an engine raise or a handler fail, and no page of anybody else changes. Prints the number of executions;
the first input that breaks a rule ends the run with exit code 1 and is kept in a file. Needs ``pip install atheris``.
"""

from __future__ import annotations

import argparse
import logging
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import atheris

with atheris.instrument_imports(include=["transfer"]):
    from transfer.testing.fuzz import ForgeryDriver, check_frames, seed_messages

FRAME_MARK: Final = b"\xff\xfe\xff"
"""Splits one input into frames."""


def fuzz_wire(data: bytes) -> None:
    """Read one input as the frames of a message."""
    check_frames(data.split(FRAME_MARK))


def fuzz_engines(data: bytes) -> None:
    """Read one input as a script of events."""
    provider = atheris.FuzzedDataProvider(data)
    driver = ForgeryDriver(provider.ConsumeIntInRange, provider.ConsumeBytes)
    try:
        for _ in range(provider.ConsumeIntInRange(1, 60)):
            driver.step()
        driver.check()
    finally:
        driver.close()


TARGETS: Final[dict[str, Callable[[bytes], None]]] = {"wire": fuzz_wire, "engines": fuzz_engines}


def main() -> None:
    """Run one target until its runs or its seconds are over."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("target", choices=TARGETS)
    parser.add_argument("--runs", type=int, default=100_000)
    parser.add_argument("--seconds", type=int, default=0, help="0: as long as it takes")
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    logging.disable(logging.CRITICAL)
    with tempfile.TemporaryDirectory(prefix="unikv-fuzz-") as corpus:
        for number, frames in enumerate(seed_messages()):
            (Path(corpus) / str(number)).write_bytes(FRAME_MARK.join(frames))
        flags: list[Any] = [sys.argv[0], corpus, f"-atheris_runs={options.runs}", f"-seed={options.seed}"]
        flags += [f"-max_total_time={options.seconds}", "-max_len=4096", "-timeout=30", "-print_final_stats=1"]
        atheris.Setup(flags, TARGETS[options.target])
        atheris.Fuzz()


if __name__ == "__main__":
    main()
