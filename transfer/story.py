"""What happened so far, kept by every session so that an illegal transition can explain itself."""

from __future__ import annotations

from collections import deque
from typing import Final

from unikv.errors import InternalError

PeerKey = tuple[str, int]
"""(incarnation, rank): one process of a peer, for as long as it lives."""

STORY_LINES: Final = 64
"""Lines kept per session: enough for a whole request, bounded for one that never ends."""


class Story:
    """The last `STORY_LINES` things that happened to one session."""

    def __init__(self) -> None:
        self._lines: deque[str] = deque(maxlen=STORY_LINES)

    def note(self, line: str) -> None:
        """Add one line."""
        self._lines.append(line)

    def lines(self) -> tuple[str, ...]:
        """Return the lines, oldest first."""
        return tuple(self._lines)


def illegal(thing: str, state: object, event: object, story: Story) -> InternalError:
    """Return the error for an event that has no transition in this state."""
    return InternalError(f"{thing}: no transition from {state} on {event}; the story so far:", story=story.lines())
