"""How much of a model's KV fits, from its config.json alone: numbers worked by hand."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from unikv.errors import ConfigError
from unikv.layer_spec import KVDtype
from workers.size_model import ModelQuestion, model_report

LLAMA: dict[str, Any] = {
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "hidden_size": 4096,
    "max_position_embeddings": 131072,
    "torch_dtype": "bfloat16",
}
DRAFTER: dict[str, Any] = {**LLAMA, "num_hidden_layers": 16, "hidden_size": 2048, "head_dim": 64}
GIB = 2**30


@pytest.fixture
def store(tmp_path: Path) -> Any:
    def make(name: str, content: object) -> str:
        (tmp_path / name).mkdir()
        text = content if isinstance(content, str) else json.dumps(content)
        (tmp_path / name / "config.json").write_text(text)
        return str(tmp_path / name)

    return make


def test_a_llama_with_and_without_a_drafter(store: Any) -> None:
    """128 KiB a token for the target, 32 KiB more for the drafter; 8,192 tokens are 256 blocks of 4 and 1 MiB."""
    question = ModelQuestion(
        model=store("big", LLAMA), draft_model=store("small", DRAFTER), tokens=8192, memory_bytes=40 * GIB
    )
    report = model_report(question)
    alone, both = report["without_draft"], report["with_draft"]
    assert (alone["bytes_per_token"], both["bytes_per_token"]) == (131072, 163840)
    assert (alone["request_bytes"], alone["requests"]) == (256 * 4 * 2**20, (40 * 1024 - 4) // 1024)
    # Five drafts: 5 positions behind the context and 6 verified, so 10 more than the last token: block 257.
    assert both["headroom_tokens"] == 11
    assert (both["request_bytes"], both["requests"]) == (257 * 5 * 2**20, (40 * 1024 - 5) // (257 * 5))
    assert alone["longest_request_tokens"] == 131072


@pytest.mark.parametrize(("tp", "heads"), [(1, 8), (4, 2), (8, 1), (16, 1)])
def test_ranks_hold_their_heads_and_replicate_what_cannot_be_split(store: Any, tp: int, heads: int) -> None:
    report = model_report(ModelQuestion(model=store("big", LLAMA), tokens=100, memory_bytes=GIB, tp=tp))
    assert report["without_draft"]["bytes_per_token"] == 32 * 2 * heads * 128 * 2


def test_latent_attention_stores_one_vector_on_every_rank(store: Any) -> None:
    latent = {**LLAMA, "kv_lora_rank": 512, "qk_rope_head_dim": 64}
    report = model_report(ModelQuestion(model=store("mla", latent), tokens=100, memory_bytes=GIB, tp=8))
    assert report["without_draft"]["bytes_per_token"] == 32 * 576 * 2


def test_sliding_layers_cost_their_window(store: Any) -> None:
    kinds = ["sliding_attention"] * 31 + ["full_attention"]
    model = store("gemma", {**LLAMA, "sliding_window": 1024, "layer_types": kinds})
    report = model_report(ModelQuestion(model=model, tokens=100_000, memory_bytes=GIB))
    page = 32 * 2 * 8 * 128 * 2
    assert report["without_draft"]["request_bytes"] == page * (31 * 33 + 3125)
    assert report["layers"][0]["windowed"] == 31


def test_the_cache_may_have_another_dtype(store: Any) -> None:
    question = ModelQuestion(model=store("big", LLAMA), tokens=100, memory_bytes=GIB, dtype=KVDtype.NVFP4)
    assert model_report(question)["without_draft"]["bytes_per_token"] == 32 * 2 * (512 + 64)


@pytest.fixture
def models(store: Any) -> tuple[str, str]:
    """A target, and a drafter of one layer with a window."""
    return store("target", LLAMA), store("windowed", {**LLAMA, "num_hidden_layers": 1, "sliding_window": 2048})


def plan(model: str, draft: str | None = None, **load: Any) -> dict[str, Any]:
    return model_report(ModelQuestion(model=model, draft_model=draft, **{"memory_bytes": GIB, **load}))


def test_the_null_page_costs_a_request(models: tuple[str, str]) -> None:
    # 8 heads x 128 elements x 2 bytes, K and V, 32 layers: 128 KiB a token, 4 MiB a page, a null page in 40 GiB.
    found = plan(models[0], tokens=8192, memory_bytes=40 * GIB)
    assert found["bytes_per_token"] == found["context_bytes_per_token"] == 131072
    assert (found["fixed_bytes_per_request"], found["quota_bytes"]) == (0, GIB)
    assert found["tokens_for_quota"] == 40 * 8192
    alone = found["without_draft"]
    assert (alone["request_bytes"], alone["null_bytes"], alone["pool_bytes"]) == (GIB, 4 << 20, GIB + (4 << 20))
    # The null page costs the fortieth request its last page.
    assert alone["requests"] == 39
    assert alone["longest_request_tokens"] == 131072
    assert found["with_draft"] is None
    assert plan(models[0], tokens=8192, memory_bytes=40 * GIB + (4 << 20))["without_draft"]["requests"] == 40


def test_a_drafter_with_a_window_takes_its_window(models: tuple[str, str]) -> None:
    found = plan(*models, tp=4, tokens=8192, draft_tokens=4, memory_bytes=40 * GIB, iteration_tokens=4096)
    # 4 drafts: a block of 4 positions behind 5 verified ones; 8191 + 9 positions are 257 pages of 1 MiB.
    assert found["headroom_tokens"] == 4 + 5
    assert [(g["owner"], g["window"], g["pages_per_request"]) for g in found["groups"]] == [
        ("target", None, 257),
        ("draft", 2049, 66),
    ]
    both, alone = found["with_draft"], found["without_draft"]
    request_bytes = (257 << 20) + (66 << 15)
    assert both["request_bytes"] == request_bytes
    assert both["fixed_bytes_per_request"] == 66 << 15
    assert (both["null_bytes"], both["chunk_bytes"]) == ((1 << 20) + (1 << 15), 128 << 15)
    assert both["requests"] == (40 * GIB - both["null_bytes"] - both["chunk_bytes"]) // request_bytes == 158
    assert (alone["requests"], alone["request_bytes"], alone["headroom_tokens"]) == (159, 256 << 20, 1)
    assert [(entry["local_kv_heads"], entry["count"]) for entry in found["layers"]] == [(2, 32), (2, 1)]
    assert found["layers"][1]["windows"] == [{"window": 2048, "layers": 1}]


def test_defaults(models: tuple[str, str]) -> None:
    found = plan(*models)
    assert (found["tokens"], found["requests"], found["draft_tokens"]) == (131072, 1, 5)
    assert (found["model"], found["draft_model"]) == tuple(f"{model}/config.json" for model in models)
    assert plan(models[0])["draft_tokens"] == 0


def test_the_affine_cost_and_its_inverse(models: tuple[str, str]) -> None:
    found = plan(*models, tokens=1000, requests=3, memory_bytes=GIB)
    assert found["quota_bytes"] == 3000 * found["bytes_per_token"] + 3 * found["fixed_bytes_per_request"]
    assert plan(*models, tokens=1000, requests=3, memory_bytes=found["quota_bytes"])["tokens_for_quota"] == 3000
    assert found["context_bytes_per_token"] - found["bytes_per_token"] == 4096


def test_dtypes_of_both(models: tuple[str, str]) -> None:
    found = plan(*models, dtype=KVDtype.FLOAT8_E4M3FN, tokens=32)
    assert [entry["bytes_per_token"] for entry in found["layers"]] == [65536, 4096]
    found = plan(*models, dtype=KVDtype.NVFP4, draft_dtype=KVDtype.FLOAT16, tokens=32)
    assert (found["layers"][0]["bytes_per_token"], found["layers"][1]["dtype"]) == (32 * 1152, "float16")


def test_a_window_as_long_as_the_sequence_is_none(models: tuple[str, str]) -> None:
    assert [g["window"] for g in plan(*models, max_seq_len=2049)["groups"]] == [None, None]
    assert [g["window"] for g in plan(*models, max_seq_len=2050)["groups"]] == [None, 2049]


def test_pools_for_the_requests_are_the_bytes_they_fit_into(models: tuple[str, str]) -> None:
    load: dict[str, Any] = {"tp": 8, "tokens": 5000, "requests": 7, "iteration_tokens": 1000}
    needed = plan(*models, **load)["with_draft"]["pool_bytes"]
    fits = [plan(*models, memory_bytes=needed + more, **load)["with_draft"]["requests"] for more in (0, -1)]
    assert fits == [7, 6]


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"tp": 0}, "--tp is 0"),
        ({"tp": 3}, "kv_heads is 8, expected a multiple of tp=3"),
        ({"tokens": 0}, "--tokens is 0"),
        ({"tokens": 131073}, r"--tokens is 131073, expected in \[1, 131072\], the longest sequence; shorten it"),
        ({"requests": 0}, "--requests is 0"),
        ({"draft_tokens": 0}, "--draft-tokens is 0"),
        ({"tokens_per_block": 0}, "--tokens-per-block is 0"),
        ({"iteration_tokens": -1}, "--iteration-tokens is -1"),
        ({"max_seq_len": 0}, "--max-seq-len is 0"),
        ({"draft_dtype": KVDtype.NVFP4}, "--draft-dtype is 'nvfp4', expected no dtype without a drafter; pass --draft"),
    ],
)
def test_options_out_of_range(models: tuple[str, str], options: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        plan(models[0], **options)


def test_a_model_that_does_not_say_how_long_sequences_are(models: tuple[str, str]) -> None:
    content = {key: value for key, value in LLAMA.items() if key != "max_position_embeddings"}
    (Path(models[0]) / "config.json").write_text(json.dumps(content), encoding="utf-8")
    with pytest.raises(ConfigError, match="max_position_embeddings is None, expected an integer >= 1; pass --max-seq"):
        plan(models[0])
    assert plan(models[0], max_seq_len=100)["tokens"] == 100
