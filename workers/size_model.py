"""How many requests of a length fit into a rank's memory, for a model nobody has to load.

Every function returns what the command prints with ``--json``. Numbers are of one rank, sizes are bytes. Bytes said to
be affine are those of `unikv.sizing`; everything else is in whole pages, with the null page of every pool group.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any, Final

from unikv.errors import ConfigError, SpecError, explain
from unikv.layer_spec import KVCacheLayerSpec, KVDtype
from unikv.layout import CacheLayout, build_layout, bytes_per_token
from unikv.sizing import CacheCost
from unikv.sizing_fit import (
    chunk_pages,
    longest_request,
    null_bytes,
    pool_bytes,
    request_pages,
    requests_for_bytes,
    slots_for_requests,
)
from unikv.speculation import NO_SPECULATION, SpeculationShape
from workers.dry import MAX_COUNT, MAX_RANKS, check_count
from workers.model_config import ModelConfig, read_model_config

Report = dict[str, Any]

MAX_DRAFT_TOKENS: Final = 1 << 16
MAX_TOKENS_PER_BLOCK: Final = 1 << 16


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelQuestion:
    """What a person planning a deployment asks.

    Attributes:
        model, draft_model: directories with a config.json; `draft_model` None without a drafter.
        tp: tensor-parallel ranks; answers are per rank.
        tokens: length of each request, prompt and answer; None: the longest sequence.
        requests: requests whose need is wanted.
        memory_bytes: what a rank has for KV.
        dtype, draft_dtype: element types of the caches; None takes the models'.
        draft_tokens: drafts verified per step, with a drafter.
        tokens_per_block: token positions of one page.
        iteration_tokens: tokens one iteration has in prefill on this rank; 0 where all prompts come from others.
        max_seq_len: longest sequence in tokens; None takes the model's.
    """

    model: str
    memory_bytes: int
    tokens: int | None = None
    requests: int = 1
    draft_model: str | None = None
    tp: int = 1
    dtype: KVDtype | None = None
    draft_dtype: KVDtype | None = None
    draft_tokens: int = 5
    tokens_per_block: int = 32
    iteration_tokens: int = 0
    max_seq_len: int | None = None

    def check(self) -> None:
        """Refuse numbers out of range.

        Raises:
            ConfigError: naming the option.
        """
        for option, value, low, high in (
            ("--tp", self.tp, 1, MAX_RANKS),
            ("--requests", self.requests, 1, MAX_COUNT),
            ("--draft-tokens", self.draft_tokens, 1, MAX_DRAFT_TOKENS),
            ("--tokens-per-block", self.tokens_per_block, 1, MAX_TOKENS_PER_BLOCK),
            ("--iteration-tokens", self.iteration_tokens, 0, MAX_COUNT),
        ):
            check_count("size", option, value, low, high)
        if self.max_seq_len is not None:
            check_count("size", "--max-seq-len", self.max_seq_len, 1, MAX_COUNT)
        if self.draft_model is None and self.draft_dtype is not None:
            want = "no dtype without a drafter"
            raise ConfigError(explain("size", "--draft-dtype", self.draft_dtype, want, "pass --draft-model"))


def model_report(question: ModelQuestion) -> Report:
    """Answer a question.

    Returns:
        The model, the load, and what the two deployments need and hold: `without_draft`, and `with_draft` (None without
        a drafter). The affine cost and the groups beside them are those of all layers there are.

    Raises:
        ConfigError: a config is missing or wrong, or a number does not fit the model.
    """
    question.check()
    model = read_model_config(question.model)
    draft = None if question.draft_model is None else read_model_config(question.draft_model, "--draft-model")
    longest = _longest(model, question)
    tokens = longest if question.tokens is None else question.tokens
    if not 1 <= tokens <= longest:
        want = f"in [1, {longest}], the longest sequence"
        raise ConfigError(explain("size", "--tokens", tokens, want, "shorten it, or pass --max-seq-len"))
    target = model.specs(tp=question.tp, dtype=question.dtype)
    plain = _Deployment(target, NO_SPECULATION.generation_headroom(hosts_draft=False), longest, tokens, question)
    layers, both = [_layers("target", model, target)], None
    if draft is not None:
        drafter = draft.specs(tp=question.tp, dtype=question.draft_dtype, draft=True, first_id=len(target))
        layers.append(_layers("draft", draft, drafter))
        both = _Deployment([*target, *drafter], _headroom(question.draft_tokens), longest, tokens, question)
    return {
        "model": model.path,
        "draft_model": None if draft is None else draft.path,
        "tp": question.tp,
        "tokens": tokens,
        "requests": question.requests,
        "memory_bytes": question.memory_bytes,
        "tokens_per_block": question.tokens_per_block,
        "iteration_tokens": question.iteration_tokens,
        "draft_tokens": 0 if draft is None else question.draft_tokens,
        "max_seq_len": longest,
        "layers": layers,
        **(both or plain).costs(),
        "groups": (both or plain).groups(),
        "without_draft": plain.answer(),
        "with_draft": None if both is None else both.answer(),
    }


class _Deployment:
    """One set of layers under the load of the question."""

    def __init__(
        self, specs: Sequence[KVCacheLayerSpec], headroom: int, longest: int, tokens: int, question: ModelQuestion
    ) -> None:
        fields: dict[str, Any] = {"tokens_per_block": question.tokens_per_block, "max_seq_len": longest}
        try:
            self._layout: CacheLayout = build_layout(specs, **fields)
        except SpecError as error:
            raise ConfigError(f"size: {error}") from None
        self._cost = CacheCost.from_specs(
            specs,
            generation_headroom_tokens=headroom,
            max_requests=question.requests,
            max_num_tokens=question.iteration_tokens,
            **fields,
        )
        self._load = {"headroom_tokens": headroom, "chunk_tokens": question.iteration_tokens}
        self._longest, self._tokens, self._question = longest, tokens, question

    def costs(self) -> Report:
        """Return the affine cost of the load, and how many tokens of as many requests fit into the memory."""
        return {
            "headroom_tokens": self._load["headroom_tokens"],
            "bytes_per_token": self._cost.generation_bytes_per_token,
            "context_bytes_per_token": self._cost.context_bytes_per_token,
            "fixed_bytes_per_request": self._cost.fixed_bytes_per_request,
            "quota_bytes": self._cost.quota_bytes(self._tokens * self._question.requests),
            "tokens_for_quota": self._cost.tokens(self._question.memory_bytes),
        }

    def groups(self) -> list[Report]:
        """Return what one request holds of each layer group at most."""
        pages = request_pages(self._layout, self._tokens, self._load["headroom_tokens"])
        return [
            {
                "id": group.group_id,
                "owner": group.owner.value,
                "window": group.window,
                "layers": len(group.layer_ids),
                "page_bytes": group.page_bytes,
                "pages_per_request": count,
                "bytes": count * group.page_bytes,
            }
            for group, count in zip(self._layout.groups, pages, strict=True)
        ]

    def answer(self) -> Report:
        """Return needs and what fits, in whole pages."""
        layout, memory_bytes, load = self._layout, self._question.memory_bytes, self._load
        slots = slots_for_requests(layout, self._question.requests, tokens=self._tokens, **load)
        chunk = chunk_pages(layout, load["chunk_tokens"])
        return {
            **self.costs(),
            "null_bytes": null_bytes(layout),
            "chunk_bytes": sum(n * group.page_bytes for n, group in zip(chunk, layout.groups, strict=True)),
            "request_bytes": sum(group["bytes"] for group in self.groups()),
            "pool_bytes": pool_bytes(layout, slots),
            "pool_slots": list(slots),
            "requests": requests_for_bytes(layout, memory_bytes, tokens=self._tokens, **load),
            "longest_request_tokens": longest_request(layout, memory_bytes, upper_tokens=self._longest, **load),
        }


def _headroom(draft_tokens: int) -> int:
    shape = SpeculationShape(
        max_draft_tokens=draft_tokens, block_width=draft_tokens, num_extra_kv_tokens=max(0, draft_tokens - 1)
    )
    return shape.generation_headroom(hosts_draft=True)


def _longest(model: ModelConfig, question: ModelQuestion) -> int:
    longest = question.max_seq_len or model.max_seq_len
    if longest is None:
        cure = "pass --max-seq-len"
        raise ConfigError(explain(model.source, "max_position_embeddings", None, "an integer >= 1", cure))
    return longest


def _layers(owner: str, model: ModelConfig, specs: Sequence[KVCacheLayerSpec]) -> Report:
    """Return what the model's file says, and what a rank stores of it."""
    return {
        "owner": owner,
        "model_type": model.model_type,
        "count": len(specs),
        "kv_heads": model.kv_heads,
        "local_kv_heads": specs[0].num_kv_heads,
        "head_dim": model.head_dim,
        "kv_factor": model.kv_factor,
        "dtype": specs[0].dtype.value,
        "windowed": sum(window is not None for window in model.windows),
        "windows": [
            {"window": window, "layers": sum(1 for _ in run)}
            for window, run in groupby(sorted(model.windows, key=lambda window: window or 0))
        ],
        "bytes_per_token": sum(bytes_per_token(spec) for spec in specs),
    }
