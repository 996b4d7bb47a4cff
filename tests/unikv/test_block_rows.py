"""The row that grows in place, against a list."""

import numpy as np
import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from unikv.block_rows import BlockRow
from unikv.ids import NO_PAGE, GroupId
from unikv.layer_spec import LayerOwner, ReusePolicy
from unikv.layout import GroupLayout
from unikv.page_table import plan_row
from unikv.ranges import Span, stale_blocks


def group(window=None, sinks=0):
    return GroupLayout(
        group_id=GroupId(0),
        pool_group=0,
        owner=LayerOwner.TARGET,
        window=window,
        sink_blocks=sinks,
        reuse_policy=ReusePolicy.REQUIRED,
        layer_ids=(),
        pools=(),
    )


@pytest.fixture
def row():
    return BlockRow(group())


NOTHING = Span(0, 0)


def grow(row, num_blocks, stale=NOTHING, first_slot=1):
    step = row.plan(num_blocks, stale)
    row.apply(step, range(first_slot, first_slot + len(step.added)))
    return step


def test_a_new_row_is_empty(row):
    assert (row.slots.tolist(), row.num_pages, row.pages(), row.pending) == ([], 0, [], {})
    assert row.at(0) == NO_PAGE


def test_a_plan_changes_nothing(row):
    grow(row, 3)
    before = row.slots.tolist()
    step = row.plan(9, Span(0, 2))
    assert (step.leaving, step.cut, step.added) == ((0, 1), (), tuple(range(3, 9)))
    assert (row.slots.tolist(), row.stale, row.num_pages) == (before, Span(0, 0), 3)


def test_new_blocks_that_are_stale_already_get_no_page(row):
    step = grow(row, 6, Span(1, 4))
    assert step.added == (0, 4, 5)
    assert row.slots.tolist() == [1, NO_PAGE, NO_PAGE, NO_PAGE, 2, 3]


def test_a_row_that_jumps_past_its_window_loses_all_it_had(row):
    grow(row, 2)
    step = grow(row, 6, Span(0, 5), 7)
    assert (step.leaving, step.added) == ((0, 1), (5,))
    assert row.slots.tolist() == [NO_PAGE] * 5 + [7]


def test_a_cut_takes_the_end_and_a_hole_stays_a_hole(row):
    grow(row, 6, Span(1, 4))
    step = grow(row, 2, Span(1, 4))
    assert step.cut == (4, 5)
    assert row.slots.tolist() == [1, NO_PAGE]
    grow(row, 3, Span(1, 4))
    assert row.slots.tolist() == [1, NO_PAGE, NO_PAGE]


def test_the_row_outgrows_its_memory_and_keeps_what_it_had(row):
    grow(row, 3)
    grow(row, 200, first_slot=4)
    assert row.slots.tolist() == list(range(1, 201))
    assert row.slots.dtype == np.int32


def test_a_slot_is_exchanged_where_it_is(row):
    grow(row, 3)
    view = row.slots
    row.put(1, 9)
    assert view.tolist() == [1, 9, 3]
    row.pending[1] = 5
    row.put(1, 6)
    assert (row.at(1), row.slots.tolist()) == (6, [1, 9, 3])


def test_a_filled_row_has_those_pages_and_no_others(row):
    grow(row, 20)
    row.fill(3, Span(0, 1), [(1, 8), (2, 9)])
    assert (row.slots.tolist(), row.num_pages, row.stale) == ([NO_PAGE, 8, 9], 2, Span(0, 1))
    assert row.pages() == [(1, 8), (2, 9)]


class RowMachine(RuleBasedStateMachine):
    """Histories that advance, capacities that come and go; every slot has a number of its own."""

    @initialize(window=st.one_of(st.none(), st.integers(1, 60)), sinks=st.integers(0, 2), tpb=st.sampled_from([1, 3]))
    def start(self, window, sinks, tpb):
        self.group = group(window, sinks if window else 0)
        self.row, self.tpb = BlockRow(self.group), tpb
        self.model, self.history, self.clock = [], 0, 1

    @rule(more=st.integers(0, 40), lead=st.integers(0, 70))
    def step(self, more, lead):
        if self.row.slots.size == 0 and not more + lead:
            return
        self.history += more
        stale = stale_blocks(self.history, self.group.window, self.group.sink_blocks, self.tpb)
        num_blocks = -(-(self.history + lead) // self.tpb)
        before = {slot for slot in self.model if slot is not None}
        wanted = plan_row(
            np.array([NO_PAGE if s is None else s for s in self.model], dtype=np.int32), num_blocks, stale
        )
        step = self.row.plan(num_blocks, stale)
        assert step.added == wanted.added
        gone = [self.row.at(ordinal) for ordinal in (*step.leaving, *step.cut)]
        slots = range(self.clock, self.clock + len(step.added))
        self.clock += len(slots)
        self.row.apply(step, slots)
        self.model = [None if s == NO_PAGE else s for s in wanted.filled(slots).tolist()]
        assert set(gone) == before - {slot for slot in self.model if slot is not None}
        assert len(gone) == len(set(gone))

    @rule(data=st.data())
    def exchange(self, data):
        ordinals = [ordinal for ordinal, slot in enumerate(self.model) if slot is not None]
        if ordinals:
            ordinal = data.draw(st.sampled_from(ordinals))
            self.model[ordinal] = self.clock
            self.row.put(ordinal, self.clock)
            self.clock += 1

    @rule()
    def begin_anew(self):
        self.row.fill(len(self.model), self.row.stale, [(i, s) for i, s in enumerate(self.model) if s is not None])

    @invariant()
    def agrees(self):
        if not hasattr(self, "row"):
            return
        assert self.row.slots.tolist() == [NO_PAGE if slot is None else slot for slot in self.model]
        pages = [(ordinal, slot) for ordinal, slot in enumerate(self.model) if slot is not None]
        assert (self.row.pages(), self.row.num_pages) == (pages, len(pages))
        assert [self.row.at(o) for o in range(len(self.model) + 2)] == [*self.row.slots.tolist(), NO_PAGE, NO_PAGE]


TestRow = RowMachine.TestCase
