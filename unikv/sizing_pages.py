"""How many pages requests hold: of one shape, of a batch, at their peak, and the longest that still fits.

With h tokens final and c positions allocated (B: tokens per block, W: window)::

    ordinal  0 .. sinks | sinks .. (h+1-W)//B | .. ceil(c/B)
             live       | stale: no page      | live

Counts are pages that can be handed out. The null slot of a pool group is never among them: a pool of N slots gives
N - 1 pages.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from unikv.errors import SpecError, explain
from unikv.layer_spec import ReusePolicy
from unikv.layout import CacheLayout, GroupLayout
from unikv.ranges import Span, ceil_div, max_live_blocks, stale_blocks


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestShape:
    """How long a request is.

    Attributes:
        capacity_tokens: positions that have pages.
        history_tokens: tokens whose KV is final, at most as many.

    Raises:
        SpecError: a number is out of range.
    """

    capacity_tokens: int
    history_tokens: int = 0

    def __post_init__(self) -> None:
        if not 0 <= self.history_tokens <= self.capacity_tokens:
            want = f"in [0, capacity_tokens={self.capacity_tokens}]"
            raise SpecError(explain("request", "history_tokens", self.history_tokens, want, "correct the shape"))


Batch = Sequence[RequestShape]
"""Requests resident at the same time."""


def typical_batch(*, max_requests: int, max_num_tokens: int, avg_seq_len: int, max_seq_len: int, drafts: int) -> Batch:
    """Return a typical moment: one request in prefill, all others in a step that verifies `drafts` drafts.

    Raises:
        SpecError: the average is longer than the longest, or shorter than a step.
    """
    step = drafts + 1
    if not step <= avg_seq_len <= max_seq_len:
        want = f"in [{step}, max_seq_len={max_seq_len}]"
        raise SpecError(explain("typical batch", "avg_seq_len", avg_seq_len, want, "correct one of them"))
    running = RequestShape(capacity_tokens=avg_seq_len, history_tokens=avg_seq_len - step)
    return (RequestShape(capacity_tokens=max_num_tokens), *[running] * (max_requests - 1))


def batch_pages(group: GroupLayout, tokens_per_block: int, batch: Batch, *, shared_prompt_tokens: int = 0) -> int:
    """Return the pages a batch holds in one layer group.

    Args:
        group: the layer group.
        tokens_per_block: token positions of one page.
        batch: the requests.
        shared_prompt_tokens: length of a prompt all of them start with. Its whole blocks count once, and only while
            one of the requests still has them in its window; a PRIVATE group shares nothing.
    """
    private = group.reuse_policy is ReusePolicy.PRIVATE
    shared = Span(0, 0 if private else shared_prompt_tokens // tokens_per_block)
    own_pages, common = 0, set[int]()
    for shape in batch:
        blocks = ceil_div(shape.capacity_tokens, tokens_per_block)
        stale = stale_blocks(shape.history_tokens, group.window, group.sink_blocks, tokens_per_block)
        beyond = Span(min(len(shared), blocks), blocks)
        own_pages += len(beyond) - len(beyond.intersect(stale))
        common.update(ordinal for ordinal in range(min(len(shared), blocks)) if ordinal not in stale)
    return own_pages + len(common)


def peak_pages(group: GroupLayout, tokens_per_block: int, positions: int, headroom_tokens: int) -> int:
    """Return the most pages one request that grows to `positions` positions ever holds in `group`.

    Args:
        group: the layer group.
        tokens_per_block: token positions of one page.
        positions: capacity at the end, in tokens.
        headroom_tokens: most tokens the capacity is ahead of the history on the way.
    """
    pages = ceil_div(positions, tokens_per_block)
    if group.window is None:
        return pages
    return min(pages, group.sink_blocks + max_live_blocks(group.window, headroom_tokens, tokens_per_block))


def scratch_blocks(
    shape: RequestShape, window: int | None, sink_blocks: int, tokens_per_block: int, *, max_rewind_tokens: int = 0
) -> Span:
    """Return the ordinals of a prefill chunk that are out of the window before it ends: they may share scratch pages.

    Args:
        shape: history before the chunk, capacity behind it.
        window, sink_blocks, tokens_per_block: of the layer group.
        max_rewind_tokens: tokens at the end that may be taken back, which then needs what was in their window.
    """
    final = max(0, shape.capacity_tokens - max_rewind_tokens)
    new = Span(
        ceil_div(shape.history_tokens, tokens_per_block),
        ceil_div(shape.capacity_tokens, tokens_per_block),
    )
    return stale_blocks(final, window, sink_blocks, tokens_per_block).intersect(new)


def clamp_max_seq_len(
    layout: CacheLayout, pages: Sequence[int], *, batch_size: int, upper_tokens: int, growing: bool = False
) -> int:
    """Return the longest request in tokens that fits beside ``batch_size - 1`` requests of one page per group.

    Args:
        layout: the rank's layout.
        pages: pages of each pool group, null slots not counted.
        batch_size: requests resident at the same time.
        upper_tokens: the answer is never larger.
        growing: a window that lies across block boundaries holds a page more than one that ends with a block. False
            asks whether a request of that length fits, True whether one can grow to it token by token.

    Raises:
        SpecError: there are not as many page counts as pool groups.
    """
    if len(pages) != layout.num_pool_groups:
        want = f"{layout.num_pool_groups}, one per pool group"
        raise SpecError(explain("clamp", "length of pages", len(pages), want, "pass the pages of every pool group"))
    others = batch_size - 1
    low, high = 0, ceil_div(upper_tokens, layout.tokens_per_block)
    while low < high:
        middle = (low + high + 1) // 2
        needed = [0] * layout.num_pool_groups
        for group in layout.groups:
            needed[group.pool_group] += others + _pages_of_blocks(group, layout.tokens_per_block, middle, growing)
        fits = all(need <= have for need, have in zip(needed, pages, strict=True))
        low, high = (middle, high) if fits else (low, middle - 1)
    return min(low * layout.tokens_per_block, upper_tokens)


def _pages_of_blocks(group: GroupLayout, tokens_per_block: int, blocks: int, growing: bool) -> int:
    tokens = blocks * tokens_per_block
    if growing:
        return peak_pages(group, tokens_per_block, tokens, 1)
    return batch_pages(group, tokens_per_block, [RequestShape(capacity_tokens=tokens, history_tokens=tokens - 1)])


def pool_group_pages(layout: CacheLayout, group_pages: Iterable[int]) -> tuple[int, ...]:
    """Return the pages of each pool group, from those of each layer group."""
    pages = [0] * layout.num_pool_groups
    for group, count in zip(layout.groups, group_pages, strict=True):
        pages[group.pool_group] += count
    return tuple(pages)
