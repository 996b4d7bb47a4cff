"""Where every byte of a page is: layer groups, their pools and buffers.

::

    address(layer, role, slot) = pool base + slot * slot_bytes + layer_offset * buffer_bytes

Layers with the same window, sinks, policy (and owner) form a group and share one page list per request; what a slot of
each of the group's pools looks like is in `unikv.pool_layout`.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from unikv.errors import InternalError, SpecError, UnknownLayerError, explain
from unikv.ids import GroupId, LayerId
from unikv.layer_spec import KVCacheLayerSpec, KVLayout, LayerOwner, ReusePolicy, check_layer_specs
from unikv.pool_layout import (
    SCALE_OF,
    BufferLayout,
    PoolLayout,
    absent_role,
    arrange_pools,
    bytes_per_token,
    role_bytes_per_token,
)
from unikv.ranges import ceil_div, effective_window

__all__ = [
    "BufferLayout",
    "CacheLayout",
    "GroupLayout",
    "PoolLayout",
    "build_layout",
    "bytes_per_token",
    "check_scale_pools",
    "role_bytes_per_token",
]


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
            raise absent_role(self.spec(layer_id), role)
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
    lookahead_tokens: int = 0,
) -> CacheLayout:
    """Arrange `specs` into groups, pools and buffers.

    Args:
        specs: the layers of this rank, targets before drafts.
        tokens_per_block: token positions of one page.
        max_seq_len: longest sequence in tokens; windows that reach it count as full attention. None: unknown.
        kv_layout: order of heads and tokens inside a buffer.
        isolate_draft: give draft layers groups of their own even where a target group has the same key.
        lookahead_tokens: tokens a reader may step back after a prefix match; every window keeps as many more.

    Returns:
        The layout. Groups are numbered in order of first appearance, pool groups likewise.

    Raises:
        SpecError: an argument is out of range, a layer id appears twice, or a draft layer is numbered before a target.
    """
    ordered = check_layer_specs(specs)
    _check_positive("tokens_per_block", tokens_per_block)
    if max_seq_len is not None:
        _check_positive("max_seq_len", max_seq_len)
    layout = CacheLayout(
        tokens_per_block=tokens_per_block,
        max_seq_len=max_seq_len,
        kv_layout=KVLayout(kv_layout),
        specs=ordered,
        groups=_make_groups(
            _members(ordered, tokens_per_block, max_seq_len, isolate_draft, lookahead_tokens), tokens_per_block
        ),
    )
    check_scale_pools(layout)
    return layout


def _members(
    specs: Sequence[KVCacheLayerSpec],
    tokens_per_block: int,
    max_seq_len: int | None,
    isolate_draft: bool,
    lookahead_tokens: int,
) -> dict[_GroupKey, list[KVCacheLayerSpec]]:
    members: dict[_GroupKey, list[KVCacheLayerSpec]] = {}
    for spec in specs:
        key = _GroupKey(
            effective_window(spec.window, max_seq_len, lookahead_tokens=lookahead_tokens),
            ceil_div(spec.sink_tokens, tokens_per_block),
            spec.reuse_policy,
            spec.owner if isolate_draft else None,
        )
        members.setdefault(key, []).append(spec)
    return members


def _make_groups(members: dict[_GroupKey, list[KVCacheLayerSpec]], tokens_per_block: int) -> tuple[GroupLayout, ...]:
    allocators: dict[object, int] = {}
    groups: list[GroupLayout] = []
    for number, (key, layers) in enumerate(members.items()):
        pools = arrange_pools(GroupId(number), layers, tokens_per_block)
        owner = LayerOwner.DRAFT if all(layer.is_draft for layer in layers) else LayerOwner.TARGET
        # Same slot sizes, policy and owner: the pages are interchangeable, so one allocator serves them all.
        shape = (tuple(pool.slot_bytes for pool in pools), key.policy, owner)
        groups.append(
            GroupLayout(
                group_id=GroupId(number),
                pool_group=allocators.setdefault(shape, len(allocators)),
                owner=owner,
                window=key.window,
                sink_blocks=key.sink_blocks,
                reuse_policy=key.policy,
                layer_ids=tuple(layer.layer_id for layer in layers),
                pools=pools,
            )
        )
    return tuple(groups)


def _check_positive(name: str, value: int) -> None:
    if not isinstance(value, int) or value < 1:
        raise SpecError(explain("cache", name, value, "an integer >= 1 token", f"set {name} to a positive number"))


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
