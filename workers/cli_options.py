"""What all commands share: the pair argument, common options and exit codes."""

from __future__ import annotations

from enum import IntEnum
from typing import Annotated

import typer

PairArgument = Annotated[str, typer.Argument(metavar="PAIR", help="Pair file, or the name of a shipped preset.")]
CaseOption = Annotated[
    str | None, typer.Option("--case", metavar="NAME", help="Use one named variation of the file's matrix.")
]
SetOption = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="KEY=VALUE", help="Override one dotted key, e.g. transfer.path=zmq; repeatable."),
]
JsonOption = Annotated[
    str | None,
    typer.Option(
        "--json",
        metavar="[FILE]",
        help="Machine form: one JSON object in FILE, or on stdout where FILE is left out. "
        "The next word is FILE unless it is an option or the pair (ends in .yaml, or is a preset's name).",
    ),
]


class ExitCode(IntEnum):
    """What the process tells its caller."""

    FINE = 0
    FAILED = 1
    REFUSED = 2
    USAGE = 64
    INTERRUPTED = 130
