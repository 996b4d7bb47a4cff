"""Bytes of memory to slots where no load is known: equal or weighted numbers of pages."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from unikv.errors import SpecError, explain
from unikv.ids import GroupId
from unikv.layout import CacheLayout
from unikv.ranges import ceil_div
from unikv.sizing_split import NULL_SLOTS

_MIN_SLOTS: Final = NULL_SLOTS + 1


def max_slots_for_bytes(
    layout: CacheLayout, pool_group: int, quota_bytes: int, *, weights: Mapping[GroupId, int] | None = None
) -> int:
    """Return how many slots pool group `pool_group` gets when the whole cache may take `quota_bytes`.

    Every layer group gets equally many pages, or as many as its weight says in proportion; groups that share a pool
    group add up. Rounded down per pool group, so that all of them together never exceed the quota.

    Args:
        layout: the rank's layout.
        pool_group: number of the pool group.
        quota_bytes: bytes of all pools of all groups.
        weights: pages of each layer group in proportion to the others', None for equal parts. Pass what the load
            needs where windowed groups are cheap: equal parts give them as many pages as full attention.

    Returns:
        Slots, the null slot included.

    Raises:
        SpecError: no such pool group, a weight that is not positive, or a quota too small for a page beside the null
            slot.
    """
    if not 0 <= pool_group < layout.num_pool_groups:
        want = f"in [0, {layout.num_pool_groups})"
        raise SpecError(explain("layout", "pool_group", pool_group, want, "use a pool group of this layout"))
    shares = {group.group_id: 1 if weights is None else weights.get(group.group_id, 0) for group in layout.groups}
    for group_id, share in shares.items():
        if share < 1:
            raise SpecError(explain(f"group {group_id}", "weight", share, "an integer >= 1", "weigh every group"))
    round_bytes = sum(shares[group.group_id] * group.page_bytes for group in layout.groups)
    share = sum(shares[group.group_id] for group in layout.groups if group.pool_group == pool_group)
    slots = quota_bytes * share // round_bytes
    if slots < _MIN_SLOTS:
        want = f">= {ceil_div(_MIN_SLOTS * round_bytes, share)} for pool group {pool_group}"
        raise SpecError(explain("cache", "quota_bytes", quota_bytes, want, "give the pools more bytes"))
    return slots
