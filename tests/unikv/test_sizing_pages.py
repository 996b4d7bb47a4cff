"""Pages of requests and batches, against counting them one by one."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from unikv.errors import SpecError
from unikv.ids import LayerId
from unikv.layer_spec import KVCacheLayerSpec, KVDtype, LayerOwner, ReusePolicy
from unikv.layout import CacheLayout, GroupLayout, build_layout
from unikv.ranges import Span, ceil_div, max_live_blocks
from unikv.sizing_pages import (
    RequestShape,
    batch_pages,
    clamp_max_seq_len,
    peak_pages,
    pool_group_pages,
    scratch_blocks,
    typical_batch,
)


def layout_of(*windows: int | None, tokens_per_block: int = 32, **more: Any) -> CacheLayout:
    """Return the layout of equal layers with these windows: one pool group."""
    specs = [
        KVCacheLayerSpec(
            layer_id=LayerId(number),
            owner=LayerOwner.TARGET,
            num_kv_heads=1,
            head_dim=16,
            dtype=KVDtype.FLOAT16,
            window=window,
            **(more if window else {}),
        )
        for number, window in enumerate(windows)
    ]
    return build_layout(specs, tokens_per_block=tokens_per_block, max_seq_len=None)


def group_of(window: int | None, tokens_per_block: int, **more: Any) -> GroupLayout:
    return layout_of(window, tokens_per_block=tokens_per_block, **more).groups[0]


def shape(capacity: int, history: int = 0) -> RequestShape:
    return RequestShape(capacity_tokens=capacity, history_tokens=history)


def live_ordinals(capacity: int, history: int, window: int | None, sinks: int, page: int) -> set[int]:
    """Return the blocks of a request token by token: who sees a position of theirs, now or at the next step."""
    return {
        position // page
        for position in range(capacity)
        if window is None or position // page < sinks or (position // page + 1) * page > history + 1 - window
    }


@pytest.mark.parametrize(
    ("window", "headroom", "page", "blocks"),
    [
        (2048, 1, 64, 33),
        (2048, 1, 32, 65),
        (2048, 3, 32, 66),
        (2048, 34, 32, 66),
        (2048, 35, 32, 67),
        (128, 2, 32, 5),
        (504, 8, 32, 17),
    ],
)
def test_most_blocks_of_a_window(window: int, headroom: int, page: int, blocks: int) -> None:
    assert max_live_blocks(window, headroom, page) == blocks
    assert peak_pages(group_of(window, page), page, 10**6, headroom) == blocks
    assert peak_pages(group_of(window, page, sink_tokens=page + 1), page, 10**6, headroom) == blocks + 2


@given(st.integers(1, 70), st.integers(1, 40), st.sampled_from([1, 2, 3, 8, 32]))
def test_most_blocks_of_a_window_by_trying_every_history(window: int, headroom: int, page: int) -> None:
    tried = {
        len(live_ordinals(history + headroom, history, window, 0, page))
        for history in range(window + headroom, window + headroom + 2 * page)
    }
    assert max(tried) == max_live_blocks(window, headroom, page)


@given(
    st.one_of(st.none(), st.integers(1, 40)),
    st.integers(0, 20),
    st.sampled_from([1, 4, 32]),
    st.lists(st.tuples(st.integers(0, 90), st.integers(0, 90)), max_size=4),
    st.integers(0, 60),
    st.booleans(),
)
def test_batches_by_counting_blocks(
    window: int | None, sinks: int, page: int, ends: list[tuple[int, int]], shared_tokens: int, private: bool
) -> None:
    group = group_of(
        window, page, sink_tokens=sinks, reuse_policy=ReusePolicy.PRIVATE if private else ReusePolicy.OPTIONAL
    )
    batch = [shape(max(pair), min(pair)) for pair in ends]
    shared = 0 if group.reuse_policy is ReusePolicy.PRIVATE else shared_tokens // page
    held = [
        (number if ordinal >= shared else -1, ordinal)
        for number, request in enumerate(batch)
        for ordinal in live_ordinals(request.capacity_tokens, request.history_tokens, window, group.sink_blocks, page)
    ]
    assert batch_pages(group, page, batch, shared_prompt_tokens=shared_tokens) == len(set(held))


def test_a_step_of_one_request_beside_an_empty_one() -> None:
    assert batch_pages(group_of(None, 32), 32, [shape(64, 63), shape(0)]) == 2


def test_a_shared_prompt_counts_once_unless_the_group_is_private() -> None:
    batch = [shape(160, 159)] * 3
    assert batch_pages(group_of(None, 32), 32, batch, shared_prompt_tokens=100) == 3 + 3 * 2
    private = group_of(64, 32, reuse_policy=ReusePolicy.PRIVATE)
    assert batch_pages(private, 32, batch, shared_prompt_tokens=100) == 3 * 2


def test_a_typical_batch_is_one_prefill_and_steps() -> None:
    load: dict[str, Any] = {"max_requests": 3, "max_num_tokens": 2048, "max_seq_len": 4096, "drafts": 2}
    assert typical_batch(avg_seq_len=1024, **load) == (shape(2048), shape(1024, 1021), shape(1024, 1021))
    for wrong in (4097, 2):
        with pytest.raises(SpecError, match=rf"avg_seq_len is {wrong}, expected in \[3, max_seq_len=4096\]"):
            typical_batch(avg_seq_len=wrong, **load)


@pytest.mark.parametrize(("capacity", "history"), [(5, 6), (5, -1), (-1, -1)])
def test_shapes_that_no_request_has(capacity: int, history: int) -> None:
    with pytest.raises(SpecError, match=rf"request: history_tokens is {history}, expected in \[0, capacity_tokens="):
        shape(capacity, history)


@pytest.mark.parametrize(
    ("windows", "pages", "batch_size", "upper", "longest"),
    [
        ((None,), 1, 1, 0, 0),
        ((None,), 1, 1, 32, 32),
        ((None,), 1, 1, 64, 32),
        ((None,), 1, 2, 64, 0),
        ((32,), 1, 1, 96, 96),
        ((32, None), 4, 1, 96, 96),
        ((32, None), 4, 2, 96, 32),
        ((None,), 9, 1, 70, 70),
    ],
)
def test_the_longest_request_that_fits(
    windows: tuple[int | None, ...], pages: int, batch_size: int, upper: int, longest: int
) -> None:
    found = clamp_max_seq_len(layout_of(*windows), [pages], batch_size=batch_size, upper_tokens=upper)
    assert found == longest
    assert type(found) is int


def test_growing_needs_a_page_more_where_the_window_lies_across_blocks() -> None:
    layout = layout_of(32, None)
    assert clamp_max_seq_len(layout, [4], batch_size=1, upper_tokens=96, growing=True) == 64
    assert clamp_max_seq_len(layout, [5], batch_size=1, upper_tokens=96, growing=True) == 96


def test_half_the_layers_windowed_with_a_sink() -> None:
    """28 pages: a sink, a window of five blocks, and 22 blocks of full attention."""
    layout = layout_of(128, None, sink_tokens=1)
    assert clamp_max_seq_len(layout, [28], batch_size=1, upper_tokens=10**4, growing=True) == 704
    at_705 = [batch_pages(group, 32, [shape(705, 704)]) for group in layout.groups]
    assert (at_705, pool_group_pages(layout, at_705)) == ([6, 23], (29,))


def test_pages_of_every_pool_group_are_needed() -> None:
    with pytest.raises(SpecError, match="clamp: length of pages is 2, expected 1, one per pool group"):
        clamp_max_seq_len(layout_of(None), [1, 2], batch_size=1, upper_tokens=32)


@pytest.mark.parametrize(
    ("capacity", "history", "rewind", "ordinals"),
    [(1000, 0, 0, Span(0, 27)), (1000, 320, 0, Span(10, 27)), (1000, 0, 200, Span(0, 21)), (100, 0, 200, Span(0, 0))],
)
def test_blocks_behind_the_window_before_the_chunk_ends(
    capacity: int, history: int, rewind: int, ordinals: Span
) -> None:
    # After 1000 tokens a window of 128 has left blocks 0 .. 27 of 32 tokens.
    assert scratch_blocks(shape(capacity, history), 128, 0, 32, max_rewind_tokens=rewind) == ordinals
    assert len(scratch_blocks(shape(capacity, history), None, 0, 32)) == 0


@given(st.integers(1, 24), st.integers(1, 12), st.integers(1, 6), st.integers(0, 90))
def test_the_peak_is_the_most_that_any_history_holds(window: int, headroom: int, page: int, positions: int) -> None:
    group = group_of(window, page)
    held = [
        batch_pages(group, page, [shape(max(history, min(history + headroom, positions)), history)])
        for history in range(positions + 1)
    ]
    peak = peak_pages(group, page, positions, headroom)
    assert max(held) <= peak <= max_live_blocks(window, headroom, page)
    if positions > window + headroom + 2 * page:
        assert peak == max(held)


@given(
    st.integers(0, 80), st.integers(0, 40), st.integers(1, 24), st.integers(0, 3), st.integers(1, 6), st.integers(0, 9)
)
def test_scratch_is_new_and_out_of_every_window_that_may_come_back(
    history: int, chunk: int, window: int, sinks: int, page: int, rewind: int
) -> None:
    found = scratch_blocks(shape(history + chunk, history), window, sinks, page, max_rewind_tokens=rewind)
    final = max(0, history + chunk - rewind)
    kept = live_ordinals(history + chunk, final, window, sinks, page)
    new = range(ceil_div(history, page), ceil_div(history + chunk, page))
    assert list(range(found.lo, found.hi)) == [ordinal for ordinal in new if ordinal not in kept]
