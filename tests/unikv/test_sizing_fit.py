"""What is said to fit is admitted by a real manager, and one more is not."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from unikv.budget import PoolBudget
from unikv.cache_manager import UnifiedKVCacheManager
from unikv.errors import CapacityError, SpecError
from unikv.ids import GroupId, RequestId
from unikv.layer_spec import KVCacheLayerSpec, KVDtype, KVLayout, LayerOwner, ReusePolicy
from unikv.layout import build_layout
from unikv.request import ResumeResult
from unikv.sizing_fit import longest_request, null_bytes, pool_bytes, requests_for_bytes, slots_for_requests


def layer(number, window=None, owner=LayerOwner.TARGET, **more):
    return KVCacheLayerSpec(
        layer_id=number, owner=owner, num_kv_heads=1, head_dim=16, dtype=KVDtype.FLOAT16, window=window, **more
    )


DRAFT = layer(1, 504, LayerOwner.DRAFT, reuse_policy=ReusePolicy.OPTIONAL)


def layout_of(*layers, tpb=32):
    return build_layout(layers, tokens_per_block=tpb, max_seq_len=4096, kv_layout=KVLayout.HND)


def test_a_windowed_drafters_pool_admits_every_request_it_was_sized_for():
    """63 generations anywhere between 1,024 and 1,055 tokens, 9 positions ahead, beside one context chunk of 512."""
    [slots] = slots_for_requests(layout_of(DRAFT), 64, tokens=1056, headroom_tokens=9, chunk_tokens=512)
    assert slots == 1 + 64 * 17 + 16
    manager = UnifiedKVCacheManager([DRAFT], tokens_per_block=32, max_seq_len=4096, pool=PoolBudget(pages=slots))
    context = manager.create_request(RequestId(0))
    context.resize(512 + 4 - 1)
    running = [manager.create_request(RequestId(number)) for number in range(1, 64)]
    for history in range(1024, 1056):
        for request in running:
            request.resize(history + 9, history)
    for request in running:
        request.suspend()
        assert request.resume() is ResumeResult.OK
    manager.check_integrity()
    for request in (context, *running):
        request.close()
    manager.close()


@given(
    count=st.integers(1, 6),
    tokens=st.integers(1, 90),
    headroom=st.integers(1, 9),
    tpb=st.integers(1, 8),
    window=st.one_of(st.none(), st.integers(1, 40)),
)
def test_bytes_hold_as_many_requests_as_they_say(count, tokens, headroom, tpb, window):
    layers = [layer(0), layer(1, window, LayerOwner.DRAFT)]
    layout = layout_of(*layers, tpb=tpb)
    slots = slots_for_requests(layout, count, tokens=tokens, headroom_tokens=headroom)
    memory = pool_bytes(layout, slots)
    load = {"tokens": tokens, "headroom_tokens": headroom}
    assert requests_for_bytes(layout, memory, **load) == count
    assert requests_for_bytes(layout, memory - 1, **load) == count - 1
    assert null_bytes(layout) == pool_bytes(layout, slots_for_requests(layout, 0, **load))
    assert longest_request(layout, memory, upper_tokens=4096, headroom_tokens=headroom) >= tokens
    pages = max(slots)
    manager = UnifiedKVCacheManager(layers, tokens_per_block=tpb, max_seq_len=4096, pool=PoolBudget(pages=pages))
    requests = [manager.create_request(RequestId(number)) for number in range(count + 1)]
    for history in sorted({max(0, tokens - 1 - back) for back in range(2 * tpb)}):
        for request in requests[:count]:
            request.resize(history + headroom, history)
    if slots[layout.group(GroupId(0)).pool_group] == pages and layout.num_pool_groups == 2:
        with pytest.raises(CapacityError):
            requests[-1].resize(tokens - 1 + headroom)
    for request in requests:
        request.close()
    manager.close()


def test_a_request_has_a_length():
    with pytest.raises(SpecError, match="tokens is 0, expected >= 1"):
        requests_for_bytes(layout_of(layer(0)), 1000, tokens=0, headroom_tokens=1)
    assert longest_request(layout_of(layer(0)), 10, upper_tokens=100, headroom_tokens=1) == 0
