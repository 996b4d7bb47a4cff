"""The reference for a disaggregated run: the same model, drafter and passes in one process with one cache."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from unikv.budget import PoolBudget
from unikv.cache_manager import UnifiedKVCacheManager
from unikv.ids import RequestId
from unikv.layer_spec import KVLayout
from unikv.ranges import ceil_div
from unikv.speculation import SpeculationShape
from workers.prefix_reuse import open_for_prefill
from workers.runner_hf import HFRunner
from workers.speculative import GenerationResult, SpeculativeDecoder, commit_output


def run_aggregated(
    runner: HFRunner,
    prompt_ids: Sequence[int],
    *,
    max_new_tokens: int,
    eos: Collection[int] = (),
    share_draft_kv: bool = True,
    chunk_tokens: int | None = None,
    request_id: int = 0,
    reuse: bool = False,
) -> GenerationResult:
    """Prefill and decode one prompt in the manager that `runner` is bound to.

    Args:
        share_draft_kv: False makes the drafter start without the prompt's KV, as when it was not transferred.
        request_id: must not be open in the manager.
        reuse: take over what the manager has of the prompt, and publish prompt and output.

    Raises:
        CapacityError: the pool is too small for the sequence.
    """
    prompt = tuple(prompt_ids) if reuse else ()
    request, publish_at = open_for_prefill(runner.manager, RequestId(request_id), prompt)
    try:
        first = runner.prefill(request, prompt_ids, chunk_tokens=chunk_tokens, publish_at=publish_at).first_token
        draft_valid_from = 0 if share_draft_kv else len(prompt_ids)
        decoder = SpeculativeDecoder(runner, request, prompt_ids, first, draft_valid_from, max_new_tokens, eos)
        result = decoder.run()
        commit_output(request, prompt_ids, result.tokens, decoder.final_tokens)
        return result
    finally:
        request.close()


def manager_for(
    runner: HFRunner,
    *,
    max_seq_len: int,
    tokens_per_block: int = 32,
    max_draft_tokens: int = 0,
    sequences: int = 1,
    kv_layout: KVLayout = KVLayout.HND,
) -> UnifiedKVCacheManager:
    """Build a manager with room for `sequences` sequences of `max_seq_len` tokens, and bind `runner` to it.

    The caller owns the manager and closes it.
    """
    shape = None
    if max_draft_tokens:
        shape = SpeculationShape(
            max_draft_tokens=max_draft_tokens, block_width=max_draft_tokens, num_extra_kv_tokens=max_draft_tokens - 1
        )
    headroom = shape.generation_headroom(hosts_draft=True) if shape else 1
    blocks = ceil_div(max_seq_len + headroom, tokens_per_block)
    manager = UnifiedKVCacheManager(
        runner.specs(),
        tokens_per_block=tokens_per_block,
        max_seq_len=max_seq_len,
        pool=PoolBudget(pages=1 + sequences * blocks),
        kv_layout=kv_layout,
        device=str(runner.device),
        speculation=shape,
    )
    runner.bind(manager)
    return manager
