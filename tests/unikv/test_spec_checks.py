"""Checks across layers that single features ask for."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from unikv.errors import SpecError
from unikv.ids import LayerId
from unikv.layer_spec import KVDtype, LayerOwner
from unikv.spec_checks import check_draft_uniform, check_stage, check_token_relocation
from unikv.testing import mixed_specs, odd_slot_specs


def test_a_stage_is_described_exactly() -> None:
    specs = odd_slot_specs()
    ids = [spec.layer_id for spec in specs]
    check_stage(specs, ids)
    with pytest.raises(SpecError, match=r"layer 1: layer_id is 1, expected one of this stage's layers \(0, 2\)"):
        check_stage(specs, [LayerId(0), LayerId(2)])
    with pytest.raises(SpecError, match=r"layer 2: specs of the stage is 2, expected 3, one for each layer"):
        check_stage(specs, [*ids, LayerId(2)])


@pytest.mark.parametrize(
    ("field", "value"),
    [("num_kv_heads", 1), ("head_dim", 32), ("dtype", KVDtype.FLOAT16), ("kv_factor", 1), ("window", 32)],
)
def test_draft_layers_that_share_a_table_are_alike(field: str, value: Any) -> None:
    *rest, last = mixed_specs()
    check_draft_uniform([*rest, last])
    with pytest.raises(SpecError, match=f"layer 5: {field} is .* as in layer 4; give this drafter a cache of its own"):
        check_draft_uniform([*rest, replace(last, **{field: value})])


@pytest.mark.parametrize(("field", "value"), [("num_kv_heads", 1), ("kv_factor", 1), ("window", 32)])
def test_tokens_move_only_between_layers_that_are_alike(field: str, value: Any) -> None:
    first = mixed_specs()[4]
    check_token_relocation([first, replace(first, layer_id=LayerId(5), head_dim=32)])
    with pytest.raises(SpecError, match=f"layer 5: {field} is .*; draft chains instead of trees"):
        check_token_relocation([first, replace(first, layer_id=LayerId(5), **{field: value})])


def test_keys_alone_cannot_be_relocated() -> None:
    with pytest.raises(SpecError, match="layer 0: kv_factor is 1, expected 2 for token relocation"):
        check_token_relocation([odd_slot_specs()[0]])


def test_no_drafts_are_alike() -> None:
    check_draft_uniform(odd_slot_specs())
    assert all(spec.owner is LayerOwner.TARGET for spec in odd_slot_specs())
