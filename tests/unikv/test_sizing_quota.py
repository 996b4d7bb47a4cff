"""From tokens to a quota and back, over ranks and the resume watermark, and the drafter's share."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from unikv.errors import SpecError
from unikv.layer_spec import KVCacheLayerSpec, KVDtype, LayerOwner, ReusePolicy
from unikv.sizing import CacheCost
from unikv.sizing_layers import LayerCosts
from unikv.sizing_quota import (
    agreed_quota,
    append_draft_ratio,
    check_utilisation,
    draft_share,
    quota_for_tokens,
    usable_tokens,
    windowed_pool_bytes,
)
from unikv.sizing_requests import RequestCost

COST = CacheCost(
    context_bytes_per_token=40,
    generation_bytes_per_token=20,
    fixed_bytes_per_request=3840,
    max_requests=4,
    max_num_tokens=1000,
)


def layer(number, window=None, *, size=100, owner=LayerOwner.TARGET, **more):
    """One layer of `size` bytes a token: key only, float8, so that a byte is an element."""
    return KVCacheLayerSpec(
        layer_id=number,
        owner=owner,
        num_kv_heads=1,
        head_dim=size,
        kv_factor=1,
        dtype=KVDtype.FLOAT8_E4M3FN,
        window=window,
        **more,
    )


@pytest.mark.parametrize("value", [0, -0.1, 1.1, math.nan])
def test_watermarks_out_of_range_are_refused(value):
    with pytest.raises(SpecError, match=r"max_util_for_resume is .*, expected in \(0, 1\]"):
        check_utilisation(value)


@given(tokens=st.integers(0, 10**7), percent=st.integers(1, 100))
def test_a_quota_below_the_watermark_holds_its_tokens_and_no_more_than_it_must(tokens, percent):
    quota = quota_for_tokens(COST, tokens, max_util_for_resume=percent / 100)
    held = usable_tokens(COST, quota, max_util_for_resume=percent / 100)
    assert held is not None and held >= tokens
    if tokens:
        less = usable_tokens(COST, quota - 1, max_util_for_resume=percent / 100)
        assert less is not None and less <= tokens
    assert quota_for_tokens(COST, tokens, limit_bytes=quota // 2) <= quota // 2


def test_ranks_agree_on_what_the_tightest_can_use_and_never_grow():
    quota = COST.quota_bytes(5000)
    assert agreed_quota(COST, quota, [5000, 3000, None]) == COST.quota_bytes(3000)
    assert agreed_quota(COST, quota, [5000, 9000]) == quota
    assert agreed_quota(COST, quota, [None, None]) == quota


def test_a_pool_of_windows_is_rounded_to_whole_slots_before_and_after_the_watermark():
    assert windowed_pool_bytes(1000, 300, max_util_for_resume=0.95) == 5 * 300
    assert windowed_pool_bytes(1200, 300) == 4 * 300


def test_the_drafters_share_is_what_its_windows_and_one_chunk_need():
    specs = [layer(0), layer(1, 504, owner=LayerOwner.DRAFT, reuse_policy=ReusePolicy.OPTIONAL)]
    load = {
        "tokens_per_block": 32,
        "max_seq_len": 8192,
        "generation_headroom_tokens": 9,
        "max_requests": 64,
        "max_num_tokens": 512,
    }
    total, draft = (CacheCost.from_specs(chosen, **load) for chosen in (specs, specs[1:]))
    quota = 64 * 2000 * 100
    # 504 + 9 - 1 positions touch at most 17 blocks of 32, in every one of 64 requests; and a chunk of 512 tokens.
    assert draft.quota_bytes(10**6) == 64 * 17 * 32 * 100 + 512 * 100
    assert draft_share(total, draft, quota) == draft.quota_bytes(10**6) / quota
    assert append_draft_ratio([0.25, 0.75], 0.2) == pytest.approx((0.2, 0.6, 0.2))
    for wrong in (0, 1, -0.5, 1.5):
        with pytest.raises(SpecError, match="draft ratio"):
            append_draft_ratio([1.0], wrong)
    with pytest.raises(SpecError, match="give the cache more bytes"):
        draft_share(total, draft, 1000)


def test_costs_of_single_requests_as_a_scheduler_counts_them():
    specs = [layer(0, 64), layer(1, 64), layer(2), layer(3)]
    fields = {"tokens_per_block": 16, "max_seq_len": 4096}
    plain = RequestCost.from_specs(specs, **fields)
    scratch = RequestCost.from_specs(specs, share_window_scratch=True, **fields)
    assert plain.bytes("context", 1000) == 400_000
    assert scratch.bytes("context", 1000) == 1000 * 300 + 64 * 100
    assert plain.bytes("generation", 1000, 5) - plain.bytes("generation", 1000, 4) == 200
    with pytest.raises(SpecError, match="state is 'paused', expected one of context, generation"):
        plain.bytes("paused", 10)


def test_layers_that_differ_in_sinks_policy_or_owner_share_no_scratch():
    same = [layer(0, 64), layer(1, 64)]
    for changes in ({"sink_tokens": 16}, {"reuse_policy": ReusePolicy.PRIVATE}, {"owner": LayerOwner.DRAFT}):
        costs = LayerCosts.from_specs([*same, layer(2, 64, **changes)], tokens_per_block=16, max_seq_len=None)
        assert [window.repeats for window in costs.windowed] == [False, True, False]
        assert costs.context_bytes_per_token(share_window_scratch=True) == 200
    sinks = LayerCosts.from_specs([layer(0, 64, sink_tokens=17)], tokens_per_block=16, max_seq_len=None)
    assert sinks.fixed_bytes(1) == (2 + 5) * 16 * 100
