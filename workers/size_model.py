"""How many requests of a length fit into a rank's memory, for a model nobody has to load."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from unikv.errors import ConfigError, SpecError, explain
from unikv.layer_spec import KVCacheLayerSpec, KVDtype, KVLayout, LayerOwner
from unikv.layout import build_layout, bytes_per_token
from unikv.sizing_fit import longest_request, pool_bytes, requests_for_bytes, slots_for_requests
from unikv.speculation import NO_SPECULATION, SpeculationShape
from workers.model_config import ModelConfig, read_model_config


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelQuestion:
    """What a person planning a deployment asks.

    Attributes:
        model, draft_model: directories with a config.json; `draft_model` None without a drafter.
        tp: tensor-parallel ranks; answers are per rank.
        tokens: length of a request, prompt and answer.
        memory_bytes: what a rank has for KV.
        dtype, draft_dtype: element types of the caches; None takes the models'.
        draft_tokens: drafts verified per step.
        tokens_per_block: token positions of one page.
    """

    model: str
    tokens: int
    memory_bytes: int
    draft_model: str | None = None
    tp: int = 1
    dtype: KVDtype | None = None
    draft_dtype: KVDtype | None = None
    draft_tokens: int = 5
    tokens_per_block: int = 32


def model_report(question: ModelQuestion) -> dict[str, Any]:
    """Answer a question.

    Raises:
        ConfigError: a config is missing or wrong, or a number does not fit the model.
    """
    model = read_model_config(question.model)
    draft = None if question.draft_model is None else read_model_config(question.draft_model)
    longest = model.max_seq_len
    if not 1 <= question.tokens <= longest:
        want = f"in [1, {longest}], the model's max_position_embeddings"
        raise ConfigError(explain("size", "--tokens", question.tokens, want, "ask for a length the model has"))
    target = model.specs(tp=question.tp, dtype=question.dtype, owner=LayerOwner.TARGET, first=0)
    report: dict[str, Any] = {
        "model": model.source,
        "draft_model": None if draft is None else draft.source,
        "tp": question.tp,
        "tokens": question.tokens,
        "memory_bytes": question.memory_bytes,
        "tokens_per_block": question.tokens_per_block,
        "max_seq_len": longest,
        "layers": [_layers(model, "target", question.dtype)],
        "without_draft": _answer(target, question, longest, NO_SPECULATION.generation_headroom(hosts_draft=False)),
        "with_draft": None,
    }
    if draft is not None:
        drafter = draft.specs(tp=question.tp, dtype=question.draft_dtype, owner=LayerOwner.DRAFT, first=len(target))
        report["layers"].append(_layers(draft, "draft", question.draft_dtype))
        report["with_draft"] = _answer([*target, *drafter], question, longest, _headroom(question.draft_tokens))
    return report


def _headroom(draft_tokens: int) -> int:
    shape = SpeculationShape(
        max_draft_tokens=draft_tokens, block_width=draft_tokens, num_extra_kv_tokens=max(0, draft_tokens - 1)
    )
    return shape.generation_headroom(hosts_draft=True)


def _layers(model: ModelConfig, owner: str, dtype: KVDtype | None) -> dict[str, Any]:
    return {
        "owner": owner,
        "count": len(model.windows),
        "kv_heads": model.kv_heads,
        "head_dim": model.head_dim,
        "kv_factor": model.kv_factor,
        "dtype": (dtype or model.dtype).value,
        "windowed": sum(window is not None for window in model.windows),
    }


def _answer(
    specs: Sequence[KVCacheLayerSpec], question: ModelQuestion, longest: int, headroom_tokens: int
) -> dict[str, Any]:
    try:
        layout = build_layout(
            specs, tokens_per_block=question.tokens_per_block, max_seq_len=longest, kv_layout=KVLayout.HND
        )
    except SpecError as error:
        raise ConfigError(f"size: {error}") from None
    load = {"tokens": question.tokens, "headroom_tokens": headroom_tokens}
    none, one = (pool_bytes(layout, slots_for_requests(layout, count, **load)) for count in (0, 1))
    return {
        "bytes_per_token": sum(bytes_per_token(spec) for spec in specs),
        "headroom_tokens": headroom_tokens,
        "null_bytes": none,
        "request_bytes": one - none,
        "requests": requests_for_bytes(layout, question.memory_bytes, **load),
        "longest_request_tokens": longest_request(
            layout, question.memory_bytes, upper_tokens=longest, headroom_tokens=headroom_tokens
        ),
    }
