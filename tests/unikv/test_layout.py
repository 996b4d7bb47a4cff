"""Groups, pools, buffers and their addresses."""

from __future__ import annotations

from unikv.ids import LayerId
from unikv.layer_spec import KEY, VALUE, KVCacheLayerSpec, KVDtype, LayerOwner, ReusePolicy
from unikv.layout import CacheLayout, build_layout, bytes_per_token


def mixed_specs() -> list[KVCacheLayerSpec]:
    """NVFP4, FP8 and key-only BF16 target layers plus two windowed BF16 draft layers."""
    target, draft = LayerOwner.TARGET, LayerOwner.DRAFT
    nvfp4 = {"owner": target, "num_kv_heads": 2, "head_dim": 64, "dtype": KVDtype.NVFP4}
    drafter = {"owner": draft, "num_kv_heads": 2, "head_dim": 64, "dtype": KVDtype.BFLOAT16, "window": 64}
    rows = [
        nvfp4,
        {**nvfp4, "dtype": KVDtype.FLOAT8_E4M3FN},
        {"owner": target, "num_kv_heads": 1, "head_dim": 128, "dtype": KVDtype.BFLOAT16, "kv_factor": 1},
        nvfp4,
        {**drafter, "reuse_policy": ReusePolicy.OPTIONAL},
        {**drafter, "reuse_policy": ReusePolicy.OPTIONAL},
    ]
    return [KVCacheLayerSpec(layer_id=LayerId(index), **row) for index, row in enumerate(rows)]


def mixed_layout() -> CacheLayout:
    return build_layout(mixed_specs(), tokens_per_block=32, max_seq_len=8192)


def test_mixed_model_slot_sizes() -> None:
    layout = mixed_layout()
    assert [[pool.slot_bytes for pool in group.pools] for group in layout.groups] == [[8192, 8192, 8192, 1024], [32768]]
    assert [group.page_bytes for group in layout.groups] == [25600, 32768]
    assert [bytes_per_token(spec) for spec in layout.specs] == [144, 256, 256, 144, 512, 512]


def test_mixed_model_addresses_in_slot_three() -> None:
    layout = mixed_layout()
    assert layout.byte_offset(LayerId(3), VALUE, 3) == 30720
    assert layout.byte_offset(LayerId(5), KEY, 3) == 114688
