"""Pair files: what they become, what wins over what, and a sentence for every mistake."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import example, given
from hypothesis import strategies as st

from transfer.hello import DraftKVMode, PathKind, Side
from transfer.options import TransferOptions
from unikv.errors import ConfigError
from unikv.ids import LayerId
from unikv.layer_spec import KVCacheLayerSpec, KVDtype, KVLayout, LayerOwner, ReusePolicy
from workers.config import HFRunnerConfig, PairConfig, PatternRunnerConfig
from workers.config_load import load_pair, pair_cases, preset_names, with_layers
from workers.config_values import UNITS_BYTES, parse_size_bytes

TARGET = "{count: 2, owner: target, kv_heads: 4, head_dim: 64, dtype: bfloat16}"
DRAFT = "{owner: draft, kv_heads: 2, head_dim: 32, dtype: float16, window: 128, reuse: optional}"
PAIR = f"""
model:
  max_seq_len: 1024
  tokens_per_block: 32
  layers:
    - {TARGET}
    - {DRAFT}
speculative: {{method: draft_model, max_draft_tokens: 3, block_width: 3, num_extra_kv_tokens: 2}}
context: {{parallel: {{tp: 2}}, pool: {{pages: 16}}}}
generation: {{pool: {{bytes: 8MiB}}}}
matrix:
  - {{name: wide, set: {{context.parallel.tp: 4, transfer.draft_kv: 1}}}}
  - {{name: over-zmq, set: {{transfer.path: zmq}}}}
"""
HF = ("runner={kind: hf, model: smollm2, draft: {quantize_bits: 3}}", "context.parallel.tp=1")


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A current directory with the pair above in pair.yaml."""
    (tmp_path / "pair.yaml").write_text(PAIR)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def load(*overrides: str, **more: Any) -> PairConfig:
    return load_pair("pair.yaml", overrides=overrides, **{"environ": {}, **more})


def refusal(*overrides: str, **more: Any) -> str:
    with pytest.raises(ConfigError) as caught:
        load(*overrides, **more)
    # What pydantic would say of itself.
    assert not any(word in str(caught.value) for word in ("validation error", "pydantic", "type=", "input_value"))
    return str(caught.value)


def refusal_of(content: str | bytes, name: str = "other.yaml") -> str:
    Path(name).write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(ConfigError) as caught:
        load_pair(name, environ={})
    return str(caught.value)


# ---- what a sound file becomes


def test_both_sides_inherit_the_model(folder: Path) -> None:
    pair = load()
    context, generation = pair.side(Side.CONTEXT), pair.side(Side.GENERATION)
    assert (context, generation) == (pair.context, pair.generation)
    assert (context.max_seq_len, context.tokens_per_block, context.kv_layout) == (1024, 32, KVLayout.HND)
    assert context.layers == generation.layers
    assert (context.num_target_layers, context.num_draft_layers) == (2, 1)
    assert context.speculative == generation.speculative
    assert context.speculative is not None
    assert context.speculative.block_width == 3
    assert (context.parallel.tp, generation.parallel.tp) == (2, 1)
    assert (context.pool.pages, context.pool.bytes) == (16, None)
    assert (generation.pool.pages, generation.pool.bytes) == (None, 8 << 20)
    assert (pair.name, pair.source, pair.case) == ("pair", "pair.yaml", None)


def test_layers_have_their_defaults(folder: Path) -> None:
    target, draft = load().context.layers or ()
    assert (target.count, target.kv_factor, target.window, target.sink_tokens) == (2, 2, None, 0)
    assert (target.reuse, target.extra_buffers) == (ReusePolicy.REQUIRED, {})
    assert (draft.count, draft.owner, draft.window, draft.reuse) == (1, LayerOwner.DRAFT, 128, ReusePolicy.OPTIONAL)
    assert draft.dtype is KVDtype.FLOAT16


def test_sections_left_out_have_their_defaults(folder: Path) -> None:
    pair = load("transfer=null", "runner=null", "workload=null")
    assert (pair.transfer.path, pair.transfer.draft_kv) == (PathKind.AUTO, DraftKVMode.AUTO)
    assert pair.transfer.options() == TransferOptions(timeout_s=60.0, chunk_bytes=8 << 20)
    assert pair.runner == PatternRunnerConfig(kind="pattern")
    assert (pair.workload.requests, pair.workload.prompt_tokens) == (8, (100, 1000))
    assert pair.workload.conversations() == ()


def test_options_carry_what_the_file_says(folder: Path) -> None:
    pair = load("transfer={timeout_s: 2.5, chunk_bytes: 64KiB, checksum: off}")
    assert pair.transfer.options() == TransferOptions(timeout_s=2.5, chunk_bytes=64 << 10)
    assert pair.transfer.checksum == "off"  # YAML reads an unquoted off as false


def test_the_hf_runner_is_told_by_its_kind(folder: Path) -> None:
    runner = load(*HF).runner
    assert isinstance(runner, HFRunnerConfig)
    assert (runner.model, runner.draft, runner.draft_window) == ("smollm2", {"quantize_bits": 3}, None)
    assert runner.dtype == "float32"


def test_nothing_can_be_changed_afterwards(folder: Path) -> None:
    pair = load()
    with pytest.raises(ValueError, match="frozen"):
        pair.context.parallel.tp = 8
    assert pair.context.parallel.tp == 2


@pytest.mark.parametrize("name", ["pair.yaml", "pattern-small", "smollm2"])
def test_the_resolved_form_is_plain_data(folder: Path, name: str) -> None:
    resolved = load_pair(name, environ={}).resolved()
    assert json.loads(json.dumps(resolved)) == resolved
    assert resolved["context"]["layers"][0]["owner"] == "target"
    assert resolved["transfer"]["timeout_s"] == 60.0


def test_a_model_fills_in_layers_left_to_it(folder: Path) -> None:
    specs = [
        KVCacheLayerSpec(
            layer_id=LayerId(number),
            owner=owner,
            num_kv_heads=3,
            total_num_kv_heads=3,
            head_dim=64,
            dtype=KVDtype.FLOAT32,
            window=window,
        )
        for number, (owner, window) in enumerate([(LayerOwner.TARGET, None), (LayerOwner.DRAFT, 64)])
    ]
    pair = load(*HF, "model.layers=auto")
    assert (pair.context.layers, pair.context.num_target_layers) == (None, 0)
    filled = with_layers(pair, specs)
    assert filled.context.layers == filled.generation.layers
    assert [entry.spec(LayerId(n), heads=3) for n, entry in enumerate(filled.context.layers or ())] == specs
    listed = load()
    assert with_layers(listed, specs) == listed


# ---- devices


def test_devices_are_taken_in_turn_or_from_the_list(folder: Path) -> None:
    assert load().context.device_of(1, 8) == "cpu"
    in_turn = load("context.device=cuda").context
    assert [in_turn.device_of(rank, 2) for rank in range(4)] == ["cuda:0", "cuda:1", "cuda:0", "cuda:1"]
    assert in_turn.device_of(0, 0) == "cuda:0"
    listed = load("context.device=cuda", "context.devices=[3, 1]").context
    assert [listed.device_of(rank, 8) for rank in range(2)] == ["cuda:3", "cuda:1"]


def test_devices_must_fit_the_ranks(folder: Path) -> None:
    assert "context.devices is [3], expected 2 numbers, one per rank" in refusal(
        "context.device=cuda", "context.devices=[3]"
    )
    assert "context.devices is [0, 1], expected left out without device: cuda" in refusal("context.devices=[0, 1]")


# ---- inheritance


def test_a_side_may_repeat_an_inherited_value(folder: Path) -> None:
    assert load("context.tokens_per_block=32") == load()


def test_a_side_may_not_contradict_the_model(folder: Path) -> None:
    text = refusal("generation.tokens_per_block=16")
    assert text.startswith("pair file pair.yaml: generation.tokens_per_block is 16, expected 32")
    assert "model.tokens_per_block" in text


def test_true_is_not_one_for_a_repeated_value(folder: Path) -> None:
    assert "context.speculative" in refusal("speculative=1", "context.speculative=true")


def test_sides_may_differ_in_what_only_they_say(folder: Path) -> None:
    content = yaml.safe_load(PAIR)
    del content["model"]["tokens_per_block"]
    content["context"]["tokens_per_block"], content["generation"]["tokens_per_block"] = 16, 64
    Path("sides.yaml").write_text(yaml.safe_dump(content))
    pair = load_pair("sides.yaml", environ={})
    assert (pair.context.tokens_per_block, pair.generation.tokens_per_block) == (16, 64)


def test_a_side_may_speculate_alone(folder: Path) -> None:
    content = yaml.safe_load(PAIR)
    content["generation"]["speculative"] = content.pop("speculative")
    Path("alone.yaml").write_text(yaml.safe_dump(content))
    pair = load_pair("alone.yaml", environ={})
    assert pair.context.speculative is None
    assert pair.generation.speculative == load().generation.speculative
    assert load("speculative=null").generation.speculative is None


def test_speculative_stands_in_one_place(folder: Path) -> None:
    assert "model.speculative is None, expected absent" in refusal("model.speculative=null")
    assert "generation.speculative is None" in refusal("generation.speculative=null")


@pytest.mark.parametrize("side", ["context", "generation"])
def test_both_sides_must_be_there(folder: Path, side: str) -> None:
    content = yaml.safe_load(PAIR)
    del content[side]
    assert f"{side} is 'missing', expected a mapping with parallel and pool" in refusal_of(yaml.safe_dump(content))


def test_a_key_missing_on_both_sides_is_missing_in_the_model(folder: Path) -> None:
    content = yaml.safe_load(PAIR)
    del content["model"]["max_seq_len"]
    text = refusal_of(yaml.safe_dump(content))
    assert text == "pair file other.yaml: model.max_seq_len is missing, expected a value; add max_seq_len"


# ---- overrides, cases, environment


def test_overrides_reach_into_lists_and_make_sections(folder: Path) -> None:
    pair = load("model.layers.1.window=256", "workload.requests=3", "context.parallel.tp = 1")
    assert [entry.window for entry in pair.context.layers or ()] == [None, 256]
    assert (pair.workload.requests, pair.context.parallel.tp) == (3, 1)


def test_the_last_override_counts(folder: Path) -> None:
    assert load("context.parallel.tp=4", "context.parallel.tp=1").context.parallel.tp == 1


@pytest.mark.parametrize(
    ("override", "parts"),
    [
        ("context.parallel.tp", ["override", "'context.parallel.tp'", "KEY=VALUE"]),
        ("=3", ["KEY=VALUE"]),
        ("transfer.path={", ["override transfer.path", "a YAML value"]),
        ("transfer={path: zmq, path: auto}", ["override transfer", "key 'path' twice"]),
        ("model.layers=&a [*a]", ["override model.layers", "an alias inside what it names"]),
        ("context.pool.pages=9223372036854775808", ["context.pool.pages", "<= 281474976710656"]),
        ("model.layers.7.window=3", ["model.layers.7.window", "list index", "'7'", "[0, 2)"]),
        ("model.layers.first.window=3", ["'first'", "[0, 2)"]),
        ("model.max_seq_len.value=3", ["model.max_seq_len is 1024", "a mapping or a list"]),
        ("context.paralel.tp=2", ["context.paralel", "did you mean 'parallel'?"]),
    ],
)
def test_wrong_overrides_are_explained(folder: Path, override: str, parts: list[str]) -> None:
    text = refusal(override)
    assert [part for part in parts if part not in text] == []


def test_a_case_changes_the_pair_before_overrides_do(folder: Path) -> None:
    assert pair_cases(load()) == ("wide", "over-zmq")
    wide = load(case="wide")
    assert (wide.case, wide.context.parallel.tp, wide.transfer.draft_kv) == ("wide", 4, DraftKVMode.REQUIRE)
    assert load("context.parallel.tp=1", case="wide").context.parallel.tp == 1
    assert load(case="over-zmq").transfer.path is PathKind.ZMQ


def test_a_pair_without_matrix_has_no_cases(folder: Path) -> None:
    assert pair_cases(load("matrix=null")) == ()


def test_unknown_cases_name_the_known_ones(folder: Path) -> None:
    text = refusal(case="wid")
    assert "case is 'wid', expected one of wide, over-zmq; did you mean 'wide'?" in text
    content = yaml.safe_load(PAIR)
    del content["matrix"]
    Path("plain.yaml").write_text(yaml.safe_dump(content))
    with pytest.raises(ConfigError, match="no case: the file has no matrix"):
        load_pair("plain.yaml", case="wide", environ={})


@pytest.mark.parametrize(
    ("matrix", "part"),
    [
        ("[{name: a}, {name: a}]", "matrix[1].name is 'a', expected unique"),
        ("[{name: 'a b'}]", "matrix[0].name"),
        ("[{nam: a}]", "did you mean 'name'?"),
        ("{name: a}", "a list of {name, set}"),
    ],
)
def test_a_wrong_matrix_is_explained(folder: Path, matrix: str, part: str) -> None:
    assert part in refusal(f"matrix={matrix}")


@pytest.mark.parametrize(
    ("value", "mode"), [("0", DraftKVMode.OFF), ("1", DraftKVMode.REQUIRE), ("auto", DraftKVMode.AUTO)]
)
def test_the_environment_decides_on_draft_kv(folder: Path, value: str, mode: DraftKVMode) -> None:
    environ = {"UNIKV_SHARED_DRAFT_KV": value}
    content = {**yaml.safe_load(PAIR), "transfer": {"draft_kv": "per_view"}}
    Path("per-view.yaml").write_text(yaml.safe_dump(content))
    assert load_pair("per-view.yaml", environ={}).transfer.draft_kv is DraftKVMode.PER_VIEW
    assert load_pair("per-view.yaml", environ=environ).transfer.draft_kv is mode
    assert load(case="wide", environ=environ).transfer.draft_kv is mode


def test_the_process_environment_is_the_default(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("UNIKV_SHARED_DRAFT_KV", "0")
    assert load_pair("pair.yaml").transfer.draft_kv is DraftKVMode.OFF
    assert load_pair("pair.yaml", environ={}).transfer.draft_kv is DraftKVMode.AUTO


@pytest.mark.parametrize("value", ["", "yes", "per_view", "01"])
def test_illegal_values_in_the_environment_are_refused(folder: Path, value: str) -> None:
    text = refusal(environ={"UNIKV_SHARED_DRAFT_KV": value})
    assert f"UNIKV_SHARED_DRAFT_KV is {value!r}, expected one of 0, 1, auto" in text


@pytest.mark.parametrize(("value", "mode"), [("0", "0"), ("'0'", "0"), ("1", "1"), ("'1'", "1"), ("auto", "auto")])
def test_draft_kv_may_be_a_number_or_a_word(folder: Path, value: str, mode: str) -> None:
    assert load(f"transfer.draft_kv={value}").transfer.draft_kv == mode


# ---- single values


@pytest.mark.parametrize(
    ("override", "parts"),
    [
        ("context.parallel.tp=two", ["context.parallel.tp is 'two'", "an integer"]),
        ("context.parallel.tp='2'", ["context.parallel.tp is '2'", "an integer"]),
        ("context.parallel.tp=true", ["context.parallel.tp is True", "an integer"]),
        ("context.parallel.tp=0", ["context.parallel.tp is 0", ">= 1"]),
        ("context.parallel.attention_dp=1", ["attention_dp is 1", "true or false"]),
        ("context.parallel=2", ["context.parallel is 2", "a mapping with the keys tp, pp, cp, attention_dp"]),
        ("context=3", ["context is 3", "a mapping"]),
        ("model=[]", ["model is []", "a mapping"]),
        ("model.tokens_per_block=-1", ["model.tokens_per_block is -1", ">= 1"]),
        ("context.pool={}", ["context.pool is {}", "exactly one of pages and bytes"]),
        ("context.pool={pages: 4, bytes: 1MiB}", ["exactly one of pages and bytes"]),
        ("context.pool.pages=1", ["context.pool.pages is 1", ">= 2"]),
        ("context.pool={bytes: 8GB}", ["context.pool.bytes is '8GB'", "a size in B, KiB, MiB, GiB"]),
        ("context.pool={bytes: -1}", ["context.pool.bytes is -1", "a size in"]),
        ("context.device=cuda:0", ["context.device is 'cuda:0'", "one of cpu, cuda", "did you mean 'cuda'?"]),
        ("model.kv_layout=NDH", ["model.kv_layout is 'NDH'", "one of HND, NHD"]),
        ("model.layers=[]", ["model.layers is []", "a list of layer entries"]),
        ("model.layers.0.owner=drafter", ["model.layers[0].owner is 'drafter'", "did you mean 'draft'?"]),
        ("model.layers.0.dtype=bf16", ["model.layers[0].dtype is 'bf16'", "bfloat16, float8_e4m3fn, nvfp4"]),
        ("model.layers.0.kv_factor=3", ["model.layers[0].kv_factor is 3", "<= 2"]),
        ("model.layers.0.kvheads=3", ["model.layers[0].kvheads", "did you mean 'kv_heads'?"]),
        ("model.layers.0.sink_tokens=4", ["model.layers[0]: layer 0: sink_tokens is 4", "0 without a window"]),
        ("model.layers.1.dtype=nvfp4", None),
        ("model.layers.1={owner: draft, kv_heads: 2, head_dim: 24, dtype: nvfp4}", ["layer 2: head_dim is 24"]),
        ("model.layers.0.extra_buffers={key: 3}", ["model.layers[0]: layer 0: extra_buffers is 'key'"]),
        ("speculative.block_width=-1", ["speculative.block_width is -1", ">= 0"]),
        ("speculative.method=3", ["speculative.method is 3", "text"]),
        ("transfer.path=tcp", ["transfer.path is 'tcp'", "one of auto, direct, zmq, nixl"]),
        ("transfer.draft_kv=2", ["transfer.draft_kv is 2", "one of auto, 1, 0, per_view"]),
        ("transfer.draft_kv=true", ["transfer.draft_kv is True"]),
        ("transfer.timeout_s=0", ["transfer.timeout_s is 0", "> 0"]),
        ("transfer.timeout_s=.inf", ["transfer.timeout_s is inf", "a finite number"]),
        ("transfer.timeout_s=soon", ["transfer.timeout_s is 'soon'", "a number"]),
        ("transfer.chunk_bytes=0", ["transfer.chunk_bytes is 0", ">= 1"]),
        ("transfer.timeout=3", ["transfer.timeout", "did you mean 'timeout_s'?"]),
        ("workload.prompt_tokens=[9, 3]", ["workload.prompt_tokens is [9, 3]", "[lowest, highest]"]),
        ("workload.prompt_tokens=100", ["workload.prompt_tokens is 100", "[lowest, highest]"]),
        ("workload.prompts=[1]", ["workload.prompts is [1]", "a list of texts"]),
        ("runner={kind: torch}", ["runner.kind is 'torch'", "one of pattern, hf"]),
        ("runner={model: x}", ["runner.kind is missing"]),
        ("runner={kind: hf}", ["runner.model is missing", "add model"]),
        ("runner={kind: hf, modle: x}", ["runner.modle", "did you mean 'model'?"]),
        ("runner={kind: pattern, model: x}", ["runner.model is an unknown key"]),
        ("runner={kind: hf, model: x, draft: {quantize_bits: 9}}", ["runner.draft", "{quantize_bits: 2 to 8}"]),
        ("runner={kind: hf, model: x, dtype: int8}", ["runner.dtype is 'int8'"]),
        ("tranfser={}", ["tranfser is an unknown key", "did you mean 'transfer'?"]),
        ("source=x", ["source is 'x', expected no such key"]),
        ("context.side=x", ["context.side is 'x', expected no such key"]),
    ],
)
def test_wrong_values_are_explained_where_they_stand(folder: Path, override: str, parts: list[str] | None) -> None:
    if parts is None:
        assert load(override).context.layers is not None
        return
    text = refusal(override)
    assert text.startswith("pair file pair.yaml: ")
    assert [part for part in parts if part not in text] == []


def test_every_mistake_has_its_line(folder: Path) -> None:
    lines = refusal("context.parallel.tp=0", "generation.pool={pages: many}", "transfer.pth=zmq").splitlines()
    assert [line.split(": ")[1].split(" is ")[0] for line in lines] == [
        "context.parallel.tp",
        "generation.pool.pages",
        "transfer.pth",
    ]


def test_an_inherited_mistake_is_told_once(folder: Path) -> None:
    assert len(refusal("model.max_seq_len=0").splitlines()) == 1


def test_draft_layers_come_last(folder: Path) -> None:
    text = refusal(f"model.layers=[{DRAFT}, {TARGET}]")
    assert "model.layers[1]: owner is 'target', expected draft, as in entry 0 before it" in text


@pytest.mark.parametrize(
    ("override", "parts"),
    [
        ("transfer.checksum=page", ["transfer.checksum is 'page'", "does not serve it yet"]),
        ("context.parallel.cp=2", ["context.parallel.cp is 2", "only the generation side may split sequences"]),
    ],
)
def test_what_is_not_served_is_refused_plainly(folder: Path, override: str, parts: list[str]) -> None:
    text = refusal(override)
    assert [part for part in parts if part not in text] == []


def test_everything_that_is_not_served_is_listed(folder: Path) -> None:
    assert len(refusal("transfer.checksum=page", "context.parallel.cp=2").splitlines()) == 2


def test_sections_of_no_effect_are_allowed(folder: Path) -> None:
    pair = load("transfer={curve: null, checksum: 'off'}", "context.host_tier={bytes: 0, codec: none}")
    assert (pair.transfer.curve, pair.context.host_tier.bytes) == (None, 0)


@pytest.mark.parametrize("side", ["context", "generation"])
@pytest.mark.parametrize("name", ["tp", "pp"])
def test_a_model_is_not_split(folder: Path, side: str, name: str) -> None:
    text = refusal(*HF, f"{side}.parallel.{name}=2")
    assert f"{side}.parallel.{name} is 2, expected 1 with runner.kind: hf" in text


@pytest.mark.parametrize("name", ["tp", "pp", "cp"])
def test_blocks_heads_and_layers_of_a_pattern_are_split_on_the_generation_side(folder: Path, name: str) -> None:
    assert getattr(load(f"generation.parallel.{name}=2").generation.parallel, name) == 2


@pytest.mark.parametrize(
    ("key", "value", "left_out"),
    [
        ("shared_prefix_tokens", "8", "0"),
        ("cancel", "{every: 2, within_s: 1.0}", "None"),
        ("local_below_tokens", "8", "0"),
    ],
)
def test_a_model_has_a_workload_of_its_own(folder: Path, key: str, value: str, left_out: str) -> None:
    text = refusal(*HF, f"workload.{key}={value}")
    assert f"workload.{key} is" in text and f"expected {left_out} with runner.kind: hf" in text
    assert getattr(load(f"workload.{key}={value}").workload, key)


def test_there_may_be_several_instances_of_everything(folder: Path) -> None:
    pair = load("context.instances=2", "generation.instances=3")
    assert (pair.context.instances, pair.generation.instances) == (2, 3)
    assert load(*HF, "generation.parallel.tp=1", "context.instances=2").context.instances == 2
    assert "context.instances is 0" in refusal("context.instances=0")
    on_gpus = ("context.device=cuda", "context.parallel.tp=2", "context.instances=2")
    assert load(*on_gpus, "context.devices=[0, 1, 2, 3]").context.device_of(3, 8) == "cuda:3"
    text = refusal(*on_gpus, "context.devices=[0, 1]")
    assert "expected 4 numbers, one per rank (instances x tp x pp x cp)" in text


def test_a_runner_has_what_it_needs(folder: Path) -> None:
    assert "context.layers is None" in refusal("model.layers=auto")
    text = refusal("runner={kind: hf, model: smollm2}", "context.parallel.tp=1")
    assert "runner.draft is None, expected a drafter for context.speculative" in text
    assert load("runner={kind: hf, model: smollm2}", "context.parallel.tp=1", "speculative=null").runner.kind == "hf"


# ---- sizes


@pytest.mark.parametrize(
    ("value", "size"),
    [("0", 0), (7, 7), ("12B", 12), ("1KiB", 1024), (" 8 GiB ", 8 << 30), ("1.5MiB", 3 << 19), ("3", 3)],
)
def test_sizes_are_read(value: object, size: int) -> None:
    assert parse_size_bytes(value) == size


@pytest.mark.parametrize("value", ["", "GiB", "1.5B", "8gib", "8GB", "8 k", "-1KiB", "1e3", True, None, 1.5, -1, "٣B"])
def test_other_sizes_are_refused(value: object) -> None:
    with pytest.raises(ValueError, match="a size in B, KiB, MiB, GiB"):
        parse_size_bytes(value)


@given(st.integers(0, 1 << 40), st.sampled_from(sorted(UNITS_BYTES)), st.sampled_from(["", " "]))
def test_whole_sizes_are_exact(number: int, unit: str, space: str) -> None:
    assert parse_size_bytes(f"{number}{space}{unit}") == number * UNITS_BYTES[unit]


# ---- files


ALIAS_BOMB = "a0: &a0 [x, x, x, x, x, x, x, x]\n" + "".join(
    f"a{i}: &a{i} [{', '.join(8 * [f'*a{i - 1}'])}]\n" for i in range(1, 30)
)
"""Two thousand characters that stand for more values than memory holds."""
MERGE_BOMB = "a0: &a0 {x: 1, y: 1}\n" + "".join(
    f"a{i}: &a{i} {{<<: [{', '.join(8 * [f'*a{i - 1}'])}]}}\n" for i in range(1, 30)
)


@pytest.mark.parametrize(
    ("content", "parts"),
    [
        ("", ["content is None, expected keys", "unikv presets"]),
        ("# only a comment\n", ["content is None, expected keys"]),
        ("[1, 2]", ["content is 'list', expected a mapping"]),
        ("just words", ["content is 'str', expected a mapping"]),
        ("a: [1\nb: 2", ["YAML is", "line 2"]),
        ("a: 1\nb: 2\na: 3", ["YAML is \"key 'a' twice in line 3, column 1\"", "every key once"]),
        ("a: {b: 1, b: 1}", ["key 'b' twice in line 1"]),
        ("a: !!python/object/apply:os.getcwd []", ["YAML is", "could not determine a constructor"]),
        ("a: *nothing", ["undefined alias"]),
        ("a: 1\n---\nb: 2", ["but found another document in line 2"]),
        (b"a: \xff\xfe", ["YAML is", "UTF-8 text in valid YAML"]),
        (b"a: \x00", ["YAML is", "valid YAML"]),
        ("[" * 5000, ["YAML is"]),
        ("model: &m {layers: *m}\ncontext: {}\ngeneration: {}", ["an alias inside what it names in line 1"]),
        ("&m {model: *m, context: *m, generation: *m}", ["an alias inside what it names"]),
        ("model: {layers: &l [*l]}\ncontext: {layers: 1}\ngeneration: {}", ["an alias inside what it names"]),
        (ALIAS_BOMB, ["more than 100000 values, aliases written out"]),
        (MERGE_BOMB, ["more than 100000 values, aliases written out"]),
        ("model: {x: {1: 2, a: 3}}\ncontext: {x: {1: 2, a: 3}}\ngeneration: {}", ["model.x is an unknown key"]),
        ("model: {x: 1}\ncontext: {x: 0x1" + 6000 * "0" + "}\ngeneration: {}", ["too long to show"]),
        (
            "model: {max_seq_len: " + 4000 * "9" + "}\ncontext: {}\ngeneration: {}",
            ["999..., expected"],
        ),
        ('"a\\n\\e[2J": 1\ncontext: {}\ngeneration: {}', [r"'a\n\x1b[2J' is an unknown key"]),
        ('name: "a\\0b"\ncontext: {}\ngeneration: {}', ["name is", "text without control characters"]),
    ],
)
def test_files_that_are_no_pair_are_explained(folder: Path, content: str | bytes, parts: list[str]) -> None:
    text = refusal_of(content)
    assert text.startswith("pair file other.yaml: ")
    assert [part for part in parts if part not in text] == []


def test_missing_files_and_directories_are_explained(folder: Path) -> None:
    with pytest.raises(ConfigError, match=r"pair file absent\.yaml: file is 'missing', .* presets .*pattern-small"):
        load_pair("absent.yaml", environ={})
    with pytest.raises(ConfigError, match="did you mean 'pattern-small'"):
        load_pair("patern-small", environ={})
    with pytest.raises(ConfigError, match="file is 'a directory'"):
        load_pair(str(folder), environ={})
    with pytest.raises(ConfigError, match="file is 'not a regular file'"):
        load_pair("/dev/null", environ={})
    with pytest.raises(ConfigError, match=r"file is 'File name too long', .*") as caught:
        load_pair(5000 * "x", environ={})
    assert len(str(caught.value)) < 5500  # it names the file once


@given(st.text(max_size=40) | st.binary(max_size=40))
@example("? [a]\n: b")
@example("<<: 3")
@example("context: {1: 2}\ngeneration: {null: 3}")
@example("context: {}\ngeneration: {}\nmodel: {layers: [[]]}")
@example("2020-01-01: 1\ncontext: 2020-13-45")
def test_no_text_at_all_breaks_the_loader(tmp_path_factory: pytest.TempPathFactory, content: str | bytes) -> None:
    path = tmp_path_factory.getbasetemp() / "anything.yaml"
    path.write_bytes(content if isinstance(content, bytes) else content.encode(errors="surrogatepass"))
    with pytest.raises(ConfigError):
        load_pair(str(path), environ={})


SCALARS = st.none() | st.booleans() | st.integers(-3, 10) | st.floats() | st.text(max_size=5)
VALUES = st.recursive(SCALARS, lambda v: st.lists(v, max_size=2) | st.dictionaries(SCALARS, v, max_size=2))
PLACES = (
    "model", "model.layers", "model.layers.0", "model.layers.0.extra_buffers", "speculative", "context", "matrix",
    "context.parallel", "context.pool", "context.devices", "transfer", "transfer.curve", "runner", "workload", "name",
    "workload.prompts",
)  # fmt: skip


@given(st.sampled_from(PLACES), VALUES)
def test_no_value_in_any_place_breaks_the_loader(
    tmp_path_factory: pytest.TempPathFactory, place: str, value: object
) -> None:
    path = tmp_path_factory.getbasetemp() / "sound.yaml"
    path.write_text(PAIR)
    try:
        pair = load_pair(str(path), overrides=[f"{place}={yaml.safe_dump(value)}"], environ={})
    except ConfigError as error:
        assert "; " in str(error)
    else:
        assert json.dumps(pair.resolved())


# ---- prompts


def test_prompts_are_read_beside_the_pair_file(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (folder / "prompts.yaml").write_text("- one\n- |\n  two\n  lines\n")
    (folder / "pair.yaml").write_text(PAIR + "workload: {prompts: prompts.yaml}\n")
    elsewhere = folder / "elsewhere"
    elsewhere.mkdir()
    monkeypatch.chdir(elsewhere)
    pair = load_pair("../pair.yaml", environ={})
    assert pair.workload.conversations() == (("one",), ("two\nlines",))
    assert load_pair("../pair.yaml", overrides=["workload.prompts=[here]"], environ={}).workload.conversations() == (
        ("here",),
    )


@pytest.mark.parametrize(
    ("content", "part"),
    [
        ("a: 1", "a YAML list of texts"),
        ("", "a YAML list of texts"),
        ("- 1", "a list of texts"),
        ("- ' '", "a list of"),
    ],
)
def test_wrong_prompt_files_are_explained(folder: Path, content: str, part: str) -> None:
    (folder / "prompts.yaml").write_text(content)
    text = refusal("workload.prompts=prompts.yaml")
    assert "workload.prompts" in text
    assert part in text


def test_an_endless_prompt_file_is_not_read_to_its_end(folder: Path) -> None:
    assert "more than 16777216 bytes" in refusal("workload.prompts=/dev/zero")


def test_a_missing_prompt_file_is_named(folder: Path) -> None:
    assert "workload.prompts no.yaml: file is 'No such file" in refusal("workload.prompts=no.yaml")


# ---- presets


def test_presets_are_there_and_no_prompt_file_is_one() -> None:
    assert {"pattern-small", "smollm2"} <= set(preset_names())
    assert "smollm2_prompts" not in preset_names()


def test_a_file_wins_over_a_preset_of_the_same_name(folder: Path) -> None:
    (folder / "smollm2").write_text(PAIR)
    assert load_pair("smollm2", environ={}).context.parallel.tp == 2


def test_the_model_preset_brings_its_prompts(folder: Path) -> None:
    conversations = load_pair("smollm2", environ={}).workload.conversations()
    words = [sum(len(text.split()) for text in turns) for turns in conversations]
    assert len(conversations) == len(set(conversations)) == 8
    assert [count > 300 for count in words] == [False] * 5 + [True] * 3
    assert [len(turns) for turns in conversations] == [3, 1, 1, 1, 1, 3, 1, 1]
    # Room for every conversation in max_seq_len: English takes fewer than 1.5 tokens a word.
    assert max(words) * 1.5 + 3 * 48 < 2048


def test_a_prompt_may_be_a_conversation(folder: Path) -> None:
    (folder / "prompts.yaml").write_text("- [who, ' why ']\n- when\n")
    pair = load_pair("pair.yaml", overrides=["workload.prompts=prompts.yaml"], environ={})
    assert pair.workload.conversations() == (("who", "why"), ("when",))
    assert "of a conversation" in refusal("workload.prompts=[[]]")
