"""What a disaggregated run of a model is compared with: one process doing everything, and transformers itself."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from transfer.hello import ParallelPosition, Side
from unikv.cache_manager import UnifiedKVCacheManager
from unikv.errors import ConfigError, explain
from workers.aggregated import run_aggregated
from workers.config import HFRunnerConfig, PairConfig
from workers.model_chat import ChatFormat
from workers.model_store import resolve_model
from workers.model_worker import load_runner
from workers.rank_device import rank_device
from workers.runner_hf import HFRunner
from workers.speculative import GenerationResult
from workers.topology import pool_budget, rank_specs, speculation_shape
from workers.workload import Job


@dataclass(frozen=True, slots=True, kw_only=True)
class Reference:
    """One prompt's reference.

    Attributes:
        aggregated: prefill and decode in one process with one cache.
        generated: tokens of transformers' own greedy `generate` with its own cache; None where the dtype is not
            float32, in which batched and single passes may round differently.
    """

    aggregated: GenerationResult
    generated: tuple[int, ...] | None


def num_turns(pair: PairConfig) -> int:
    """Return how many prompts the workload has.

    Raises:
        ConfigError: none.
    """
    turns = sum(map(len, pair.workload.conversations()))
    if not turns:
        raise ConfigError(explain(pair.source, "workload.prompts", "nothing", "at least one prompt", "add prompts"))
    return turns


def run_references(pair: PairConfig, on_finished: Callable[[], None]) -> tuple[list[Job], list[Reference]]:
    """Run the workload in this process, with the pair's own cache settings; calls `on_finished` after each turn.

    Returns:
        The prompts as jobs, where a later turn of a conversation continues what was generated, and their references.

    Raises:
        ConfigError: no prompts, or one that is too long for ``max_seq_len``.
    """
    assert isinstance(pair.runner, HFRunnerConfig)
    num_turns(pair)
    chat, jobs, references = ChatFormat(resolve_model(pair.runner.model)), list[Job](), list[Reference]()
    with _own_cache(pair) as runner:
        for turns in pair.workload.conversations():
            for number, text in enumerate(turns):
                after = len(jobs) - 1 if number else None
                if after is None:
                    prompt = chat.first(text)
                else:
                    prompt = chat.following(jobs[after].prompt, references[after].aggregated.tokens, text)
                jobs.append(_job(pair, len(jobs) + 1, prompt, after))
                references.append(_reference(runner, jobs[-1], pair.runner))
                on_finished()
    return jobs, references


@contextmanager
def _own_cache(pair: PairConfig) -> Iterator[HFRunner]:
    assert isinstance(pair.runner, HFRunnerConfig)
    side = pair.side(Side.GENERATION)
    device = rank_device(side, 0)
    runner = load_runner(pair.runner, side, device=device)
    manager = UnifiedKVCacheManager(
        rank_specs(side, ParallelPosition()),
        tokens_per_block=side.tokens_per_block,
        max_seq_len=side.max_seq_len,
        pool=pool_budget(side),
        kv_layout=side.kv_layout,
        device=device,
        speculation=speculation_shape(side),
    )
    try:
        runner.bind(manager)
        yield runner
    finally:
        manager.close()


def _job(pair: PairConfig, number: int, prompt: tuple[int, ...], after: int | None) -> Job:
    limit = pair.context.max_seq_len - pair.workload.output_tokens
    if not 0 < len(prompt) <= limit:
        want = f"1 to {limit} tokens (max_seq_len less output_tokens)"
        raise ConfigError(explain(f"prompt {number}", "length", f"{len(prompt)} tokens", want, "shorten it"))
    output_tokens = pair.workload.output_tokens
    return Job(prompt=prompt, prompt_tokens=len(prompt), max_new_tokens=output_tokens, after=after)


def _reference(runner: HFRunner, job: Job, config: HFRunnerConfig) -> Reference:
    eos, longest = runner.eos_token_ids, job.max_new_tokens
    aggregated = run_aggregated(
        runner, job.prompt, max_new_tokens=longest, eos=eos, reuse=True, chunk_tokens=config.chunk_tokens
    )
    exact = config.dtype == "float32"
    generated = runner.reference_generate(job.prompt, max_new_tokens=longest, eos=eos) if exact else None
    return Reference(aggregated=aggregated, generated=generated)
