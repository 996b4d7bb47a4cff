"""Gate, plan and pages of a pair as plain data, on worked numbers."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from unikv.errors import ConfigError, IncompatiblePeerError
from workers.config import PairConfig
from workers.config_load import load_pair
from workers.dry_pair import check_report, judge, pages_report, plan_report

PAIRS = Path(__file__).parent / "pairs"
ROLES = ("key", "value")


def pair(name: str, *overrides: str, case: str | None = None) -> PairConfig:
    return load_pair(str(PAIRS / f"{name}.yaml"), overrides=overrides, case=case, environ={})


def ranks(report: dict[str, Any]) -> list[tuple[int, int]]:
    return [(item["context_rank"], item["generation_rank"]) for item in report["pairs"]]


def ordinals(name: str, *overrides: str, **prompt: int) -> list[list[int]]:
    return [group["ordinals"] for group in pages_report(pair(name, *overrides), **prompt)["groups"]]


def test_a_sound_pair_passes_every_check() -> None:
    found = check_report(judge(pair("tp2-tp4")))
    assert (found["compatible"], found["draft_kv"]) == (True, "per_view")
    assert {check["verdict"] for check in found["checks"]} == {"ok"}
    assert {"name", "scope", "context", "generation", "verdict", "reason"} == set(found["checks"][0])
    assert len({(check["name"], check["scope"]) for check in found["checks"]}) == len(found["checks"]) > 20


def test_unequal_tensor_parallelism_keeps_the_draft_at_home() -> None:
    found = check_report(judge(pair("tp2-tp4", case="draft-stays")))
    assert (found["compatible"], found["draft_kv"]) == (True, "off")
    fallbacks = [(check["name"], check["scope"]) for check in found["checks"] if check["verdict"] == "fallback"]
    assert fallbacks == [("tp", "draft"), ("draft_kv", "draft")]


def test_a_draft_that_must_travel_and_cannot_is_refused() -> None:
    found = check_report(judge(pair("tp2-tp4", case="draft-must")))
    assert not found["compatible"]
    refused = [check for check in found["checks"] if check["verdict"] == "refuse"]
    assert [check["name"] for check in refused] == ["tp", "draft_kv"]
    assert "tp is 2 on context and 4 on generation" in refused[0]["reason"]


@pytest.mark.parametrize(
    ("name", "check", "context", "generation"),
    [
        ("windows-differ", "window", "1024 tokens", "512 tokens"),
        ("dtypes-differ", "dtype", "bfloat16", "float16"),
        ("pages-differ", "tokens_per_block", "32 tokens", "48 tokens"),
    ],
)
def test_sides_that_differ_are_refused_with_both_values(name: str, check: str, context: str, generation: str) -> None:
    report = check_report(judge(pair(name)))
    (row,) = [row for row in report["checks"] if row["verdict"] == "refuse"]
    assert (row["name"], row["context"], row["generation"]) == (check, context, generation)
    assert len(report["checks"]) > 20
    with pytest.raises(IncompatiblePeerError, match=f"{check} is {context} on context and {generation} on generation"):
        plan_report(pair(name))
    with pytest.raises(IncompatiblePeerError, match=f"{check} "):
        pages_report(pair(name), prompt_tokens=10)


def test_two_ranks_feed_four() -> None:
    found = plan_report(pair("tp2-tp4"))
    assert ranks(found) == [(0, 0), (0, 1), (1, 2), (1, 3)]
    # HND: two of four heads are 2 x 32 x 128 x 2 bytes in one piece; buffers of a slot follow one another.
    second = found["pairs"][1]["slices"]
    target = [
        (s["layer"], s["role"], s["heads"], s["src_offset"], s["dst_offset"], s["bytes_per_page"])
        for s in second
        if s["owner"] == "target"
    ]
    assert target == [
        (layer, role, [2, 4], 32768 * number + 16384, 16384 * number, 16384)
        for number, (layer, role) in enumerate((layer, role) for layer in (0, 1) for role in ROLES)
    ]
    assert {s["src_offset"] % 32768 for s in found["pairs"][0]["slices"] if s["owner"] == "target"} == {0}
    draft = [(s["heads"], s["src_offset"] % 16384, s["bytes_per_page"]) for s in second if s["owner"] == "draft"]
    assert draft == [([1, 2], 8192, 8192)] * 4
    assert found["pairs"][0]["bytes_per_page"] == 4 * 16384 + 4 * 8192
    # One lane per kind of buffer: equal strides fold all layers and roles of a pool.
    assert [item["lanes"] for item in found["pairs"]] == [2, 2, 2, 2]


def test_offsets_of_nhd_are_those_of_the_first_token() -> None:
    found = plan_report(pair("tp2-tp4", "model.kv_layout=NHD"))
    key = found["pairs"][1]["slices"][0]
    assert (key["heads"], key["src_offset"], key["dst_offset"], key["bytes_per_page"]) == ([2, 4], 512, 0, 16384)


def test_draft_layers_are_absent_where_they_stay_at_home() -> None:
    found = plan_report(pair("tp2-tp4", case="draft-stays"))
    assert found["draft_kv"] == "off"
    assert {s["owner"] for item in found["pairs"] for s in item["slices"]} == {"target"}
    assert found["digest"] != plan_report(pair("tp2-tp4"))["digest"]


def test_the_digest_says_whether_two_plans_are_one() -> None:
    plans = [plan_report(pair("tp2-tp4", *change)) for change in ((), (), ("context.parallel.tp=4",))]
    assert plans[0] == plans[1]
    assert plans[0]["digest"] != plans[2]["digest"]
    assert len({item["digest"] for plan in plans for item in plan["pairs"]} | {plans[0]["digest"]}) == 9


@pytest.mark.parametrize(
    "change",
    [
        ("context.parallel={tp: 2, pp: 2}", "generation.parallel={tp: 1}"),
        ("context.parallel={tp: 8}", "generation.parallel={tp: 2}"),
        ("context.parallel={tp: 1}", "generation.parallel={tp: 16, pp: 2}"),
        ("context.kv_layout=NHD", "model.tokens_per_block=16"),
    ],
)
def test_every_head_of_every_generation_rank_comes_from_exactly_one_place(change: tuple[str, str]) -> None:
    config = pair("tp2-tp4", *change)
    written: Counter[tuple[int, int, str, int]] = Counter()
    for item in plan_report(config)["pairs"]:
        for piece in item["slices"]:
            for head in range(*piece["heads"]):
                written[item["generation_rank"], piece["layer"], piece["role"], head] += 1
    assert set(written.values()) == {1}
    # Two layers of each owner, K and V; a head is held several times where ranks outnumber the heads.
    tp = config.generation.parallel.tp
    assert len(written) == sum(2 * 2 * max(heads, tp) for heads in (8, 4))


def test_data_parallel_ranks_are_planned_one_by_one() -> None:
    whole = plan_report(pair("attention-dp"))
    assert ranks(whole) == [(c, g) for c in range(4) for g in range(4)]
    one = plan_report(pair("attention-dp"), context_dp=1, generation_dp=2)
    # Data-parallel rank 1 is tensor-parallel rank 1 of both stages.
    assert ranks(one) == [(1, 2), (3, 2)]
    assert [{s["layer"] for s in item["slices"]} for item in one["pairs"]] == [{0, 1, 2}, {3, 4, 5}]
    assert {tuple(s["heads"]) for item in one["pairs"] for s in item["slices"] if s["owner"] == "target"} == {(0, 3)}
    assert ranks(plan_report(pair("attention-dp"), generation_dp=0)) == [(c, 0) for c in range(4)]


@pytest.mark.parametrize(
    ("name", "choice", "message"),
    [
        ("attention-dp", {"context_dp": 2}, r"--context-dp is 2, expected in \[0, 2\), .* of the context side"),
        ("attention-dp", {"generation_dp": -1}, r"--generation-dp is -1, expected in \[0, 4\)"),
        ("tp2-tp4", {"generation_dp": 1}, r"--generation-dp is 1, expected in \[0, 1\)"),
    ],
)
def test_data_parallel_ranks_that_are_not_there(name: str, choice: dict[str, int], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        plan_report(pair(name), **choice)


def test_the_only_data_parallel_rank_is_everything() -> None:
    assert plan_report(pair("tp2-tp4"), context_dp=0, generation_dp=0) == plan_report(pair("tp2-tp4"))


@pytest.mark.parametrize(
    ("window", "prompt_tokens", "travelling"),
    [
        (2048, 2080, range(1, 65)),
        (2048, 2079, range(1, 65)),
        (2048, 2078, range(65)),
        (256, 1000, range(23, 32)),
        (256, 0, range(0)),
        (8192, 8192, range(256)),
    ],
)
def test_blocks_that_left_the_window_stay_home(window: int, prompt_tokens: int, travelling: range) -> None:
    target, draft = ordinals("tp2-tp4", f"model.layers.1.window={window}", prompt_tokens=prompt_tokens)
    assert target == list(range(-(-prompt_tokens // 32)))
    assert draft == list(travelling)


def test_cached_tokens_spare_whole_blocks() -> None:
    assert ordinals("tp2-tp4", prompt_tokens=100, cached_tokens=63) == [[1, 2, 3]] * 2
    assert ordinals("tp2-tp4", prompt_tokens=100, cached_tokens=100) == [[3]] * 2
    assert ordinals("tp2-tp4", "model.layers.1.reuse=private", prompt_tokens=100, cached_tokens=64) == [
        [2, 3],
        [0, 1, 2, 3],
    ]


def test_sinks_travel_with_the_window() -> None:
    sinks = ("model.layers.1.window=64", "model.layers.1.sink_tokens=33")
    assert ordinals("tp2-tp4", *sinks, prompt_tokens=320)[1] == [0, 1, 8, 9]


def test_ordinals_count_blocks_of_the_generation_side() -> None:
    config = load_pair(str(PAIRS / "pages-differ.yaml"), overrides=["generation.tokens_per_block=64"], environ={})
    found = pages_report(config, prompt_tokens=130)
    assert (found["tokens_per_block"], [group["ordinals"] for group in found["groups"]]) == (64, [[0, 1, 2]])


def test_pages_say_whether_their_group_travels() -> None:
    stays = pages_report(pair("tp2-tp4", case="draft-stays"), prompt_tokens=64)
    assert [(g["owner"], g["travels"], g["ordinals"]) for g in stays["groups"]] == [
        ("target", True, [0, 1]),
        ("draft", False, [0, 1]),
    ]
    assert [g["travels"] for g in pages_report(pair("tp2-tp4"), prompt_tokens=64)["groups"]] == [True, True]


def test_groups_are_those_of_the_whole_instance() -> None:
    groups = pages_report(pair("tp2-tp4", "generation.parallel={tp: 4, pp: 2}"), prompt_tokens=1)["groups"]
    assert [(group["id"], group["owner"], group["window"]) for group in groups] == [
        (0, "target", None),
        (1, "draft", 2048),
    ]


CP = ("generation.parallel={tp: 2, cp: 3}",)


def test_blocks_are_dealt_to_context_parallel_ranks() -> None:
    found = plan_report(pair("tp2-tp4", *CP))
    assert [
        (*rank, item["ordinal_start"], item["ordinal_step"])
        for rank, item in zip(ranks(found), found["pairs"], strict=True)
    ] == [(0, 0, 0, 3), (0, 1, 1, 3), (0, 2, 2, 3), (1, 3, 0, 3), (1, 4, 1, 3), (1, 5, 2, 3)]
    groups = pages_report(pair("tp2-tp4", *CP, "model.layers.1.window=64"), prompt_tokens=250)
    assert groups["cp"] == 3
    assert [(group["ordinals"], group["by_cp_rank"]) for group in groups["groups"]] == [
        ([0, 1, 2, 3, 4, 5, 6, 7], [[0, 3, 6], [1, 4, 7], [2, 5]]),
        ([5, 6, 7], [[6], [7], [5]]),
    ]


def test_without_context_parallelism_everything_passes_between_two_ranks() -> None:
    assert {(p["ordinal_start"], p["ordinal_step"]) for p in plan_report(pair("tp2-tp4"))["pairs"]} == {(0, 1)}
    found = pages_report(pair("tp2-tp4"), prompt_tokens=250)
    assert found["cp"] == 1 and all("by_cp_rank" not in group for group in found["groups"])


def test_the_gate_lets_blocks_be_dealt_where_they_have_one_length() -> None:
    assert check_report(judge(pair("tp2-tp4", *CP)))["compatible"]
    refused = check_report(judge(pair("pages-differ", "generation.parallel.cp=2", "generation.tokens_per_block=64")))
    assert not refused["compatible"]
    [row] = [check for check in refused["checks"] if check["name"] == "cp"]
    assert (row["verdict"], row["context"], row["generation"]) == ("refuse", "1", "2")


@given(prompt_tokens=st.integers(0, 8192), cached_tokens=st.integers(0, 8192), window=st.integers(1, 8191))
def test_what_travels_is_what_the_next_token_sees(prompt_tokens: int, cached_tokens: int, window: int) -> None:
    cached_tokens = min(cached_tokens, prompt_tokens)
    config = pair("tp2-tp4", f"model.layers.1.window={window}")
    groups = pages_report(config, prompt_tokens=prompt_tokens, cached_tokens=cached_tokens)["groups"]
    # The next token, at position prompt_tokens, sees as many positions as the window is long, its own the last of them.
    seen = {position // 32 for position in range(max(0, prompt_tokens + 1 - window), prompt_tokens + 1)}
    filled = range(-(-prompt_tokens // 32))
    assert groups[1]["ordinals"] == [o for o in filled if o in seen and o >= cached_tokens // 32]


@pytest.mark.parametrize(
    ("prompt", "message"),
    [
        ({"prompt_tokens": -1}, r"--prompt-tokens is -1, expected in \[0, 8192\]"),
        ({"prompt_tokens": 8193}, "--prompt-tokens is 8193"),
        ({"prompt_tokens": 10, "cached_tokens": -1}, r"--cached-tokens is -1, expected in \[0, 10\]"),
        ({"prompt_tokens": 10, "cached_tokens": 11}, "--cached-tokens is 11"),
    ],
)
def test_prompts_out_of_range(prompt: dict[str, int], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        pages_report(pair("tp2-tp4"), **prompt)


def test_a_sequence_length_nobody_lists_is_no_trap() -> None:
    with pytest.raises(ConfigError, match=r"expected in \[0, 16777216\]"):
        pages_report(pair("tp2-tp4", "model.max_seq_len=1000000000000"), prompt_tokens=10**11)
