"""What sequences cost, and how many fit."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from unikv.errors import SpecError
from unikv.ids import LayerId
from unikv.layer_spec import KVCacheLayerSpec, KVDtype, LayerOwner, ReusePolicy
from unikv.ranges import ceil_div, stale_blocks
from unikv.sizing import CacheCost
from unikv.testing import mixed_specs, spec_lists


def layer(size_bytes: int, window: int | None = None, **more: Any) -> KVCacheLayerSpec:
    """Return a layer that takes `size_bytes` bytes a token."""
    fields: dict[str, Any] = {"layer_id": 0, "owner": LayerOwner.TARGET, **more}
    return KVCacheLayerSpec(
        num_kv_heads=1, head_dim=size_bytes, dtype=KVDtype.FLOAT8_E4M3FN, kv_factor=1, window=window, **fields
    )


def cost(*specs: KVCacheLayerSpec, **more: Any) -> CacheCost:
    numbered = [replace(spec, layer_id=LayerId(number)) for number, spec in enumerate(specs)]
    fields: dict[str, Any] = {
        "tokens_per_block": 64,
        "max_seq_len": None,
        "generation_headroom_tokens": 1,
        "max_requests": 4,
        "max_num_tokens": 1000,
        **more,
    }
    return CacheCost.from_specs(numbered, **fields)


@pytest.mark.parametrize(("share", "quota_bytes"), [(False, 59360), (True, 49360)])
def test_two_windowed_layers_and_a_full_one(share: bool, quota_bytes: int) -> None:
    found = cost(layer(10, 128), layer(10, 128), layer(20), share_window_scratch=share)
    assert found.fixed_bytes_per_request == 2 * 192 * 10
    assert found.quota_bytes(1200) == quota_bytes
    assert found.tokens(quota_bytes) == 1200


def test_a_window_as_long_as_the_sequence_costs_a_slope_not_a_window() -> None:
    found = cost(layer(64, 2048), layer(64, 2048), layer(64, 4096), max_seq_len=4096, max_requests=3, max_num_tokens=0)
    assert (found.generation_bytes_per_token, found.intercept_bytes) == (64, 811008)


@pytest.mark.parametrize(("lookahead", "headroom", "intercept"), [(0, 1, 24576), (1, 2, 36864)])
def test_looking_ahead_widens_the_window(lookahead: int, headroom: int, intercept: int) -> None:
    found = cost(
        layer(64, 64),
        max_requests=3,
        max_num_tokens=0,
        lookahead_tokens=lookahead,
        generation_headroom_tokens=headroom,
    )
    assert found.intercept_bytes == intercept


def mixed_cost(specs: tuple[KVCacheLayerSpec, ...] = mixed_specs()) -> CacheCost:
    return CacheCost.from_specs(
        specs,
        tokens_per_block=32,
        max_seq_len=8192,
        generation_headroom_tokens=15,
        max_requests=8,
        max_num_tokens=2048,
    )


def test_mixed_model() -> None:
    found = mixed_cost()
    assert (found.context_bytes_per_token, found.generation_bytes_per_token) == (1824, 800)
    assert found.fixed_bytes_per_request == 131072
    assert found.intercept_bytes == 8 * 131072 + 1024 * 2048
    for tokens, quota_bytes in {1000: 2872576, 4096: 6422528, 8192: 9699328}.items():
        assert found.quota_bytes(tokens) == quota_bytes
        assert found.tokens(quota_bytes) == tokens
        assert found.tokens(quota_bytes - 1) == tokens - 1


def test_layers_are_rounded_to_pages_one_by_one() -> None:
    one = cost(layer(10, 100), tokens_per_block=64, generation_headroom_tokens=3)
    assert one.fixed_bytes_per_request == ceil_div(102 - 1, 64) * 64 * 10 + 64 * 10
    two = cost(layer(10, 100), layer(10, 100), tokens_per_block=64, generation_headroom_tokens=3)
    assert two.fixed_bytes_per_request == 2 * one.fixed_bytes_per_request


def test_sinks_are_charged_in_blocks() -> None:
    plain, sinks = cost(layer(10, 128)), cost(layer(10, 128, sink_tokens=65))
    assert sinks.fixed_bytes_per_request - plain.fixed_bytes_per_request == 2 * 64 * 10


@pytest.mark.parametrize(
    "other",
    [
        layer(10, 128, sink_tokens=1),
        layer(10, 128, reuse_policy=ReusePolicy.PRIVATE),
        layer(10, 128, owner=LayerOwner.DRAFT),
        layer(10, 129),
        layer(11, 128),
    ],
)
def test_scratch_is_shared_by_equal_layers_only(other: KVCacheLayerSpec) -> None:
    apart = cost(layer(10, 128), other, share_window_scratch=True)
    assert apart == cost(layer(10, 128), other, share_window_scratch=False)


def test_what_policies_promise_does_not_change_the_price() -> None:
    prices = {cost(layer(10, 128, reuse_policy=policy), layer(20)) for policy in ReusePolicy}
    assert len(prices) == 1


def test_a_slope_of_zero_is_no_cap() -> None:
    found = cost(layer(10, 128))
    fixed_bytes = 4 * 192 * 10
    assert found.tokens(fixed_bytes - 1) == 0
    assert found.tokens(fixed_bytes + 999 * 10) == 999
    assert found.tokens(fixed_bytes + 1000 * 10) is None
    assert cost(layer(10, 128), max_num_tokens=0).tokens(fixed_bytes) is None


def test_numbers_are_counts() -> None:
    with pytest.raises(SpecError, match="cache cost: max_requests is -1, expected an integer >= 0"):
        cost(layer(10), max_requests=-1)
    with pytest.raises(SpecError, match="cache cost: headroom_tokens is 0, expected >= 1"):
        cost(layer(10), generation_headroom_tokens=0)
    with pytest.raises(SpecError, match="cache: layers is 0"):
        cost()


costs = st.builds(
    CacheCost.from_specs,
    spec_lists(),
    tokens_per_block=st.sampled_from([1, 32]),
    max_seq_len=st.sampled_from([None, 60]),
    generation_headroom_tokens=st.integers(1, 40),
    max_requests=st.integers(0, 20),
    max_num_tokens=st.integers(0, 3000),
    share_window_scratch=st.booleans(),
)


@given(costs, st.integers(0, 10_000))
def test_tokens_and_quota_are_inverse(found: CacheCost, tokens: int) -> None:
    back = found.tokens(found.quota_bytes(tokens))
    if found.generation_bytes_per_token == 0 and tokens >= found.max_num_tokens:
        assert back is None
    else:
        assert back == tokens


@given(costs, st.integers(0, 10**8))
def test_tokens_are_the_most_that_fit(found: CacheCost, quota_bytes: int) -> None:
    tokens = found.tokens(quota_bytes)
    if tokens is None:
        assert found.quota_bytes(10**12) <= quota_bytes
    else:
        assert found.quota_bytes(tokens + 1) > quota_bytes
        assert tokens == 0 or found.quota_bytes(tokens) <= quota_bytes


@given(st.integers(1, 80), st.integers(0, 20), st.integers(1, 20), st.sampled_from([1, 4, 32]))
def test_the_fixed_cost_covers_every_state_of_a_request(window: int, sinks: int, headroom: int, tpb: int) -> None:
    spec = layer(1, window, sink_tokens=sinks)
    found = cost(spec, tokens_per_block=tpb, generation_headroom_tokens=headroom)
    held = max(
        ceil_div(history + headroom, tpb) - len(stale_blocks(history, window, ceil_div(sinks, tpb), tpb))
        for history in range(3 * (window + sinks + tpb))
    )
    assert held * tpb <= found.fixed_bytes_per_request
    if not sinks:
        assert held * tpb == found.fixed_bytes_per_request


def test_the_line_behind_one_iteration_is_slope_and_intercept() -> None:
    found = mixed_cost()
    assert found.quota_bytes(5000) == 5000 * found.slope_bytes_per_token + found.intercept_bytes


def test_a_drafter_of_its_own_pays_for_its_scratch_per_request() -> None:
    specs = (layer(10, 128), layer(20, owner=LayerOwner.DRAFT))
    plain, scratch = cost(*specs), cost(*specs, draft_scratch_tokens=7)
    assert scratch.fixed_bytes_per_request - plain.fixed_bytes_per_request == 7 * 20


def test_tokens_below_none_and_pages_of_none_are_refused() -> None:
    with pytest.raises(SpecError, match="cache cost: tokens is -1, expected >= 0"):
        mixed_cost().quota_bytes(-1)
    with pytest.raises(SpecError, match="cache cost: tokens_per_block is 0, expected >= 1"):
        cost(layer(10), tokens_per_block=0)
