"""From a side's settings to its ranks: positions, layer specs, layouts and cards."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from transfer.cards import build_card
from transfer.hello import HostIdentity, MemoryExport, ParallelPosition, RankCard, Side, SpeculativeCard
from unikv.budget import PoolBudget
from unikv.errors import ConfigError, SpecError, explain
from unikv.ids import GroupId, LayerId
from unikv.layer_spec import KVCacheLayerSpec, LayerOwner
from unikv.layout import CacheLayout, build_layout
from unikv.ranges import head_shard, stage_layers
from unikv.speculation import SpeculationShape
from workers.config import LayerRunConfig, PairConfig, SideConfig


def positions(side: SideConfig) -> tuple[ParallelPosition, ...]:
    """Return the place of every rank, in rank order."""
    parallel = side.parallel
    return tuple(
        ParallelPosition(
            tp=parallel.tp,
            tp_rank=tp_rank,
            pp=parallel.pp,
            pp_rank=pp_rank,
            cp=parallel.cp,
            cp_rank=cp_rank,
            attention_dp=parallel.attention_dp,
        )
        for pp_rank in range(parallel.pp)
        for tp_rank in range(parallel.tp)
        for cp_rank in range(parallel.cp)
    )


def rank_specs(side: SideConfig, position: ParallelPosition) -> tuple[KVCacheLayerSpec, ...]:
    """Return the layers of one rank: its stage's share of the target, and on the last stage the draft layers.

    Raises:
        ConfigError: heads and tp do not divide one another, or a stage is left without layers.
    """
    runs = [run for run in side.layers for _ in range(run.count)]
    targets = sum(run.owner is LayerOwner.TARGET for run in runs)
    mine = stage_layers(targets, position.pp, position.pp_rank)
    last = position.pp_rank == position.pp - 1
    specs = tuple(
        _spec(LayerId(layer), run, position)
        for layer, run in enumerate(runs)
        if (layer in mine if layer < targets else last)
    )
    if not specs:
        want = f"at least {position.pp}, one for every stage"
        raise ConfigError(explain("layers", "target layers", targets, want, "lower parallel.pp or add layers"))
    return specs


def rank_layout(side: SideConfig, position: ParallelPosition) -> CacheLayout:
    """Return the arrangement of one rank's cache."""
    return build_layout(
        rank_specs(side, position),
        tokens_per_block=side.tokens_per_block,
        max_seq_len=side.max_seq_len,
        kv_layout=side.kv_layout,
    )


def speculation_shape(side: SideConfig) -> SpeculationShape | None:
    """Return what the speculative mode reserves."""
    mode = side.speculative
    if mode is None:
        return None
    return SpeculationShape(
        max_draft_tokens=mode.max_draft_tokens,
        block_width=mode.block_width,
        num_extra_kv_tokens=mode.num_extra_kv_tokens,
    )


def pool_budget(side: SideConfig) -> PoolBudget:
    """Return the size of the pools."""
    return PoolBudget(pages=side.pool.pages, bytes=side.pool.bytes)


def rank_card(  # noqa: PLR0913 - a card states many facts, and each has one source at the caller
    pair: PairConfig,
    side: Side,
    position: ParallelPosition,
    *,
    layout: CacheLayout,
    num_slots: Mapping[GroupId, int] | int,
    incarnation: str = "dry-run",
    instance: str = "",
    address: str = "",
    device: str = "cpu",
    exports: Sequence[MemoryExport | None] | None = None,
    host: HostIdentity | None = None,
) -> RankCard:
    """Return what one rank tells its peers; without address and host it serves a dry run."""
    config = pair.side(side)
    counts = {owner: sum(run.count for run in config.layers if run.owner is owner) for owner in LayerOwner}
    return build_card(
        layout,
        side=side,
        position=position,
        num_slots=num_slots,
        incarnation=incarnation,
        instance=instance or f"{side}-0",
        address=address,
        device=device,
        speculative=_speculative_card(config),
        draft_kv=pair.transfer.draft_kv,
        path=pair.transfer.path,
        checksum=pair.transfer.checksum,
        num_target_layers=counts[LayerOwner.TARGET],
        num_draft_layers=counts[LayerOwner.DRAFT],
        exports=exports,
        host=host,
    )


def dry_cards(pair: PairConfig, side: Side) -> tuple[RankCard, ...]:
    """Return the cards of all ranks of a side without any memory behind them."""
    config = pair.side(side)
    cards = []
    for position in positions(config):
        layout = rank_layout(config, position)
        slots = pool_budget(config).slots(layout)
        by_group = {group.group_id: slots[group.pool_group] for group in layout.groups}
        cards.append(
            rank_card(
                pair, side, position, layout=layout, num_slots=by_group, device=config.device_of(position.rank, 1)
            )
        )
    return tuple(cards)


def _speculative_card(config: SideConfig) -> SpeculativeCard | None:
    mode = config.speculative
    return None if mode is None else SpeculativeCard(**mode.model_dump())


def _spec(layer: LayerId, run: LayerRunConfig, position: ParallelPosition) -> KVCacheLayerSpec:
    tp, tp_rank = (1, 0) if position.attention_dp else (position.tp, position.tp_rank)
    try:
        shard = head_shard(run.kv_heads, tp, tp_rank, thing=f"layers: {run.owner} layer {layer}")
        return KVCacheLayerSpec(
            layer_id=layer,
            owner=run.owner,
            num_kv_heads=len(shard.heads),
            total_num_kv_heads=run.kv_heads,
            head_dim=run.head_dim,
            kv_factor=run.kv_factor,
            dtype=run.dtype,
            window=run.window,
            sink_tokens=run.sink_tokens,
            reuse_policy=run.reuse,
            extra_buffers=run.extra_buffers,
        )
    except SpecError as error:
        raise ConfigError(str(error)) from None
