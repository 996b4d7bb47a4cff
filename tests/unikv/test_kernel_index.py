"""From slots to the page indices kernels want."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from unikv.errors import SpecError
from unikv.ids import NO_PAGE, LayerId
from unikv.kernel_index import (
    PageIndexMode,
    base_offset_bytes,
    flat_page_index,
    kernel_page_index,
    page_stride_bytes,
    pair_index_is_legal,
    pair_page_index,
    sharing_key,
    slots_of_upper_bound,
    upper_bound,
)
from unikv.layer_spec import KEY, KEY_BLOCK_SCALE, VALUE, KVCacheLayerSpec
from unikv.layout import CacheLayout, build_layout
from unikv.testing import mixed_specs, odd_slot_specs, spec_lists

SHARED, PER_LAYER = PageIndexMode.SHARED, PageIndexMode.PER_LAYER


def build(*specs: KVCacheLayerSpec, tpb: int = 32) -> CacheLayout:
    return build_layout(specs, tokens_per_block=tpb, max_seq_len=None)


def row(*slots: int) -> np.ndarray[tuple[int], np.dtype[np.int32]]:
    return np.array(slots, np.int32)


def test_mixed_model_indices() -> None:
    layout = build(*mixed_specs())
    assert kernel_page_index(layout, row(3), LayerId(3), KEY, SHARED).tolist() == [12]
    assert kernel_page_index(layout, row(3), LayerId(3), KEY, PER_LAYER).tolist() == [14]
    # Data and scales of one layer have the same index, so one table serves both.
    assert kernel_page_index(layout, row(3), LayerId(3), KEY_BLOCK_SCALE, PER_LAYER).tolist() == [14]


@pytest.mark.parametrize(
    ("layer_id", "role", "bound"),
    [(0, KEY, 40), (0, VALUE, 39), (3, KEY, 38), (3, VALUE, 37), (1, KEY, 20), (1, VALUE, 19), (2, KEY, 10)],
)
def test_mixed_model_upper_bounds(layer_id: int, role: str, bound: int) -> None:
    layout = build(*mixed_specs())
    assert upper_bound(layout, LayerId(layer_id), role, 10) == bound
    assert slots_of_upper_bound(layout, LayerId(layer_id), role, bound) == 10


def test_a_table_keeps_its_shape_and_holes() -> None:
    layout = build(*mixed_specs())
    table = np.array([[NO_PAGE, 3, 4], [0, NO_PAGE, NO_PAGE]], np.int32)
    found = kernel_page_index(layout, table, LayerId(3), VALUE, PER_LAYER)
    assert found.dtype == np.int32
    assert found.tolist() == [[NO_PAGE, 15, 19], [3, NO_PAGE, NO_PAGE]]
    assert table.tolist() == [[NO_PAGE, 3, 4], [0, NO_PAGE, NO_PAGE]]


@pytest.mark.parametrize("shape", [(0,), (0, 5), (3, 0)])
def test_empty_tables(shape: tuple[int, ...]) -> None:
    empty = np.zeros(shape, np.int32)
    found = kernel_page_index(build(*mixed_specs()), empty, LayerId(0), KEY, SHARED, expansion=2)
    assert found.shape == (*shape[:-1], shape[-1] * 2)


def test_expansion_spreads_indices_and_holes() -> None:
    layout = build(*mixed_specs())
    found = kernel_page_index(layout, row(1, NO_PAGE), LayerId(3), KEY, PER_LAYER, expansion=4)
    assert found.tolist() == [24, 25, 26, 27, NO_PAGE, NO_PAGE, NO_PAGE, NO_PAGE]
    assert page_stride_bytes(layout, LayerId(3), KEY, expansion=4) == 512
    assert upper_bound(layout, LayerId(3), KEY, 10, expansion=4) == 152


@pytest.mark.parametrize("expansion", [0, 3])
def test_expansion_divides_the_buffer(expansion: int) -> None:
    layout = build(*mixed_specs())
    with pytest.raises(SpecError, match=f"layer 0: pages per key is {expansion}, expected a divisor of its 2048 bytes"):
        kernel_page_index(layout, row(1), LayerId(0), KEY, SHARED, expansion=expansion)
    with pytest.raises(SpecError, match="layer 0: pages per key"):
        page_stride_bytes(layout, LayerId(0), KEY, expansion=expansion)


def test_indices_beyond_int32_are_refused() -> None:
    with pytest.raises(SpecError, match=r"page table: largest page index is 4294967292, expected .*2147483647"):
        kernel_page_index(build(*mixed_specs()), row(2**30 - 1), LayerId(0), KEY, SHARED)


@pytest.mark.parametrize(
    ("slot", "address", "shared", "per_layer", "wrong_pair_address"),
    [
        (0, 8192, 0, 1, 8192),
        (1, 32768, 3, 4, 24576),
        (2, 57344, 6, 7, 57344),
        (3, 81920, 9, 10, 73728),
        (4, 106496, 12, 13, 106496),
    ],
)
def test_odd_slots(slot: int, address: int, shared: int, per_layer: int, wrong_pair_address: int) -> None:
    layout = build(*odd_slot_specs())
    layer_id = LayerId(1)
    assert layout.byte_offset(layer_id, KEY, slot) == address
    assert kernel_page_index(layout, row(slot), layer_id, KEY, SHARED).tolist() == [shared]
    assert kernel_page_index(layout, row(slot), layer_id, KEY, PER_LAYER).tolist() == [per_layer]
    # What a contiguous K/V pair view would have read: a neighbour's bytes in every odd slot.
    assert 8192 + slot * 3 // 2 * 16384 == wrong_pair_address
    assert (wrong_pair_address == address) == (slot % 2 == 0)


def test_pair_indices_need_whole_pairs() -> None:
    odd = build(*odd_slot_specs())
    assert not pair_index_is_legal(odd, LayerId(1))
    with pytest.raises(
        SpecError, match=r"layer 1: \(scale, layer_offset\) is \(3, 1\), expected multiples of kv_factor=2"
    ):
        pair_page_index(odd, row(1), LayerId(1))
    key_only, kv = odd_slot_specs()
    even = build(key_only, kv, replace(key_only, layer_id=LayerId(2)))
    assert (even.groups[0].pools[0].scale, even.buffer(LayerId(1), KEY).layer_offset) == (4, 1)
    assert not pair_index_is_legal(even, LayerId(1))


def test_pair_indices_of_whole_pairs() -> None:
    layout = build(*mixed_specs())
    assert pair_page_index(layout, row(3, NO_PAGE), LayerId(3)).tolist() == [6, NO_PAGE]
    assert pair_page_index(layout, row(3), LayerId(2)).tolist() == [3]


def test_slots_are_counted_right_for_key_only_and_odd_pools() -> None:
    layout = build(*odd_slot_specs())
    bounds = {
        (layer_id, role): upper_bound(layout, LayerId(layer_id), role, 5)
        for layer_id, role in [(0, KEY), (1, KEY), (1, VALUE)]
    }
    assert list(bounds.values()) == [15, 14, 13]
    assert {
        slots_of_upper_bound(layout, LayerId(layer_id), role, bound) for (layer_id, role), bound in bounds.items()
    } == {5}
    alone = build(odd_slot_specs()[0])
    assert slots_of_upper_bound(alone, LayerId(0), KEY, upper_bound(alone, LayerId(0), KEY, 5)) == 5
    with pytest.raises(SpecError, match="layer 1: upper bound is 15, expected"):
        slots_of_upper_bound(layout, LayerId(1), KEY, 15)


def test_pages_smaller_than_a_block() -> None:
    """Four buffers a slot, four 32-token pages a 128-token block: K and V of slot 3."""
    specs = [replace(spec, window=None) for spec in mixed_specs()[4:]]
    layout = build(*specs, tpb=128)
    assert layout.groups[0].pools[0].scale == 4
    for layer_id in (LayerId(4), LayerId(5)):
        keys = flat_page_index(layout, row(3, NO_PAGE), layer_id, KEY, sub_page_tokens=32)
        values = flat_page_index(layout, row(3), layer_id, VALUE, sub_page_tokens=32)
        assert keys.tolist() == [48, 49, 50, 51, NO_PAGE, NO_PAGE, NO_PAGE, NO_PAGE]
        assert values.tolist() == [52, 53, 54, 55]


@pytest.mark.parametrize("tokens", [0, 48, 256])
def test_sub_pages_make_a_whole_block(tokens: int) -> None:
    layout = build(*odd_slot_specs(), tpb=128)
    with pytest.raises(SpecError, match=f"kernel page: tokens is {tokens}, expected a divisor of tokens_per_block=128"):
        flat_page_index(layout, row(1), LayerId(1), KEY, sub_page_tokens=tokens)


def test_only_keys_and_values_are_page_lists() -> None:
    with pytest.raises(SpecError, match="layer 0: role is 'key_block_scale', expected key or value"):
        flat_page_index(build(*mixed_specs()), row(1), LayerId(0), KEY_BLOCK_SCALE)


def test_layers_share_converted_indices_only_with_equal_geometry() -> None:
    layout = build(
        *odd_slot_specs(), *(replace(spec, layer_id=LayerId(2 + i)) for i, spec in enumerate(odd_slot_specs()))
    )
    keys = [sharing_key(layout, LayerId(layer_id)) for layer_id in range(4)]
    assert keys == [(0, 6, 1, 1), (0, 6, 2, 1)] * 2
    assert sharing_key(layout, LayerId(0), expansion=2) != keys[0]


@given(spec_lists(), st.lists(st.integers(-1, 1000), max_size=6), st.sampled_from([1, 2, 4]))
def test_both_modes_reach_the_address_of_the_layout(
    specs: tuple[KVCacheLayerSpec, ...], slots: list[int], expansion: int
) -> None:
    layout = build(*specs, tpb=4)
    for spec in specs:
        for role in spec.roles:
            stride = page_stride_bytes(layout, spec.layer_id, role, expansion=expansion)
            want = [
                layout.byte_offset(spec.layer_id, role, slot) + part * stride if slot != NO_PAGE else None
                for slot in slots
                for part in range(expansion)
            ]
            for mode in PageIndexMode:
                base = base_offset_bytes(layout, spec.layer_id, role, mode)
                found = kernel_page_index(layout, row(*slots), spec.layer_id, role, mode, expansion=expansion)
                assert [base + int(page) * stride if page != NO_PAGE else None for page in found] == want


@given(spec_lists(), st.integers(1, 1000))
def test_upper_bound_is_the_first_index_behind_the_pool(specs: tuple[KVCacheLayerSpec, ...], num_slots: int) -> None:
    layout = build(*specs, tpb=4)
    for spec in specs:
        for role in spec.roles:
            bound = upper_bound(layout, spec.layer_id, role, num_slots)
            buffer = layout.buffer(spec.layer_id, role)
            end = base_offset_bytes(layout, spec.layer_id, role, SHARED) + bound * buffer.size_bytes
            assert end == num_slots * layout.pool_of(buffer).slot_bytes
            assert slots_of_upper_bound(layout, spec.layer_id, role, bound) == num_slots
