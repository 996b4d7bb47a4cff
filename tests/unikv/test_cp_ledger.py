"""Blocks dealt to context-parallel ranks: disjoint, complete, and windowed where each of them lies."""

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from unikv.cp_ledger import CpLedger
from unikv.errors import SpecError
from unikv.ranges import Span, ceil_div, stale_blocks

shapes = st.tuples(st.integers(1, 5), st.integers(1, 6))
windows = st.one_of(st.none(), st.integers(1, 30))


def ledgers(cp_size, tpb):
    return [CpLedger(cp_size=cp_size, cp_rank=rank, tokens_per_block=tpb) for rank in range(cp_size)]


@given(shapes, st.integers(0, 100))
def test_every_block_has_one_owner(shape, capacity):
    cp_size, tpb = shape
    blocks = ceil_div(capacity, tpb)
    owned = [[ledger.ordinal(i) for i in range(ledger.num_blocks(capacity))] for ledger in ledgers(cp_size, tpb)]
    assert sorted(ordinal for rank in owned for ordinal in rank) == list(range(blocks))
    for ledger, ordinals in zip(ledgers(cp_size, tpb), owned, strict=True):
        assert [ledger.local(ordinal) for ordinal in ordinals] == list(range(len(ordinals)))
        assert all(ledger.local(o) is None for o in range(blocks) if o not in ordinals)


@given(shapes, st.integers(0, 100), windows, st.integers(0, 4))
def test_windows_and_sinks_are_those_of_the_sequence(shape, history, window, sinks):
    cp_size, tpb = shape
    whole = stale_blocks(history, window, sinks, tpb)
    for ledger in ledgers(cp_size, tpb):
        stale = ledger.stale(history, window, sinks)
        for local in range(ledger.num_blocks(history) + 2):
            assert (local in stale) == (ledger.ordinal(local) in whole)


@given(shapes, st.integers(0, 100), windows, st.integers(0, 4))
def test_what_is_kept_is_counted_position_by_position(shape, history, window, sinks):
    cp_size, tpb = shape
    stale = stale_blocks(history, window, sinks, tpb)
    kept = []
    for ledger in ledgers(cp_size, tpb):
        spans = ledger.retained(history, window, sinks)
        mine = [position for span in spans for position in range(span.lo, span.hi)]
        assert mine == [p for p in range(history) if p // tpb % cp_size == ledger.cp_rank and p // tpb not in stale]
        assert all(a.hi < b.lo for a, b in itertools.pairwise(spans))
        kept += mine
        assert ledger.num_tokens(history) == sum(p // tpb % cp_size == ledger.cp_rank for p in range(history))
    assert sorted(kept) == [p for p in range(history) if p // tpb not in stale]


@given(st.integers(1, 8), st.integers(0, 100), windows, st.integers(0, 4))
def test_one_rank_has_everything_as_it_is(tpb, tokens, window, sinks):
    ledger = CpLedger(tokens_per_block=tpb)
    assert ledger.num_blocks(tokens) == ceil_div(tokens, tpb)
    assert ledger.stale(tokens, window, sinks) == stale_blocks(tokens, window, sinks, tpb)
    assert ledger.num_tokens(tokens) == tokens


def test_the_physical_block_and_the_round_of_all_ranks_are_two_sizes():
    ledger = CpLedger(cp_size=4, cp_rank=1, tokens_per_block=32)
    assert (ledger.tokens_per_block, ledger.ledger_tokens_per_block) == (32, 128)
    assert ledger.retained(100, None, 0) == (Span(32, 64),)
    assert ledger.num_tokens(170) == 32 + 10


@pytest.mark.parametrize(("size", "rank", "tpb"), [(0, 0, 32), (2, 2, 32), (2, -1, 32), (2, 0, 0)])
def test_wrong_shapes_are_refused(size, rank, tpb):
    with pytest.raises(SpecError, match="context parallelism"):
        CpLedger(cp_size=size, cp_rank=rank, tokens_per_block=tpb)
