"""Turn a rank's cache layout into its card: what workers announce, and what tests and dry runs plan with.

Storages are numbered by pool group and, inside it, by pool; groups that share a pool group share its storages.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence

from transfer.card_coverage import check_described
from transfer.hello import (
    DraftKVMode,
    GroupCard,
    HostIdentity,
    MemoryExport,
    ParallelPosition,
    PathKind,
    PoolCard,
    RankCard,
    Side,
    SpeculativeCard,
    StorageCard,
)
from unikv.errors import SpecError, explain
from unikv.ids import GroupId
from unikv.layout import CacheLayout, GroupLayout, PoolLayout
from unikv.views import KVView, describe_views


def build_card(  # noqa: PLR0913 - a card states many facts, and each has one source at the caller
    layout: CacheLayout,
    *,
    side: Side,
    position: ParallelPosition,
    num_slots: Mapping[GroupId, int] | int,
    incarnation: str,
    instance: str,
    address: str = "",
    device: str = "cpu",
    speculative: SpeculativeCard | None = None,
    draft_kv: DraftKVMode = DraftKVMode.AUTO,
    path: PathKind = PathKind.AUTO,
    num_target_layers: int,
    num_draft_layers: int,
    exports: Sequence[MemoryExport | None] | None = None,
    host: HostIdentity | None = None,
    checksum: str = "off",
    layer_bands: int = 1,
    reach: Sequence[str] = (),
    stays_home: Collection[str] = (),
) -> RankCard:
    """Return the card of one rank.

    Args:
        layout: the rank-local arrangement.
        side, position: which half of the pair, and the rank's place in its instance. Under attention data parallelism
            every rank holds all heads, whatever the tensor-parallel size.
        num_slots: slots per pool, the null slot included: one number for all layer groups, or one per group (groups of
            one pool group have the same).
        incarnation, instance, address, device, speculative, draft_kv, path, checksum, host,
            layer_bands, reach: as in `RankCard`.
        num_target_layers, num_draft_layers: of the whole instance, not of this stage.
        exports: how peers map each storage, in the order of the storages; None where none can.
        stays_home: extra roles that never travel; everything else the layers store is on the card.

    Raises:
        SpecError: groups of one pool group with different slot counts, `exports` of another length than storages, a
            buffer that no view describes, or a name in `stays_home` that is no extra role of this rank.
    """
    views = _views(layout, position, stays_home)
    slots = _slots_by_pool_group(layout, num_slots)
    numbers = _number_storages(layout)
    return RankCard(
        incarnation=incarnation,
        instance=instance,
        side=side,
        position=position,
        address=address,
        device=device,
        kv_layout=layout.kv_layout,
        tokens_per_block=layout.tokens_per_block,
        num_target_layers=num_target_layers,
        num_draft_layers=num_draft_layers,
        groups=tuple(_group_card(group) for group in layout.groups),
        storages=_storage_cards(layout, slots, exports),
        pools=tuple(
            PoolCard(
                group_id=group.group_id,
                pool_index=pool.index,
                storage=numbers[group.pool_group, pool.index],
                slot_stride_bytes=pool.slot_bytes,
                num_slots=slots[group.pool_group],
            )
            for group in layout.groups
            for pool in group.pools
        ),
        views=views,
        speculative=speculative,
        draft_kv=draft_kv,
        path=path,
        checksum=checksum,
        layer_bands=layer_bands,
        host=host,
        reach=tuple(reach),
    )


def _views(layout: CacheLayout, position: ParallelPosition, stays_home: Collection[str]) -> tuple[KVView, ...]:
    """Return the views of everything that travels, after making sure that nothing was forgotten."""
    tp, tp_rank = (1, 0) if position.attention_dp else (position.tp, position.tp_rank)
    views = describe_views(layout, tp=tp, tp_rank=tp_rank)
    if stays_home:
        views = tuple(view for view in views if view.roles[0] not in stays_home)  # every extra role has its own views
    allocated = [
        (buffer.layer_id, buffer.role) for group in layout.groups for pool in group.pools for buffer in pool.buffers
    ]
    check_described(allocated, views, stays_home=stays_home)
    return views


def _group_card(group: GroupLayout) -> GroupCard:
    return GroupCard(
        group_id=group.group_id,
        owner=group.owner,
        window=group.window,
        sink_blocks=group.sink_blocks,
        reuse_policy=group.reuse_policy,
    )


def _storage_pools(layout: CacheLayout) -> Iterator[tuple[int, PoolLayout]]:
    """Yield (pool group, pool) once per storage, in the order of the storages."""
    first_group = {group.pool_group: group for group in reversed(layout.groups)}
    for pool_group in sorted(first_group):
        for pool in first_group[pool_group].pools:
            yield pool_group, pool


def _number_storages(layout: CacheLayout) -> dict[tuple[int, int], int]:
    return {(group, pool.index): number for number, (group, pool) in enumerate(_storage_pools(layout))}


def _storage_cards(
    layout: CacheLayout, slots: Mapping[int, int], exports: Sequence[MemoryExport | None] | None
) -> tuple[StorageCard, ...]:
    sizes = [slots[pool_group] * pool.slot_bytes for pool_group, pool in _storage_pools(layout)]
    if exports is not None and len(exports) != len(sizes):
        want = f"{len(sizes)}, one per storage"
        raise SpecError(explain("rank card", "number of exports", len(exports), want, "export every storage or none"))
    maps = [None] * len(sizes) if exports is None else exports
    return tuple(StorageCard(size_bytes=size, export=export) for size, export in zip(sizes, maps, strict=True))


def _slots_by_pool_group(layout: CacheLayout, num_slots: Mapping[GroupId, int] | int) -> dict[int, int]:
    slots: dict[int, int] = {}
    for group in layout.groups:
        count = num_slots if isinstance(num_slots, int) else num_slots[group.group_id]
        known = slots.setdefault(group.pool_group, count)
        if known != count:
            want = f"{known}, as in the other groups of pool group {group.pool_group}"
            cure = "groups that share memory have one slot count"
            raise SpecError(explain(f"group {group.group_id}", "num_slots", count, want, cure))
    return slots
