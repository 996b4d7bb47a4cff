#!/usr/bin/env python3
"""The scripted disaggregation benchmark: `unikv bench` with everything on the command line passed through.

python scripts/bench_disagg.py pattern-small --json results.json
"""

import sys

from workers.cli import main

if __name__ == "__main__":
    raise SystemExit(main(["bench", *sys.argv[1:]]))
