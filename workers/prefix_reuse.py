"""How workers open requests: with the prefix that the cache can serve, or without where nothing can match."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace

import numpy as np

from unikv.cache_manager import UnifiedKVCacheManager
from unikv.claim_cap import ClaimPlan, claim_cap
from unikv.errors import CapacityError
from unikv.ids import NO_PAGE, GroupId, RequestId
from unikv.layer_spec import LayerOwner, ReusePolicy
from unikv.request import KVCacheRequest, ResumeResult
from workers.runner import Tables


def open_for_prefill(
    manager: UnifiedKVCacheManager, request_id: RequestId, prompt: tuple[int, ...]
) -> tuple[KVCacheRequest, int | None]:
    """Return an active request for a prompt to compute, with whatever of it target and drafter both have.

    A drafter that sees the whole prompt can only skip what its own layers have; one that sees a window is given it by
    computing the end of the prompt again.

    Returns:
        The request, and a position inside the prompt where a prefill chunk should end, since others will branch off
        there; None where there is no such place.

    Raises:
        CapacityError: too many pages are in use to begin; nothing is left open.
    """
    if not prompt:
        return manager.create_request(request_id), None
    plan = plan_prefill(manager, prompt)
    return _open(manager, request_id, prompt, plan.claim_tokens), plan.publish_at


def open_for_decode(manager: UnifiedKVCacheManager, request_id: RequestId, prompt: tuple[int, ...]) -> KVCacheRequest:
    """Return an active request for a prompt to receive, with whatever of it is here already.

    Optional groups that lack their part are fetched in full; nothing is computed again for them.

    Raises:
        CapacityError: too many pages are in use to begin; nothing is left open.
    """
    if not prompt:
        return manager.create_request(request_id)
    return _open(manager, request_id, prompt, manager.probe(prompt).num_tokens)


def taken_over(request: KVCacheRequest) -> dict[GroupId, int]:
    """Return how many leading tokens each layer group has taken over from the cache, those of a partial block too."""
    return {status.group_id: status.endpoint_tokens if status.complete else 0 for status in request.reuse_status()}


def taken_over_tokens(manager: UnifiedKVCacheManager, request: KVCacheRequest) -> dict[GroupId, int]:
    """Return how many leading tokens of whole blocks each layer group has taken over from the cache."""
    tpb = manager.layout.tokens_per_block
    return {group_id: tokens // tpb * tpb for group_id, tokens in taken_over(request).items()}


def without(tables: Tables, tokens: Mapping[GroupId, int], tokens_per_block: int) -> Tables:
    """Return copies of `tables` without the blocks of the first `tokens` of each group: those are not to be moved."""
    masked = {group_id: np.array(row, dtype=np.int32) for group_id, row in tables.items()}
    for group_id, count in tokens.items():
        masked[group_id][: count // tokens_per_block] = NO_PAGE
    return masked


def plan_prefill(manager: UnifiedKVCacheManager, prompt: tuple[int, ...]) -> ClaimPlan:
    """Return how much of a prompt may be taken over without leaving target or drafter short.

    Either as much as all groups have, or as much as still lets the prefill compute every position again that a windowed
    drafter reads, whichever is more. The target needs all of its KV, and PRIVATE groups have none here.
    """
    groups = [group for group in manager.layout.groups if group.reuse_policy is not ReusePolicy.REQUIRED]
    private = [group for group in groups if group.reuse_policy is ReusePolicy.PRIVATE]
    target = {group.group_id for group in groups if group.owner is LayerOwner.TARGET}
    if any(group.window is None or group.group_id in target for group in private):
        return ClaimPlan(claim_tokens=0, publish_at=None)
    free = manager.probe(prompt, also_required=target)
    short = [group for group in groups if not free.status[group.group_id].complete]
    if not short or not free.num_tokens:
        return ClaimPlan(claim_tokens=free.num_tokens, publish_at=None)
    optional = {group.group_id for group in groups if group not in private}
    together = 0 if private else manager.probe(prompt, also_required=optional).num_tokens
    all_there = ClaimPlan(claim_tokens=together, publish_at=None)
    windows = [group.window for group in groups if group.window is not None and group.group_id not in target]
    if any(group.window is None for group in short):
        return all_there
    capped = claim_cap(
        len(prompt),
        max(windows),
        free.num_tokens,
        free.divergence_tokens,
        complete=False,
        tokens_per_block=manager.layout.tokens_per_block,
        partial=manager.reuse.partial_blocks,
    )
    if together >= capped.claim_tokens:
        return all_there
    if target:  # nearer the start a window of the target may be gone
        claim_tokens = manager.probe(prompt, claim_limit=capped.claim_tokens, also_required=target).num_tokens
        return replace(capped, claim_tokens=claim_tokens)
    return capped


def _open(
    manager: UnifiedKVCacheManager, request_id: RequestId, prompt: tuple[int, ...], claim_tokens: int
) -> KVCacheRequest:
    """Return an active request that has taken over as much of `claim_tokens` as there are pages for.

    Taking over a block in part needs its page and one for the copy at the same time, which is one page more than the
    prompt itself may need.
    """
    result = ResumeResult.OK
    for limit in _claims(manager, prompt, claim_tokens):
        request = manager.create_request(request_id, prompt, claim_limit=limit)
        complete = [s.group_id for s in request.reuse_status() if s.complete and s.policy is ReusePolicy.OPTIONAL]
        result = request.resume(complete)
        if result is ResumeResult.OK:
            return request
        request.close()
    text = f"request {request_id}: {result.value}: its cached prefix cannot be brought back; wait for pages"
    raise CapacityError(text, needed_pages=0, free_pages=0)


def _claims(manager: UnifiedKVCacheManager, prompt: tuple[int, ...], claim_tokens: int) -> Iterator[int]:
    """Yield how much to take over, what to be content with if there are no pages for that, and nothing."""
    yield claim_tokens
    whole = claim_tokens - claim_tokens % manager.layout.tokens_per_block
    if 0 < whole < claim_tokens and all(s.complete for s in manager.probe(prompt, claim_limit=whole).status):
        yield whole
    if claim_tokens:
        yield 0
