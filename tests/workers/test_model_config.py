"""What config.json files say about a cache, against transformers where it is installed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from unikv.errors import ConfigError
from unikv.layer_spec import KVDtype, LayerOwner, ReusePolicy
from workers.hf_specs import layer_specs_for
from workers.model_config import MAX_FILE_BYTES, ModelConfig, read_model_config

LLAMA = {
    "model_type": "llama",
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "hidden_size": 512,
    "max_position_embeddings": 8192,
    "torch_dtype": "bfloat16",
}


def read(folder: Path, content: object, *, text: str | None = None) -> ModelConfig:
    (folder / "config.json").write_text(json.dumps(content) if text is None else text, encoding="utf-8")
    return read_model_config(str(folder), "--model")


def test_a_plain_decoder(tmp_path: Path) -> None:
    found = read(tmp_path, LLAMA)
    assert (found.model_type, found.kv_heads, found.head_dim, found.kv_factor) == ("llama", 2, 64, 2)
    assert (found.windows, found.dtype, found.max_seq_len) == ((None,) * 4, KVDtype.BFLOAT16, 8192)
    assert read_model_config(str(tmp_path / "config.json"), "--model") == found


@pytest.mark.parametrize(
    ("change", "heads", "head_dim"),
    [
        ({"num_key_value_heads": None}, 8, 64),
        ({"head_dim": 128}, 2, 128),
        ({"head_dim": None}, 2, 64),
        ({"multi_query": True}, 1, 64),
        ({"multi_query": True, "new_decoder_architecture": True}, 2, 64),
    ],
)
def test_heads(tmp_path: Path, change: dict[str, Any], heads: int, head_dim: int) -> None:
    found = read(tmp_path, LLAMA | change)
    assert (found.kv_heads, found.head_dim) == (heads, head_dim)


def test_latent_attention_keeps_one_key_of_both_parts(tmp_path: Path) -> None:
    latent = LLAMA | {"kv_lora_rank": 512, "qk_rope_head_dim": 64}
    found = read(tmp_path, latent)
    assert (found.kv_heads, found.head_dim, found.kv_factor, dict(found.extra_buffers)) == (1, 576, 1, {})
    assert [spec.num_kv_heads for spec in found.specs(tp=4, dtype=None)] == [1] * 4
    assert dict(read(tmp_path, latent | {"index_head_dim": 128}).extra_buffers) == {"index_key": 132}
    assert read(tmp_path, LLAMA | {"kv_lora_rank": None}).kv_factor == 2
    with pytest.raises(ConfigError, match="qk_rope_head_dim is None"):
        read(tmp_path, LLAMA | {"kv_lora_rank": 512})


@pytest.mark.parametrize(
    ("change", "windows"),
    [
        ({"sliding_window": 64}, (64, 64, 64, 64)),
        ({"sliding_window": None}, (None,) * 4),
        ({"sliding_window": 64, "use_sliding_window": False}, (None,) * 4),
        ({"sliding_window": 64, "model_type": "qwen2"}, (None,) * 4),
        ({"sliding_window": 64, "use_sliding_window": True, "max_window_layers": 3}, (None, None, None, 64)),
        ({"sliding_window": 64, "model_type": "gemma2"}, (64, None, 64, None)),
        ({"sliding_window": 64, "sliding_window_pattern": 3}, (64, 64, None, 64)),
        ({"sliding_window": 64, "model_type": "cohere2"}, (64, 64, 64, None)),
        (
            {"sliding_window": 64, "layer_types": ["sliding_attention", "full_attention"] * 2},
            (64, None, 64, None),
        ),
        ({"num_kv_shared_layers": 1}, (None,) * 3),
    ],
)
def test_windows(tmp_path: Path, change: dict[str, Any], windows: tuple[int | None, ...]) -> None:
    assert read(tmp_path, LLAMA | change).windows == windows


def test_models_with_pictures_keep_their_text_part_apart(tmp_path: Path) -> None:
    text = {key: value for key, value in LLAMA.items() if key != "torch_dtype"}
    found = read(tmp_path, {"model_type": "llava", "dtype": "float16", "hidden_size": 7, "text_config": text})
    assert (found.head_dim, found.dtype, found.model_type) == (64, KVDtype.FLOAT16, "llama")


def test_older_names(tmp_path: Path) -> None:
    found = read(tmp_path, {"n_layer": 2, "n_head": 4, "n_embd": 64, "n_positions": 99, "torch_dtype": "torch.float32"})
    assert (len(found.windows), found.kv_heads, found.head_dim, found.max_seq_len) == (2, 4, 16, 99)
    assert found.dtype is KVDtype.FLOAT32


def test_layers_of_a_rank(tmp_path: Path) -> None:
    found = read(tmp_path, LLAMA | {"sliding_window": 64})
    target = found.specs(tp=2, dtype=KVDtype.FLOAT8_E4M3FN)
    assert [(s.layer_id, s.num_kv_heads, s.total_heads, s.window, s.owner) for s in target] == [
        (number, 1, 2, 64, LayerOwner.TARGET) for number in range(4)
    ]
    draft = found.specs(tp=4, dtype=None, draft=True, first_id=4)
    assert [(s.layer_id, s.num_kv_heads, s.window, s.dtype) for s in draft] == [
        (4 + number, 1, 65, KVDtype.BFLOAT16) for number in range(4)
    ]
    assert {s.reuse_policy for s in draft} == {ReusePolicy.OPTIONAL}


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"num_hidden_layers": None}, "num_hidden_layers is None, expected an integer >= 1; add num_hidden_layers"),
        ({"num_hidden_layers": "32"}, r"num_hidden_layers is '32', expected an integer >= 1"),
        ({"num_hidden_layers": True}, "num_hidden_layers is True, expected an integer >= 1"),
        ({"num_hidden_layers": 0}, "num_hidden_layers is 0"),
        ({"num_hidden_layers": 10**9}, r"num_hidden_layers is 1000000000, expected an integer <= 16384"),
        ({"num_hidden_layers": 10**40}, "num_hidden_layers is '1000"),
        ({"num_attention_heads": 8.0}, "num_attention_heads is '8.0'"),
        ({"num_key_value_heads": [2, 2]}, r"num_key_value_heads is '\[2, 2\]'"),
        ({"hidden_size": 500}, "hidden_size is 500, expected a multiple of num_attention_heads=8; add head_dim"),
        ({"sliding_window": -1}, "sliding_window is -1"),
        ({"layer_types": ["sliding_attention"] * 4}, "sliding_window is None"),
        ({"layer_types": ["full_attention"]}, "layer_types is '1 entries', expected a list of num_hidden_layers=4"),
        ({"layer_types": 7}, "layer_types is 'int'"),
        ({"layer_types": ["full_attention", "mamba", 1, {}]}, r"layer_types\[1\] is 'mamba', expected full_attention"),
        ({"layer_types": [{}, [], None, 1]}, r"layer_types\[0\] is '{}'"),
        ({"attention_chunk_size": 8192}, "attention_chunk_size is 8192, .*; describe the layers in a pair file"),
        ({"mamba_d_state": 16}, "mamba_d_state is 16"),
        ({"is_encoder_decoder": True}, "is_encoder_decoder is True, expected a decoder"),
        ({"num_kv_shared_layers": 4}, "num_kv_shared_layers is 4, expected < num_hidden_layers=4"),
        ({"max_position_embeddings": "long"}, "max_position_embeddings is 'long'"),
    ],
)
def test_errors_name_file_key_and_cure(tmp_path: Path, change: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=f"^model config {tmp_path}/config.json: {words}"):
        read(tmp_path, LLAMA | change)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "content is .*, expected JSON"),
        ("{", "content is .*, expected JSON"),
        ("[1]", "content is 'list', expected a JSON object"),
        ("[" * 200_000, "content is .*, expected JSON"),
        ('{"num_hidden_layers": ' + "9" * 5000 + "}", "content is .*, expected JSON"),
    ],
)
def test_files_that_are_no_config(tmp_path: Path, text: str, words: str) -> None:
    with pytest.raises(ConfigError, match=f"config.json: {words}"):
        read(tmp_path, None, text=text)


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    for folder in (str(tmp_path / "none"), str(tmp_path), "a\0b", "x" * 5000):
        with pytest.raises(ConfigError, match=r"size: --model is .*, expected a model's directory with a config.json"):
            read_model_config(folder, "--model")
    (tmp_path / "config.json").write_bytes(b" " * (MAX_FILE_BYTES + 1))
    with pytest.raises(ConfigError, match="size in bytes is"):
        read_model_config(str(tmp_path), "--model")
    (tmp_path / "config.json").write_bytes(b"\xff\xfe{}")
    with pytest.raises(ConfigError, match="expected JSON"):
        read_model_config(str(tmp_path), "--model")


def test_dtypes_and_splits_that_do_not_fit(tmp_path: Path) -> None:
    odd = read(tmp_path, LLAMA | {"torch_dtype": "float64", "head_dim": 24})
    with pytest.raises(ConfigError, match=r"dtype is 'float64', expected one of float32, .*; pass --draft-dtype"):
        odd.specs(tp=1, dtype=None, draft=True)
    with pytest.raises(ConfigError, match=r"config.json: layer 0: head_dim is 24, .* or pass another --dtype"):
        odd.specs(tp=1, dtype=KVDtype.NVFP4)
    with pytest.raises(ConfigError, match=r"config.json \(--tp 3\): kv_heads is 2, expected a divisor of tp=3"):
        odd.specs(tp=3, dtype=KVDtype.BFLOAT16)


junk = st.recursive(
    st.one_of(st.none(), st.booleans(), st.integers(-3, 10**31), st.floats(allow_nan=False), st.text(max_size=5)),
    lambda children: st.one_of(
        st.lists(children, max_size=4), st.dictionaries(st.text(max_size=3), children, max_size=2)
    ),
    max_leaves=5,
)


@given(
    st.dictionaries(
        st.sampled_from(
            [*LLAMA, "layer_types", "sliding_window", "use_sliding_window", "text_config", "kv_lora_rank", "head_dim"]
        ),
        junk,
        max_size=4,
    )
)
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=150)
def test_any_content_is_read_or_refused_in_words(tmp_path: Path, change: dict[str, Any]) -> None:
    try:
        found = read(tmp_path, LLAMA | change)
    except ConfigError as error:
        assert str(tmp_path) in str(error)
    else:
        assert found.kv_heads >= 1 <= found.head_dim
        assert found.windows


@pytest.mark.parametrize("without", [(), ("layer_types",)])
@pytest.mark.parametrize(
    ("kind", "more"),
    [
        ("Llama", {}),
        ("Mistral", {"sliding_window": 12}),
        ("Qwen2", {"use_sliding_window": True, "sliding_window": 10, "max_window_layers": 1}),
        ("Qwen2", {"sliding_window": 10}),
        ("Qwen3", {"head_dim": 32}),
        ("Phi3", {"sliding_window": 40, "pad_token_id": 0}),
        ("Gemma2", {"sliding_window": 16, "head_dim": 32}),
        ("Gemma3Text", {"sliding_window": 16, "head_dim": 32}),
        ("Cohere2", {"sliding_window": 16}),
        ("GptOss", {"sliding_window": 16, "head_dim": 64}),
    ],
)
def test_as_transformers_reads_it(tmp_path: Path, kind: str, more: dict[str, Any], without: tuple[str, ...]) -> None:
    transformers = pytest.importorskip("transformers")
    sizes = {
        "vocab_size": 50,
        "hidden_size": 48,
        "intermediate_size": 48,
        "num_hidden_layers": 7,
        "num_attention_heads": 6,
        "num_key_value_heads": 2,
    }
    config = getattr(transformers, f"{kind}Config")(**sizes | more)
    content = {key: value for key, value in config.to_dict().items() if key not in without}
    if without and kind == "GptOss":
        return  # always lists its layers
    found = read(tmp_path, content).specs(tp=1, dtype=KVDtype.BFLOAT16)
    assert tuple(found) == layer_specs_for(config, dtype=KVDtype.BFLOAT16).specs
