"""A page that outlives the run of a request: published in the prefix tree, or held while its request is suspended."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from unikv.ids import NO_PAGE, GroupId

if TYPE_CHECKING:
    from unikv.prefix_tree import PrefixNode

DEFAULT_PRIORITY: Final = 35
"""Eviction priority of a page nobody said anything about; from 0, which goes first, to 100."""


@dataclass(slots=True, eq=False, kw_only=True)
class CachedPage:
    """One page of one layer group, and who wants it kept. `PageCacheManager` makes, moves and forgets it.

    It is on the device (`slot`) or on the host (`cold`), never on both. The tokens at offsets
    ``[valid_from, span)`` of the page are those of its node; what lies outside belongs to nobody who finds it there.

    Attributes:
        group_id: its layer group.
        pool_group: the pools it lies in.
        slot: device slot, `NO_PAGE` while the page is on the host.
        cold: host slot, `NO_PAGE` while the page is on the device.
        ordinal: block ordinal in the sequence it was computed for.
        span: tokens from the start of the page that were final when it was published.
        valid_from: leading tokens that were never written (a drafter that skipped them).
        priority: eviction priority; lower goes first.
        node: where the prefix tree has it, None if nowhere.
        holders: suspended requests and claims that need it back.
        plans: planned drops that name it.
    """

    group_id: GroupId
    pool_group: int
    slot: int
    ordinal: int
    span: int
    valid_from: int = 0
    priority: int = DEFAULT_PRIORITY
    cold: int = NO_PAGE
    node: PrefixNode | None = None
    holders: int = 0
    plans: int = 0

    def serves(self, start: int, end: int) -> bool:
        """Return whether the tokens at offsets ``[start, end)`` of the page are there."""
        return self.valid_from <= start and self.span >= end

    def covers(self, valid_from: int, span: int) -> bool:
        """Return whether the page has everything that one with `valid_from` and `span` has."""
        return self.valid_from <= valid_from and self.span >= span
