"""Who gets slots and who gives way: all groups of a step together or none, idle pages by priority and age."""

import pytest

from unikv.cached_page import CachedPage
from unikv.errors import CapacityError, InternalError
from unikv.ids import NO_PAGE, GroupId
from unikv.layer_spec import ReusePolicy
from unikv.layout import build_layout
from unikv.page_cache import PageCacheManager
from unikv.prefix_tree import EVERYBODY, TOKEN_BYTES, token_bytes
from unikv.slots import GroupChange

TPB = 4


class Ledger:
    """A host tier without bytes: knows which page number lies in which slot, on the device and on the host."""

    def __init__(self, pages):
        self.pages = pages
        self.device, self.host = {}, {}
        self.calls = []

    def num_slots(self, pool_group):
        return self.pages[pool_group]

    def store(self, moves):
        self.calls.append("store")
        for group_id, copies in moves.items():
            for move in copies:
                assert 0 <= move.target < self.pages[group_id]
                self.host[group_id, move.target] = self.device[group_id, move.source]

    def load(self, moves):
        self.calls.append("load")
        for group_id, copies in moves.items():
            for move in copies:
                self.device[group_id, move.target] = self.host[group_id, move.source]


class Shelf:
    """A page cache, and a way to put published pages into it. Group ``i`` has pool group ``i``."""

    def __init__(self, make_layer, *fields, slots=9, host=None):
        specs = [make_layer(i, heads=1 + i, **each) for i, each in enumerate(fields or [{}])]
        self.layout = build_layout(specs, tokens_per_block=TPB, max_seq_len=1024)
        assert [group.pool_group for group in self.layout.groups] == list(range(len(specs)))
        self.tier = None if host is None else Ledger(host)
        counts = [slots] * len(specs) if isinstance(slots, int) else slots
        self.cache = PageCacheManager(self.layout, counts, self.tier)
        self.holders, self.locks = {}, {}

    def publish(self, tokens, group_ids=(0,), **fields):
        """Publish the blocks of a sequence with one page per group; return the pages of its last block."""
        keys, node, pages = token_bytes(tokens), self.cache.tree.root(EVERYBODY), []
        for start in range(0, len(keys), TPB * TOKEN_BYTES):
            node, _ = self.cache.tree.insert(node, keys[start:][: TPB * TOKEN_BYTES])
            if all(node.pages[group_id] is not None for group_id in group_ids):
                continue
            pages = [self._publish_one(node, group_id, fields) for group_id in group_ids]
        self.check()
        return pages

    def _publish_one(self, node, group_id, fields):
        [[slot]] = self.cache.exchange([self.change(group_id, needed=1)], thing="request 1")
        page = CachedPage(
            group_id=GroupId(group_id), pool_group=group_id, slot=slot, ordinal=node.ordinal, span=TPB, **fields
        )
        if self.tier is not None:
            self.tier.device[group_id, slot] = page
        self.cache.publish(node, self.cache.cache(page))
        self.cache.release(group_id, [slot])
        return page

    def hold(self, page):
        self.cache.hold(page)
        self.holders[page] = self.holders.get(page, 0) + 1
        self.check()

    def unhold(self, page):
        self.holders[page] -= 1
        self.cache.unhold(page)
        self.check()

    def take(self, *needs):
        """Allocate pages per group, as the step of one request; remember them as locked."""
        changes = [self.change(group_id, needed=count) for group_id, count in enumerate(needs)]
        slots = self.cache.exchange(changes, thing="request 7")
        for group_id, taken in enumerate(slots):
            for slot in taken:
                self.lock(group_id, slot)
                if self.tier is not None:
                    self.tier.device[group_id, slot] = None
        self.check()
        return slots

    def lock(self, group_id, slot, times=1):
        self.locks[group_id, slot] = self.locks.get((group_id, slot), 0) + times

    def give_back(self, group_id, slots):
        for slot in slots:
            self.locks[group_id, slot] -= 1
        self.cache.release(group_id, slots)
        self.check()

    def change(self, group_id, *, dropped=(), kept=0, needed=0):
        return GroupChange(
            group_id=GroupId(group_id),
            pool_group=group_id,
            dropped=tuple(dropped),
            kept_pages=kept,
            needed_pages=needed,
        )

    def check(self):
        locks = {place: count for place, count in self.locks.items() if count}
        self.cache.check_integrity(locks, {page: count for page, count in self.holders.items() if count})
        if self.tier is not None:
            for node in self.cache.tree.nodes():
                for page in node.pages:
                    if page is not None and page.slot == NO_PAGE:
                        assert self.tier.host[page.group_id, page.cold - 1] is page
                    elif page is not None:
                        assert self.tier.device[page.group_id, page.slot] is page


@pytest.fixture
def shelf(make_layer):
    return lambda *fields, **kw: Shelf(make_layer, *fields, **kw)


OPTIONAL = {"reuse_policy": ReusePolicy.OPTIONAL}


# ---- steps


def test_a_step_hands_out_what_it_gives_back(shelf):
    each = shelf(slots=3)
    [old] = each.take(2)
    [new] = each.cache.exchange([each.change(0, dropped=old[:1], kept=1, needed=1)], thing="request 7")
    assert new == (1,)
    assert each.cache.allocators[0].num_free == 0


def test_a_step_does_not_count_on_slots_somebody_else_holds(shelf):
    each = shelf(slots=3)
    [old] = each.take(2)
    each.cache.allocators[0].retain(old)
    with pytest.raises(CapacityError, match="request 7, layer group 0: needs 1 pages of pool group 0, where 0 of 2"):
        each.cache.exchange([each.change(0, dropped=old[:1], kept=1, needed=1)], thing="request 7")
    assert each.cache.allocators[0].references(old[0]) == 2


def test_a_step_across_groups_is_all_or_nothing(shelf):
    each = shelf({}, {"window": 8}, slots=[9, 4])
    with pytest.raises(CapacityError, match="request 7, layer group 1: needs 4 of 3 pages of pool group 1"):
        each.take(2, 4)
    assert [allocator.num_free for allocator in each.cache.allocators] == [8, 3]
    assert each.take(2, 2) == [(1, 2), (1, 2)]


def test_groups_that_share_a_pool_are_counted_together(make_layer):
    layout = build_layout([make_layer(0), make_layer(1, window=8)], tokens_per_block=TPB, max_seq_len=64)
    assert layout.num_pool_groups == 1
    cache = PageCacheManager(layout, [4])
    changes = [
        GroupChange(group_id=GroupId(group), pool_group=0, kept_pages=0, dropped=(), needed_pages=2) for group in (0, 1)
    ]
    with pytest.raises(CapacityError, match="request 7, layer group 0, 1: needs 4 of 3 pages of pool group 0"):
        cache.exchange(changes, thing="request 7")
    assert cache.exchange(changes[:1], thing="request 7") == [(1, 2)]


def test_pages_kept_count_towards_what_can_never_fit(shelf):
    each = shelf()
    each.take(5)
    with pytest.raises(CapacityError, match="needs 9 of 8 pages") as caught:
        each.cache.exchange([each.change(0, kept=5, needed=4)], thing="request 7")
    assert (caught.value.needed_pages, caught.value.free_pages, caught.value.permanent) == (4, 3, True)


def test_a_failed_step_drops_nothing_and_keeps_the_order(shelf):
    each = shelf({}, {"window": 8}, slots=[4, 4])
    pages = [each.publish([n] * TPB, (0, 1), priority=priority)[0] for n, priority in enumerate([50, 20, 35])]
    each.take(0, 1)
    order = each.cache._warm_queues[0].in_order()
    assert order == [pages[1], pages[2], pages[0]]
    with pytest.raises(CapacityError):
        each.take(3, 3)
    assert each.cache._warm_queues[0].in_order() == order
    assert all(page.node is not None for page in pages)
    assert each.cache.statistics.dropped_pages == 1


def test_a_page_given_back_in_the_same_step_may_serve_it_even_if_it_is_published(shelf):
    each = shelf(slots=3)
    [page] = each.publish([1] * TPB)
    [other] = each.publish([2] * TPB)
    for locked in (page, other):
        each.cache.allocators[0].retain((locked.slot,))
        each.lock(0, locked.slot)
    each.check()
    slots = each.cache.exchange([each.change(0, dropped=[page.slot], kept=1, needed=1)], thing="request 7")
    assert slots == [(page.slot,)]
    assert (page.node, other.node is None) == (None, False)


# ---- who gives way


def test_pages_go_by_priority_and_age(shelf):
    each = shelf(slots=6)
    order = [35, 10, 70, 35, 10]
    pages = [each.publish([n] * TPB, priority=priority)[0] for n, priority in enumerate(order)]
    gone = []
    for _ in order:
        each.take(1)
        gone += [n for n, page in enumerate(pages) if page.node is None and n not in gone]
    assert gone == [1, 4, 0, 3, 2]
    with pytest.raises(CapacityError, match="where 0 of 5 are free"):
        each.take(1)


def test_a_page_that_was_used_again_goes_later(shelf):
    each = shelf(slots=4)
    first, second, third = (each.publish([n] * TPB)[0] for n in range(3))
    each.hold(first)
    each.unhold(first)
    each.take(1)
    assert [page.node is None for page in (first, second, third)] == [False, True, False]


def test_a_held_page_stays_where_there_is_no_host(shelf):
    each = shelf(slots=3)
    held, droppable = each.publish([1] * TPB, priority=0)[0], each.publish([2] * TPB)[0]
    each.hold(held)
    assert each.cache.available(0) == 1
    with pytest.raises(CapacityError, match="needs 2 pages of pool group 0, where 1 of 2 are free"):
        each.take(2)
    each.take(1)
    assert (held.node is None, droppable.node) == (False, None)
    each.unhold(held)
    assert each.cache.available(0) == 1


def test_a_locked_page_stays(shelf):
    each = shelf(slots=3)
    [page] = each.publish([1] * TPB)
    each.cache.allocators[0].retain((page.slot,))
    each.lock(0, page.slot)
    each.check()
    assert not each.cache.is_idle(page)
    assert each.cache.available(0) == 1
    each.give_back(0, (page.slot,))
    assert each.cache.is_idle(page)
    assert each.cache.available(0) == 2


def test_dropping_a_full_attention_page_frees_what_is_behind_it_in_all_groups(shelf):
    each = shelf({}, {"window": 8}, slots=[4, 9])
    each.publish(range(12), (0, 1))
    root_page = next(iter(each.cache.tree.nodes())).pages[0]
    each.cache.unlink(root_page)
    each.check()
    assert [allocator.num_free for allocator in each.cache.allocators] == [3, 8]


def test_dropping_a_window_or_optional_page_leaves_the_others(shelf):
    each = shelf({}, {"window": 8}, OPTIONAL)
    pages = each.publish(range(8), (0, 1, 2))
    node = pages[0].node
    for page in pages[1:]:
        each.cache.unlink(page)
        each.check()
    assert (node.attached, node.pages) == (True, [pages[0], None, None])
    each.cache.unlink(pages[1])
    assert node.attached, "it is in no node any more"


def test_blocks_that_are_left_without_pages_go_too(shelf):
    """Block 0 was published without a page (it was skipped); block 1 was all that kept it."""
    each = shelf()
    root = each.cache.tree.root(EVERYBODY)
    first, _ = each.cache.tree.insert(root, token_bytes([1] * TPB))
    second, _ = each.cache.tree.insert(first, token_bytes([2] * TPB))
    page = each._publish_one(second, 0, {})
    each.cache.unlink(page)
    assert list(each.cache.tree.nodes()) == []
    each.check()


def test_a_dropped_page_that_is_held_lives_on_for_its_holder(shelf):
    each = shelf()
    [page] = each.publish(range(4))
    each.hold(page)
    each.cache.unlink(page)
    each.check()
    assert (page.node, page.slot != NO_PAGE, each.cache.page_at(0, page.slot)) == (None, True, page)
    each.unhold(page)
    assert each.cache.allocators[0].num_free == 8


def test_a_better_page_takes_the_place_of_the_one_before(shelf):
    each = shelf()
    [old] = each.publish(range(4))
    node, slot = old.node, old.slot
    [[better]] = each.cache.exchange([each.change(0, needed=1)], thing="request 2")
    page = CachedPage(group_id=GroupId(0), pool_group=0, slot=better, ordinal=0, span=TPB)
    each.cache.publish(node, each.cache.cache(page))
    each.cache.release(0, [better])
    each.check()
    assert (node.pages[0], old.node, each.cache.page_at(0, slot)) == (page, None, None)


def test_clearing_leaves_held_pages_to_their_holders(shelf):
    each = shelf({}, {"window": 8})
    pages = each.publish(range(12), (0, 1))
    each.publish([9] * TPB, (0, 1))
    each.hold(pages[0])
    assert each.cache.clear() == 4
    each.check()
    assert [allocator.num_free for allocator in each.cache.allocators] == [7, 8]
    assert each.cache.clear() == 0
    each.unhold(pages[0])


def test_utilisation_counts_what_nobody_can_free(shelf):
    each = shelf(slots=11)
    each.publish(range(16))
    assert (each.cache.utilisation(0), each.cache.available(0)) == (0.0, 10)
    each.take(4)
    assert each.cache.utilisation(0) == pytest.approx(0.4)


# ---- the host


def test_pages_move_to_the_host_and_back(shelf):
    each = shelf(slots=3, host=[4])
    first, second = each.publish([1] * TPB)[0], each.publish([2] * TPB)[0]
    [taken] = each.take(2)
    assert (first.slot, second.slot) == (NO_PAGE, NO_PAGE)
    assert sorted([first.cold, second.cold]) == [1, 2]
    assert (each.cache.available(0), each.cache.statistics.stored_pages) == (0, 2)
    each.hold(first)
    with pytest.raises(CapacityError):
        each.cache.lock([first], (), thing="request 3")
    each.check()
    each.give_back(0, taken)
    each.cache.lock([first], (), thing="request 3")
    each.lock(0, first.slot)
    each.unhold(first)
    assert (first.cold, first.slot != NO_PAGE, each.cache.statistics.loaded_pages) == (NO_PAGE, True, 1)
    assert each.tier.device[0, first.slot] is first


def test_a_full_host_drops_what_goes_first_there(shelf):
    each = shelf(slots=3, host=[2])
    pages = [each.publish([n] * TPB)[0] for n in range(2)]
    each.give_back(0, each.take(2)[0])
    pages += [each.publish([n] * TPB)[0] for n in range(2, 4)]
    assert [page.slot == NO_PAGE for page in pages] == [True, True, False, False]
    each.give_back(0, each.take(2)[0])
    assert [page.node is None for page in pages] == [True, True, False, False]
    assert each.cache.statistics.dropped_pages == 2


def test_held_pages_may_fill_the_host_and_then_stay_on_the_device(shelf):
    each = shelf(slots=4, host=[1])
    pages = [each.publish([n] * TPB)[0] for n in range(3)]
    for page in pages[:2]:
        each.hold(page)
    assert each.cache.available(0) == 2, "one droppable, one that the host has room for"
    with pytest.raises(CapacityError, match="needs 3 pages of pool group 0, where 2 of 3 are free"):
        each.take(3)
    each.take(2)
    assert [page.slot == NO_PAGE for page in pages[:2]] == [True, False]
    assert pages[2].node is None, "dropped: the only place on the host went to a page that somebody wants"
    assert each.cache.available(0) == 0


def test_a_droppable_page_on_the_host_makes_room_for_a_held_one(shelf):
    each = shelf(slots=3, host=[1])
    [droppable] = each.publish([1] * TPB)
    each.give_back(0, each.take(2)[0])
    assert droppable.slot == NO_PAGE
    [held] = each.publish([2] * TPB)
    each.hold(held)
    each.take(2)
    assert (droppable.node, held.slot) == (None, NO_PAGE)


def test_making_room_in_one_group_leaves_pages_on_their_way_in_another(shelf):
    """Group 0's host is full: dropping its page takes the block, and group 1's page with it, off the tree."""
    each = shelf({}, {"window": 8}, slots=[3, 3], host=[1, 2])
    root, window = each.publish([1] * TPB, (0, 1))
    each.give_back(0, each.take(2, 0)[0])
    assert (root.slot, window.slot != NO_PAGE) == (NO_PAGE, True)
    other = each.publish([2] * TPB, (0, 1))
    each.hold(window)
    each.take(2, 2)
    assert (root.node, window.node, window.holders) == (None, None, 1)
    assert window.slot == NO_PAGE
    assert each.tier.host[1, window.cold - 1] is window
    assert other[0].slot == NO_PAGE
    each.unhold(window)


def test_a_page_that_is_dropped_by_making_room_for_it_on_the_host_is_gone(shelf):
    """The only place on the host has the block before it, without which it is of no use."""
    each = shelf(slots=3, host=[1])
    root = each.publish([1] * TPB)[0]
    leaf = each.publish([1] * TPB + [2] * TPB)[0]
    each.take(1)
    assert (root.slot, leaf.slot != NO_PAGE) == (NO_PAGE, True)
    each.take(1)
    assert (root.node, leaf.node, each.cache._cold[0].num_used) == (None, None, 0)


def test_a_group_without_host_pages_drops(shelf):
    each = shelf({}, {"window": 8}, slots=[3, 3], host=[0, 2])
    pages = each.publish([1] * TPB, (0, 1))
    each.take(2, 0)
    assert [page.node for page in pages] == [None, None]
    assert each.cache.statistics.stored_pages == 0


def test_a_page_on_the_host_lives_on_in_a_slot_with_its_content(shelf):
    each = shelf(slots=3, host=[2])
    [page] = each.publish([1] * TPB)
    [[slot, _]] = each.take(2)
    each.tier.device[0, slot] = page
    each.cache.warm_up(page, slot)
    each.check()
    assert (page.slot, page.cold, each.cache._cold[0].num_used) == (slot, NO_PAGE, 0)


def test_pages_the_caller_needs_do_not_make_room_for_each_other(shelf):
    """Three held pages, one of them on the host; with two slots they cannot all come back."""
    each = shelf(slots=3, host=[3])
    first = each.publish([1] * TPB)[0]
    each.hold(first)
    each.give_back(0, each.take(2)[0])
    pages = [first, *(each.publish([n] * TPB)[0] for n in (2, 3))]
    for page in pages[1:]:
        each.hold(page)
    with pytest.raises(CapacityError, match="request 3: needs 1 pages of pool group 0, where 0 of 2"):
        each.cache.lock(pages, (), thing="request 3")
    each.check()
    assert [page.slot == NO_PAGE for page in pages] == [True, False, False]


def test_pages_that_are_given_up_in_the_same_step_make_room_for_it(shelf):
    """Two slots and one place on the host, which a held page has: it can be given up for the held page of another."""
    each = shelf(slots=3, host=[1])
    cold = each.publish([1] * TPB)[0]
    each.hold(cold)
    each.give_back(0, each.take(2)[0])
    warm = each.publish([2] * TPB)[0]
    each.hold(warm)
    [[locked]] = each.take(1)
    assert (cold.slot, each.cache.available(0)) == (NO_PAGE, 0)
    want = [each.change(0, needed=1)]
    for given_up, free in (((), 0), ((cold,), 1), ((warm,), 1), ((cold, warm), 1)):
        assert each.cache.available(0, given_up) == free
    each.hold(cold)
    with pytest.raises(CapacityError, match="needs 1 pages of pool group 0, where 0 of 2 are free"):
        each.cache.lock([], want, thing="request 3", given_up=[cold])
    each.unhold(cold)
    assert cold.holders == warm.holders == 1
    [[slot]] = each.cache.lock([], want, thing="request 3", given_up=[cold])
    each.holders[cold] = 0
    each.lock(0, slot)
    each.check()
    assert (cold.node, warm.slot, slot != locked) == (None, NO_PAGE, True)


def test_a_page_somebody_runs_with_makes_no_room_when_it_is_given_up(shelf):
    each = shelf(slots=3)
    [page] = each.publish([1] * TPB)
    each.hold(page)
    each.cache.allocators[0].retain((page.slot,))
    each.lock(0, page.slot)
    each.take(1)
    assert each.cache.available(0, [page]) == 0
    with pytest.raises(CapacityError):
        each.cache.lock([], [each.change(0, needed=1)], thing="request 3", given_up=[page])
    each.unhold(page)


# ---- laws


def test_a_slot_given_back_twice_is_found(shelf):
    each = shelf()
    [slots] = each.take(2)
    each.give_back(0, slots)
    with pytest.raises(InternalError, match=r"pool group 0, slot 1: references is '0 reference\(s\)'"):
        each.cache.release(0, slots)


def test_integrity_finds_a_holder_nobody_knows(shelf):
    each = shelf()
    [page] = each.publish(range(4))
    page.holders = 1
    with pytest.raises(InternalError, match="page of group 0, ordinal 0, slot 1, host slot -1: holders is 1, exp"):
        each.check()


def test_integrity_finds_an_idle_page_that_is_in_no_queue(shelf):
    each = shelf()
    [page] = each.publish(range(4))
    each.cache._warm_queues[0].discard(page)
    with pytest.raises(InternalError, match="in the queue of the device is False, expected True"):
        each.check()


def test_integrity_finds_a_page_nobody_wants(shelf):
    each = shelf()
    [page] = each.publish(range(4))
    page.node.take(GroupId(0))
    with pytest.raises(InternalError, match="host slot -1: wanted by anybody is False, expected True"):
        each.check()


def test_integrity_finds_a_host_slot_that_is_lost(shelf):
    each = shelf(slots=3, host=[2])
    each.publish([1] * TPB)
    each.take(2)
    each.cache._cold[0].allocate(1)
    with pytest.raises(InternalError, match="host pool 0: 2 slots used, 1 pages there"):
        each.check()
