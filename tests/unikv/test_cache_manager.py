import gc
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

import unikv
from unikv.budget import PoolBudget
from unikv.cache_manager import UnifiedKVCacheManager
from unikv.errors import InternalError, LocalProtocolError, SpecError, UnknownLayerError
from unikv.ids import NO_PAGE, NULL_SLOT, GroupId, LayerId, RequestId
from unikv.kernel_index import flat_page_index
from unikv.layer_spec import KVCacheLayerSpec, KVDtype, KVLayout, LayerOwner, ReusePolicy
from unikv.speculation import SpeculationShape

G0, G1 = GroupId(0), GroupId(1)
DFLASH = SpeculationShape(max_draft_tokens=7, block_width=8, num_extra_kv_tokens=6)


def spec(layer_id, heads=2, head_dim=64, *, dtype=KVDtype.BFLOAT16, owner=LayerOwner.TARGET, **fields):
    return KVCacheLayerSpec(
        layer_id=LayerId(layer_id), owner=owner, num_kv_heads=heads, head_dim=head_dim, dtype=dtype, **fields
    )


def mixed_model():
    """NVFP4, FP8 and key-only target layers and two windowed draft layers: 1824 bytes a token, five pools."""
    draft = {"owner": LayerOwner.DRAFT, "window": 64, "reuse_policy": ReusePolicy.OPTIONAL}
    return (
        spec(0, dtype=KVDtype.NVFP4),
        spec(1, dtype=KVDtype.FLOAT8_E4M3FN),
        spec(2, 1, 128, kv_factor=1),
        spec(3, dtype=KVDtype.NVFP4),
        spec(4, **draft),
        spec(5, **draft),
    )


def odd_slots():
    """A key-only layer in front of a K/V layer with equal buffers: three buffers a slot."""
    return (spec(0, kv_factor=1), spec(1))


def extras():
    return (spec(0, 1, 16, extra_buffers={"index_key": 7}), spec(1, 1, 16, extra_buffers={"index_key": 7, "state": 3}))


@pytest.fixture
def build():
    """Return a function that builds managers of ten pages, closed with every law kept."""
    managers = []

    def make(specs, *, pages=10, tokens_per_block=32, max_seq_len=1024, **kwargs):
        kwargs.setdefault("pool", PoolBudget(pages=pages))
        manager = UnifiedKVCacheManager(specs, tokens_per_block=tokens_per_block, max_seq_len=max_seq_len, **kwargs)
        managers.append(manager)
        return manager

    yield make
    for manager in managers:
        for request in list(manager._requests.values()):
            request.close()
        manager.check_integrity()
        manager.close()


def pages_of(manager, layer_id):
    """Yield (role, page by slot) of everything a layer stores, each page as contiguous uint8 bytes."""
    spec = manager.get_layer_spec(layer_id)
    for tensor, roles in (
        (manager.get_buffers(layer_id), ("key", "value")),
        (manager.get_scales(layer_id), ("key_block_scale", "value_block_scale")),
    ):
        for lane in range(spec.kv_factor if tensor is not None else 0):
            yield roles[lane], [tensor[s, lane].view(torch.uint8) for s in range(tensor.shape[0])]
    for role in spec.extra_buffers:
        tensor = manager.get_extra(layer_id, role)
        yield role, list(tensor)


def raw_page(manager, layer_id, role, slot):
    """Return the bytes of one page at the address that the layout gives, straight from the pool."""
    buffer = manager.layout.buffer(layer_id, role)
    pool = manager.pools.numpy(manager.pools.storage_of(buffer.group_id, buffer.pool_index))
    begin = manager.layout.byte_offset(layer_id, role, slot)
    return pool[begin : begin + buffer.size_bytes]


# ---- what the layers are


def test_queries_about_layers(build):
    manager = build(mixed_model())
    assert manager.draft_layer_ids == (4, 5)
    assert manager.layer_grouping == ((0, 1, 2, 3), (4, 5))
    assert [manager.layer_group_id(LayerId(i)) for i in range(6)] == [0, 0, 0, 0, 1, 1]
    assert [manager.layer_kv_factor(LayerId(i)) for i in range(6)] == [2, 2, 1, 2, 2, 2]
    assert [manager.is_draft_layer(LayerId(i)) for i in range(6)] == [False] * 4 + [True] * 2
    assert manager.get_layer_owner(LayerId(5)) is LayerOwner.DRAFT
    assert manager.get_layer_spec(LayerId(2)) == mixed_model()[2]


def test_bytes_per_token_by_layer_and_role(build):
    manager = build(mixed_model())
    assert [manager.get_layer_bytes_per_token(LayerId(i)) for i in range(6)] == [144, 256, 256, 144, 512, 512]
    assert manager.bytes_per_token == 1824
    assert manager.get_layer_bytes_per_token(LayerId(0), "key") == 64
    assert manager.get_layer_bytes_per_token(LayerId(0), "value_block_scale") == 8
    with pytest.raises(SpecError, match="layer 2: role is 'value', expected one of key"):
        manager.get_layer_bytes_per_token(LayerId(2), "value")


@pytest.mark.parametrize(
    "query",
    [
        "get_buffers",
        "get_scales",
        "get_flat_pages",
        "get_layer_spec",
        "get_layer_owner",
        "is_draft_layer",
        "layer_kv_factor",
        "layer_group_id",
        "get_layer_bytes_per_token",
    ],
)
def test_a_layer_of_another_rank_is_a_key_error_that_helps(build, query):
    manager = build(odd_slots())
    with pytest.raises(KeyError, match=r"layer_id is 7, expected one of the layers of this rank \(0, 1\)"):
        getattr(manager, query)(LayerId(7))


def test_absent_roles(build):
    manager = build(mixed_model())
    assert manager.get_scales(LayerId(1)) is None
    with pytest.raises(SpecError, match="layer 1: role is 'index_key'"):
        manager.get_extra(LayerId(1), "index_key")


# ---- views


@pytest.mark.parametrize(
    ("layer_id", "slot_three"),
    [
        (0, {"key": 24576, "value": 26624, "key_block_scale": 3072, "value_block_scale": 3328}),
        (1, {"key": 24576, "value": 28672}),
        (2, {"key": 24576}),
        (3, {"key": 28672, "value": 30720, "key_block_scale": 3584, "value_block_scale": 3840}),
        (4, {"key": 98304, "value": 106496}),
        (5, {"key": 114688, "value": 122880}),
    ],
)
def test_mixed_model_writes_land_at_their_addresses(build, layer_id, slot_three):
    manager = build(mixed_model())
    pages = dict(pages_of(manager, LayerId(layer_id)))
    assert pages.keys() == slot_three.keys()
    for role, address in slot_three.items():
        pages[role][3].fill_(0xA5)
        buffer = manager.layout.buffer(LayerId(layer_id), role)
        pool = manager.pools.numpy(manager.pools.storage_of(buffer.group_id, buffer.pool_index))
        assert np.flatnonzero(pool == 0xA5)[[0, -1]].tolist() == [address, address + buffer.size_bytes - 1]
        assert np.count_nonzero(pool) == buffer.size_bytes
        pool[:] = 0


def test_odd_slots_of_a_mixed_pool(build):
    manager = build(odd_slots(), pages=5)
    view = manager.get_buffers(LayerId(1))
    pool = manager.pools.numpy(0)
    for slot, address in enumerate([8192, 32768, 57344, 81920, 106496]):
        view[slot, 0].view(torch.uint8).fill_(slot + 1)
        view[slot, 1].view(torch.uint8).fill_(0x80 + slot)
        assert (pool[address : address + 8192] == slot + 1).all()
        assert (pool[address + 8192 : address + 16384] == 0x80 + slot).all()
    assert not manager.get_buffers(LayerId(0)).view(torch.uint8).any()


def test_a_key_only_layer_counts_every_slot(build):
    manager = build(odd_slots(), pages=5)
    assert manager.get_buffers(LayerId(0)).shape == (5, 1, 2, 32, 64)
    assert (manager.num_slots(G0), manager.num_free_pages(G0)) == (5, 4)


@pytest.mark.parametrize("kv_layout", KVLayout)
@pytest.mark.parametrize("specs", [mixed_model(), odd_slots(), extras()], ids=["mixed", "odd", "extras"])
def test_no_page_overlaps_another_and_each_is_where_the_layout_says(build, specs, kv_layout):
    manager = build(specs, pages=5, kv_layout=kv_layout)
    written = {}
    for layer in specs:
        for role, pages in pages_of(manager, layer.layer_id):
            for slot, page in enumerate(pages):
                stamp = len(written) + 1
                page.fill_(stamp)
                written[layer.layer_id, role, slot] = stamp
    assert len(written) < 256
    for (layer_id, role, slot), stamp in written.items():
        assert (raw_page(manager, layer_id, role, slot) == stamp).all()
    assert all(storage.all() for storage in manager.pools.storages)


def test_shapes_of_both_orders(build):
    hnd, nhd = (build([spec(0, 3, 16)], pages=4, kv_layout=order) for order in (KVLayout.HND, KVLayout.NHD))
    assert hnd.get_buffers(LayerId(0)).shape == (4, 2, 3, 32, 16)
    assert nhd.get_buffers(LayerId(0)).shape == (4, 2, 32, 3, 16)


def test_packed_nvfp4_and_its_scales(build):
    manager = build(mixed_model())
    data, scales = manager.get_buffers(LayerId(3)), manager.get_scales(LayerId(3))
    assert (data.shape, data.dtype) == ((10, 2, 2, 32, 32), torch.uint8)
    assert (scales.shape, scales.dtype) == ((10, 2, 2, 32, 4), torch.float8_e4m3fn)
    assert (data.stride(0), scales.stride(0)) == (8192, 1024)


@pytest.mark.parametrize(
    ("dtype", "want"),
    [
        (KVDtype.FLOAT32, torch.float32),
        (KVDtype.FLOAT16, torch.float16),
        (KVDtype.BFLOAT16, torch.bfloat16),
        (KVDtype.FLOAT8_E4M3FN, torch.float8_e4m3fn),
    ],
)
def test_element_types(build, dtype, want):
    assert build([spec(0, dtype=dtype)]).get_buffers(LayerId(0)).dtype == want


def test_views_are_stable(build):
    manager = build(mixed_model())
    first, again = manager.get_buffers(LayerId(4)), manager.get_buffers(LayerId(4))
    assert first.data_ptr() == again.data_ptr()
    assert first.data_ptr() == manager.pools.storages[manager.pools.storage_of(G1, 0)].data_ptr()


def test_extras_have_a_row_per_token(build):
    manager = build(extras(), pages=4)
    view = manager.get_extra(LayerId(1), "index_key")
    assert (view.shape, view.dtype) == ((4, 32, 7), torch.uint8)
    view[3, 2] = torch.arange(7, dtype=torch.uint8)
    assert raw_page(manager, LayerId(1), "index_key", 3)[14:21].tolist() == list(range(7))


@pytest.mark.parametrize("sub_page_tokens", [None, 8])
def test_flat_pages_show_the_same_tokens_as_the_views(build, sub_page_tokens):
    manager = build(odd_slots(), pages=5, kv_layout=KVLayout.NHD)
    view, flat = manager.get_buffers(LayerId(1)), manager.get_flat_pages(LayerId(1), sub_page_tokens=sub_page_tokens)
    torch.manual_seed(0)
    view.copy_(torch.randn(view.shape))
    row = np.array([3, 1, 4], dtype=np.int32)
    for lane, role in enumerate(("key", "value")):
        ids = flat_page_index(manager.layout, row, LayerId(1), role, sub_page_tokens=sub_page_tokens)
        tokens = torch.cat([flat[int(page)] for page in ids])
        assert torch.equal(tokens, torch.cat([view[int(slot), lane] for slot in row]))


# ---- budgets


def test_a_budget_in_pages_counts_for_every_pool_group(build):
    manager = build(mixed_model(), pages=10)
    assert [manager.num_slots(g) for g in (G0, G1)] == [10, 10]
    assert [manager.num_free_pages(g) for g in (G0, G1)] == [9, 9]


def test_a_budget_in_bytes_is_never_exceeded(build):
    manager = build(mixed_model(), pool=PoolBudget(bytes=7 * (25600 + 32768) + 1))
    assert [manager.num_slots(g) for g in (G0, G1)] == [7, 7]
    assert sum(storage.numel() for storage in manager.pools.storages) == 7 * (25600 + 32768)


def test_weights_split_the_bytes(build):
    manager = build(mixed_model(), pool=PoolBudget(bytes=5 * (3 * 25600 + 32768), weights={G0: 3, G1: 1}))
    assert [manager.num_slots(g) for g in (G0, G1)] == [15, 5]


@pytest.mark.parametrize(
    ("fields", "text"),
    [
        ({}, "budget is 'pages=None and bytes=None', expected either pages or bytes; give exactly one"),
        ({"pages": 4, "bytes": 4}, "budget is 'pages=4 and bytes=4'"),
        ({"pages": 0}, "pages is 0, expected an integer >= 1"),
        ({"bytes": -5}, "bytes is -5, expected an integer >= 1"),
        ({"bytes": 1.5}, "bytes is 1.5, expected an integer >= 1"),
        ({"pages": 4, "weights": {G0: 1}}, "weights is {0: 1}, expected None beside pages"),
    ],
)
def test_wrong_budgets(fields, text):
    with pytest.raises(SpecError, match=f"pool: {text}"):
        PoolBudget(**fields)


@pytest.mark.parametrize("budget", [PoolBudget(pages=1), PoolBudget(bytes=1000)])
def test_a_pool_without_a_page_to_hand_out_is_refused(budget):
    with pytest.raises(SpecError, match=r"num_slots is 1, expected >= 2|quota_bytes is 1000, expected >= 49152"):
        UnifiedKVCacheManager(odd_slots(), tokens_per_block=32, max_seq_len=64, pool=budget)


# ---- capacities


def test_every_capacity_uses_the_same_reserve(build):
    manager = build(mixed_model(), speculation=DFLASH)
    assert manager.extra_tokens == 8
    assert manager.context_capacity(0, 24) == 32
    assert manager.context_capacity(512, 100) == 620
    assert manager.generation_capacity(128, 7) == 143
    assert manager.max_blocks_per_sequence == 36


def test_without_hosted_draft_layers_only_positions_are_reserved(build):
    manager = build(odd_slots(), speculation=DFLASH)
    assert (manager.extra_tokens, manager.context_capacity(0, 26)) == (6, 32)


def test_without_speculation_nothing_is_reserved(build):
    manager = build(mixed_model(), max_seq_len=127)
    assert manager.speculation is None
    assert (manager.extra_tokens, manager.context_capacity(4, 5), manager.max_blocks_per_sequence) == (0, 9, 4)


@pytest.mark.parametrize(
    ("width", "prompt", "blocks"),
    [(7, 24, 1), (8, 24, 1), (7, 25, 1), (8, 25, 2), (7, 26, 2), (8, 26, 2), (7, 57, 2), (8, 57, 3), (7, 58, 3)],
)
def test_the_last_draft_position_always_has_a_page(build, width, prompt, blocks):
    shape = SpeculationShape(max_draft_tokens=7, block_width=width, num_extra_kv_tokens=6)
    manager = build(mixed_model(), speculation=shape)
    request = manager.create_request(RequestId(1))
    request.resize(manager.context_capacity(0, prompt))
    assert request.num_blocks == blocks
    assert (prompt + width - 1) // 32 < request.num_blocks
    assert request.page_table(G1)[(prompt + width - 1) // 32] != NO_PAGE


def test_a_generation_allocates_live_blocks_only(build):
    manager = build(mixed_model(), speculation=DFLASH)
    request = manager.create_request(RequestId(1))
    request.resize(manager.generation_capacity(128, 0), history_tokens=128)
    assert request.page_table(G1).tolist() == [NO_PAGE, NO_PAGE, 1, 2, 3]


@pytest.mark.parametrize("prompt", [1, 600, 1024])
def test_the_longest_sequence_can_take_its_last_step(build, prompt):
    manager = build(mixed_model(), pages=40, speculation=DFLASH)
    request = manager.create_request(RequestId(1))
    request.resize(manager.generation_capacity(prompt, 7), history_tokens=prompt)
    history = prompt
    while history < 1024:
        request.grow(7)
        accepted = min(7, 1024 - history - 1)
        history += 1 + accepted
        request.rewind(accepted, history)
        assert request.capacity_tokens >= history + 8
    assert request.history_tokens == 1024


# ---- block tables


def test_block_tables_have_no_hole_a_kernel_could_fall_into(build):
    manager = build(mixed_model())
    first, second = (manager.create_request(RequestId(i)) for i in (1, 2))
    first.resize(136, history_tokens=128)
    second.resize(40)
    table = manager.block_table(G1, [RequestId(2), None, RequestId(1)])
    assert (table.shape, table.dtype) == ((3, manager.max_blocks_per_sequence), np.int32)
    assert table[:, :6].tolist() == [[4, 5, 0, 0, 0, 0], [0] * 6, [0, 0, 1, 2, 3, 0]]
    assert not table[:, 6:].any()


def test_block_tables_belong_to_the_caller(build):
    manager = build(mixed_model())
    manager.create_request(RequestId(1)).resize(40)
    table = manager.block_table(G0, [RequestId(1)])
    table[:] = 9
    assert manager.block_table(G0, [RequestId(1)])[0, :2].tolist() == [1, 2]


def test_block_tables_take_another_padding(build):
    manager = build(mixed_model())
    manager.create_request(RequestId(1)).resize(40)
    table = manager.block_table(G0, [RequestId(1), None], pad_slot=NO_PAGE)
    assert table[:, :3].tolist() == [[1, 2, NO_PAGE], [NO_PAGE] * 3]


def test_an_empty_batch_has_an_empty_table(build):
    manager = build(mixed_model())
    assert manager.block_table(G0, []).shape == (0, manager.max_blocks_per_sequence)


def test_dummy_rows_cannot_reach_a_page_of_a_request(build):
    manager = build(mixed_model())
    request = manager.create_request(RequestId(1))
    request.resize(9 * 32)
    assert manager.num_free_pages(G0) == 0
    dummies = manager.block_table(G0, [None, None])
    assert set(dummies.ravel().tolist()) == {NULL_SLOT}
    manager.get_buffers(LayerId(1)).view(torch.uint8)[dummies[0, 0]] = 0xFF
    owned = torch.from_numpy(request.page_table(G0).astype(np.int64))
    assert not manager.get_buffers(LayerId(1)).view(torch.uint8)[owned].any()


def test_a_request_that_is_not_open_has_no_row(build):
    manager = build(mixed_model())
    manager.create_request(RequestId(1)).close()
    with pytest.raises(LocalProtocolError, match="block table: request_id is 1, expected an open request"):
        manager.block_table(G0, [RequestId(1)])
    with pytest.raises(UnknownLayerError, match="group_id is 2"):
        manager.block_table(GroupId(2), [])


# ---- legacy constructor


@pytest.mark.parametrize("kv_factor", [1, 2])
@pytest.mark.parametrize("dtype", [KVDtype.BFLOAT16, KVDtype.NVFP4])
def test_scalars_give_the_same_cache_as_the_equivalent_specs(kv_factor, dtype):
    shape = {"tokens_per_block": 16, "max_seq_len": 512, "pool": PoolBudget(pages=12), "speculation": DFLASH}
    old = UnifiedKVCacheManager.from_scalars(
        5, [4, 4, 0, 2, 4], 32, dtype, kv_factor=kv_factor, windows=[None, 64, 512], total_num_kv_heads=8, **shape
    )
    heads = {0: 4, 1: 4, 3: 2, 4: 4}
    fields = {"dtype": dtype, "kv_factor": kv_factor, "total_num_kv_heads": 8}
    new = UnifiedKVCacheManager(
        [spec(i, n, 32, window={1: 64, 4: 64}.get(i), **fields) for i, n in heads.items()], **shape
    )
    try:
        assert old.layout == new.layout
        assert (old.bytes_per_token, old.extra_tokens) == (new.bytes_per_token, new.extra_tokens)
        assert [s.numel() for s in old.pools.storages] == [s.numel() for s in new.pools.storages]
        for manager in (old, new):
            request = manager.create_request(RequestId(1))
            request.resize(150, history_tokens=100)
            request.grow(3)
        for group in old.layout.groups:
            tables = [m.block_table(group.group_id, [RequestId(1), None]) for m in (old, new)]
            assert np.array_equal(*tables)
            assert old.num_free_pages(group.group_id) == new.num_free_pages(group.group_id)
        for layer_id in heads:
            views = [m.get_buffers(LayerId(layer_id)) for m in (old, new)]
            assert (views[0].shape, views[0].stride()) == (views[1].shape, views[1].stride())
            assert views[0].storage_offset() == views[1].storage_offset()
    finally:
        for manager in (old, new):
            for request in list(manager._requests.values()):
                request.close()
            manager.close()


def test_specs_beside_scalars_must_say_the_same():
    shape = {"tokens_per_block": 16, "max_seq_len": 512, "pool": PoolBudget(pages=3)}
    manager = UnifiedKVCacheManager.from_scalars(1, 2, 64, KVDtype.BFLOAT16, specs=[spec(0, window=64)], **shape)
    assert manager.layout.groups[0].window == 64
    manager.close()
    with pytest.raises(SpecError, match="layer 0: num_kv_heads is 2, expected 4 as the argument num_kv_heads says"):
        UnifiedKVCacheManager.from_scalars(1, 4, 64, KVDtype.BFLOAT16, specs=[spec(0)], **shape)


def test_a_whole_draft_manager_from_scalars(build):
    manager = UnifiedKVCacheManager.from_scalars(
        2,
        1,
        16,
        KVDtype.FLOAT16,
        owner=LayerOwner.DRAFT,
        tokens_per_block=16,
        max_seq_len=64,
        pool=PoolBudget(pages=3),
        speculation=DFLASH,
    )
    assert manager.draft_layer_ids == (0, 1)
    assert manager.extra_tokens == 8
    manager.close()


# ---- life of the manager


def test_a_request_id_is_open_once(build):
    manager = build(odd_slots())
    first = manager.create_request(RequestId(3))
    with pytest.raises(LocalProtocolError, match="request_id is 3, expected an id that is not open"):
        manager.create_request(RequestId(3))
    first.close()
    second = manager.create_request(RequestId(3))
    first.close()
    second.resize(32)
    assert manager.num_free_pages(G0) == 8


def test_close_counts_what_is_still_open_and_changes_nothing(build):
    manager = build(odd_slots())
    requests = [manager.create_request(RequestId(i)) for i in range(3)]
    for count in (3, 2, 1):
        with pytest.raises(LocalProtocolError, match=rf"{count} KV cache request\(s\) still open, 0 page pin\(s\)"):
            manager.close()
        requests.pop().close()
    manager.create_request(RequestId(9)).close()
    manager.close()


def test_close_waits_for_pins(build):
    manager = build(odd_slots())
    request = manager.create_request(RequestId(1))
    request.resize(40)
    pin = request.pin()
    request.close()
    with pytest.raises(LocalProtocolError, match=r"0 KV cache request\(s\) still open, 1 page pin\(s\) still held"):
        manager.close()
    pin.release()
    manager.close()


def test_a_closed_manager_serves_nobody(build):
    manager = build(odd_slots())
    manager.close()
    manager.close()
    with pytest.raises(LocalProtocolError, match="cache manager: state is 'closed', expected an open manager"):
        manager.create_request(RequestId(1))
    with pytest.raises(LocalProtocolError, match="pool storage: state is 'closed'"):
        manager.get_buffers(LayerId(0))


def test_a_closed_manager_leaves_no_descriptor_and_no_memory():
    def open_descriptors():
        gc.collect()
        return {entry.name for entry in Path("/proc/self/fd").iterdir()}

    before = open_descriptors()
    for _ in range(3):
        manager = UnifiedKVCacheManager(mixed_model(), tokens_per_block=32, max_seq_len=256, pool=PoolBudget(pages=4))
        manager.get_buffers(LayerId(0)).fill_(1)
        manager.close()
    assert open_descriptors() == before
    assert "unikv-pool" not in Path("/proc/self/maps").read_text()


def test_integrity_finds_a_slot_two_tables_name(build):
    manager = build(odd_slots())
    first, second = (manager.create_request(RequestId(i)) for i in (1, 2))
    first.resize(32)
    second.resize(32)
    second._rows[G0].slots[0] = 1
    with pytest.raises(InternalError, match=r"pool group 0, slot 1: references is 1, expected '?2, the page tables"):
        manager.check_integrity()
    second._rows[G0].slots[0] = 2


def test_integrity_finds_a_slot_nobody_names(build):
    manager = build(odd_slots())
    manager._source.allocator(G0).allocate(1)
    with pytest.raises(InternalError, match=r"pool group 0, slot 1: references is 1, expected '?0, the page tables"):
        manager.check_integrity()
    manager._source.allocator(G0).release([1])


# ---- imports


def test_the_deciding_modules_do_not_import_torch():
    code = "import sys, unikv, unikv.layout, unikv.ranges, unikv.views; print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stdout.strip()) == (0, "False"), done.stderr


def test_the_public_names_can_all_be_imported():
    assert set(unikv.__all__) <= set(dir(unikv))
    assert all(getattr(unikv, name).__name__ == name for name in unikv.__all__)
    assert unikv.UnifiedKVCacheManager is UnifiedKVCacheManager
    with pytest.raises(AttributeError, match="module 'unikv' has no attribute 'nonsense'"):
        _ = unikv.nonsense


# ---- context parallelism


def test_context_parallel_ranks_share_the_pages_of_a_sequence(build):
    """Blocks 0, 3, 6 on rank 0 and so on; a window of 64 after 200 tokens keeps positions from 137, blocks 4 to 6."""
    managers = [build([spec(0), spec(1, window=64)], cp_size=3, cp_rank=rank) for rank in range(3)]
    requests = [manager.create_request(RequestId(1)) for manager in managers]
    for request in requests:
        request.resize(200)
    assert [request.num_blocks for request in requests] == [3, 2, 2]
    for request in requests:
        request.resize(history_tokens=200)
    pages = [[(row != NO_PAGE).tolist() for row in request.page_tables().values()] for request in requests]
    assert pages == [
        [[True, True, True], [False, False, True]],  # blocks 0, 3, 6
        [[True, True], [False, True]],  # blocks 1, 4
        [[True, True], [False, True]],  # blocks 2, 5
    ]
    assert requests[1].place(G0, 40) == (int(requests[1].page_table(G0)[0]), 8)
    with pytest.raises(SpecError, match="position is 40"):
        requests[0].place(G0, 40)
    for manager, request in zip(managers, requests, strict=True):
        manager.check_integrity()
        request.close()
    with pytest.raises(SpecError, match=r"tokens with cp_size > 1 is 2, expected 'None'|tokens with cp_size > 1 is 2"):
        managers[0].create_request(RequestId(2), [1, 2])
