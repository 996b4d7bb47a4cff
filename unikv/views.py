"""Views: buffers of one pool that can be head-sliced alike, described without memory.

A view is what two ranks compare and cut: it names global heads, so that any tensor-parallel split can be intersected
with any other, and it never mixes target with draft or K/V with scales.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from unikv.errors import InternalError, SpecError, explain
from unikv.ids import GroupId, LayerId
from unikv.layer_spec import (
    KEY,
    KEY_BLOCK_SCALE,
    NVFP4_SCALE_ELEMENTS,
    VALUE,
    VALUE_BLOCK_SCALE,
    KVCacheLayerSpec,
    KVDtype,
    KVLayout,
    LayerOwner,
)
from unikv.layout import BufferLayout, CacheLayout, PoolLayout
from unikv.ranges import HeadShard, Span, head_shard

EXTRA_DTYPE: Final = "bytes"
"""`KVView.dtype` of extras: rows are opaque."""

_ROLE_CLASS: Final = {KEY: "data", VALUE: "data", KEY_BLOCK_SCALE: "scales", VALUE_BLOCK_SCALE: "scales"}


@dataclass(frozen=True, slots=True, kw_only=True)
class ViewEntry:
    """One buffer of a view: `offset_bytes` is its first byte inside a slot of the view's pool."""

    layer_id: LayerId
    role: str
    offset_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class KVView:
    """Buffers of one pool with equal geometry.

    One buffer is ``[heads, tokens_per_block, row_bytes]`` bytes (HND) or ``[tokens_per_block, heads, row_bytes]``
    (NHD); a row is one head of one token.

    Attributes:
        heads: global half-open head range this rank holds.
        replica, replicas: which copy of these heads it is, and how many ranks hold them.
        total_heads: heads of the whole model in these layers (1 for replicated extras).
        head_dim: elements per head as the spec declares it (0 for extras, whose rows are opaque bytes).
        dtype: element type of the rows (scale views: float8_e4m3fn; extras: "bytes").
        row_bytes: bytes of one head of one token.
    """

    group_id: GroupId
    pool_index: int
    owner: LayerOwner
    roles: tuple[str, ...]
    heads: Span
    replica: int
    replicas: int
    total_heads: int
    head_dim: int
    dtype: str
    kv_layout: KVLayout
    tokens_per_block: int
    row_bytes: int
    entries: tuple[ViewEntry, ...]

    @property
    def buffer_bytes(self) -> int:
        """Bytes of one page of one buffer."""
        return len(self.heads) * self.tokens_per_block * self.row_bytes


@dataclass(frozen=True, slots=True)
class _Kind:
    """Everything the buffers of one view have in common. Extras declare no heads: 0 local, 1 in all."""

    owner: LayerOwner
    role_class: str
    local_heads: int
    total_heads: int
    head_dim: int
    dtype: str
    kv_factor: int
    row_bytes: int


def describe_views(layout: CacheLayout, *, tp: int, tp_rank: int) -> tuple[KVView, ...]:
    """Return the views of `layout` on tensor-parallel rank `tp_rank` of `tp`.

    Target and draft never share a view, K/V and block scales neither, and every extra role has views of its own. Each
    buffer of the layout is an entry of exactly one view. With attention data parallelism pass ``tp=1, tp_rank=0``.

    Returns:
        Views ordered by (group, pool, lowest offset), entries by offset: the same specs always give the same tuple.

    Raises:
        SpecError: `tp_rank` is not in ``[0, tp)``, heads and tp do not divide one another, or a spec's local head
            count is not what the split of its total gives this rank; the text names the layer.
    """
    if not 0 <= tp_rank < tp:
        raise SpecError(explain("views", "tp_rank", tp_rank, f"in [0, tp={tp})", "pass the rank inside its instance"))
    views: list[KVView] = []
    for group in layout.groups:
        for pool in group.pools:
            views.extend(_views_of_pool(layout, pool, tp, tp_rank))
    return tuple(views)


def _views_of_pool(layout: CacheLayout, pool: PoolLayout, tp: int, tp_rank: int) -> list[KVView]:
    # Buffers come in order of their offsets, so the buckets do too (a dict keeps the order of first insertion).
    buckets: dict[_Kind, list[BufferLayout]] = {}
    for buffer in pool.buffers:
        kind = _kind_of(layout.spec(buffer.layer_id), buffer)
        buckets.setdefault(kind, []).append(buffer)
    return [_make_view(layout, kind, buffers, _shard(kind, buffers, tp, tp_rank)) for kind, buffers in buckets.items()]


def _kind_of(spec: KVCacheLayerSpec, buffer: BufferLayout) -> _Kind:
    role_class = _ROLE_CLASS.get(buffer.role)
    if role_class is None:
        row_bytes = spec.extra_buffers[buffer.role]
        return _Kind(spec.owner, f"extra {buffer.role}", 0, 1, 0, EXTRA_DTYPE, 1, row_bytes)
    if role_class == "scales":
        dtype, row_bytes = KVDtype.FLOAT8_E4M3FN.value, spec.head_dim // NVFP4_SCALE_ELEMENTS
    else:
        dtype, row_bytes = spec.dtype.value, spec.head_dim * spec.dtype.bits // 8
    heads = (spec.num_kv_heads, spec.total_heads)
    return _Kind(spec.owner, role_class, *heads, spec.head_dim, dtype, spec.kv_factor, row_bytes)


def _shard(kind: _Kind, buffers: Sequence[BufferLayout], tp: int, tp_rank: int) -> HeadShard:
    """Return the heads this rank holds in a view; extras are whole on every rank."""
    if kind.local_heads == 0:
        return HeadShard(Span(0, 1), tp_rank, tp)
    layer = f"layer {buffers[0].layer_id}"
    shard = head_shard(kind.total_heads, tp, tp_rank, thing=layer)
    if len(shard.heads) != kind.local_heads:
        want = f"{len(shard.heads)}, the share of total_num_kv_heads={kind.total_heads} at tp={tp}"
        cure = "give the rank-local head count, and the model's in total_num_kv_heads"
        raise SpecError(explain(layer, "num_kv_heads", kind.local_heads, want, cure))
    return shard


def _make_view(layout: CacheLayout, kind: _Kind, buffers: Sequence[BufferLayout], shard: HeadShard) -> KVView:
    first = buffers[0]
    view = KVView(
        group_id=first.group_id,
        pool_index=first.pool_index,
        owner=kind.owner,
        roles=tuple(dict.fromkeys(buffer.role for buffer in buffers)),
        heads=shard.heads,
        replica=shard.replica,
        replicas=shard.replicas,
        total_heads=kind.total_heads,
        head_dim=kind.head_dim,
        dtype=kind.dtype,
        kv_layout=layout.kv_layout,
        tokens_per_block=layout.tokens_per_block,
        row_bytes=kind.row_bytes,
        entries=tuple(
            ViewEntry(layer_id=buffer.layer_id, role=buffer.role, offset_bytes=buffer.offset_bytes)
            for buffer in buffers
        ),
    )
    if view.buffer_bytes != first.size_bytes:
        field, want = "buffer_bytes", f"{first.size_bytes}, the buffer's size in the layout"
        raise InternalError(explain(f"view of layer {first.layer_id}", field, view.buffer_bytes, want, "report this"))
    return view
