"""How many requests of a length fit into memory, page by page.

A pool group's slots, when n requests of the same length are resident and one context chunk is in flight::

    | null | n * pages of one request, at its peak | pages of the chunk that windowed groups hold for a moment |

The null slot is charged here once per pool group: no other sizing counts it.
"""

from __future__ import annotations

from unikv.errors import SpecError, explain
from unikv.layer_spec import LayerOwner
from unikv.layout import CacheLayout
from unikv.ranges import ceil_div
from unikv.sizing_pages import peak_pages, pool_group_pages
from unikv.sizing_split import NULL_SLOTS


def null_bytes(layout: CacheLayout) -> int:
    """Return the bytes of the null slots: one page per pool group, for as long as the cache lives."""
    return pool_bytes(layout, (NULL_SLOTS,) * layout.num_pool_groups)


def pool_bytes(layout: CacheLayout, slots: tuple[int, ...]) -> int:
    """Return the bytes of all pools with `slots` slots per pool group."""
    page_bytes = {group.pool_group: group.page_bytes for group in layout.groups}
    return sum(count * page_bytes[pool_group] for pool_group, count in enumerate(slots))


def request_pages(layout: CacheLayout, tokens: int, headroom_tokens: int) -> tuple[int, ...]:
    """Return the most pages one request of `tokens` tokens holds, per layer group.

    Its last step starts with ``tokens - 1`` tokens final, so its capacity ends at ``tokens - 1 + headroom_tokens``.
    """
    positions = max(0, tokens - 1) + headroom_tokens
    return tuple(peak_pages(group, layout.tokens_per_block, positions, headroom_tokens) for group in layout.groups)


def chunk_pages(layout: CacheLayout, chunk_tokens: int) -> tuple[int, ...]:
    """Return the pages per layer group that a context chunk takes beyond what its request holds anyway."""
    blocks = ceil_div(chunk_tokens, layout.tokens_per_block)
    return tuple(0 if group.window is None else blocks for group in layout.groups)


def slots_for_requests(
    layout: CacheLayout, requests: int, *, tokens: int, headroom_tokens: int, chunk_tokens: int = 0
) -> tuple[int, ...]:
    """Return the slots of each pool group that `requests` requests of `tokens` tokens need, null slots included.

    A windowed draft group gets the windows of every request and one chunk, not its part of the bytes per token.

    Args:
        layout: the rank's layout.
        requests: requests resident at the same time.
        tokens: length of each, prompt and answer.
        headroom_tokens: most tokens the capacity of a request is ahead of its history.
        chunk_tokens: tokens one iteration has in prefill; 0 on a rank without prefill.
    """
    each = pool_group_pages(layout, request_pages(layout, tokens, headroom_tokens))
    chunk = pool_group_pages(layout, chunk_pages(layout, chunk_tokens))
    return tuple(NULL_SLOTS + requests * pages + extra for pages, extra in zip(each, chunk, strict=True))


def requests_for_bytes(
    layout: CacheLayout, memory_bytes: int, *, tokens: int, headroom_tokens: int, chunk_tokens: int = 0
) -> int:
    """Return how many requests fit into `memory_bytes` of pools; arguments as in `slots_for_requests`."""
    _check_tokens(tokens)
    none, one = (
        pool_bytes(
            layout,
            slots_for_requests(
                layout, count, tokens=tokens, headroom_tokens=headroom_tokens, chunk_tokens=chunk_tokens
            ),
        )
        for count in (0, 1)
    )
    return max(0, (memory_bytes - none) // (one - none))


def draft_bytes(layout: CacheLayout, requests: int, *, tokens: int, headroom_tokens: int, chunk_tokens: int = 0) -> int:
    """Return the bytes of the draft groups' pages when `requests` requests are admitted; no null slots.

    With windows this is what every admitted request's window and one chunk take, however long the requests are: the
    drafter's part of the bytes per token would be far more. Arguments as in `slots_for_requests`.
    """
    each, chunk = request_pages(layout, tokens, headroom_tokens), chunk_pages(layout, chunk_tokens)
    return sum(
        (requests * pages + extra) * group.page_bytes
        for group, pages, extra in zip(layout.groups, each, chunk, strict=True)
        if group.owner is LayerOwner.DRAFT
    )


def longest_request(
    layout: CacheLayout, memory_bytes: int, *, upper_tokens: int, headroom_tokens: int, chunk_tokens: int = 0
) -> int:
    """Return the length in tokens of the longest single request that fits, at most `upper_tokens`; 0 for none."""
    low, high = 0, upper_tokens
    while low < high:
        middle = (low + high + 1) // 2
        fits = requests_for_bytes(
            layout, memory_bytes, tokens=middle, headroom_tokens=headroom_tokens, chunk_tokens=chunk_tokens
        )
        low, high = (middle, high) if fits else (low, middle - 1)
    return low


def _check_tokens(tokens: int) -> None:
    if tokens < 1:
        raise SpecError(explain("request", "tokens", tokens, ">= 1", "give the request a length"))
