"""Runs a transformers model, and its drafter, on the pages of a `UnifiedKVCacheManager`.

The context side calls `HFRunner.prefill`, the generation side `workers.speculative.SpeculativeDecoder`; the
aggregated reference calls both on one request. All three go through the same passes with the same shapes, so their
tokens and their acceptance are equal bit for bit where the KV is.
"""

from __future__ import annotations

import inspect
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, GenerationConfig

from unikv.cache_manager import UnifiedKVCacheManager
from unikv.errors import ConfigError, LocalProtocolError, SpecError, explain
from unikv.layer_spec import KVCacheLayerSpec, KVDtype, ReusePolicy
from unikv.request import KVCacheRequest
from workers.drafter import DraftOption, derive_drafter
from workers.hf_cache import PagedKVCache
from workers.hf_specs import AttentionPlan, LayerPlan, layer_specs_for

_MODEL_DTYPES = {
    kind.value: getattr(torch, kind.value) for kind in (KVDtype.FLOAT32, KVDtype.FLOAT16, KVDtype.BFLOAT16)
}


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefillResult:
    """What the context side knows after the prompt.

    Attributes:
        first_token: the target's greedy choice after the prompt.
        draft_tokens: proposals for the positions after it; empty here, the generation side drafts them itself.
    """

    first_token: int
    draft_tokens: tuple[int, ...] = ()


class HFRunner:
    """Target and drafter of one process. Owns the weights, borrows the manager.

    Args:
        model: directory of the target.
        draft: None, a path, ``{"quantize_bits": N}`` or ``{"drop_layers": N}``.
        dtype: float32, float16 or bfloat16, of the computation.
        draft_window: attention window in tokens imposed on the drafter.
        device: where weights and pages are.
        torch_threads: threads of one operation, for the whole process; None leaves torch's choice.

    Raises:
        ConfigError: model, draft or dtype cannot be used together or at all.
    """

    def __init__(
        self,
        model: Path | str,
        draft: object = None,
        *,
        dtype: str = "float32",
        draft_window: int | None = None,
        device: str = "cpu",
        torch_threads: int | None = None,
    ) -> None:
        if dtype not in _MODEL_DTYPES:
            raise ConfigError(explain("runner", "dtype", dtype, f"one of {', '.join(_MODEL_DTYPES)}", "choose one"))
        if torch_threads is not None:
            torch.set_num_threads(torch_threads)
        self.dtype = KVDtype(dtype)
        self.device = torch.device(device)
        self.draft_window = draft_window
        self.target = _load(Path(model), _MODEL_DTYPES[dtype], self.device)
        self.drafter = self._make_drafter(DraftOption.parse(draft))
        # Checks both configs, so that an unusable model fails here and not at the first pass.
        self._plan = self._layer_plan(self.dtype, ReusePolicy.OPTIONAL)
        self._manager: UnifiedKVCacheManager | None = None

    def specs(
        self, *, kv_dtype: KVDtype | None = None, draft_reuse: ReusePolicy = ReusePolicy.OPTIONAL
    ) -> tuple[KVCacheLayerSpec, ...]:
        """Return the layers a cache for this pair needs, target first, then draft.

        Args:
            kv_dtype: element type of the pages; None means the computation's.
            draft_reuse: what draft layers mean to prefix reuse.
        """
        return self._layer_plan(kv_dtype or self.dtype, draft_reuse).specs

    def bind(self, manager: UnifiedKVCacheManager) -> None:
        """Use `manager` from now on.

        Raises:
            ConfigError: it lacks one of the target's layers, or has some but not all of the drafter's.
        """
        held = {spec.layer_id for spec in manager.layout.specs}
        for plan in (self._plan.target, self._plan.draft):
            missing = set(plan.layer_ids) - held if plan else set()
            if missing and (plan is self._plan.target or len(missing) < len(plan.layer_ids if plan else ())):
                cure = "build the manager from the runner's specs()"
                raise ConfigError(explain("manager", "layers missing", sorted(missing), "all layers of a model", cure))
        self._manager = manager

    @property
    def manager(self) -> UnifiedKVCacheManager:
        """The manager in use.

        Raises:
            LocalProtocolError: `bind` was not called.
        """
        if self._manager is None:
            raise LocalProtocolError(explain("runner", "manager", None, "a bound manager", "call bind(manager) first"))
        return self._manager

    @property
    def max_draft_tokens(self) -> int:
        """Most tokens proposed a step; 0 without a drafter or where the manager does not speculate."""
        speculation = self.manager.speculation
        return 0 if speculation is None or self._draft_plan is None else speculation.max_draft_tokens

    @property
    def eos_token_ids(self) -> tuple[int, ...]:
        """Tokens that end a sequence according to the model; may be empty."""
        eos = self.target.generation_config.eos_token_id
        return tuple(eos) if isinstance(eos, list | tuple) else () if eos is None else (eos,)

    def prefill(
        self, request: KVCacheRequest, token_ids: Sequence[int], *, chunk_tokens: int | None = None
    ) -> PrefillResult:
        """Run target and drafter over a prompt; afterwards history is its length and all of its KV is in the pages.

        Args:
            request: a fresh request of the bound manager.
            token_ids: the prompt, at least one token.
            chunk_tokens: tokens per pass; None runs the prompt in one.

        Raises:
            SpecError: an empty prompt or chunk.
            LocalProtocolError: the request has a history already.
            CapacityError: no pages for a chunk; earlier chunks stay.
        """
        prompt_tokens = len(token_ids)
        chunk = prompt_tokens if chunk_tokens is None else chunk_tokens
        _check_prefill(request, prompt_tokens, chunk)
        caches = self._open_caches(request, draft_valid_from=0)
        choice = 0
        for position in range(0, prompt_tokens, chunk):
            tokens = token_ids[position : position + chunk]
            needed = self.manager.context_capacity(position, len(tokens))
            request.resize(capacity_tokens=max(needed, request.capacity_tokens), history_tokens=position)
            choice = self._forward(self.target, caches[0], tokens, position, keep=1)[0]
            if caches[1] is not None:
                self._forward(self.drafter, caches[1], tokens, position, keep=1)
        request.resize(history_tokens=prompt_tokens)
        return PrefillResult(first_token=choice)

    def open_sequence(self, request: KVCacheRequest, *, draft_valid_from: int) -> HFSequence:
        """Return the request's two models for decoding; draft KV before `draft_valid_from` is never read."""
        target, draft = self._open_caches(request, draft_valid_from=draft_valid_from)
        return HFSequence(self, target, draft)

    def reference_generate(
        self, token_ids: Sequence[int], *, max_new_tokens: int, eos: Collection[int] = ()
    ) -> tuple[int, ...]:
        """Return what transformers' own greedy `generate` produces with its own cache, for comparison."""
        own = self.target.generation_config
        ids = torch.tensor([list(token_ids)], device=self.device)
        # generate() fills gaps in a given config from the model's, end tokens too: so replace the model's for the call.
        self.target.generation_config = GenerationConfig(
            do_sample=False, max_new_tokens=max_new_tokens, eos_token_id=sorted(eos) or None, pad_token_id=0
        )
        try:
            with torch.inference_mode():
                out = self.target.generate(ids, attention_mask=torch.ones_like(ids))
        finally:
            self.target.generation_config = own
        return tuple(out[0, len(token_ids) :].tolist())

    @property
    def _draft_plan(self) -> AttentionPlan | None:
        """The drafter's layers, where there is a drafter and the manager has room for it."""
        return self._plan.draft if self.manager.draft_layer_ids else None

    def _layer_plan(self, kv_dtype: KVDtype, draft_reuse: ReusePolicy) -> LayerPlan:
        draft_config = None if self.drafter is None else self.drafter.config
        return layer_specs_for(
            self.target.config,
            draft_config,
            dtype=kv_dtype,
            draft_window=self.draft_window,
            draft_reuse=draft_reuse,
        )

    def _make_drafter(self, option: DraftOption | None) -> Any:
        if option is None or option.path is None:
            return None if option is None else derive_drafter(self.target, option)
        drafter = _load(option.path, self.target.dtype, self.device)
        if drafter.config.vocab_size != self.target.config.vocab_size:
            want = f"the target's {self.target.config.vocab_size}"
            cure = "choose a drafter with the target's tokenizer"
            raise ConfigError(explain("runner.draft", "vocab_size", drafter.config.vocab_size, want, cure))
        return drafter

    def _open_caches(
        self, request: KVCacheRequest, *, draft_valid_from: int
    ) -> tuple[PagedKVCache, PagedKVCache | None]:
        target = PagedKVCache(self.manager, request, self._plan.target)
        plan = self._draft_plan
        draft = None if plan is None else PagedKVCache(self.manager, request, plan, valid_from=draft_valid_from)
        return target, draft

    def _forward(
        self, model: Any, cache: PagedKVCache, tokens: Sequence[int], position: int, *, keep: int
    ) -> list[int]:
        """Run `model` over `tokens` at `position` and return its greedy choice after each of the last `keep`."""
        with torch.inference_mode():
            cache.begin(position, len(tokens))
            positions = torch.arange(position, position + len(tokens), device=self.device).unsqueeze(0)
            out = model(
                input_ids=torch.tensor([list(tokens)], device=self.device),
                position_ids=positions,
                attention_mask=cache.imposed_mask(),
                use_cache=True,
                logits_to_keep=keep,
                **{_cache_keyword(model): cache},
            )
            choices: list[int] = out.logits[0].argmax(dim=-1).tolist()
            return choices


class HFSequence:
    """One request's target and drafter; keeps no position of its own (see `workers.speculative`)."""

    def __init__(self, runner: HFRunner, target: PagedKVCache, draft: PagedKVCache | None) -> None:
        self._runner = runner
        self._target = target
        self._draft = draft

    def verify(self, tokens: Sequence[int], position: int) -> list[int]:
        """Run the target over `tokens` and return its greedy choice after each of them."""
        return self._runner._forward(self._runner.target, self._target, tokens, position, keep=len(tokens))

    def propose(self, unseen: Sequence[int], position: int, count: int) -> list[int]:
        """Run the drafter over `unseen` and return its `count` greedy continuations, one pass each.

        Raises:
            LocalProtocolError: there is no drafter.
        """
        if self._draft is None:
            raise LocalProtocolError(explain("runner", "drafter", None, "a drafter", "configure runner.draft"))
        proposals: list[int] = []
        tokens = list(unseen)
        while len(proposals) < count:
            proposals += self._runner._forward(self._runner.drafter, self._draft, tokens, position, keep=1)
            position, tokens = position + len(tokens), proposals[-1:]
        return proposals


def _load(directory: Path, dtype: torch.dtype, device: torch.device) -> Any:
    try:
        model = AutoModelForCausalLM.from_pretrained(
            directory, dtype=dtype, local_files_only=True, attn_implementation="sdpa"
        )
    except (OSError, ValueError) as error:
        want = "a causal language model transformers loads with sdpa attention"
        cure = f"check the directory; transformers said: {error}"
        raise ConfigError(explain("runner", "model", str(directory), want, cure)) from error
    return model.eval().requires_grad_(False).to(device)


def _cache_keyword(model: Any) -> str:
    return "cache" if "cache" in inspect.signature(model.forward).parameters else "past_key_values"


def _check_prefill(request: KVCacheRequest, prompt_tokens: int, chunk_tokens: int) -> None:
    thing = f"request {request.request_id}"
    for field, tokens in (("token_ids", prompt_tokens), ("chunk_tokens", chunk_tokens)):
        if tokens < 1:
            raise SpecError(explain(thing, field, tokens, "at least 1 token", "pass a prompt and a chunk of 1 or more"))
    if request.history_tokens:
        cure = "prefill a fresh request; this runner takes no cached prefix"
        raise LocalProtocolError(explain(thing, "history_tokens", request.history_tokens, "0 tokens", cure))
