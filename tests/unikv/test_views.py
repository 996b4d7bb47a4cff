"""Views: which buffers go together, which heads they hold, and what is refused."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from unikv.errors import SpecError
from unikv.ids import LayerId
from unikv.layer_spec import KVCacheLayerSpec, KVDtype, KVLayout, LayerOwner
from unikv.layout import CacheLayout, build_layout
from unikv.ranges import Span, head_shard
from unikv.testing import mixed_specs, odd_slot_specs, spec_lists
from unikv.views import KVView, describe_views


def build(*specs: KVCacheLayerSpec, isolate: bool = True) -> CacheLayout:
    return build_layout(specs, tokens_per_block=32, max_seq_len=8192, isolate_draft=isolate)


def entries(view: KVView) -> list[tuple[int, str, int]]:
    return [(entry.layer_id, entry.role, entry.offset_bytes) for entry in view.entries]


def shard_specs(specs: tuple[KVCacheLayerSpec, ...], tp: int, tp_rank: int) -> tuple[KVCacheLayerSpec, ...]:
    """Give each layer the heads rank `tp_rank` of `tp` holds of the heads it had."""
    return tuple(
        replace(
            spec,
            num_kv_heads=len(head_shard(spec.num_kv_heads, tp, tp_rank).heads),
            total_num_kv_heads=spec.num_kv_heads,
        )
        for spec in specs
    )


def test_mixed_model() -> None:
    nvfp4, fp8, key_only, scales, draft = describe_views(build(*mixed_specs()), tp=1, tp_rank=0)
    assert [view.dtype for view in (nvfp4, fp8, key_only, scales, draft)] == [
        "nvfp4",
        "float8_e4m3fn",
        "bfloat16",
        "float8_e4m3fn",
        "bfloat16",
    ]
    assert [view.row_bytes for view in (nvfp4, fp8, key_only, scales, draft)] == [32, 64, 256, 4, 128]
    assert [view.buffer_bytes for view in (nvfp4, fp8, key_only, scales, draft)] == [2048, 4096, 8192, 256, 8192]
    assert [(view.group_id, view.pool_index) for view in (nvfp4, scales, draft)] == [(0, 0), (0, 3), (1, 0)]
    assert entries(nvfp4) == [(0, "key", 0), (0, "value", 2048), (3, "key", 4096), (3, "value", 6144)]
    assert entries(scales)[2] == (3, "key_block_scale", 512)
    assert scales.roles == ("key_block_scale", "value_block_scale")
    assert (key_only.roles, key_only.heads, key_only.head_dim) == (("key",), Span(0, 1), 128)
    assert (draft.owner, draft.heads, draft.total_heads) == (LayerOwner.DRAFT, Span(0, 2), 2)


def test_key_only_layers_do_not_share_a_view_with_kv_layers() -> None:
    views = describe_views(build(*odd_slot_specs()), tp=1, tp_rank=0)
    assert [entries(view) for view in views] == [[(0, "key", 0)], [(1, "key", 8192), (1, "value", 16384)]]


def test_target_and_draft_never_share_a_view_even_in_one_group() -> None:
    target = odd_slot_specs()[1]
    draft = replace(target, layer_id=LayerId(2), owner=LayerOwner.DRAFT)
    views = describe_views(build(target, draft, isolate=False), tp=1, tp_rank=0)
    assert [(view.group_id, view.pool_index, view.owner) for view in views] == [
        (0, 0, LayerOwner.TARGET),
        (0, 0, LayerOwner.DRAFT),
    ]


def test_each_extra_role_is_a_view_of_its_own_and_replicated() -> None:
    layer = replace(odd_slot_specs()[1], total_num_kv_heads=4, extra_buffers={"index_key": 256, "state": 256})
    other = replace(layer, layer_id=LayerId(2))
    views = describe_views(build(layer, other), tp=4, tp_rank=3)
    extras = {view.roles: view for view in views if view.dtype == "bytes"}
    assert set(extras) == {("index_key",), ("state",)}
    index = extras["index_key",]
    assert (index.heads, index.total_heads, index.replica, index.replicas) == (Span(0, 1), 1, 3, 4)
    assert (index.head_dim, index.row_bytes, index.buffer_bytes) == (0, 256, 8192)
    # K, V and both extras have one size: they lie side by side in one pool, layer by layer.
    assert entries(index) == [(1, "index_key", 2 * 8192), (2, "index_key", 6 * 8192)]


def test_a_layer_of_extras_only_needs_no_heads() -> None:
    first, second = odd_slot_specs()
    stateful = replace(first, num_kv_heads=0, extra_buffers={"state": 16})
    views = describe_views(build(stateful, second), tp=1, tp_rank=0)
    assert [view.roles for view in views] == [("key", "value"), ("state",)]


@pytest.mark.parametrize("tp_rank", range(4))
def test_nvfp4_heads_and_scales_of_a_tensor_parallel_rank(tp_rank: int) -> None:
    spec = KVCacheLayerSpec(
        layer_id=LayerId(0),
        owner=LayerOwner.TARGET,
        num_kv_heads=2,
        total_num_kv_heads=8,
        head_dim=128,
        dtype=KVDtype.NVFP4,
    )
    data, scales = describe_views(build(spec), tp=4, tp_rank=tp_rank)
    assert data.heads == scales.heads == Span(2 * tp_rank, 2 * tp_rank + 2)
    # Per head and page: 32 tokens of 128 elements, two a byte; one scale byte for 16 elements.
    assert (data.buffer_bytes // 2, scales.buffer_bytes // 2) == (2048, 256)


def test_more_ranks_than_heads_hold_replicas() -> None:
    found = []
    for tp_rank in range(4):
        spec = shard_specs(mixed_specs()[:1], 4, tp_rank)
        view = describe_views(build(*spec), tp=4, tp_rank=tp_rank)[0]
        found.append((view.heads, view.replica, view.replicas, view.total_heads))
    assert found == [(Span(0, 1), 0, 2, 2), (Span(0, 1), 1, 2, 2), (Span(1, 2), 0, 2, 2), (Span(1, 2), 1, 2, 2)]


def test_target_and_draft_heads_are_cut_by_their_own_totals() -> None:
    target, draft = mixed_specs()[1], mixed_specs()[4]
    target = replace(target, num_kv_heads=4, total_num_kv_heads=8)
    draft = replace(draft, num_kv_heads=2, total_num_kv_heads=4)
    views = describe_views(build(target, draft), tp=2, tp_rank=1)
    assert [(view.heads, view.total_heads) for view in views] == [(Span(4, 8), 8), (Span(2, 4), 4)]


def test_local_heads_must_be_the_share_of_the_total() -> None:
    with pytest.raises(
        SpecError, match=r"layer 1: num_kv_heads is 1, expected 2, the share of total_num_kv_heads=4 at tp=2; give"
    ):
        describe_views(build(replace(odd_slot_specs()[1], total_num_kv_heads=4)), tp=2, tp_rank=0)
    with pytest.raises(SpecError, match=r"layer 1: kv_heads is 3, expected a multiple of tp=2"):
        describe_views(build(replace(odd_slot_specs()[1], total_num_kv_heads=3)), tp=2, tp_rank=0)


@pytest.mark.parametrize(("tp", "tp_rank"), [(2, 2), (1, -1), (0, 0)])
def test_the_rank_must_be_one_of_them(tp: int, tp_rank: int) -> None:
    with pytest.raises(SpecError, match=rf"views: tp_rank is {tp_rank}, expected in \[0, tp={tp}\)"):
        describe_views(build(*odd_slot_specs()), tp=tp, tp_rank=tp_rank)


@st.composite
def ranks(draw: st.DrawFn) -> tuple[CacheLayout, int, int]:
    tp = draw(st.sampled_from([1, 2, 4]))
    tp_rank = draw(st.integers(0, tp - 1))
    specs = shard_specs(draw(spec_lists()), tp, tp_rank)
    kv_layout = draw(st.sampled_from(KVLayout))
    layout = build_layout(
        specs, tokens_per_block=8, max_seq_len=None, kv_layout=kv_layout, isolate_draft=draw(st.booleans())
    )
    return layout, tp, tp_rank


@given(ranks())
def test_views_cover_every_buffer_once_and_agree_with_the_specs(rank: tuple[CacheLayout, int, int]) -> None:
    layout, tp, tp_rank = rank
    views = describe_views(layout, tp=tp, tp_rank=tp_rank)
    named = [(entry.layer_id, entry.role) for view in views for entry in view.entries]
    assert sorted(named) == sorted((spec.layer_id, role) for spec in layout.specs for role in spec.roles)
    for view in views:
        for entry in view.entries:
            spec, buffer = layout.spec(entry.layer_id), layout.buffer(entry.layer_id, entry.role)
            assert (buffer.group_id, buffer.pool_index) == (view.group_id, view.pool_index)
            assert (buffer.offset_bytes, buffer.size_bytes) == (entry.offset_bytes, view.buffer_bytes)
            assert (spec.owner, layout.kv_layout) == (view.owner, view.kv_layout)
            if view.dtype != "bytes":
                assert (len(view.heads), view.total_heads) == (spec.num_kv_heads, spec.total_heads)
                assert view.roles in ((entry.role,), ("key", "value"), ("key_block_scale", "value_block_scale"))
                assert len(view.roles) == spec.kv_factor


@given(ranks())
def test_views_have_one_canonical_order(rank: tuple[CacheLayout, int, int]) -> None:
    layout, tp, tp_rank = rank
    views = describe_views(layout, tp=tp, tp_rank=tp_rank)
    order = [(view.group_id, view.pool_index, view.entries[0].offset_bytes) for view in views]
    assert order == sorted(order)
    for view in views:
        offsets = [entry.offset_bytes for entry in view.entries]
        assert offsets == sorted(set(offsets))
