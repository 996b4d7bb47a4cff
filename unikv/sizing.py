"""What sequences cost in bytes, and how many fit: one affine rule and its exact inverse.

Of T tokens in all requests together, the first N (one iteration's worth) are in prefill and keep every layer; the rest
keep what never leaves a window. Each of B resident requests pays for its windows once:

=============  ====================================================================  =========
bytes          per                                                                   name
=============  ====================================================================  =========
C              token in prefill: every layer                                         context
G              token behind it: the layers without a window                          generation
R              request: windows, in whole pages, layer by layer, and attention sinks  fixed
=============  ====================================================================  =========

::

    quota(T) = min(T, N) * C + max(0, T - N) * G + B * R
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Final, Self

from unikv.errors import SpecError, explain
from unikv.ids import GroupId
from unikv.layer_spec import KVCacheLayerSpec, check_layer_specs
from unikv.layout import CacheLayout, bytes_per_token
from unikv.ranges import ceil_div, effective_window, max_live_blocks

_MIN_SLOTS: Final = 2
"""The null slot and one page to hand out."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheCost:
    """Bytes a cache needs for its tokens, as three numbers and the load they are meant for.

    Attributes:
        context_bytes_per_token: C, cost of a token in prefill.
        generation_bytes_per_token: G, cost of every token behind the first `max_num_tokens`.
        fixed_bytes_per_request: R, what the windowed layers of one request hold at most.
        max_requests: B, requests resident at the same time.
        max_num_tokens: N, tokens one iteration may process.
    """

    context_bytes_per_token: int
    generation_bytes_per_token: int
    fixed_bytes_per_request: int
    max_requests: int
    max_num_tokens: int

    def __post_init__(self) -> None:
        for name in self.__slots__:
            value = getattr(self, name)
            if not isinstance(value, int) or value < 0:
                raise SpecError(explain("cache cost", name, value, "an integer >= 0", "pass a count"))

    @classmethod
    def from_specs(
        cls,
        specs: Iterable[KVCacheLayerSpec],
        *,
        tokens_per_block: int,
        max_seq_len: int | None,
        generation_headroom_tokens: int,
        max_requests: int,
        max_num_tokens: int,
        lookahead_tokens: int = 0,
        share_window_scratch: bool = False,
    ) -> Self:
        """Add up the layers of `specs`.

        Args:
            specs: the layers to pay for: all of a rank, or the draft layers alone.
            tokens_per_block: token positions of one page.
            max_seq_len: longest sequence in tokens; windows that reach it count as full attention. None: unknown.
            generation_headroom_tokens: most tokens the capacity of a request is ahead of its history, at least 1.
            max_requests: requests resident at the same time.
            max_num_tokens: tokens one iteration may process.
            lookahead_tokens: see `unikv.ranges.effective_window`.
            share_window_scratch: count layers of equal window, sinks, policy, owner and size once in prefill, where
                they write blocks behind the window to one shared place.

        Raises:
            SpecError: no specs, or a number out of range.
        """
        if generation_headroom_tokens < 1:
            cure = "count at least the token being generated"
            raise SpecError(explain("cache cost", "headroom_tokens", generation_headroom_tokens, ">= 1", cure))
        full_bytes = scratch_bytes = fixed_bytes = 0
        seen: set[object] = set()
        for spec in check_layer_specs(specs):
            size_bytes = bytes_per_token(spec)
            window = effective_window(spec.window, max_seq_len, lookahead_tokens=lookahead_tokens)
            if window is None:
                full_bytes += size_bytes
                continue
            sinks = ceil_div(spec.sink_tokens, tokens_per_block)
            pages = sinks + max_live_blocks(window, generation_headroom_tokens, tokens_per_block)
            fixed_bytes += pages * tokens_per_block * size_bytes
            kind = (window, sinks, spec.reuse_policy, spec.owner, size_bytes)
            if not (share_window_scratch and kind in seen):
                scratch_bytes += size_bytes
            seen.add(kind)
        return cls(
            context_bytes_per_token=full_bytes + scratch_bytes,
            generation_bytes_per_token=full_bytes,
            fixed_bytes_per_request=fixed_bytes,
            max_requests=max_requests,
            max_num_tokens=max_num_tokens,
        )

    @property
    def intercept_bytes(self) -> int:
        """Bytes at zero tokens of the straight line that holds from `max_num_tokens` on; its slope is G."""
        prefill = (self.context_bytes_per_token - self.generation_bytes_per_token) * self.max_num_tokens
        return self.max_requests * self.fixed_bytes_per_request + prefill

    def quota_bytes(self, tokens: int) -> int:
        """Return the bytes that `tokens` tokens, over all requests, need."""
        context = min(tokens, self.max_num_tokens)
        fixed_bytes = self.max_requests * self.fixed_bytes_per_request
        generation = (tokens - context) * self.generation_bytes_per_token
        return context * self.context_bytes_per_token + generation + fixed_bytes

    def tokens(self, quota_bytes: int) -> int | None:
        """Return the most tokens whose quota fits into `quota_bytes`, None where no number of tokens exceeds it.

        ``tokens(quota_bytes(t)) == t`` wherever a token costs anything. A cache of windowed layers alone has no cap
        once it has room for its windows and one iteration.
        """
        left_bytes = quota_bytes - self.max_requests * self.fixed_bytes_per_request
        if left_bytes < 0:
            return 0
        prefill_bytes = self.max_num_tokens * self.context_bytes_per_token
        if left_bytes < prefill_bytes:
            return left_bytes // self.context_bytes_per_token
        if self.generation_bytes_per_token == 0:
            return None
        return self.max_num_tokens + (left_bytes - prefill_bytes) // self.generation_bytes_per_token


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
