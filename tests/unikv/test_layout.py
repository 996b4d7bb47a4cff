"""Groups, pools, buffers and their addresses."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from unikv.errors import InternalError, SpecError, UnknownLayerError
from unikv.ids import GroupId, LayerId
from unikv.layer_spec import (
    KEY,
    KEY_BLOCK_SCALE,
    VALUE,
    VALUE_BLOCK_SCALE,
    KVCacheLayerSpec,
    KVDtype,
    KVLayout,
    LayerOwner,
    ReusePolicy,
)
from unikv.layout import (
    BufferLayout,
    CacheLayout,
    PoolLayout,
    build_layout,
    bytes_per_token,
    check_scale_pools,
    role_bytes_per_token,
)
from unikv.ranges import effective_window
from unikv.testing import mixed_specs, odd_slot_specs, spec_lists

BF16, FP8, NVFP4 = KVDtype.BFLOAT16, KVDtype.FLOAT8_E4M3FN, KVDtype.NVFP4


def layer(
    layer_id: int = 0, heads: int = 2, head_dim: int = 64, dtype: KVDtype = BF16, **more: Any
) -> KVCacheLayerSpec:
    fields: dict[str, Any] = {"owner": LayerOwner.TARGET, **more}
    return KVCacheLayerSpec(layer_id=LayerId(layer_id), num_kv_heads=heads, head_dim=head_dim, dtype=dtype, **fields)


def build(*specs: KVCacheLayerSpec, tpb: int = 32, max_seq_len: int | None = 8192, isolate: bool = True) -> CacheLayout:
    return build_layout(specs, tokens_per_block=tpb, max_seq_len=max_seq_len, isolate_draft=isolate)


def names(pool: PoolLayout) -> str:
    short = {KEY: "K", VALUE: "V", KEY_BLOCK_SCALE: "Ks", VALUE_BLOCK_SCALE: "Vs"}
    return " ".join(f"L{buffer.layer_id}.{short.get(buffer.role, buffer.role)}" for buffer in pool.buffers)


@pytest.mark.parametrize(
    ("dtype", "heads", "head_dim", "kv_factor", "data", "scale", "total"),
    [
        (BF16, 8, 128, 2, 2048, 0, 4096),
        (FP8, 8, 128, 2, 1024, 0, 2048),
        (NVFP4, 8, 128, 2, 512, 64, 1152),
        (NVFP4, 4, 64, 2, 128, 16, 288),
        (NVFP4, 1, 128, 1, 64, 8, 72),
        (BF16, 1, 576, 1, 1152, 0, 1152),
        (FP8, 1, 576, 1, 576, 0, 576),
        (NVFP4, 1, 576, 1, 288, 36, 324),
        (BF16, 2, 64, 2, 256, 0, 512),
        (BF16, 2, 8, 2, 32, 0, 64),
        (KVDtype.FLOAT32, 2, 8, 2, 64, 0, 128),
        (KVDtype.FLOAT16, 2, 8, 1, 32, 0, 32),
    ],
)
def test_bytes_per_token(
    dtype: KVDtype, heads: int, head_dim: int, kv_factor: int, data: int, scale: int, total: int
) -> None:
    spec = layer(heads=heads, head_dim=head_dim, dtype=dtype, kv_factor=kv_factor)
    assert role_bytes_per_token(spec, KEY) == data
    assert (KEY_BLOCK_SCALE in spec.roles and role_bytes_per_token(spec, KEY_BLOCK_SCALE)) == scale
    assert bytes_per_token(spec) == total


def test_bytes_per_token_counts_extras() -> None:
    spec = layer(extra_buffers={"index_key": 256})
    assert role_bytes_per_token(spec, "index_key") == 256
    assert bytes_per_token(spec) == 512 + 256


def test_a_role_the_layer_lacks_has_no_bytes() -> None:
    with pytest.raises(
        SpecError, match=r"layer 3: role is 'value', expected one of key \(kv_factor 1, dtype bfloat16\)"
    ):
        role_bytes_per_token(layer(3, kv_factor=1), VALUE)


def test_mixed_model_pools() -> None:
    layout = build(*mixed_specs())
    table = [
        (pool.group_id, pool.index, pool.buffer_bytes, pool.scale, pool.slot_bytes, names(pool))
        for group in layout.groups
        for pool in group.pools
    ]
    assert table == [
        (0, 0, 2048, 4, 8192, "L0.K L0.V L3.K L3.V"),
        (0, 1, 4096, 2, 8192, "L1.K L1.V"),
        (0, 2, 8192, 1, 8192, "L2.K"),
        (0, 3, 256, 4, 1024, "L0.Ks L0.Vs L3.Ks L3.Vs"),
        (1, 0, 8192, 4, 32768, "L4.K L4.V L5.K L5.V"),
    ]
    assert [group.page_bytes for group in layout.groups] == [32 * 800, 32 * 1024]
    assert [bytes_per_token(spec) for spec in layout.specs] == [144, 256, 256, 144, 512, 512]


@pytest.mark.parametrize(
    ("layer_id", "role", "address"),
    [
        (0, KEY, 24576),
        (0, VALUE, 26624),
        (3, KEY, 28672),
        (3, VALUE, 30720),
        (1, KEY, 24576),
        (1, VALUE, 28672),
        (2, KEY, 24576),
        (0, KEY_BLOCK_SCALE, 3072),
        (0, VALUE_BLOCK_SCALE, 3328),
        (3, KEY_BLOCK_SCALE, 3584),
        (3, VALUE_BLOCK_SCALE, 3840),
        (4, KEY, 98304),
        (4, VALUE, 106496),
        (5, KEY, 114688),
        (5, VALUE, 122880),
    ],
)
def test_mixed_model_addresses_in_slot_three(layer_id: int, role: str, address: int) -> None:
    assert build(*mixed_specs()).byte_offset(LayerId(layer_id), role, 3) == address


def test_mixed_model_groups() -> None:
    target, draft = build(*mixed_specs()).groups
    assert (target.owner, target.window, target.reuse_policy) == (LayerOwner.TARGET, None, ReusePolicy.REQUIRED)
    assert (draft.owner, draft.window, draft.reuse_policy) == (LayerOwner.DRAFT, 64, ReusePolicy.OPTIONAL)
    assert (target.layer_ids, draft.layer_ids) == ((0, 1, 2, 3), (4, 5))
    assert (target.pool_group, draft.pool_group) == (0, 1)


def test_key_only_and_kv_layers_of_one_size_share_a_pool() -> None:
    layout = build(*odd_slot_specs())
    (pool,) = layout.groups[0].pools
    assert (names(pool), pool.scale, pool.slot_bytes) == ("L0.K L1.K L1.V", 3, 24576)
    assert [layout.byte_offset(LayerId(1), KEY, slot) for slot in range(5)] == [8192, 32768, 57344, 81920, 106496]


def test_nvfp4_data_never_shares_a_pool_with_equal_sized_buffers() -> None:
    layout = build(layer(0, 2, 64, NVFP4), layer(1, 1, 64, FP8))
    pools = [(names(pool), pool.slot_bytes, pool.scale) for pool in layout.groups[0].pools]
    assert pools == [("L0.K L0.V", 4096, 2), ("L1.K L1.V", 4096, 2), ("L0.Ks L0.Vs", 512, 2)]


def test_nvfp4_data_never_shares_a_pool_with_equal_sized_scales() -> None:
    layout = build(layer(0, 1, 128, NVFP4), layer(1, 8, 128, NVFP4))
    pools = {names(pool): pool.buffer_bytes for pool in layout.groups[0].pools}
    assert pools == {"L1.K L1.V": 16384, "L0.K L0.V": 2048, "L1.Ks L1.Vs": 2048, "L0.Ks L0.Vs": 256}


def test_one_page_index_that_cannot_serve_data_and_scales_is_reported() -> None:
    """Coalescing by size alone would put the FP8 layer between NVFP4 data: scale 4 there, 2 in the scale pool."""
    layout = build(layer(0, 2, 64, NVFP4), layer(1, 1, 64, FP8))
    data, other, scales = layout.groups[0].pools
    moved = [replace(buffer, pool_index=0, layer_offset=2 + i) for i, buffer in enumerate(other.buffers)]
    pools = (replace(data, buffers=(*data.buffers, *moved)), replace(other, buffers=()), scales)
    broken = replace(layout, groups=(replace(layout.groups[0], pools=pools),))
    with pytest.raises(
        InternalError, match=r"layer 0: \(scale, layer_offset\) of key_block_scale is \(2, 0\).*\(4, 0\)"
    ):
        check_scale_pools(broken)


@pytest.mark.parametrize(
    ("max_seq_len", "window_of_layer"),
    [(4096, [None, None, 2048]), (4095, [None, None, 2048]), (4097, [4096, None, 2048]), (None, [4096, None, 2048])],
)
def test_windows_that_reach_the_longest_sequence_do_not_split_groups(
    max_seq_len: int | None, window_of_layer: list[int | None]
) -> None:
    layout = build(layer(0, window=4096), layer(1), layer(2, window=2048), max_seq_len=max_seq_len)
    assert [layout.group_of_layer(LayerId(i)).window for i in range(3)] == window_of_layer
    assert len(layout.groups) == len(set(window_of_layer))


def test_sinks_split_groups_by_blocks_not_tokens() -> None:
    layers = [layer(i, window=64, sink_tokens=sinks) for i, sinks in enumerate([0, 1, 32, 33])]
    layout = build(*layers)
    assert [(group.sink_blocks, group.layer_ids) for group in layout.groups] == [(0, (0,)), (1, (1, 2)), (2, (3,))]


def test_equal_pages_share_an_allocator_unless_policies_differ() -> None:
    layers = [layer(0), layer(1, window=64)] + [
        layer(2 + i, window=128, reuse_policy=policy) for i, policy in enumerate(ReusePolicy)
    ]
    layout = build(*layers)
    assert [group.pool_group for group in layout.groups] == [0, 0, 0, 1, 2]
    assert layout.num_pool_groups == 3


def test_draft_layers_are_kept_apart_by_default() -> None:
    specs = (layer(0), layer(1, owner=LayerOwner.DRAFT))
    apart, together = build(*specs), build(*specs, isolate=False)
    assert [(group.owner, group.pool_group) for group in apart.groups] == [
        (LayerOwner.TARGET, 0),
        (LayerOwner.DRAFT, 1),
    ]
    assert [(group.owner, group.layer_ids) for group in together.groups] == [(LayerOwner.TARGET, (0, 1))]


def test_without_isolation_a_group_of_drafts_alone_stays_a_draft_group() -> None:
    layout = build(layer(0), layer(1, owner=LayerOwner.DRAFT, window=64), isolate=False)
    assert [group.owner for group in layout.groups] == [LayerOwner.TARGET, LayerOwner.DRAFT]


def test_pools_of_equal_slots_keep_the_order_of_the_layers() -> None:
    (group,) = build(layer(0, 1, 64), layer(1, 2, 64, kv_factor=1), layer(2, 8, 64)).groups
    assert [names(pool) for pool in group.pools] == ["L2.K L2.V", "L0.K L0.V", "L1.K"]


def test_a_layer_of_extras_only_has_its_place() -> None:
    layout = build(layer(0, heads=0, extra_buffers={"state": 128}), layer(1))
    assert [names(pool) for pool in layout.groups[0].pools] == ["L1.K L1.V", "L0.state"]
    assert layout.group_of_layer(LayerId(0)).group_id == 0
    assert layout.find_buffer(LayerId(0), KEY) is None


def test_unknown_layers_roles_and_groups() -> None:
    layout = build(*odd_slot_specs())
    with pytest.raises(UnknownLayerError, match=r"^layout: layer_id is 7, expected one of the layers .*\(0, 1\); ask"):
        layout.buffer(LayerId(7), KEY)
    with pytest.raises(KeyError):
        layout.group_of_layer(LayerId(7))
    with pytest.raises(SpecError, match=r"layer 0: role is 'value', expected one of key"):
        layout.buffer(LayerId(0), VALUE)
    for group_id in (-1, 1):
        with pytest.raises(UnknownLayerError, match=rf"group_id is {group_id}, expected in \[0, 1\)"):
            layout.group(GroupId(group_id))


@pytest.mark.parametrize("tokens", [0, -1, 1.5])
def test_block_and_sequence_must_hold_tokens(tokens: int) -> None:
    with pytest.raises(SpecError, match=f"cache: tokens_per_block is {tokens}, expected an integer >= 1 token"):
        build(layer(), tpb=tokens)
    with pytest.raises(SpecError, match=f"cache: max_seq_len is {tokens}, expected an integer >= 1 token"):
        build(layer(), max_seq_len=tokens)


def test_unknown_order_inside_a_page_is_refused() -> None:
    with pytest.raises(SpecError, match="KVLayout: value is 'DHN', expected one of HND, NHD"):
        build_layout([layer()], tokens_per_block=32, max_seq_len=None, kv_layout="DHN")  # type: ignore[arg-type]


def test_a_cache_needs_layers() -> None:
    with pytest.raises(SpecError, match="cache: layers is 0, expected at least one layer"):
        build()


layouts = st.builds(
    build_layout,
    spec_lists(),
    tokens_per_block=st.sampled_from([1, 4, 32]),
    max_seq_len=st.sampled_from([None, 16, 60, 1000]),
    kv_layout=st.sampled_from(KVLayout),
    isolate_draft=st.booleans(),
)


@given(layouts)
def test_every_byte_of_a_slot_belongs_to_exactly_one_buffer(layout: CacheLayout) -> None:
    placed: list[BufferLayout] = []
    for group in layout.groups:
        for pool in group.pools:
            ends = [0]
            for buffer in pool.buffers:
                assert (buffer.group_id, buffer.pool_index) == (group.group_id, pool.index)
                assert buffer.offset_bytes == ends[-1]
                ends.append(buffer.offset_bytes + buffer.size_bytes)
            assert ends[-1] == pool.slot_bytes > 0
            placed += pool.buffers
    wanted = {(spec.layer_id, role) for spec in layout.specs for role in spec.roles}
    assert len(placed) == len(wanted)
    assert {(buffer.layer_id, buffer.role) for buffer in placed} == wanted
    total = layout.tokens_per_block * sum(bytes_per_token(spec) for spec in layout.specs)
    assert sum(group.page_bytes for group in layout.groups) == total


@given(layouts)
def test_values_follow_their_keys_and_scales_match_their_data(layout: CacheLayout) -> None:
    for spec in layout.specs:
        pairs = [(KEY, VALUE), (KEY_BLOCK_SCALE, VALUE_BLOCK_SCALE)]
        for first, second in pairs if spec.kv_factor == 2 else ():
            if first in spec.roles:
                key, value = layout.buffer(spec.layer_id, first), layout.buffer(spec.layer_id, second)
                assert value.pool_index == key.pool_index
                assert value.offset_bytes == key.offset_bytes + key.size_bytes
    check_scale_pools(layout)


@given(layouts, st.booleans())
def test_groups_hold_exactly_the_layers_of_one_key(layout: CacheLayout, isolate: bool) -> None:
    layout = build_layout(
        layout.specs,
        tokens_per_block=layout.tokens_per_block,
        max_seq_len=layout.max_seq_len,
        isolate_draft=isolate,
    )

    def key(spec: KVCacheLayerSpec) -> object:
        sink_blocks = -(-spec.sink_tokens // layout.tokens_per_block)
        window = effective_window(spec.window, layout.max_seq_len)
        return window, sink_blocks, spec.reuse_policy, spec.owner if isolate else None

    for group in layout.groups:
        assert len({key(layout.spec(layer_id)) for layer_id in group.layer_ids}) == 1
        slots = [pool.slot_bytes for pool in group.pools]
        assert slots == sorted(slots, reverse=True)
    assert len({key(spec) for spec in layout.specs}) == len(layout.groups)
    first_seen = [group.layer_ids[0] for group in layout.groups]
    assert first_seen == sorted(first_seen)


@given(layouts)
def test_groups_of_one_allocator_have_interchangeable_pages(layout: CacheLayout) -> None:
    def shape(pool_group: int) -> set[object]:
        return {
            (tuple(pool.slot_bytes for pool in group.pools), group.reuse_policy, group.owner)
            for group in layout.groups
            if group.pool_group == pool_group
        }

    shapes = [shape(pool_group) for pool_group in range(layout.num_pool_groups)]
    assert all(len(found) == 1 for found in shapes)
    assert len(set().union(*shapes)) == layout.num_pool_groups
