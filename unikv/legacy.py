"""From per-model scalars to layer specs: the older way to describe a cache, kept for callers that have no specs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final, TypeVar

from unikv.errors import SpecError, explain
from unikv.ids import LayerId
from unikv.layer_spec import KVCacheLayerSpec, KVDtype, LayerOwner
from unikv.ranges import effective_window

_THING: Final = "cache"

_T = TypeVar("_T")


def specs_from_scalars(  # noqa: PLR0913 - the scalars such callers hold, one by one
    num_layers: int,
    num_kv_heads: int | Sequence[int],
    head_dim: int,
    dtype: KVDtype,
    *,
    kv_factor: int = 2,
    total_num_kv_heads: int | Sequence[int] | None = None,
    windows: Sequence[int | None] | None = None,
    layer_mask: Sequence[bool] | None = None,
    extra_buffers: Mapping[int, Mapping[str, int]] | None = None,
    owner: LayerOwner = LayerOwner.TARGET,
    max_seq_len: int | None = None,
) -> tuple[KVCacheLayerSpec, ...]:
    """Return one spec per layer that stores something; global layer numbers stay, gaps and all.

    Args:
        num_layers: layers of the model; every sequence below is indexed by global layer number.
        num_kv_heads: heads on this rank, for all layers or per layer. A layer with 0 heads stores no K or V.
        head_dim: elements per head.
        dtype: element type of K and V.
        kv_factor: 2 for K and V, 1 for key-only layers.
        total_num_kv_heads: heads of the whole model, for all layers or per layer; None: as many as on this rank.
        windows: pattern of sliding windows in tokens, repeated over the layers by global number; None: full attention.
        layer_mask: which layers this rank holds; None: all.
        extra_buffers: further roles with their bytes per token, by layer number. They keep a layer without heads alive.
        owner: whose layers these are.
        max_seq_len: longest sequence in tokens; windows that reach it become full attention.

    Raises:
        SpecError: a sequence has the wrong length, a layer number does not exist, or no layer stores anything.
    """
    heads = _per_layer("num_kv_heads", num_kv_heads, num_layers)
    totals = _per_layer("total_num_kv_heads", total_num_kv_heads, num_layers)
    held = _per_layer("layer_mask", True if layer_mask is None else layer_mask, num_layers)
    extras = extra_buffers or {}
    if unknown := sorted(set(extras) - set(range(num_layers))):
        want = f"layer numbers in [0, {num_layers})"
        raise SpecError(explain(_THING, "extra_buffers", unknown[0], want, "name layers of the model"))
    pattern = _window_pattern(windows)
    specs = tuple(
        KVCacheLayerSpec(
            layer_id=LayerId(layer),
            owner=owner,
            num_kv_heads=heads[layer],
            total_num_kv_heads=totals[layer],
            head_dim=head_dim,
            dtype=dtype,
            kv_factor=kv_factor,
            window=effective_window(pattern[layer % len(pattern)], max_seq_len),
            extra_buffers=extras.get(layer, {}),
        )
        for layer in range(num_layers)
        if held[layer] and (heads[layer] != 0 or extras.get(layer))
    )
    if not specs:
        want = "at least one that is held and stores something"
        raise SpecError(explain(_THING, "layers", 0, want, "check num_kv_heads and layer_mask"))
    return specs


def check_against_scalars(
    specs: Sequence[KVCacheLayerSpec],
    *,
    num_kv_heads: int | Sequence[int] | None = None,
    head_dim: int | Sequence[int] | None = None,
    kv_factor: int | Sequence[int] | None = None,
    dtype: KVDtype | Sequence[KVDtype] | None = None,
) -> None:
    """Check that scalars given beside specs say the same; None says nothing.

    Args:
        specs: the layers of this rank.
        num_kv_heads: heads on this rank, for all specs or one for each, in the order of `specs`; likewise the others.
        head_dim: elements per head.
        kv_factor: 2 or 1.
        dtype: element type.

    Raises:
        SpecError: a scalar differs from a spec (the text names layer and field), or there is not one for each spec.
    """
    given: dict[str, object] = {
        "num_kv_heads": num_kv_heads,
        "head_dim": head_dim,
        "kv_factor": kv_factor,
        "dtype": dtype,
    }
    for field, values in given.items():
        for spec, value in zip(specs, _per_layer(field, values, len(specs)), strict=True):
            got = getattr(spec, field)
            if value is not None and value != got:
                want = f"{value} as the argument {field} says"
                cure = f"leave out the argument {field}, specs already say it"
                raise SpecError(explain(f"layer {spec.layer_id}", field, got, want, cure))


def _per_layer(field: str, value: _T | Sequence[_T], num_layers: int) -> Sequence[_T]:
    """Spread a scalar over the layers, or check that there is one value for each."""
    if isinstance(value, str) or not isinstance(value, Sequence):
        return [value] * num_layers
    if len(value) != num_layers:
        want = f"one value for each of {num_layers} layers"
        raise SpecError(explain(_THING, field, f"{len(value)} values", want, "give one number, or one for each layer"))
    return value


def _window_pattern(windows: Sequence[int | None] | None) -> Sequence[int | None]:
    if windows is None:
        return (None,)
    if not windows:
        raise SpecError(explain(_THING, "windows", [], "a pattern of at least one window", "use None for none"))
    return windows
