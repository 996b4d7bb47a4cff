"""Spans, head shards, stages, windows and what is stale or live in them."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from unikv.errors import SpecError
from unikv.ranges import (
    HeadShard,
    Span,
    ceil_div,
    effective_window,
    head_shard,
    max_live_blocks,
    stage_layers,
    stale_blocks,
)

small = st.integers(0, 40)


def span_of(lo: int, length: int) -> Span:
    return Span(lo, lo + length)


spans = st.builds(span_of, small, small)


@given(spans, spans)
def test_intersection_is_that_of_the_sets(one: Span, other: Span) -> None:
    common = one.intersect(other)
    assert set(range(common.lo, common.hi)) == set(range(one.lo, one.hi)) & set(range(other.lo, other.hi))
    assert len(common) == len(set(range(one.lo, one.hi)) & set(range(other.lo, other.hi)))


@pytest.mark.parametrize(("lo", "hi"), [(-1, 2), (3, 2)])
def test_a_span_is_ordered(lo: int, hi: int) -> None:
    with pytest.raises(SpecError, match=rf"span: \[lo, hi\) is \({lo}, {hi}\), expected 0 <= lo <= hi"):
        Span(lo, hi)


def test_a_span_is_half_open() -> None:
    assert [value in Span(2, 4) for value in (1, 2, 3, 4)] == [False, True, True, False]
    assert not Span(2, 2)


@given(st.integers(0, 10**9), st.integers(1, 10**6))
def test_ceil_div(numerator: int, denominator: int) -> None:
    quotient = ceil_div(numerator, denominator)
    assert (quotient - 1) * denominator < numerator <= quotient * denominator


@pytest.mark.parametrize(
    ("heads", "tp", "shards"),
    [
        (8, 1, [(0, 8, 0, 1)]),
        (8, 4, [(0, 2, 0, 1), (2, 4, 0, 1), (4, 6, 0, 1), (6, 8, 0, 1)]),
        (2, 4, [(0, 1, 0, 2), (0, 1, 1, 2), (1, 2, 0, 2), (1, 2, 1, 2)]),
        (1, 2, [(0, 1, 0, 2), (0, 1, 1, 2)]),
    ],
)
def test_head_shards(heads: int, tp: int, shards: list[tuple[int, int, int, int]]) -> None:
    found = [head_shard(heads, tp, rank) for rank in range(tp)]
    assert found == [HeadShard(Span(lo, hi), replica, replicas) for lo, hi, replica, replicas in shards]


@given(st.integers(1, 16), st.integers(1, 5), st.booleans())
def test_every_head_is_held_by_as_many_ranks_as_claimed(small_count: int, factor: int, more_ranks: bool) -> None:
    counts = (small_count, small_count * factor)
    heads, tp = counts if more_ranks else counts[::-1]
    shards = [head_shard(heads, tp, rank) for rank in range(tp)]
    for head in range(heads):
        holders = [shard for shard in shards if head in shard.heads]
        assert [shard.replica for shard in holders] == list(range(holders[0].replicas))
        assert len({len(shard.heads) for shard in holders}) == 1


@pytest.mark.parametrize(
    ("heads", "tp", "want"), [(6, 4, "a multiple of tp=4"), (3, 4, "a divisor of tp=4"), (0, 1, "an integer >= 1")]
)
def test_heads_that_do_not_divide(heads: int, tp: int, want: str) -> None:
    with pytest.raises(SpecError, match=f"layer 9: kv_heads is {heads}, expected {want}"):
        head_shard(heads, tp, 0, thing="layer 9")


@pytest.mark.parametrize("rank", [-1, 4])
def test_ranks_lie_inside_their_instance(rank: int) -> None:
    with pytest.raises(SpecError, match=rf"layer: tp_rank is {rank}, expected in \[0, 4\)"):
        head_shard(8, 4, rank)
    with pytest.raises(SpecError, match=rf"pipeline: pp_rank is {rank}, expected in \[0, 4\)"):
        stage_layers(8, 4, rank)


def test_earlier_stages_take_the_remainder() -> None:
    assert [stage_layers(10, 4, rank) for rank in range(4)] == [Span(0, 3), Span(3, 6), Span(6, 8), Span(8, 10)]


@given(st.integers(0, 100), st.integers(1, 12))
def test_stages_tile_the_layers(layers: int, pp: int) -> None:
    stages = [stage_layers(layers, pp, rank) for rank in range(pp)]
    assert [layer for stage in stages for layer in range(stage.lo, stage.hi)] == list(range(layers))
    sizes = [len(stage) for stage in stages]
    assert sizes == sorted(sizes, reverse=True)
    assert sizes[0] - sizes[-1] <= 1


@pytest.mark.parametrize(
    ("window", "max_seq_len", "lookahead", "effective"),
    [
        (None, 16, 0, None),
        (4, 16, 0, 4),
        (15, 16, 0, 15),
        (16, 16, 0, None),
        (17, 16, 0, None),
        (4096, None, 0, 4096),
        (None, 16, 1, None),
        (5, 16, 1, 6),
        (15, 16, 1, None),
    ],
)
def test_effective_window(window: int | None, max_seq_len: int | None, lookahead: int, effective: int | None) -> None:
    assert effective_window(window, max_seq_len, lookahead_tokens=lookahead) == effective


@given(st.integers(1, 60), st.integers(1, 60), st.integers(1, 8))
def test_a_window_is_dropped_exactly_when_nothing_ever_gets_stale(window: int, max_seq_len: int, tpb: int) -> None:
    """With one token a block, some history of a longest sequence loses a block exactly if the window is kept."""
    loses = any(len(stale_blocks(history, window, 0, 1)) for history in range(max_seq_len))
    assert loses == (effective_window(window, max_seq_len) is not None)
    if not loses:
        assert not any(len(stale_blocks(history, window, 0, tpb)) for history in range(max_seq_len))


@pytest.mark.parametrize(
    ("history", "window", "sink_tokens", "tpb", "stale", "live"),
    [
        (3, 4, 0, 4, (0, 0), [0]),
        (7, 4, 0, 4, (0, 1), [1]),
        (8, 4, 0, 4, (0, 1), [1]),
        (8, 2, 0, 4, (0, 1), [1]),
        (8, 1, 0, 4, (0, 2), []),
        (20, 10, 0, 4, (0, 2), [2, 3, 4]),
        (23, 10, 0, 4, (0, 3), [3, 4, 5]),
        (20, 6, 4, 4, (1, 3), [0, 3, 4]),
        (94, 64, 0, 32, (0, 0), [0, 1, 2]),
        (95, 64, 0, 32, (0, 1), [1, 2]),
        (127, 64, 0, 32, (0, 2), [2, 3]),
        (128, 64, 0, 32, (0, 2), [2, 3]),
        (2078, 2048, 0, 32, (0, 0), list(range(65))),
        (2079, 2048, 0, 32, (0, 1), list(range(1, 65))),
        (704, 128, 1, 32, (1, 18), [0, 18, 19, 20, 21]),
        (8192, 2048, 0, 32, (0, 192), list(range(192, 256))),
        (8, None, 0, 4, (0, 0), [0, 1]),
    ],
)
def test_stale_blocks(
    history: int, window: int | None, sink_tokens: int, tpb: int, stale: tuple[int, int], live: list[int]
) -> None:
    found = stale_blocks(history, window, ceil_div(sink_tokens, tpb), tpb)
    assert found == Span(*stale)
    assert [block for block in range(ceil_div(history, tpb)) if block not in found] == live


@given(st.integers(0, 300), st.integers(1, 80), st.integers(0, 3), st.integers(1, 9))
def test_a_block_is_stale_when_no_later_query_can_see_it(history: int, window: int, sinks: int, tpb: int) -> None:
    seen_from = history + 1 - window
    for block in range(ceil_div(history, tpb)):
        gone = block >= sinks and (block + 1) * tpb <= seen_from
        assert (block in stale_blocks(history, window, sinks, tpb)) == gone


@pytest.mark.parametrize(
    ("window", "headroom", "tpb", "blocks"),
    [
        (2048, 1, 64, 33),
        (2048, 1, 32, 65),
        (2048, 3, 32, 66),
        (2048, 34, 32, 66),
        (2048, 35, 32, 67),
        (128, 1, 32, 5),
        (128, 2, 32, 5),
        (504, 8, 32, 17),
        (64, 15, 32, 4),
    ],
)
def test_live_bound(window: int, headroom: int, tpb: int, blocks: int) -> None:
    assert max_live_blocks(window, headroom, tpb) == blocks


def test_live_bound_is_exact_for_all_small_cases() -> None:
    for tpb in range(1, 7):
        for window in range(1, 15):
            for headroom in range(1, 10):
                most = max(
                    ceil_div(history + headroom, tpb) - len(stale_blocks(history, window, 0, tpb))
                    for history in range(window + 2 * tpb)
                )
                assert most == max_live_blocks(window, headroom, tpb), (window, headroom, tpb)
