"""Where requests get their pages, and pins that keep pages in place while somebody outside may touch them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Self

from unikv.ids import GroupId
from unikv.layout import CacheLayout, GroupLayout
from unikv.page_table import SlotRow, valid_slots
from unikv.ranges import Span, stale_blocks
from unikv.slots import SlotAllocator


@dataclass(frozen=True, slots=True, kw_only=True)
class PageSource:
    """Where the requests of one manager get their pages from.

    Attributes:
        layout: layer groups and tokens per block.
        allocators: one per pool group.
        max_capacity_tokens: positions that a block-table row has room for.
        pins: every pin that has not been released, for the integrity check.
    """

    layout: CacheLayout
    allocators: tuple[SlotAllocator, ...]
    max_capacity_tokens: int
    pins: set[PagePin]

    def allocator(self, group_id: GroupId) -> SlotAllocator:
        """Return the allocator that serves a layer group.

        Raises:
            UnknownLayerError: there is no such group.
        """
        return self.allocators[self.layout.group(group_id).pool_group]

    def stale(self, group: GroupLayout, history_tokens: int) -> Span:
        """Return the ordinals of a group that no step reads once `history_tokens` are final."""
        return stale_blocks(history_tokens, group.window, group.sink_blocks, self.layout.tokens_per_block)


class PagePin:
    """Keeps pages from being reused while somebody outside may still touch them, whatever the request does.

    Release it only on proof that nobody can touch the pages any more. A context manager, released on exit.
    """

    def __init__(self, source: PageSource, tables: Mapping[GroupId, SlotRow]) -> None:
        """Take one reference to every page of `tables`; call `KVCacheRequest.pin` instead."""
        self._source = source
        self._slots = {group_id: valid_slots(row) for group_id, row in tables.items()}
        for group_id, slots in self._slots.items():
            source.allocator(group_id).retain(slots)
        source.pins.add(self)

    @property
    def slots(self) -> Mapping[GroupId, tuple[int, ...]]:
        """The pinned slots by layer group; empty after `release`."""
        return self._slots

    def release(self) -> None:
        """Give the references back; pages nobody else holds are free at once. Safe to call twice."""
        slots_by_group, self._slots = self._slots, {}
        for group_id, slots in slots_by_group.items():
            self._source.allocator(group_id).release(slots)
        self._source.pins.discard(self)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_exc: object) -> None:
        self.release()
