"""Whole pairs of worker processes on a GPU: every topology and path, and a real (tiny) model."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
    pytest.mark.timeout(240),
    pytest.mark.usefixtures("store_library"),
]
if torch.cuda.is_available():
    pytest.importorskip("cupy")

from unikv.cache_manager import UnifiedKVCacheManager  # noqa: E402
from unikv.layer_spec import KVCacheLayerSpec  # noqa: E402
from unikv.pool_mirror import PoolMirror  # noqa: E402
from workers.aggregated import manager_for, run_aggregated  # noqa: E402
from workers.bench_case import pattern_jobs  # noqa: E402
from workers.config import PairConfig  # noqa: E402
from workers.config_load import load_pair  # noqa: E402
from workers.pair_run import RunningPair  # noqa: E402
from workers.workload import Job  # noqa: E402

CUDA = ("context.device=cuda", "generation.device=cuda")
BANDED = ("transfer.layer_bands=4",)
NARROW = ("model.layers.0.count=4", "context.pool.pages=80", "generation.pool.pages=80", "workload.requests=4")
CASES: dict[str, tuple[str, ...]] = {
    "tp1 to tp1": ("context.parallel.tp=1", "generation.parallel.tp=1"),
    "tp2 to tp1": ("context.parallel.tp=2", "generation.parallel.tp=1"),
    "tp1 to tp2": ("context.parallel.tp=1", "generation.parallel.tp=2"),
    "tp1 to tp1, NHD to HND": ("context.parallel.tp=1", "generation.parallel.tp=1", "context.kv_layout=NHD"),
    "tp1 to tp1, early, in bands": ("context.parallel.tp=1", "generation.parallel.tp=1", *BANDED),
    "tp1 to tp2, staged": ("context.parallel.tp=1", "generation.parallel.tp=2", "transfer.path=zmq"),
    "tp1 to tp1, auto, pages of 16 to 64": (
        *("context.parallel.tp=1", "generation.parallel.tp=1", "transfer.path=auto"),
        *("model.tokens_per_block=16",),
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_every_byte_arrives(case: str) -> None:
    overrides = (*CUDA, *NARROW, *CASES[case])
    pair = load_pair("pattern-small", overrides=overrides, environ={})
    with RunningPair(pair, ["pattern-small", *(w for text in overrides for w in ("--set", text))]) as running:
        run = running.run(pattern_jobs(pair))
    assert not run.deaths
    assert {path.path for path in run.paths} == {"zmq" if "staged" in case else "direct"}
    for record in run.records:
        verified, mismatched, first = record.verification()
        assert verified and mismatched == 0, (record.reason, first)


@pytest.mark.gpu2
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
def test_ranks_on_two_devices() -> None:
    overrides = (*CUDA, *NARROW, "context.devices=[0, 1]", "generation.parallel.tp=2", "generation.devices=[1, 0]")
    pair = load_pair("pattern-small", overrides=(*overrides, "transfer.path=auto"), environ={})
    with RunningPair(pair, ["pattern-small", *(w for text in pair_words(overrides) for w in text)]) as running:
        run = running.run(pattern_jobs(pair))
    assert all(record.verification()[:2] == (True, 0) for record in run.records)


def pair_words(overrides: tuple[str, ...]) -> list[tuple[str, str]]:
    return [("--set", text) for text in (*overrides, "transfer.path=auto")]


def small_manager(specs: list[KVCacheLayerSpec], device: str) -> UnifiedKVCacheManager:
    from unikv.budget import PoolBudget  # noqa: PLC0415

    return UnifiedKVCacheManager(specs, tokens_per_block=16, max_seq_len=256, pool=PoolBudget(pages=12), device=device)


def test_a_mirror_shows_and_changes_single_slots(tiny_pair: Callable[..., PairConfig]) -> None:
    from workers.topology import positions, rank_specs  # noqa: PLC0415

    side = tiny_pair().context
    manager = small_manager(list(rank_specs(side, positions(side)[0])), "cuda:0")
    mirror = PoolMirror(manager.layout, manager.pools)
    group = manager.layout.groups[0]
    import numpy as np  # noqa: PLC0415

    slots = np.array([3, 5, -1], np.int32)
    for array in mirror.arrays:
        array[:] = 9
    mirror.push({group.group_id: slots})
    storage = manager.pools.storages[manager.pools.storage_of(group.group_id, 0)].view(-1, group.pools[0].slot_bytes)
    assert [bool((storage[n] == 9).all()) for n in range(7)] == [False, False, False, True, False, True, False]
    storage[3] = 4
    mirror.pull({group.group_id: slots[:1]})
    seen = mirror.arrays[manager.pools.storage_of(group.group_id, 0)].reshape(-1, group.pools[0].slot_bytes)
    assert (seen[3] == 4).all() and (seen[5] == 9).all()
    manager.close()


# --- a model ----------------------------------------------------------------------------------------------------------

VOCABULARY = 64
SIZES = {
    "vocab_size": VOCABULARY, "hidden_size": 48, "intermediate_size": 96, "num_hidden_layers": 4,
    "num_attention_heads": 6, "num_key_value_heads": 2, "max_position_embeddings": 512, "initializer_range": 0.2,
    "bos_token_id": None, "eos_token_id": None,
}  # fmt: skip
PROMPTS = [tuple(random.Random(seed).randrange(VOCABULARY) for _ in range(90 + seed)) for seed in range(3)]
NEW_TOKENS = 20
DRAFT_TOKENS = 3


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(1)
    directory = tmp_path_factory.mktemp("model")
    transformers.LlamaForCausalLM(transformers.LlamaConfig(**SIZES)).save_pretrained(directory)
    return directory


@pytest.mark.parametrize("bands", [0, 4])
def test_a_model_generates_what_one_process_generates(model: Path, write_pair: Callable[..., str], bands: int) -> None:
    """Prefill in chunks, drafts and all; with bands layers leave while later ones are computed."""
    from workers.runner_hf import HFRunner  # noqa: PLC0415

    runner = HFRunner(str(model), {"quantize_bits": 4}, device="cuda:0")
    manager = manager_for(runner, max_seq_len=256, tokens_per_block=16, max_draft_tokens=DRAFT_TOKENS)
    expected = [
        run_aggregated(runner, prompt, max_new_tokens=NEW_TOKENS, chunk_tokens=32, request_id=n)
        for n, prompt in enumerate(PROMPTS)
    ]
    manager.close()
    layer: dict[str, Any] = {"count": 4, "kv_heads": 2, "head_dim": 8, "dtype": "float32"}
    source = write_pair(
        model__layers=[{**layer, "owner": "target"}, {**layer, "owner": "draft", "reuse": "optional"}],
        speculative={
            "method": "draft_model", "max_draft_tokens": DRAFT_TOKENS, "block_width": DRAFT_TOKENS,
            "num_extra_kv_tokens": DRAFT_TOKENS - 1,
        },
        context__device="cuda", generation__device="cuda", context__pool={"pages": 64}, generation__pool={"pages": 64},
        transfer={"path": "direct", "layer_bands": bands, "timeout_s": 60},
        runner={"kind": "hf", "model": str(model), "draft": {"quantize_bits": 4}, "chunk_tokens": 32},
        workload={"requests": 3, "prompt_tokens": [20, 100], "output_tokens": NEW_TOKENS, "concurrency": 2},
    )  # fmt: skip
    pair = load_pair(source, environ={})
    jobs = [Job(prompt=p, prompt_tokens=len(p), max_new_tokens=NEW_TOKENS) for p in PROMPTS]
    with RunningPair(pair, [source]) as running:
        run = running.run(jobs)
    for record, want in zip(run.records, expected, strict=True):
        verified, mismatched, first = record.verification()
        assert verified and mismatched == 0, (record.reason, first)
        assert record.tokens == want.tokens
