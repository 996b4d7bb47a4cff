"""A promise to drop the window pages at the end of a conversation, kept when nobody else promised to need them."""

from __future__ import annotations

from unikv.cached_page import CachedPage
from unikv.errors import LocalProtocolError, explain
from unikv.page_cache import PageCacheManager
from unikv.prefix_match import live_ordinals
from unikv.prefix_tree import PrefixNode
from unikv.request_publish import PrefixPublisher


class PlannedDrop:
    """Names the windowed pages that a match at the end of the committed tokens needs. Use it once.

    Full-attention pages and sinks are not among them: every longer and every shorter match needs them too.
    """

    def __init__(self, cache: PageCacheManager, publisher: PrefixPublisher) -> None:
        """Take the pages of the end of what `publisher` published."""
        self._cache = cache
        self._pages: list[CachedPage] | None = list(_endpoint_pages(cache, publisher))
        for page in self._pages:
            page.plans += 1

    def drop(self) -> int:
        """Drop every page that no other plan names and nobody uses; return how many were dropped.

        Raises:
            LocalProtocolError: called a second time.
        """
        if self._pages is None:
            raise LocalProtocolError(explain("planned drop", "drop()", "a second call", "one call", "plan again"))
        pages, self._pages = self._pages, None
        dropped = 0
        for page in pages:
            page.plans -= 1
            if not page.plans and page.node is not None and self._cache.is_idle(page):
                self._cache.unlink(page)
                dropped += 1
        return dropped


def _endpoint_pages(cache: PageCacheManager, publisher: PrefixPublisher) -> list[CachedPage]:
    nodes: list[PrefixNode] = [*publisher.nodes, *([publisher.tail] if publisher.tail is not None else [])]
    length = sum(node.num_tokens for node in nodes)
    pages = [
        nodes[ordinal].page(group.group_id)
        for group in cache.layout.groups
        if group.window is not None
        for ordinal in live_ordinals(group, length, cache.layout.tokens_per_block)
        if ordinal >= group.sink_blocks
    ]
    return [page for page in pages if page is not None]
