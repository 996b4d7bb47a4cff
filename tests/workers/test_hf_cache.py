"""K and V written through the page table come back as attention must see them, and nothing else does."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from unikv.budget import PoolBudget  # noqa: E402
from unikv.cache_manager import UnifiedKVCacheManager  # noqa: E402
from unikv.errors import InternalError, LocalProtocolError, SpecError  # noqa: E402
from unikv.ids import LayerId, RequestId  # noqa: E402
from unikv.layer_spec import KVCacheLayerSpec, KVDtype, KVLayout, LayerOwner  # noqa: E402
from workers.hf_cache import PagedKVCache  # noqa: E402
from workers.hf_specs import AttentionPlan  # noqa: E402

HEADS, HEAD_DIM = 2, 16
TORCH_DTYPES = {
    KVDtype.FLOAT32: torch.float32,
    KVDtype.FLOAT16: torch.float16,
    KVDtype.BFLOAT16: torch.bfloat16,
    KVDtype.FLOAT8_E4M3FN: torch.float8_e4m3fn,
}


def layer(layer_id: int, dtype: KVDtype = KVDtype.FLOAT32, window: int | None = None, **more) -> KVCacheLayerSpec:
    return KVCacheLayerSpec(
        layer_id=LayerId(layer_id),
        owner=LayerOwner.TARGET,
        num_kv_heads=HEADS,
        head_dim=HEAD_DIM,
        dtype=dtype,
        window=window,
        **more,
    )


def build(specs, *, tokens_per_block: int = 4, layout: KVLayout = KVLayout.HND) -> UnifiedKVCacheManager:
    manager = UnifiedKVCacheManager(
        specs, tokens_per_block=tokens_per_block, max_seq_len=64, pool=PoolBudget(pages=80), kv_layout=layout
    )
    for spec in specs:
        poison(manager, spec.layer_id)
    return manager


def poison(manager: UnifiedKVCacheManager, layer_id: LayerId) -> None:
    buffers = manager.get_buffers(layer_id)
    # 0x7f bytes are NaN in every float format used here.
    buffers.view(torch.uint8).fill_(0x7F) if buffers.element_size() == 1 else buffers.fill_(float("nan"))


def plan(*windows: int | None, imposed: int | None = None) -> AttentionPlan:
    ids = tuple(LayerId(i) for i in range(len(windows)))
    return AttentionPlan(layer_ids=ids, windows=windows, imposed_window=imposed)


def states(tokens: int, seed: int):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(2, 1, HEADS, tokens, HEAD_DIM, generator=generator)


@given(
    chunks=st.lists(st.integers(1, 9), min_size=1, max_size=6),
    tokens_per_block=st.sampled_from([1, 2, 4, 8]),
    layout=st.sampled_from(list(KVLayout)),
    dtype=st.sampled_from(list(TORCH_DTYPES)),
    window=st.one_of(st.none(), st.integers(1, 12)),
    seed=st.integers(0, 1000),
)
@settings(max_examples=80, deadline=None)
def test_what_attention_sees_is_what_was_written(chunks, tokens_per_block, layout, dtype, window, seed) -> None:
    manager = build([layer(0, dtype), layer(1, dtype, window)], tokens_per_block=tokens_per_block, layout=layout)
    request = manager.create_request(RequestId(1))
    cache = PagedKVCache(manager, request, plan(None, window))
    total = sum(chunks)
    full = states(total, seed)
    stored = full.to(TORCH_DTYPES[dtype]).to(torch.float32)
    position = 0
    for tokens in chunks:
        end = position + tokens
        request.resize(end, position)
        cache.begin(position, tokens)
        starts = (0, 0 if window is None else max(0, position + 1 - window))
        for index, start in enumerate(starts):
            assert cache.get_seq_length(index) == position
            assert cache.get_mask_sizes(tokens, index) == (end - start, start)
            new = full[..., position:end, :] * (index + 1)
            keys, values = cache.update(new[0], new[1], index)
            want = (full * (index + 1)).to(TORCH_DTYPES[dtype]).to(torch.float32) if index else stored
            assert torch.equal(keys, want[0, ..., start:end, :])
            assert torch.equal(values, want[1, ..., start:end, :])
        position = end
    manager.check_integrity()
    request.close()
    manager.close()


def test_kv_lives_in_the_managers_pages_and_nowhere_else() -> None:
    manager = build([layer(0)])
    request = manager.create_request(RequestId(1))
    request.resize(6)
    cache = PagedKVCache(manager, request, plan(None))
    new = states(6, seed=1)
    cache.begin(0, 6)
    keys, _ = cache.update(new[0], new[1], 0)
    slots = request.page_table(manager.layer_group_id(LayerId(0)))
    pages = manager.get_buffers(LayerId(0))
    assert torch.equal(pages[int(slots[1]), 0, :, :2], new[0, 0, :, 4:6])
    assert torch.equal(pages[int(slots[0]), 1], new[1, 0, :, :4])
    assert cache.layers[0].keys is None
    keys.zero_()  # a transient copy: attention may do with it what it likes
    assert torch.equal(pages[int(slots[0]), 0], new[0, 0, :, :4])
    request.close()
    manager.close()


def test_a_cold_cache_sees_only_what_it_wrote_itself() -> None:
    manager = build([layer(0)])
    request = manager.create_request(RequestId(1))
    request.resize(12, 7)
    cache = PagedKVCache(manager, request, plan(None), valid_from=7)
    new = states(2, seed=2)
    cache.begin(7, 2)
    assert cache.get_seq_length() == 7
    assert cache.get_mask_sizes(2, 0) == (2, 7)
    keys, values = cache.update(new[0], new[1], 0)
    assert torch.equal(keys, new[0])  # the poisoned prompt positions 4..6 of the same page are not in it
    assert torch.equal(values, new[1])
    with pytest.raises(LocalProtocolError, match="position is 6, expected >= 7; start at or after valid_from"):
        cache.begin(6, 1)
    request.close()
    manager.close()


def test_rejected_tokens_are_overwritten_and_never_read() -> None:
    manager = build([layer(0)])
    request = manager.create_request(RequestId(1))
    request.resize(16)
    cache = PagedKVCache(manager, request, plan(None))
    first, second = states(6, seed=3), states(2, seed=4)
    cache.begin(0, 6)
    cache.update(first[0], first[1], 0)
    cache.begin(3, 2)  # positions 3, 4, 5 were rejected
    keys, _ = cache.update(second[0], second[1], 0)
    assert torch.equal(keys, torch.cat([first[0, ..., :3, :], second[0]], dim=-2))
    request.close()
    manager.close()


def test_an_imposed_window_masks_older_positions_for_each_token() -> None:
    manager = build([layer(0)])
    request = manager.create_request(RequestId(1))
    request.resize(16)
    cache = PagedKVCache(manager, request, plan(3, imposed=3))
    cache.begin(0, 5)
    assert cache.imposed_mask()[0, 0].int().tolist() == [
        [1, 0, 0, 0, 0],
        [1, 1, 0, 0, 0],
        [1, 1, 1, 0, 0],
        [0, 1, 1, 1, 0],
        [0, 0, 1, 1, 1],
    ]
    cache.begin(5, 2)  # sees positions 3..6
    assert cache.imposed_mask()[0, 0].int().tolist() == [[1, 1, 1, 0], [0, 1, 1, 1]]
    cache.begin(7, 1)
    assert cache.imposed_mask() is None
    plain = PagedKVCache(manager, request, plan(None))
    plain.begin(0, 5)
    assert plain.imposed_mask() is None
    request.close()
    manager.close()


def test_a_page_that_left_the_window_cannot_be_read_again() -> None:
    manager = build([layer(0, window=4)])
    request = manager.create_request(RequestId(9))
    request.resize(20, 12)
    cache = PagedKVCache(manager, request, plan(4))
    cache.begin(12, 1)
    with pytest.raises(InternalError, match=r"request 9: a block in use has no page: blocks \[0, 2\) of group 0"):
        cache.begin(4, 1)
    request.close()
    manager.close()


def test_a_pass_beyond_the_capacity_is_refused() -> None:
    manager = build([layer(0)])
    request = manager.create_request(RequestId(3))
    request.resize(5)
    cache = PagedKVCache(manager, request, plan(None))
    with pytest.raises(LocalProtocolError, match=r"request 3: capacity_tokens is 5, expected >= 6; resize"):
        cache.begin(4, 2)
    request.close()
    manager.close()


def test_states_of_another_shape_are_refused_instead_of_broadcast() -> None:
    manager = build([layer(0)])
    request = manager.create_request(RequestId(3))
    request.resize(8)
    cache = PagedKVCache(manager, request, plan(None))
    with pytest.raises(LocalProtocolError, match="begun forward pass"):
        cache.update(torch.zeros(1, HEADS, 1, HEAD_DIM), torch.zeros(1, HEADS, 1, HEAD_DIM), 0)
    cache.begin(0, 1)
    for shape in ((1, 1, 1, HEAD_DIM), (2, HEADS, 1, HEAD_DIM), (1, HEADS, 2, HEAD_DIM)):
        with pytest.raises(SpecError, match=r"K/V shape is .* expected \(1, 2, 1, 16\)"):
            cache.update(torch.zeros(shape), torch.zeros(shape), 0)
    request.close()
    manager.close()


@pytest.mark.parametrize(
    ("spec", "got"),
    [
        (layer(0, kv_factor=1), "float32 with kv_factor 1"),
        (layer(0, KVDtype.NVFP4), "nvfp4 with kv_factor 2', expected K and V"),
    ],
)
def test_layers_that_hold_no_plain_k_and_v_are_refused(spec, got) -> None:
    manager = UnifiedKVCacheManager([spec], tokens_per_block=4, max_seq_len=64, pool=PoolBudget(pages=8))
    request = manager.create_request(RequestId(1))
    with pytest.raises(SpecError, match=got):
        PagedKVCache(manager, request, plan(None))
    request.close()
    manager.close()
