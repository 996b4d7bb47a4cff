"""What one request publishes in the prefix tree: its tokens so far, and the page of every block that is final.

A commit cannot fail half-way: it allocates nothing. Full blocks go into the tree as they fill. The last, partial block
goes in when the request stops committing; its owner may go on writing behind the published span, since readers copy
such a page and use no more than the span.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

from unikv.block_rows import BlockRow
from unikv.cached_page import CachedPage
from unikv.ids import NO_PAGE, GroupId
from unikv.layer_spec import ReusePolicy
from unikv.page_cache import PageCacheManager
from unikv.prefix_match import PrefixMatch
from unikv.prefix_tree import TOKEN_BYTES, PrefixNode, ReuseScope
from unikv.request_hold import HeldPages

Priority = Callable[[int, GroupId], int]
"""Eviction priority of a page by block ordinal and layer group, 0 (goes first) to 100."""


class PrefixPublisher:
    """Publishes the blocks of one request.

    Attributes:
        committing: whether more tokens may come.
        nodes: the full blocks published or taken over so far, in order. A node may have left the tree meanwhile.
        tail: the partial block published at the end.
    """

    def __init__(
        self,
        cache: PageCacheManager,
        rows: Mapping[GroupId, BlockRow],
        scope: ReuseScope,
        priority: Priority,
        *,
        partial: bool,
    ) -> None:
        """Begin with no tokens; `rows` are the request's own."""
        self._cache = cache
        self._rows = [row for row in rows.values() if row.group.reuse_policy is not ReusePolicy.PRIVATE]
        self._scope = scope
        self._priority = priority
        self._partial = partial
        self._block_tokens = cache.layout.tokens_per_block
        self._tokens = bytearray()
        self._held: HeldPages | None = None
        self.committing = True
        self.nodes: list[PrefixNode] = []
        self.tail: PrefixNode | None = None

    @property
    def committed_tokens(self) -> int:
        """Tokens committed or taken over so far."""
        return len(self._tokens) // TOKEN_BYTES

    def take_over(self, match: PrefixMatch, tokens: bytes) -> None:
        """Begin with the tokens of a match."""
        self._tokens += tokens[: match.num_tokens * TOKEN_BYTES]
        self.nodes += match.nodes[: match.num_tokens // self._block_tokens]

    def append(self, tokens: bytes) -> None:
        """Add final tokens and publish every block they fill."""
        self._tokens += tokens
        self._publish_full()
        self._prune()
        self._drop_pending(len(self.nodes))

    def stop(self, held: HeldPages | None = None) -> None:
        """Publish the partial block at the end and let go of every page that waited to be published. Idempotent.

        Args:
            held: the pages of a suspended request, which are in no row; they stay its own.
        """
        if self.committing:
            self.committing, self._held = False, held
            self._publish_full()
            if self._partial:
                self._publish_tail()
            self._prune()
            self._drop_pending(None)
            self._held = None

    def holds_back(self, row: BlockRow, ordinals: Iterable[int], capacity_tokens: int) -> list[int]:
        """Return which of `ordinals`, about to leave the window, have a page that is still to be published.

        Not so a block that the capacity so far, `capacity_tokens`, does not cover: its end was never written. It is a
        block that a transfer has no reason to fill, since the window moves past it in the same step.
        """
        if not self.committing or row.group.reuse_policy is ReusePolicy.PRIVATE:
            return []
        published = len(self._tokens) // (TOKEN_BYTES * self._block_tokens)
        return [ordinal for ordinal in ordinals if published <= ordinal < capacity_tokens // self._block_tokens]

    def _publish_full(self) -> None:
        """Publish the full blocks that are not in the tree, those included that left it while we used them."""
        while self.nodes and not self.nodes[-1].attached:
            self.nodes.pop()
        step = self._block_tokens * TOKEN_BYTES
        for ordinal in range(len(self.nodes), len(self._tokens) // step):
            key = bytes(self._tokens[ordinal * step : (ordinal + 1) * step])
            node, replaced = self._cache.tree.insert(self._parent(), key)
            for row in self._rows:
                self._publish_page(node, row, self._block_tokens)
            if replaced is not None:
                self._cache.replace_partial(replaced, node)
            self.nodes.append(node)

    def _publish_tail(self) -> None:
        rest = bytes(self._tokens[len(self.nodes) * self._block_tokens * TOKEN_BYTES :])
        if not rest:
            return
        node, replaced = self._cache.tree.insert_partial(self._parent(), rest)
        for row in self._rows:
            self._publish_page(node, row, len(rest) // TOKEN_BYTES)
        if replaced is not None:
            self._cache.replace_partial(replaced, node)
        if node.key == rest:
            self.tail = node
            self._cache.tree.prune(node)

    def _prune(self) -> None:
        # A block may have found no page to publish: all are private, or left the window before they were committed.
        if self.nodes:
            self._cache.tree.prune(self.nodes[-1])

    def _parent(self) -> PrefixNode:
        return self.nodes[-1] if self.nodes else self._cache.tree.root(self._scope)

    def _publish_page(self, node: PrefixNode, row: BlockRow, span: int) -> None:
        """Give `node` our page, or take the one it has where that is as good."""
        slot = row.at(node.ordinal)
        held = None if self._held is None else self._held.page(row.group.group_id, node.ordinal)
        valid_from = row.valid_from(node.ordinal, self._block_tokens)
        if (slot == NO_PAGE and held is None) or valid_from >= span:
            return
        there = node.page(row.group.group_id)
        if there is not None and there.covers(valid_from, span):
            # Behind the span of a shorter one, its owner goes on writing. Who is suspended needs no page any more.
            if span == self._block_tokens and held is None:
                self._share(there, row, slot, valid_from)
        elif there is None or (valid_from <= there.valid_from and span >= there.span):
            page = held or self._cache.page_at(row.group.pool_group, slot) or self._cached(node, row, slot, span)
            self._put(node, page, valid_from, span)

    def _cached(self, node: PrefixNode, row: BlockRow, slot: int, span: int) -> CachedPage:
        group_id, pool_group = row.group.group_id, row.group.pool_group
        return self._cache.cache(
            CachedPage(group_id=group_id, pool_group=pool_group, slot=slot, ordinal=node.ordinal, span=span)
        )

    def _put(self, node: PrefixNode, page: CachedPage, valid_from: int, span: int) -> None:
        # In the tree already, it is this node's: a page has the tokens of one line of blocks, and that line one node
        # per block. Another request shares it and published it, but knew of less that was written.
        assert page.node is None or page.node is node, "a page serves one block"
        page.span, page.valid_from = span, valid_from
        page.priority = self._priority(node.ordinal, page.group_id)
        self._cache.publish(node, page)

    def _share(self, there: CachedPage, row: BlockRow, slot: int, valid_from: int) -> None:
        """Use the page of the tree instead of our own, which has no more than that, from `valid_from` on."""
        pool_group = row.group.pool_group
        if there.slot == NO_PAGE:
            if valid_from <= there.valid_from and self._cache.page_at(pool_group, slot) is None:
                self._cache.warm_up(there, slot)
        elif there.slot != slot:
            self._cache.allocators[pool_group].retain((there.slot,))
            row.put(there.ordinal, there.slot)
            self._cache.release(pool_group, (slot,))

    def _drop_pending(self, published: int | None) -> None:
        for row in self._rows:
            over = [ordinal for ordinal in row.pending if published is None or ordinal < published]
            if over:
                self._cache.release(row.group.pool_group, [row.pending.pop(ordinal) for ordinal in sorted(over)])
