"""What can be said about a pair without running it: the results of `unikv layout`, `size`, `check`, `plan`, `pages`.

Each function returns the command's JSON object. No memory is allocated, no peer is asked, no GPU is needed.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from hashlib import blake2b
from typing import Any, Final

from transfer.gate import DraftKV, GateReport, check_instances, require_compatible
from transfer.hello import ParallelPosition, RankCard, Side
from transfer.pages import live_ordinals
from transfer.plan import CopyProgram, compile_program
from unikv.errors import ConfigError, explain
from unikv.layer_spec import ReusePolicy
from unikv.layout import CacheLayout, GroupLayout, PoolLayout, bytes_per_token
from unikv.ranges import ceil_div, head_shard, max_live_blocks
from unikv.sizing import CacheCost
from unikv.speculation import NO_SPECULATION
from workers.config import PairConfig, SideConfig
from workers.config_load import pair_cases
from workers.topology import dry_cards, pool_slots, positions, rank_layout, speculation_shape, whole_model

Result = dict[str, Any]
DIGEST_BYTES: Final = 16


def position_of(config: SideConfig, rank: int) -> ParallelPosition:
    """Return the place of `rank`.

    Raises:
        ConfigError: the side has no such rank.
    """
    everyone = positions(config)
    if not 0 <= rank < len(everyone):
        want = f"in [0, {len(everyone)}), the ranks of {config.side}"
        raise ConfigError(explain(config.source, "rank", rank, want, "pass a rank of parallel.tp x pp x cp"))
    return everyone[rank]


def layout_result(pair: PairConfig, side: Side, rank: int) -> Result:
    """Return groups, pools and layers of one rank.

    Raises:
        ConfigError: no such rank, or a topology that does not divide the model.
    """
    config = pair.side(side)
    position = position_of(config, rank)
    layout = rank_layout(config, position)
    return {
        "side": side.value,
        "rank": rank,
        "tokens_per_block": layout.tokens_per_block,
        "kv_layout": layout.kv_layout.value,
        "groups": [_group_entry(group) for group in layout.groups],
        "pools": [_pool_entry(pool) for group in layout.groups for pool in group.pools],
        "bytes_per_token": sum(bytes_per_token(spec) for spec in layout.specs),
        "layers": [_layer_entry(layout, index, position) for index in range(len(layout.specs))],
    }


def _group_entry(group: GroupLayout) -> Result:
    return {
        "id": group.group_id,
        "window": group.window,
        "sink_blocks": group.sink_blocks,
        "reuse": group.reuse_policy.value,
        "owner": group.owner.value,
        "layers": list(group.layer_ids),
        "page_bytes": group.page_bytes,
    }


def _pool_entry(pool: PoolLayout) -> Result:
    return {
        "group": pool.group_id,
        "index": pool.index,
        "slot_bytes": pool.slot_bytes,
        "buffer_bytes": pool.buffer_bytes,
        "buffers": [
            {"layer": item.layer_id, "role": item.role, "offset": item.offset_bytes, "bytes": item.size_bytes}
            for item in pool.buffers
        ],
    }


def _layer_entry(layout: CacheLayout, index: int, position: ParallelPosition) -> Result:
    spec = layout.specs[index]
    tp, tp_rank = (1, 0) if position.attention_dp else (position.tp, position.tp_rank)
    heads = head_shard(spec.total_heads, tp, tp_rank).heads
    return {
        "layer": spec.layer_id,
        "owner": spec.owner.value,
        "local_kv_heads": spec.num_kv_heads,
        "heads": [heads.lo, heads.hi],
        "bytes_per_token": bytes_per_token(spec),
    }


def size_result(
    pair: PairConfig, side: Side, rank: int, *, tokens: int, requests: int, quota_bytes: int | None = None
) -> Result:
    """Return what `tokens` tokens of `requests` requests cost on one rank, and what fits into a quota.

    Args:
        pair, side, rank: whose cache.
        tokens: tokens of all requests together.
        requests: requests resident at the same time.
        quota_bytes: bytes to fill the other way round; None for what the tokens cost.

    Raises:
        ConfigError: no such rank, or a topology that does not divide the model.
    """
    config = pair.side(side)
    layout = rank_layout(config, position_of(config, rank))
    hosts_draft = any(spec.is_draft for spec in layout.specs)
    headroom_tokens = (speculation_shape(config) or NO_SPECULATION).generation_headroom(hosts_draft)
    cost = CacheCost.from_specs(
        layout.specs,
        tokens_per_block=config.tokens_per_block,
        max_seq_len=config.max_seq_len,
        generation_headroom_tokens=headroom_tokens,
        max_requests=requests,
        max_num_tokens=0,
    )
    pool_bytes = _pool_bytes(layout, pool_slots(config, layout))
    needed_bytes = cost.quota_bytes(tokens)
    return {
        "side": side.value,
        "rank": rank,
        "tokens": tokens,
        "requests": requests,
        "bytes_per_token": cost.generation_bytes_per_token,
        "all_layers_bytes_per_token": sum(bytes_per_token(spec) for spec in layout.specs),
        "fixed_bytes_per_request": cost.fixed_bytes_per_request,
        "headroom_tokens": headroom_tokens,
        "quota_bytes": needed_bytes,
        "given_quota_bytes": quota_bytes,
        "tokens_for_quota": cost.tokens(needed_bytes if quota_bytes is None else quota_bytes),
        "pool_bytes": pool_bytes,
        "tokens_for_pool": cost.tokens(pool_bytes),
        "groups": [
            _group_cost(group, layout.tokens_per_block, ceil_div(tokens, requests), requests, headroom_tokens)
            for group in layout.groups
        ],
    }


def _pool_bytes(layout: CacheLayout, slots: Mapping[Any, int]) -> int:
    """Return the bytes of all pools; groups of one pool group share theirs."""
    pages = {group.pool_group: slots[group.group_id] * group.page_bytes for group in layout.groups}
    return sum(pages.values())


def _group_cost(
    group: GroupLayout, tokens_per_block: int, tokens_each: int, requests: int, headroom_tokens: int
) -> Result:
    """Return the pages one request holds in a group: all of its blocks, or what a window and its sinks keep at most."""
    pages = ceil_div(tokens_each, tokens_per_block)
    if group.window is not None:
        pages = group.sink_blocks + max_live_blocks(group.window, headroom_tokens, tokens_per_block)
    return {
        "id": group.group_id,
        "owner": group.owner.value,
        "window": group.window,
        "page_bytes": group.page_bytes,
        "pages_per_request": pages,
        "bytes_per_request": pages * group.page_bytes,
        "bytes": pages * group.page_bytes * requests,
    }


def judge_pair(pair: PairConfig) -> GateReport:
    """Return the gate's report on the two instances a pair file describes."""
    return check_instances(dry_cards(pair, Side.CONTEXT), dry_cards(pair, Side.GENERATION))


def check_result(report: GateReport) -> Result:
    """Return a gate report as plain data."""
    return {
        "compatible": report.compatible,
        "draft_kv": report.draft_kv.value,
        "checks": [
            {
                "name": row.name,
                "scope": row.scope,
                "context": row.context,
                "generation": row.generation,
                "verdict": row.verdict.value,
                "reason": row.reason,
            }
            for row in report.checks
        ],
    }


def plan_result(pair: PairConfig, *, context_dp: int | None = None, generation_dp: int | None = None) -> Result:
    """Return who sends what to whom; pairs of ranks that move nothing are absent.

    Args:
        pair: the pair.
        context_dp, generation_dp: under attention data parallelism, the data rank that holds the request on each side
            (None: 0).

    Raises:
        ConfigError: a data rank where there are none, or out of range.
        IncompatiblePeerError: the gate refuses the pair.
    """
    report = judge_pair(pair)
    require_compatible(report)
    with_draft = report.draft_kv is not DraftKV.OFF
    contexts = _holding_request(pair, Side.CONTEXT, context_dp)
    generations = _holding_request(pair, Side.GENERATION, generation_dp)
    programs = [compile_program(c, g, with_draft=with_draft) for c in contexts for g in generations]
    moving = [program for program in programs if program.lanes]
    return {
        "draft_kv": report.draft_kv.value,
        "pairs": [_program_entry(program) for program in moving],
        "digest": _digest(moving),
    }


def _holding_request(pair: PairConfig, side: Side, data_rank: int | None) -> Sequence[RankCard]:
    """Return the cards that take part in one request: all, or those of one data rank."""
    parallel = pair.side(side).parallel
    cards = dry_cards(pair, side)
    option = f"--{side}-dp"
    if not parallel.attention_dp:
        if data_rank is not None:
            want = f"left out: {side}.parallel.attention_dp is false"
            raise ConfigError(explain(pair.side(side).source, option, data_rank, want, f"drop {option}"))
        return cards
    wanted = data_rank or 0
    if not 0 <= wanted < parallel.tp:
        want = f"in [0, {parallel.tp}), the data ranks of {side}"
        raise ConfigError(explain(pair.side(side).source, option, wanted, want, "pass one of them"))
    return [card for card in cards if card.position.tp_rank == wanted]


def _program_entry(program: CopyProgram) -> Result:
    return {
        "context_rank": program.context_rank,
        "generation_rank": program.generation_rank,
        "bytes_per_page": program.page_bytes,
        "lanes": len(program.lanes),
        "slices": [
            {
                "layer": piece.layer_id,
                "owner": piece.owner.value,
                "role": piece.role,
                "heads": [piece.heads.lo, piece.heads.hi],
                "src_offset": piece.src_offset,
                "dst_offset": piece.dst_offset,
                "bytes_per_page": piece.bytes_per_page,
            }
            for piece in program.slices
        ],
    }


def _digest(programs: Sequence[CopyProgram]) -> str:
    text = "\n".join(f"{p.context_rank} {p.generation_rank} {p.digest}" for p in programs)
    return blake2b(text.encode(), digest_size=DIGEST_BYTES).hexdigest()


def pages_result(pair: PairConfig, *, prompt_tokens: int, cached_tokens: int = 0) -> Result:
    """Return which block ordinals of a prompt travel, per layer group of the generation side's whole model.

    A cached prefix spares every group but private ones: those never come from the prefix cache.

    Args:
        pair: the pair.
        prompt_tokens: tokens whose KV the context side computes.
        cached_tokens: tokens at the start the generation side holds already.

    Raises:
        ConfigError: more tokens than ``max_seq_len`` allows, or more cached than there are.
    """
    config = pair.generation
    _check_tokens(config, "--prompt-tokens", prompt_tokens, config.max_seq_len, "generation's max_seq_len")
    _check_tokens(config, "--cached-tokens", cached_tokens, prompt_tokens, "the prompt")
    draft_kv = judge_pair(pair).draft_kv
    groups = []
    for group in rank_layout(config, whole_model(config)).groups:
        private = group.reuse_policy is ReusePolicy.PRIVATE
        ordinals = live_ordinals(
            prompt_tokens,
            tokens_per_block=config.tokens_per_block,
            window=group.window,
            sink_blocks=group.sink_blocks,
            cached_tokens=0 if private else cached_tokens,
        )
        groups.append(
            {
                "id": group.group_id,
                "owner": group.owner.value,
                "window": group.window,
                "sink_blocks": group.sink_blocks,
                "travels": group.owner.value == "target" or draft_kv is not DraftKV.OFF,
                "ordinals": ordinals.tolist(),
            }
        )
    return {"prompt_tokens": prompt_tokens, "cached_tokens": cached_tokens, "groups": groups}


def _check_tokens(config: SideConfig, option: str, got: int, limit: int, whose: str) -> None:
    if not 0 <= got <= limit:
        want = f"in [0, {limit}], the length of {whose}" if whose == "the prompt" else f"in [0, {limit}], {whose}"
        raise ConfigError(explain(config.source, option, got, want, "pass a smaller number"))


def presets_result(pairs: Sequence[PairConfig]) -> Result:
    """Return what the shipped pair files are about."""
    return {"presets": [_preset_entry(pair) for pair in pairs]}


def _preset_entry(pair: PairConfig) -> Result:
    return {
        "name": pair.name,
        "runner": pair.runner.kind,
        "context": pair.context.parallel.model_dump(),
        "generation": pair.generation.parallel.model_dump(),
        "target_layers": pair.context.num_target_layers,
        "draft_layers": pair.context.num_draft_layers,
        "cases": list(pair_cases(pair)),
    }
