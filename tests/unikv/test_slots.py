import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from unikv.errors import CapacityError, InternalError, SpecError
from unikv.slots import SlotAllocator


@pytest.mark.parametrize("num_slots", [-1, 0, 1])
def test_the_null_slot_alone_is_no_pool(num_slots):
    with pytest.raises(SpecError, match=rf"pool group 3: num_slots is {num_slots}, expected >= 2"):
        SlotAllocator(num_slots, name="pool group 3")


def test_empty_pool_has_all_slots_free_but_the_null_slot():
    allocator = SlotAllocator(5)
    assert (allocator.num_free, allocator.num_used) == (4, 0)
    assert allocator.allocate(4) == (1, 2, 3, 4)
    assert (allocator.num_free, allocator.num_used) == (0, 4)
    allocator.check_integrity()


def test_zero_slots_can_always_be_allocated():
    allocator = SlotAllocator(2)
    allocator.allocate(1)
    assert allocator.allocate(0) == ()


def test_a_shortage_takes_nothing_and_says_what_was_missing():
    allocator = SlotAllocator(9, name="pool group 2")
    allocator.allocate(5)
    with pytest.raises(CapacityError, match="needs 4 pages of pool group 2, where 3 of 8 are free; wait") as caught:
        allocator.allocate(4)
    assert (caught.value.needed_pages, caught.value.free_pages) == (4, 3)
    assert allocator.num_free == 3


def test_what_can_never_fit_is_said_at_once():
    with pytest.raises(CapacityError, match=r"needs 9 of 8 pages of pool group 0, so it can never fit; enlarge"):
        SlotAllocator(9).allocate(9)


def test_a_released_run_is_handed_out_as_a_run():
    allocator = SlotAllocator(12)
    first, second = allocator.allocate(3), allocator.allocate(4)
    allocator.release(second)
    allocator.release(first)
    assert allocator.allocate(4) == (4, 5, 6, 7)
    assert allocator.allocate(4) == (1, 2, 3, 8)


def test_a_run_goes_on_into_slots_never_used():
    allocator = SlotAllocator(12)
    slots = allocator.allocate(3)
    allocator.release(slots[1:])
    assert allocator.allocate(4) == (2, 3, 4, 5)


def test_the_slot_released_last_is_reused_last():
    allocator = SlotAllocator(6)
    allocator.allocate(5)
    for slot in (4, 2, 5, 1):
        allocator.release([slot])
    assert allocator.allocate(1) == (4,)
    assert allocator.allocate(1) == (2,)
    assert allocator.allocate(2) == (5, 1)


def test_a_slot_is_free_after_its_last_reference():
    allocator = SlotAllocator(4)
    slots = allocator.allocate(2)
    allocator.retain(slots)
    assert allocator.references(1) == 2
    assert allocator.freed_by(slots) == 0
    allocator.release(slots)
    assert allocator.num_free == 1
    assert allocator.freed_by(slots) == 2
    allocator.release(slots)
    assert allocator.num_free == 3
    allocator.check_integrity()


@pytest.mark.parametrize("slots", [[2], [1, 1], [3], [0], [-1], [99]])
def test_a_release_too_many_names_the_slot_and_changes_nothing(slots):
    allocator = SlotAllocator(4, name="pool group 1")
    allocator.allocate(2)
    allocator.release([2])
    with pytest.raises(InternalError, match=rf"pool group 1, slot {slots[0]}: references is '[01] reference\(s\)'"):
        allocator.release(slots)
    assert (allocator.num_free, allocator.references(1)) == (2, 1)
    allocator.check_integrity()


def test_a_free_slot_cannot_be_retained():
    allocator = SlotAllocator(4)
    allocator.allocate(1)
    with pytest.raises(InternalError, match=r"slot 2: references is .* before it is retained"):
        allocator.retain([1, 2])
    assert allocator.references(1) == 1


def test_a_release_can_be_undone_whether_or_not_it_freed_the_slot():
    allocator = SlotAllocator(4)
    slots = allocator.allocate(3)
    allocator.retain(slots[:1])
    allocator.release(slots)
    assert [allocator.references(slot) for slot in slots] == [1, 0, 0]
    allocator.reclaim(slots[:2])
    allocator.check_integrity()
    assert [allocator.references(slot) for slot in slots] == [2, 1, 0]
    assert allocator.allocate(1) == slots[2:]
    with pytest.raises(InternalError, match="slot 99"):
        allocator.reclaim([99])


def test_a_lost_slot_breaks_the_conservation_law_and_prints_its_terms():
    allocator = SlotAllocator(4)
    allocator.allocate(2)
    del allocator._references[2]
    with pytest.raises(InternalError, match="not conserved: free 1 \\+ used 1 \\+ null 1 == 4"):
        allocator.check_integrity()


def test_a_slot_in_two_places_is_found():
    allocator = SlotAllocator(5)
    allocator.allocate(3)
    del allocator._references[2]
    allocator._recycled[3] = None
    with pytest.raises(InternalError, match=r"slots \[3\] free and used"):
        allocator.check_integrity()


def test_the_keeper_hears_when_it_is_alone_with_a_slot_and_when_no_longer():
    heard = []
    allocator = SlotAllocator(4, on_change=lambda slot: heard.append((slot, allocator.references(slot))))
    first, second = allocator.allocate(2)
    allocator.keep(first)
    assert heard == []
    allocator.release([first, second])
    assert heard == [(first, 1)], "nobody keeps the other one: it is free"
    allocator.retain([first])
    allocator.retain([first])
    allocator.release([first])
    assert heard == [(first, 1), (first, 2)]
    allocator.unkeep(first)
    allocator.release([first])
    assert heard == [(first, 1), (first, 2)]
    assert allocator.num_free == 3


def test_a_slot_has_one_keeper():
    allocator = SlotAllocator(4)
    [slot] = allocator.allocate(1)
    allocator.keep(slot)
    with pytest.raises(InternalError, match="slot 1: keepers is 1, expected none before it is kept"):
        allocator.keep(slot)
    assert allocator.references(slot) == 2


@given(st.integers(2, 40), st.lists(st.integers(0, 12), max_size=12))
def test_fresh_slots_ascend_without_gaps(num_slots, counts):
    allocator = SlotAllocator(num_slots)
    taken = []
    for count in counts:
        if count <= allocator.num_free:
            taken.extend(allocator.allocate(count))
    assert taken == list(range(1, len(taken) + 1))


class SlotsMachine(RuleBasedStateMachine):
    """The allocator against a dictionary of reference counts."""

    @initialize(num_slots=st.integers(2, 12))
    def start(self, num_slots):
        self.allocator = SlotAllocator(num_slots)
        self.model = {}

    @rule(count=st.integers(0, 6))
    def allocate(self, count):
        free = self.allocator.num_slots - 1 - len(self.model)
        if count > free:
            with pytest.raises(CapacityError):
                self.allocator.allocate(count)
            return
        slots = self.allocator.allocate(count)
        assert len(set(slots)) == count
        assert not self.model.keys() & set(slots)
        assert all(0 < slot < self.allocator.num_slots for slot in slots)
        self.model.update(dict.fromkeys(slots, 1))

    @precondition(lambda self: self.model)
    @rule(data=st.data())
    def retain(self, data):
        slots = data.draw(st.lists(st.sampled_from(sorted(self.model)), max_size=4))
        self.allocator.retain(slots)
        for slot in slots:
            self.model[slot] += 1

    @rule(slots=st.lists(st.integers(0, 12), max_size=4))
    def release(self, slots):
        if any(self.model.get(slot, 0) < slots.count(slot) for slot in slots):
            with pytest.raises(InternalError):
                self.allocator.release(slots)
            return
        freed = self.allocator.freed_by(slots)
        before = self.allocator.num_free
        self.allocator.release(slots)
        assert self.allocator.num_free == before + freed
        for slot in slots:
            self.model[slot] -= 1
        self.model = {slot: count for slot, count in self.model.items() if count}

    @invariant()
    def agrees(self):
        if hasattr(self, "allocator"):
            self.allocator.check_integrity()
            assert self.allocator.num_used == len(self.model)
            assert all(self.allocator.references(slot) == count for slot, count in self.model.items())


TestSlotsMachine = SlotsMachine.TestCase
