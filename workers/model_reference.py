"""What a disaggregated run of a model is compared with: one process doing everything, and transformers itself."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from transformers import AutoTokenizer

from transfer.hello import ParallelPosition, Side
from unikv.cache_manager import UnifiedKVCacheManager
from unikv.errors import ConfigError, explain
from workers.aggregated import run_aggregated
from workers.config import HFRunnerConfig, PairConfig
from workers.model_store import resolve_model
from workers.model_worker import load_runner
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


def model_jobs(pair: PairConfig) -> list[Job]:
    """Return the workload's prompts as token ids, through the model's chat template where it has one.

    Raises:
        ConfigError: no prompts, or one that is too long for ``max_seq_len``.
    """
    assert isinstance(pair.runner, HFRunnerConfig)
    tokenizer = AutoTokenizer.from_pretrained(resolve_model(pair.runner.model))
    limit = pair.context.max_seq_len - pair.workload.output_tokens
    jobs = []
    for number, text in enumerate(pair.workload.texts(), start=1):
        ids = _encode(tokenizer, text)
        if not 0 < len(ids) <= limit:
            want = f"1 to {limit} tokens (max_seq_len less output_tokens)"
            raise ConfigError(explain(f"prompt {number}", "length", f"{len(ids)} tokens", want, "shorten it"))
        jobs.append(Job(prompt=ids, prompt_tokens=len(ids), max_new_tokens=pair.workload.output_tokens))
    if not jobs:
        raise ConfigError(explain(pair.source, "workload.prompts", "nothing", "at least one prompt", "add prompts"))
    return jobs


def decode_text(pair: PairConfig, tokens: tuple[int, ...]) -> str:
    """Return the text of `tokens`."""
    assert isinstance(pair.runner, HFRunnerConfig)
    tokenizer = AutoTokenizer.from_pretrained(resolve_model(pair.runner.model))
    return str(tokenizer.decode(list(tokens), skip_special_tokens=True))


def run_references(pair: PairConfig, jobs: list[Job], on_finished: Callable[[], None]) -> list[Reference]:
    """Run every job in this process, with the pair's own cache settings; calls `on_finished` after each."""
    assert isinstance(pair.runner, HFRunnerConfig)
    side = pair.side(Side.GENERATION)
    runner = load_runner(pair.runner, side)
    manager = UnifiedKVCacheManager(
        rank_specs(side, ParallelPosition()),
        tokens_per_block=side.tokens_per_block,
        max_seq_len=side.max_seq_len,
        pool=pool_budget(side),
        kv_layout=side.kv_layout,
        speculation=speculation_shape(side),
    )
    try:
        runner.bind(manager)
        references = []
        for job in jobs:
            references.append(_reference(runner, job, exact=pair.runner.dtype == "float32"))
            on_finished()
        return references
    finally:
        manager.close()


def _reference(runner: HFRunner, job: Job, *, exact: bool) -> Reference:
    eos = runner.eos_token_ids
    aggregated = run_aggregated(runner, job.prompt, max_new_tokens=job.max_new_tokens, eos=eos)
    generated = runner.reference_generate(job.prompt, max_new_tokens=job.max_new_tokens, eos=eos) if exact else None
    return Reference(aggregated=aggregated, generated=generated)


def _encode(tokenizer: object, text: str) -> tuple[int, ...]:
    if getattr(tokenizer, "chat_template", None):
        chat = [{"role": "user", "content": text}]
        encoded = tokenizer.apply_chat_template(  # type: ignore[attr-defined]
            chat, add_generation_prompt=True, tokenize=True, return_dict=True
        )
    else:
        encoded = tokenizer(text)  # type: ignore[operator]
    return tuple(int(token) for token in encoded["input_ids"])
