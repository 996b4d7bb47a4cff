"""The command that makes keys for links: keygen."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from workers.cli_options import JsonOption
from workers.json_output import check_target, write_json


def register(app: typer.Typer) -> None:
    """Add the command to `app`."""
    app.command("keygen")(keygen)


def keygen(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="Where to write the two files; made if missing.")],
    name: Annotated[str, typer.Option(help="Name of the pair: NAME.key and NAME.key_secret.")] = "unikv",
    json: JsonOption = None,
) -> None:
    """Make a pair of CURVE keys for the links of a worker or a fleet. Never overwrites one.

    Example: unikv keygen keys/context --name context
    """
    from transfer.link_curve import make_keys  # noqa: PLC0415 - most commands need no sockets

    if json is not None:
        check_target(json)
    public, secret = make_keys(folder, name)
    if json is not None:
        write_json({"public": str(public), "secret": str(secret)}, json)
    if json != "-":
        console = Console()
        console.print(f"public  {public}", markup=False, soft_wrap=True)
        console.print(f"secret  {secret}  (keep it on this host)", markup=False, soft_wrap=True)
        hint = f"Copy {public.name} into the authorized directory of every peer; name the files under transfer.curve."
        console.print(hint, markup=False, soft_wrap=True)
