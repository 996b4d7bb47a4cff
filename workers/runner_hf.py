"""Runs a transformers model, and its drafter, on the pages of a `UnifiedKVCacheManager`.

The context side calls `HFRunner.prefill`, the generation side `workers.speculative.SpeculativeDecoder`; the
aggregated reference calls both on one request. All three go through the same passes with the same shapes, so their
tokens and their acceptance are equal wherever the KV is.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch

from unikv.cache_manager import UnifiedKVCacheManager
from unikv.errors import LocalProtocolError, SpecError, explain
from unikv.layer_spec import KVCacheLayerSpec, KVDtype, ReusePolicy
from unikv.request import KVCacheRequest
from workers.drafter import DraftOption
from workers.hf_cache import PagedKVCache
from workers.hf_models import generate_greedily, greedy_pass, load_drafter, load_target
from workers.hf_specs import AttentionPlan, LayerPlan, check_layers, layer_specs_for
from workers.runner import OnLayer


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
    """Target and drafter of one process. Owns the weights, borrows the manager. One thread uses it at a time.

    Args:
        model: directory of the target, or ``smollm2``.
        draft: None, a path, ``{"quantize_bits": N}`` or ``{"drop_layers": N}``.
        dtype: float32, float16 or bfloat16, of the computation.
        draft_window: attention window in tokens imposed on the drafter.
        device: where weights and pages are.
        torch_threads: threads of one operation, for the whole process; None leaves torch's choice.

    Attributes:
        target, drafter: the models (`drafter` None: there is none).

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
        if torch_threads is not None:
            torch.set_num_threads(torch_threads)
        self.draft_window = draft_window
        self.device = torch.device(device)
        self.target = load_target(model, dtype=dtype, device=self.device)
        self.drafter = load_drafter(DraftOption.parse(draft), self.target)
        self.dtype = KVDtype(dtype)
        # Checks both configs, so that a model without pages of this kind fails here and not at the first pass.
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
        """Use `manager` from now on. Without any draft layers in it the drafter rests.

        Raises:
            ConfigError: its layers are not those of the models; see `workers.hf_specs.check_layers`.
        """
        layout = manager.layout
        rests = not manager.draft_layer_ids
        expected = [spec for spec in self._plan.specs if not (rests and spec.is_draft)]
        check_layers(expected, layout.specs, max_seq_len=layout.max_seq_len)
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
        self,
        request: KVCacheRequest,
        token_ids: Sequence[int],
        *,
        chunk_tokens: int | None = None,
        publish_at: int | None = None,
        on_layer: OnLayer | None = None,
    ) -> PrefillResult:
        """Run target and drafter over a prompt; afterwards history is its length and all of its KV is in the pages.

        Args:
            request: an active request of the bound manager, which has computed nothing yet.
            token_ids: the prompt, at least one token.
            chunk_tokens: tokens per pass; None runs the prompt in one.
            publish_at: end a pass at this position too.
            on_layer: told of every layer that a pass has written.

        A request that took over a prefix from the cache begins behind it. What is computed is committed, if the
        request takes part in prefix reuse.

        Raises:
            SpecError: an empty prompt or chunk, or a prompt longer than the longest sequence.
            LocalProtocolError: the request's history reaches the end of the prompt already.
            CapacityError: no pages for a chunk; what earlier chunks took is still there.
        """
        prompt_tokens = len(token_ids)
        chunk = prompt_tokens if chunk_tokens is None else chunk_tokens
        _check_prefill(request, prompt_tokens, chunk)
        target, draft = self._open_caches(request, draft_valid_from=0, on_layer=on_layer)
        choice = 0
        for position, end in _passes(request.history_tokens, prompt_tokens, chunk, publish_at):
            tokens = token_ids[position:end]
            needed = self.manager.context_capacity(position, len(tokens))
            request.resize(capacity_tokens=max(needed, request.capacity_tokens), history_tokens=position)
            choice = greedy_pass(self.target, target, tokens, position, keep=1)[0]
            if draft is not None:
                greedy_pass(self.drafter, draft, tokens, position, keep=1)
            if request.committing:
                request.commit(tokens)
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
        return tuple(generate_greedily(self.target, token_ids, max_new_tokens=max_new_tokens, eos=eos))

    @property
    def _draft_plan(self) -> AttentionPlan | None:
        """The drafter's layers, where there is a drafter and the manager has room for it."""
        return self._plan.draft if self.manager.draft_layer_ids else None

    def _layer_plan(self, kv_dtype: KVDtype, draft_reuse: ReusePolicy) -> LayerPlan:
        draft_config: Any = None if self.drafter is None else self.drafter.config
        window = self.draft_window
        return layer_specs_for(
            self.target.config, draft_config, dtype=kv_dtype, draft_window=window, draft_reuse=draft_reuse
        )

    def _open_caches(
        self, request: KVCacheRequest, *, draft_valid_from: int, on_layer: OnLayer | None = None
    ) -> tuple[PagedKVCache, PagedKVCache | None]:
        target, plan = PagedKVCache(self.manager, request, self._plan.target, on_layer=on_layer), self._draft_plan
        if plan is None:
            return target, None
        return target, PagedKVCache(
            self.manager, request, plan, valid_from=draft_valid_from, skips_unwritten=True, on_layer=on_layer
        )


class HFSequence:
    """One request's target and drafter; keeps no position of its own (see `workers.speculative`)."""

    def __init__(self, runner: HFRunner, target: PagedKVCache, draft: PagedKVCache | None) -> None:
        self._runner = runner
        self._target = target
        self._draft = draft

    def verify(self, tokens: Sequence[int], position: int) -> list[int]:
        """Run the target over `tokens` and return its greedy choice after each of them."""
        return greedy_pass(self._runner.target, self._target, tokens, position, keep=len(tokens))

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
            proposals += greedy_pass(self._runner.drafter, self._draft, tokens, position, keep=1)
            position, tokens = position + len(tokens), proposals[-1:]
        return proposals


def _passes(begin: int, end: int, chunk_tokens: int, publish_at: int | None) -> Iterator[tuple[int, int]]:
    """Yield the half-open ranges of positions of every pass."""
    ends = {*range(begin + chunk_tokens, end, chunk_tokens), end}
    if publish_at is not None and begin < publish_at < end:
        ends.add(publish_at)
    yield from pairwise([begin, *sorted(ends)])


def _check_prefill(request: KVCacheRequest, prompt_tokens: int, chunk_tokens: int) -> None:
    thing = f"request {request.request_id}"
    for field, tokens in (("token_ids", prompt_tokens), ("chunk_tokens", chunk_tokens)):
        if tokens < 1:
            raise SpecError(explain(thing, field, tokens, "at least 1 token", "pass a prompt and a chunk of 1 or more"))
    if request.history_tokens >= prompt_tokens:
        want, cure = f"less than the prompt's {prompt_tokens}", "leave the last token of a prompt to compute"
        raise LocalProtocolError(explain(thing, "history_tokens", request.history_tokens, want, cure))
