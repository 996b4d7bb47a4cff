"""The commands that run nothing: layout, size, check, plan, pages, presets. They need no GPU, no peer and no torch."""

from __future__ import annotations

from typing import Annotated

import typer

from transfer.gate import require_compatible
from transfer.hello import Side
from workers import dry, dry_pair, render
from workers.cli_answers import answer, check_json, load
from workers.cli_options import CaseOption, ExitCode, JsonOption, PairArgument, SetOption
from workers.cli_size import size
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
    config = load(pair, case, overrides, json)
    answer(dry.layout_report(config, side, rank), json, render.layout)


def check(
    pair: PairArgument,
    case: CaseOption = None,
    overrides: SetOption = None,
    json: JsonOption = None,
) -> None:
    """Say whether the two sides may talk, and whether draft KV travels. Exit code 2 where they may not.

    Example: unikv check pair.yaml --set generation.parallel.tp=4
    """
    report = dry_pair.judge(load(pair, case, overrides, json))
    answer(dry_pair.check_report(report), json, render.check)
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
    config = load(pair, case, overrides, json)
    answer(dry_pair.plan_report(config, context_dp=context_dp, generation_dp=generation_dp), json, render.plan)


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
    config = load(pair, case, overrides, json)
    report = dry_pair.pages_report(config, prompt_tokens=prompt_tokens, cached_tokens=cached_tokens)
    answer(report, json, render.pages)


def presets(json: JsonOption = None) -> None:
    """List the pair files that come with unikv.

    Their names can stand wherever a pair file can.

    Example: unikv presets
    """
    check_json(json)
    answer(presets_report(), json, render.presets)
