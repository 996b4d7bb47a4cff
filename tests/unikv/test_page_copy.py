"""Copies inside the pools, compared with numpy on the raw bytes."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from unikv.budget import PoolBudget
from unikv.buffers import PoolStorage
from unikv.cache_manager import UnifiedKVCacheManager
from unikv.errors import LocalProtocolError, SpecError
from unikv.ids import GroupId, RequestId
from unikv.layer_spec import KVCacheLayerSpec, KVDtype, KVLayout, LayerOwner
from unikv.layout import build_layout
from unikv.page_copy import PageCopier, check_relocatable
from unikv.page_moves import PageMove, TokenMove

SLOTS, TPB = 6, 4


def layer(number, **changes):
    fields = {
        "layer_id": number,
        "owner": LayerOwner.TARGET,
        "num_kv_heads": 2,
        "head_dim": 16,
        "dtype": KVDtype.BFLOAT16,
    }
    return KVCacheLayerSpec(**{**fields, **changes})


def opened(specs, kv_layout=KVLayout.HND):
    layout = build_layout(specs, tokens_per_block=TPB, max_seq_len=64, kv_layout=kv_layout)
    pools = PoolStorage(layout, [SLOTS] * layout.num_pool_groups)
    for number, storage in enumerate(pools.storages):
        storage.copy_(torch_bytes(number, storage.numel()))
    return layout, pools


def torch_bytes(seed, count):
    return torch.from_numpy(np.random.default_rng(seed).integers(0, 256, count, dtype=np.uint8))


MIXED = [layer(0), layer(1, kv_factor=1, extra_buffers={"index": 12}), layer(2, dtype=KVDtype.NVFP4, window=8)]


@given(moves=st.lists(st.tuples(st.integers(0, SLOTS - 1), st.integers(0, SLOTS - 1)), max_size=5))
def test_pages_are_copied_whole_in_every_pool_and_read_before_they_are_written(moves):
    moves = list({target: (source, target) for source, target in moves}.values())
    layout, pools = opened(MIXED)
    before = [pools.numpy(n).copy() for n in range(len(pools.storages))]
    groups = [group.group_id for group in layout.groups]
    PageCopier(layout, pools).copy({g: [PageMove(s, t) for s, t in moves] for g in groups[:1]})
    touched = {pools.storage_of(groups[0], pool.index): pool.slot_bytes for pool in layout.groups[0].pools}
    for number, old in enumerate(before):
        expected = old.copy()
        if number in touched:
            size = touched[number]
            for source, target in moves:
                expected[target * size : (target + 1) * size] = old[source * size : (source + 1) * size]
        assert np.array_equal(pools.numpy(number), expected)
    pools.close()


@pytest.mark.parametrize("kv_layout", KVLayout)
@pytest.mark.parametrize("dtype", [KVDtype.BFLOAT16, KVDtype.NVFP4])
@given(data=st.data())
def test_tokens_are_moved_in_every_layer_and_read_before_they_are_written(kv_layout, dtype, data):
    place = st.tuples(st.integers(0, SLOTS - 1), st.integers(0, TPB - 1))
    targets = data.draw(st.lists(place, unique=True, max_size=6))
    moves = [TokenMove(*data.draw(place), *target) for target in targets]
    layout, pools = opened([layer(0, dtype=dtype), layer(1, dtype=dtype)], kv_layout)
    before = [pools.numpy(n).copy() for n in range(len(pools.storages))]
    PageCopier(layout, pools).relocate(GroupId(0), moves)
    for pool in layout.groups[0].pools:
        number = pools.storage_of(GroupId(0), pool.index)
        row = pool.buffer_bytes // (2 * TPB)
        inner = (2, TPB, row) if kv_layout is KVLayout.HND else (TPB, 2, row)
        old = before[number].reshape(SLOTS, pool.scale, *inner)
        expected = old.copy()
        for from_slot, from_offset, to_slot, to_offset in moves:
            for buffer in range(pool.scale):
                for head in range(2):
                    to = (head, to_offset) if kv_layout is KVLayout.HND else (to_offset, head)
                    of = (head, from_offset) if kv_layout is KVLayout.HND else (from_offset, head)
                    expected[(to_slot, buffer, *to)] = old[(from_slot, buffer, *of)]
        assert np.array_equal(pools.numpy(number).reshape(expected.shape), expected)
    pools.close()


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"window": 8}, "layer 1: window is 8, expected None as in layer 0"),
        ({"num_kv_heads": 1}, "layer 1: num_kv_heads is 1, expected 2 as in layer 0"),
        ({"head_dim": 32}, "head_dim is 32"),
        ({"dtype": KVDtype.FLOAT16}, "dtype is"),
        ({"kv_factor": 1}, "layer 1: kv_factor is 1, expected K and V and nothing else"),
        ({"extra_buffers": {"index": 4}}, "extra_buffers is"),
    ],
)
def test_layers_that_cannot_relocate_are_refused_when_the_manager_is_built(changes, text):
    specs = [layer(0), layer(1, **changes)]
    with pytest.raises(SpecError, match=text):
        check_relocatable(build_layout(specs, tokens_per_block=TPB, max_seq_len=64, kv_layout=KVLayout.HND))
    with pytest.raises(SpecError, match=text):
        UnifiedKVCacheManager(
            specs, tokens_per_block=TPB, max_seq_len=64, pool=PoolBudget(pages=4), relocates_drafts=True
        )


def test_accepted_drafts_of_a_tree_move_behind_the_history():
    manager = UnifiedKVCacheManager(
        [layer(0), layer(1)], tokens_per_block=TPB, max_seq_len=64, pool=PoolBudget(pages=9), relocates_drafts=True
    )
    requests = [manager.create_request(RequestId(number)) for number in range(2)]
    for request in requests:
        request.resize(14, 6)
        for number in (0, 1):
            view = manager.get_buffers(number)
            for position in range(14):
                slot, offset = request.place(GroupId(0), position)
                view[slot, :, :, offset] = 100 * request.request_id + position
    manager.relocate_drafts({RequestId(0): ([7, 10, 13], 6), RequestId(1): ([6, 7], 6)})
    for request, wanted in zip(requests, ([7, 10, 13], [6, 7]), strict=True):
        for number in (0, 1):
            view = manager.get_buffers(number)
            for position, value in enumerate(wanted, start=6):
                slot, offset = request.place(GroupId(0), position)
                assert (view[slot, :, :, offset] == 100 * request.request_id + value).all()
    with pytest.raises(SpecError, match=r"request 0, layer group 0: position is 16, expected in \[0, 14\)"):
        manager.relocate_drafts({RequestId(0): ([16], 6)})
    for request in requests:
        request.close()
    manager.close()


def test_a_manager_that_was_not_built_for_it_relocates_nothing():
    manager = UnifiedKVCacheManager([layer(0)], tokens_per_block=TPB, max_seq_len=64, pool=PoolBudget(pages=4))
    with pytest.raises(LocalProtocolError, match="build the manager with relocates_drafts=True"):
        manager.relocate_drafts({})
    manager.close()
