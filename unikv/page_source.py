"""Where requests get their pages, and pins that keep pages in place while somebody outside may touch them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Self

from unikv.cp_ledger import CpLedger
from unikv.errors import SpecError, explain
from unikv.ids import GroupId, RequestId
from unikv.layout import CacheLayout, GroupLayout
from unikv.page_cache import PageCacheManager
from unikv.page_moves import Moves
from unikv.page_table import SlotRow, valid_slots
from unikv.ranges import Span
from unikv.slots import SlotAllocator, shortage


@dataclass(frozen=True, slots=True, kw_only=True)
class PageSource:
    """Where the requests of one manager get their pages from.

    Attributes:
        layout: layer groups and tokens per block.
        cache: slots, cached pages and the prefix tree.
        copy_pages: copies pages from slot to slot, on the device's current stream.
        max_capacity_tokens: positions that a block-table row has room for.
        max_utilisation: share of any pool group's pages in use above which nothing is resumed beside what runs.
        running: requests that are ACTIVE.
        pins: every pin that has not been released, for the integrity check.
        ledger: which blocks of a sequence this rank has; all of them without context parallelism.
    """

    layout: CacheLayout
    cache: PageCacheManager
    copy_pages: Callable[[Moves], None]
    max_capacity_tokens: int
    max_utilisation: float
    running: set[RequestId]
    pins: set[PagePin]
    ledger: CpLedger

    def allocator(self, group_id: GroupId) -> SlotAllocator:
        """Return the allocator that serves a layer group.

        Raises:
            UnknownLayerError: there is no such group.
        """
        return self.cache.allocators[self.layout.group(group_id).pool_group]

    def num_blocks(self, capacity_tokens: int) -> int:
        """Return the blocks this rank has of a sequence."""
        return self.ledger.num_blocks(capacity_tokens)

    def stale(self, group: GroupLayout, history_tokens: int) -> Span:
        """Return the ordinals of a group that no step reads once `history_tokens` are final."""
        return self.ledger.stale(history_tokens, group.window, group.sink_blocks)

    def next_stale(self, group: GroupLayout, history_tokens: int) -> int:
        """Return the shortest history above `history_tokens` at which a page of a windowed group may become stale."""
        if self.ledger.cp_size > 1 or group.window is None:
            return history_tokens + 1
        end = max(self.stale(group, history_tokens).hi, group.sink_blocks)
        return (end + 1) * self.layout.tokens_per_block + group.window - 1

    def check_fits(self, capacity_tokens: int, history_tokens: int) -> None:
        """Check that a request of this size could ever have its pages. Reads only.

        Raises:
            CapacityError: some pool group is too small; `permanent` is set.
            SpecError: it is longer than the longest sequence, or the history is longer than the capacity.
        """
        thing = f"a request of {capacity_tokens} tokens"
        if not 0 <= history_tokens <= capacity_tokens <= self.max_capacity_tokens:
            want = f"at least history_tokens={history_tokens}, at most {self.max_capacity_tokens} tokens"
            cure = "shorten it, or raise max_seq_len"
            raise SpecError(explain(thing, "capacity_tokens", capacity_tokens, want, cure))
        blocks, pages = self.num_blocks(capacity_tokens), Counter[int]()
        for group in self.layout.groups:
            pages[group.pool_group] += blocks - len(self.stale(group, history_tokens))
        for pool_group, needed in pages.items():
            allocator = self.cache.allocators[pool_group]
            if needed > allocator.num_slots - 1:
                raise shortage(allocator, thing, needed, needed, allocator.num_slots - 1)


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
            self._source.cache.release(self._source.layout.group(group_id).pool_group, slots)
        self._source.pins.discard(self)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_exc: object) -> None:
        self.release()
