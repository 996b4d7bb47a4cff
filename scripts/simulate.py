"""Runs random pairs of instances in one thread against a byte-level oracle.

    python scripts/simulate.py [--first SEED] [--pairs N]

Prints how many pairs were accepted and refused and what was in them. A pair that fails is reported with the smallest
pair that fails alike, and the exit code is 1; its seed repeats it.
"""

from __future__ import annotations

import argparse
import logging
import sys
import time
from collections import Counter

from transfer.testing.random_pairs import features, random_case
from transfer.testing.shrink import report
from transfer.testing.simulator import simulate


def main() -> int:
    """Run pairs from the first seed on; return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--first", type=int, default=0, help="first seed")
    parser.add_argument("--pairs", type=int, default=1000)
    options = parser.parse_args()
    logging.disable(logging.CRITICAL)
    counts: Counter[str] = Counter()
    reasons: Counter[str] = Counter()
    failed, began_s = 0, time.perf_counter()
    for seed in range(options.first, options.first + options.pairs):
        case = random_case(seed)
        try:
            refused = simulate(case)
        except Exception:
            failed += 1
            print(report(case), flush=True)
            continue
        reasons.update(refused)
        counts.update(features(case) if not refused else ["refused"])
    print(f"{options.pairs} pairs in {time.perf_counter() - began_s:.0f} s, {failed} failed")
    for name, count in [*counts.most_common(), *((f"refused for {name}", count) for name, count in reasons.items())]:
        print(f"{count:7}  {name}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
