"""What the page cache asks of a host tier, and what it counts."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from unikv.page_moves import Moves


class ColdTier(Protocol):
    """The host's copies of pages, see `unikv.host_tier`."""

    def num_slots(self, pool_group: int) -> int:
        """Return how many pages of a pool group fit."""
        ...

    def store(self, moves: Moves) -> None:
        """Copy pages from device slots to host slots."""
        ...

    def load(self, moves: Moves) -> None:
        """Copy pages from host slots to device slots."""
        ...


@dataclass(slots=True)
class CacheStatistics:
    """What happened to pages since the manager was built.

    Attributes:
        fresh_pages: handed out to requests.
        reused_pages: taken over whole from the prefix tree.
        copied_pages: taken over in part, as a private copy.
        dropped_pages: evicted for good.
        stored_pages: moved to the host.
        loaded_pages: moved back.
    """

    fresh_pages: int = 0
    reused_pages: int = 0
    copied_pages: int = 0
    dropped_pages: int = 0
    stored_pages: int = 0
    loaded_pages: int = 0
