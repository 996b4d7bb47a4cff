"""The pages of a suspended request: held, so that they come back, and off its page tables, so that they may move."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from unikv.block_rows import BlockRow
from unikv.cached_page import CachedPage
from unikv.ids import GroupId
from unikv.page_cache import PageCacheManager


@dataclass(slots=True)
class HeldPages:
    """What a suspended request holds.

    Attributes:
        pages: live pages by group and ordinal.
        pending: pages that left the window and wait to be published.
    """

    cache: PageCacheManager
    pages: dict[GroupId, dict[int, CachedPage]]
    pending: dict[GroupId, dict[int, CachedPage]]

    @classmethod
    def of(cls, cache: PageCacheManager, rows: Mapping[GroupId, BlockRow]) -> HeldPages:
        """Hold the pages of `rows` and take the request's own references away; the rows must be emptied next."""
        held = cls(cache, {}, {})
        for group_id, row in rows.items():
            live, waiting = dict(row.pages()), dict(row.pending)
            held.pages[group_id] = {ordinal: held._hold(row, ordinal, slot) for ordinal, slot in live.items()}
            held.pending[group_id] = {ordinal: held._hold(row, ordinal, slot) for ordinal, slot in waiting.items()}
            row.pending.clear()
            cache.release(row.group.pool_group, [*live.values(), *waiting.values()])
        return held

    def take(self, rows: Mapping[GroupId, BlockRow], thing: str) -> None:
        """Bring every page back into `rows`.

        Raises:
            CapacityError: not enough pages on the device; nothing was changed.
        """
        self.cache.lock(self.held_pages(), (), thing=thing)
        for group_id, row in rows.items():
            live, waiting = self.pages.get(group_id, {}), self.pending.get(group_id, {})
            row.fill(row.slots.shape[0], row.stale, ((ordinal, page.slot) for ordinal, page in live.items()))
            row.pending = {ordinal: page.slot for ordinal, page in waiting.items()}
        self.drop()

    def drop(self) -> None:
        """Let go of every page, last block first."""
        pages = self.held_pages()
        self.pages, self.pending = {}, {}
        for page in reversed(pages):
            self.cache.unhold(page)

    def page(self, group_id: GroupId, ordinal: int) -> CachedPage | None:
        """Return the page of a block, also of one that waits to be published."""
        waiting = self.pending.get(group_id, {}).get(ordinal)
        return waiting or self.pages.get(group_id, {}).get(ordinal)

    def held_pages(self) -> list[CachedPage]:
        """Return every held page."""
        return [page for held in (self.pages, self.pending) for pages in held.values() for page in pages.values()]

    def _hold(self, row: BlockRow, ordinal: int, slot: int) -> CachedPage:
        group = row.group
        page = self.cache.page_at(group.pool_group, slot)
        if page is None:
            span = self.cache.layout.tokens_per_block
            page = self.cache.cache(
                CachedPage(group_id=group.group_id, pool_group=group.pool_group, slot=slot, ordinal=ordinal, span=span)
            )
        self.cache.hold(page)
        return page
