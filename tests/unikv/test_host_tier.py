"""The host tier: what goes in comes out, bit for bit or within the codec's bound, whatever the order."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from unikv.buffers import PoolStorage
from unikv.errors import SpecError
from unikv.host_tier import HostTier
from unikv.host_tier_options import HostTierOptions, auto_host_bytes
from unikv.layer_spec import KVCacheLayerSpec, KVDtype, KVLayout, LayerOwner, ReusePolicy
from unikv.layout import build_layout
from unikv.page_moves import PageMove

TPB, SLOTS, PAGES = 4, 6, 5
DEVICES = ["cpu", pytest.param("cuda:0", marks=pytest.mark.gpu)]


def layer(number, **changes):
    fields = {
        "layer_id": number,
        "owner": LayerOwner.TARGET,
        "num_kv_heads": 2,
        "head_dim": 16,
        "dtype": KVDtype.BFLOAT16,
    }
    return KVCacheLayerSpec(**{**fields, **changes})


MIXED = [layer(0), layer(1, kv_factor=1, extra_buffers={"index": 12}), layer(2, dtype=KVDtype.NVFP4, window=8)]


def opened(specs, device, kv_layout=KVLayout.HND, codec="identity"):
    if device != "cpu" and not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    layout = build_layout(specs, tokens_per_block=TPB, max_seq_len=64, kv_layout=kv_layout)
    pools = PoolStorage(layout, [SLOTS] * layout.num_pool_groups, device=device)
    return layout, pools, HostTier(layout, pools, HostTierOptions(pages=PAGES, codec=codec))


def fill(pools, seed):
    for number, storage in enumerate(pools.storages):
        values = np.random.default_rng(seed + number).integers(0, 256, storage.numel(), dtype=np.uint8)
        storage.copy_(torch.from_numpy(values))


def moves_of(layout, pairs):
    return {group.group_id: [PageMove(source, target) for source, target in pairs] for group in layout.groups}


@pytest.mark.parametrize("device", DEVICES)
@given(
    slots=st.lists(st.integers(0, SLOTS - 1), unique=True, min_size=1, max_size=PAGES),
    cold=st.permutations(range(PAGES)),
    back=st.permutations(range(SLOTS)),
)
def test_pages_come_back_bit_for_bit_wherever_they_go(device, slots, cold, back):
    layout, pools, tier = opened(MIXED, device)
    fill(pools, 3)
    before = [storage.cpu().numpy().copy() for storage in pools.storages]
    tier.store(moves_of(layout, list(zip(slots, cold, strict=False))))
    for storage in pools.storages:
        storage.fill_(0xEE)  # handed out and written again at once
    tier.load(moves_of(layout, [(cold[i], back[i]) for i in range(len(slots))]))
    for group in layout.groups:
        for pool in group.pools:
            number = pools.storage_of(group.group_id, pool.index)
            old = before[number].reshape(SLOTS, pool.slot_bytes)
            new = pools.storages[number].cpu().numpy().reshape(SLOTS, pool.slot_bytes)
            for index, slot in enumerate(slots):
                assert np.array_equal(new[back[index]], old[slot])
            untouched = set(range(SLOTS)) - set(back[: len(slots)])
            assert all((new[slot] == 0xEE).all() for slot in untouched)
    tier.close()
    tier.close()
    pools.close()


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("kv_layout", KVLayout)
@pytest.mark.parametrize(("dtype", "mantissa"), [(KVDtype.BFLOAT16, 8), (KVDtype.FLOAT16, 11)])
@given(seed=st.integers(0, 2**16), exponent=st.integers(-12, 12), spread=st.integers(0, 12))
def test_fp8_pages_come_back_within_the_stated_bound(device, kv_layout, dtype, mantissa, seed, exponent, spread):
    layout, pools, tier = opened([layer(0, dtype=dtype), layer(1, dtype=dtype)], device, kv_layout, "fp8")
    kind = torch.bfloat16 if dtype is KVDtype.BFLOAT16 else torch.float16
    generator = np.random.default_rng(seed)
    count = pools.storages[0].numel() // 2
    values = generator.standard_normal(count) * 2.0 ** (exponent - generator.integers(0, spread + 1, count))
    pools.storages[0].copy_(torch.from_numpy(values).to(kind).view(torch.uint8))
    old = pools.storages[0].cpu().view(kind).double().clone()
    tier.store(moves_of(layout, [(1, 0), (4, 3)]))
    pools.storages[0].zero_()
    tier.load(moves_of(layout, [(0, 1), (3, 4)]))
    new = pools.storages[0].cpu().view(kind).double()
    shape = (SLOTS, 4, 2, TPB, 16) if kv_layout is KVLayout.HND else (SLOTS, 4, TPB, 2, 16)
    dims = (3, 4) if kv_layout is KVLayout.HND else (2, 4)
    old, new = old.view(shape)[[1, 4]], new.view(shape)[[1, 4]]
    scale = old.abs().amax(dim=dims, keepdim=True) / 448.0
    bound = old.abs() * 2.0**-4 + scale * 2.0**-10 + new.abs() * 2.0**-mantissa + 2.0**-25
    assert ((old - new).abs() <= bound).all()
    assert tier.size_bytes == PAGES * 4 * (TPB * 2 * 16 + 2 * 4)
    tier.close()
    pools.close()


def test_fp8_keeps_what_is_not_finite_apart_from_the_rest():
    layout, pools, tier = opened([layer(0)], "cpu", codec="fp8")
    page = pools.storages[0].view(torch.bfloat16).view(SLOTS, 2, 2, TPB, 16)
    page[1] = 2.0
    page[1, 0, 0, 0, :2] = torch.tensor([float("inf"), float("nan")])
    tier.store(moves_of(layout, [(1, 0)]))
    page.zero_()
    tier.load(moves_of(layout, [(0, 1)]))
    assert page[1, 0, 0, 0, :2].isnan().all()
    assert (page[1, 0, 0].flatten()[2:] == 2.0).all() and (page[1, 1] == 2.0).all()
    tier.close()
    pools.close()


@pytest.mark.parametrize(
    ("specs", "text"),
    [
        (
            [layer(0), layer(1, dtype=KVDtype.FLOAT16)],
            "layer 1: dtype under the fp8 codec is 'float16', expected '?bfloat16 as",
        ),
        ([layer(0, dtype=KVDtype.FLOAT32)], "expected float16 or bfloat16"),
        ([layer(0, dtype=KVDtype.FLOAT8_E4M3FN)], "expected float16 or bfloat16"),
    ],
)
def test_the_fp8_codec_looks_at_the_specs_and_refuses_what_it_cannot_take(specs, text):
    layout = build_layout(specs, tokens_per_block=TPB, max_seq_len=64, kv_layout=KVLayout.HND)
    pools = PoolStorage(layout, [SLOTS] * layout.num_pool_groups)
    with pytest.raises(SpecError, match=text):
        HostTier(layout, pools, HostTierOptions(pages=4, codec="fp8"))
    with pytest.raises(SpecError, match="codec is 'zip', expected one of identity, fp8"):
        HostTier(layout, pools, HostTierOptions(pages=4, codec="zip"))
    pools.close()


@pytest.mark.parametrize("options", [{}, {"pages": 1, "bytes": 1}, {"pages": 0}, {"bytes": -1}])
def test_wrong_sizes_are_refused(options):
    with pytest.raises(SpecError, match="host tier"):
        HostTierOptions(**options)


def test_bytes_become_pages_of_every_pool_group():
    layout = build_layout([layer(0), layer(1, window=8)], tokens_per_block=TPB, max_seq_len=64, kv_layout=KVLayout.HND)
    pools = PoolStorage(layout, [SLOTS] * layout.num_pool_groups)
    page_bytes = sum({group.pool_group: group.page_bytes for group in layout.groups}.values())
    tier = HostTier(layout, pools, HostTierOptions(bytes=3 * page_bytes + 1))
    assert tier.num_slots(0) == 3 and tier.size_bytes == 3 * page_bytes
    with pytest.raises(SpecError, match=f"bytes is {page_bytes - 1}, expected >= {page_bytes}"):
        HostTier(layout, pools, HostTierOptions(bytes=page_bytes - 1))
    with pytest.raises(SpecError, match="ask for fewer pages"):
        HostTier(layout, pools, HostTierOptions(pages=2**50))
    tier.close()
    pools.close()


def test_policies_have_places_of_their_own_on_the_host_too():
    specs = [layer(number, window=8, reuse_policy=policy) for number, policy in enumerate(ReusePolicy)]
    layout = build_layout(specs, tokens_per_block=TPB, max_seq_len=64, kv_layout=KVLayout.HND)
    pools = PoolStorage(layout, [SLOTS] * layout.num_pool_groups)
    tier = HostTier(layout, pools, HostTierOptions(pages=5))
    assert [group.pool_group for group in layout.groups] == [0, 1, 2]
    assert [tier.num_slots(pool_group) for pool_group in range(3)] == [5, 5, 5]
    assert tier.size_bytes == 5 * sum(group.page_bytes for group in layout.groups)
    tier.close()
    pools.close()


@pytest.mark.parametrize(
    ("device", "available", "ranks", "memlock", "wanted"),
    [
        (100, 1000, 1, None, 100),
        (100, 100, 1, None, 50),
        (100, 400, 4, None, 50),
        (100, 1000, 1, 50, 40),
        (5, 0, 1, 9, 0),
    ],
)
def test_the_automatic_size_leaves_room_for_others(device, available, ranks, memlock, wanted):
    assert auto_host_bytes(device, available, ranks, memlock) == wanted
