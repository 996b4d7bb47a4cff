"""How much of a prompt the cache can serve: the longest length at which every required group has what it needs.

At length ``n`` a group needs the live blocks of a request whose history is ``n``: its sinks, and the blocks that
intersect ``[n+1-W, n)``. A page serves a block if the needed tokens lie inside its ``[valid_from, span)``.

* REQUIRED groups limit the length. A missing page cuts the match before its block, a short one inside it; the windows
  move with every cut, so the cuts are repeated until nothing is missing. Each of them is necessary: a block that fails
  at ``n`` fails at every shorter length that still reaches into it. So the result is the longest possible.
* OPTIONAL groups never limit it. They are complete at the final length or they are not.
* PRIVATE groups have no pages in the tree.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass

from unikv.cached_page import CachedPage
from unikv.ids import GroupId
from unikv.layer_spec import ReusePolicy
from unikv.layout import GroupLayout
from unikv.prefix_tree import TOKEN_BYTES, PrefixNode, PrefixTreeManager, ReuseScope
from unikv.ranges import Span, ceil_div, stale_blocks


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefixMatch:
    """What a lookup found; nothing is claimed yet.

    ``num_tokens <= divergence_tokens <= lookup_tokens``

    Attributes:
        nodes: the blocks of the match, the last one perhaps in part.
        num_tokens: tokens that need not be computed again.
        divergence_tokens: how far the prompt is the same as something computed before, before missing pages cut it.
        lookup_tokens: tokens that were looked up.
    """

    nodes: tuple[PrefixNode, ...]
    num_tokens: int
    divergence_tokens: int
    lookup_tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ReuseStatus:
    """What one layer group can take over from the cache at the match length.

    Attributes:
        endpoint_tokens: the match length.
        complete: every live block is there. Never for PRIVATE groups, nor where nothing matched.
        coverage: half-open ranges of token positions that are there: sinks and window; empty unless complete.
    """

    group_id: GroupId
    policy: ReusePolicy
    endpoint_tokens: int
    complete: bool
    coverage: tuple[Span, ...]


def match_prefix(
    tree: PrefixTreeManager,
    scope: ReuseScope,
    tokens: bytes,
    groups: Sequence[GroupLayout],
    *,
    tokens_per_block: int,
    partial: bool,
    backoff_tokens: int = 0,
    also_required: Collection[GroupId] = (),
) -> PrefixMatch:
    """Return the longest usable match of `tokens`. Reads only.

    Args:
        tree: what was computed before.
        scope: whose prefixes may match.
        tokens: the tokens to look up, see `unikv.prefix_tree.token_bytes`.
        groups: the layer groups of the cache.
        tokens_per_block: token positions per block.
        partial: whether the last block may match in part.
        backoff_tokens: tokens a hosted drafter reads ahead; as many matched ones are computed again.
        also_required: OPTIONAL groups that limit the length this time.
    """
    nodes = tree.walk(scope, tokens)
    branches = tree.branches(scope, nodes, tokens) if partial else []
    diverges = len(nodes) * tokens_per_block + max((common for _, common in branches), default=0)
    length = max(0, len(nodes) * tokens_per_block - backoff_tokens)
    if branches:
        tail, length = _best_branch(branches, groups, len(nodes), tokens_per_block, backoff_tokens)
        nodes.append(tail)
    required = [g for g in groups if g.reuse_policy is ReusePolicy.REQUIRED or g.group_id in also_required]
    cut = -1
    while cut != length:
        cut, length = length, _first_cut(nodes, required, length, tokens_per_block)
        if not partial:
            length -= length % tokens_per_block
    used = tuple(nodes[: ceil_div(length, tokens_per_block)])
    return PrefixMatch(
        nodes=used, num_tokens=length, divergence_tokens=diverges, lookup_tokens=len(tokens) // TOKEN_BYTES
    )


def reuse_status(match: PrefixMatch, group: GroupLayout, tokens_per_block: int) -> ReuseStatus:
    """Return what `group` can take over at the match length."""
    length, policy = match.num_tokens, group.reuse_policy
    complete = length > 0 and policy is not ReusePolicy.PRIVATE
    if policy is ReusePolicy.OPTIONAL:
        needs = live_needs(group, length, tokens_per_block)
        complete = complete and all(_serves(match.nodes[o].pages[group.group_id], span) for o, span in needs)
    coverage = _coverage(group, length, tokens_per_block) if complete else ()
    return ReuseStatus(
        group_id=group.group_id, policy=policy, endpoint_tokens=length, complete=complete, coverage=coverage
    )


def live_ordinals(group: GroupLayout, length: int, tokens_per_block: int) -> list[int]:
    """Return the ordinals below `length` that a group needs when `length` tokens are final."""
    blocks = ceil_div(length, tokens_per_block)
    stale = stale_blocks(length, group.window, group.sink_blocks, tokens_per_block)
    return [*range(min(stale.lo, blocks)), *range(stale.hi, blocks)]


def live_needs(group: GroupLayout, length: int, tokens_per_block: int) -> Iterator[tuple[int, Span]]:
    """Yield the live ordinals at `length`, each with the offsets inside its block that will be read."""
    for ordinal in live_ordinals(group, length, tokens_per_block):
        yield ordinal, _need(group, ordinal, length, tokens_per_block)


def _need(group: GroupLayout, ordinal: int, length: int, tokens_per_block: int) -> Span:
    """Return the offsets inside a live block that will be read when `length` tokens are final."""
    first = 0 if group.window is None or ordinal < group.sink_blocks else length + 1 - group.window
    start = ordinal * tokens_per_block
    end = min(tokens_per_block, length - start)
    return Span(min(max(0, first - start), end), end)


def _best_branch(
    branches: Sequence[tuple[PrefixNode, int]],
    groups: Sequence[GroupLayout],
    ordinal: int,
    tokens_per_block: int,
    backoff_tokens: int,
) -> tuple[PrefixNode, int]:
    """Return the block that goes furthest along the prompt with all required pages, and how far the match may reach.

    Among equals the one that completes most optional groups: blocks that begin alike may have pages of other groups.
    """
    required = [group for group in groups if group.reuse_policy is ReusePolicy.REQUIRED]
    optional = [group for group in groups if group.reuse_policy is ReusePolicy.OPTIONAL]
    ranks: list[tuple[int, int]] = []
    for node, common in branches:
        reach = max(0, ordinal * tokens_per_block + common - backoff_tokens)
        reach = _reach(node, required, ordinal, reach, tokens_per_block)
        served = sum(
            _serves(node.pages[group.group_id], _need(group, ordinal, reach, tokens_per_block))
            for group in optional
            if reach > ordinal * tokens_per_block
        )
        ranks.append((reach, served))
    best = ranks.index(max(ranks))
    return branches[best][0], ranks[best][0]


def _reach(node: PrefixNode, groups: Sequence[GroupLayout], ordinal: int, length: int, tokens_per_block: int) -> int:
    """Return what is left of a match of `length` tokens that ends in `node` for the pages of this one block."""
    start, cut = ordinal * tokens_per_block, -1
    while start < length != cut:
        cut = length
        for group in groups:
            need, page = _need(group, ordinal, length, tokens_per_block), node.pages[group.group_id]
            if not _serves(page, need):
                length = start + _usable(page, need)
    return length


def _first_cut(nodes: Sequence[PrefixNode], groups: Sequence[GroupLayout], length: int, tokens_per_block: int) -> int:
    """Return the length that the first missing page of any group leaves, `length` if none is missing."""
    for group in groups:
        group_id = group.group_id
        for ordinal, need in live_needs(group, length, tokens_per_block):
            page = nodes[ordinal].pages[group_id]
            if not _serves(page, need):
                length = ordinal * tokens_per_block + _usable(page, need)
                break
    return length


def _serves(page: CachedPage | None, need: Span) -> bool:
    return not len(need) or (page is not None and page.serves(need.lo, need.hi))


def _usable(page: CachedPage | None, need: Span) -> int:
    """Return how many tokens of a block can stay in the match although its page does not serve `need`."""
    if page is None or page.valid_from > need.lo:
        return 0
    return min(page.span, need.hi)


def _coverage(group: GroupLayout, length: int, tokens_per_block: int) -> tuple[Span, ...]:
    stale = stale_blocks(length, group.window, group.sink_blocks, tokens_per_block)
    sinks = Span(0, min(stale.lo * tokens_per_block, length))
    window = Span(min(stale.hi * tokens_per_block, length), length)
    if sinks.hi == window.lo:
        return (Span(0, length),) if length else ()
    return tuple(span for span in (sinks, window) if len(span))
