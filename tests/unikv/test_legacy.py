"""Scalars in, specs out."""

from __future__ import annotations

from typing import Any

import pytest

from unikv.errors import SpecError
from unikv.layer_spec import KVDtype, LayerOwner
from unikv.layout import build_layout
from unikv.legacy import check_against_scalars, specs_from_scalars
from unikv.testing import mixed_specs, odd_slot_specs

BF16 = KVDtype.BFLOAT16


def test_masked_and_empty_layers_go_and_global_numbers_stay() -> None:
    specs = specs_from_scalars(
        5,
        [9, 0, 2, 0, 3],
        64,
        BF16,
        layer_mask=[False, True, True, True, True],
        windows=[16, 8, 16, 12, 4],
        max_seq_len=16,
    )
    assert [(spec.layer_id, spec.num_kv_heads, spec.window) for spec in specs] == [(2, 2, None), (4, 3, 4)]


def test_an_extra_buffer_keeps_a_layer_without_heads() -> None:
    specs = specs_from_scalars(3, [0, 0, 2], 64, BF16, extra_buffers={1: {"state": 256}})
    assert [(spec.layer_id, spec.roles) for spec in specs] == [(1, ("state",)), (2, ("key", "value"))]


@pytest.mark.parametrize(
    "arguments", [{"num_kv_heads": 0}, {"num_kv_heads": 2, "layer_mask": [False, False]}, {"num_kv_heads": [0, 0]}]
)
def test_nothing_left(arguments: dict[str, Any]) -> None:
    with pytest.raises(SpecError, match="cache: layers is 0, expected at least one that is held and stores something"):
        specs_from_scalars(2, head_dim=64, dtype=BF16, **arguments)


def test_a_window_pattern_repeats_by_global_number() -> None:
    specs = specs_from_scalars(4, 2, 64, BF16, windows=[128, 256], layer_mask=[False, True, False, True])
    assert [(spec.layer_id, spec.window) for spec in specs] == [(1, 256), (3, 256)]


def test_every_scalar_arrives() -> None:
    (spec,) = specs_from_scalars(
        1, 2, 64, KVDtype.NVFP4, kv_factor=1, total_num_kv_heads=8, owner=LayerOwner.DRAFT, extra_buffers={0: {"x": 3}}
    )
    assert (spec.num_kv_heads, spec.total_heads, spec.head_dim, spec.kv_factor) == (2, 8, 64, 1)
    assert (spec.dtype, spec.owner, spec.extra_buffers) == (KVDtype.NVFP4, LayerOwner.DRAFT, {"x": 3})


def test_a_model_without_specs_gets_the_layout_of_one_with_them() -> None:
    first, second = odd_slot_specs()
    from_scalars = specs_from_scalars(2, 1, 128, BF16, kv_factor=2)
    assert from_scalars[1] == second
    assert from_scalars[0].layer_id == first.layer_id
    layouts = [build_layout(specs, tokens_per_block=32, max_seq_len=64) for specs in (from_scalars, list(from_scalars))]
    assert layouts[0] == layouts[1]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"num_kv_heads": [2]}, "cache: num_kv_heads is '1 values', expected one value for each of 2 layers"),
        ({"layer_mask": [True]}, "cache: layer_mask is '1 values'"),
        ({"windows": []}, r"cache: windows is \[\], expected a pattern of at least one window"),
        ({"extra_buffers": {2: {"x": 1}}}, r"cache: extra_buffers is 2, expected layer numbers in \[0, 2\)"),
        ({"num_kv_heads": [2, -1]}, "layer 1: num_kv_heads is -1"),
    ],
)
def test_refusals(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(SpecError, match=message):
        specs_from_scalars(2, **{"num_kv_heads": 2, "head_dim": 64, "dtype": BF16, **arguments})


def test_scalars_that_agree_with_the_specs() -> None:
    specs = odd_slot_specs()
    check_against_scalars(specs)
    check_against_scalars(specs, num_kv_heads=1, head_dim=128, kv_factor=[1, 2], dtype=BF16)
    assert [spec.kv_factor for spec in specs] == [1, 2]


@pytest.mark.parametrize(
    ("scalars", "message"),
    [
        ({"num_kv_heads": 2}, "layer 2: num_kv_heads is 1, expected 2 as the argument num_kv_heads says; leave out"),
        ({"num_kv_heads": [2, 2, 1, 2, 2, 4]}, "layer 5: num_kv_heads is 2, expected 4"),
        ({"head_dim": 64}, "layer 2: head_dim is 128, expected 64"),
        ({"kv_factor": 2}, "layer 2: kv_factor is 1, expected 2"),
        ({"dtype": KVDtype.NVFP4}, "layer 1: dtype is 'float8_e4m3fn', expected nvfp4"),
        ({"head_dim": [64]}, "cache: head_dim is '1 values', expected one value for each of 6 layers"),
    ],
)
def test_scalars_that_differ_from_the_specs(scalars: dict[str, Any], message: str) -> None:
    with pytest.raises(SpecError, match=message):
        check_against_scalars(mixed_specs(), **scalars)
