"""`unikv size`: what tokens cost and how much fits, for a rank of a pair or for a model that nobody has to load."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Final

import typer

from transfer.hello import Side
from unikv.errors import ConfigError, explain
from unikv.layer_spec import KVDtype
from workers import dry, render_size
from workers.cli_answers import answer, check_json, load, size_bytes
from workers.cli_options import CaseOption, JsonOption, SetOption
from workers.size_model import ModelQuestion, model_report

_MODEL: Final = "Options with --model"
_MEMORY: Final = "16GiB"


def size(  # noqa: PLR0913 - options of a command line
    pair: Annotated[
        str | None, typer.Argument(metavar="PAIR", help="Pair file, or the name of a shipped preset; or use --model.")
    ] = None,
    *,
    side: Annotated[Side | None, typer.Option(help="Which side of a PAIR; default: generation.")] = None,
    rank: Annotated[int | None, typer.Option(help="Flat rank inside the side; default: 0.")] = None,
    tokens: Annotated[
        int | None,
        typer.Option(
            help="Token positions of ALL requests of a PAIR together; with --model the length of EACH, "
            "prompt and answer, and the longest one where it is left out."
        ),
    ] = None,
    requests: Annotated[int, typer.Option(help="Requests resident at the same time.")] = 1,
    iteration_tokens: Annotated[
        int, typer.Option(help="Tokens one iteration prefills: there, layers with a window keep every token.")
    ] = 0,
    quota: Annotated[
        str | None, typer.Option(metavar="SIZE", help="Ask how many tokens of a PAIR fit into SIZE, e.g. 8GiB.")
    ] = None,
    model: Annotated[
        str | None,
        typer.Option(metavar="DIR", help="Directory with a Hugging Face config.json.", rich_help_panel=_MODEL),
    ] = None,
    draft_model: Annotated[
        str | None, typer.Option(metavar="DIR", help="The same for a drafter.", rich_help_panel=_MODEL)
    ] = None,
    tp: Annotated[int | None, typer.Option(help="Tensor-parallel ranks; default: 1.", rich_help_panel=_MODEL)] = None,
    memory: Annotated[
        str | None,
        typer.Option(
            metavar="SIZE",
            help=f"What a rank has for KV, e.g. 40GiB; default: {_MEMORY}.",
            rich_help_panel=_MODEL,
        ),
    ] = None,
    dtype: Annotated[
        KVDtype | None, typer.Option(help="Of the cache; default: the model's.", rich_help_panel=_MODEL)
    ] = None,
    draft_dtype: Annotated[
        KVDtype | None, typer.Option(help="Of the drafter's cache; default: its own.", rich_help_panel=_MODEL)
    ] = None,
    draft_tokens: Annotated[
        int | None,
        typer.Option(help="Drafts verified per step, with a drafter; default: 5.", rich_help_panel=_MODEL),
    ] = None,
    tokens_per_block: Annotated[
        int | None, typer.Option(help="Token positions of a page; default: 32.", rich_help_panel=_MODEL)
    ] = None,
    max_seq_len: Annotated[
        int | None, typer.Option(help="Longest sequence; default: the model's.", rich_help_panel=_MODEL)
    ] = None,
    case: CaseOption = None,
    overrides: SetOption = None,
    json: JsonOption = None,
) -> None:
    """Show what tokens cost in bytes, and how much fits.

    Layers with full attention cost bytes per token, layers with a window a fixed amount per request.

    Example: unikv size pair.yaml --side generation --tokens 65536 --requests 8

    Example: unikv size --model ./Llama-3.1-8B --draft-model ./Llama-3.2-1B --memory 40GiB --tokens 8192
    """
    if (pair is None) == (model is None):
        got = "neither" if pair is None else "both"
        raise ConfigError(explain("size", "PAIR and --model", got, "one of them", "name a pair file, or a model"))
    of_pair = {"--side": side, "--rank": rank, "--quota": quota, "--case": case, "--set": overrides or None}
    of_model: dict[str, object] = {
        **{
            "--draft-model": draft_model,
            "--tp": tp,
            "--memory": memory,
            "--dtype": dtype,
            "--draft-dtype": draft_dtype,
        },
        **{"--draft-tokens": draft_tokens, "--tokens-per-block": tokens_per_block, "--max-seq-len": max_seq_len},
    }
    if model is not None:
        _refuse(of_pair, "PAIR")
        check_json(json)
        question = ModelQuestion(
            model=model,
            draft_model=draft_model,
            tp=_at_least_one("--tp", tp, 1),
            tokens=tokens,
            requests=requests,
            memory_bytes=size_bytes("--memory", memory or _MEMORY),
            dtype=dtype,
            draft_dtype=draft_dtype,
            draft_tokens=_at_least_one("--draft-tokens", draft_tokens, 5),
            tokens_per_block=_at_least_one("--tokens-per-block", tokens_per_block, 32),
            iteration_tokens=iteration_tokens,
            max_seq_len=max_seq_len,
        )
        answer(model_report(question), json, render_size.model)
        return
    assert pair is not None
    _refuse(of_model, "--model DIR")
    report = dry.size_report(
        load(pair, case, overrides, json),
        side or Side.GENERATION,
        rank=rank or 0,
        tokens=tokens or 0,
        requests=requests,
        iteration_tokens=iteration_tokens,
        quota_bytes=None if quota is None else size_bytes("--quota", quota),
    )
    answer(report, json, render_size.pair)


def _refuse(given: Mapping[str, object], only_with: str) -> None:
    """Refuse options that would say nothing here."""
    for option, value in given.items():
        if value is not None:
            raise ConfigError(explain("size", option, value, f"only with {only_with}", "leave it out"))


def _at_least_one(option: str, value: int | None, default: int) -> int:
    if value is None:
        return default
    if value < 1:
        raise ConfigError(explain("size", option, value, "an integer >= 1", "pass a count"))
    return value
