"""Bytes of memory to slots: how the pools of several pool groups share one quota.

Every pool is allocated in whole grains of g bytes: n slots of a pool group whose pools have slots of b1, b2, ... bytes
take ``ceil(n*b1/g) + ceil(n*b2/g) + ...`` grains. The quota is dealt out in proportion to ratios. A pool group that
would get no more than the slots it cannot do without gets just those, and the others share the rest.

Slots include the null slot: each pool group needs one more than the pages it hands out.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from fractions import Fraction
from typing import Final

from unikv.errors import SpecError, explain
from unikv.layout import CacheLayout
from unikv.ranges import ceil_div
from unikv.sizing_pages import Batch, RequestShape, batch_pages, peak_pages, pool_group_pages

NULL_SLOTS: Final = 1
"""Slots of every pool group that are never handed out."""

DEFAULT_BATCH: Final[Batch] = (RequestShape(capacity_tokens=2049, history_tokens=2048),)
"""What pools are shaped for where no load is known: one request that generates its first token."""

_RATIO_TOLERANCE: Final = 1e-6


def check_ratios(ratios: Sequence[float], num_groups: int) -> tuple[Fraction, ...]:
    """Return `ratios` as exact numbers.

    Raises:
        SpecError: not one per layer group (length), one that is not positive, or they do not sum to 1.0.
    """
    if len(ratios) != num_groups:
        want = f"{num_groups}, one per layer group"
        raise SpecError(explain("pool ratios", "length", len(ratios), want, "give every layer group a ratio"))
    for ratio in ratios:
        if not (ratio > 0 and math.isfinite(ratio)):
            raise SpecError(explain("pool ratios", "ratio", ratio, "positive", "give every layer group some bytes"))
    if not math.isclose(sum(ratios), 1.0, abs_tol=_RATIO_TOLERANCE):
        cure = "let the ratios sum to 1.0"
        raise SpecError(explain("pool ratios", "sum", sum(ratios), "1.0", cure))
    return tuple(Fraction(ratio) for ratio in ratios)


def batch_ratios(layout: CacheLayout, batch: Batch) -> tuple[Fraction, ...]:
    """Return the part of the bytes of `batch` that each layer group holds.

    Raises:
        SpecError: the batch holds no page at all.
    """
    sizes = [batch_pages(group, layout.tokens_per_block, batch) * group.page_bytes for group in layout.groups]
    if not any(sizes):
        raise SpecError(explain("pool split", "pages of the batch", 0, ">= 1", "describe requests that hold something"))
    return tuple(Fraction(size, sum(sizes)) for size in sizes)


def min_slots(layout: CacheLayout, constraints: Sequence[Batch] = (), *, headroom_tokens: int = 1) -> tuple[int, ...]:
    """Return the slots each pool group cannot do without, the null slot included.

    Enough for every one of the batches, for a page in every layer group, and for the longest window across block
    boundaries, its sinks included.

    Args:
        layout: the rank's layout.
        constraints: batches that must fit, each on its own.
        headroom_tokens: most tokens the capacity of a request is ahead of its history.
    """
    tpb = layout.tokens_per_block
    longest = layout.max_seq_len or math.inf
    floors = [
        1 if group.window is None else peak_pages(group, tpb, int(min(longest, 2**62)), headroom_tokens)
        for group in layout.groups
    ]
    needs = [pool_group_pages(layout, floors)]
    needs += [
        pool_group_pages(layout, [batch_pages(group, tpb, batch) for group in layout.groups]) for batch in constraints
    ]
    return tuple(NULL_SLOTS + max(pages) for pages in zip(*needs, strict=True))


def split_layout(
    layout: CacheLayout,
    quota_bytes: int,
    *,
    ratios: Sequence[float] | None = None,
    typical: Batch | None = None,
    constraints: Sequence[Batch] = (),
    headroom_tokens: int = 1,
    granularity_bytes: int = 1,
) -> tuple[int, ...]:
    """Return the slots of each pool group when all pools together may take `quota_bytes`.

    The shape comes from `ratios`, else from the bytes of `typical`, else from those of the constraint that holds most,
    else from `DEFAULT_BATCH`.

    Args:
        layout: the rank's layout.
        quota_bytes: bytes of all pools of all pool groups, null slots included.
        ratios: part of the bytes per layer group; they sum to 1.0.
        typical: the load to be good at.
        constraints: batches that must fit, each on its own.
        headroom_tokens: most tokens the capacity of a request is ahead of its history.
        granularity_bytes: pools take whole multiples of this.

    Raises:
        SpecError: wrong ratios, or a quota below what the constraints need.
    """
    shape = check_ratios(ratios, len(layout.groups)) if ratios is not None else None
    batches = [batch for batch in constraints if any(request.capacity_tokens for request in batch)]
    batch = typical or max(batches, key=lambda batch: _batch_bytes(layout, batch), default=DEFAULT_BATCH)
    shape = shape or batch_ratios(layout, batch)
    pool_ratios = [Fraction(0)] * layout.num_pool_groups
    pool_sizes: list[tuple[int, ...]] = [()] * layout.num_pool_groups
    for group, ratio in zip(layout.groups, shape, strict=True):
        pool_ratios[group.pool_group] += ratio
        pool_sizes[group.pool_group] = tuple(pool.slot_bytes for pool in group.pools)
    least = min_slots(layout, constraints, headroom_tokens=headroom_tokens)
    return split_bytes(quota_bytes, pool_sizes, pool_ratios, least, granularity_bytes=granularity_bytes)


def split_bytes(
    quota_bytes: int,
    slot_sizes: Sequence[Sequence[int]],
    ratios: Sequence[Fraction],
    least_slots: Sequence[int],
    *,
    granularity_bytes: int = 1,
) -> tuple[int, ...]:
    """Return the slots of each pool group. Never more than the quota, and no pool group could have one more.

    Args:
        quota_bytes: bytes of all pools together.
        slot_sizes: per pool group, the slot bytes of its pools.
        ratios: per pool group, its part of the bytes; not negative, in proportion to each other.
        least_slots: per pool group, slots it cannot do without.
        granularity_bytes: pools take whole multiples of this.

    Raises:
        SpecError: a quota below the least slots, or a granularity below 1.
    """
    if granularity_bytes < 1:
        cure = "use 1 where memory comes in any size"
        raise SpecError(explain("pool split", "granularity_bytes", granularity_bytes, ">= 1", cure))
    costs = [_Grains(sizes, granularity_bytes) for sizes in slot_sizes]
    least = [cost.of(slots) for cost, slots in zip(costs, least_slots, strict=True)]
    total = quota_bytes // granularity_bytes
    if sum(least) > total:
        want = f">= {sum(least) * granularity_bytes} for {list(least_slots)} slots"
        raise SpecError(explain("cache", "quota_bytes", quota_bytes, want, "give the pools more bytes"))
    slots = _deal(total, costs, ratios, least_slots)
    spare = total - sum(cost.of(count) for cost, count in zip(costs, slots, strict=True))
    # What rounding left over: pinned groups last, large slots first, the small ones fill the rest.
    order = sorted((slots[index] == least_slots[index], -sum(slot_sizes[index]), index) for index in range(len(costs)))
    for _, _, index in order:
        used = costs[index].of(slots[index])
        slots[index] = costs[index].most_slots(used + spare)
        spare -= costs[index].of(slots[index]) - used
    return tuple(slots)


class _Grains:
    """Grains the pools of one pool group take."""

    def __init__(self, slot_sizes: Sequence[int], granularity_bytes: int) -> None:
        self._sizes = tuple(slot_sizes)
        self._grain = granularity_bytes

    def of(self, slots: int) -> int:
        return sum(ceil_div(slots * size, self._grain) for size in self._sizes)

    def most_slots(self, grains: int) -> int:
        low, high = 0, grains * self._grain // sum(self._sizes)
        while low < high:
            middle = (low + high + 1) // 2
            low, high = (middle, high) if self.of(middle) <= grains else (low, middle - 1)
        return low


def _deal(total: int, costs: Sequence[_Grains], ratios: Sequence[Fraction], least_slots: Sequence[int]) -> list[int]:
    """Return slots by ratio, pool groups at or below their least slots pinned to them."""
    slots = list(least_slots)
    free = set(range(len(costs)))
    while free:
        left = total - sum(costs[index].of(least_slots[index]) for index in range(len(costs)) if index not in free)
        weight = sum((ratios[index] for index in free), Fraction(0))
        given = {i: costs[i].most_slots(int(left * ratios[i] / weight)) if weight else 0 for i in free}
        pinned = {index for index in free if given[index] <= least_slots[index]}
        if not pinned:
            for index in free:
                slots[index] = given[index]
            break
        free -= pinned
    return slots


def _batch_bytes(layout: CacheLayout, batch: Batch) -> int:
    return sum(batch_pages(group, layout.tokens_per_block, batch) * group.page_bytes for group in layout.groups)
