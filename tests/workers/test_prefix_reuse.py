"""Models on pages that others computed: tokens stay the model's own, and what is cached is not computed again."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from unikv.budget import PoolBudget  # noqa: E402
from unikv.cache_manager import UnifiedKVCacheManager  # noqa: E402
from unikv.errors import CapacityError  # noqa: E402
from unikv.ids import NO_PAGE, RequestId  # noqa: E402
from unikv.layer_spec import ReusePolicy  # noqa: E402
from unikv.speculation import SpeculationShape  # noqa: E402
from workers.aggregated import run_aggregated  # noqa: E402
from workers.prefix_reuse import open_for_decode, open_for_prefill, plan_prefill, taken_over_tokens, without  # noqa: E402
from workers.runner_hf import HFRunner  # noqa: E402

BLOCK, DRAFTS, NEW_TOKENS = 8, 3, 12
SIZES: dict[str, Any] = {
    "vocab_size": 64, "hidden_size": 48, "intermediate_size": 96, "num_hidden_layers": 3, "num_attention_heads": 6,
    "num_key_value_heads": 2, "max_position_embeddings": 512, "initializer_range": 0.2, "bos_token_id": None,
    "eos_token_id": None,
}  # fmt: skip


def words(count: int, seed: int) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(64) for _ in range(count)]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    torch.manual_seed(5)
    root = tmp_path_factory.mktemp("models")
    transformers.LlamaForCausalLM(transformers.LlamaConfig(**SIZES)).save_pretrained(root / "full")
    window = {"use_sliding_window": True, "sliding_window": 12, "max_window_layers": 1}
    transformers.Qwen2ForCausalLM(transformers.Qwen2Config(**SIZES | window)).save_pretrained(root / "windowed")
    return {"full": root / "full", "windowed": root / "windowed"}


@pytest.fixture(params=[None, 11], ids=["drafter sees all", "drafter sees a window"])
def draft_window(request: pytest.FixtureRequest) -> int | None:
    window: int | None = request.param
    return window


@pytest.fixture(params=["full", "windowed"])
def runner(request: pytest.FixtureRequest, models: dict[str, Path], draft_window: int | None) -> HFRunner:
    return HFRunner(models[request.param], {"quantize_bits": 4}, draft_window=draft_window, torch_threads=1)


@pytest.fixture
def build(runner: HFRunner) -> Iterator[Callable[..., UnifiedKVCacheManager]]:
    """Bind the runner to a new cache; policies are by owner."""
    built: list[UnifiedKVCacheManager] = []

    def build_one(pages: int = 100, **policies: ReusePolicy) -> UnifiedKVCacheManager:
        specs = [replace(s, reuse_policy=policies.get(s.owner.value, s.reuse_policy)) for s in runner.specs()]
        manager = UnifiedKVCacheManager(
            specs, tokens_per_block=BLOCK, max_seq_len=256, pool=PoolBudget(pages=pages),
            speculation=SpeculationShape(max_draft_tokens=DRAFTS, block_width=DRAFTS, num_extra_kv_tokens=DRAFTS - 1),
        )  # fmt: skip
        built.append(manager)
        for pages_of in buffers(manager):  # nothing may be read that was not written: NaN would spread to every output
            pages_of.fill_(float("nan"))
        runner.bind(manager)
        return manager

    yield build_one
    for manager in built:
        manager.check_integrity()
        manager.close()


@pytest.fixture
def manager(build: Callable[..., UnifiedKVCacheManager]) -> UnifiedKVCacheManager:
    return build()


def buffers(manager: UnifiedKVCacheManager) -> Iterator[Any]:
    for spec in manager.layout.specs:
        found = manager.get_buffers(spec.layer_id)
        assert found is not None
        yield found


def run(runner: HFRunner, prompt: list[int], number: int) -> list[int]:
    result = run_aggregated(runner, prompt, max_new_tokens=NEW_TOKENS, request_id=number, reuse=True)
    assert result.tokens == runner.reference_generate(prompt, max_new_tokens=NEW_TOKENS)
    return list(result.tokens)


def test_conversations_say_what_they_would_without_a_cache(runner: HFRunner, manager: UnifiedKVCacheManager) -> None:
    prompt, before = words(37, 1), 0
    for turn in range(4):
        request, _ = open_for_prefill(manager, RequestId(99), tuple(prompt))
        cached = request.history_tokens
        request.close()
        assert (cached > 0) == (turn > 0)
        # Everything but the answer's last tokens, of which the drafter may have skipped some.
        assert cached >= before - DRAFTS - 2 or turn == 0
        output = run(runner, prompt, turn)
        before = len(prompt) + len(output)
        prompt = [*prompt, *output, *words(5, 10 + turn)]
    assert manager.statistics.reused_pages > 0 and manager.statistics.copied_pages > 0


def test_branches_share_what_they_have_in_common(runner: HFRunner, manager: UnifiedKVCacheManager) -> None:
    shared = words(45, 2)
    for number in range(4):
        prompt = [*shared, *words(9 + number, 20 + number)]
        plan = plan_prefill(manager, tuple(prompt))
        run(runner, prompt, number)
        assert (plan.claim_tokens > 0) == (number > 0)
    # By the third branch the drafter's window at the fork is there.
    assert plan.claim_tokens == len(shared) and plan.publish_at is None


def test_a_small_pool_forgets_and_goes_on(runner: HFRunner, build: Callable[..., UnifiedKVCacheManager]) -> None:
    """Every prompt pushes others out; what is left must still be right."""
    with_room = build(pages=14)
    first = words(30, 3)
    for number in range(8):
        run(runner, [*first[: 10 + 4 * (number % 5)], *words(3 + number, 30 + number)], number)
        with_room.check_integrity()
    assert with_room.statistics.dropped_pages > 0


def test_a_receiver_asks_for_what_it_lacks_and_no_more(runner: HFRunner, manager: UnifiedKVCacheManager) -> None:
    prompt = words(40, 4)
    output = run(runner, prompt, 1)
    following = (*prompt, *output, *words(6, 5))
    request = open_for_decode(manager, RequestId(2), following)
    taken = taken_over_tokens(manager, request)
    assert all(count % BLOCK == 0 and count >= len(prompt) // BLOCK * BLOCK for count in taken.values())
    request.resize(manager.generation_capacity(len(following), DRAFTS), len(following))
    tables = request.page_tables()
    wanted = without(tables, taken, BLOCK)
    for group_id, row in wanted.items():
        kept = taken[group_id] // BLOCK
        assert (row[:kept] == NO_PAGE).all() and np.array_equal(row[kept:], tables[group_id][kept:])
    request.close()


def test_a_request_without_tokens_takes_no_part(manager: UnifiedKVCacheManager) -> None:
    for request in (open_for_prefill(manager, RequestId(1), ())[0], open_for_decode(manager, RequestId(2), ())):
        assert (request.history_tokens, request.committing) == (0, False)
        assert taken_over_tokens(manager, request) == {}
        request.close()


def test_no_pages_for_a_claim_leaves_nothing_open(runner: HFRunner, manager: UnifiedKVCacheManager) -> None:
    prompt = words(36, 6)
    run(runner, prompt, 1)
    held = manager.create_request(RequestId(2), (*prompt, 9))  # keeps the prefix, which ends inside a block
    hogs = [manager.create_request(RequestId(100 + number)) for number in range(100)]
    with contextlib.suppress(CapacityError):
        for hog in hogs:
            hog.resize(BLOCK)
    late = open_for_decode(manager, RequestId(3), (*prompt, 1, 2, 3))  # at most with what needs no page of its own
    assert late.history_tokens % BLOCK == 0
    with pytest.raises(CapacityError, match=r"request 3"):
        late.resize(manager.generation_capacity(39, DRAFTS), 39)
    for request in (late, *hogs, held):
        request.close()
    manager.create_request(RequestId(3)).close()


@pytest.mark.parametrize(("owner", "policy"), [(o, p) for o in ("target", "draft") for p in ReusePolicy], ids=str)
def test_any_policy_leaves_tokens_and_acceptance_as_they_are(
    runner: HFRunner, build: Callable[..., UnifiedKVCacheManager], owner: str, policy: ReusePolicy
) -> None:
    """Layers whose KV is not kept are computed again; nobody reads pages that were never filled."""
    prompt = words(61, 7)
    other = [*prompt[:44], *words(19, 8)]
    alone = {}
    for number, tokens in enumerate((prompt, other)):
        build()
        alone[number] = run_aggregated(runner, tokens, max_new_tokens=NEW_TOKENS).accepted
    manager = build(**{owner: policy})
    for number, tokens in enumerate((prompt, prompt, other, other)):
        result = run_aggregated(runner, tokens, max_new_tokens=NEW_TOKENS, request_id=number, reuse=True)
        assert result.tokens == runner.reference_generate(tokens, max_new_tokens=NEW_TOKENS)
        if runner.draft_window is None and "windowed" not in str(runner.target.name_or_path):
            assert result.accepted == alone[number // 2]
    reuses = policy is not ReusePolicy.PRIVATE or (owner == "draft" and runner.draft_window is not None)
    assert (manager.statistics.reused_pages > 0) == reuses


def test_a_window_of_the_target_that_may_be_missing_is_never_left_out(
    runner: HFRunner, build: Callable[..., UnifiedKVCacheManager]
) -> None:
    manager = build(target=ReusePolicy.OPTIONAL)
    prompt = words(61, 9)
    run(runner, prompt, 1)
    windowed = {g.group_id for g in manager.layout.groups if g.window is not None}
    for page in [page for page in manager._cache._pages.values() if page.group_id in windowed and page.ordinal < 6]:
        manager._cache.unlink(page)
    for number, branch in enumerate((40, 50, 61, 30), start=2):
        run(runner, [*prompt[:branch], *words(12, number)], number)


def test_a_drafter_never_reads_pages_of_others(runner: HFRunner, build: Callable[..., UnifiedKVCacheManager]) -> None:
    """What a drafter lacks of a prefix is not there, whatever lies in its fresh pages: nor is it published."""
    manager, prompt = build(), words(45, 10)
    for number in range(4):
        drafts = {g.group_id for g in manager.layout.groups if g.reuse_policy is ReusePolicy.OPTIONAL}
        for page in [page for page in manager._cache._pages.values() if page.group_id in drafts and page.ordinal > 1]:
            manager._cache.unlink(page)
        run(runner, [*prompt, *words(20 + number, 40 + number)], number)
    for page in manager._cache._pages.values():
        for spec in manager.layout.specs:
            if manager.layer_group_id(spec.layer_id) == page.group_id:
                pages_of = manager.get_buffers(spec.layer_id)
                assert pages_of is not None
                assert not pages_of[page.slot][:, :, page.valid_from : page.span].isnan().any()


@pytest.mark.parametrize("length", [10, 17, 18, 26, 31])
def test_what_fits_alone_fits_with_a_prefix(
    runner: HFRunner, build: Callable[..., UnifiedKVCacheManager], length: int
) -> None:
    """A block that is used in part is copied: where there is no page for the copy, it is computed or moved anew."""
    layout = build().layout
    blocks = -(-(length + 2 * DRAFTS) // BLOCK)
    pages = blocks * max(sum(g.pool_group == p for g in layout.groups) for p in range(len(layout.groups)))
    manager, prompt = build(pages=1 + pages), words(length, 11)
    for number in range(3):
        result = run_aggregated(runner, prompt, max_new_tokens=1, request_id=number, reuse=True)
        assert result.tokens == runner.reference_generate(prompt, max_new_tokens=1)
        request = open_for_decode(manager, RequestId(9), tuple(prompt))
        request.resize(manager.generation_capacity(length, DRAFTS), length)
        request.close()
    assert manager.statistics.reused_pages > 0
