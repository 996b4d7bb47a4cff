"""Print the table of a GPU benchmark's JSON result, for a terminal or (``--page``) as a page under docs/benchmarks.

python scripts/gpu_table.py results.json [--page]
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

from workers.render_gpu import gpu_markdown, gpu_page


def main() -> int:
    """Print the table; 1 where there is no result."""
    parser = argparse.ArgumentParser(description="table of a GPU benchmark")
    parser.add_argument("results", nargs="+", type=Path)
    parser.add_argument("--page", action="store_true", help="with versions, commit and command")
    args = parser.parse_args()
    for path in args.results:
        if not path.is_file():
            sys.stderr.write(f"{path}: no such result\n")
            return 1
        result = json.loads(path.read_text())
        sys.stdout.write(gpu_page(result) if args.page else gpu_markdown(result))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
