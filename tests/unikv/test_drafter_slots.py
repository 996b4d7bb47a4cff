"""Slots of a drafter: the dummy is nobody's, seeds are of the batch at hand, nothing is lost."""

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from unikv.drafter_slots import DUMMY_SLOT, DrafterSlotManager, DraftRow
from unikv.errors import CapacityError, InternalError, SpecError


def row(key, tokens=10, extent=64):
    return DraftRow(key=key, num_tokens=tokens, extent_tokens=extent)


def test_padding_rows_get_the_dummy_slot():
    slots = DrafterSlotManager(4)
    batch = slots.assign([7, None, 8], [row("a"), None, row("b")])
    assert batch.slots[1] == DUMMY_SLOT and DUMMY_SLOT not in batch.slots[[0, 2]]
    assert batch.context_tokens.tolist() == [10, 0, 10] and batch.seeded.tolist() == [True, False, True]
    assert (batch.slots.dtype, batch.context_tokens.dtype) == (np.int32, np.int32)


def test_only_new_requests_are_seeded():
    slots = DrafterSlotManager(4)
    first = slots.assign([7], [row("a")])
    second = slots.assign([7, 8], [row("a", tokens=12), row("b")])
    assert second.slots[0] == first.slots[0] and second.seeded.tolist() == [False, True]


def test_a_reused_id_is_seeded_from_the_batch_at_hand():
    """The earlier request with this id had a longer context than the new one has pages."""
    slots = DrafterSlotManager(4)
    slots.assign([0], [row("first", tokens=79, extent=96)])
    again = slots.assign([0], [row("second", tokens=31, extent=24)])
    assert again.seeded.tolist() == [True] and again.context_tokens.tolist() == [24]


def test_warm_up_seeds_every_row_since_its_ids_repeat():
    slots = DrafterSlotManager(4)
    for tokens in (79, 31, 24):
        batch = slots.assign([0, 1], [row("same", tokens, 24), row("same", tokens, 24)], warm_up=True)
        assert batch.seeded.all() and batch.context_tokens.tolist() == [24, 24]


def test_arrays_are_new_every_time():
    slots = DrafterSlotManager(4)
    first = slots.assign([7], [row("a")])
    held = first.slots.copy()
    slots.assign([8, 7], [row("b"), row("a")])
    assert (first.slots == held).all()


def test_too_many_requests_change_nothing():
    slots = DrafterSlotManager(3)
    slots.assign([1], [row("a")])
    with pytest.raises(CapacityError, match="2 new requests, where 1 of 2 are free"):
        slots.assign([2, 3], [row("b"), row("c")])
    assert slots.num_free == 1
    slots.release(1)
    assert slots.assign([2, 3], [row("b"), row("c")]).seeded.all()


def test_wrong_batches_are_refused():
    slots = DrafterSlotManager(3)
    for ids, rows in (([1], []), ([None], [row("a")]), ([1], [None])):
        with pytest.raises(SpecError, match="one row per id"):
            slots.assign(ids, rows)
    with pytest.raises(SpecError, match="num_slots is 1"):
        DrafterSlotManager(1)


def test_a_slot_in_two_places_is_found():
    slots = DrafterSlotManager(3)
    slots.assign([1], [row("a")])
    slots._free.append(slots._slots[1])
    with pytest.raises(InternalError, match="dummy, free"):
        slots.check_integrity()


class SlotMachine(RuleBasedStateMachine):
    def __init__(self):
        super().__init__()
        self.slots = DrafterSlotManager(5)
        self.model = {}
        self.held = {}

    @rule(ids=st.lists(st.integers(0, 7), unique=True, max_size=5), generation=st.integers(0, 2), warm_up=st.booleans())
    def assign(self, ids, generation, warm_up):
        rows = [row((i, generation)) for i in ids]
        if len(set(ids) - set(self.model)) > 4 - len(self.model):
            with pytest.raises(CapacityError):
                self.slots.assign(ids, rows)
            return
        batch = self.slots.assign(ids, rows, warm_up=warm_up)
        for request_id, slot, seeded in zip(ids, batch.slots.tolist(), batch.seeded.tolist(), strict=True):
            assert slot != DUMMY_SLOT and self.held.setdefault(request_id, slot) == slot
            assert seeded == (warm_up or self.model.get(request_id) != generation)
            self.model[request_id] = generation
        assert len(set(self.held.values())) == len(self.held)

    @rule(request_id=st.integers(0, 7))
    def release(self, request_id):
        self.slots.release(request_id)
        self.model.pop(request_id, None)
        self.held.pop(request_id, None)

    @invariant()
    def conserved(self):
        self.slots.check_integrity()
        assert self.slots.num_free == 4 - len(self.model)


TestSlotMachine = SlotMachine.TestCase
TestSlotMachine.settings = settings(max_examples=30, stateful_step_count=20)
