"""What an engine says of one layer's KV tensors, and the paged buffers that follow from it.

The order of a tensor's axes is a string of their names::

    kv slots tokens heads dim     one tensor per layer, all K before all V
    slots kv tokens heads dim     K and V of a page side by side
    slots heads tokens dim        K alone, or K and V as tensors of their own
    tokens heads dim              pages are consecutive tokens: token t is in slot t // tokens_per_block
    slots tokens dim              one head (latents, index keys)

In every slot a buffer must be rows without gaps, ``[heads, tokens, dim]`` or ``[tokens, heads, dim]``; what lies
between slots does not matter.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final

from transfer.own_cut import DATA, Cut, OwnBuffer, parse_axes
from transfer.own_tensors import TensorFacts, read_tensor
from unikv.errors import SpecError, explain
from unikv.ids import LayerId
from unikv.layer_spec import (
    KEY,
    KEY_BLOCK_SCALE,
    NVFP4_SCALE_ELEMENTS,
    STANDARD_ROLES,
    VALUE_BLOCK_SCALE,
    KVCacheLayerSpec,
    KVDtype,
    LayerOwner,
    ReusePolicy,
)

_SCALES: Final = (KEY_BLOCK_SCALE, VALUE_BLOCK_SCALE)


@dataclass(frozen=True, slots=True, kw_only=True)
class OwnLayer:
    """One layer's KV on this rank, in tensors of the engine.

    Attributes:
        layer_id: global layer number; draft layers come after the target's.
        owner: target or draft.
        tensors: one tensor, or a tensor per role: "key", "value", for NVFP4 "key_block_scale" and
            "value_block_scale", and extras by names of their own. A single tensor without a kv axis is the key.
        axes: names of the axes, in their order (see the module), for all tensors or per role.
        total_heads: KV heads of the whole model in this layer; None: as many as the tensor has.
        first_head: global number of the first head in the tensor.
        replica: which copy of these heads this rank holds, counted from 0; None: what the usual split gives (ranks
            with the same heads are neighbours).
        dtype: element type of K and V where the tensor's own does not say (bytes of float8 or NVFP4 data, bfloat16 in
            numpy).
        window: sliding window in tokens, or None for full attention.
        sink_tokens: tokens at the start that never leave the window.
        reuse_policy: what the layer means to prefix reuse.
    """

    layer_id: int
    owner: LayerOwner
    tensors: Any
    axes: str | Mapping[str, str]
    total_heads: int | None = None
    first_head: int = 0
    replica: int | None = None
    dtype: KVDtype | None = None
    window: int | None = None
    sink_tokens: int = 0
    reuse_policy: ReusePolicy = ReusePolicy.REQUIRED


@dataclass(frozen=True, slots=True, kw_only=True)
class ResolvedLayer:
    """A layer as the rest of the project knows layers, with its buffers."""

    layer: OwnLayer
    spec: KVCacheLayerSpec
    buffers: tuple[OwnBuffer, ...]


def resolve_layer(layer: OwnLayer, tokens_per_block: int) -> ResolvedLayer:
    """Return the spec and the buffers that `layer` describes.

    Raises:
        SpecError: the description contradicts itself or the tensors; the text names layer, field and value.
    """
    buffers = {buffer.role: buffer for buffer in _buffers(layer, tokens_per_block)}
    key = buffers.get(KEY)
    if key is None:
        want = f"{KEY} among them"
        raise SpecError(explain(f"layer {layer.layer_id}", "roles", tuple(buffers), want, "pass the key tensor"))
    dtype = _dtype(layer, key.facts, key.thing)
    head_dim = key.row_bytes * 8 // dtype.bits
    _check_alike(key, buffers, head_dim)
    spec = KVCacheLayerSpec(
        layer_id=LayerId(layer.layer_id),
        owner=layer.owner,
        num_kv_heads=key.heads,
        total_num_kv_heads=layer.total_heads,
        head_dim=head_dim,
        dtype=dtype,
        kv_factor=sum(role in buffers for role in DATA),
        window=layer.window,
        sink_tokens=layer.sink_tokens,
        reuse_policy=layer.reuse_policy,
        extra_buffers={role: b.row_bytes * b.heads for role, b in buffers.items() if role not in STANDARD_ROLES},
    )
    if set(spec.roles) != set(buffers):
        want = f"{', '.join(spec.roles)} for {dtype} data"
        cure = "pass one tensor per role; block scales belong to nvfp4 alone"
        raise SpecError(explain(f"layer {layer.layer_id}", "roles", tuple(buffers), want, cure))
    return ResolvedLayer(layer=layer, spec=spec, buffers=tuple(buffers[role] for role in spec.roles))


def _buffers(layer: OwnLayer, tokens_per_block: int) -> Iterator[OwnBuffer]:
    by_role = layer.tensors if isinstance(layer.tensors, Mapping) else {None: layer.tensors}
    for role, tensor in by_role.items():
        thing = f"layer {layer.layer_id}{f' {role}' if role else ''}"
        axes = parse_axes(layer.axes if isinstance(layer.axes, str) else layer.axes.get(role or KEY), thing)
        facts = read_tensor(tensor, thing)
        cut = Cut.of(facts, axes, tokens_per_block, thing)
        if role is not None and cut.kv > 1:
            want = "1 in a tensor of one role"
            raise SpecError(explain(thing, "length of axis kv", cut.kv, want, "pass K and V as one tensor instead"))
        for number in range(cut.kv):
            yield cut.buffer(facts, LayerId(layer.layer_id), role or DATA[number], number)


def _dtype(layer: OwnLayer, facts: TensorFacts, thing: str) -> KVDtype:
    named = facts.dtype if layer.dtype is None else str(layer.dtype)
    known = {dtype.value: dtype for dtype in KVDtype}
    if named not in known:
        cure = "set OwnLayer.dtype to what the bytes are"
        raise SpecError(explain(thing, "dtype", named, f"one of {', '.join(known)}", cure))
    dtype = known[named]
    item_bytes = max(1, dtype.bits // 8)
    if facts.item_bytes != item_bytes:
        want = f"a type of {facts.item_bytes} byte(s) like the tensor's elements ({facts.dtype})"
        raise SpecError(explain(thing, "dtype", named, want, "view the tensor as that type, or correct OwnLayer.dtype"))
    return dtype


def _check_alike(key: OwnBuffer, buffers: Mapping[str, OwnBuffer], head_dim: int) -> None:
    """Refuse roles of one layer that do not belong together."""
    for role, buffer in buffers.items():
        wants = {"length of axis slots": (buffer.num_slots, key.num_slots)}
        if role in STANDARD_ROLES:
            wants["length of axis heads"] = (buffer.heads, key.heads)
        if role in DATA:
            wants["bytes of one row"] = (buffer.row_bytes, key.row_bytes)
            wants["dtype"] = (buffer.facts.dtype, key.facts.dtype)  # type: ignore[assignment]
        if role in _SCALES:
            wants["bytes of one row"] = (buffer.row_bytes, head_dim // NVFP4_SCALE_ELEMENTS)
        for field, (got, want) in wants.items():
            if got != want:
                text = f"{want}, as its key has" if role not in _SCALES else f"{want}, as its key needs"
                raise SpecError(explain(buffer.thing, field, got, text, "give all roles of a layer one geometry"))
        if role not in STANDARD_ROLES and buffer.heads != 1:
            cure = "extras are replicated and have no heads: leave the axis away"
            raise SpecError(explain(buffer.thing, "length of axis heads", buffer.heads, "1", cure))
