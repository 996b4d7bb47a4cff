"""How workers open requests: with the prefix that the cache can serve, or without where nothing can match."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from unikv.cache_manager import UnifiedKVCacheManager
from unikv.errors import CapacityError
from unikv.ids import NO_PAGE, GroupId, RequestId
from unikv.layer_spec import ReusePolicy
from unikv.request import KVCacheRequest, ResumeResult
from workers.runner import Tables


def open_for_prefill(manager: UnifiedKVCacheManager, request_id: RequestId, prompt: tuple[int, ...]) -> KVCacheRequest:
    """Return an active request for a prompt to compute, with whatever of it target and drafter both have.

    A drafter that sees the whole prompt can only skip what its own layers have; one that sees a window is given it by
    computing the end of the prompt again.

    Raises:
        CapacityError: no pages for what was found; nothing is left open.
    """
    if not prompt:
        return manager.create_request(request_id)
    return _resume(manager.create_request(request_id, prompt, claim_limit=_prefill_limit(manager, prompt)))


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


def _prefill_limit(manager: UnifiedKVCacheManager, prompt: tuple[int, ...]) -> int:
    """Return how much of a prompt may be taken over without leaving a drafter short.

    Either as much as all optional groups have, or as much as still lets the prefill compute every position again that
    a windowed drafter reads: its first step reads from ``prompt + 2 - window`` on.
    """
    groups = [group for group in manager.layout.groups if group.reuse_policy is ReusePolicy.OPTIONAL]
    free = manager.probe(prompt)
    short = [group for group in groups if not free.status[group.group_id].complete]
    if not short or not free.num_tokens:
        return free.num_tokens
    together = manager.probe(prompt, also_required={group.group_id for group in groups}).num_tokens
    if any(group.window is None for group in short):
        return together
    windows = [group.window for group in groups if group.window is not None]
    return max(together, min(free.num_tokens, max(0, len(prompt) + 1 - max(windows))))


def _resume(request: KVCacheRequest) -> KVCacheRequest:
    complete = [s.group_id for s in request.reuse_status() if s.complete and s.policy is ReusePolicy.OPTIONAL]
    result = request.resume(complete)
    if result is not ResumeResult.OK:
        request.close()
        text = f"request {request.request_id}: {result.value}: its cached prefix cannot be brought back; wait for pages"
        raise CapacityError(text, needed_pages=request.num_blocks, free_pages=0)
    return request
