"""How many requests fit, proven by growing them in a real cache."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from unikv.budget import PoolBudget
from unikv.cache_manager import UnifiedKVCacheManager
from unikv.errors import CapacityError, SpecError
from unikv.ids import LayerId, RequestId
from unikv.layer_spec import KVCacheLayerSpec, KVDtype, LayerOwner
from unikv.layout import CacheLayout, build_layout
from unikv.request import KVCacheRequest, ResumeResult
from unikv.sizing_fit import (
    draft_bytes,
    longest_request,
    null_bytes,
    pool_bytes,
    request_pages,
    requests_for_bytes,
    slots_for_requests,
)
from unikv.speculation import SpeculationShape
from unikv.testing import mixed_specs, spec_lists

PAIR_BYTES = 25600 + 32768


def mixed_layout() -> CacheLayout:
    return build_layout(mixed_specs(), tokens_per_block=32, max_seq_len=8192)


def test_one_request_and_the_null_slots() -> None:
    layout = mixed_layout()
    assert null_bytes(layout) == PAIR_BYTES
    # 1000 tokens and 15 positions ahead of the last but one end in block 31; the window never has more than 4 blocks.
    assert request_pages(layout, 1000, 15) == (32, 4)
    assert request_pages(layout, 1, 1) == (1, 1)
    assert slots_for_requests(layout, 3, tokens=1000, headroom_tokens=15) == (1 + 96, 1 + 12)
    assert slots_for_requests(layout, 3, tokens=1000, headroom_tokens=15, chunk_tokens=65) == (1 + 96, 1 + 12 + 3)


def test_requests_for_bytes_to_the_byte() -> None:
    layout = mixed_layout()
    need = PAIR_BYTES + 3 * (32 * 25600 + 4 * 32768)
    assert requests_for_bytes(layout, need, tokens=1000, headroom_tokens=15) == 3
    assert requests_for_bytes(layout, need - 1, tokens=1000, headroom_tokens=15) == 2
    assert requests_for_bytes(layout, 10, tokens=1000, headroom_tokens=15) == 0
    with pytest.raises(SpecError, match="request: tokens is 0, expected >= 1"):
        requests_for_bytes(layout, need, tokens=0, headroom_tokens=15)


def test_a_windowed_drafter_gets_windows_and_a_chunk_not_its_part_of_the_bytes_per_token() -> None:
    layout = mixed_layout()
    found = [draft_bytes(layout, 8, tokens=tokens, headroom_tokens=15, chunk_tokens=2048) for tokens in (500, 8000)]
    assert found == [(8 * 4 + 64) * 32768] * 2
    by_tokens = 8 * 8000 * 1024
    assert found[1] < by_tokens / 20


def test_the_longest_request() -> None:
    layout = mixed_layout()
    bytes_for_40 = PAIR_BYTES + 40 * 25600 + 4 * 32768
    # The last of 40 blocks ends at 1280, and 15 positions lead the history.
    assert longest_request(layout, bytes_for_40, upper_tokens=8192, headroom_tokens=15) == 1280 - 14
    assert longest_request(layout, 1 << 40, upper_tokens=8192, headroom_tokens=15) == 8192
    assert longest_request(layout, 100, upper_tokens=8192, headroom_tokens=15) == 0


@given(spec_lists(), st.integers(1, 200), st.integers(1, 20), st.integers(0, 50), st.integers(0, 10**6))
def test_one_more_request_never_fits(
    specs: tuple[KVCacheLayerSpec, ...], tokens: int, headroom: int, chunk: int, spare_bytes: int
) -> None:
    layout = build_layout(specs, tokens_per_block=4, max_seq_len=None)

    def needed(requests: int) -> int:
        slots = slots_for_requests(layout, requests, tokens=tokens, headroom_tokens=headroom, chunk_tokens=chunk)
        return pool_bytes(layout, slots)

    memory = needed(0) + spare_bytes
    found = requests_for_bytes(layout, memory, tokens=tokens, headroom_tokens=headroom, chunk_tokens=chunk)
    assert needed(found) <= memory < needed(found + 1)


def grow_together(requests: list[KVCacheRequest], start: int, tokens: int, headroom: int) -> None:
    for history in range(start, tokens):
        for request in requests:
            request.resize(capacity_tokens=history + headroom, history_tokens=history)


@pytest.mark.parametrize(("spare", "fits"), [(0, True), (-1, False)])
def test_as_many_requests_grow_to_their_length_in_a_real_cache(spare: int, fits: bool) -> None:
    specs = mixed_specs()
    layout = build_layout(specs, tokens_per_block=32, max_seq_len=512)
    shape = SpeculationShape(max_draft_tokens=7, block_width=7, num_extra_kv_tokens=6)
    headroom = shape.generation_headroom(True)
    assert headroom == 15
    slots = slots_for_requests(layout, 3, tokens=300, headroom_tokens=headroom)
    pages = [slots[group.pool_group] + (spare if group.window is None else 0) for group in layout.groups]
    weights = {group.group_id: count for group, count in zip(layout.groups, pages, strict=True)}
    memory = sum(group.page_bytes * count for group, count in zip(layout.groups, pages, strict=True))
    manager = UnifiedKVCacheManager(
        specs,
        tokens_per_block=32,
        max_seq_len=512,
        pool=PoolBudget(bytes=memory, weights=weights),
        speculation=shape,
    )
    requests = [manager.create_request(RequestId(number)) for number in range(3)]
    if fits:
        grow_together(requests, 40, 300, headroom)
        assert manager.num_free_pages(layout.groups[0].group_id) == 0
    else:
        with pytest.raises(CapacityError):
            grow_together(requests, 40, 300, headroom)
    manager.check_integrity()
    for request in requests:
        request.close()
    manager.close()


def test_half_the_layers_windowed_with_a_sink_hold_704_tokens_in_28_pages_of_a_real_cache() -> None:
    """28 slots of 36 such layers are 32 MiB; the null slot is one more."""
    kinds = [{"window": 128, "sink_tokens": 1}, {"window": None}]
    specs = [
        KVCacheLayerSpec(
            layer_id=LayerId(number),
            owner=LayerOwner.TARGET,
            num_kv_heads=8,
            head_dim=64,
            dtype=KVDtype.FLOAT16,
            **kinds[number % 2],
        )
        for number in range(36)
    ]
    layout = build_layout(specs, tokens_per_block=32, max_seq_len=1024)
    assert [(group.page_bytes, group.pool_group) for group in layout.groups] == [(1179648, 0)] * 2
    assert (32 << 20) // layout.groups[0].page_bytes == 28
    manager = UnifiedKVCacheManager(specs[:2], tokens_per_block=32, max_seq_len=1024, pool=PoolBudget(pages=28 + 1))
    request = manager.create_request(RequestId(1))
    for tokens in range(1, 705):
        request.resize(capacity_tokens=tokens, history_tokens=tokens - 1)
    with pytest.raises(CapacityError):
        request.resize(capacity_tokens=705, history_tokens=704)
    assert (request.capacity_tokens, request.history_tokens) == (704, 703)
    manager.check_integrity()
    request.close()
    manager.close()


def test_a_draft_pool_for_64_requests_admits_63_steps_and_a_chunk() -> None:
    """Windows of 504 at 4 drafts: one prefill of 512 tokens beside 63 requests, at every history of a block."""
    drafts, chunk, admitted = 4, 512, 64
    headroom = (drafts - 1) + drafts + 1
    spec = replace(mixed_specs()[4], layer_id=LayerId(0), owner=LayerOwner.DRAFT, window=504, dtype=KVDtype.FLOAT16)
    layout = build_layout([spec], tokens_per_block=32, max_seq_len=4096)
    slots = slots_for_requests(layout, admitted, tokens=2048, headroom_tokens=headroom, chunk_tokens=chunk)
    assert slots == (1 + 64 * 17 + 16,)
    manager = UnifiedKVCacheManager([spec], tokens_per_block=32, max_seq_len=4096, pool=PoolBudget(pages=slots[0]))
    prefill = manager.create_request(RequestId(0))
    prefill.resize(capacity_tokens=chunk + drafts - 1)
    steps = [manager.create_request(RequestId(number)) for number in range(1, admitted)]
    for history in range(1024, 1056):
        for step in steps:
            step.resize(capacity_tokens=history + drafts - 1 + drafts + 1, history_tokens=history)
    assert manager.num_free_pages(layout.groups[0].group_id) == 64 * 17 + 16 - 64 * 17
    for step in steps:
        step.suspend()
        assert step.resume() is ResumeResult.OK
    manager.check_integrity()
    for request in (prefill, *steps):
        request.close()
    manager.close()


@given(
    count=st.integers(1, 6),
    tokens=st.integers(1, 90),
    headroom=st.integers(1, 9),
    page=st.integers(1, 8),
    window=st.one_of(st.none(), st.integers(1, 40)),
)
def test_pools_admit_as_many_requests_as_they_were_sized_for(
    count: int, tokens: int, headroom: int, page: int, window: int | None
) -> None:
    full = replace(mixed_specs()[4], layer_id=LayerId(0), owner=LayerOwner.TARGET, window=None)
    specs = [full, replace(full, layer_id=LayerId(1), owner=LayerOwner.DRAFT, window=window)]
    layout = build_layout(specs, tokens_per_block=page, max_seq_len=4096)
    slots = slots_for_requests(layout, count, tokens=tokens, headroom_tokens=headroom)
    memory = pool_bytes(layout, slots)
    assert longest_request(layout, memory, upper_tokens=4096, headroom_tokens=headroom) >= tokens
    budget = PoolBudget(pages=max(slots))
    manager = UnifiedKVCacheManager(specs, tokens_per_block=page, max_seq_len=4096, pool=budget)
    requests = [manager.create_request(RequestId(number)) for number in range(count + 1)]
    for history in sorted({max(0, tokens - 1 - back) for back in range(2 * page)}):
        for request in requests[:count]:
            request.resize(history + headroom, history)
    # The target's pool is the larger one, and full.
    with pytest.raises(CapacityError):
        requests[-1].resize(tokens - 1 + headroom)
    for request in requests:
        request.close()
    manager.close()
