"""From a transformers config to layer specs, and the check that a pair file describes the same model.

Target layers are 0 .. L-1 and draft layers L .. L+D-1, in one cache. A draft layer's pages are kept one token longer
than its attention looks back: after a step that accepted everything the drafter is one token behind the target, and
the request's history has moved on already.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Final

from unikv.errors import ConfigError, explain
from unikv.ids import LayerId
from unikv.layer_spec import KVCacheLayerSpec, KVDtype, LayerOwner, ReusePolicy
from unikv.ranges import effective_window

DRAFT_LAG_TOKENS: Final = 1
"""Tokens a drafter's first read may lie before the request's history."""

_LAYER_WINDOWED: Final = {"full_attention": False, "sliding_attention": True}


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionPlan:
    """Which cache layers a model's layers use, and how far each of them looks back.

    Attributes:
        layer_ids: the cache's layer id of the model's layer 0, 1, ...
        windows: attention window in tokens per layer, the token itself included; None: full attention.
        imposed_window: a window the model does not know of. The runner must then pass `PagedKVCache.imposed_mask`.
    """

    layer_ids: tuple[LayerId, ...]
    windows: tuple[int | None, ...]
    imposed_window: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerPlan:
    """What the cache must hold for a model pair, and how each model uses it.

    Attributes:
        specs: target layers, then draft layers; the whole model on one rank.
        target, draft: how the two models map to them (`draft` None: no drafter).
    """

    specs: tuple[KVCacheLayerSpec, ...]
    target: AttentionPlan
    draft: AttentionPlan | None


def layer_specs_for(
    target_config: Any,
    draft_config: Any = None,
    *,
    dtype: KVDtype,
    draft_window: int | None = None,
    draft_reuse: ReusePolicy = ReusePolicy.OPTIONAL,
) -> LayerPlan:
    """Derive the layers of one cache for a target and, where given, its drafter.

    Args:
        target_config, draft_config: transformers configs of causal language models.
        dtype: element type of K and V in the pages.
        draft_window: attention window in tokens imposed on every draft layer; None leaves the drafter as it is.
        draft_reuse: what draft layers mean to prefix reuse.

    Raises:
        ConfigError: a model without standard attention, or a `draft_window` that leaves draft layers with
            different windows.
    """
    specs, target = _one_model(target_config, LayerOwner.TARGET, 0, dtype, attention_windows(target_config))
    if draft_config is None:
        return LayerPlan(specs=specs, target=target, draft=None)
    windows = _draft_windows(draft_config, draft_window)
    drafts, plan = _one_model(draft_config, LayerOwner.DRAFT, len(specs), dtype, windows, draft_reuse)
    draft = AttentionPlan(layer_ids=plan.layer_ids, windows=plan.windows, imposed_window=draft_window)
    return LayerPlan(specs=(*specs, *drafts), target=target, draft=draft)


def attention_windows(config: Any) -> tuple[int | None, ...]:
    """Return the window in tokens of every layer, None where attention is full.

    Raises:
        ConfigError: the model has layers this project does not run (latent, linear, chunked attention, ...).
    """
    text = _text_config(config)
    window: int | None = getattr(text, "sliding_window", None)
    kinds = getattr(text, "layer_types", None)
    if not kinds:
        return (window,) * int(text.num_hidden_layers)
    for kind in kinds:
        if kind not in _LAYER_WINDOWED:
            raise _unsupported(f"layer_types contains {kind!r}")
    return tuple(window if _LAYER_WINDOWED[kind] else None for kind in kinds)


def check_layers(
    expected: Sequence[KVCacheLayerSpec], given: Iterable[KVCacheLayerSpec], *, max_seq_len: int | None = None
) -> None:
    """Check that the layers of a pair file, or of a manager made from it, are those of the model.

    Args:
        expected: the specs of `layer_specs_for`.
        given: all layers with all heads (this runner splits no model). The dtype may be any but nvfp4.
        max_seq_len: longest sequence in tokens; a window as long as that counts as none.

    Raises:
        ConfigError: naming the key of ``model.layers`` and the layer.
    """
    layers = tuple(given)
    for owner in LayerOwner:
        want = sum(spec.owner is owner for spec in expected)
        got = sum(spec.owner is owner for spec in layers)
        if want != got:
            cure = f"write count: {want} for owner: {owner} in model.layers, and keep parallel.pp at 1"
            raise ConfigError(explain("cache", f"model.layers count of owner {owner}", got, f"{want}", cure))
    for ours, theirs in zip(expected, layers, strict=True):
        _check_layer(ours, theirs, max_seq_len)


def _check_layer(ours: KVCacheLayerSpec, theirs: KVCacheLayerSpec, max_seq_len: int | None) -> None:
    pairs = {
        "layer id": (ours.layer_id, theirs.layer_id),
        "owner": (ours.owner.value, theirs.owner.value),
        "kv_heads": (ours.total_heads, theirs.total_heads),
        "kv_heads on this rank (parallel.tp must be 1)": (ours.num_kv_heads, theirs.num_kv_heads),
        "head_dim": (ours.head_dim, theirs.head_dim),
        "kv_factor": (ours.kv_factor, theirs.kv_factor),
    }
    for key, (want, got) in pairs.items():
        if want != got:
            raise _layer_error(theirs, key, got, f"{want} as in the model")
    if theirs.dtype is KVDtype.NVFP4:
        raise _layer_error(theirs, "dtype", theirs.dtype.value, "a dtype the runner can store")
    need, kept = effective_window(ours.window, max_seq_len), effective_window(theirs.window, max_seq_len)
    if kept is not None and (need is None or kept < need):
        lag = " (runner.draft_window plus one token the drafter may lag behind)" if ours.is_draft else ""
        raise _layer_error(theirs, "window", kept, f"null or at least {need}{lag}" if need else "null")


def _one_model(
    config: Any,
    owner: LayerOwner,
    first_id: int,
    dtype: KVDtype,
    windows: tuple[int | None, ...],
    reuse: ReusePolicy = ReusePolicy.REQUIRED,
) -> tuple[tuple[KVCacheLayerSpec, ...], AttentionPlan]:
    text = _text_config(config)
    heads = getattr(text, "num_key_value_heads", None) or text.num_attention_heads
    head_dim = getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads
    ids = tuple(LayerId(first_id + index) for index in range(len(windows)))
    lag = DRAFT_LAG_TOKENS if owner is LayerOwner.DRAFT else 0
    specs = tuple(
        KVCacheLayerSpec(
            layer_id=layer_id,
            owner=owner,
            num_kv_heads=heads,
            total_num_kv_heads=heads,
            head_dim=head_dim,
            dtype=dtype,
            window=None if window is None else window + lag,
            reuse_policy=reuse,
        )
        for layer_id, window in zip(ids, windows, strict=True)
    )
    return specs, AttentionPlan(layer_ids=ids, windows=windows)


def _draft_windows(config: Any, draft_window: int | None) -> tuple[int | None, ...]:
    windows = attention_windows(config)
    if draft_window is None:
        return windows
    if draft_window < 1:
        raise ConfigError(explain("runner", "draft_window", draft_window, ">= 1 token, or null", "widen or drop it"))
    shorter = [window for window in windows if window is not None and window < draft_window]
    if shorter:
        cure = "drop draft_window, the drafter has windows of its own"
        raise ConfigError(explain("runner", "draft_window", draft_window, f"<= {min(shorter)}", cure))
    return (draft_window,) * len(windows)


def _text_config(config: Any) -> Any:
    if getattr(config, "is_encoder_decoder", False):
        raise _unsupported("it is an encoder-decoder")
    text = config.get_text_config(decoder=True)
    for field in ("kv_lora_rank", "attention_chunk_size", "kv_sharing_modes"):
        if getattr(text, field, None):
            raise _unsupported(f"its config has {field}")
    return text


def _unsupported(reason: str) -> ConfigError:
    cure = "use a decoder whose layers all keep plain K and V (Llama, Qwen2, Mistral, ...)"
    return ConfigError(explain("runner", "model", reason, "full or sliding-window attention", cure))


def _layer_error(spec: KVCacheLayerSpec, key: str, got: object, want: str) -> ConfigError:
    thing = f"layer {spec.layer_id} ({spec.owner.value})"
    return ConfigError(explain(thing, key, got, want, f"correct {key} in model.layers, or choose another model"))
