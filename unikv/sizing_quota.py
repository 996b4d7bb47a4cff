"""From settings to a quota in bytes, across ranks, and the drafter's part of it.

A suspended request resumes only while less than `max_util_for_resume` of the pages is used (the resume watermark), so
a quota that must hold T tokens is larger than what they cost, by one over that number.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from fractions import Fraction

from unikv.errors import SpecError, explain
from unikv.ranges import ceil_div
from unikv.sizing import CacheCost


def check_utilisation(max_util_for_resume: float) -> Fraction:
    """Return the resume watermark as the exact number that was written: 0.95 is 19/20.

    Raises:
        SpecError: not in (0, 1]; NaN is not.
    """
    if not 0 < max_util_for_resume <= 1:
        cure = "pass the part of the pages that may be used"
        raise SpecError(explain("cache quota", "max_util_for_resume", max_util_for_resume, "in (0, 1]", cure))
    return Fraction(repr(float(max_util_for_resume)))


def quota_for_tokens(
    cost: CacheCost, max_tokens: int, *, max_util_for_resume: float = 1.0, limit_bytes: int | None = None
) -> int:
    """Return the bytes in which `max_tokens` tokens stay below the watermark, `limit_bytes` at most."""
    wanted = _ceil(cost.quota_bytes(max_tokens) / check_utilisation(max_util_for_resume))
    return wanted if limit_bytes is None else min(wanted, limit_bytes)


def usable_tokens(cost: CacheCost, quota_bytes: int, *, max_util_for_resume: float = 1.0) -> int | None:
    """Return the most tokens that stay below the watermark of `quota_bytes`, None where there is no cap."""
    return cost.tokens(int(quota_bytes * check_utilisation(max_util_for_resume)))


def agreed_quota(
    cost: CacheCost, quota_bytes: int, rank_tokens: Iterable[int | None], *, max_util_for_resume: float = 1.0
) -> int:
    """Return what one rank keeps of its quota once all ranks have told how many tokens they can use.

    A rank need not hold more tokens than the tightest one does. The quota never grows.

    Args:
        cost: of this rank.
        quota_bytes: this rank's own quota.
        rank_tokens: `usable_tokens` of every rank; None (no cap) binds nobody.
        max_util_for_resume: the resume watermark.
    """
    capped = [tokens for tokens in rank_tokens if tokens is not None]
    if not capped:
        check_utilisation(max_util_for_resume)
        return quota_bytes
    return quota_for_tokens(cost, min(capped), max_util_for_resume=max_util_for_resume, limit_bytes=quota_bytes)


def windowed_pool_bytes(fixed_bytes: int, slot_bytes: int, *, max_util_for_resume: float = 1.0) -> int:
    """Return the bytes of a pool of windowed layers alone: whole slots, as many as keep it below the watermark.

    Here nothing grows with the tokens, so rounding down once would take a page from every load.

    Args:
        fixed_bytes: intercept of the pool's cost.
        slot_bytes: of one slot of all its pools. The null slot is another one, on top.
        max_util_for_resume: the resume watermark.
    """
    slots = ceil_div(fixed_bytes, slot_bytes)
    return _ceil(slots / check_utilisation(max_util_for_resume)) * slot_bytes


def draft_share(total: CacheCost, draft: CacheCost, quota_bytes: int) -> float:
    """Return the part of `quota_bytes` the draft layers need for the tokens that fit into it with all layers.

    Args:
        total: cost of all layers.
        draft: cost of the draft layers alone, for the same load.
        quota_bytes: bytes of the whole cache.

    Raises:
        SpecError: the part is not between 0 and 1: the quota holds no tokens, or nothing would be left for the target.
    """
    tokens = total.tokens(quota_bytes)
    # Without a cap the draft layers cost the same for any number of tokens behind the first iteration.
    needed_bytes = draft.quota_bytes(total.max_num_tokens if tokens is None else tokens)
    if not 0 < needed_bytes < quota_bytes:
        want = f"in (0, quota_bytes={quota_bytes})"
        raise SpecError(explain("draft layers", "quota_bytes", needed_bytes, want, "give the cache more bytes"))
    return needed_bytes / quota_bytes


def append_draft_ratio(target_ratios: Sequence[float], draft_ratio: float) -> tuple[float, ...]:
    """Return the ratios of target groups and draft group together: the targets' scaled down, the draft's at the end.

    Raises:
        SpecError: `draft_ratio` is not strictly between 0 and 1.
    """
    if not 0 < draft_ratio < 1:
        cure = "leave bytes to target and drafter both"
        raise SpecError(explain("pool split", "draft ratio", draft_ratio, "in (0, 1)", cure))
    return (*(ratio * (1 - draft_ratio) for ratio in target_ratios), draft_ratio)


def _ceil(number: Fraction) -> int:
    return -(-number.numerator // number.denominator)
