"""What a person planning a deployment asks: how many requests of a length fit into a rank's memory, for a real model.

Every function returns what the command prints with ``--json``. Numbers are of one rank, sizes are bytes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any, Final

from unikv.errors import ConfigError, explain
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
from workers.size_config import ModelShape, read_model

Report = dict[str, Any]

DEFAULT_DRAFT_TOKENS: Final = 4
"""Drafts a step where a drafter is given and no number; the table says so."""
MAX_DRAFT_TOKENS: Final = 1 << 16
MAX_TOKENS_PER_BLOCK: Final = 1 << 16


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanOptions:
    """What is planned.

    Attributes:
        tp: ranks the heads are split over.
        dtype, draft_dtype: element types of K and V; None takes the model's.
        tokens: length of each request, prompt and answer; None: the longest.
        requests: requests whose need is wanted.
        draft_tokens: most drafts a step, None: 0 without a drafter.
        tokens_per_block: token positions of one page.
        memory_bytes: of the pools of one rank; None: what the requests need.
        iteration_tokens: tokens one iteration has in prefill on this rank.
        max_seq_len: longest sequence in tokens; None takes the model's.
    """

    tp: int = 1
    dtype: KVDtype | None = None
    draft_dtype: KVDtype | None = None
    tokens: int | None = None
    requests: int = 1
    draft_tokens: int | None = None
    tokens_per_block: int = 32
    memory_bytes: int | None = None
    iteration_tokens: int = 0
    max_seq_len: int | None = None

    def check(self) -> None:
        """Refuse numbers out of range.

        Raises:
            ConfigError: naming the option.
        """
        for option, value, low, high in (
            ("--tp", self.tp, 1, MAX_RANKS),
            ("--tokens", self.tokens, 1, MAX_COUNT),
            ("--requests", self.requests, 1, MAX_COUNT),
            ("--draft-tokens", self.draft_tokens, 0, MAX_DRAFT_TOKENS),
            ("--tokens-per-block", self.tokens_per_block, 1, MAX_TOKENS_PER_BLOCK),
            ("--iteration-tokens", self.iteration_tokens, 0, MAX_COUNT),
            ("--max-seq-len", self.max_seq_len, 1, MAX_COUNT),
        ):
            if value is not None:
                check_count("size", option, value, low, high)


def model_report(model: str, draft_model: str | None = None, *, options: PlanOptions) -> Report:
    """Return what requests of a model cost one rank, and how many fit, with its drafter and without.

    Args:
        model, draft_model: directories with a config.json.
        options: what is planned.

    Returns:
        The keys of `workers.dry.size_report` for all layers, then `target`, `draft` (None without one) and, under
        `with_draft` (None without one) and `without_draft`, what each of the two deployments needs and holds.

    Raises:
        ConfigError: a model cannot be read or an option is out of range.
    """
    options.check()
    target = read_model(model, "--model")
    draft = None if draft_model is None else read_model(draft_model, "--draft-model")
    if draft is None and options.draft_dtype is not None:
        want = "no dtype without a drafter"
        raise ConfigError(explain("size", "--draft-dtype", options.draft_dtype, want, "pass --draft-model"))
    max_seq_len = _max_seq_len(target, options)
    tokens = _tokens(max_seq_len, options)
    own = target.specs(tp=options.tp, dtype=options.dtype)
    drafts = draft.specs(tp=options.tp, dtype=options.draft_dtype, draft=True, first_id=len(own)) if draft else []
    plain = _Deployment(own, _headroom(options, 0 if draft else None), max_seq_len, tokens, options)
    both = (
        _Deployment(own + drafts, _headroom(options, None, hosts=True), max_seq_len, tokens, options) if draft else None
    )
    main = both or plain
    return {
        "tp": options.tp,
        "tokens_per_block": options.tokens_per_block,
        "max_seq_len": max_seq_len,
        "draft_tokens": _draft_tokens(options, draft is not None),
        "tokens_per_request": tokens,
        "tokens": tokens * options.requests,
        "requests": options.requests,
        "iteration_tokens": options.iteration_tokens,
        "memory_bytes": options.memory_bytes,
        "target": _model(target, own, options.tp),
        "draft": _model(draft, drafts, options.tp) if draft else None,
        **main.costs(),
        "groups": main.groups(),
        "with_draft": both.report() if both else None,
        "without_draft": plain.report(),
    }


class _Deployment:
    """One set of layers under the planned load."""

    def __init__(
        self, specs: Sequence[KVCacheLayerSpec], headroom: int, max_seq_len: int, tokens: int, options: PlanOptions
    ) -> None:
        self._layout: CacheLayout = build_layout(
            specs, tokens_per_block=options.tokens_per_block, max_seq_len=max_seq_len
        )
        self._cost = CacheCost.from_specs(
            specs,
            tokens_per_block=options.tokens_per_block,
            max_seq_len=max_seq_len,
            generation_headroom_tokens=headroom,
            max_requests=options.requests,
            max_num_tokens=options.iteration_tokens,
        )
        self._load = {"headroom_tokens": headroom, "chunk_tokens": options.iteration_tokens}
        self._max_seq_len, self._tokens, self._options = max_seq_len, tokens, options

    def costs(self) -> Report:
        """Return the affine cost of the load, and the way back."""
        needed_bytes = self._cost.quota_bytes(self._tokens * self._options.requests)
        given = self._options.memory_bytes
        return {
            "headroom_tokens": self._load["headroom_tokens"],
            "bytes_per_token": self._cost.generation_bytes_per_token,
            "context_bytes_per_token": self._cost.context_bytes_per_token,
            "fixed_bytes_per_request": self._cost.fixed_bytes_per_request,
            "quota_bytes": needed_bytes,
            "given_quota_bytes": given,
            "tokens_for_quota": self._cost.tokens(needed_bytes if given is None else given),
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

    def report(self) -> Report:
        """Return needs and what fits, in whole pages."""
        memory, requests = self._options.memory_bytes, self._options.requests
        slots = slots_for_requests(self._layout, requests, tokens=self._tokens, **self._load)
        chunk = chunk_pages(self._layout, self._load["chunk_tokens"])
        fits = None if memory is None else requests_for_bytes(self._layout, memory, tokens=self._tokens, **self._load)
        longest = (
            None
            if memory is None
            else longest_request(self._layout, memory, upper_tokens=self._max_seq_len, **self._load)
        )
        return {
            **self.costs(),
            "bytes_per_request": sum(group["bytes"] for group in self.groups()),
            "null_bytes": null_bytes(self._layout),
            "chunk_bytes": sum(n * group.page_bytes for n, group in zip(chunk, self._layout.groups, strict=True)),
            "pool_bytes": pool_bytes(self._layout, slots),
            "pool_slots": list(slots),
            "requests_that_fit": fits,
            "tokens_that_fit": None if fits is None else fits * self._tokens,
            "longest_request_tokens": longest,
        }


def _model(shape: ModelShape, specs: Sequence[KVCacheLayerSpec], tp: int) -> Report:
    return {
        "config": shape.source.removeprefix("model config "),
        "model_type": shape.model_type,
        "layers": len(specs),
        "kv_heads": shape.kv_heads,
        "local_kv_heads": shape.local_heads(tp),
        "head_dim": shape.head_dim,
        "kv_factor": shape.kv_factor,
        "dtype": specs[0].dtype.value,
        "windows": [
            {"window": window, "layers": sum(1 for _ in run)}
            for window, run in groupby(sorted(shape.windows, key=lambda window: window or 0))
        ],
        "bytes_per_token": sum(bytes_per_token(spec) for spec in specs),
    }


def _draft_tokens(options: PlanOptions, hosts: bool) -> int:
    if options.draft_tokens is not None:
        return options.draft_tokens
    return DEFAULT_DRAFT_TOKENS if hosts else 0


def _headroom(options: PlanOptions, drafts: int | None, *, hosts: bool = False) -> int:
    """Return the positions a step needs ahead of the history; a hosted drafter writes its block behind it."""
    count = _draft_tokens(options, hosts) if drafts is None else drafts
    if not hosts:
        return NO_SPECULATION.generation_headroom(False) + count
    shape = SpeculationShape(max_draft_tokens=count, block_width=count, num_extra_kv_tokens=max(0, count - 1))
    return shape.generation_headroom(True)


def _max_seq_len(target: ModelShape, options: PlanOptions) -> int:
    found = options.max_seq_len or target.max_seq_len
    if found is None:
        cure = "pass --max-seq-len"
        raise ConfigError(explain(target.source, "max_position_embeddings", "missing", "an integer", cure))
    return found


def _tokens(max_seq_len: int, options: PlanOptions) -> int:
    if options.tokens is not None and options.tokens > max_seq_len:
        want = f"<= {max_seq_len}, the longest sequence"
        raise ConfigError(explain("size", "--tokens", options.tokens, want, "shorten it, or pass --max-seq-len"))
    return options.tokens or max_seq_len
