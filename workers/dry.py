"""What one rank's cache would look like and cost, without any memory: plain data for the dry commands.

Every function returns what its command prints with ``--json``: dicts, lists, texts and numbers. Heads are global
half-open ranges ``[lo, hi]``, offsets and sizes are bytes, windows are tokens (null: full attention).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

from transfer.hello import RankCard, Side
from unikv.errors import ConfigError, explain
from unikv.layer_spec import KEY
from unikv.layout import CacheLayout, GroupLayout, PoolLayout, bytes_per_token
from unikv.ranges import Span, ceil_div
from unikv.sizing import CacheCost
from unikv.sizing_fit import pool_bytes as sum_pool_bytes
from unikv.sizing_fit import request_pages
from unikv.sizing_pages import pool_group_pages
from unikv.sizing_split import NULL_SLOTS
from unikv.speculation import NO_SPECULATION
from workers.config import PairConfig, SideConfig
from workers.topology import dry_cards, pool_group_slots, positions, rank_card, rank_layout, speculation_shape

Report = dict[str, Any]

MAX_COUNT: Final = 2**40
"""Largest number of tokens or requests that is taken seriously; beyond it somebody mistyped."""
MAX_RANKS: Final = 2**12
MAX_LAYERS: Final = 2**14
"""Sizes of instances that can be looked at rank by rank and layer by layer."""


def check_count(thing: str, option: str, value: int, low: int, high: int) -> None:
    """Refuse a number of a command line that is out of ``[low, high]``.

    Raises:
        ConfigError: it is; the text names the option.
    """
    if not low <= value <= high:
        raise ConfigError(explain(thing, option, value, f"in [{low}, {high}]", "pass another number"))


def check_extent(side: SideConfig) -> None:
    """Refuse an instance with so many ranks or layers that looking at each of them would never end.

    Raises:
        ConfigError: it is that large; the text names the side.
    """
    layers = 0 if side.layers is None else sum(entry.count for entry in side.layers)
    for field, got, most in (("ranks", side.parallel.world_size, MAX_RANKS), ("layers", layers, MAX_LAYERS)):
        if got > most:
            thing = f"{side.source}: {side.side}"
            raise ConfigError(explain(thing, f"number of {field}", got, f"<= {most}", f"describe fewer {field}"))


def all_cards(pair: PairConfig, side: Side) -> tuple[RankCard, ...]:
    """Return the cards of all ranks of a side.

    Raises:
        ConfigError: as `check_extent`, or the side cannot be laid out.
    """
    check_extent(pair.side(side))
    return dry_cards(pair, side)


def span(heads: Span) -> list[int]:
    """Return a half-open range as JSON has it."""
    return [heads.lo, heads.hi]


def layout_report(pair: PairConfig, side: Side, rank: int) -> Report:
    """Return groups, pools and layers of one rank. Under context parallelism it has blocks ``cp_rank``, ``+ cp``, ...

    Raises:
        ConfigError: the side has no such rank, or cannot be laid out.
    """
    card, layout = _rank(pair, side, rank)
    heads = {entry.layer_id: view.heads for view in card.views if KEY in view.roles for entry in view.entries}
    return {
        "side": side.value,
        "rank": rank,
        "tokens_per_block": layout.tokens_per_block,
        "kv_layout": layout.kv_layout.value,
        "cp": card.position.cp,
        "cp_rank": card.position.cp_rank,
        "groups": [_group(group) for group in layout.groups],
        "pools": [_pool(pool) for group in layout.groups for pool in group.pools],
        "bytes_per_token": sum(bytes_per_token(spec) for spec in layout.specs),
        "layers": [
            {
                "layer": spec.layer_id,
                "owner": spec.owner.value,
                "local_kv_heads": spec.num_kv_heads,
                "heads": span(heads[spec.layer_id]),
                "bytes_per_token": bytes_per_token(spec),
            }
            for spec in layout.specs
        ],
    }


def size_report(
    pair: PairConfig,
    side: Side,
    *,
    rank: int = 0,
    tokens: int = 0,
    requests: int = 1,
    iteration_tokens: int = 0,
    quota_bytes: int | None = None,
) -> Report:
    """Return what a load costs one rank in bytes, and the way back: how many tokens bytes hold.

    Args:
        pair: both sides.
        side, rank: whose cache.
        tokens: positions of all requests together, those reserved for drafts included.
        requests: requests resident at the same time.
        iteration_tokens: tokens one iteration has in prefill, where windowed layers hold every one of them.
        quota_bytes: bytes for the way back; None takes what the load costs.

    Returns:
        Bytes that a load costs are not rounded to pages, what `resident_bytes` and the ``..._for_pool`` say is: pages
        of each pool group, without its null slot. Without iteration tokens
        ``quota_bytes = tokens * bytes_per_token + requests * fixed_bytes_per_request``.
        ``tokens_for_quota`` is None where no number of tokens exceeds the bytes (windowed layers alone). Each of the
        groups says what one request of ``tokens / requests`` positions, max_seq_len at most, holds.

    Raises:
        ConfigError: the side has no such rank or cannot be laid out, splits sequences, or a number is out of range.
    """
    check_count("size", "--tokens", tokens, 0, MAX_COUNT)
    check_count("size", "--requests", requests, 1, MAX_COUNT)
    check_count("size", "--iteration-tokens", iteration_tokens, 0, MAX_COUNT)
    _, layout = _rank(pair, side, rank)
    config = pair.side(side)
    if config.parallel.cp != 1:
        cure = "ask with cp 1: each of the ranks then needs its share of the blocks"
        raise ConfigError(explain(config.source, f"{side}.parallel.cp", config.parallel.cp, "1 for sizes", cure))
    headroom_tokens = _headroom(config, layout)
    cost = CacheCost.from_specs(
        layout.specs,
        tokens_per_block=layout.tokens_per_block,
        max_seq_len=layout.max_seq_len,
        generation_headroom_tokens=headroom_tokens,
        max_requests=requests,
        max_num_tokens=iteration_tokens,
    )
    needed_bytes = cost.quota_bytes(tokens)
    slots = pool_group_slots(config, layout)
    pool_bytes = sum_pool_bytes(layout, slots)
    tokens_each = min(ceil_div(tokens, requests), config.max_seq_len)
    return {
        "side": side.value,
        "rank": rank,
        "tokens": tokens,
        "requests": requests,
        "headroom_tokens": headroom_tokens,
        "bytes_per_token": cost.generation_bytes_per_token,
        "context_bytes_per_token": cost.context_bytes_per_token,
        "fixed_bytes_per_request": cost.fixed_bytes_per_request,
        "quota_bytes": needed_bytes,
        "given_quota_bytes": quota_bytes,
        "tokens_for_quota": cost.tokens(needed_bytes if quota_bytes is None else quota_bytes),
        "pool_bytes": pool_bytes,
        "tokens_for_pool": requests * _longest_of(layout, slots, requests, headroom_tokens),
        "tokens_per_request": tokens_each,
        "resident_bytes": requests * _held_bytes(layout, tokens_each, headroom_tokens),
        "requests_for_pool": _requests_in(layout, slots, max(1, tokens_each), headroom_tokens),
        "groups": [_need(layout, group, tokens_each, headroom_tokens) for group in layout.groups],
    }


def _rank(pair: PairConfig, side: Side, rank: int) -> tuple[RankCard, CacheLayout]:
    config = pair.side(side)
    check_extent(config)
    places = positions(config)
    if not 0 <= rank < len(places):
        want = f"in [0, {len(places)}), the ranks of {side}.parallel tp x pp x cp"
        raise ConfigError(explain(config.source, "--rank", rank, want, "ask for a rank the side has"))
    layout = rank_layout(config, places[rank])
    return rank_card(pair, side, places[rank], layout=layout), layout


def _group(group: GroupLayout) -> Report:
    return {
        "id": group.group_id,
        "window": group.window,
        "sink_blocks": group.sink_blocks,
        "reuse": group.reuse_policy.value,
        "owner": group.owner.value,
        "layers": list(group.layer_ids),
        "pool_group": group.pool_group,
        "page_bytes": group.page_bytes,
    }


def _pool(pool: PoolLayout) -> Report:
    return {
        "group": pool.group_id,
        "index": pool.index,
        "slot_bytes": pool.slot_bytes,
        "buffer_bytes": pool.buffer_bytes,
        "buffers": [
            {"layer": buffer.layer_id, "role": buffer.role, "offset": buffer.offset_bytes, "bytes": buffer.size_bytes}
            for buffer in pool.buffers
        ],
    }


def _headroom(side: SideConfig, layout: CacheLayout) -> int:
    shape = speculation_shape(side) or NO_SPECULATION
    return shape.generation_headroom(any(spec.is_draft for spec in layout.specs))


def _held_bytes(layout: CacheLayout, tokens: int, headroom_tokens: int) -> int:
    """Return the bytes of the pages one request of `tokens` tokens holds at most."""
    pages = request_pages(layout, tokens, headroom_tokens) if tokens else [0] * len(layout.groups)
    return sum(count * group.page_bytes for count, group in zip(pages, layout.groups, strict=True))


def _requests_in(layout: CacheLayout, slots: Sequence[int], tokens: int, headroom_tokens: int) -> int:
    """Return how many requests of `tokens` tokens the pools hold at the same time."""
    each = pool_group_pages(layout, request_pages(layout, tokens, headroom_tokens))
    return min((count - NULL_SLOTS) // pages for count, pages in zip(slots, each, strict=True) if pages)


def _longest_of(layout: CacheLayout, slots: Sequence[int], requests: int, headroom_tokens: int) -> int:
    """Return the most tokens that each of `requests` equal requests can have, no longer than the longest sequence."""
    low, high = 0, layout.max_seq_len or MAX_COUNT
    while low < high:
        middle = (low + high + 1) // 2
        fits = _requests_in(layout, slots, middle, headroom_tokens) >= requests
        low, high = (middle, high) if fits else (low, middle - 1)
    return low


def _need(layout: CacheLayout, group: GroupLayout, tokens: int, headroom_tokens: int) -> Report:
    """Return what one request of `tokens` tokens holds in `group` at most."""
    pages = request_pages(layout, tokens, headroom_tokens)[group.group_id] if tokens else 0
    return {
        "id": group.group_id,
        "owner": group.owner.value,
        "window": group.window,
        "page_bytes": group.page_bytes,
        "pages_per_request": pages,
        "bytes": pages * group.page_bytes,
    }
