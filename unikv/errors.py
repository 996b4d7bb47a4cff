"""Errors, named after whoever has to act.

Every message reads ``<thing>: <field> is <got>, expected <want>; <what to do>`` (see `explain`), so that the same
sentence serves a log line, an exception and a person at a terminal.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import Enum
from typing import Final

MAX_SHOWN_CHARACTERS: Final = 400
"""How much of a wrong value an error repeats."""


def show(value: object) -> str:
    """Return `value` as errors show it: its repr, cut where it is long; an enum member by its value."""
    try:
        text = repr(value.value if isinstance(value, Enum) else value)
    except (ValueError, RecursionError):  # Python refuses to write integers of thousands of digits
        return f"a value of type {type(value).__name__} too long to show"
    return text if len(text) <= MAX_SHOWN_CHARACTERS else f"{text[:MAX_SHOWN_CHARACTERS]}..."


def explain(thing: str, field: str, got: object, want: str, cure: str) -> str:
    """Return the one sentence every error of this project is made of.

    Args:
        thing: what the sentence is about, with its identity ("layer 3", "pair file a.yaml").
        field: the field, key or quantity that is wrong, with its unit where it has one.
        got: the value that was found; see `show`.
        want: what would have been right.
        cure: what the reader should do now.
    """
    return f"{thing}: {field} is {show(got)}, expected {want}; {cure}"


class UnikvError(Exception):
    """Base of every error this project raises on purpose."""


class SpecError(UnikvError, ValueError):
    """A layer spec, layout or call argument is wrong. The caller must change it; nothing was changed."""


class UnknownLayerError(SpecError, KeyError):
    """A layer, layer group or pool group this rank does not hold was asked for. The caller must ask another rank."""

    def __str__(self) -> str:
        # KeyError would print the repr of the sentence.
        return str(self.args[0])


class ConfigError(UnikvError, ValueError):
    """A pair file, preset or environment value is wrong. The operator must change it."""


class CapacityError(UnikvError):
    """Not enough pages right now. Wait for pages to be freed, or free some; nothing was changed.

    Attributes:
        needed_pages: pages the call needed in the group that ran short.
        free_pages: pages that were free there.
        permanent: the pool is too small whatever is freed; waiting does not help.
    """

    def __init__(self, message: str, *, needed_pages: int, free_pages: int, permanent: bool = False) -> None:
        super().__init__(message)
        self.needed_pages = needed_pages
        self.free_pages = free_pages
        self.permanent = permanent


class IncompatiblePeerError(UnikvError):
    """The gate refused a peer. The operator must align the two sides.

    Attributes:
        mismatches: every failed check in words, each with both sides' values.
    """

    def __init__(self, message: str, *, mismatches: Sequence[str]) -> None:
        super().__init__("\n  ".join([message, *mismatches]))
        self.mismatches = tuple(mismatches)


class LocalProtocolError(UnikvError):
    """Our own caller used a session or endpoint in a way its state does not allow."""


class RemoteProtocolError(UnikvError):
    """The peer sent something the protocol does not allow. The message was dropped."""


class LinkClosedError(UnikvError):
    """We closed this link; it cannot be used any more."""


class LinkBrokenError(UnikvError):
    """The peer went away."""


class CopyError(UnikvError):
    """A copy failed.

    Attributes:
        in_doubt: True when bytes may still land (the pages must not be reused before the peer is proven quiet).
    """

    def __init__(self, message: str, *, in_doubt: bool) -> None:
        super().__init__(message)
        self.in_doubt = in_doubt


class InternalError(UnikvError):
    """Our bug. The message carries the story (the events so far) that a report needs."""

    def __init__(self, message: str, *, story: Sequence[str] = ()) -> None:
        super().__init__("\n  ".join([message, *story]))
        self.story = tuple(story)
