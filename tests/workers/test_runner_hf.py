"""A real (tiny) model on real pages: the tokens are the model's own, whatever holds the KV and whoever drafts."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from unikv.budget import PoolBudget  # noqa: E402
from unikv.cache_manager import UnifiedKVCacheManager  # noqa: E402
from unikv.errors import ConfigError, LocalProtocolError, SpecError  # noqa: E402
from unikv.ids import RequestId  # noqa: E402
from unikv.layer_spec import KVDtype, KVLayout  # noqa: E402
from unikv.request import KVCacheRequest  # noqa: E402
from workers.aggregated import manager_for, run_aggregated  # noqa: E402
from workers.drafter import decoder_layers  # noqa: E402
from workers.model_store import is_complete, smollm2_directory  # noqa: E402
from workers.runner_hf import HFRunner  # noqa: E402
from workers.speculative import SpeculativeDecoder  # noqa: E402

VOCABULARY = 64
# A wide initialisation: with the usual narrow one the outputs hardly depend on the KV, and every test would pass.
SIZES = {
    "vocab_size": VOCABULARY,
    "hidden_size": 48,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "initializer_range": 0.2,
    "bos_token_id": None,
    "eos_token_id": None,
}
PROMPT = [random.Random(3).randrange(VOCABULARY) for _ in range(37)]
NEW_TOKENS = 24


def save(directory: Path, kind: str, **config) -> Path:
    torch.manual_seed(1)
    model_class = getattr(transformers, f"{kind}ForCausalLM")
    model_class(getattr(transformers, f"{kind}Config")(**SIZES | config)).save_pretrained(directory)
    return directory


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Threads cost a tiny model more than they give, all the more beside other processes."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def models(tmp_path_factory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("models")
    return {
        "llama": save(root / "llama", "Llama"),
        "qwen2": save(root / "qwen2", "Qwen2"),
        "qwen2_window": save(
            root / "qwen2_window", "Qwen2", use_sliding_window=True, sliding_window=12, max_window_layers=2
        ),
        "mistral": save(root / "mistral", "Mistral", sliding_window=16),
        "other_vocabulary": save(root / "other", "Llama", vocab_size=32),
    }


@contextmanager
def managed(runner: HFRunner, *, draft_tokens: int = 0, layout: KVLayout = KVLayout.HND) -> Iterator:
    manager = manager_for(runner, max_seq_len=96, tokens_per_block=8, max_draft_tokens=draft_tokens, kv_layout=layout)
    # Nothing may be read that was not written: NaN would spread to every output.
    for spec in manager.layout.specs:
        manager.get_buffers(spec.layer_id).fill_(float("nan"))
    yield manager
    manager.check_integrity()
    manager.close()


@contextmanager
def prefilled(runner: HFRunner, manager: UnifiedKVCacheManager, **options) -> Iterator[tuple[KVCacheRequest, int]]:
    request = manager.create_request(RequestId(1))
    yield request, runner.prefill(request, PROMPT, **options).first_token
    request.close()


@pytest.mark.parametrize("kind", ["llama", "qwen2", "qwen2_window", "mistral"])
@pytest.mark.parametrize("layout", list(KVLayout))
@pytest.mark.parametrize("draft", [None, {"quantize_bits": 4}, {"drop_layers": 1}])
def test_tokens_are_those_of_transformers_own_generate(models, kind, layout, draft) -> None:
    runner = HFRunner(models[kind], draft)
    expected = runner.reference_generate(PROMPT, max_new_tokens=NEW_TOKENS)
    assert len(set(expected)) > 3  # the model says something that depends on what it read
    with managed(runner, draft_tokens=4 if draft else 0, layout=layout):
        for share, chunk in ((True, None), (False, None), (True, 7)):
            result = run_aggregated(runner, PROMPT, max_new_tokens=NEW_TOKENS, share_draft_kv=share, chunk_tokens=chunk)
            assert result.tokens == expected
            assert (result.proposed > 0) == (draft is not None)


def test_a_drafter_that_is_the_target_is_always_right(models) -> None:
    runner = HFRunner(models["llama"], str(models["llama"]))
    with managed(runner, draft_tokens=3):
        warm = run_aggregated(runner, PROMPT, max_new_tokens=NEW_TOKENS)
        cold = run_aggregated(runner, PROMPT, max_new_tokens=NEW_TOKENS, share_draft_kv=False)
    # Every proposal right means every KV entry of the drafter was right, the ones after full acceptance included.
    assert warm.acceptance == 1.0
    assert warm.accepted_per_step == (3, 3, 3, 3, 3, 2)
    assert cold.acceptance < 0.5
    assert cold.tokens == warm.tokens


@pytest.mark.parametrize("draft_window", [None, 10])
def test_proposals_are_the_drafters_own_greedy_choices(models, draft_window) -> None:
    runner = HFRunner(models["llama"], {"quantize_bits": 4}, draft_window=draft_window)
    with managed(runner, draft_tokens=4) as manager, prefilled(runner, manager) as (request, first):
        request.resize(capacity_tokens=manager.generation_capacity(len(PROMPT), 4))
        proposals = runner.open_sequence(request, draft_valid_from=0).propose([first], len(PROMPT), 4)
    tokens = [*PROMPT, first]
    for proposal in proposals:
        assert proposal == dense_choice(runner.drafter, tokens, draft_window)
        tokens.append(proposal)


def dense_choice(model, tokens: list[int], window: int | None) -> int:
    """The model's next token from all tokens at once, without any cache, through a dense mask."""
    at = torch.arange(len(tokens))
    mask = at[None, :] <= at[:, None]
    if window is not None:
        mask &= at[None, :] > at[:, None] - window
    with torch.inference_mode():
        out = model(torch.tensor([tokens]), attention_mask=mask[None, None], use_cache=False)
    return int(out.logits[0, -1].argmax())


@pytest.mark.parametrize("draft_window", [None, 10], ids=["full", "window"])
def test_a_windowed_or_full_drafter_never_changes_a_token(models, draft_window) -> None:
    runner = HFRunner(models["mistral"], {"quantize_bits": 6}, draft_window=draft_window)
    expected = runner.reference_generate(PROMPT, max_new_tokens=40)
    with managed(runner, draft_tokens=4) as manager:
        assert run_aggregated(runner, PROMPT, max_new_tokens=40).tokens == expected
        kept = {manager.get_layer_spec(layer_id).window for layer_id in manager.draft_layer_ids}
        assert kept == {17 if draft_window is None else 11}


def test_prefill_leaves_final_kv_of_the_whole_prompt_for_both_models(models) -> None:
    runner = HFRunner(models["llama"], {"drop_layers": 1})
    with managed(runner, draft_tokens=4) as manager, prefilled(runner, manager, chunk_tokens=5) as (request, first):
        assert request.history_tokens == len(PROMPT)
        assert request.capacity_tokens >= manager.context_capacity(len(PROMPT), 0)
        assert first == runner.reference_generate(PROMPT, max_new_tokens=1)[0]
        for spec in manager.layout.specs:
            slots = request.page_table(manager.layer_group_id(spec.layer_id))
            pages = manager.get_buffers(spec.layer_id)[torch.tensor(slots)]  # [blocks, 2, heads, tpb, head_dim]
            tokens = pages.permute(0, 3, 1, 2, 4).flatten(0, 1)
            assert torch.isfinite(tokens[: len(PROMPT)]).all(), spec.layer_id
            assert torch.isnan(tokens[len(PROMPT) :]).all(), spec.layer_id


def move_kv(source: UnifiedKVCacheManager, target: UnifiedKVCacheManager, tables, draft: bool) -> None:
    """What a transfer does: page by page, by ordinal, the prompt's blocks of every layer."""
    for spec in source.layout.specs:
        if spec.is_draft and not draft:
            continue
        group = source.layer_group_id(spec.layer_id)
        for here, there in zip(tables[0][group].tolist(), tables[1][group].tolist(), strict=False):
            if here >= 0 and there >= 0:
                target.get_buffers(spec.layer_id)[there] = source.get_buffers(spec.layer_id)[here]


@pytest.mark.parametrize("options", [{}, {"draft_window": 10}], ids=["full", "window"])
@pytest.mark.parametrize("shared", [True, False])
def test_moved_kv_gives_the_same_tokens_and_acceptance_as_one_process(models, options, shared) -> None:
    context = HFRunner(models["llama"], {"quantize_bits": 5}, **options)
    generation = HFRunner(models["llama"], {"quantize_bits": 5}, **options)
    with managed(context, draft_tokens=4):
        expected = run_aggregated(context, PROMPT, max_new_tokens=NEW_TOKENS, share_draft_kv=shared)
    with managed(context, draft_tokens=4) as here, managed(generation, draft_tokens=4) as there:
        other = there.create_request(RequestId(5))
        other.resize(capacity_tokens=20)  # so that the slots differ from the context's
        with prefilled(context, here) as (request, first):
            arriving = there.create_request(RequestId(1))
            arriving.resize(there.generation_capacity(len(PROMPT), 4), len(PROMPT))
            move_kv(here, there, (request.page_tables(), arriving.page_tables()), draft=shared)
        other.close()
        draft_valid_from = 0 if shared else len(PROMPT)
        result = SpeculativeDecoder(generation, arriving, PROMPT, first, draft_valid_from, NEW_TOKENS).run()
        arriving.close()
    assert result == expected


def test_sharing_the_drafters_kv_raises_the_acceptance(models) -> None:
    runner = HFRunner(models["llama"], {"quantize_bits": 5})
    with managed(runner, draft_tokens=4):
        shared = run_aggregated(runner, PROMPT, max_new_tokens=48)
        cold = run_aggregated(runner, PROMPT, max_new_tokens=48, share_draft_kv=False)
    assert shared.mean_acceptance_length > cold.mean_acceptance_length


@pytest.mark.parametrize("draft", [None, {"quantize_bits": 5}])
def test_end_tokens_and_lengths_mean_what_they_mean_to_generate(models, draft) -> None:
    runner = HFRunner(models["llama"], draft)
    long = runner.reference_generate(PROMPT, max_new_tokens=NEW_TOKENS)
    with managed(runner, draft_tokens=4 if draft else 0):
        for eos, length in (
            ((long[0],), 9),
            ((long[7],), NEW_TOKENS),
            ((long[9], long[12]), NEW_TOKENS),
            ((), 1),
            ((), 2),
        ):
            expected = runner.reference_generate(PROMPT, max_new_tokens=length, eos=eos)
            assert run_aggregated(runner, PROMPT, max_new_tokens=length, eos=eos).tokens == expected
    assert runner.target.generation_config.max_new_tokens is None  # the reference left the model's settings alone


@pytest.mark.parametrize("kv_dtype", [KVDtype.BFLOAT16, KVDtype.FLOAT8_E4M3FN])
def test_pages_may_hold_fewer_bits_than_the_computation(models, kv_dtype) -> None:
    runner = HFRunner(models["llama"])
    specs = runner.specs(kv_dtype=kv_dtype)
    assert {spec.dtype for spec in specs} == {kv_dtype}
    manager = UnifiedKVCacheManager(specs, tokens_per_block=8, max_seq_len=96, pool=PoolBudget(pages=20))
    runner.bind(manager)
    tokens = run_aggregated(runner, PROMPT, max_new_tokens=8).tokens
    manager.close()
    exact = runner.reference_generate(PROMPT, max_new_tokens=8)
    assert tokens[0] == exact[0]
    assert len(tokens) == 8


def test_bfloat16_computes_and_stores_bfloat16(models) -> None:
    runner = HFRunner(models["llama"], {"drop_layers": 1}, dtype="bfloat16", torch_threads=1)
    with managed(runner, draft_tokens=2) as manager:
        assert {spec.dtype for spec in manager.layout.specs} == {KVDtype.BFLOAT16}
        first = run_aggregated(runner, PROMPT, max_new_tokens=12)
        assert run_aggregated(runner, PROMPT, max_new_tokens=12) == first


def test_a_manager_without_speculation_or_draft_layers_decodes_plainly(models) -> None:
    runner = HFRunner(models["llama"], {"quantize_bits": 4})
    with managed(runner):
        assert runner.max_draft_tokens == 0
        plain = run_aggregated(runner, PROMPT, max_new_tokens=6)
    assert plain.proposed == 0
    bare = HFRunner(models["llama"])
    with managed(bare):
        assert bare.max_draft_tokens == 0
        assert run_aggregated(bare, PROMPT, max_new_tokens=6) == plain


def test_what_cannot_be_loaded_is_refused(models, tmp_path) -> None:
    with pytest.raises(ConfigError, match=r"dtype is 'int4', expected one of float32, float16, bfloat16"):
        HFRunner(models["llama"], dtype="int4")
    with pytest.raises(ConfigError, match=r"model is .*nowhere.* expected a directory with config.json"):
        HFRunner(tmp_path / "nowhere")
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    with pytest.raises(ConfigError, match=r"expected a causal language model .* transformers said"):
        HFRunner(tmp_path)
    with pytest.raises(ConfigError, match=r"runner.draft: vocab_size is 32, expected the target's 64"):
        HFRunner(models["llama"], models["other_vocabulary"])


def test_calls_out_of_order_are_refused(models) -> None:
    runner = HFRunner(models["llama"])
    with pytest.raises(LocalProtocolError, match=r"manager is None, expected a bound manager; call bind"):
        runner.manager  # noqa: B018 - the access is the call
    with managed(runner) as manager:
        request = manager.create_request(RequestId(4))
        with pytest.raises(SpecError, match=r"request 4: token_ids is 0, expected at least 1 token"):
            runner.prefill(request, [])
        with pytest.raises(SpecError, match=r"request 4: chunk_tokens is 0"):
            runner.prefill(request, PROMPT, chunk_tokens=0)
        runner.prefill(request, PROMPT)
        with pytest.raises(LocalProtocolError, match=r"history_tokens is 37, expected less than the prompt"):
            runner.prefill(request, PROMPT)
        sequence = runner.open_sequence(request, draft_valid_from=0)
        with pytest.raises(LocalProtocolError, match=r"drafter is None, expected a drafter; configure runner.draft"):
            sequence.propose([1], 37, 1)
        request.close()


def test_a_manager_built_for_another_model_is_refused(models) -> None:
    small = HFRunner(models["llama"])
    large = HFRunner(models["llama"], {"quantize_bits": 4})
    with managed(small) as manager:
        large.bind(manager)  # no draft layers: decodes without drafting
        assert large.max_draft_tokens == 0
    missing = r"count of owner draft is 4, expected 0; write count: 0"
    with managed(large) as manager, pytest.raises(ConfigError, match=missing):
        small.bind(manager)  # would hand over draft pages that nobody fills
    missing = r"count of owner draft is 2, expected 4; write count: 4"
    with managed(HFRunner(models["llama"], {"drop_layers": 2})) as manager, pytest.raises(ConfigError, match=missing):
        large.bind(manager)


@pytest.mark.model
@pytest.mark.timeout(300)
def test_a_real_model_keeps_its_tokens_and_gains_from_shared_draft_kv() -> None:
    directory = smollm2_directory()
    if not is_complete(directory):
        pytest.skip("SmolLM2 is not on this machine: run scripts/fetch_model.py once")
    runner = HFRunner(directory, {"quantize_bits": 3})
    assert len(decoder_layers(runner.target)) == 30
    tokenizer = transformers.AutoTokenizer.from_pretrained(directory, local_files_only=True)
    prompt = tokenizer(STORY).input_ids
    expected = runner.reference_generate(prompt, max_new_tokens=32)
    manager = manager_for(runner, max_seq_len=512, max_draft_tokens=4)
    shared = run_aggregated(runner, prompt, max_new_tokens=32)
    cold = run_aggregated(runner, prompt, max_new_tokens=32, share_draft_kv=False)
    manager.close()
    assert shared.tokens == cold.tokens == expected
    assert shared.mean_acceptance_length > cold.mean_acceptance_length > 1.0


STORY = """The lighthouse at the end of the point had been empty for eleven years when the council decided to sell it.
Nobody in the village could remember who had first suggested the idea, but everyone could remember what they had said
against it. The baker said that the road would not carry the cars of visitors. The schoolteacher said that the children
needed a place to walk to on Sundays. The harbour master, who had kept the lamp for thirty years before the machines
came, said nothing at all, and went home early, and did not come to the next three meetings. The buyer was a woman
called Marta. She had made her money in the city by repairing clocks. She came on the bus, with one bag and a small
dog, and walked the two miles from the square to the point in the rain. When she reached the door she found that"""
