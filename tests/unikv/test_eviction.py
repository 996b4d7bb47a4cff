"""Which page goes first, against a sorted list."""

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from unikv.cached_page import CachedPage
from unikv.eviction import EvictionQueueManager
from unikv.ids import GroupId


def page(slot, priority=35, holders=0):
    return CachedPage(
        group_id=GroupId(0), pool_group=0, slot=slot, ordinal=0, span=4, priority=priority, holders=holders
    )


def drain(queue, *, held=True):
    order = []
    while (first := queue.first(held=held)) is not None:
        order.append(first)
        queue.discard(first)
    return order


def test_an_empty_queue_has_nobody_to_send():
    queue = EvictionQueueManager()
    assert (len(queue), queue.num_droppable, queue.num_held) == (0, 0, 0)
    assert queue.first(held=True) is queue.first(held=False) is None
    assert queue.in_order() == []


def test_lower_priorities_go_first_and_the_longest_unused_among_them():
    queue = EvictionQueueManager()
    pages = [page(slot, priority) for slot, priority in enumerate([70, 10, 35, 10, 35, 70])]
    for each in pages:
        queue.add(each)
    assert [each.slot for each in queue.in_order()] == [1, 3, 2, 4, 0, 5]
    assert [each.slot for each in drain(queue)] == [1, 3, 2, 4, 0, 5]


def test_a_page_used_again_goes_last_among_its_equals():
    queue = EvictionQueueManager()
    first, second = page(1), page(2)
    queue.add(first)
    queue.add(second)
    queue.discard(first)
    queue.add(first)
    assert drain(queue) == [second, first]


def test_held_pages_count_only_where_they_can_go_somewhere():
    queue = EvictionQueueManager()
    held, droppable = page(1, 10, holders=1), page(2, 20)
    queue.add(held)
    queue.add(droppable)
    assert (queue.num_held, queue.num_droppable) == (1, 1)
    assert (queue.first(held=True), queue.first(held=False)) == (held, droppable)
    queue.discard(droppable)
    assert queue.first(held=False) is None
    assert held in queue


def test_age_decides_between_held_and_droppable_pages_of_one_priority():
    queue = EvictionQueueManager()
    pages = [page(slot, holders=slot % 2) for slot in range(4)]
    for each in pages:
        queue.add(each)
    assert drain(queue) == pages


def test_taking_out_what_is_not_in_changes_nothing():
    queue = EvictionQueueManager()
    queue.add(page(1))
    queue.discard(page(1))
    assert len(queue) == 1


class QueueMachine(RuleBasedStateMachine):
    """The queue against a list that is sorted whenever somebody looks."""

    @initialize()
    def start(self):
        self.queue = EvictionQueueManager()
        self.model = []  # (priority, age, page), held or not
        self.age = 0

    @rule(priority=st.sampled_from([0, 10, 35, 35, 100]), holders=st.integers(0, 1))
    def add(self, priority, holders):
        each = page(self.age, priority, holders)
        self.queue.add(each)
        self.model.append((priority, self.age, each))
        self.age += 1

    @precondition(lambda self: self.model)
    @rule(data=st.data())
    def discard(self, data):
        entry = data.draw(st.sampled_from(self.model))
        self.queue.discard(entry[2])
        self.model.remove(entry)

    @precondition(lambda self: self.model)
    @rule(data=st.data())
    def change_holders(self, data):
        """As a claim or its end does: out, and in again at the end of its line."""
        entry = data.draw(st.sampled_from(self.model))
        self.queue.discard(entry[2])
        self.model.remove(entry)
        entry[2].holders ^= 1
        self.queue.add(entry[2])
        self.model.append((entry[0], self.age, entry[2]))
        self.age += 1

    @invariant()
    def agrees(self):
        if not hasattr(self, "queue"):
            return
        order = [each for *_, each in sorted(self.model, key=lambda entry: entry[:2])]
        assert self.queue.in_order() == order
        droppable = [each for each in order if not each.holders]
        assert (self.queue.num_droppable, self.queue.num_held) == (len(droppable), len(order) - len(droppable))
        assert self.queue.first(held=True) is (order[0] if order else None)
        assert self.queue.first(held=False) is (droppable[0] if droppable else None)
        assert len(self.queue) == len(order)
        assert all(each in self.queue for each in order)


TestQueue = QueueMachine.TestCase


@pytest.mark.parametrize(
    ("valid_from", "span", "start", "end", "serves"),
    [(0, 4, 0, 4, True), (0, 3, 0, 4, False), (1, 4, 0, 4, False), (1, 3, 1, 3, True), (1, 3, 2, 2, True)],
)
def test_a_page_serves_what_lies_inside_it(valid_from, span, start, end, serves):
    each = page(1)
    each.valid_from, each.span = valid_from, span
    assert each.serves(start, end) == serves
    assert each.covers(start, end) == serves, "the same question about another page"
