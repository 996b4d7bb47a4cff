"""All pages of one manager: who gets them, which outlive their requests, and which go when others are needed.

A device slot is free, or somebody refers to it::

    running requests, pins   one reference each: the page is LOCKED, it stays where it is
    a `CachedPage`           one reference: alone, the page is idle
        with holders         HELD: a suspended request or a claim wants it back; may move to the host
        with a node only     DROPPABLE: may move to the host, or be dropped

Idle pages give way when slots are needed, by priority and age. What a request needs is checked for all pool groups
before anything moves, so that a step happens whole or not at all.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from functools import partial

from unikv.cached_page import CachedPage
from unikv.errors import CapacityError, InternalError
from unikv.eviction import EvictionQueueManager
from unikv.ids import NO_PAGE, GroupId, SlotId
from unikv.layer_spec import ReusePolicy
from unikv.layout import CacheLayout
from unikv.page_audit import check_cold_slots, check_page, check_slots_referred
from unikv.page_moves import PageMove
from unikv.page_tiers import CacheStatistics, ColdTier
from unikv.prefix_tree import PrefixNode, PrefixTreeManager
from unikv.slots import GroupChange, SlotAllocator, shortage


class PageCacheManager:
    """Slots of all pool groups, cached pages, and the prefix tree they hang in.

    Attributes:
        allocators: device slots, one allocator per pool group.
        tree: the prefix tree.
        statistics: counters since the start.
    """

    def __init__(self, layout: CacheLayout, slots: Sequence[int], tier: ColdTier | None = None) -> None:
        """Start empty.

        Args:
            layout: layer groups and pool groups.
            slots: device slots per pool group, null slots included.
            tier: where idle pages may go instead of being dropped.
        """
        self.layout = layout
        self.allocators = tuple(
            SlotAllocator(n, name=f"pool group {i}", on_change=partial(self._on_change, i)) for i, n in enumerate(slots)
        )
        self.tree = PrefixTreeManager(len(layout.groups), layout.tokens_per_block)
        self.statistics = CacheStatistics()
        self._tier = tier
        # Allocators have a null slot; the tier's slot is one less.
        cold = [0 if tier is None else tier.num_slots(i) for i in range(len(slots))]
        self._cold = tuple(SlotAllocator(n + 1, name=f"host pool {i}") if n else None for i, n in enumerate(cold))
        self._warm_queues = tuple(EvictionQueueManager() for _ in slots)
        self._cold_queues = tuple(EvictionQueueManager() for _ in slots)
        self._pages: dict[tuple[int, int], CachedPage] = {}

    # ---- what there is

    def available(self, pool_group: int, given_up: Sequence[CachedPage] = ()) -> int:
        """Return the pages requests can get: free ones and idle ones that can leave, without a holder of `given_up`."""
        return self.allocators[pool_group].num_free + self._evictable(pool_group, given_up=given_up)

    def utilisation(self, pool_group: int, given_up: Sequence[CachedPage] = ()) -> float:
        """Return the share of pages that nothing can free, from 0.0 to 1.0, were a holder of `given_up` to let go."""
        exist = self.allocators[pool_group].num_slots - 1
        return 1.0 - self.available(pool_group, given_up) / exist

    def page_at(self, pool_group: int, slot: int) -> CachedPage | None:
        """Return the cached page in a device slot."""
        return self._pages.get((pool_group, slot))

    def is_idle(self, page: CachedPage) -> bool:
        """Return whether nobody holds the page or runs with it, on the device or on the host."""
        queues = (self._warm_queues[page.pool_group], self._cold_queues[page.pool_group])
        return not page.holders and any(page in queue for queue in queues)

    # ---- cached pages

    def cache(self, page: CachedPage) -> CachedPage:
        """Take one reference to the slot of a new page; the caller keeps its own, and must hold or publish it next."""
        self.allocators[page.pool_group].keep(page.slot)
        self._pages[page.pool_group, page.slot] = page
        return page

    def hold(self, page: CachedPage) -> None:
        """Add a holder."""
        page.holders += 1
        self.settle(page)

    def unhold(self, page: CachedPage) -> None:
        """Take a holder away; a page in no node then is forgotten."""
        page.holders -= 1
        self.settle(page)

    def settle(self, page: CachedPage) -> None:
        """Put a page where its references say it belongs: a queue, none, or nowhere any more."""
        pool_group = page.pool_group
        self._warm_queues[pool_group].discard(page)
        self._cold_queues[pool_group].discard(page)
        if page.node is None and not page.holders:
            self._forget(page)
        elif page.slot == NO_PAGE:
            if not page.holders:
                self._cold_queues[pool_group].add(page)
        elif self.allocators[pool_group].references(page.slot) == 1:
            self._warm_queues[pool_group].add(page)

    def publish(self, node: PrefixNode, page: CachedPage) -> None:
        """Put a page into a node; one that it replaces leaves."""
        old = node.take(page.group_id)
        node.put(page)
        self.settle(page)
        if old is not None:
            self.settle(old)

    def warm_up(self, page: CachedPage, slot: int) -> None:
        """Let a page on the host live on in a device slot that has the same content; the caller keeps its reference."""
        self._free_cold(page)
        page.slot = slot
        self.cache(page)
        self.settle(page)

    def unlink(self, page: CachedPage) -> None:
        """Take a page out of its node, and out of the tree whatever is useless without it.

        Without a full-attention page or a sink no prefix behind it can match; a window's page is missed only where
        the window reaches it; optional groups never decide.
        """
        node = page.node
        if node is None:
            return
        group = self.layout.groups[page.group_id]
        decides = group.reuse_policy is ReusePolicy.REQUIRED
        if decides and (group.window is None or node.ordinal < group.sink_blocks):
            parent = node.parent
            for gone in self.tree.detach(node):
                self._strip(gone)
            if parent is not None:
                self.tree.prune(parent)
        else:
            node.take(page.group_id)
            self.tree.prune(node)
            self.settle(page)

    def replace_partial(self, old: PrefixNode, new: PrefixNode) -> None:
        """Give `new`, which covers `old`, the pages of `old` where it has none; `old` is out of the tree already."""
        for group in self.layout.groups:
            page = old.take(group.group_id)
            if page is not None:
                if new.page(group.group_id) is None:
                    new.put(page)
                self.settle(page)

    def clear(self) -> int:
        """Forget every published page that nobody holds or runs with; return how many nodes went."""
        nodes = list(self.tree.nodes())
        for node in nodes:
            if node.attached:
                for gone in self.tree.detach(node):
                    self._strip(gone)
        return len(nodes)

    # ---- slots

    def exchange(self, changes: Sequence[GroupChange], *, thing: str) -> list[tuple[SlotId, ...]]:
        """Release what `changes` give back and allocate what they want, for all groups together or for none.

        Slots given back in the same step count as free, unless somebody else still refers to them.

        Args:
            changes: at most one per layer group.
            thing: whose step it is, for messages ("request 7").

        Returns:
            The new slots of each change, in the order of `changes`.

        Raises:
            CapacityError: some pool group cannot serve the step; nothing was released or taken. Nor was it where a copy
                to the host failed, whose error passes through; pages nobody held may have been dropped by then.
        """
        needed = self._check_room(changes, thing)
        for change in changes:
            if change.dropped:
                self.release(change.pool_group, change.dropped)
        try:
            self._make_room(needed)
        except BaseException:
            for change in changes:
                self.allocators[change.pool_group].reclaim(change.dropped)
            raise
        self.statistics.fresh_pages += sum(needed.values())
        return [self.allocators[change.pool_group].allocate(change.needed_pages) for change in changes]

    def release(self, pool_group: int, slots: Sequence[int]) -> None:
        """Take one reference from each slot, given in the order of their ordinals.

        Slots nobody caches go back in that order, as the run they are; cached ones last block first, so that the end
        of a sequence is evicted before its beginning.
        """
        cached = [slot for slot in slots if (pool_group, slot) in self._pages]
        allocator = self.allocators[pool_group]
        allocator.release([slot for slot in slots if (pool_group, slot) not in self._pages] if cached else slots)
        for slot in reversed(cached):
            allocator.release((slot,))

    def lock(
        self,
        pages: Sequence[CachedPage],
        changes: Sequence[GroupChange],
        *,
        thing: str,
        given_up: Sequence[CachedPage] = (),
    ) -> list[tuple[SlotId, ...]]:
        """Bring `pages` to the device with one reference each for the caller, and allocate fresh slots beside them.

        Args:
            pages: held by the caller; from then on their `slot` stays.
            changes: fresh slots that are wanted; they give nothing back.
            thing: whose step it is, for messages.
            given_up: pages the caller holds and lets go of with this step, in that order; they may serve it.

        Returns:
            The fresh slots of each change.

        Raises:
            CapacityError: not enough pages; nothing was changed. A copy to or from the host may fail too, and its
                error passes through: then nothing was locked or taken, only `given_up` was let go of.
        """
        cold = Counter(page.pool_group for page in pages if page.slot == NO_PAGE)
        own = Counter(page.pool_group for page in pages if page in self._warm_queues[page.pool_group])
        needed = self._check_room(changes, thing, cold, own, given_up)
        here = [page for page in pages if page.slot != NO_PAGE]
        for page in here:
            self.allocators[page.pool_group].retain((page.slot,))
        for page in given_up:
            self.unhold(page)
        try:
            self._make_room(needed)
            self._load([page for page in pages if page.slot == NO_PAGE])
        except BaseException:
            for page in here:
                self.allocators[page.pool_group].release((page.slot,))
            raise
        fresh = sum(change.needed_pages for change in changes)
        self.statistics.fresh_pages += fresh
        return [self.allocators[change.pool_group].allocate(change.needed_pages) for change in changes]

    def check_integrity(self, referred: Mapping[tuple[int, int], int], holders: Mapping[CachedPage, int]) -> None:
        """Check every law of slots, pages and nodes.

        Args:
            referred: references that requests and pins have to (pool group, slot).
            holders: how often requests hold each page.

        Raises:
            InternalError: one is broken; the text prints the terms.
        """
        check_slots_referred(self.allocators, self._pages, referred)
        in_tree = {page for node in self.tree.nodes() for page in node.pages if page is not None}
        wanted = in_tree | set(holders)
        known = set(self._pages.values()) | {page for page in wanted if page.slot == NO_PAGE}
        for page in known | wanted:
            idle = page.slot != NO_PAGE and self.allocators[page.pool_group].references(page.slot) == 1
            check_page(
                page,
                {
                    "holders": (page.holders, holders.get(page, 0)),
                    "in the tree": (page.node is not None, page in in_tree),
                    "cached": (page in known, True),
                    "wanted by anybody": (bool(page.holders or page.node), True),
                    "in the queue of the device": (page in self._warm_queues[page.pool_group], idle),
                    "in the queue of the host": (
                        page in self._cold_queues[page.pool_group],
                        page.slot == NO_PAGE and not page.holders,
                    ),
                    "places": ((page.slot != NO_PAGE) + (page.cold != NO_PAGE), 1),
                },
            )
        for pool_group, cold in enumerate(self._cold):
            if cold is not None:
                check_cold_slots(pool_group, cold, known)

    # ---- inside

    def _check_room(
        self,
        changes: Sequence[GroupChange],
        thing: str,
        cold: Mapping[int, int] | None = None,
        own: Mapping[int, int] | None = None,
        given_up: Sequence[CachedPage] = (),
    ) -> dict[int, int]:
        """Return the slots needed per pool group; CapacityError if they are not to be had.

        Args:
            changes: what the step wants and gives back.
            thing: whose step it is.
            cold: further slots needed per pool group, for pages on the host.
            own: idle held pages per pool group that must not make room, since the step needs them.
            given_up: pages that lose a holder with the step.
        """
        needed: dict[int, int] = dict(cold or {})
        for change in changes:
            needed[change.pool_group] = needed.get(change.pool_group, 0) + change.needed_pages
        short: list[CapacityError] = []
        for pool_group, wanted in needed.items():
            allocator = self.allocators[pool_group]
            if wanted <= allocator.num_free:
                continue
            here = [change for change in changes if change.pool_group == pool_group]
            free = allocator.num_free + self._evictable(pool_group, (own or {}).get(pool_group, 0), given_up)
            free += self._gained(pool_group, [slot for change in here for slot in change.dropped])
            if wanted > free:
                groups = ", ".join(str(change.group_id) for change in here if change.needed_pages)
                total = wanted + sum(change.kept_pages for change in here)
                who = f"{thing}, layer group {groups}" if groups else thing
                short.append(shortage(allocator, who, total, wanted, free))
        if short:  # waiting for one pool group is in vain where another can never serve the step
            raise next((error for error in short if error.permanent), short[0])
        return needed

    def _gained(self, pool_group: int, dropped: Iterable[int]) -> int:
        """Return how many pages become free or evictable when `dropped` slots lose a reference each."""
        gained, allocator = 0, self.allocators[pool_group]
        for slot, times in Counter(dropped).items():
            page = self._pages.get((pool_group, slot))
            left = allocator.references(slot) - times
            gained += left == 0 or (left == 1 and page is not None and not page.holders)
        return gained

    def _evictable(self, pool_group: int, own: int = 0, given_up: Sequence[CachedPage] = ()) -> int:
        queue = self._warm_queues[pool_group]
        last = [page for page in given_up if page.pool_group == pool_group and page.holders == 1]
        here, there = sum(page in queue for page in last), sum(page.slot == NO_PAGE for page in last)
        return queue.num_droppable + here + min(queue.num_held - here - own, self._cold_room(pool_group) + there)

    def _cold_room(self, pool_group: int) -> int:
        cold = self._cold[pool_group]
        return 0 if cold is None else cold.num_free + len(self._cold_queues[pool_group])

    def _make_room(self, needed: Mapping[int, int]) -> None:
        """Evict until the allocators have what was found to be possible; where a copy fails, no page has moved."""
        stores: dict[tuple[int, int], tuple[CachedPage, int]] = {}
        for pool_group, wanted in needed.items():
            allocator, queue = self.allocators[pool_group], self._warm_queues[pool_group]
            while allocator.num_free < wanted:
                page = queue.first(held=self._cold_room(pool_group) > 0)
                if page is None:
                    raise InternalError(
                        f"{allocator.name}: {wanted} pages were promised, {allocator.num_free} are free"
                    )
                self._evict(page, stores)
        moves: dict[GroupId, list[PageMove]] = defaultdict(list)
        for (_, target), (page, source) in stores.items():
            moves[page.group_id].append(PageMove(source, target - 1))
        if moves and self._tier is not None:
            try:
                self._tier.store(moves)
            except BaseException:
                self._take_back(stores)
                raise
            self.statistics.stored_pages += len(stores)

    def _take_back(self, stores: Mapping[tuple[int, int], tuple[CachedPage, int]]) -> None:
        """Let pages live on in the slots that they were to leave."""
        for (pool_group, target), (page, slot) in stores.items():
            if page.cold == target:  # else making room dropped it
                self.allocators[pool_group].reclaim((slot,))
                self.warm_up(page, slot)
                self.release(pool_group, (slot,))

    def _evict(self, page: CachedPage, stores: dict[tuple[int, int], tuple[CachedPage, int]]) -> None:
        """Move a page to the host, or drop it where there is no room."""
        pool_group = page.pool_group
        target = self._cold_slot(pool_group)
        if page not in self._warm_queues[pool_group]:  # making room dropped it too
            if target is not None:
                self._cold_of(pool_group).release((target,))
        elif target is None:
            self.statistics.dropped_pages += 1
            self.unlink(page)
        else:
            stores[pool_group, target] = (page, page.slot)
            slot, page.slot, page.cold = page.slot, NO_PAGE, target
            del self._pages[pool_group, slot]
            self.allocators[pool_group].unkeep(slot)
            self.settle(page)

    def _cold_slot(self, pool_group: int) -> SlotId | None:
        """Return a host slot, dropping what goes first there; None if there is no room."""
        cold, queue = self._cold[pool_group], self._cold_queues[pool_group]
        if cold is None or not self._cold_room(pool_group):
            return None
        while not cold.num_free:
            victim = queue.first(held=False)
            assert victim is not None, "room was counted"
            self.statistics.dropped_pages += 1
            self.unlink(victim)
        return cold.allocate(1)[0]

    def _load(self, pages: Sequence[CachedPage]) -> None:
        moves: dict[GroupId, list[PageMove]] = defaultdict(list)
        for page in pages:
            allocator = self.allocators[page.pool_group]
            [slot] = allocator.allocate(1)  # the caller's reference
            moves[page.group_id].append(PageMove(page.cold - 1, slot))
        try:
            if moves and self._tier is not None:
                self._tier.load(moves)
        except BaseException:
            for group_id, group_moves in moves.items():
                self.release(self.layout.groups[group_id].pool_group, [move.target for move in group_moves])
            raise
        targets = {group_id: iter(group_moves) for group_id, group_moves in moves.items()}
        for page in pages:
            self.warm_up(page, next(targets[page.group_id]).target)
        self.statistics.loaded_pages += len(pages)

    def _strip(self, node: PrefixNode) -> None:
        for group in self.layout.groups:
            page = node.take(group.group_id)
            if page is not None:
                self.settle(page)

    def _forget(self, page: CachedPage) -> None:
        if page.slot != NO_PAGE:
            del self._pages[page.pool_group, page.slot]
            self.allocators[page.pool_group].unkeep(page.slot)
        else:
            self._free_cold(page)

    def _free_cold(self, page: CachedPage) -> None:
        self._cold_of(page.pool_group).release((page.cold,))
        self._cold_queues[page.pool_group].discard(page)
        page.cold = NO_PAGE

    def _cold_of(self, pool_group: int) -> SlotAllocator:
        cold = self._cold[pool_group]
        assert cold is not None, "a page is on the host only where there is a host tier"
        return cold

    def _on_change(self, pool_group: int, slot: int) -> None:
        self.settle(self._pages[pool_group, slot])
