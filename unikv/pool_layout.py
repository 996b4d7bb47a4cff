"""Pools: equal-sized buffers side by side in every slot, and how many bytes each of them takes.

One slot of one pool with two K/V layers (``scale`` 4, ``buffer_bytes`` b)::

    slot s      +0        +b        +2b       +3b        +4b = slot_bytes
                | L0.key  | L0.value| L1.key  | L1.value |

A buffer takes ``bytes per token of its role * tokens_per_block``. Buffers of one layer group with equal size and equal
coalescing class share a pool, in the order of the layers. The class keeps NVFP4 data, NVFP4 scales and everything else
apart, so that data pool and scale pool of a layer always have the same ``scale`` and one page table serves both.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from unikv.errors import SpecError, explain
from unikv.ids import GroupId, LayerId
from unikv.layer_spec import (
    KEY,
    KEY_BLOCK_SCALE,
    NVFP4_SCALE_ELEMENTS,
    VALUE,
    VALUE_BLOCK_SCALE,
    KVCacheLayerSpec,
    KVDtype,
)
from unikv.ranges import ceil_div

SCALE_OF: Final = {KEY: KEY_BLOCK_SCALE, VALUE: VALUE_BLOCK_SCALE}
"""The block-scale role that belongs to each data role of an NVFP4 layer."""


def role_bytes_per_token(spec: KVCacheLayerSpec, role: str) -> int:
    """Return the bytes `role` of this layer takes for one token on this rank.

    Data takes ``ceil(heads * head_dim * bits / 8)``, block scales one byte per 16 elements, extras what they declare.

    Raises:
        SpecError: the layer does not store `role`.
    """
    if role not in spec.roles:
        raise absent_role(spec, role)
    if role in spec.extra_buffers:
        return spec.extra_buffers[role]
    elements = spec.num_kv_heads * spec.head_dim
    if role in (KEY_BLOCK_SCALE, VALUE_BLOCK_SCALE):
        return elements // NVFP4_SCALE_ELEMENTS
    return ceil_div(elements * spec.dtype.bits, 8)


def bytes_per_token(spec: KVCacheLayerSpec) -> int:
    """Return the bytes all roles of this layer take for one token on this rank."""
    return sum(role_bytes_per_token(spec, role) for role in spec.roles)


def absent_role(spec: KVCacheLayerSpec, role: str) -> SpecError:
    """Return the error for a role the layer does not store."""
    want = f"one of {', '.join(spec.roles)} (kv_factor {spec.kv_factor}, dtype {spec.dtype})"
    return SpecError(explain(f"layer {spec.layer_id}", "role", role, want, "ask for a role the layer stores"))


@dataclass(frozen=True, slots=True, kw_only=True)
class BufferLayout:
    """One (layer, role) buffer inside the slots of one pool.

    Attributes:
        group_id, pool_index: the pool that holds it.
        layer_offset: its ordinal among the pool's buffers.
        offset_bytes: first byte inside a slot, ``layer_offset * size_bytes``.
        size_bytes: bytes of one page of this buffer.
    """

    layer_id: LayerId
    role: str
    group_id: GroupId
    pool_index: int
    layer_offset: int
    offset_bytes: int
    size_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolLayout:
    """One pool of a layer group: equal-sized buffers side by side in every slot.

    Attributes:
        index: number of the pool inside its group; pools are sorted by slot size, largest first.
        buffer_bytes: bytes of one buffer.
        buffers: in the order of their offsets.
    """

    group_id: GroupId
    index: int
    buffer_bytes: int
    buffers: tuple[BufferLayout, ...]

    @property
    def scale(self) -> int:
        """Buffers ("kernel pages") per slot."""
        return len(self.buffers)

    @property
    def slot_bytes(self) -> int:
        """Bytes of one slot, also the stride between slots."""
        return self.scale * self.buffer_bytes


def _coalescing_class(spec: KVCacheLayerSpec, role: str) -> int:
    """Return 0 for ordinary buffers, 1 for NVFP4 data and 2 for NVFP4 scales: equal sizes alone must not mix them."""
    if spec.dtype is not KVDtype.NVFP4 or role in spec.extra_buffers:
        return 0
    return 1 if role in SCALE_OF else 2


def arrange_pools(
    group_id: GroupId, layers: Sequence[KVCacheLayerSpec], tokens_per_block: int
) -> tuple[PoolLayout, ...]:
    """Bucket the buffers of one group by (size, coalescing class); largest slots first, ties in insertion order."""
    buckets: dict[tuple[int, int], list[tuple[LayerId, str]]] = {}
    for layer in layers:
        for role in layer.roles:
            size_bytes = role_bytes_per_token(layer, role) * tokens_per_block
            buckets.setdefault((size_bytes, _coalescing_class(layer, role)), []).append((layer.layer_id, role))
    ranked = sorted(buckets.items(), key=lambda item: -item[0][0] * len(item[1]))
    return tuple(
        _make_pool(group_id, index, size_bytes, names) for index, ((size_bytes, _), names) in enumerate(ranked)
    )


def _make_pool(group_id: GroupId, index: int, size_bytes: int, names: Sequence[tuple[LayerId, str]]) -> PoolLayout:
    buffers = tuple(
        BufferLayout(
            layer_id=layer_id,
            role=role,
            group_id=group_id,
            pool_index=index,
            layer_offset=layer_offset,
            offset_bytes=layer_offset * size_bytes,
            size_bytes=size_bytes,
        )
        for layer_offset, (layer_id, role) in enumerate(names)
    )
    return PoolLayout(group_id=group_id, index=index, buffer_bytes=size_bytes, buffers=buffers)
