"""Where every byte of a page is: layer groups, pools, buffers. The only module with byte arithmetic of the cache.

One slot of one pool, a layer group of two K/V layers (``scale`` 4, ``buffer_bytes`` b)::

    slot s      +0        +b        +2b       +3b        +4b = slot_bytes
                | L0.key  | L0.value| L1.key  | L1.value |
    address(layer, role, s) = pool base + s * slot_bytes + layer_offset * b

How the numbers come about: a buffer takes ``bytes per token of its role * tokens_per_block``; buffers of one group with
equal size and equal coalescing class share a pool, in the order of the layers. The class keeps NVFP4 data, NVFP4 scales
and everything else apart, so that the data pool and the scale pool of a layer always have the same ``scale`` and one
page table serves both.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Final

from unikv.errors import InternalError, SpecError, UnknownLayerError, explain
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
    ReusePolicy,
    check_layer_specs,
)
from unikv.ranges import ceil_div, effective_window

SCALE_OF: Final = {KEY: KEY_BLOCK_SCALE, VALUE: VALUE_BLOCK_SCALE}
"""The block-scale role that belongs to each data role of an NVFP4 layer."""


def role_bytes_per_token(spec: KVCacheLayerSpec, role: str) -> int:
    """Return the bytes `role` of this layer takes for one token on this rank.

    Data takes ``ceil(heads * head_dim * bits / 8)``, block scales one byte per 16 elements, extras what they declare.

    Raises:
        SpecError: the layer does not store `role`.
    """
    if role not in spec.roles:
        raise _absent_role(spec, role)
    if role in spec.extra_buffers:
        return spec.extra_buffers[role]
    elements = spec.num_kv_heads * spec.head_dim
    if role in (KEY_BLOCK_SCALE, VALUE_BLOCK_SCALE):
        return elements // NVFP4_SCALE_ELEMENTS
    return ceil_div(elements * spec.dtype.bits, 8)


def bytes_per_token(spec: KVCacheLayerSpec) -> int:
    """Return the bytes all roles of this layer take for one token on this rank."""
    return sum(role_bytes_per_token(spec, role) for role in spec.roles)


def _absent_role(spec: KVCacheLayerSpec, role: str) -> SpecError:
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
    _specs: dict[LayerId, KVCacheLayerSpec] = field(init=False, repr=False, compare=False)
    _buffers: dict[tuple[LayerId, str], BufferLayout] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        pools = [pool for group in self.groups for pool in group.pools]
        buffers = {(buffer.layer_id, buffer.role): buffer for pool in pools for buffer in pool.buffers}
        object.__setattr__(self, "_specs", {spec.layer_id: spec for spec in self.specs})
        object.__setattr__(self, "_buffers", buffers)

    @property
    def num_pool_groups(self) -> int:
        """How many slot allocators the cache needs."""
        return 1 + max(group.pool_group for group in self.groups)

    def spec(self, layer_id: LayerId) -> KVCacheLayerSpec:
        """Return the spec of `layer_id`.

        Raises:
            UnknownLayerError: this rank holds no such layer.
        """
        if layer_id not in self._specs:
            held = ", ".join(str(held_id) for held_id in self._specs)
            want = f"one of the layers of this rank ({held})"
            raise UnknownLayerError(explain("layout", "layer_id", layer_id, want, "ask the rank that holds the layer"))
        return self._specs[layer_id]

    def find_buffer(self, layer_id: LayerId, role: str) -> BufferLayout | None:
        """Return the buffer of (`layer_id`, `role`), or None where the layer stores no such role.

        Raises:
            UnknownLayerError: this rank holds no such layer.
        """
        self.spec(layer_id)
        return self._buffers.get((layer_id, role))

    def buffer(self, layer_id: LayerId, role: str) -> BufferLayout:
        """Return the buffer of (`layer_id`, `role`).

        Raises:
            UnknownLayerError: this rank holds no such layer.
            SpecError: the layer stores no such role (for example ``value`` on a key-only layer).
        """
        found = self.find_buffer(layer_id, role)
        if found is None:
            raise _absent_role(self.spec(layer_id), role)
        return found

    def group(self, group_id: GroupId) -> GroupLayout:
        """Return layer group `group_id`.

        Raises:
            UnknownLayerError: there is no such group.
        """
        if not 0 <= group_id < len(self.groups):
            want = f"in [0, {len(self.groups)})"
            raise UnknownLayerError(explain("layout", "group_id", group_id, want, "use a group of this rank"))
        return self.groups[group_id]

    def group_of_layer(self, layer_id: LayerId) -> GroupLayout:
        """Return the layer group `layer_id` lives in.

        Raises:
            UnknownLayerError: this rank holds no such layer.
        """
        return self.group(self.buffer(layer_id, self.spec(layer_id).roles[0]).group_id)

    def pool_of(self, buffer: BufferLayout) -> PoolLayout:
        """Return the pool that holds `buffer`."""
        return self.groups[buffer.group_id].pools[buffer.pool_index]

    def byte_offset(self, layer_id: LayerId, role: str, slot: int) -> int:
        """Return the first byte of (`layer_id`, `role`) in `slot`, counted from the base of its pool."""
        buffer = self.buffer(layer_id, role)
        return slot * self.pool_of(buffer).slot_bytes + buffer.offset_bytes


@dataclass(frozen=True, slots=True)
class _GroupKey:
    """What layers must have in common to live and die together. `domain` is None where target and draft may mix."""

    window: int | None
    sink_blocks: int
    policy: ReusePolicy
    domain: LayerOwner | None


def build_layout(
    specs: Iterable[KVCacheLayerSpec],
    *,
    tokens_per_block: int,
    max_seq_len: int | None,
    kv_layout: KVLayout = KVLayout.HND,
    isolate_draft: bool = True,
) -> CacheLayout:
    """Arrange `specs` into groups, pools and buffers.

    Args:
        specs: the layers of this rank, targets before drafts.
        tokens_per_block: token positions of one page.
        max_seq_len: longest sequence in tokens; windows that reach it count as full attention. None: unknown.
        kv_layout: order of heads and tokens inside a buffer.
        isolate_draft: give draft layers groups of their own even where a target group has the same key.

    Returns:
        The layout. Groups are numbered in order of first appearance, pool groups likewise.

    Raises:
        SpecError: an argument is out of range, a layer id appears twice, or a draft layer is numbered before a target.
    """
    ordered = check_layer_specs(specs)
    _check_positive("tokens_per_block", tokens_per_block)
    if max_seq_len is not None:
        _check_positive("max_seq_len", max_seq_len)
    members: dict[_GroupKey, list[KVCacheLayerSpec]] = {}
    for spec in ordered:
        key = _GroupKey(
            effective_window(spec.window, max_seq_len),
            ceil_div(spec.sink_tokens, tokens_per_block),
            spec.reuse_policy,
            spec.owner if isolate_draft else None,
        )
        members.setdefault(key, []).append(spec)
    allocators: dict[object, int] = {}
    groups: list[GroupLayout] = []
    for key, layers in members.items():
        pools = _arrange_pools(GroupId(len(groups)), layers, tokens_per_block)
        owner = LayerOwner.DRAFT if all(layer.is_draft for layer in layers) else LayerOwner.TARGET
        # Same slot sizes, policy and owner: the pages are interchangeable, so one allocator serves them all.
        shape = (tuple(pool.slot_bytes for pool in pools), key.policy, owner)
        groups.append(
            GroupLayout(
                group_id=GroupId(len(groups)),
                pool_group=allocators.setdefault(shape, len(allocators)),
                owner=owner,
                window=key.window,
                sink_blocks=key.sink_blocks,
                reuse_policy=key.policy,
                layer_ids=tuple(layer.layer_id for layer in layers),
                pools=pools,
            )
        )
    layout = CacheLayout(
        tokens_per_block=tokens_per_block,
        max_seq_len=max_seq_len,
        kv_layout=KVLayout(kv_layout),
        specs=ordered,
        groups=tuple(groups),
    )
    check_scale_pools(layout)
    return layout


def _check_positive(name: str, value: int) -> None:
    if not isinstance(value, int) or value < 1:
        raise SpecError(explain("cache", name, value, "an integer >= 1 token", f"set {name} to a positive number"))


def _coalescing_class(spec: KVCacheLayerSpec, role: str) -> int:
    """Return 0 for ordinary buffers, 1 for NVFP4 data and 2 for NVFP4 scales: equal sizes alone must not mix them."""
    if spec.dtype is not KVDtype.NVFP4 or role in spec.extra_buffers:
        return 0
    return 1 if role in SCALE_OF else 2


def _arrange_pools(
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


def check_scale_pools(layout: CacheLayout) -> None:
    """Check that one page index reaches data and scales of every NVFP4 layer alike.

    Raises:
        InternalError: a data pool and its scale pool differ in scale or in the layer's offset; names the layer.
    """
    for spec in layout.specs:
        for role, scale_role in SCALE_OF.items():
            data, scales = layout.find_buffer(spec.layer_id, role), layout.find_buffer(spec.layer_id, scale_role)
            if data is None or scales is None:
                continue
            want = (layout.pool_of(data).scale, data.layer_offset)
            got = (layout.pool_of(scales).scale, scales.layer_offset)
            if got != want:
                text = explain(
                    f"layer {spec.layer_id}",
                    f"(scale, layer_offset) of {scale_role}",
                    got,
                    f"{want} as for {role}",
                    "report this layout: one page table could not address both",
                )
                raise InternalError(text)
