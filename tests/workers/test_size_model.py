"""Planning a deployment of a model: numbers worked by hand, and the same pools built for real."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from unikv.errors import ConfigError
from unikv.layer_spec import KVDtype
from workers.size_model import PlanOptions, model_report

GIB = 1 << 30
TARGET = {
    "model_type": "llama",
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "hidden_size": 4096,
    "max_position_embeddings": 131072,
    "torch_dtype": "bfloat16",
}
DRAFT = TARGET | {"num_hidden_layers": 1, "sliding_window": 2048}


@pytest.fixture
def models(tmp_path: Path) -> tuple[str, str]:
    """Directories of a target and its drafter."""
    for name, content in (("target", TARGET), ("draft", DRAFT)):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text(json.dumps(content), encoding="utf-8")
    return str(tmp_path / "target"), str(tmp_path / "draft")


def plan(model: str, draft: str | None = None, **options: Any) -> dict[str, Any]:
    return model_report(model, draft, options=PlanOptions(**options))


def test_a_target_alone(models: tuple[str, str]) -> None:
    # 8 heads x 128 elements x 2 bytes, K and V, 32 layers: 128 KiB a token, 4 MiB a page, a null page in 40 GiB.
    found = plan(models[0], tokens=8192, memory_bytes=40 * GIB)
    assert found["bytes_per_token"] == found["context_bytes_per_token"] == 131072
    assert (found["fixed_bytes_per_request"], found["quota_bytes"]) == (0, GIB)
    assert found["tokens_for_quota"] == 40 * 8192
    alone = found["without_draft"]
    assert (alone["bytes_per_request"], alone["null_bytes"], alone["pool_bytes"]) == (GIB, 4 << 20, GIB + (4 << 20))
    # The null page costs the fortieth request its last page.
    assert (alone["requests_that_fit"], alone["tokens_that_fit"]) == (39, 39 * 8192)
    assert alone["longest_request_tokens"] == 131072
    assert found["with_draft"] is None
    assert plan(models[0], tokens=8192, memory_bytes=40 * GIB + (4 << 20))["without_draft"]["requests_that_fit"] == 40


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
    assert both["bytes_per_request"] == request_bytes
    assert both["fixed_bytes_per_request"] == 66 << 15
    assert (both["null_bytes"], both["chunk_bytes"]) == ((1 << 20) + (1 << 15), 128 << 15)
    assert both["requests_that_fit"] == (40 * GIB - both["null_bytes"] - both["chunk_bytes"]) // request_bytes == 158
    assert (alone["requests_that_fit"], alone["bytes_per_request"], alone["headroom_tokens"]) == (159, 256 << 20, 1)
    assert (found["target"]["local_kv_heads"], found["draft"]["layers"]) == (2, 1)
    assert found["draft"]["windows"] == [{"window": 2048, "layers": 1}]


def test_defaults(models: tuple[str, str]) -> None:
    found = plan(*models)
    assert (found["tokens_per_request"], found["draft_tokens"], found["memory_bytes"]) == (131072, 4, None)
    assert found["tokens_for_quota"] == found["tokens"] == 131072
    assert found["with_draft"]["requests_that_fit"] is None
    assert plan(models[0])["draft_tokens"] == 0


def test_drafts_without_a_drafter_of_its_own_need_positions_only(models: tuple[str, str]) -> None:
    assert plan(models[0], draft_tokens=3)["headroom_tokens"] == 4


def test_dtypes_of_both(models: tuple[str, str]) -> None:
    found = plan(*models, dtype=KVDtype.FLOAT8_E4M3FN, tokens=32)
    assert (found["target"]["bytes_per_token"], found["draft"]["bytes_per_token"]) == (65536, 4096)
    found = plan(*models, dtype=KVDtype.NVFP4, draft_dtype=KVDtype.FLOAT16, tokens=32)
    assert (found["target"]["bytes_per_token"], found["draft"]["dtype"]) == (32 * 1152, "float16")


def test_a_window_as_long_as_the_sequence_is_none(models: tuple[str, str]) -> None:
    assert [g["window"] for g in plan(*models, max_seq_len=2049)["groups"]] == [None, None]
    assert [g["window"] for g in plan(*models, max_seq_len=2050)["groups"]] == [None, 2049]


def test_pools_for_the_requests_are_the_bytes_they_fit_into(models: tuple[str, str]) -> None:
    load: dict[str, Any] = {"tp": 8, "tokens": 5000, "requests": 7, "iteration_tokens": 1000}
    needed = plan(*models, **load)["with_draft"]["pool_bytes"]
    fits = [plan(*models, memory_bytes=needed + more, **load)["with_draft"]["requests_that_fit"] for more in (0, -1)]
    assert fits == [7, 6]


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"tp": 0}, "--tp is 0"),
        ({"tp": 3}, "kv_heads is 8, expected a multiple of tp=3"),
        ({"tokens": 0}, "--tokens is 0"),
        ({"tokens": 131073}, "--tokens is 131073, expected <= 131072, the longest sequence; shorten it, or pass"),
        ({"requests": 0}, "--requests is 0"),
        ({"draft_tokens": -1}, "--draft-tokens is -1"),
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
    content = {key: value for key, value in TARGET.items() if key != "max_position_embeddings"}
    (Path(models[0]) / "config.json").write_text(json.dumps(content), encoding="utf-8")
    with pytest.raises(ConfigError, match="max_position_embeddings is 'missing', expected an integer; pass --max-seq"):
        plan(models[0])
    assert plan(models[0], max_seq_len=100)["tokens_per_request"] == 100
