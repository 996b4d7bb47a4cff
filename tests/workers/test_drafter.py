"""Drafters made out of a target: what is shared, what is changed, what is refused."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from unikv.errors import ConfigError  # noqa: E402
from workers.drafter import (  # noqa: E402
    WEIGHT_GROUP,
    DraftOption,
    decoder_layers,
    derive_drafter,
    evenly_spread,
    quantized_copy,
    round_weights,
    shortened_copy,
)


@pytest.fixture(scope="module")
def target():
    config = transformers.LlamaConfig(
        vocab_size=50,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=5,
        num_attention_heads=4,
        num_key_value_heads=2,
        initializer_range=0.2,
    )
    torch.manual_seed(7)
    return transformers.LlamaForCausalLM(config).eval().requires_grad_(False)


def logits(model):
    with torch.inference_mode():
        return model(torch.arange(10).unsqueeze(0)).logits


@pytest.mark.parametrize(
    ("value", "option"),
    [
        (None, None),
        ("some/where", DraftOption(path=Path("some/where"))),
        (Path("some/where"), DraftOption(path=Path("some/where"))),
        ({"quantize_bits": 3}, DraftOption(quantize_bits=3)),
        ({"drop_layers": 2}, DraftOption(drop_layers=2)),
        (DraftOption(drop_layers=2), DraftOption(drop_layers=2)),
    ],
)
def test_options_are_read_from_the_pair_file(value, option) -> None:
    assert DraftOption.parse(value) == option


@pytest.mark.parametrize(
    ("value", "text"),
    [
        ({}, "exactly one of path, quantize_bits, drop_layers"),
        ({"quantize_bits": 3, "drop_layers": 1}, "exactly one of path, quantize_bits, drop_layers"),
        ({"quantize_bits": 1}, r"draft is \{'quantize_bits': 1\}, expected 2 to 8 bits"),
        ({"quantize_bits": 9}, "2 to 8 bits"),
        ({"drop_layers": 0}, "at least 1 layer"),
        ({"quantise_bits": 3}, r"a path, \{quantize_bits: N\} or \{drop_layers: N\}"),
        ({"quantize_bits": "3"}, r"a path, \{quantize_bits: N\} or \{drop_layers: N\}"),
        ({"drop_layers": True}, r"a path, \{quantize_bits: N\} or \{drop_layers: N\}"),
        (3, r"draft is 3, expected a path"),
    ],
)
def test_wrong_options_are_refused_by_name(value, text) -> None:
    with pytest.raises(ConfigError, match=text):
        DraftOption.parse(value)


@given(
    rows=st.integers(1, 5), columns=st.sampled_from([8, 16, 24, 48]), bits=st.integers(2, 8), seed=st.integers(0, 99)
)
def test_rounding_leaves_few_levels_and_a_small_error(rows, columns, bits, seed) -> None:
    weight = torch.randn(rows, columns, generator=torch.Generator().manual_seed(seed))
    rounded = round_weights(weight, bits)
    group = 8 if columns in (8, 24) else WEIGHT_GROUP
    for before, after in zip(weight.reshape(-1, group), rounded.reshape(-1, group), strict=True):
        step = float(before.max() - before.min()) / (2**bits - 1)
        assert len(after.unique()) <= 2**bits
        assert float((before - after).abs().max()) <= step / 2 + 1e-5
        assert float((after.min() - before.min()).abs()) < 1e-5  # the extremes stay
        assert float((after.max() - before.max()).abs()) < 1e-5


def test_rounding_keeps_constant_weights_and_the_dtype() -> None:
    weight = torch.full((2, 16), 0.25, dtype=torch.bfloat16)
    assert torch.equal(round_weights(weight, 2), weight)


def test_a_rounded_copy_shares_the_embedding_and_leaves_the_target_alone(target) -> None:
    before = logits(target).clone()
    draft = quantized_copy(target, 3)
    assert torch.equal(logits(target), before)
    assert not torch.equal(logits(draft), before)
    assert draft.model.embed_tokens.weight is target.model.embed_tokens.weight
    assert draft.model.layers[0].self_attn.q_proj.weight is not target.model.layers[0].self_attn.q_proj.weight
    assert draft.lm_head.weight is target.lm_head.weight
    fine = quantized_copy(target, 8)
    errors = [float((logits(copy) - before).abs().mean()) for copy in (fine, draft)]
    assert errors[0] < errors[1] / 4


def test_a_shortened_copy_is_the_target_without_those_layers(target) -> None:
    before = logits(target).clone()
    draft = shortened_copy(target, 2)
    kept = [0, 2, 4]
    assert draft.config.num_hidden_layers == 3
    assert target.config.num_hidden_layers == 5
    assert [layer.self_attn.layer_idx for layer in draft.model.layers] == [0, 1, 2]
    assert [layer.self_attn.layer_idx for layer in target.model.layers] == [0, 1, 2, 3, 4]
    for mine, theirs in zip(draft.parameters(), draft.state_dict().values(), strict=False):
        assert mine.data_ptr() == theirs.data_ptr()
    for mine, index in zip(draft.model.layers, kept, strict=True):
        assert mine.mlp.up_proj.weight is target.model.layers[index].mlp.up_proj.weight
    assert torch.equal(logits(target), before)
    assert not torch.equal(logits(draft), before)


def test_layer_types_follow_the_kept_layers() -> None:
    config = transformers.Qwen2Config(
        vocab_size=50,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        use_sliding_window=True,
        sliding_window=8,
        max_window_layers=2,
    )
    draft = shortened_copy(transformers.Qwen2ForCausalLM(config).eval(), 1)
    assert config.layer_types == ["full_attention", "full_attention", "sliding_attention", "sliding_attention"]
    assert draft.config.layer_types == ["full_attention", "full_attention", "sliding_attention"]
    assert torch.isfinite(logits(draft)).all()


@given(layers=st.integers(3, 60), data=st.data())
def test_dropped_layers_are_spread_over_the_inside(layers, data) -> None:
    drop = data.draw(st.integers(1, layers - 2))
    dropped = sorted(evenly_spread(layers, drop))
    assert len(dropped) == drop
    assert set(dropped) <= set(range(1, layers - 1))
    gaps = {after - before for before, after in itertools.pairwise(dropped)}
    assert not gaps or max(gaps) - min(gaps) <= 1


def test_what_cannot_be_derived_is_refused(target) -> None:
    with pytest.raises(ConfigError, match=r"\{'drop_layers': 4\}, expected at most 3 of the target's 5 layers"):
        derive_drafter(target, DraftOption(drop_layers=4))
    with pytest.raises(ConfigError, match="load a drafter with a path by itself"):
        derive_drafter(target, DraftOption(path=Path("elsewhere")))
    with pytest.raises(ConfigError, match="model is 'Linear', expected a plain decoder stack"):
        decoder_layers(torch.nn.Linear(2, 2))
