"""Which pages travel: prompt boundaries, windows, sinks, reuse, unequal page sizes, forged tables."""

from __future__ import annotations

import time

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from transfer.pages import (
    expected_pages,
    gather_pages,
    live_ordinals,
    pair_pages,
    scatter_pages,
    validate_table,
)
from transfer.plan import GroupPair
from unikv.errors import LocalProtocolError, RemoteProtocolError, SpecError
from unikv.ids import NO_PAGE, GroupId
from unikv.layer_spec import LayerOwner


def make_pair(src=16, dst=16, window=None, sinks=0, start=0, step=1):
    return GroupPair(
        src_group=GroupId(0),
        dst_group=GroupId(1),
        owner=LayerOwner.TARGET,
        window=window,
        sink_blocks=sinks,
        src_tokens=src,
        dst_tokens=dst,
        page_bytes=64,
        ordinal_start=start,
        ordinal_step=step,
    )


def table(*slots):
    return np.array(slots, dtype=np.int32)


def full(blocks, first=1):
    return np.arange(first, first + blocks, dtype=np.int32)


def listed(pairs):
    return list(
        zip(*(part.tolist() for part in (pairs.src_slot, pairs.src_sub, pairs.dst_slot, pairs.dst_sub)), strict=True)
    )


# --- which ordinals travel -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("prompt", "tpb", "window", "first", "count"),
    [
        (2080, 32, 2048, 1, 64),
        (1000, 32, 256, 23, 9),
        (131072, 64, 4096, 1984, 64),
        (2000, 32, 2048, 0, 63),
        (96, 16, 32, 4, 2),
        (158, 32, 128, 0, 5),
        (159, 32, 128, 1, 4),
        (47, 16, 33, 0, 3),
        (47, 16, 32, 1, 2),
        (48, 16, 33, 1, 2),
        (64, 16, 33, 2, 2),
        (33, 16, None, 0, 3),
    ],
)
def test_window_is_masked_by_ordinal(prompt, tpb, window, first, count):
    ordinals = live_ordinals(prompt, tokens_per_block=tpb, window=window, sink_blocks=0)
    assert ordinals.dtype == np.int32
    assert ordinals.tolist() == list(range(first, first + count))


def test_sinks_stay_beside_the_window():
    ordinals = live_ordinals(1000, tokens_per_block=32, window=256, sink_blocks=2)
    assert ordinals.tolist() == [0, 1, *range(23, 32)]


def test_sinks_that_meet_the_window_are_listed_once():
    assert live_ordinals(100, tokens_per_block=16, window=40, sink_blocks=5).tolist() == list(range(7))


@pytest.mark.parametrize(
    ("cached", "first"), [(0, 0), (15, 0), (16, 1), (31, 1), (32, 2), (33, 2), (47, 2), (48, 3), (10**6, 3)]
)
def test_cached_tokens_are_rounded_down_to_blocks(cached, first):
    ordinals = live_ordinals(33, tokens_per_block=16, window=None, sink_blocks=0, cached_tokens=cached)
    assert ordinals.tolist() == list(range(first, 3))


def test_cached_sinks_and_a_window_combine():
    ordinals = live_ordinals(1000, tokens_per_block=32, window=256, sink_blocks=2, cached_tokens=33)
    assert ordinals.tolist() == [1, *range(23, 32)]
    ordinals = live_ordinals(1000, tokens_per_block=32, window=256, sink_blocks=2, cached_tokens=800)
    assert ordinals.tolist() == list(range(25, 32))


def test_negative_counts_are_refused():
    with pytest.raises(SpecError, match=r"prompt: \(prompt_tokens, cached_tokens\) is \(-1, 0\), expected >= 0"):
        live_ordinals(-1, tokens_per_block=16, window=None, sink_blocks=0)


@given(
    prompt=st.integers(0, 400),
    tpb=st.sampled_from([1, 2, 8, 16, 32]),
    window=st.one_of(st.none(), st.integers(1, 300)),
    sinks=st.integers(0, 4),
    cached=st.integers(0, 420),
)
def test_live_blocks_are_those_with_a_token_that_can_be_read(prompt, tpb, window, sinks, cached):
    """Token by token: a block travels when a later step can read one of its prompt tokens and nobody has it yet."""
    wanted = set()
    for token in range(prompt):
        block = token // tpb
        in_window = window is None or (block + 1) * tpb > prompt + 1 - window
        if (in_window or block < sinks) and (block + 1) * tpb > cached - cached % tpb:
            wanted.add(block)
    ordinals = live_ordinals(prompt, tokens_per_block=tpb, window=window, sink_blocks=sinks, cached_tokens=cached)
    assert ordinals.tolist() == sorted(wanted)


# --- pairing ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("tpb", [8, 16, 32])
def test_draft_room_never_shifts_prompt_pages(tpb):
    """Prompts 1..130, 0..8 draft tokens on either side: always the first ceil(prompt / tpb) pages, by ordinal."""
    for prompt in range(1, 131):
        pages = -(-prompt // tpb)
        for draft in range(9):
            longer = -(-(prompt + draft) // tpb)
            for src_blocks, dst_blocks in ((longer, pages), (pages, longer), (longer, longer)):
                pairs = pair_pages(make_pair(tpb, tpb), full(src_blocks), full(dst_blocks, 100), prompt)
                assert listed(pairs) == [(1 + i, 0, 100 + i, 0) for i in range(pages)]


def test_scratch_pages_behind_the_prompt_stay_home():
    assert listed(pair_pages(make_pair(), table(7, 8, 9), table(3), 10)) == [(7, 0, 3, 0)]


def test_placeholders_in_front_pair_by_ordinal():
    pairs = pair_pages(make_pair(), table(-1, -1, 14), table(-1, -1, 5), 40)
    assert listed(pairs) == [(14, 0, 5, 0)]


def test_partly_cached_prompt_pairs_by_ordinal_not_from_the_end():
    """31 of 32 pages cached, and one page more for the first sampled token."""
    wanted = np.concatenate([np.full(31, NO_PAGE, dtype=np.int32), table(31, 32)])
    assert listed(pair_pages(make_pair(64, 64), full(32, 100), wanted, 2048)) == [(131, 0, 31, 0)]


def test_full_prefix_hit_moves_nothing():
    pairs = pair_pages(make_pair(), full(2), table(NO_PAGE, NO_PAGE), 32)
    assert len(pairs) == 0
    assert expected_pages(make_pair(), table(NO_PAGE, NO_PAGE), 32) == 0


def test_empty_destination_table_wants_nothing():
    assert len(pair_pages(make_pair(), full(2), table(), 32)) == 0
    assert expected_pages(make_pair(), table(), 32) == 0


def test_prompt_of_no_tokens_moves_nothing():
    assert len(pair_pages(make_pair(), full(2), full(2), 0)) == 0


def test_holes_on_the_destination_are_not_wanted():
    pairs = pair_pages(make_pair(), full(4, 10), table(5, NO_PAGE, 6, NO_PAGE), 64)
    assert listed(pairs) == [(10, 0, 5, 0), (12, 0, 6, 0)]


def test_window_masks_pages_neither_side_has_evicted():
    pair = make_pair(64, 64, window=4096)
    pairs = pair_pages(pair, full(2048), full(2048, 5000), 131072)
    assert (len(pairs), int(pairs.src_slot[0]), int(pairs.dst_slot[0])) == (64, 1985, 6984)
    assert expected_pages(pair, full(2048), 131072) == 64


def test_missing_source_page_is_named():
    with pytest.raises(LocalProtocolError, match=r"group 0 -> 1 \(target\): context has no page for ordinal 1: .*pin"):
        pair_pages(make_pair(), table(4, NO_PAGE, 6), full(3), 48)


def test_null_slot_is_no_source_page():
    with pytest.raises(LocalProtocolError, match="no page for ordinal 2"):
        pair_pages(make_pair(), table(4, 5, 0), full(3), 48)


def test_short_source_table_is_named():
    with pytest.raises(LocalProtocolError, match="no page for ordinal 2: page table is '2 pages in 2 blocks'"):
        pair_pages(make_pair(), full(2), full(3), 48)


def test_evicted_source_page_that_is_not_wanted_is_no_error():
    assert len(pair_pages(make_pair(), table(NO_PAGE, 5), table(NO_PAGE, 9), 32)) == 1


def test_short_destination_table_is_refused_on_both_sides():
    want = "length of the generation page table is 2, expected >= 3 blocks of 16 for 33 prompt tokens"
    with pytest.raises(RemoteProtocolError, match=want):
        pair_pages(make_pair(), full(3), full(2), 33)
    with pytest.raises(LocalProtocolError, match=want):
        expected_pages(make_pair(), full(2), 33)


# --- unequal page sizes ----------------------------------------------------------------------------------------------


def test_small_source_pages_fill_a_large_page():
    """41 tokens: units 0..5 of 8 tokens; the last large page has its second half filled by one token."""
    pairs = pair_pages(make_pair(8, 16), full(6, 20), full(3), 41)
    assert listed(pairs) == [(20, 0, 1, 0), (21, 0, 1, 1), (22, 0, 2, 0), (23, 0, 2, 1), (24, 0, 3, 0), (25, 0, 3, 1)]


def test_last_large_page_gets_only_sub_pages_with_prompt_tokens():
    pairs = pair_pages(make_pair(16, 64), full(5, 20), full(2), 70)
    assert listed(pairs)[-2:] == [(23, 0, 1, 3), (24, 0, 2, 0)]
    assert len(pairs) == expected_pages(make_pair(16, 64), full(2), 70) == 5


def test_large_source_pages_are_cut():
    pairs = pair_pages(make_pair(64, 16), full(2, 20), table(1, NO_PAGE, 3, 4, 5), 70)
    assert listed(pairs) == [(20, 0, 1, 0), (20, 2, 3, 0), (20, 3, 4, 0), (21, 0, 5, 0)]


def test_window_on_unequal_pages_keeps_to_what_both_sides_hold():
    """Window 20 at 41 tokens: tokens from 22 on. The source has evicted blocks 0 and 1, the destination block 0."""
    pair = make_pair(8, 16, window=20)
    pairs = pair_pages(pair, table(-1, -1, 22, 23, 24, 25), table(-1, 2, 3), 41)
    assert listed(pairs) == [(22, 0, 2, 0), (23, 0, 2, 1), (24, 0, 3, 0), (25, 0, 3, 1)]
    back = pair_pages(make_pair(16, 8, window=20), table(-1, 2, 3), table(-1, -1, 22, 23, 24, 25), 41)
    assert listed(back) == [(2, 0, 22, 0), (2, 1, 23, 0), (3, 0, 24, 0), (3, 1, 25, 0)]


def test_context_parallel_ranks_share_the_ordinals_out():
    owned = [pair_pages(make_pair(start=s, step=3), full(8), full(8), 128).src_slot.tolist() for s in range(3)]
    assert owned == [[1, 4, 7], [2, 5, 8], [3, 6]]
    only_own = table(NO_PAGE, 4, NO_PAGE, NO_PAGE, 5)
    assert listed(pair_pages(make_pair(start=1, step=3), only_own, full(5), 80)) == [(4, 0, 2, 0), (5, 0, 5, 0)]


@st.composite
def requests(draw):
    unit = draw(st.sampled_from([4, 8, 16]))
    ratio = draw(st.sampled_from([1, 2, 4]))
    src, dst = draw(st.sampled_from([(unit, unit * ratio), (unit * ratio, unit)]))
    window = draw(st.one_of(st.none(), st.integers(1, 150)))
    prompt = draw(st.integers(1, 200))
    slack = draw(st.integers(0, 2))
    src_table = np.array(draw(st.permutations(range(1, -(-prompt // src) + 1 + slack))), dtype=np.int32)
    dst_table = np.array(draw(st.permutations(range(1, -(-prompt // dst) + 1 + slack))), dtype=np.int32)
    dst_table[draw(st.lists(st.integers(0, len(dst_table) - 1), max_size=6))] = NO_PAGE
    pair = make_pair(src, dst, window, draw(st.integers(0, 3)))
    evicted = max(0, (prompt + 1 - (window or prompt + 1)) // src)
    kept = -(-pair.sink_blocks * unit // src)
    src_table[kept:evicted] = NO_PAGE
    return pair, src_table, dst_table, prompt


@given(requests())
def test_every_wanted_token_comes_from_its_own_position(case):
    """Token by token, against tables of which the source has physically evicted what left the window."""
    pair, src_table, dst_table, prompt = case
    unit = min(pair.src_tokens, pair.dst_tokens)
    pairs = pair_pages(pair, src_table, dst_table, prompt)
    got = {}
    for src_slot, src_sub, dst_slot, dst_sub in listed(pairs):
        for token in range(unit):
            place = (dst_slot, dst_sub * unit + token)
            assert place not in got
            got[place] = (src_slot, src_sub * unit + token)
    for token in range(prompt):
        live = pair.window is None or token >= prompt + 1 - pair.window or token < pair.sink_blocks * unit
        slot = int(dst_table[token // pair.dst_tokens])
        source = got.get((slot, token % pair.dst_tokens))
        if slot == NO_PAGE:
            continue
        if live:
            assert source == (src_table[token // pair.src_tokens], token % pair.src_tokens)
        if source is not None:
            assert source == (src_table[token // pair.src_tokens], token % pair.src_tokens)
    assert {slot for slot, _ in got} <= set(dst_table.tolist()) - {NO_PAGE}
    assert len(pairs) == expected_pages(pair, dst_table, prompt)


# --- staged chunks ---------------------------------------------------------------------------------------------------


@given(requests(), st.integers(1, 5))
def test_chunks_cover_the_pages_once_and_in_one_order(case, chunk):
    pair, src_table, dst_table, prompt = case
    pairs = pair_pages(pair, src_table, dst_table, prompt)
    through = []
    for first in range(0, len(pairs), chunk):
        out = listed(gather_pages(pairs, first, chunk))
        back = listed(scatter_pages(pair, dst_table, prompt, first, chunk))
        assert [entry[2:] for entry in out] == [entry[:2] for entry in back] == [(i, 0) for i in range(len(out))]
        through += [(*a[:2], *b[2:]) for a, b in zip(out, back, strict=True)]
    assert through == listed(pairs)


# --- forged tables ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("forged", "text"),
    [
        (table(1, -2), "slot of ordinal 1 is -2, expected -1 or a slot in [1, 8)"),
        (table(1, 8), "slot of ordinal 1 is 8, expected -1 or a slot in [1, 8)"),
        (table(1, NO_PAGE, 2**31 - 1), "slot of ordinal 2 is 2147483647"),
        (table(0, 3), "slot of ordinal 0 is 0, expected -1 or a slot in [1, 8)"),
        (table(3, 1, 3), "slot of ordinals 0, 2 is 3, expected each slot at most once"),
        (table(1, 2, 3, 4, 5), "length of the page table is 5, expected <= 4 blocks"),
        (
            np.array([1, 2**40], dtype=np.int64),
            "page table is 'int64 of 1 dimension(s)', expected a one-dimensional int32",
        ),
        (np.ones((1, 2), dtype=np.int32), "page table is 'int32 of 2 dimension(s)'"),
    ],
)
def test_forged_table_is_refused_by_name(forged, text):
    with pytest.raises(RemoteProtocolError) as caught:
        validate_table(forged, num_slots=8, max_blocks=4, thing="request 7 group 0 from generation rank 2")
    assert str(caught.value).startswith(f"request 7 group 0 from generation rank 2: {text}")


@pytest.mark.parametrize("good", [table(), table(NO_PAGE), table(7, NO_PAGE, 1, NO_PAGE), table(NO_PAGE, NO_PAGE)])
def test_honest_table_passes(good):
    before = good.copy()
    assert validate_table(good, num_slots=8, max_blocks=4, thing="request 7") is None
    assert np.array_equal(good, before)


def test_slots_are_judged_by_the_pools_of_the_rank_that_owns_them():
    wanted = table(38)
    validate_table(wanted, num_slots=40, max_blocks=4, thing="rank 0")
    with pytest.raises(RemoteProtocolError, match="rank 1: slot of ordinal 0 is 38"):
        validate_table(wanted, num_slots=37, max_blocks=4, thing="rank 1")


def test_pairing_256_pages_reports_its_time():
    pair, src, dst = make_pair(32, 32, window=8192, sinks=1), full(300), full(300, 400)
    validate_table(src, num_slots=1000, max_blocks=300, thing="warm up")
    times = []
    for _ in range(200):
        begin = time.perf_counter()
        pairs = pair_pages(pair, src, dst, 8192)
        times.append(time.perf_counter() - begin)
    print(f"pair_pages: {len(pairs)} pages in {sorted(times)[100] * 1e6:.1f} us")
    assert len(pairs) == 256
