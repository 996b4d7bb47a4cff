"""Pages of requests and batches, compared with counting them, and the worked numbers."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from unikv.errors import SpecError
from unikv.layer_spec import KVCacheLayerSpec, KVDtype, KVLayout, LayerOwner, ReusePolicy
from unikv.layout import build_layout
from unikv.ranges import Span, max_live_blocks, stale_blocks
from unikv.sizing_pages import (
    RequestShape,
    batch_pages,
    clamp_max_seq_len,
    peak_pages,
    scratch_blocks,
    typical_batch,
)


def layer(number=0, **changes):
    fields = {
        "layer_id": number,
        "owner": LayerOwner.TARGET,
        "num_kv_heads": 1,
        "head_dim": 16,
        "dtype": KVDtype.FLOAT16,
    }
    return KVCacheLayerSpec(**{**fields, **changes})


def layout_of(*layers, tpb=32):
    return build_layout(layers, tokens_per_block=tpb, max_seq_len=None, kv_layout=KVLayout.HND)


def live(history, capacity, window, sinks, tpb):
    """Blocks that hold a position which is allocated and not out of reach, one by one."""
    stale = stale_blocks(history, window, sinks, tpb)
    return sum(block not in stale for block in range(-(-capacity // tpb)))


shapes = st.tuples(st.integers(0, 80), st.integers(0, 20)).map(
    lambda pair: RequestShape(capacity_tokens=sum(pair), history_tokens=pair[0])
)
windows = st.one_of(st.none(), st.integers(1, 24))


@given(shape=shapes, window=windows, sinks=st.integers(0, 3), tpb=st.integers(1, 6))
def test_a_request_holds_its_live_blocks(shape, window, sinks, tpb):
    [group] = layout_of(layer(window=window, sink_tokens=0 if window is None else sinks * tpb), tpb=tpb).groups
    expected = live(shape.history_tokens, shape.capacity_tokens, window, 0 if window is None else sinks, tpb)
    assert batch_pages(group, tpb, [shape]) == expected


@given(window=st.integers(1, 24), headroom=st.integers(1, 12), tpb=st.integers(1, 6), positions=st.integers(0, 90))
def test_the_peak_is_the_most_that_any_history_holds(window, headroom, tpb, positions):
    [group] = layout_of(layer(window=window), tpb=tpb).groups
    held = [live(h, min(h + headroom, positions), window, 0, tpb) for h in range(positions + 1)]
    assert max(held) <= peak_pages(group, tpb, positions, headroom) <= max_live_blocks(window, headroom, tpb)
    if positions > 8 * (window + headroom + tpb):
        assert peak_pages(group, tpb, positions, headroom) == max(held)


def test_a_decode_step_and_an_empty_request_of_a_full_group_hold_two_pages():
    [group] = layout_of(layer()).groups
    batch = [RequestShape(capacity_tokens=64, history_tokens=63), RequestShape(capacity_tokens=0)]
    assert batch_pages(group, 32, batch) == 2


@pytest.mark.parametrize(
    ("policy", "pages"), [(ReusePolicy.REQUIRED, 2 + 3 * 1), (ReusePolicy.OPTIONAL, 5), (ReusePolicy.PRIVATE, 9)]
)
def test_a_shared_prompt_counts_once_and_never_in_a_private_group(policy, pages):
    [group] = layout_of(layer(reuse_policy=policy)).groups
    batch = [RequestShape(capacity_tokens=96, history_tokens=70)] * 3
    assert batch_pages(group, 32, batch, shared_prompt_tokens=70) == pages


def test_a_typical_moment_has_one_prefill_and_decode_steps():
    batch = typical_batch(max_requests=3, max_num_tokens=2048, avg_seq_len=1024, max_seq_len=4096, drafts=2)
    assert [(r.capacity_tokens, r.history_tokens) for r in batch] == [(2048, 0), (1024, 1021), (1024, 1021)]
    with pytest.raises(SpecError, match=r"avg_seq_len is 5000, expected in \[3, max_seq_len=4096\]"):
        typical_batch(max_requests=3, max_num_tokens=2048, avg_seq_len=5000, max_seq_len=4096, drafts=2)


@pytest.mark.parametrize(("batch", "upper", "tokens"), [(1, 0, 0), (1, 32, 32), (1, 64, 32), (2, 64, 0)])
def test_one_full_page_clamps_the_longest_sequence(batch, upper, tokens):
    assert clamp_max_seq_len(layout_of(layer()), [1], batch_size=batch, upper_tokens=upper) == tokens


def test_a_window_alone_never_clamps_and_beside_a_full_group_pays_its_page():
    windowed = layer(window=32)
    assert clamp_max_seq_len(layout_of(windowed), [1], batch_size=1, upper_tokens=96) == 96
    both = layout_of(windowed, layer(1))
    assert both.num_pool_groups == 1
    assert clamp_max_seq_len(both, [4], batch_size=1, upper_tokens=96) == 96
    assert clamp_max_seq_len(both, [4], batch_size=2, upper_tokens=96) == 32
    assert isinstance(clamp_max_seq_len(both, [4], batch_size=1, upper_tokens=96), int)
    with pytest.raises(SpecError, match="length of pages is 2"):
        clamp_max_seq_len(both, [4, 4], batch_size=1, upper_tokens=96)


def test_twenty_eight_slots_of_alternating_windows_hold_704_tokens():
    """One sink, five of the window of 128, and 22 of full attention; growing further takes a page there is not."""
    layers = [
        KVCacheLayerSpec(
            layer_id=n, owner=LayerOwner.TARGET, num_kv_heads=4, head_dim=128, dtype=KVDtype.BFLOAT16,
            window=None if n % 2 else 128, sink_tokens=0 if n % 2 else 1,
        )
        for n in range(36)
    ]  # fmt: skip
    layout = layout_of(*layers)
    assert layout.num_pool_groups == 1 and layout.groups[0].page_bytes == 1179648
    assert 32 * 2**20 // layout.groups[0].page_bytes == 28
    assert clamp_max_seq_len(layout, [28], batch_size=1, upper_tokens=10_000, growing=True) == 704


@given(
    shape=shapes, window=st.integers(1, 24), sinks=st.integers(0, 3), tpb=st.integers(1, 6), rewind=st.integers(0, 9)
)
def test_scratch_blocks_are_new_and_out_of_every_window_that_may_come_back(shape, window, sinks, tpb, rewind):
    span = scratch_blocks(shape, window, sinks, tpb, max_rewind_tokens=rewind)
    new = range(-(-shape.history_tokens // tpb), -(-shape.capacity_tokens // tpb))
    final = max(0, shape.capacity_tokens - rewind)
    expected = [block for block in new if block in stale_blocks(final, window, sinks, tpb)]
    assert list(range(span.lo, span.hi)) == expected or (not expected and not len(span))
    assert isinstance(span, Span)


def test_a_history_behind_the_capacity_is_refused():
    with pytest.raises(SpecError, match="history_tokens is 5"):
        RequestShape(capacity_tokens=4, history_tokens=5)
