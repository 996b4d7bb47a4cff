"""The part of a rank card the gate judges, without what may differ freely from rank to rank.

Heads, replicas, slot counts and addresses are left out: two ranks with equal facts get equal findings, so a pair of
large instances costs one comparison per kind of rank and not one per pair of ranks.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Set
from dataclasses import dataclass

from transfer.hello import DraftKVMode, GroupCard, HostIdentity, PathKind, RankCard, Side, SpeculativeCard
from unikv.ids import GroupId, LayerId
from unikv.layer_spec import STANDARD_ROLES, KVLayout, LayerOwner, ReusePolicy
from unikv.views import KVView


@dataclass(frozen=True, slots=True, kw_only=True)
class RoleFacts:
    """Geometry of one role of one layer; `row_bytes` is one head of one token."""

    role: str
    dtype: str
    head_dim: int
    row_bytes: int
    total_heads: int


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerFacts:
    """One layer a rank holds: its life cycle and its roles.

    Attributes:
        window: effective sliding window in tokens, None for full attention.
        sink_tokens: tokens that never leave the window, already rounded up to whole blocks.
        roles: data before scales before extras.
    """

    layer_id: LayerId
    owner: LayerOwner
    window: int | None
    sink_tokens: int
    reuse_policy: ReusePolicy | None
    roles: tuple[RoleFacts, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class HeaderFacts:
    """What a rank says of itself as a whole.

    Attributes:
        device: kind of device, without its number.
        host: where the rank runs, its process number blanked; None in a dry run.
        exported: whether peers on the same host can map all of its memory.
        memory_devices: devices that hold exported memory; empty for memory of the host.
        reach: devices whose memory the rank's own device can write.
        problems: contradictions inside the card, empty for a sound one.
    """

    side: Side
    protocol_version: int
    tp: int
    cp: int
    attention_dp: bool
    tokens_per_block: int
    kv_layout: KVLayout
    num_target_layers: int
    num_draft_layers: int
    speculative: SpeculativeCard | None
    draft_kv: DraftKVMode
    path: PathKind
    checksum: str
    capabilities: tuple[str, ...]
    device: str
    host: HostIdentity | None
    exported: bool
    memory_devices: tuple[str, ...]
    reach: tuple[str, ...]
    problems: tuple[str, ...]


def header_facts(card: RankCard) -> HeaderFacts:
    """Return the rank-wide facts of `card`."""
    return HeaderFacts(
        side=card.side,
        protocol_version=card.protocol_version,
        tp=card.position.tp,
        cp=card.position.cp,
        attention_dp=card.position.attention_dp,
        tokens_per_block=card.tokens_per_block,
        kv_layout=card.kv_layout,
        num_target_layers=card.num_target_layers,
        num_draft_layers=card.num_draft_layers,
        speculative=card.speculative,
        draft_kv=card.draft_kv,
        path=card.path,
        checksum=card.checksum,
        capabilities=tuple(sorted(card.capabilities)),
        device=card.device.partition(":")[0],
        host=_host(card.host),
        exported=bool(card.storages) and all(storage.export is not None for storage in card.storages),
        memory_devices=tuple(sorted({s.export.device for s in card.storages if s.export and s.export.device})),
        reach=tuple(sorted(card.reach)),
        problems=tuple(_problems(card)),
    )


def layer_facts(card: RankCard) -> tuple[LayerFacts, ...]:
    """Return the facts of every layer `card` holds, ascending; a contradictory card yields its first statement."""
    groups = {group.group_id: group for group in card.groups}
    views: dict[LayerId, KVView] = {}
    roles: dict[LayerId, dict[str, RoleFacts]] = {}
    for view in card.views:
        for entry in view.entries:
            views.setdefault(entry.layer_id, view)
            roles.setdefault(entry.layer_id, {}).setdefault(entry.role, _role_facts(view, entry.role))
    return tuple(_layer_facts(layer, views[layer], groups, roles[layer]) for layer in sorted(views))


def role_order(role: str) -> tuple[int, str]:
    """Return a sort key: standard roles in their own order, then the others by name."""
    return (STANDARD_ROLES.index(role) if role in STANDARD_ROLES else len(STANDARD_ROLES), role)


def _host(host: HostIdentity | None) -> HostIdentity | None:
    if host is None:
        return None
    return HostIdentity(hostname=host.hostname, boot_id=host.boot_id, pid_namespace=host.pid_namespace, pid=0)


def _role_facts(view: KVView, role: str) -> RoleFacts:
    return RoleFacts(
        role=role, dtype=view.dtype, head_dim=view.head_dim, row_bytes=view.row_bytes, total_heads=view.total_heads
    )


def _layer_facts(
    layer_id: LayerId, view: KVView, groups: Mapping[GroupId, GroupCard], roles: dict[str, RoleFacts]
) -> LayerFacts:
    group = groups.get(view.group_id)
    return LayerFacts(
        layer_id=layer_id,
        owner=view.owner,
        window=group.window if group else None,
        sink_tokens=group.sink_blocks * view.tokens_per_block if group else 0,
        reuse_policy=group.reuse_policy if group else None,
        roles=tuple(roles[role] for role in sorted(roles, key=role_order)),
    )


def _problems(card: RankCard) -> Iterator[str]:
    """Yield what a card says twice and differently, or says of something it does not have."""
    if card.tokens_per_block < 1:
        yield f"tokens_per_block is {card.tokens_per_block}"
    groups = {group.group_id: group for group in card.groups}
    pools = {(pool.group_id, pool.pool_index) for pool in card.pools}
    seen: set[tuple[LayerId, str]] = set()
    home: dict[LayerId, GroupId] = {}
    for number, view in enumerate(card.views):
        yield from (f"view {number} {problem}" for problem in _view_problems(card, view, groups, pools))
        for entry in view.entries:
            if (entry.layer_id, entry.role) in seen:
                yield f"view {number} repeats layer {entry.layer_id} {entry.role}"
            seen.add((entry.layer_id, entry.role))
            if home.setdefault(entry.layer_id, view.group_id) != view.group_id:
                yield f"view {number} puts layer {entry.layer_id} into a second group"


def _view_problems(
    card: RankCard, view: KVView, groups: Mapping[GroupId, GroupCard], pools: Set[tuple[GroupId, int]]
) -> Iterator[str]:
    group = groups.get(view.group_id)
    if group is None:
        yield f"names group {view.group_id}, which the card lacks"
    elif group.owner is not view.owner:
        yield f"is of owner {view.owner.value}, its group of owner {group.owner.value}"
    if (view.group_id, view.pool_index) not in pools:
        yield f"names pool {view.pool_index} of group {view.group_id}, which the card lacks"
    if view.tokens_per_block != card.tokens_per_block:
        yield f"has {view.tokens_per_block} tokens a block, the card {card.tokens_per_block}"
    if view.kv_layout is not card.kv_layout:
        yield f"has layout {view.kv_layout.value}, the card {card.kv_layout.value}"
    if view.heads.hi > view.total_heads:
        yield f"holds heads up to {view.heads.hi} of {view.total_heads}"
