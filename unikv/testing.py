"""Layer specs for tests of whatever is built on a layout. Needs the `test` extra (hypothesis).

`mixed_specs` is small enough to compute by hand and has every kind of layer: with 32 tokens a block its groups are

=====  =====  ======  ======  =====================================
group  pool   buffer  slot    buffers
=====  =====  ======  ======  =====================================
0      0      2048    8192    L0.key L0.value L3.key L3.value
0      1      4096    8192    L1.key L1.value
0      2      8192    8192    L2.key
0      3      256     1024    the block scales of L0 and L3
1      0      8192    32768   L4.key L4.value L5.key L5.value
=====  =====  ======  ======  =====================================
"""

from __future__ import annotations

from dataclasses import replace

from hypothesis import strategies as st

from unikv.ids import LayerId
from unikv.layer_spec import KVCacheLayerSpec, KVDtype, LayerOwner, ReusePolicy


def mixed_specs() -> tuple[KVCacheLayerSpec, ...]:
    """Return NVFP4, FP8 and key-only BF16 target layers and two windowed BF16 draft layers."""
    nvfp4 = KVCacheLayerSpec(
        layer_id=LayerId(0), owner=LayerOwner.TARGET, num_kv_heads=2, head_dim=64, dtype=KVDtype.NVFP4
    )
    draft = KVCacheLayerSpec(
        layer_id=LayerId(4),
        owner=LayerOwner.DRAFT,
        num_kv_heads=2,
        head_dim=64,
        dtype=KVDtype.BFLOAT16,
        window=64,
        reuse_policy=ReusePolicy.OPTIONAL,
    )
    return (
        nvfp4,
        replace(nvfp4, layer_id=LayerId(1), dtype=KVDtype.FLOAT8_E4M3FN),
        replace(nvfp4, layer_id=LayerId(2), num_kv_heads=1, head_dim=128, dtype=KVDtype.BFLOAT16, kv_factor=1),
        replace(nvfp4, layer_id=LayerId(3)),
        draft,
        replace(draft, layer_id=LayerId(5)),
    )


def odd_slot_specs() -> tuple[KVCacheLayerSpec, ...]:
    """Return a key-only layer 0 and a K/V layer 1 whose buffers have one size: slots of three buffers."""
    key_only = KVCacheLayerSpec(
        layer_id=LayerId(0), owner=LayerOwner.TARGET, num_kv_heads=1, head_dim=128, dtype=KVDtype.BFLOAT16, kv_factor=1
    )
    return key_only, replace(key_only, layer_id=LayerId(1), kv_factor=2)


@st.composite
def layer_specs(draw: st.DrawFn, layer_id: int, owner: LayerOwner) -> KVCacheLayerSpec:
    """Draw one layer; sizes come from few values, so that buffers of different kinds often have the same size."""
    heads = draw(st.sampled_from([1, 2, 4]))
    window = draw(st.sampled_from([None, None, 5, 16, 64]))
    return KVCacheLayerSpec(
        layer_id=LayerId(layer_id),
        owner=owner,
        num_kv_heads=heads,
        total_num_kv_heads=heads * draw(st.sampled_from([1, 2])),
        head_dim=draw(st.sampled_from([16, 32, 64])),
        dtype=draw(st.sampled_from(KVDtype)),
        kv_factor=draw(st.sampled_from([1, 2])),
        window=window,
        sink_tokens=draw(st.sampled_from([0, 1, 9])) if window else 0,
        reuse_policy=draw(st.sampled_from(ReusePolicy)),
        extra_buffers=draw(st.dictionaries(st.sampled_from(["index_key", "state"]), st.sampled_from([16, 32, 5]))),
    )


@st.composite
def spec_lists(draw: st.DrawFn) -> tuple[KVCacheLayerSpec, ...]:
    """Draw up to five target layers and up to three draft layers, at least one in all."""
    targets = draw(st.integers(0, 5))
    drafts = draw(st.integers(0 if targets else 1, 3))
    owners = [LayerOwner.TARGET] * targets + [LayerOwner.DRAFT] * drafts
    return tuple(draw(layer_specs(layer_id, owner)) for layer_id, owner in enumerate(owners))
