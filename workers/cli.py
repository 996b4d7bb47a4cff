"""The command line ``unikv``: which commands there are, and how each way to fail leaves the process.

======  ===========================================================
code    meaning
======  ===========================================================
0       fine
1       the work failed
2       the gate refused the two sides
64      the command line, a pair file or the environment is wrong
130     interrupted
======  ===========================================================
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib import metadata
from typing import Annotated, Final, cast

import typer

from unikv.errors import ConfigError, IncompatiblePeerError, SpecError, UnikvError
from workers import cli_dry, cli_keys, cli_run
from workers.cli_options import ExitCode
from workers.config_load import preset_names
from workers.json_output import spell_out_json

# Some versions of typer bring their own click under a private name; its errors have this ancestor in all of them.
_ClickError: Final = cast(type[Exception], typer.BadParameter.__mro__[2])

app: Final = typer.Typer(
    name="unikv",
    help="Move the KV cache of prompts, target and drafter together, from context workers to generation workers.",
    epilog="Example: unikv check pattern-small",
    add_completion=False,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code; bad input ends in a message on stderr, never in a traceback.

    Args:
        arguments: command line without the program's name; None for the process's own.
    """
    words = spell_out_json(sys.argv[1:] if arguments is None else arguments, preset_names())
    try:
        code = app(words, prog_name="unikv", standalone_mode=False)
    except _ClickError as error:
        error.show()  # type: ignore[attr-defined]
        return ExitCode.USAGE
    except IncompatiblePeerError as error:
        return _say(error, ExitCode.REFUSED)
    except (ConfigError, SpecError) as error:
        return _say(error, ExitCode.USAGE)
    except (UnikvError, OSError) as error:
        return _say(error, ExitCode.FAILED)
    except (KeyboardInterrupt, typer.Abort):
        return ExitCode.INTERRUPTED
    return code if isinstance(code, int) else ExitCode.FINE


def _say(error: Exception, code: ExitCode) -> ExitCode:
    if sys.stderr is not None:  # closed by whoever started us
        sys.stderr.write(f"unikv: {error}\n")
    return code


def _show_version(wanted: bool) -> None:
    if wanted:
        try:
            version = metadata.version("unikv")
        except metadata.PackageNotFoundError:
            version = "(not installed)"
        typer.echo(f"unikv {version}")
        raise typer.Exit


@app.callback()
def _unikv(
    version: Annotated[
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Show the version and exit.")
    ] = False,
) -> None:
    pass


cli_dry.register(app)
cli_keys.register(app)
cli_run.register(app)
