"""The command line: ``unikv``. Its exit codes are 0 fine, 1 the work failed, 2 the gate refused, 64 bad usage."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from importlib import metadata
from typing import Annotated, Any, Final, cast

import typer
from rich.console import Console, RenderableType

from transfer.hello import Side
from unikv.errors import ConfigError, IncompatiblePeerError, SpecError, UnikvError, explain
from workers import cli_run, dry_run, render
from workers.config_load import load_pair, preset_names
from workers.config_values import parse_size_bytes
from workers.json_output import STDOUT, check_target, spell_out_json, write_json

FINE: Final = 0
FAILED: Final = 1
REFUSED: Final = 2
BAD_USAGE: Final = 64

MAX_TOKENS: Final = 1 << 40
MAX_REQUESTS: Final = 1 << 24
"""Bounds that only keep mistyped numbers out; no machine gets near them."""

# typer's own copy of click or the real one: whichever its errors descend from.
_UsageError: Final = cast(type[typer.BadParameter], typer.BadParameter.__mro__[2])

app: Final = typer.Typer(
    name="unikv",
    help="Move the KV cache of prompts, target and drafter together, between context and generation workers.",
    add_completion=False,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)

# The pair file may be missing for the parser: what follows --json may have been it (see _untangle).
PairArgument = Annotated[str | None, typer.Argument(metavar="PAIR", help="Pair file, or the name of a preset.")]
SideOption = Annotated[Side, typer.Option(help="Which side.")]
RankOption = Annotated[int, typer.Option(min=0, help="Flat rank inside the side.")]
CaseOption = Annotated[str | None, typer.Option("--case", metavar="NAME", help="A case of the file's matrix.")]
SetOption = Annotated[
    list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="Override a key; may be repeated.")
]
JsonOption = Annotated[
    str | None, typer.Option("--json", metavar="[FILE]", help="One JSON object, to stdout or to FILE.")
]


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code; bad input ends in a message on stderr, never in a traceback.

    Args:
        arguments: command line without the program's name; None for the process's own.
    """
    words = spell_out_json(sys.argv[1:] if arguments is None else arguments)
    try:
        code = app(words, prog_name="unikv", standalone_mode=False)
    except _UsageError as error:
        error.show()
        return BAD_USAGE
    except IncompatiblePeerError as error:
        return _report(error, REFUSED)
    except (ConfigError, SpecError) as error:
        return _report(error, BAD_USAGE)
    except (UnikvError, OSError) as error:
        return _report(error, FAILED)
    except (typer.Abort, KeyboardInterrupt):
        return FAILED
    return code if isinstance(code, int) else FINE


def _report(error: Exception, code: int) -> int:
    sys.stderr.write(f"unikv: {error}\n")
    return code


def _show_version(wanted: bool) -> None:
    if wanted:
        try:
            version = metadata.version("unikv")
        except metadata.PackageNotFoundError:
            version = "not installed"
        typer.echo(f"unikv {version}")
        raise typer.Exit


@app.callback()
def _unikv(
    version: Annotated[
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Show the version and exit.")
    ] = False,
) -> None:
    pass


@app.command()
def layout(
    pair: PairArgument = None,
    side: SideOption = Side.CONTEXT,
    rank: RankOption = 0,
    case: CaseOption = None,
    overrides: SetOption = None,
    json: JsonOption = None,
) -> None:
    """Show layer groups, pools and buffers of one rank.

    Example: unikv layout pair.yaml --side context --rank 0
    """
    source, target = _untangle(pair, json)
    config = load_pair(source, overrides=overrides or (), case=case)
    _emit(dry_run.layout_result(config, side, rank), target, render.layout)


@app.command()
def size(  # noqa: PLR0913 - options of a command line
    pair: PairArgument = None,
    *,
    side: SideOption = Side.GENERATION,
    rank: RankOption = 0,
    tokens: Annotated[int, typer.Option(min=0, max=MAX_TOKENS, help="Tokens of all requests together.")] = 0,
    requests: Annotated[int, typer.Option(min=1, max=MAX_REQUESTS, help="Requests resident at once.")] = 1,
    quota: Annotated[str | None, typer.Option(metavar="SIZE", help="Bytes to fill instead, e.g. 8GiB.")] = None,
    case: CaseOption = None,
    overrides: SetOption = None,
    json: JsonOption = None,
) -> None:
    """Show what tokens cost on one rank, and how many fit.

    Example: unikv size pair.yaml --side generation --tokens 8192 --requests 8
    """
    source, target = _untangle(pair, json)
    config = load_pair(source, overrides=overrides or (), case=case)
    quota_bytes = None if quota is None else _quota_bytes(quota)
    result = dry_run.size_result(config, side, rank, tokens=tokens, requests=requests, quota_bytes=quota_bytes)
    _emit(result, target, render.size)


@app.command()
def check(
    pair: PairArgument = None,
    case: CaseOption = None,
    overrides: SetOption = None,
    json: JsonOption = None,
) -> None:
    """Say whether the two sides may talk and whether draft KV travels; exit code 2 where they may not.

    Example: unikv check pair.yaml
    """
    source, target = _untangle(pair, json)
    report = dry_run.judge_pair(load_pair(source, overrides=overrides or (), case=case))
    _emit(dry_run.check_result(report), target, render.check)
    raise typer.Exit(FINE if report.compatible else REFUSED)


@app.command()
def plan(
    pair: PairArgument = None,
    context_dp: Annotated[int | None, typer.Option(min=0, help="Attention DP: rank that holds the request.")] = None,
    generation_dp: Annotated[int | None, typer.Option(min=0, help="Attention DP: rank that wants it.")] = None,
    case: CaseOption = None,
    overrides: SetOption = None,
    json: JsonOption = None,
) -> None:
    """Show which rank sends which heads of which layers to whom.

    Example: unikv plan pair.yaml --json plan.json
    """
    source, target = _untangle(pair, json)
    config = load_pair(source, overrides=overrides or (), case=case)
    _emit(dry_run.plan_result(config, context_dp=context_dp, generation_dp=generation_dp), target, render.plan)


@app.command()
def pages(
    prompt_tokens: Annotated[int, typer.Option(min=0, max=MAX_TOKENS, help="Tokens of the prompt.")],
    pair: PairArgument = None,
    cached_tokens: Annotated[int, typer.Option(min=0, max=MAX_TOKENS, help="Of them already there.")] = 0,
    case: CaseOption = None,
    overrides: SetOption = None,
    json: JsonOption = None,
) -> None:
    """Show which pages of a prompt travel, per layer group of the generation side.

    Example: unikv pages pair.yaml --prompt-tokens 2080 --cached-tokens 64
    """
    source, target = _untangle(pair, json)
    config = load_pair(source, overrides=overrides or (), case=case)
    result = dry_run.pages_result(config, prompt_tokens=prompt_tokens, cached_tokens=cached_tokens)
    _emit(result, target, render.pages)


@app.command()
def presets(json: JsonOption = None) -> None:
    """List the shipped pair files.

    Example: unikv presets
    """
    loaded = [load_pair(name, environ={}) for name in preset_names()]
    _emit(dry_run.presets_result(loaded), json, render.presets)


cli_run.register(app)


def _untangle(pair: str | None, json: str | None) -> tuple[str, str | None]:
    """Return pair file and JSON target: in ``check --json pair.yaml`` the parser takes one for the other."""
    if pair is None and json is not None and json != STDOUT:
        pair, json = json, STDOUT
    if pair is None:
        want = "a pair file or the name of a preset"
        raise ConfigError(explain("command line", "PAIR", "missing", want, "see `unikv presets` for names"))
    if json is not None:
        check_target(json)
    return pair, json


def _quota_bytes(text: str) -> int:
    try:
        return parse_size_bytes(text)
    except ValueError:
        want = "a size in B, KiB, MiB, GiB"
        raise ConfigError(explain("command line", "--quota", text, want, "write for example 8GiB")) from None


def _emit(result: dict[str, Any], target: str | None, show: Callable[[dict[str, Any]], RenderableType]) -> None:
    """Print the table, or write the JSON object and nothing else."""
    if target is None:
        Console().print(show(result))
    else:
        write_json(result, target)
