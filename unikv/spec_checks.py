"""Checks across layers that only some features need; each feature calls its own before anything is built."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from unikv.errors import SpecError, explain
from unikv.ids import LayerId
from unikv.layer_spec import KVCacheLayerSpec

_DRAFT_FIELDS: Final = ("num_kv_heads", "head_dim", "dtype", "kv_factor", "window")
_RELOCATION_FIELDS: Final = ("num_kv_heads", "kv_factor", "window")


def check_stage(specs: Sequence[KVCacheLayerSpec], local_layer_ids: Sequence[LayerId]) -> None:
    """Check that `specs` describe exactly the layers a pipeline stage holds.

    Raises:
        SpecError: a spec of another stage's layer, or a local layer without a spec.
    """
    local, described = set(local_layer_ids), {spec.layer_id for spec in specs}
    held = ", ".join(str(layer_id) for layer_id in sorted(local))
    for spec in specs:
        if spec.layer_id not in local:
            want = f"one of this stage's layers ({held})"
            raise _error(spec, "layer_id", spec.layer_id, want, "pass only the specs of this stage")
    if missing := sorted(local - described):
        want = f"{len(local)}, one for each layer of this stage ({held})"
        raise SpecError(explain(f"layer {missing[0]}", "specs of the stage", len(specs), want, "add the missing spec"))


def check_draft_uniform(specs: Sequence[KVCacheLayerSpec]) -> None:
    """Check that the draft layers among `specs` can share one block table.

    Raises:
        SpecError: two draft layers differ in heads, head_dim, dtype, kv_factor or window.
    """
    _check_equal([spec for spec in specs if spec.is_draft], _DRAFT_FIELDS, "give this drafter a cache of its own")


def check_token_relocation(specs: Sequence[KVCacheLayerSpec]) -> None:
    """Check that accepted tokens of a draft tree can be moved together: alike in all layers, K and V in each.

    Raises:
        SpecError: layers differ in heads, kv_factor or window, or store keys only.
    """
    cure = "draft chains instead of trees with this model"
    _check_equal(specs, _RELOCATION_FIELDS, cure)
    if specs and specs[0].kv_factor != 2:
        raise _error(specs[0], "kv_factor", specs[0].kv_factor, "2 for token relocation", cure)


def _check_equal(specs: Sequence[KVCacheLayerSpec], fields: Sequence[str], cure: str) -> None:
    for spec in specs[1:]:
        for field in fields:
            got, want = getattr(spec, field), getattr(specs[0], field)
            if got != want:
                raise _error(spec, field, got, f"{want} as in layer {specs[0].layer_id}", cure)


def _error(spec: KVCacheLayerSpec, field: str, got: object, want: str, cure: str) -> SpecError:
    return SpecError(explain(f"layer {spec.layer_id}", field, got, want, cure))
