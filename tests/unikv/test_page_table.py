import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from unikv.errors import SpecError
from unikv.ids import NO_PAGE
from unikv.page_table import (
    empty_row,
    export_row,
    extent,
    masked_row,
    num_valid,
    plan_row,
    valid_slots,
    write_kernel_row,
)
from unikv.ranges import Span, stale_blocks


def row(*slots):
    return np.array(slots, dtype=np.int32)


def test_extent_of_a_long_windowed_row_is_not_its_number_of_pages():
    stale = stale_blocks(8192, 2048, 0, 32)
    plan = plan_row(empty_row(), 257, stale)
    full = plan.filled(range(1, 66))
    assert stale == Span(0, 192)
    assert (full.shape[0], num_valid(full), extent(full)) == (257, 65, 257)
    assert extent(full) * 32 == 8224
    assert num_valid(full) * 32 == 2080


@pytest.mark.parametrize(
    ("slots", "want"),
    [((), (0, 0)), ((NO_PAGE,), (0, 0)), ((4,), (1, 1)), ((NO_PAGE, 4, NO_PAGE), (2, 1)), ((3, NO_PAGE, 9), (3, 2))],
)
def test_extent_and_count(slots, want):
    assert (extent(row(*slots)), num_valid(row(*slots))) == want


def test_plan_shrinks_grows_and_drops_without_shifting():
    before = row(4, 5, 6, 7)
    plan = plan_row(before, 6, Span(1, 3))
    assert (plan.dropped, plan.added) == ((5, 6), (4, 5))
    assert plan.filled([8, 9]).tolist() == [4, NO_PAGE, NO_PAGE, 7, 8, 9]
    assert before.tolist() == [4, 5, 6, 7]


def test_plan_cuts_the_tail_and_the_window_together():
    plan = plan_row(row(4, 5, 6, 7), 2, Span(0, 1))
    assert (plan.row.tolist(), plan.dropped, plan.added) == ([NO_PAGE, 5], (4, 6, 7), ())


def test_plan_gives_no_page_to_new_blocks_outside_the_window():
    plan = plan_row(row(4), 5, Span(0, 3))
    assert (plan.dropped, plan.added) == ((4,), (3, 4))


def test_plan_keeps_sinks():
    plan = plan_row(row(4, 5, 6), 4, Span(1, 2))
    assert plan.filled([9]).tolist() == [4, NO_PAGE, 6, 9]


@given(
    st.lists(st.integers(1, 99), unique=True, max_size=12),
    st.integers(0, 12),
    st.integers(0, 12),
    st.integers(0, 12),
)
def test_plan_loses_no_slot(slots, num_blocks, lo, length):
    before = row(*slots)
    plan = plan_row(before, num_blocks, Span(lo, lo + length))
    assert sorted((*valid_slots(plan.row), *plan.dropped)) == sorted(slots)
    after = plan.filled(range(100, 100 + len(plan.added)))
    for ordinal in range(num_blocks):
        stays = ordinal < len(slots) and after[ordinal] == slots[ordinal]
        assert (after[ordinal] == NO_PAGE) == (lo <= ordinal < lo + length)
        assert after[ordinal] == NO_PAGE or stays or after[ordinal] >= 100


def test_mask_hides_pages_and_leaves_the_row():
    before = row(4, 5, 6)
    assert masked_row(before, Span(0, 2)).tolist() == [NO_PAGE, NO_PAGE, 6]
    assert before.tolist() == [4, 5, 6]


def test_export_fills_the_tail_of_a_longer_row():
    out = np.full(4, 123, dtype=np.int32)
    export_row(row(7, 8), out)
    assert out.tolist() == [7, 8, NO_PAGE, NO_PAGE]


@pytest.mark.parametrize("write", [export_row, write_kernel_row])
def test_a_short_row_is_refused_and_untouched(write):
    out = np.full(1, 123, dtype=np.int32)
    with pytest.raises(SpecError, match="length is 1, expected >= 2, the blocks of the request; pass a longer row"):
        write(row(7, 8), out)
    assert out.tolist() == [123]


@pytest.mark.parametrize("out", [np.zeros(4, dtype=np.int64), np.zeros((2, 4), dtype=np.int32)])
def test_only_int32_rows_are_written(out):
    with pytest.raises(SpecError, match="expected int32 and 1"):
        export_row(row(7, 8), out)


def test_kernel_rows_point_holes_and_tail_at_the_null_slot():
    out = np.full(5, 123, dtype=np.int32)
    write_kernel_row(row(NO_PAGE, 8, 3), out)
    assert out.tolist() == [0, 8, 3, 0, 0]


def test_kernel_rows_take_another_padding():
    out = np.full(3, 123, dtype=np.int32)
    write_kernel_row(row(NO_PAGE, 8), out, pad_slot=5)
    assert out.tolist() == [5, 8, 5]
