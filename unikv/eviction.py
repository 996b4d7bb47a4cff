"""Which page goes first: by priority, and among equals the one that has been unused for the longest time."""

from __future__ import annotations

from collections import OrderedDict
from itertools import count

from unikv.cached_page import CachedPage


class EvictionQueueManager:
    """Pages of one pool group and one tier that may leave it. All steps take constant time.

    Pages that somebody holds (a suspended request, a claim) and pages that only the prefix tree has are told apart:
    the former can only move to another tier, the latter may also be dropped.
    """

    def __init__(self) -> None:
        self._lanes: tuple[dict[int, OrderedDict[CachedPage, int]], ...] = ({}, {})
        self._where: dict[CachedPage, tuple[int, int]] = {}
        self._counts = [0, 0]
        self._clock = count()

    def __contains__(self, page: CachedPage) -> bool:
        return page in self._where

    def __len__(self) -> int:
        return len(self._where)

    @property
    def num_droppable(self) -> int:
        """Pages that only the prefix tree has."""
        return self._counts[0]

    @property
    def num_held(self) -> int:
        """Pages that somebody wants back."""
        return self._counts[1]

    def add(self, page: CachedPage) -> None:
        """Append a page behind those of its priority; it counts as held if it has holders now."""
        kind = 1 if page.holders else 0
        self._where[page] = (kind, page.priority)
        self._lanes[kind].setdefault(page.priority, OrderedDict())[page] = next(self._clock)
        self._counts[kind] += 1

    def discard(self, page: CachedPage) -> None:
        """Take a page out, if it is in."""
        place = self._where.pop(page, None)
        if place is not None:
            kind, priority = place
            lanes = self._lanes[kind]
            del lanes[priority][page]
            if not lanes[priority]:
                del lanes[priority]
            self._counts[kind] -= 1

    def first(self, *, held: bool) -> CachedPage | None:
        """Return the page that goes first, None if there is none; held ones only count where `held`."""
        heads = [_head(lanes) for lanes in (self._lanes if held else self._lanes[:1]) if lanes]
        return min(heads, key=lambda head: head[:2])[2] if heads else None

    def in_order(self) -> list[CachedPage]:
        """Return all pages in the order in which they go."""
        pages = [
            (priority, number, page)
            for lanes in self._lanes
            for priority, lane in lanes.items()
            for page, number in lane.items()
        ]
        return [page for _, _, page in sorted(pages, key=lambda entry: entry[:2])]


def _head(lanes: dict[int, OrderedDict[CachedPage, int]]) -> tuple[int, int, CachedPage]:
    priority = min(lanes)
    page, number = next(iter(lanes[priority].items()))
    return priority, number, page
