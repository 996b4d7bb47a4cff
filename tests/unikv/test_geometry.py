"""Shapes and strides over real bytes: every element of every view lands where the layout says."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.lib.stride_tricks import as_strided

from unikv.errors import SpecError, UnknownLayerError
from unikv.geometry import TensorGeometry, extra_geometry, flat_geometry, kv_geometry, scale_geometry
from unikv.ids import LayerId
from unikv.kernel_index import flat_page_index
from unikv.layer_spec import KEY, VALUE, KVCacheLayerSpec, KVLayout
from unikv.layout import CacheLayout, build_layout
from unikv.testing import mixed_specs, odd_slot_specs, spec_lists

L0, L1, L2, L3, L4, L5 = (LayerId(number) for number in range(6))
_UNSIGNED: dict[int, Any] = {1: np.uint8, 2: np.uint16, 4: np.uint32}


def build(*specs: KVCacheLayerSpec, tpb: int = 32, order: KVLayout = KVLayout.HND) -> CacheLayout:
    return build_layout(specs, tokens_per_block=tpb, max_seq_len=None, kv_layout=order)


def over(pool: np.ndarray[Any, Any], geometry: TensorGeometry) -> np.ndarray[Any, Any]:
    """Return the writable view `geometry` describes over the bytes of a pool; no element lies outside them."""
    items = pool.view(_UNSIGNED[geometry.item_bytes])
    assert 0 <= geometry.storage_offset < geometry.end <= items.size
    strides = tuple(stride * geometry.item_bytes for stride in geometry.strides)
    return as_strided(items[geometry.storage_offset :], geometry.shape, strides)


@pytest.mark.parametrize(
    ("order", "layer_id", "shape", "strides", "offset", "dtype"),
    [
        (KVLayout.HND, L5, (10, 2, 2, 32, 64), (16384, 4096, 2048, 64, 1), 8192, "bfloat16"),
        (KVLayout.NHD, L5, (10, 2, 32, 2, 64), (16384, 4096, 128, 64, 1), 8192, "bfloat16"),
        (KVLayout.HND, L3, (10, 2, 2, 32, 32), (8192, 2048, 1024, 32, 1), 4096, "uint8"),
        (KVLayout.HND, L1, (10, 2, 2, 32, 64), (8192, 4096, 2048, 64, 1), 0, "float8_e4m3fn"),
        (KVLayout.NHD, L2, (10, 1, 32, 1, 128), (4096, 4096, 128, 128, 1), 0, "bfloat16"),
    ],
)
def test_kv_of_the_mixed_model(
    order: KVLayout,
    layer_id: LayerId,
    shape: tuple[int, ...],
    strides: tuple[int, ...],
    offset: int,
    dtype: str,
) -> None:
    found = kv_geometry(build(*mixed_specs(), order=order), layer_id, 10)
    assert found is not None
    assert (found.shape, found.strides, found.storage_offset, found.dtype) == (shape, strides, offset, dtype)


def test_nvfp4_packs_two_elements_a_byte_and_has_a_scale_for_sixteen() -> None:
    layout = build(*mixed_specs(), order=KVLayout.NHD)
    data, scales = kv_geometry(layout, L3, 10), scale_geometry(layout, L3, 10)
    assert data is not None
    assert scales is not None
    assert (data.shape[-1], scales.shape[-1], scales.dtype) == (32, 4, "float8_e4m3fn")
    assert scales.shape[:-1] == data.shape[:-1] == (10, 2, 32, 2)
    assert (scales.pool_index, scales.strides[0], scales.storage_offset) == (3, 1024, 512)


def test_only_nvfp4_layers_have_scales() -> None:
    assert scale_geometry(build(*mixed_specs()), L1, 10) is None


def test_odd_slots_are_reached_by_the_physical_stride() -> None:
    layout = build(*odd_slot_specs())
    kv = kv_geometry(layout, L1, 5)
    assert kv is not None
    starts = [(kv.storage_offset + slot * kv.strides[0]) * kv.item_bytes for slot in range(5)]
    assert starts == [8192, 32768, 57344, 81920, 106496]
    # The last V ends with the pool.
    assert kv.end * kv.item_bytes == 5 * 24576


def test_extras_are_bytes_by_token() -> None:
    layout = build(replace(mixed_specs()[1], extra_buffers={"index_key": 128, "state": 3}))
    index, state = (extra_geometry(layout, L1, role, 4) for role in ("index_key", "state"))
    # The index keys are as large as a K buffer, so they share its pool and its stride.
    assert (index.shape, index.strides, index.storage_offset) == ((4, 32, 128), (3 * 4096, 128, 1), 2 * 4096)
    assert (state.shape, state.strides, state.storage_offset) == ((4, 32, 3), (96, 3, 1), 0)


def test_extras_must_be_declared_and_are_not_the_standard_roles() -> None:
    layout = build(*mixed_specs())
    with pytest.raises(SpecError, match="layer 1: role is 'index_key', expected one of key, value"):
        extra_geometry(layout, L1, "index_key", 4)
    with pytest.raises(SpecError, match="layer 1: role is 'key', expected an extra role; use kv_geometry"):
        extra_geometry(layout, L1, KEY, 4)


def test_layers_of_other_ranks_are_unknown() -> None:
    with pytest.raises(UnknownLayerError, match="layer_id is 9"):
        kv_geometry(build(*mixed_specs()), LayerId(9), 4)


def test_a_layer_of_extras_only_has_no_kv() -> None:
    layout = build(replace(mixed_specs()[0], num_kv_heads=0, extra_buffers={"state": 8}))
    assert kv_geometry(layout, L0, 4) is None
    assert scale_geometry(layout, L0, 4) is None
    with pytest.raises(SpecError, match="layer 0: role is 'key'"):
        flat_geometry(layout, L0, 4)


def test_values_that_are_not_behind_their_keys_are_refused() -> None:
    layout = build(*odd_slot_specs())
    (pool,) = layout.groups[0].pools
    other, key, value = pool.buffers
    swapped = replace(pool, buffers=(replace(value, offset_bytes=0), key, other))
    broken = replace(layout, groups=(replace(layout.groups[0], pools=(swapped,)),))
    with pytest.raises(SpecError, match=r"layer 1: \(pool, offset_bytes\) of value is \(0, 0\), expected \(0, 16384\)"):
        kv_geometry(broken, L1, 4)


def test_the_page_list_ends_with_the_layers_last_value() -> None:
    layout = build(*odd_slot_specs())
    pages = flat_geometry(layout, L1, 5)
    assert pages.shape == (4 * 3 + 2, 1, 32, 128)
    assert (pages.storage_offset * 2, pages.end * 2) == (8192, 5 * 24576)
    assert flat_geometry(layout, L0, 5).end * 2 == 4 * 24576 + 8192


@pytest.mark.parametrize("order", KVLayout)
def test_pages_smaller_than_a_block(order: KVLayout) -> None:
    """A drafter kernel with 32-token pages inside 128-token blocks of four buffers."""
    specs = [replace(spec, window=None) for spec in mixed_specs()[4:]]
    layout = build(*specs, tpb=128, order=order)
    pages = flat_geometry(layout, L4, 10, sub_page_tokens=32)
    assert pages.shape[0] == 9 * 16 + 8
    assert pages.shape[1:] == ((2, 32, 64) if order is KVLayout.HND else (32, 2, 64))
    with pytest.raises(SpecError, match="kernel page: tokens is 48, expected a divisor of tokens_per_block=128"):
        flat_geometry(layout, L4, 10, sub_page_tokens=48)


def geometries(layout: CacheLayout, num_slots: int) -> list[TensorGeometry]:
    found: list[TensorGeometry | None] = []
    for spec in layout.specs:
        found += [kv_geometry(layout, spec.layer_id, num_slots), scale_geometry(layout, spec.layer_id, num_slots)]
        found += [extra_geometry(layout, spec.layer_id, role, num_slots) for role in spec.extra_buffers]
    return [geometry for geometry in found if geometry is not None]


layouts = st.builds(
    build_layout,
    spec_lists(),
    tokens_per_block=st.sampled_from([1, 4]),
    max_seq_len=st.none(),
    kv_layout=st.sampled_from(KVLayout),
)


@given(layouts, st.integers(1, 4))
def test_all_views_together_touch_every_byte_once(layout: CacheLayout, num_slots: int) -> None:
    pools = {
        (pool.group_id, pool.index): np.zeros(num_slots * pool.slot_bytes, np.uint8)
        for group in layout.groups
        for pool in group.pools
    }
    for geometry in geometries(layout, num_slots):
        pool = pools[geometry.group_id, geometry.pool_index]
        touched = np.zeros_like(pool)
        over(touched, geometry)[...] = 256**geometry.item_bytes - 1
        pool += touched // 255
    assert all((pool == 1).all() for pool in pools.values())


@given(layouts, st.integers(1, 4))
def test_a_view_at_a_slot_is_the_buffer_at_its_address(layout: CacheLayout, num_slots: int) -> None:
    for spec in layout.specs:
        kv = kv_geometry(layout, spec.layer_id, num_slots)
        assert kv is not None
        assert kv.shape[:2] == (num_slots, spec.kv_factor)
        for slot in range(num_slots):
            for lane, role in enumerate((KEY, VALUE)[: spec.kv_factor]):
                start = (kv.storage_offset + slot * kv.strides[0] + lane * kv.strides[1]) * kv.item_bytes
                assert start == layout.byte_offset(spec.layer_id, role, slot)


@given(layouts, st.integers(1, 4))
def test_page_ids_reach_the_same_pages_as_slots(layout: CacheLayout, num_slots: int) -> None:
    slots = np.arange(num_slots, dtype=np.int32)
    for spec in layout.specs:
        kv, flat = kv_geometry(layout, spec.layer_id, num_slots), flat_geometry(layout, spec.layer_id, num_slots)
        assert kv is not None
        pool = layout.pool_of(layout.buffer(spec.layer_id, KEY))
        data = np.random.default_rng(0).integers(0, 256, num_slots * pool.slot_bytes, np.uint8)
        for lane, role in enumerate((KEY, VALUE)[: spec.kv_factor]):
            pages = flat_page_index(layout, slots, spec.layer_id, role)
            np.testing.assert_array_equal(over(data, flat)[pages], over(data, kv)[:, lane])
