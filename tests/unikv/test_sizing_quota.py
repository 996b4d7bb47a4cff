"""Quotas: the resume watermark, agreement of ranks, and the drafter's part."""

from __future__ import annotations

import math
from dataclasses import replace
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from unikv.errors import SpecError
from unikv.ids import LayerId
from unikv.layer_spec import KVCacheLayerSpec, LayerOwner
from unikv.sizing import CacheCost
from unikv.sizing_quota import (
    agreed_quota,
    append_draft_ratio,
    check_utilisation,
    draft_share,
    quota_for_tokens,
    usable_tokens,
    windowed_pool_bytes,
)
from unikv.testing import mixed_specs

UTILISATIONS = st.integers(1, 1000).map(lambda part: part / 1000)


def mixed_cost(specs: tuple[KVCacheLayerSpec, ...] = mixed_specs()) -> CacheCost:
    return CacheCost.from_specs(
        specs,
        tokens_per_block=32,
        max_seq_len=8192,
        generation_headroom_tokens=15,
        max_requests=8,
        max_num_tokens=2048,
    )


def plain_cost(bytes_per_token: int, requests: int = 0, fixed_bytes: int = 0) -> CacheCost:
    return CacheCost(
        context_bytes_per_token=bytes_per_token,
        generation_bytes_per_token=bytes_per_token,
        fixed_bytes_per_request=fixed_bytes,
        max_requests=requests,
        max_num_tokens=0,
    )


def test_draft_share_is_the_draft_cost_of_the_tokens_that_fit() -> None:
    total, draft = mixed_cost(), mixed_cost(mixed_specs()[4:])
    share = draft_share(total, draft, 6422528)
    assert share == (2048 * 1024 + 8 * 131072) / 6422528
    # Bytes per token alone would have said 1024 of 1824, whatever the length.
    assert draft_share(total, draft, 9699328) < share < 1024 / 1824


@pytest.mark.parametrize(("quota_bytes", "needed"), [(1000, 8 * 131072), (8 * 131072, 8 * 131072)])
def test_a_draft_that_leaves_nothing_is_refused(quota_bytes: int, needed: int) -> None:
    with pytest.raises(
        SpecError, match=rf"draft layers: quota_bytes is {needed}, expected in \(0, quota_bytes={quota_bytes}\)"
    ):
        draft_share(mixed_cost(), mixed_cost(mixed_specs()[4:]), quota_bytes)


@pytest.mark.parametrize("part", [0, -0.1, 1.1, math.nan, math.inf])
def test_a_watermark_is_a_part(part: float) -> None:
    with pytest.raises(SpecError, match=rf"cache quota: max_util_for_resume is {part}, expected in \(0, 1\]"):
        check_utilisation(part)


def test_a_watermark_is_the_number_that_was_written() -> None:
    # The float 0.95 is a little less: exact division by it would round 100 up to 101.
    assert check_utilisation(0.95) == Fraction(19, 20)
    assert quota_for_tokens(plain_cost(1), 95, max_util_for_resume=0.95) == 100
    assert check_utilisation(1) == 1
    assert check_utilisation(1e-5) == Fraction(1, 100000)


def test_a_quota_for_tokens_leaves_room_above_the_watermark_and_never_passes_the_limit() -> None:
    assert quota_for_tokens(mixed_cost(), 4096) == 6422528
    assert quota_for_tokens(mixed_cost(), 4096, max_util_for_resume=0.9) == math.ceil(Fraction(6422528 * 10, 9))
    assert quota_for_tokens(mixed_cost(), 4096, max_util_for_resume=0.9, limit_bytes=7_000_000) == 7_000_000
    assert quota_for_tokens(mixed_cost(), 4096, max_util_for_resume=0.9, limit_bytes=10**9) < 10**7


@given(st.integers(0, 20_000), UTILISATIONS)
def test_what_a_quota_was_made_for_is_usable(tokens: int, part: float) -> None:
    quota_bytes = quota_for_tokens(mixed_cost(), tokens, max_util_for_resume=part)
    usable = usable_tokens(mixed_cost(), quota_bytes, max_util_for_resume=part)
    assert usable == tokens
    if tokens:
        assert (usable_tokens(mixed_cost(), quota_bytes - 1, max_util_for_resume=part) or 0) < tokens


def test_ranks_agree_on_the_tightest() -> None:
    wide = plain_cost(10)
    assert agreed_quota(wide, 1000, [100, 40, None]) == 400
    assert agreed_quota(wide, 1000, [100, 40], max_util_for_resume=0.8) == 500
    assert agreed_quota(wide, 300, [100, 40]) == 300
    assert agreed_quota(wide, 1000, [None, None]) == 1000
    with pytest.raises(SpecError, match="max_util_for_resume is 0"):
        agreed_quota(wide, 1000, [None], max_util_for_resume=0)


@given(st.lists(st.tuples(st.integers(1, 50), st.integers(0, 10_000)), min_size=1, max_size=5), UTILISATIONS)
def test_after_agreement_every_rank_can_use_as_many_tokens(ranks: list[tuple[int, int]], part: float) -> None:
    costs = [plain_cost(size) for size, _ in ranks]
    quotas = [quota for _, quota in ranks]
    tokens = [usable_tokens(c, q, max_util_for_resume=part) for c, q in zip(costs, quotas, strict=True)]
    agreed = [agreed_quota(c, q, tokens, max_util_for_resume=part) for c, q in zip(costs, quotas, strict=True)]
    assert all(new <= old for new, old in zip(agreed, quotas, strict=True))
    least = min(count for count in tokens if count is not None)
    assert {usable_tokens(c, q, max_util_for_resume=part) for c, q in zip(costs, agreed, strict=True)} == {least}


def test_a_pool_of_windows_alone_is_rounded_up_to_slots_twice() -> None:
    # 1000 bytes are 4 slots of 300, and 4 slots below nine tenths are 5.
    assert windowed_pool_bytes(1000, 300) == 1200
    assert windowed_pool_bytes(1000, 300, max_util_for_resume=0.9) == 1500
    draft = mixed_cost(mixed_specs()[4:])
    assert windowed_pool_bytes(draft.intercept_bytes, 32768, max_util_for_resume=0.95) == 102 * 32768


def test_a_draft_ratio_scales_the_others_down() -> None:
    assert append_draft_ratio([0.75, 0.25], 0.2) == pytest.approx((0.6, 0.2, 0.2))
    assert sum(append_draft_ratio([0.5, 0.5], 0.1)) == pytest.approx(1.0)


@pytest.mark.parametrize("ratio", [0.0, 1.0, -0.1, 1.5, math.nan])
def test_a_draft_ratio_leaves_something_to_both(ratio: float) -> None:
    with pytest.raises(SpecError, match=r"pool split: draft ratio is .*, expected in \(0, 1\)"):
        append_draft_ratio([1.0], ratio)


def test_a_windowed_drafters_share_is_its_windows_and_one_chunk() -> None:
    full = replace(mixed_specs()[4], layer_id=LayerId(0), owner=LayerOwner.TARGET, window=None)
    draft_spec = replace(full, layer_id=LayerId(1), owner=LayerOwner.DRAFT, window=504)
    total, draft = (
        CacheCost.from_specs(
            specs,
            tokens_per_block=32,
            max_seq_len=8192,
            generation_headroom_tokens=9,
            max_requests=64,
            max_num_tokens=512,
        )
        for specs in ([full, draft_spec], [draft_spec])
    )
    # 504 + 9 - 1 positions touch at most 17 blocks of 32, in each of 64 requests; and a chunk of 512 tokens.
    assert draft.quota_bytes(10**6) == (64 * 17 * 32 + 512) * 512
    quota_bytes = total.quota_bytes(64 * 2000)
    assert draft_share(total, draft, quota_bytes) == draft.quota_bytes(10**6) / quota_bytes
