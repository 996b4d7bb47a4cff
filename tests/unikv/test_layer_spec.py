"""One layer's spec: what is refused, in which words, and what the roles are."""

from __future__ import annotations

from typing import Any

import pytest

from unikv.errors import SpecError
from unikv.layer_spec import KVCacheLayerSpec, KVDtype, KVLayout, LayerOwner, ReusePolicy, check_layer_specs


def spec(**changes: Any) -> KVCacheLayerSpec:
    fields: dict[str, Any] = {
        "layer_id": 3,
        "owner": LayerOwner.TARGET,
        "num_kv_heads": 2,
        "head_dim": 64,
        "dtype": KVDtype.BFLOAT16,
        **changes,
    }
    return KVCacheLayerSpec(**fields)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"layer_id": -1}, "layer -1: layer_id is -1, expected an integer >= 0"),
        ({"layer_id": True}, "layer True: layer_id is True, expected an integer >= 0"),
        ({"owner": "drafter"}, r"layer 3: owner is 'drafter', expected a LayerOwner \(target, draft\)"),
        ({"dtype": "int4"}, r"layer 3: dtype is 'int4', expected a KVDtype \(float32, .*nvfp4\)"),
        ({"dtype": None}, "layer 3: dtype is None, expected a KVDtype"),
        ({"reuse_policy": "never"}, r"layer 3: reuse_policy is 'never', expected .*\(required, optional, private\)"),
        ({"num_kv_heads": 0}, "layer 3: num_kv_heads is 0, expected an integer >= 1"),
        ({"num_kv_heads": -2}, "layer 3: num_kv_heads is -2, expected an integer >= 1"),
        ({"num_kv_heads": -2, "extra_buffers": {"state": 1}}, "layer 3: num_kv_heads is -2"),
        ({"num_kv_heads": 2.0}, "layer 3: num_kv_heads is 2.0, expected an integer"),
        (
            {"num_kv_heads": 0, "owner": LayerOwner.DRAFT, "extra_buffers": {"state": 1}},
            "layer 3: num_kv_heads is 0, expected an integer >= 1",
        ),
        ({"head_dim": 0}, "layer 3: head_dim is 0, expected an integer >= 1"),
        ({"head_dim": -64}, "layer 3: head_dim is -64, expected an integer >= 1"),
        ({"kv_factor": 0}, r"layer 3: kv_factor is 0, expected 1 \(key-only\) or 2"),
        ({"kv_factor": 3}, "layer 3: kv_factor is 3"),
        ({"total_num_kv_heads": 1}, "layer 3: total_num_kv_heads is 1, expected an integer >= num_kv_heads=2"),
        ({"dtype": KVDtype.NVFP4, "head_dim": 65}, "layer 3: head_dim is 65, expected even for nvfp4"),
        ({"dtype": KVDtype.NVFP4, "head_dim": 1}, "layer 3: head_dim is 1, expected even for nvfp4"),
        ({"dtype": KVDtype.NVFP4, "head_dim": 24}, "layer 3: head_dim is 24, expected a multiple of 16 for nvfp4"),
        ({"dtype": KVDtype.NVFP4, "head_dim": 8, "num_kv_heads": 2}, "head_dim is 8, expected a multiple of 16"),
        ({"window": 0}, "layer 3: window is 0, expected an integer >= 1 token, or None"),
        ({"window": -1}, "layer 3: window is -1"),
        ({"window": 1.5}, "layer 3: window is 1.5"),
        ({"window": 64, "sink_tokens": -1}, "layer 3: sink_tokens is -1, expected an integer >= 0 tokens"),
        ({"sink_tokens": 4}, "layer 3: sink_tokens is 4, expected 0 without a window"),
        (
            {"extra_buffers": {"value": 8}, "kv_factor": 1},
            "layer 3: extra_buffers is 'value', expected names other than",
        ),
        ({"extra_buffers": {"index_key": 0}}, r"layer 3: extra_buffers\['index_key'\] is 0, expected an integer >= 1"),
    ],
)
def test_refusals_name_layer_and_field(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message) as caught:
        spec(**changes)
    assert isinstance(caught.value, SpecError)


@pytest.mark.parametrize("owner", [None, 1, True])
def test_an_owner_that_is_not_a_name_is_a_type_error(owner: object) -> None:
    with pytest.raises(TypeError, match=f"layer 3: owner is {owner}, expected LayerOwner.TARGET or LayerOwner.DRAFT"):
        spec(owner=owner)


def test_names_are_parsed() -> None:
    parsed = spec(owner="draft", dtype="nvfp4", reuse_policy="private")
    assert parsed.owner is LayerOwner.DRAFT
    assert parsed.is_draft
    assert parsed.dtype is KVDtype.NVFP4
    assert parsed.reuse_policy is ReusePolicy.PRIVATE
    assert parsed == spec(owner=LayerOwner.DRAFT, dtype=KVDtype.NVFP4, reuse_policy=ReusePolicy.PRIVATE)


def test_an_unknown_name_lists_the_legal_ones() -> None:
    with pytest.raises(SpecError, match="KVLayout: value is 'DHN', expected one of HND, NHD; use one of these names"):
        KVLayout("DHN")


@pytest.mark.parametrize(
    ("changes", "roles"),
    [
        ({"dtype": KVDtype.NVFP4}, ("key", "value", "key_block_scale", "value_block_scale")),
        ({"dtype": KVDtype.NVFP4, "kv_factor": 1}, ("key", "key_block_scale")),
        ({"dtype": KVDtype.FLOAT8_E4M3FN}, ("key", "value")),
        ({"dtype": KVDtype.FLOAT16, "kv_factor": 1}, ("key",)),
        ({"extra_buffers": {"index_key": 256}}, ("key", "value", "index_key")),
        ({"dtype": KVDtype.NVFP4, "num_kv_heads": 0, "extra_buffers": {"state": 256}}, ("state",)),
    ],
)
def test_roles(changes: dict[str, Any], roles: tuple[str, ...]) -> None:
    assert spec(**changes).roles == roles


def test_total_heads_default_to_the_local_ones() -> None:
    assert spec().total_heads == 2
    assert spec(total_num_kv_heads=8).total_heads == 8


def test_a_spec_does_not_follow_the_callers_mapping() -> None:
    extras = {"index_key": 256}
    made = spec(extra_buffers=extras)
    extras["index_key"] = 1
    assert made.extra_buffers == {"index_key": 256}
    assert len({made, spec(extra_buffers={"index_key": 256})}) == 1


def test_bits() -> None:
    bits = {"float32": 32, "float16": 16, "bfloat16": 16, "float8_e4m3fn": 8, "nvfp4": 4}
    assert {dtype.value: dtype.bits for dtype in KVDtype} == bits


def test_no_layers() -> None:
    with pytest.raises(SpecError, match="cache: layers is 0, expected at least one layer"):
        check_layer_specs([])


def test_a_layer_twice() -> None:
    with pytest.raises(SpecError, match="layer 3: layer_id is 3, expected unique; renumber the layers"):
        check_layer_specs([spec(), spec(owner=LayerOwner.DRAFT)])


def test_drafts_are_numbered_behind_targets() -> None:
    draft = spec(layer_id=2, owner=LayerOwner.DRAFT)
    with pytest.raises(SpecError, match="layer 2: layer_id is 2, expected > 3, the last target layer"):
        check_layer_specs([draft, spec()])
    assert check_layer_specs(iter([draft, spec(layer_id=1)])) == (draft, spec(layer_id=1))
