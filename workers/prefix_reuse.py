"""How workers open requests: with the prefix that the cache can serve, or without where nothing can match."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from unikv.cache_manager import UnifiedKVCacheManager
from unikv.claim_cap import ClaimPlan, claim_cap
from unikv.errors import CapacityError
from unikv.ids import NO_PAGE, GroupId, RequestId
from unikv.layer_spec import ReusePolicy
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
        CapacityError: no pages for what was found; nothing is left open.
    """
    if not prompt:
        return manager.create_request(request_id), None
    plan = plan_prefill(manager, prompt)
    return _resume(manager.create_request(request_id, prompt, claim_limit=plan.claim_tokens)), plan.publish_at


def open_for_decode(manager: UnifiedKVCacheManager, request_id: RequestId, prompt: tuple[int, ...]) -> KVCacheRequest:
    """Return an active request for a prompt to receive, with whatever of it is here already.

    Optional groups that lack their part are fetched in full; nothing is computed again for them.

    Raises:
        CapacityError: no pages for what was found; nothing is left open.
    """
    if not prompt:
        return manager.create_request(request_id)
    return _resume(manager.create_request(request_id, prompt))


def taken_over_tokens(manager: UnifiedKVCacheManager, request: KVCacheRequest) -> dict[GroupId, int]:
    """Return how many leading tokens of whole blocks each layer group has taken over from the cache."""
    tpb = manager.layout.tokens_per_block
    return {
        status.group_id: status.endpoint_tokens // tpb * tpb if status.complete else 0
        for status in request.reuse_status()
    }


def without(tables: Tables, tokens: Mapping[GroupId, int], tokens_per_block: int) -> Tables:
    """Return copies of `tables` without the blocks of the first `tokens` of each group: those are not to be moved."""
    masked = {group_id: np.array(row, dtype=np.int32) for group_id, row in tables.items()}
    for group_id, count in tokens.items():
        masked[group_id][: count // tokens_per_block] = NO_PAGE
    return masked


def plan_prefill(manager: UnifiedKVCacheManager, prompt: tuple[int, ...]) -> ClaimPlan:
    """Return how much of a prompt may be taken over without leaving a drafter short.

    Either as much as all optional groups have, or as much as still lets the prefill compute every position again that
    a windowed drafter reads, whichever is more.
    """
    groups = [group for group in manager.layout.groups if group.reuse_policy is ReusePolicy.OPTIONAL]
    free = manager.probe(prompt)
    short = [group for group in groups if not free.status[group.group_id].complete]
    if not short or not free.num_tokens:
        return ClaimPlan(claim_tokens=free.num_tokens, publish_at=None)
    together = manager.probe(prompt, also_required={group.group_id for group in groups}).num_tokens
    all_there = ClaimPlan(claim_tokens=together, publish_at=None)
    windows = [group.window for group in groups if group.window is not None]
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
    return all_there if together >= capped.claim_tokens else capped


def _resume(request: KVCacheRequest) -> KVCacheRequest:
    complete = [s.group_id for s in request.reuse_status() if s.complete and s.policy is ReusePolicy.OPTIONAL]
    result = request.resume(complete)
    if result is not ResumeResult.OK:
        request.close()
        text = f"request {request.request_id}: {result.value}: its cached prefix cannot be brought back; wait for pages"
        raise CapacityError(text, needed_pages=request.num_blocks, free_pages=0)
    return request
