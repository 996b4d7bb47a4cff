"""Views of an engine's own pools: which buffers of a pool are cut by heads alike, and which heads they hold."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from transfer.hello import ParallelPosition
from transfer.own_arrange import OwnPool
from transfer.own_cut import OwnBuffer
from transfer.own_layers import ResolvedLayer
from unikv.errors import SpecError, explain
from unikv.ids import GroupId, LayerId
from unikv.layer_spec import KEY, STANDARD_ROLES, VALUE, KVDtype, KVLayout
from unikv.ranges import HeadShard, Span
from unikv.views import EXTRA_DTYPE, KVView, ViewEntry


def own_head_shard(layer: ResolvedLayer, position: ParallelPosition) -> HeadShard:
    """Return the global heads of a layer on this rank, and which copy of them it holds.

    Raises:
        SpecError: heads and tensor parallelism do not divide one another, the range is not one of an even split, or
            the number of the copy is not known or does not exist.
    """
    spec, own = layer.spec, layer.layer
    local, total, first = spec.num_kv_heads, spec.total_heads, own.first_head
    tp = 1 if position.attention_dp else position.tp
    thing = f"layer {spec.layer_id}"
    if first < 0 or first % local or first + local > total:
        want = f"a multiple of the {local} heads of the tensor, and at most {total - local}"
        raise SpecError(explain(thing, "first_head", first, want, "give the global number of the tensor's first head"))
    replicas, rest = divmod(tp * local, total)
    if rest or not replicas:
        want = f"a divisor of {local} heads x tp={tp}"
        cure = "split heads evenly, and give the model's global head count"
        raise SpecError(explain(thing, "total_heads", total, want, cure))
    rank = 0 if position.attention_dp else position.tp_rank
    usual = first // local == rank // replicas
    replica = rank % replicas if own.replica is None and (usual or replicas == 1) else own.replica
    if replica is None or not 0 <= replica < replicas:
        want = f"in [0, {replicas}), the ranks that hold heads [{first}, {first + local})"
        raise SpecError(explain(thing, "replica", replica, want, "number the ranks that hold the same heads"))
    return HeadShard(Span(first, first + local), replica, replicas)


def describe_own_views(
    pools: Mapping[GroupId, Sequence[OwnPool]],
    layers: Mapping[LayerId, ResolvedLayer],
    kv_layout: KVLayout,
    position: ParallelPosition,
) -> tuple[KVView, ...]:
    """Return the views of all pools; buffers are in one view where they are in one pool and agree in geometry.

    Raises:
        SpecError: as `own_head_shard`.
    """
    return tuple(
        view
        for group_id, own in pools.items()
        for index, pool in enumerate(own)
        for view in _views_of(pool, group_id, index, layers, kv_layout, position)
    )


def _views_of(
    pool: OwnPool,
    group_id: GroupId,
    index: int,
    layers: Mapping[LayerId, ResolvedLayer],
    kv_layout: KVLayout,
    position: ParallelPosition,
) -> list[KVView]:
    buckets: dict[tuple[object, ...], list[OwnBuffer]] = {}
    for buffer in pool.buffers:
        kind = _kind(buffer, layers[buffer.layer_id], position)
        buckets.setdefault((_role_class(buffer.role), *kind), []).append(buffer)
    views = []
    for buffers in buckets.values():
        first = buffers[0]
        shard, total_heads, head_dim, dtype, _ = _kind(first, layers[first.layer_id], position)
        views.append(
            KVView(
                group_id=group_id,
                pool_index=index,
                owner=layers[first.layer_id].spec.owner,
                roles=tuple(dict.fromkeys(buffer.role for buffer in buffers)),
                heads=shard.heads,
                replica=shard.replica,
                replicas=shard.replicas,
                total_heads=total_heads,
                head_dim=head_dim,
                dtype=dtype,
                kv_layout=kv_layout,
                tokens_per_block=first.tokens,
                row_bytes=first.row_bytes,
                entries=tuple(
                    ViewEntry(layer_id=b.layer_id, role=b.role, offset_bytes=b.address - pool.address) for b in buffers
                ),
            )
        )
    return views


def _role_class(role: str) -> str:
    """Return what keeps data, scales and every kind of extra in views of their own, as in those of our manager."""
    if role in (KEY, VALUE):
        return "data"
    return "scales" if role in STANDARD_ROLES else f"extra {role}"


def _kind(buffer: OwnBuffer, layer: ResolvedLayer, position: ParallelPosition) -> tuple[HeadShard, int, int, str, int]:
    """Return what buffers of one view have in common: heads, total heads, head_dim, dtype, bytes of a row."""
    spec = layer.spec
    if buffer.role not in STANDARD_ROLES:
        copies = 1 if position.attention_dp else position.tp
        copy = 0 if position.attention_dp else position.tp_rank
        return HeadShard(Span(0, 1), copy, copies), 1, 0, EXTRA_DTYPE, buffer.row_bytes
    dtype = spec.dtype if buffer.role in (KEY, VALUE) else KVDtype.FLOAT8_E4M3FN
    shard = own_head_shard(layer, position)
    return shard, spec.total_heads, spec.head_dim, dtype.value, buffer.row_bytes
