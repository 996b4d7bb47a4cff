"""The commands that run nothing: layout, size, check, plan, pages, presets. They need no GPU, no peer and no torch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated

import typer
from rich.console import Console, RenderableType

from transfer.gate import require_compatible
from transfer.hello import Side
from unikv.errors import ConfigError, explain
from workers import dry, dry_pair, render
from workers.cli_options import CaseOption, ExitCode, JsonOption, PairArgument, SetOption
from workers.config import PairConfig
from workers.config_load import load_pair
from workers.config_values import parse_size_bytes
from workers.json_output import check_target, write_json
from workers.preset_list import presets_report

SideOption = Annotated[Side, typer.Option(help="Which side.")]
RankOption = Annotated[int, typer.Option(help="Flat rank inside the side.")]


def register(app: typer.Typer) -> None:
    """Add the commands to `app`."""
    for command in (layout, size, check, plan, pages, presets):
        app.command(command.__name__)(command)


def layout(
    pair: PairArgument,
    side: SideOption = Side.CONTEXT,
    rank: RankOption = 0,
    case: CaseOption = None,
    overrides: SetOption = None,
    json: JsonOption = None,
) -> None:
    """Show layer groups, pools and buffers of one rank.

    Example: unikv layout pair.yaml --side context --rank 0
    """
    config = _load(pair, case, overrides, json)
    _answer(dry.layout_report(config, side, rank), json, render.layout)


def size(  # noqa: PLR0913 - options of a command line
    pair: PairArgument,
    *,
    side: SideOption = Side.GENERATION,
    rank: RankOption = 0,
    tokens: Annotated[
        int,
        typer.Option(help="Token positions of ALL requests together, not of each; with those reserved for drafts."),
    ] = 0,
    requests: Annotated[int, typer.Option(help="Requests resident at the same time.")] = 1,
    iteration_tokens: Annotated[
        int, typer.Option(help="Tokens one iteration prefills: there, layers with a window keep every token.")
    ] = 0,
    quota: Annotated[
        str | None, typer.Option(metavar="SIZE", help="Ask how many tokens fit into SIZE, e.g. 8GiB.")
    ] = None,
    case: CaseOption = None,
    overrides: SetOption = None,
    json: JsonOption = None,
) -> None:
    """Show what tokens cost in bytes, and how many tokens fit.

    Layers with full attention cost bytes per token, layers with a window a fixed amount per request.

    Example: unikv size pair.yaml --side generation --tokens 65536 --requests 8
    """
    config = _load(pair, case, overrides, json)
    report = dry.size_report(
        config,
        side,
        rank=rank,
        tokens=tokens,
        requests=requests,
        iteration_tokens=iteration_tokens,
        quota_bytes=None if quota is None else _quota_bytes(quota),
    )
    _answer(report, json, render.size)


def check(
    pair: PairArgument,
    case: CaseOption = None,
    overrides: SetOption = None,
    json: JsonOption = None,
) -> None:
    """Say whether the two sides may talk, and whether draft KV travels. Exit code 2 where they may not.

    Example: unikv check pair.yaml --set generation.parallel.tp=4
    """
    report = dry_pair.judge(_load(pair, case, overrides, json))
    _answer(dry_pair.check_report(report), json, render.check)
    if json is not None:
        require_compatible(report)  # The object is for machines; people still want to read why.
    raise typer.Exit(ExitCode.FINE if report.compatible else ExitCode.REFUSED)


def plan(
    pair: PairArgument,
    context_dp: Annotated[
        int | None, typer.Option(help="Attention DP: only the context rank(s) that hold a request. Default: all.")
    ] = None,
    generation_dp: Annotated[
        int | None, typer.Option(help="Attention DP: only the generation rank(s) that want it. Default: all.")
    ] = None,
    case: CaseOption = None,
    overrides: SetOption = None,
    json: JsonOption = None,
) -> None:
    """Show which rank sends which heads of which layers to whom.

    Example: unikv plan pair.yaml --json plan.json
    """
    config = _load(pair, case, overrides, json)
    _answer(dry_pair.plan_report(config, context_dp=context_dp, generation_dp=generation_dp), json, render.plan)


def pages(
    pair: PairArgument,
    prompt_tokens: Annotated[int, typer.Option(help="Tokens of the prompt.")],
    cached_tokens: Annotated[int, typer.Option(help="Tokens at its start the generation side has already.")] = 0,
    case: CaseOption = None,
    overrides: SetOption = None,
    json: JsonOption = None,
) -> None:
    """Show which pages of a prompt travel, per layer group.

    Example: unikv pages pair.yaml --prompt-tokens 2080 --cached-tokens 64
    """
    config = _load(pair, case, overrides, json)
    report = dry_pair.pages_report(config, prompt_tokens=prompt_tokens, cached_tokens=cached_tokens)
    _answer(report, json, render.pages)


def presets(json: JsonOption = None) -> None:
    """List the pair files that come with unikv.

    Their names can stand wherever a pair file can.

    Example: unikv presets
    """
    _check_target(json)
    _answer(presets_report(), json, render.presets)


def _load(pair: str, case: str | None, overrides: list[str] | None, json: str | None) -> PairConfig:
    """Return the pair, after checking that its answer can be written."""
    _check_target(json)
    return load_pair(pair, overrides=overrides or (), case=case)


def _check_target(json: str | None) -> None:
    if json is not None:
        check_target(json)


def _quota_bytes(text: str) -> int:
    try:
        return parse_size_bytes(text)
    except ValueError:
        want = "a size in B, KiB, MiB or GiB"
        raise ConfigError(explain("size", "--quota", text, want, "write for example 8GiB")) from None


def _answer(report: dry.Report, json: str | None, show: Callable[[dry.Report], RenderableType]) -> None:
    """Print the table, or write the JSON object and print nothing else."""
    if json is None:
        Console().print(show(report))
    else:
        write_json(report, json)
