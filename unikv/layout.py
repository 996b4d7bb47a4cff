"""Where every byte of a page is: layer groups, pools, buffers. The only module with byte arithmetic of the cache.

One slot of one pool, a layer group of two K/V layers (``scale`` 4, ``buffer_bytes`` b)::

    slot s      +0        +b        +2b       +3b        +4b = slot_bytes
                | L0.key  | L0.value| L1.key  | L1.value |
    address(layer, role, s) = pool base + s * slot_bytes + layer_offset * b
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from unikv.ids import GroupId, LayerId
from unikv.layer_spec import KVCacheLayerSpec, KVLayout, LayerOwner, ReusePolicy


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


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupLayout:
    """Layers whose pages live and die together: one page list per request covers them all.

    Attributes:
        pool_group: groups with the same number draw their slots from one allocator and share the memory.
        window: normalised sliding window in tokens (None: full attention).
        sink_blocks: blocks at the start that never leave the window.
    """

    group_id: GroupId
    pool_group: int
    owner: LayerOwner
    window: int | None
    sink_blocks: int
    reuse_policy: ReusePolicy
    layer_ids: tuple[LayerId, ...]
    pools: tuple[PoolLayout, ...]

    @property
    def page_bytes(self) -> int:
        """Bytes of one page: one slot in each pool of the group."""
        return sum(pool.slot_bytes for pool in self.pools)


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheLayout:
    """The whole rank-local arrangement. Immutable; holds no memory.

    Attributes:
        specs: the layer specs, in construction order.
        max_seq_len: longest sequence in tokens, or None where unknown (then no window is normalised away).
    """

    tokens_per_block: int
    max_seq_len: int | None
    kv_layout: KVLayout
    specs: tuple[KVCacheLayerSpec, ...]
    groups: tuple[GroupLayout, ...]


def build_layout(
    specs: Iterable[KVCacheLayerSpec],
    *,
    tokens_per_block: int,
    max_seq_len: int | None,
    kv_layout: KVLayout = KVLayout.HND,
    isolate_draft: bool = True,
) -> CacheLayout:
    """Arrange `specs` into groups, pools and buffers."""
    raise NotImplementedError
