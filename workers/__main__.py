"""``python -m workers`` and ``unikv``: the command line, quiet also when interrupted while it is still importing."""

from __future__ import annotations

import sys
from typing import Final

_INTERRUPTED: Final = 130
"""As in `workers.cli_options.ExitCode`, which is not imported yet when it is needed."""


def main() -> int:
    """Run the command line of this process and return its exit code."""
    try:
        from workers.cli import main as run  # noqa: PLC0415 - takes a while, in which Ctrl-C may come

        return run()
    except KeyboardInterrupt:
        return _INTERRUPTED


if __name__ == "__main__":
    sys.exit(main())
