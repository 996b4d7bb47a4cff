"""The single values of a message header: numbers, texts and enums, checked alike on their way out and in."""

from __future__ import annotations

import math
from collections.abc import Callable
from enum import Enum
from typing import Any, Final, Protocol

from transfer.link import Frame

INT_MIN: Final = -(2**63)
INT_MAX: Final = 2**63 - 1
MAX_TEXT_BYTES: Final = 64 * 1024
"""Longest text or byte string in a header."""
SHOWN_CHARACTERS: Final = 80
"""How much of a peer's text an error repeats."""


class FieldError(Exception):
    """One value is not what its type wants. `path` grows outwards while the error travels up (see `at`)."""

    def __init__(self, got: object, want: str) -> None:
        super().__init__(got, want)
        self.got = got[:SHOWN_CHARACTERS] if isinstance(got, str | bytes) else got
        self.want = want
        self.path: list[str] = []

    @property
    def where(self) -> str:
        """The field as one would write it, e.g. ``tables[0].group_id``."""
        return "".join(reversed(self.path)).removeprefix(".") or "content"


def at(segment: str, call: Callable[..., Any], *args: Any) -> Any:
    """Return ``call(*args)``; a FieldError on its way up learns that it comes from `segment`."""
    try:
        return call(*args)
    except FieldError as error:
        error.path.append(segment)
        raise


class Source(Protocol):
    """A message being read, front to back. Every method raises FieldError where the message does not go on so."""

    def kind(self) -> str:
        """Return what comes next: nil, boolean, integer, float, text, bytes, array or map."""
        ...

    def scalar(self, kind: str) -> Any:
        """Read the next value, which must be of this kind and neither array nor map."""
        ...

    def items(self, kind: str) -> int:
        """Enter an array or map and return its number of items, for which the message is long enough."""
        ...

    def frame(self) -> memoryview:
        """Return the next frame behind the header."""
        ...


class Node(Protocol):
    """Packs and unpacks the values of one type; both raise FieldError for a value that is not of it."""

    def pack(self, value: Any, frames: list[Frame]) -> Any:
        """Return the plain form of `value`; what travels beside the header is appended to `frames`."""
        ...

    def unpack(self, source: Source) -> Any:
        """Read one value."""
        ...


class Scalar:
    """A value that is its own plain form once `check` has passed it."""

    def __init__(self, kind: str, check: Callable[[Any], Any]) -> None:
        self._kind, self._check = kind, check

    def pack(self, value: Any, frames: list[Frame]) -> Any:
        """Return the checked value."""
        return self._check(value)

    def unpack(self, source: Source) -> Any:
        """Read and check the value."""
        return self._check(source.scalar(self._kind))


class EnumNode:
    """A member of an enum with text values, by its value."""

    def __init__(self, cls: type[Enum]) -> None:
        self._cls = cls
        self._members = {str(member.value): member for member in cls}

    def pack(self, value: Any, frames: list[Frame]) -> Any:
        """Return the member's value."""
        if not isinstance(value, self._cls):
            raise FieldError(value, f"a {self._cls.__name__}")
        return str(value.value)

    def unpack(self, source: Source) -> Any:
        """Read a value and return its member."""
        text = source.scalar("text")
        if text not in self._members:
            raise FieldError(text, f"one of {', '.join(self._members)}")
        return self._members[text]


def _check_integer(lo: int) -> Callable[[Any], int]:
    def check(value: Any) -> int:
        if type(value) is not int or not lo <= value <= INT_MAX:
            raise FieldError(value, "a non-negative integer of 63 bits" if lo == 0 else "a signed integer of 64 bits")
        return value

    return check


def _check_float(value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise FieldError(value, "a finite number")
    return float(value)


def _check_text(value: Any) -> str:
    if type(value) is str and len(value) <= MAX_TEXT_BYTES and value.isascii():
        return value
    try:
        fits = isinstance(value, str) and len(value.encode()) <= MAX_TEXT_BYTES
    except UnicodeEncodeError:
        fits = False
    if not fits:
        raise FieldError(value, f"text of at most {MAX_TEXT_BYTES} bytes in UTF-8")
    return str(value)


def _check_bytes(value: Any) -> bytes:
    if not isinstance(value, bytes) or len(value) > MAX_TEXT_BYTES:
        raise FieldError(value, f"at most {MAX_TEXT_BYTES} bytes")
    return value


def _check_bool(value: Any) -> bool:
    if not isinstance(value, bool):
        raise FieldError(value, "true or false")
    return value


INTEGER: Final = Scalar("integer", _check_integer(INT_MIN))
NON_NEGATIVE: Final = Scalar("integer", _check_integer(0))
FLOAT: Final = Scalar("float", _check_float)
TEXT: Final = Scalar("text", _check_text)
BYTES: Final = Scalar("bytes", _check_bytes)
BOOLEAN: Final = Scalar("boolean", _check_bool)
