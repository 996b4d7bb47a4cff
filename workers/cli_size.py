"""The command `unikv size`: what tokens cost and how much fits, for a rank of a pair or for a model on disk."""

from __future__ import annotations

from typing import Annotated, Any, Final

import typer

from transfer.hello import Side
from unikv.errors import ConfigError, explain
from unikv.layer_spec import KVDtype
from workers import dry, render, render_size
from workers.cli_answer import answer, check_json, load
from workers.cli_options import CaseOption, JsonOption, SetOption
from workers.config_values import parse_size_bytes
from workers.size_model import DEFAULT_DRAFT_TOKENS, PlanOptions, model_report

_PAIR_ONLY: Final = ("--side", "--rank", "--case", "--set")
_MODEL_ONLY: Final = (
    *("--draft-model", "--tp", "--dtype", "--draft-dtype", "--draft-tokens", "--tokens-per-block", "--max-seq-len"),
)


def size(  # noqa: PLR0913 - options of a command line
    pair: Annotated[
        str | None, typer.Argument(metavar="[PAIR]", help="Pair file, or the name of a shipped preset.")
    ] = None,
    *,
    model: Annotated[
        str | None, typer.Option(metavar="DIR", help="Instead of PAIR: a model's directory with its config.json.")
    ] = None,
    draft_model: Annotated[
        str | None, typer.Option(metavar="DIR", help="With --model: its drafter, in the same cache.")
    ] = None,
    tokens: Annotated[
        int | None,
        typer.Option(
            help="With PAIR: Token positions of ALL requests together, not of each; with those reserved for drafts. "
            "With --model: length of EACH request, prompt and answer; default: the longest."
        ),
    ] = None,
    requests: Annotated[int, typer.Option(help="Requests resident at the same time.")] = 1,
    quota: Annotated[
        str | None,
        typer.Option("--memory", "--quota", metavar="SIZE", help="Ask how much fits into SIZE per rank, e.g. 40GiB."),
    ] = None,
    iteration_tokens: Annotated[
        int, typer.Option(help="Tokens one iteration prefills: there, layers with a window keep every token.")
    ] = 0,
    tp: Annotated[int | None, typer.Option(help="With --model: ranks the heads are split over. Default: 1.")] = None,
    dtype: Annotated[
        KVDtype | None, typer.Option(help="With --model: element type of K and V. Default: the model's.")
    ] = None,
    draft_dtype: Annotated[
        KVDtype | None, typer.Option(help="With --draft-model: the same for the drafter. Default: the drafter's.")
    ] = None,
    draft_tokens: Annotated[
        int | None,
        typer.Option(
            help=f"With --model: most drafts a step. Default: {DEFAULT_DRAFT_TOKENS} with a drafter, 0 without.",
        ),
    ] = None,
    tokens_per_block: Annotated[int | None, typer.Option(help="With --model: tokens of a page. Default: 32.")] = None,
    max_seq_len: Annotated[
        int | None, typer.Option(help="With --model: longest sequence. Default: the model's.")
    ] = None,
    side: Annotated[Side | None, typer.Option(help="With PAIR: which side. Default: generation.")] = None,
    rank: Annotated[int | None, typer.Option(help="With PAIR: flat rank inside the side. Default: 0.")] = None,
    case: CaseOption = None,
    overrides: SetOption = None,
    json: JsonOption = None,
) -> None:
    """Show what tokens cost in bytes, and how many tokens and requests fit.

    Layers with full attention cost bytes per token, layers with a window a fixed amount per request.

    Example: unikv size pair.yaml --side generation --tokens 65536 --requests 8

    Example: unikv size --model DIR --draft-model DIR2 --tp 4 --tokens 8192 --memory 40GiB
    """
    given = {
        **{"--side": side, "--rank": rank, "--case": case, "--set": overrides or None, "--draft-model": draft_model},
        **{"--tp": tp, "--dtype": dtype, "--draft-dtype": draft_dtype, "--draft-tokens": draft_tokens},
        **{"--tokens-per-block": tokens_per_block, "--max-seq-len": max_seq_len},
    }
    _check_source(pair, model, given)
    memory_bytes = None if quota is None else _size_bytes(quota, "--memory" if pair is None else "--quota")
    if pair is not None:
        config = load(pair, case, overrides, json)
        report = dry.size_report(
            config,
            side or Side.GENERATION,
            rank=rank or 0,
            tokens=tokens or 0,
            requests=requests,
            iteration_tokens=iteration_tokens,
            quota_bytes=memory_bytes,
        )
        answer(report, json, render.size)
        return
    assert model is not None  # checked above
    check_json(json)
    options = PlanOptions(
        tp=1 if tp is None else tp,
        dtype=dtype,
        draft_dtype=draft_dtype,
        tokens=tokens,
        requests=requests,
        draft_tokens=draft_tokens,
        tokens_per_block=32 if tokens_per_block is None else tokens_per_block,
        memory_bytes=memory_bytes,
        iteration_tokens=iteration_tokens,
        max_seq_len=max_seq_len,
    )
    answer(model_report(model, draft_model, options=options), json, render_size.model_size)


def _check_source(pair: str | None, model: str | None, given: dict[str, Any]) -> None:
    """Refuse both, neither, and options that would say nothing here."""
    if (pair is None) == (model is None):
        got = "missing" if pair is None else f"{pair} and --model {model}"
        raise ConfigError(explain("size", "PAIR", got, "a pair or --model DIR", "name one of them"))
    for option in _PAIR_ONLY if pair is None else _MODEL_ONLY:
        if given[option] is not None:
            want, cure = ("a pair", "leave it out") if pair is None else ("--model DIR", "set it in the pair file")
            raise ConfigError(explain("size", option, given[option], f"only with {want}", cure))


def _size_bytes(text: str, option: str) -> int:
    try:
        return parse_size_bytes(text)
    except ValueError:
        want = "a size in B, KiB, MiB or GiB"
        raise ConfigError(explain("size", option, text, want, "write for example 8GiB")) from None
