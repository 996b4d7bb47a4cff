"""How much of a prompt to take over when a windowed drafter cannot take over its window.

Prompt of L tokens, a drafter with a window of W tokens, a match of M. The first draft step behind the prompt reads
the drafter's KV from position L + 2 - W on. Where the cache has not got it, prefill must compute it again::

    0 ................ c ............. L
                       |   computed    |
                        |<-- W - 1 --->|   what the drafter reads; its KV at c itself would need the token before

Where the prompt leaves something computed before near its end, others will leave it there too. For them the whole
window at that branch is computed and published, so that they can take it over.
"""

from __future__ import annotations

from dataclasses import dataclass

from unikv.errors import SpecError, explain


@dataclass(frozen=True, slots=True, kw_only=True)
class ClaimPlan:
    """What to take over, and where to stop on the way.

    Attributes:
        claim_tokens: most tokens to take over: the `claim_limit` of `create_request`.
        publish_at: end a prefill chunk at this position and commit it, so that the window is there for the next one
            that branches off; None where nobody will look for it.
    """

    claim_tokens: int
    publish_at: int | None


def claim_cap(
    prompt_tokens: int,
    window: int,
    match_tokens: int,
    divergence_tokens: int | None,
    *,
    complete: bool,
    tokens_per_block: int,
    partial: bool,
) -> ClaimPlan:
    """Return how much of a match to claim for a drafter whose windowed group is OPTIONAL.

    A match that ends inside a block may be incomplete only for that block: look the last full block up first (a probe
    with ``claim_limit=match // tokens_per_block * tokens_per_block``) and pass what is found there if it is complete.
    A receiver that gets the window by a transfer needs no cap.

    Args:
        prompt_tokens: length of the prompt.
        window: tokens the drafter's layers see, their own included.
        match_tokens: tokens the target could take over.
        divergence_tokens: how far the prompt is the same as one computed before, None if nobody knows.
        complete: whether the drafter's group is complete at the match.
        tokens_per_block: token positions per block.
        partial: whether a block may be taken over in part.

    Raises:
        SpecError: a count is negative, or the window or the block is empty.
    """
    least = {"window": 1, "tokens_per_block": 1, "prompt_tokens": 0, "match_tokens": 0}
    counts = {"window": window, "tokens_per_block": tokens_per_block}
    counts |= {"prompt_tokens": prompt_tokens, "match_tokens": match_tokens}
    for name, value in counts.items():
        if value < least[name]:
            raise SpecError(explain("claim cap", name, value, f">= {least[name]} tokens", "pass a count of tokens"))
    unit = 1 if partial else tokens_per_block
    claim = max(0, min(match_tokens, prompt_tokens - 1))
    if complete:
        return ClaimPlan(claim_tokens=claim - claim % unit, publish_at=None)
    claim = max(0, min(claim, prompt_tokens + 1 - window))
    branch = (divergence_tokens or 0) // unit * unit
    publish_at = branch if branch and prompt_tokens - window <= branch < prompt_tokens else None
    if publish_at is not None:
        claim = min(claim, max(0, publish_at - window))
    return ClaimPlan(claim_tokens=claim - claim % unit, publish_at=publish_at)
