"""Kinds of values a pair file holds, each with the words for what would have been right."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from difflib import get_close_matches
from enum import StrEnum
from fractions import Fraction
from typing import Annotated, Any, Final

from pydantic import BeforeValidator, Field
from pydantic_core import PydanticCustomError

UNITS_BYTES: Final = {"B": 1, "KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30}
"""The units of a size, in bytes. Powers of two only: GB would be read as either."""

PROBLEM: Final = "unikv_problem"
"""Type of validation errors that bring their own words in ``ctx``: ``want``, ``cure`` and perhaps ``field`` (the key
below the place of the error that is wrong) or ``unknown`` (a key that should not be there)."""

_SIZE: Final = re.compile(r"(\d{1,18}(?:\.\d{1,9})?)\s*([A-Za-z]*)", re.ASCII)
_LONGEST_KEY: Final = 100
_DRAFT_LIMITS: Final = {"quantize_bits": (2, 8), "drop_layers": (1, 1 << 16)}


def problem(want: str, cure: str, **more: object) -> PydanticCustomError:
    """Return a validation error that says what was expected and what to do."""
    return PydanticCustomError(PROBLEM, "expected {want}", {"want": want, "cure": cure, **more})


def unknown_key(key: object, known: Sequence[str]) -> PydanticCustomError:
    """Return the error for a key that means nothing here; it names the nearest one that does."""
    close = nearest(key, known)
    cure = f"did you mean {close!r}?" if close else "remove it"
    return problem(f"one of {', '.join(known)}", cure, unknown=_shown_key(key))


def _shown_key(key: object) -> str:
    """Return a key as messages show it: on one line, without what a terminal would obey."""
    text = str(key)
    return text[:_LONGEST_KEY] if text.isprintable() else ascii(text[:_LONGEST_KEY])


def printable(value: object) -> object:
    """Return `value` as it is, after refusing text with control characters: it goes to terminals and file names.

    Raises:
        PydanticCustomError: it has some.
    """
    if isinstance(value, str) and not value.isprintable():
        raise problem("text without control characters", "leave them out")
    return value


def nearest(word: object, known: Iterable[str]) -> str | None:
    """Return the one of `known` most like `word`, None where none is alike."""
    return next(iter(get_close_matches(str(word)[:_LONGEST_KEY], list(known), n=1, cutoff=0.5)), None)


def parse_size_bytes(value: object) -> int:
    """Return a size in bytes: an integer, or text such as ``8GiB`` or ``1.5 MiB`` that is a whole number of bytes.

    Raises:
        PydanticCustomError: neither; the words name the units.
    """
    if isinstance(value, int) and not isinstance(value, bool) and value >= 0:
        return value
    found = _SIZE.fullmatch(value.strip()) if isinstance(value, str) else None
    unit = (found[2] or "B") if found else ""
    size = Fraction(found[1]) * UNITS_BYTES[unit] if found and unit in UNITS_BYTES else None
    if size is None or size.denominator != 1:
        raise problem(f"a size in {', '.join(UNITS_BYTES)}", "write for example 8GiB or 512MiB")
    return int(size)


def parse_draft(value: object) -> object:
    """Return the choice of a drafter as it is, after checking it.

    Raises:
        PydanticCustomError: none of the choices.
    """
    if value is None or (isinstance(value, str) and value):
        return value
    if isinstance(value, dict) and len(value) == 1:
        ((key, number),) = value.items()
        low, high = _DRAFT_LIMITS.get(key, (1, 0))
        if type(number) is int and low <= number <= high:
            return value
    raise problem("a path, {quantize_bits: 2 to 8}, {drop_layers: 1 or more} or null", "choose one of these")


def named(kind: type[StrEnum], *, spelled: Mapping[object, str] | None = None) -> BeforeValidator:
    """Return a validator for a member of `kind`, given by name.

    Args:
        kind: the enum.
        spelled: further values and the names they stand for, e.g. what YAML makes of an unquoted ``off``.
    """
    parse_name = _name_parser([member.value for member in kind], spelled or {})
    return BeforeValidator(lambda value: kind(parse_name(value)))


def one_of(*names: str, spelled: Mapping[object, str] | None = None) -> BeforeValidator:
    """Return a validator for one of `names`; `spelled` as in `named`."""
    return BeforeValidator(_name_parser(names, spelled or {}))


def _name_parser(names: Sequence[str], spelled: Mapping[object, str]) -> Callable[[object], str]:
    def parse(value: object) -> str:
        # 0 == False: the kind of value counts as well.
        meant = next((name for other, name in spelled.items() if type(other) is type(value) and other == value), value)
        if isinstance(meant, str) and meant in names:
            return str(meant)
        close = nearest(meant, names) if isinstance(meant, str) else None
        raise problem(f"one of {', '.join(names)}", f"did you mean {close!r}?" if close else "use one of these")

    return parse


def as_tuple(want: str, cure: str, *, length: int | None = None) -> BeforeValidator:
    """Return a validator that turns a YAML list into a tuple and refuses everything else."""

    def parse(value: object) -> tuple[Any, ...]:
        if not isinstance(value, list | tuple) or (length is not None and len(value) != length):
            raise problem(want, cure)
        return tuple(value)

    return BeforeValidator(parse)


def checked(check: Callable[[Any], Any]) -> BeforeValidator:
    """Return a validator made of `check`; it only gives such lines one look."""
    return BeforeValidator(check)


Count = Annotated[int, Field(strict=True, ge=1, le=1 << 48)]
"""An integer from 1; true and "2" are none. The upper bound only keeps nonsense out of later arithmetic."""

Amount = Annotated[int, Field(strict=True, ge=0, le=1 << 48)]
"""An integer from 0."""

Flag = Annotated[bool, Field(strict=True)]
Text = Annotated[str, Field(strict=True, min_length=1)]
Seconds = Annotated[float, Field(strict=True, gt=0, allow_inf_nan=False)]
SizeBytes = Annotated[int, BeforeValidator(parse_size_bytes), Field(le=1 << 60)]
DraftSource = Annotated[str | dict[str, int] | None, BeforeValidator(parse_draft)]
