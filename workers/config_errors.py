"""Validation errors in the words of this project: file, key, value, expectation, cure - all of them, not the first."""

from __future__ import annotations

import reprlib
from collections.abc import Mapping, Sequence
from typing import Any, Final

from pydantic import ValidationError

from unikv.errors import ConfigError, explain
from workers.config_values import PROBLEM

Place = tuple[int | str, ...]
"""Keys and list indices from the top of the resolved file down to a value."""

_RUNNER_KINDS: Final = ("pattern", "hf")
_SHARED: Final = ("max_seq_len", "tokens_per_block", "layers")
"""Keys that belong in ``model``: missing on both sides, they are missing there."""

_WANT: Final = {
    "int_type": "an integer",
    "bool_type": "true or false",
    "float_type": "a number",
    "finite_number": "a finite number",
    "string_type": "text",
    "string_too_short": "text that is not empty",
    "dict_type": "a mapping",
    "path_type": "a path",
    "missing": "a value",
}
_BOUNDS: Final = {"greater_than_equal": (">=", "ge"), "greater_than": (">", "gt"), "less_than_equal": ("<=", "le")}


class _Bare(str):
    """Words that stand in a message without quotation marks."""

    __slots__ = ()

    def __repr__(self) -> str:
        return str(self)


def config_error(thing: str, error: ValidationError, origins: Mapping[tuple[str, str], str]) -> ConfigError:
    """Return `error` as one ConfigError with a sentence per mistake.

    Args:
        thing: opens every sentence ("pair file a.yaml").
        error: what pydantic found in the resolved data.
        origins: the section each (side, key) was inherited from, where it was.
    """
    details = error.errors(include_url=False)
    missing = [item["loc"] for item in details if item["type"] == "missing"]
    sentences = {_sentence(thing, item, origins, missing): None for item in details}
    return ConfigError("\n".join(sentences))


def key_text(place: Place) -> str:
    """Return ``model.layers[0].kv_heads`` for its parts."""
    text = ""
    for part in place:
        text += f"[{part}]" if isinstance(part, int) else f".{part}" if text else part
    return text


def _sentence(
    thing: str, item: Mapping[str, Any], origins: Mapping[tuple[str, str], str], missing: Sequence[Place]
) -> str:
    context = item.get("ctx") or {}
    place, got = _drop_tags(item["loc"]), item["input"]
    if item["type"] == PROBLEM and "unknown" in context:
        place, got = (*place, context["unknown"]), _Bare("an unknown key")
    elif item["type"] == PROBLEM and "field" in context:
        place = (*place, context["field"])
        got = got.get(context["field"], _Bare("missing")) if isinstance(got, dict) else got
    elif item["type"] == "missing":
        got = _Bare("missing")
    field = key_text(_written_at(place, origins, missing)) or "content"
    return explain(thing, field, _short(got), *_want_and_cure(item, context, place))


def _want_and_cure(item: Mapping[str, Any], context: Mapping[str, Any], place: Place) -> tuple[str, str]:
    kind = item["type"]
    if kind == PROBLEM:
        return context["want"], context["cure"]
    if kind == "missing":
        return "a value", f"add {place[-1]}"
    if kind in _BOUNDS:
        sign, name = _BOUNDS[kind]
        return f"{sign} {context[name]}", "correct it"
    if kind == "string_pattern_mismatch":
        return f"text that matches {context['pattern']}", "rename it"
    return _WANT.get(kind, item["msg"][0].lower() + item["msg"][1:]), "correct it"


def _drop_tags(place: Place) -> Place:
    """Leave out what pydantic adds for the kind of runner: no key of the file."""
    if place[:1] == ("runner",) and len(place) > 1 and place[1] in _RUNNER_KINDS:
        return (place[0], *place[2:])
    return place


def _written_at(place: Place, origins: Mapping[tuple[str, str], str], missing: Sequence[Place]) -> Place:
    """Return where the value stands in the file, before it was handed down to a side."""
    if len(place) < 2 or place[0] not in ("context", "generation"):
        return place
    side, key = str(place[0]), str(place[1])
    section = origins.get((side, key), side)
    if key in _SHARED and ("context", key) in missing and ("generation", key) in missing:
        section = "model"
    return (section, *place[1:]) if section else place[1:]


def _short(value: object) -> object:
    """Keep long values from filling the screen."""
    if isinstance(value, int | float | _Bare):
        return value
    try:
        return _Bare(reprlib.repr(value))
    except ValueError:  # an integer of thousands of digits is in it
        return _Bare(f"a value of type {type(value).__name__} too long to show")
