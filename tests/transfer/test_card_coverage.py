"""No memory of a rank is forgotten: every role is on the card, or stays home by name."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from transfer.cards import build_card
from transfer.gate import check
from transfer.hello import DraftKVMode, ParallelPosition, PathKind, RankCard, Side
from transfer.own_layers import OwnLayer
from transfer.own_pools import OwnPools
from transfer.plan import compile_program
from unikv.errors import SpecError
from unikv.ids import LayerId
from unikv.layer_spec import KVCacheLayerSpec, KVDtype, LayerOwner
from unikv.layout import build_layout
from unikv.views import describe_views

EVERYTHING = {"key", "value", "key_block_scale", "value_block_scale", "index_key", "state"}


def card(side: Side = Side.CONTEXT, **fields: Any) -> RankCard:
    spec = KVCacheLayerSpec(
        layer_id=LayerId(3),
        owner=LayerOwner.TARGET,
        num_kv_heads=2,
        head_dim=16,
        dtype=KVDtype.NVFP4,
        extra_buffers={"index_key": 16, "state": 5},
    )
    return build_card(
        build_layout([spec], tokens_per_block=4, max_seq_len=None),
        side=side,
        position=ParallelPosition(),
        num_slots=4,
        incarnation="i",
        instance="n",
        draft_kv=DraftKVMode.AUTO,
        path=PathKind.AUTO,
        num_target_layers=1,
        num_draft_layers=0,
        **fields,
    )


def roles(found: RankCard) -> set[str]:
    return {entry.role for view in found.views for entry in view.entries}


def test_every_role_is_on_the_card() -> None:
    assert roles(card()) == EVERYTHING


@pytest.mark.parametrize("lost", sorted(EVERYTHING))
def test_a_role_without_a_view_is_an_error_when_the_card_is_made(lost: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def without(*args: Any, **kwargs: Any) -> Any:
        return tuple(view for view in describe_views(*args, **kwargs) if lost not in view.roles)

    monkeypatch.setattr("transfer.cards.describe_views", without)
    with pytest.raises(SpecError, match=r"layer 3: role \w+ is 'in 0 views of the card', expected in 1; .*stays_home"):
        card()


def test_a_role_described_twice_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("transfer.cards.describe_views", lambda *a, **k: describe_views(*a, **k) * 2)
    with pytest.raises(SpecError, match="layer 3: role index_key is 'in 2 views"):
        card()


def test_a_role_stays_home_by_name_on_both_sides() -> None:
    context, generation = card(stays_home=["state"]), card(Side.GENERATION, stays_home=["state"])
    assert roles(context) == EVERYTHING - {"state"}
    assert check(context, generation).compatible
    program = compile_program(context, generation, with_draft=False)
    assert {piece.role for piece in program.slices} == EVERYTHING - {"state"}


def test_a_role_that_stays_home_on_one_side_alone_is_refused() -> None:
    report = check(card(stays_home=["state"]), card(Side.GENERATION))
    assert [(row.name, row.context, row.generation) for row in report.refused] == [
        (
            "roles",
            "key_block_scale, value_block_scale, index_key",
            "key_block_scale, value_block_scale, index_key, state",
        )
    ]


@pytest.mark.parametrize("name", ["key", "value_block_scale", "logits"])
def test_only_extra_roles_of_the_rank_can_stay_home(name: str) -> None:
    with pytest.raises(
        SpecError, match=rf"stays_home is '{name}', expected an extra role of this rank \(index_key, st"
    ):
        card(stays_home=[name])


def test_pools_of_an_engine_are_checked_too(monkeypatch: pytest.MonkeyPatch) -> None:
    tensor = np.zeros((4, 2, 2, 4, 16), dtype=np.float16)
    layer = OwnLayer(layer_id=0, owner=LayerOwner.TARGET, tensors=tensor, axes="slots kv heads tokens dim")
    pools = OwnPools([layer], tokens_per_block=4)
    assert roles(pools.card(side=Side.CONTEXT, instance="n")) == {"key", "value"}
    monkeypatch.setattr("transfer.own_pools.describe_own_views", lambda *a: ())
    with pytest.raises(SpecError, match="layer 0: role key is 'in 0 views of the card'"):
        pools.card(side=Side.CONTEXT, instance="n")
