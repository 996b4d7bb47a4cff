"""Loads a pair file: read, vary, override, hand down, validate. Everything wrong ends in a ConfigError.

What wins, strongest first: overrides given by the caller, ``UNIKV_SHARED_DRAFT_KV``, the matrix case, the file.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from pydantic import ValidationError

from transfer.hello import Side
from unikv.errors import ConfigError, SpecError, explain
from unikv.ids import LayerId
from unikv.layer_spec import KVCacheLayerSpec, LayerOwner
from workers.config import HFRunnerConfig, LayerEntry, PairConfig, SideConfig
from workers.config_errors import config_error
from workers.config_merge import SIDES, Merged, apply_changes, case_changes, hand_down, parse_override
from workers.config_source import Document, preset_names, read_document, read_prompts

__all__ = ["DRAFT_KV_VARIABLE", "load_pair", "pair_cases", "preset_names", "with_layers"]

DRAFT_KV_VARIABLE: Final = "UNIKV_SHARED_DRAFT_KV"
"""Environment variable that overrides ``transfer.draft_kv`` of every pair file."""

_OPTIONAL: Final = ("transfer", "runner", "workload", "matrix", "name")
_DRAFT_KV_VALUES: Final = ("0", "1", "auto")


def load_pair(
    source: str,
    *,
    overrides: Sequence[str] = (),
    case: str | None = None,
    environ: Mapping[str, str] | None = None,
) -> PairConfig:
    """Return the pair `source` describes.

    Args:
        source: path of a pair file, or the name of a shipped preset.
        overrides: texts ``context.parallel.tp=2``; list entries by number (``model.layers.0.window=128``).
        case: name of a case of the file's ``matrix``; its changes come before `overrides`.
        environ: environment to read; None for the process's own.

    Raises:
        ConfigError: anything is wrong; one sentence per mistake with file, key, value, expectation and cure.
    """
    document = read_document(source)
    changes = [] if case is None else list(case_changes(document.content, case, document.thing))
    changes += _draft_kv_change(os.environ if environ is None else environ)
    changes += [parse_override(text) for text in overrides]
    try:
        content = apply_changes(document.content, changes, document.thing)
        merged = hand_down(_anchored(content, document), document.thing)
        return _validated(merged, document, source, case)
    except RecursionError:
        raise ConfigError(
            explain(document.thing, "content", "contains itself", "a finite file", "drop the YAML alias")
        ) from None


def pair_cases(pair: PairConfig) -> tuple[str, ...]:
    """Return the names of the matrix cases, in order; none where the file has no matrix."""
    return tuple(entry.name for entry in pair.matrix)


def with_layers(pair: PairConfig, specs: Sequence[KVCacheLayerSpec]) -> PairConfig:
    """Return `pair` with the layers of a model, for files that leave them to it (``layers: auto``).

    Args:
        pair: sides that list layers keep theirs.
        specs: all layers of the model with all heads, target first.
    """
    entries = tuple(LayerEntry.of(spec) for spec in specs)
    sides = {
        side.value: config.model_copy(update={"layers": entries})
        for side in Side
        if (config := pair.side(side)).layers is None
    }
    return pair.model_copy(update=sides)


def _draft_kv_change(environ: Mapping[str, str]) -> list[tuple[str, Any]]:
    value = environ.get(DRAFT_KV_VARIABLE)
    if value is None:
        return []
    if value not in _DRAFT_KV_VALUES:
        want = f"one of {', '.join(_DRAFT_KV_VALUES)}"
        raise ConfigError(explain("environment", DRAFT_KV_VARIABLE, value, want, "set one of these or unset it"))
    return [("transfer.draft_kv", value if value == "auto" else int(value))]


def _anchored(content: dict[Any, Any], document: Document) -> dict[Any, Any]:
    """Replace what is relative to the file: prompt files by their texts, key files by whole paths."""
    workload, transfer = content.get("workload"), content.get("transfer")
    if isinstance(workload, dict) and isinstance(workload.get("prompts"), str):
        texts = read_prompts(document.folder, workload["prompts"], document.thing)
        content = {**content, "workload": {**workload, "prompts": texts}}
    if isinstance(transfer, dict) and isinstance(transfer.get("curve"), dict):
        folder = Path(str(document.folder))
        curve = {key: folder / path if isinstance(path, str) else path for key, path in transfer["curve"].items()}
        content = {**content, "transfer": {**transfer, "curve": curve}}
    return content


def _validated(merged: Merged, document: Document, source: str, case: str | None) -> PairConfig:
    # An empty optional section is one that is left out.
    content = {key: value for key, value in merged.content.items() if key not in _OPTIONAL or value is not None}
    _refuse_internal(content, document.thing)
    for side in SIDES:
        content[side] = {**content[side], "side": Side(side), "source": document.thing}
    content |= {"source": source, "case": case, "name": content.get("name", document.name)}
    try:
        pair = PairConfig.model_validate(content)
    except ValidationError as error:
        raise config_error(document.thing, error, merged.origins) from None
    _check_served(pair, document.thing)
    for side in Side:
        section = merged.origins.get((side.value, "layers"), side.value)
        _check_layers(pair.side(side), f"{document.thing}: {section}.layers")
        _check_runner(pair, pair.side(side), document.thing)
    _check_matrix(pair, document.thing)
    return pair


def _refuse_internal(content: Mapping[Any, Any], thing: str) -> None:
    """Refuse keys the loader fills in itself."""
    for place, section, keys in (
        ("", content, PairConfig.internal),
        *((f"{side}.", content[side], SideConfig.internal) for side in SIDES),
    ):
        for key in sorted(keys & set(section)):
            raise ConfigError(explain(thing, f"{place}{key}", section[key], "no such key", "remove it"))


def _check_layers(side: SideConfig, thing: str) -> None:
    """Check what single values cannot tell: order of owners, and rules of the layers themselves."""
    first, draft_seen = 0, None
    for number, entry in enumerate(side.layers or ()):
        if entry.owner is LayerOwner.DRAFT:
            draft_seen = number if draft_seen is None else draft_seen
        elif draft_seen is not None:
            want = f"draft, as in entry {draft_seen} before it"
            raise ConfigError(explain(f"{thing}[{number}]", "owner", entry.owner, want, "list draft layers last"))
        try:
            entry.spec(LayerId(first), heads=entry.kv_heads)
        except SpecError as error:
            raise ConfigError(f"{thing}[{number}]: {error}") from None
        first += entry.count


def _check_runner(pair: PairConfig, side: SideConfig, thing: str) -> None:
    """Check what one kind of runner needs of a side."""
    if not isinstance(pair.runner, HFRunnerConfig):
        if side.layers is None:
            want = "a list of layer entries with runner.kind: pattern"
            raise ConfigError(explain(thing, f"{side.side}.layers", None, want, "list the layers under model"))
        return
    for name in ("tp", "pp", "cp"):
        if (size := getattr(side.parallel, name)) != 1:
            key, cure = f"{side.side}.parallel.{name}", "set it to 1: this runner does not split a model"
            raise ConfigError(explain(thing, key, size, "1 with runner.kind: hf", cure))
    for name, left_out in (("shared_prefix_tokens", 0), ("cancel", None), ("local_below_tokens", 0)):
        if (value := getattr(pair.workload, name)) != left_out:
            want, cure = f"{left_out} with runner.kind: hf", "leave it out, or use runner.kind: pattern"
            raise ConfigError(explain(thing, f"workload.{name}", value, want, cure))
    if side.speculative is not None and pair.runner.draft is None:
        cure = "name a drafter, or set speculative: null"
        raise ConfigError(explain(thing, "runner.draft", None, f"a drafter for {side.side}.speculative", cure))


def _check_served(pair: PairConfig, thing: str) -> None:
    """Refuse what a pair file may say and this release does not do yet: nothing is silently left out."""
    moves = pair.transfer
    found: list[tuple[str, object, str, bool]] = [
        ("transfer.checksum", moves.checksum, "off", moves.checksum != "off"),
    ]
    cp = pair.context.parallel.cp
    found.append(("context.parallel.cp", cp, "1", cp != 1))
    cures = {
        "context.parallel.cp": "only the generation side may split sequences, set it there",
    }
    default = "this release does not serve it yet, leave the key out"
    refusals = [explain(thing, key, got, want, cures.get(key, default)) for key, got, want, refused in found if refused]
    if refusals:
        raise ConfigError("\n".join(refusals))


def _check_matrix(pair: PairConfig, thing: str) -> None:
    names = pair_cases(pair)
    for number, name in enumerate(names):
        if name in names[:number]:
            raise ConfigError(explain(thing, f"matrix[{number}].name", name, "unique", "rename one of the cases"))
