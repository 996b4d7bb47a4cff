"""How much of a model's KV fits, from its config.json alone."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from unikv.errors import ConfigError
from unikv.layer_spec import KVDtype
from workers.model_config import read_model_config
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


def test_a_window_nobody_uses_is_none(store: Any) -> None:
    config = read_model_config(store("qwen", {**LLAMA, "sliding_window": 4096, "use_sliding_window": False}))
    assert set(config.windows) == {None}
    everywhere = read_model_config(store("mistral", {**LLAMA, "sliding_window": 4096}))
    assert everywhere.windows == (4096,) * 32


def test_the_decoder_of_a_model_that_sees(store: Any) -> None:
    config = read_model_config(store("vlm", {"text_config": LLAMA, "vision_config": {"num_hidden_layers": 3}}))
    assert (len(config.windows), config.head_dim, config.kv_heads) == (32, 128, 8)


@pytest.mark.parametrize(
    ("content", "text"),
    [
        ("{", "content is"),
        ("[]", "content is 'list', expected a JSON object"),
        ({**LLAMA, "num_hidden_layers": 0}, "num_hidden_layers is 0, expected an integer >= 1"),
        ({k: v for k, v in LLAMA.items() if k != "max_position_embeddings"}, "max_position_embeddings is None"),
        ({**LLAMA, "torch_dtype": "int8"}, "dtype is 'int8', expected bfloat16, float16, float32; pass --dtype"),
        ({**LLAMA, "layer_types": ["full_attention"]}, "layer_types is '1 entries', expected 32 entries"),
        ({**LLAMA, "layer_types": ["linear_attention"] * 32}, r"layer_types\[0\] is 'linear_attention'"),
        ({**LLAMA, "layer_types": ["sliding_attention"] * 32}, "sliding_window is None, expected a window"),
    ],
)
def test_wrong_configs_are_explained(store: Any, content: object, text: str) -> None:
    with pytest.raises(ConfigError, match=text) as caught:
        read_model_config(store("wrong", content))
    assert "config.json" in str(caught.value)


def test_what_is_not_there_or_does_not_divide_is_named(store: Any, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"file is 'No such file or directory', expected a readable config\.json"):
        read_model_config(str(tmp_path / "nothing"))
    big = store("big", LLAMA)
    with pytest.raises(ConfigError, match=r"kv_heads is 8, expected a multiple of tp=3"):
        model_report(ModelQuestion(model=big, tokens=100, memory_bytes=GIB, tp=3))
    with pytest.raises(ConfigError, match=r"--tokens is 200000, expected in \[1, 131072\]"):
        model_report(ModelQuestion(model=big, tokens=200_000, memory_bytes=GIB))
