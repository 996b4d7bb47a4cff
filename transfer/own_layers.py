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

from transfer.own_tensors import TensorFacts, read_tensor
from unikv.errors import SpecError, explain
from unikv.ids import LayerId
from unikv.layer_spec import (
    KEY,
    KEY_BLOCK_SCALE,
    NVFP4_SCALE_ELEMENTS,
    STANDARD_ROLES,
    VALUE,
    VALUE_BLOCK_SCALE,
    KVCacheLayerSpec,
    KVDtype,
    KVLayout,
    LayerOwner,
    ReusePolicy,
)

_SLOTS, _KV, _HEADS, _TOKENS, _DIM = AXES = ("slots", "kv", "heads", "tokens", "dim")
"""Every axis a tensor may have."""

_DATA: Final = (KEY, VALUE)
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
class OwnBuffer:
    """One role of one layer as pages: slot ``s`` is at ``address + s * slot_stride``, `size_bytes` long.

    Attributes:
        row_bytes: one head of one token.
        orders: the head orders its memory can be read in; both where there is one head or one token.
        facts: the tensor it is a part of.
    """

    layer_id: LayerId
    role: str
    address: int
    slot_stride: int
    num_slots: int
    heads: int
    tokens: int
    row_bytes: int
    orders: frozenset[KVLayout]
    facts: TensorFacts

    @property
    def thing(self) -> str:
        """How error texts name it."""
        return f"layer {self.layer_id} {self.role}"

    @property
    def size_bytes(self) -> int:
        """Bytes of one page."""
        return self.heads * self.tokens * self.row_bytes

    @property
    def end(self) -> int:
        """Address behind its last page."""
        return self.address + (self.num_slots - 1) * self.slot_stride + self.size_bytes


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
        kv_factor=sum(role in buffers for role in _DATA),
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
        axes = _axes_of(layer, role, thing)
        facts = read_tensor(tensor, thing)
        cut = _Cut.of(facts, axes, tokens_per_block, thing)
        if role is not None and cut.kv > 1:
            want = "1 in a tensor of one role"
            raise SpecError(explain(thing, "length of axis kv", cut.kv, want, "pass K and V as one tensor instead"))
        for number in range(cut.kv):
            yield cut.buffer(facts, LayerId(layer.layer_id), role or _DATA[number], number)


def _axes_of(layer: OwnLayer, role: str | None, thing: str) -> tuple[str, ...]:
    text = layer.axes if isinstance(layer.axes, str) else layer.axes.get(role or KEY)
    if text is None:
        raise SpecError(explain(thing, "axes", None, "an order of axes for every role", "name its axes"))
    axes = tuple(text.replace(",", " ").split())
    sound = len(set(axes)) == len(axes) and set(axes) <= set(AXES) and {_TOKENS, _DIM} <= set(axes)
    if not sound:
        want = f"{_TOKENS}, {_DIM} and perhaps {_SLOTS}, {_KV}, {_HEADS}, each once"
        raise SpecError(explain(thing, "axes", text, want, "name the tensor's axes in their order"))
    return axes


@dataclass(frozen=True, slots=True, kw_only=True)
class _Cut:
    """A tensor cut into pages; strides are in bytes."""

    kv: int
    kv_stride: int
    num_slots: int
    slot_stride: int
    heads: int
    tokens: int
    row_bytes: int
    orders: frozenset[KVLayout]

    @staticmethod
    def of(facts: TensorFacts, axes: tuple[str, ...], tokens_per_block: int, thing: str) -> _Cut:
        if len(axes) != len(facts.shape):
            want = f"{len(facts.shape)} names for shape {facts.shape}"
            raise SpecError(explain(thing, "axes", " ".join(axes), want, "name every axis of the tensor once"))
        lengths = dict.fromkeys(AXES, 1) | dict(zip(axes, facts.shape, strict=True))
        strides = dict.fromkeys(AXES, 0) | dict(zip(axes, facts.strides, strict=True))
        if _SLOTS not in axes:
            _cut_tokens(lengths, strides, tokens_per_block, thing)
        _check_lengths(lengths, tokens_per_block, thing)
        row_bytes = lengths[_DIM] * facts.item_bytes
        orders = _orders(lengths, strides, facts.item_bytes, thing)
        page_bytes = lengths[_HEADS] * lengths[_TOKENS] * row_bytes
        for axis in (_SLOTS, _KV):
            if lengths[axis] > 1 and strides[axis] < page_bytes:
                want = f">= {page_bytes}, the bytes of a page"
                cure = "pages overlap; pass a tensor whose pages have memory of their own"
                raise SpecError(explain(thing, f"stride of axis {axis} in bytes", strides[axis], want, cure))
        return _Cut(
            kv=lengths[_KV],
            kv_stride=strides[_KV],
            num_slots=lengths[_SLOTS],
            # The stride of a single slot means nothing, and libraries fill in anything.
            slot_stride=strides[_SLOTS] if lengths[_SLOTS] > 1 else page_bytes,
            heads=lengths[_HEADS],
            tokens=lengths[_TOKENS],
            row_bytes=row_bytes,
            orders=orders,
        )

    def buffer(self, facts: TensorFacts, layer_id: LayerId, role: str, number: int) -> OwnBuffer:
        return OwnBuffer(
            layer_id=layer_id,
            role=role,
            address=facts.address + number * self.kv_stride,
            slot_stride=self.slot_stride,
            num_slots=self.num_slots,
            heads=self.heads,
            tokens=self.tokens,
            row_bytes=self.row_bytes,
            orders=self.orders,
            facts=facts,
        )


def _cut_tokens(lengths: dict[str, int], strides: dict[str, int], tokens_per_block: int, thing: str) -> None:
    """Make slots of consecutive tokens."""
    slots, rest = divmod(lengths[_TOKENS], tokens_per_block)
    if rest or not slots:
        want = f"a multiple of tokens_per_block={tokens_per_block}"
        cure = "pass whole pages only, or the engine's own page size as tokens_per_block"
        raise SpecError(explain(thing, "length of axis tokens", lengths[_TOKENS], want, cure))
    lengths[_SLOTS], strides[_SLOTS] = slots, strides[_TOKENS] * tokens_per_block
    lengths[_TOKENS] = tokens_per_block


def _check_lengths(lengths: Mapping[str, int], tokens_per_block: int, thing: str) -> None:
    if lengths[_TOKENS] != tokens_per_block:
        want = f"tokens_per_block={tokens_per_block}"
        cure = "pass the engine's page size, or leave the slots axis away where pages are consecutive tokens"
        raise SpecError(explain(thing, "length of axis tokens", lengths[_TOKENS], want, cure))
    if lengths[_KV] > len(_DATA):
        want = "1 (key) or 2 (key and value)"
        raise SpecError(explain(thing, "length of axis kv", lengths[_KV], want, "name the axes in their order"))


def _orders(lengths: Mapping[str, int], strides: Mapping[str, int], item_bytes: int, thing: str) -> frozenset[KVLayout]:
    """Return the orders in which the rows of a page follow one another without a gap."""
    heads, tokens = lengths[_HEADS], lengths[_TOKENS]
    if lengths[_DIM] > 1 and strides[_DIM] != item_bytes:
        cure = "rows must be contiguous: store dim last, or copy the tensor into that order"
        raise SpecError(explain(thing, "stride of axis dim in bytes", strides[_DIM], f"{item_bytes}", cure))
    row = lengths[_DIM] * item_bytes
    by_head, by_token = strides[_HEADS], strides[_TOKENS]
    orders: set[KVLayout] = set()
    if (heads == 1 or by_head == row) and (tokens == 1 or by_token == row * heads):
        orders.add(KVLayout.NHD)
    if (tokens == 1 or by_token == row) and (heads == 1 or by_head == row * tokens):
        orders.add(KVLayout.HND)
    if not orders:
        want = f"{(row, row * heads)} (heads next to each other) or {(row * tokens, row)} (tokens next to each other)"
        cure = "heads and tokens of a page must lie without gaps; give K and V tensors or pages of their own"
        raise SpecError(explain(thing, "strides of axes (heads, tokens) in bytes", (by_head, by_token), want, cure))
    return frozenset(orders)


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
        if role in _DATA:
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
