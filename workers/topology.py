"""From one side of a pair file to its ranks: who is where, which layers and heads each holds, and its card.

::

    rank = (pp_rank * tp + tp_rank) * cp + cp_rank

    target layers   0 1 2 | 3 4      pp = 2: as even as possible, earlier stages take the remainder
    draft layers          | 5 6      on the last stage
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from importlib.util import find_spec
from itertools import product
from typing import Final

from transfer.cards import build_card
from transfer.hello import HostIdentity, MemoryExport, ParallelPosition, PathKind, RankCard, Side, SpeculativeCard
from transfer.nixl_agent import require_nixl
from unikv.budget import PoolBudget
from unikv.errors import ConfigError, SpecError, explain
from unikv.host_tier_options import HostTierOptions, check_codec
from unikv.ids import GroupId, LayerId
from unikv.layer_spec import KVCacheLayerSpec, LayerOwner
from unikv.layout import CacheLayout, build_layout
from unikv.ranges import Span, head_shard, stage_layers
from unikv.speculation import SpeculationShape
from workers.config import LayerEntry, PairConfig, SideConfig

DRY: Final = "dry-run"
"""Incarnation of cards that no process stands behind."""


def positions(side: SideConfig) -> tuple[ParallelPosition, ...]:
    """Return every rank's place, in the order of ranks."""
    shape = side.parallel
    return tuple(
        ParallelPosition(
            tp=shape.tp,
            tp_rank=tp_rank,
            pp=shape.pp,
            pp_rank=pp_rank,
            cp=shape.cp,
            cp_rank=cp_rank,
            attention_dp=shape.attention_dp,
        )
        for pp_rank, tp_rank, cp_rank in product(range(shape.pp), range(shape.tp), range(shape.cp))
    )


def whole_model(side: SideConfig) -> ParallelPosition:
    """Return the place of an imagined rank that holds every layer with all heads."""
    return ParallelPosition(attention_dp=side.parallel.attention_dp)


def rank_specs(side: SideConfig, position: ParallelPosition) -> tuple[KVCacheLayerSpec, ...]:
    """Return the layers of the rank at `position` with the heads it holds; layer ids are global.

    Raises:
        ConfigError: the side lists no layers (its model decides), heads and tp do not divide one another, a pipeline
            stage would have no layer, or the host tier's codec cannot store these layers.
    """
    numbered = tuple(_numbered(side))
    held = _stage(side, position)
    layers = [
        (number, entry, layer_id)
        for number, entry, layer_id in numbered
        if (position.pp_rank == position.pp - 1 if entry.owner is LayerOwner.DRAFT else layer_id in held)
    ]
    specs = tuple(
        entry.spec(layer_id, heads=_local_heads(side, number, entry, position)) for number, entry, layer_id in layers
    )
    tier = host_tier_options(side)
    if tier is not None:
        try:
            check_codec(tier.codec, specs)
        except SpecError as error:
            raise ConfigError(f"{side.source}: {side.side}.host_tier.codec: {error}") from None
    return specs


def rank_layout(side: SideConfig, position: ParallelPosition) -> CacheLayout:
    """Return the layout of the rank at `position`.

    Raises:
        ConfigError: as `rank_specs`.
    """
    return build_layout(
        rank_specs(side, position),
        tokens_per_block=side.tokens_per_block,
        max_seq_len=side.max_seq_len,
        kv_layout=side.kv_layout,
    )


def speculation_shape(side: SideConfig) -> SpeculationShape | None:
    """Return what the speculative mode reserves, None without one."""
    config = side.speculative
    if config is None:
        return None
    return SpeculationShape(
        max_draft_tokens=config.max_draft_tokens,
        block_width=config.block_width,
        num_extra_kv_tokens=config.num_extra_kv_tokens,
    )


def pool_budget(side: SideConfig) -> PoolBudget:
    """Return the size of one rank's pools."""
    return PoolBudget(pages=side.pool.pages, bytes=side.pool.bytes)


def check_carrier(pair: PairConfig) -> None:
    """Refuse a path whose carrier is not installed here.

    Raises:
        ConfigError: with the cure.
    """
    if pair.transfer.path is PathKind.NIXL:
        require_nixl()


def check_device(side: SideConfig) -> None:
    """Check that this machine has a side's device, and the libraries to use it. Loads torch for CUDA alone.

    Raises:
        ConfigError: it has not.
    """
    if side.device == "cpu":
        return
    from unikv.buffers import device_count  # noqa: PLC0415 - loads torch

    thing, found = f"{side.side} worker", device_count()
    if not found:
        cure = "set device: cpu, or run where torch finds a GPU"
        raise ConfigError(explain(thing, "device", side.device, "a CUDA device, and torch finds none", cure))
    if side.devices is not None and max(side.devices) >= found:
        want = f"numbers in [0, {found})"
        raise ConfigError(explain(thing, "devices", list(side.devices), want, "list devices that torch finds"))
    if find_spec("cupy") is None:
        cure = "install the extra for this machine's driver: unikv[cuda12] or unikv[cuda13]"
        raise ConfigError(explain(thing, "device", side.device, "CuPy, which runs the copies", cure))


def host_tier_options(side: SideConfig) -> HostTierOptions | None:
    """Return the host tier of a rank, None without one."""
    tier = side.host_tier
    codec = "identity" if tier.codec == "none" else tier.codec
    return HostTierOptions(bytes=tier.bytes, codec=codec) if tier.bytes else None


def pool_slots(side: SideConfig, layout: CacheLayout) -> dict[GroupId, int]:
    """Return the slots of each layer group's pools, the null slot included, without allocating anything.

    Raises:
        ConfigError: the pool is too small for one page of every group.
    """
    slots = pool_group_slots(side, layout)
    return {group.group_id: slots[group.pool_group] for group in layout.groups}


def pool_group_slots(side: SideConfig, layout: CacheLayout) -> tuple[int, ...]:
    """Return the slots of each pool group; as `pool_slots`."""
    try:
        return pool_budget(side).slots(layout)
    except SpecError as error:
        raise ConfigError(f"{side.source}: {side.side}.pool: {error}") from None


def rank_card(  # noqa: PLR0913 - a card states many facts, and each has one source at the caller
    pair: PairConfig,
    side: Side,
    position: ParallelPosition,
    *,
    layout: CacheLayout | None = None,
    num_slots: Mapping[GroupId, int] | int | None = None,
    incarnation: str = DRY,
    instance: str = "",
    address: str = "",
    device: str = "",
    exports: Sequence[MemoryExport | None] | None = None,
    host: HostIdentity | None = None,
    reach: Sequence[str] = (),
) -> RankCard:
    """Return the card of one rank; without the keyword arguments that of a dry run.

    Args:
        pair, side, position: which rank of what.
        layout: the rank's layout, where it is there already.
        num_slots: slots per layer group that were really allocated.
        incarnation, instance, address, device, exports, host, reach: as in `transfer.cards.build_card`.

    Raises:
        ConfigError: as `rank_specs` and `pool_slots`.
    """
    config = pair.side(side)
    layout = layout or rank_layout(config, position)
    return build_card(
        layout,
        side=side,
        position=position,
        num_slots=num_slots or pool_slots(config, layout),
        incarnation=incarnation,
        instance=instance or f"{side}-0",
        address=address,
        device=device or config.device,
        speculative=_speculative_card(config),
        draft_kv=pair.transfer.draft_kv,
        path=pair.transfer.path,
        num_target_layers=config.num_target_layers,
        num_draft_layers=config.num_draft_layers,
        exports=exports,
        host=host,
        checksum=pair.transfer.checksum,
        layer_bands=max(1, pair.transfer.layer_bands),
        reach=reach,
    )


def dry_cards(pair: PairConfig, side: Side) -> tuple[RankCard, ...]:
    """Return the cards of all ranks of a side as a run would have them, without memory or address.

    Raises:
        ConfigError: as `rank_card`.
    """
    return tuple(rank_card(pair, side, position) for position in positions(pair.side(side)))


def _speculative_card(side: SideConfig) -> SpeculativeCard | None:
    config = side.speculative
    if config is None:
        return None
    return SpeculativeCard(
        method=config.method,
        max_draft_tokens=config.max_draft_tokens,
        block_width=config.block_width,
        num_extra_kv_tokens=config.num_extra_kv_tokens,
    )


def _numbered(side: SideConfig) -> Iterator[tuple[int, LayerEntry, LayerId]]:
    """Yield (entry number, entry, global layer id) for every layer of the model."""
    if side.layers is None:
        want = "a list of layers: they come from the model only when it is loaded"
        raise ConfigError(explain(side.source, f"{side.side}.layers", "auto", want, "list them under model.layers"))
    layer_id = 0
    for number, entry in enumerate(side.layers):
        for _ in range(entry.count):
            yield number, entry, LayerId(layer_id)
            layer_id += 1


def _stage(side: SideConfig, position: ParallelPosition) -> Span:
    """Return the target layers of the rank's pipeline stage; they are numbered first."""
    layers = side.num_target_layers
    # The last stage may live on draft layers alone.
    most = layers + (1 if side.num_draft_layers else 0)
    if position.pp > most:
        want = f"<= {most}: {layers} target layer(s), and draft layers on the last stage"
        cure = "give every stage a layer"
        raise ConfigError(explain(side.source, f"{side.side}.parallel.pp", position.pp, want, cure))
    return stage_layers(layers, position.pp, position.pp_rank)


def _local_heads(side: SideConfig, number: int, entry: LayerEntry, position: ParallelPosition) -> int:
    if position.attention_dp:
        return entry.kv_heads
    thing = f"{side.source}: {side.side} layers[{number}] ({entry.owner}, tp={position.tp})"
    try:
        return len(head_shard(entry.kv_heads, position.tp, position.tp_rank, thing=thing).heads)
    except SpecError as error:
        raise ConfigError(str(error)) from None
