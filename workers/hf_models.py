"""Loading transformers models, one greedy pass of one, and transformers' own decoding to compare with."""

from __future__ import annotations

import inspect
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any, Final

import torch
from transformers import AutoModelForCausalLM, GenerationConfig

from unikv.errors import ConfigError, explain
from unikv.layer_spec import KVDtype
from workers.drafter import DraftOption, derive_drafter
from workers.hf_cache import PagedKVCache
from workers.model_store import resolve_model

COMPUTE_DTYPES: Final = (KVDtype.FLOAT32, KVDtype.FLOAT16, KVDtype.BFLOAT16)
"""Element types a model can compute in."""


def load_target(model: Path | str, *, dtype: str, device: torch.device) -> Any:
    """Return a causal language model for inference.

    Args:
        model: its directory, or a name `workers.model_store` knows.
        dtype: one of `COMPUTE_DTYPES`.
        device: where its weights go.

    Raises:
        ConfigError: no such model, transformers cannot load it, or another dtype.
    """
    if dtype not in COMPUTE_DTYPES:
        raise ConfigError(explain("runner", "dtype", dtype, f"one of {', '.join(COMPUTE_DTYPES)}", "choose one"))
    directory = resolve_model(str(model))
    try:
        loaded: Any = AutoModelForCausalLM.from_pretrained(
            directory, dtype=getattr(torch, dtype), local_files_only=True, attn_implementation="sdpa"
        )
    except (OSError, ValueError) as error:
        want = "a causal language model transformers loads with sdpa attention"
        cure = f"check the directory; transformers said: {error}"
        raise ConfigError(explain("runner", "model", str(directory), want, cure)) from error
    return loaded.eval().requires_grad_(False).to(device)


def load_drafter(option: DraftOption | None, target: Any) -> Any:
    """Return the drafter for `target`, or None without an option.

    Raises:
        ConfigError: it cannot be loaded or derived, or has another vocabulary.
    """
    if option is None:
        return None
    if option.path is None:
        return derive_drafter(target, option)
    dtype = str(target.dtype).removeprefix("torch.")
    drafter = load_target(option.path, dtype=dtype, device=target.device)
    if drafter.config.vocab_size != target.config.vocab_size:
        want = f"the target's {target.config.vocab_size}"
        cure = "choose a drafter with the target's tokenizer"
        raise ConfigError(explain("runner.draft", "vocab_size", drafter.config.vocab_size, want, cure))
    return drafter


def greedy_pass(model: Any, cache: PagedKVCache, tokens: Sequence[int], position: int, *, keep: int) -> list[int]:
    """Run `model` over `tokens` at `position` and return its greedy choice after each of the last `keep`.

    Raises:
        LocalProtocolError, InternalError: see `PagedKVCache.begin`.
    """
    with torch.inference_mode():
        cache.begin(position, len(tokens))
        positions = torch.arange(position, position + len(tokens), device=model.device).unsqueeze(0)
        out = model(
            input_ids=torch.tensor([list(tokens)], device=model.device),
            position_ids=positions,
            attention_mask=cache.imposed_mask(),
            use_cache=True,
            logits_to_keep=keep,
            **{_cache_keyword(model): cache},
        )
        choices: list[int] = out.logits[0].argmax(dim=-1).tolist()
        return choices


def generate_greedily(model: Any, token_ids: Sequence[int], *, max_new_tokens: int, eos: Collection[int]) -> list[int]:
    """Return what transformers' own greedy `generate` produces with its own cache, the end token included."""
    own = model.generation_config
    ids = torch.tensor([list(token_ids)], device=model.device)
    # generate() fills gaps in a given config from the model's, end tokens too: so replace the model's for the call.
    model.generation_config = GenerationConfig(  # type: ignore[no-untyped-call, unused-ignore]
        do_sample=False, max_new_tokens=max_new_tokens, eos_token_id=sorted(eos) or None, pad_token_id=0
    )
    try:
        with torch.inference_mode():
            out = model.generate(ids, attention_mask=torch.ones_like(ids))
    finally:
        model.generation_config = own
    tokens: list[int] = out[0, len(token_ids) :].tolist()
    return tokens


def _cache_keyword(model: Any) -> str:
    return "cache" if "cache" in inspect.signature(model.forward).parameters else "past_key_values"
