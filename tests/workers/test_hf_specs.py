"""Layer specs from transformers configs, and the check of a pair file against them."""

from __future__ import annotations

from dataclasses import replace

import pytest

transformers = pytest.importorskip("transformers")

from unikv.errors import ConfigError  # noqa: E402
from unikv.layer_spec import KVDtype, LayerOwner, ReusePolicy  # noqa: E402
from workers.hf_specs import attention_windows, check_layers, layer_specs_for  # noqa: E402

SIZES = {
    "vocab_size": 50,
    "hidden_size": 48,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
}
LLAMA = transformers.LlamaConfig(**SIZES)
DRAFT = transformers.LlamaConfig(**SIZES | {"num_hidden_layers": 2, "num_key_value_heads": 3, "head_dim": 16})
MISTRAL = transformers.MistralConfig(**SIZES, sliding_window=12)
QWEN = transformers.Qwen2Config(**SIZES, use_sliding_window=True, sliding_window=10, max_window_layers=1)


def pair_specs(**more):
    return layer_specs_for(LLAMA, DRAFT, dtype=KVDtype.FLOAT32, **more).specs


def test_target_and_draft_share_one_numbering() -> None:
    plan = layer_specs_for(LLAMA, DRAFT, dtype=KVDtype.BFLOAT16)
    described = [
        (spec.layer_id, spec.owner.value, spec.num_kv_heads, spec.total_heads, spec.head_dim) for spec in plan.specs
    ]
    assert described == [
        (0, "target", 2, 2, 8),
        (1, "target", 2, 2, 8),
        (2, "target", 2, 2, 8),
        (3, "draft", 3, 3, 16),
        (4, "draft", 3, 3, 16),
    ]
    assert {spec.dtype for spec in plan.specs} == {KVDtype.BFLOAT16}
    assert [spec.reuse_policy for spec in plan.specs] == [ReusePolicy.REQUIRED] * 3 + [ReusePolicy.OPTIONAL] * 2
    assert plan.target.layer_ids == (0, 1, 2)
    assert plan.draft is not None
    assert plan.draft.layer_ids == (3, 4)
    assert layer_specs_for(LLAMA, dtype=KVDtype.FLOAT32).draft is None


def test_windows_come_from_the_config() -> None:
    assert attention_windows(LLAMA) == (None, None, None)
    assert attention_windows(MISTRAL) == (12, 12, 12)
    assert attention_windows(QWEN) == (None, 10, 10)


def test_draft_pages_outlive_the_drafters_window_by_the_token_it_may_lag_behind() -> None:
    plan = layer_specs_for(MISTRAL, LLAMA, dtype=KVDtype.FLOAT32, draft_window=6)
    assert [spec.window for spec in plan.specs] == [12, 12, 12, 7, 7, 7]
    assert plan.target.imposed_window is None
    assert plan.draft is not None
    assert plan.draft.windows == (6, 6, 6)
    assert plan.draft.imposed_window == 6
    own = layer_specs_for(LLAMA, MISTRAL, dtype=KVDtype.FLOAT32).draft
    assert own is not None
    assert own.windows == (12, 12, 12)
    assert own.imposed_window is None


@pytest.mark.parametrize(
    ("draft", "window", "text"),
    [
        (LLAMA, 0, "draft_window is 0, expected >= 1 token"),
        (QWEN, 11, "draft_window is 11, expected <= 10; drop draft_window"),
    ],
)
def test_draft_windows_that_make_no_sense_are_refused(draft, window, text) -> None:
    with pytest.raises(ConfigError, match=text):
        layer_specs_for(LLAMA, draft, dtype=KVDtype.FLOAT32, draft_window=window)


@pytest.mark.parametrize(
    ("config", "text"),
    [
        (transformers.T5Config(), "it is an encoder-decoder"),
        (transformers.DeepseekV3Config(), "its config has kv_lora_rank"),
        (transformers.Qwen3NextConfig(), "layer_types contains 'linear_attention'"),
    ],
)
def test_models_with_another_kind_of_cache_are_refused(config, text) -> None:
    with pytest.raises(ConfigError, match=text):
        layer_specs_for(config, dtype=KVDtype.FLOAT32)


def test_a_pair_file_that_describes_the_model_passes() -> None:
    specs = pair_specs(draft_window=6)
    check_layers(specs, specs)
    check_layers(specs, [replace(spec, dtype=KVDtype.FLOAT8_E4M3FN) for spec in specs])
    check_layers(specs, [replace(spec, window=None) for spec in specs])
    check_layers(specs, [replace(spec, window=100) for spec in specs], max_seq_len=100)
    check_layers(specs, [replace(spec, window=9 if spec.is_draft else None) for spec in specs])


@pytest.mark.parametrize(
    ("layer", "change", "text"),
    [
        (1, {"num_kv_heads": 3, "total_num_kv_heads": None}, r"layer 1 \(target\): kv_heads is 3, expected 2 as in"),
        (
            1,
            {"num_kv_heads": 1},
            r"layer 1 \(target\): kv_heads on this rank \(parallel.tp must be 1\) is 1, expected 2",
        ),
        (4, {"head_dim": 32}, r"layer 4 \(draft\): head_dim is 32, expected 16 as in the model; correct head_dim"),
        (0, {"kv_factor": 1}, r"layer 0 \(target\): kv_factor is 1, expected 2"),
        (0, {"dtype": KVDtype.NVFP4, "head_dim": 16}, r"layer 0 \(target\): head_dim is 16"),
        (3, {"dtype": KVDtype.NVFP4}, r"layer 3 \(draft\): dtype is 'nvfp4', expected a dtype the runner can store"),
        (0, {"window": 8}, r"layer 0 \(target\): window is 8, expected null"),
        (3, {"window": 6}, r"layer 3 \(draft\): window is 6, expected null or at least 7 \(runner.draft_window plus"),
    ],
)
def test_a_layer_that_differs_is_named_with_its_key(layer, change, text) -> None:
    specs = pair_specs(draft_window=6)
    given = [replace(spec, **change) if spec.layer_id == layer else spec for spec in specs]
    with pytest.raises(ConfigError, match=text):
        check_layers(specs, given)


def test_a_missing_layer_is_counted_by_owner() -> None:
    specs = pair_specs()
    with pytest.raises(ConfigError, match=r"model.layers count of owner draft is 1, expected 2; write count: 2"):
        check_layers(specs, specs[:-1])
    with pytest.raises(ConfigError, match=r"count of owner draft is 2, expected 0"):
        check_layers(layer_specs_for(LLAMA, dtype=KVDtype.FLOAT32).specs, specs)
    assert {spec.owner for spec in specs} == set(LayerOwner)
