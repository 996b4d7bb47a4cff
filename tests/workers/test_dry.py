"""Layout and size of one rank as plain data, on worked numbers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from transfer.hello import ParallelPosition, Side
from unikv.errors import CapacityError, ConfigError
from unikv.page_cache import PageCacheManager
from unikv.slots import GroupChange
from workers.config import PairConfig
from workers.config_load import load_pair
from workers.dry import MAX_COUNT, layout_report, size_report
from workers.topology import rank_layout

PAIRS = Path(__file__).parent / "pairs"


def pair(name: str, *overrides: str) -> PairConfig:
    return load_pair(str(PAIRS / f"{name}.yaml"), overrides=overrides, environ={})


def size(name: str, *overrides: str, **load: Any) -> dict[str, Any]:
    return size_report(pair(name, *overrides), Side.GENERATION, **load)


def test_a_layout_names_groups_pools_and_buffers() -> None:
    found = layout_report(pair("tp2-tp4"), Side.CONTEXT, 1)
    target, draft = found["groups"]
    assert target == {
        "id": 0, "window": None, "sink_blocks": 0, "reuse": "required", "owner": "target", "layers": [0, 1],
        "pool_group": 0, "page_bytes": 131072,
    }  # fmt: skip
    assert (draft["window"], draft["reuse"], draft["owner"], draft["layers"]) == (2048, "optional", "draft", [2, 3])
    # 4 heads x 32 tokens x 128 elements x 2 bytes; K and V of two layers side by side.
    assert found["pools"][0] == {
        "group": 0,
        "index": 0,
        "slot_bytes": 131072,
        "buffer_bytes": 32768,
        "buffers": [
            {"layer": 0, "role": "key", "offset": 0, "bytes": 32768},
            {"layer": 0, "role": "value", "offset": 32768, "bytes": 32768},
            {"layer": 1, "role": "key", "offset": 65536, "bytes": 32768},
            {"layer": 1, "role": "value", "offset": 98304, "bytes": 32768},
        ],
    }
    assert found["bytes_per_token"] == 2 * 2048 + 2 * 1024


def test_a_context_parallel_rank_has_its_own_blocks_of_the_same_pages() -> None:
    whole, dealt = (
        layout_report(pair("tp2-tp4", f"generation.parallel={{tp: 4, cp: {cp}}}"), Side.GENERATION, cp * 3)
        for cp in (1, 2)
    )
    assert (whole["cp"], whole["cp_rank"], dealt["cp"], dealt["cp_rank"]) == (1, 0, 2, 0)
    assert (dealt["groups"], dealt["pools"], dealt["layers"]) == (whole["groups"], whole["pools"], whole["layers"])
    last = layout_report(pair("tp2-tp4", "generation.parallel={tp: 4, cp: 2}"), Side.GENERATION, 7)
    assert (last["cp_rank"], last["layers"]) == (1, whole["layers"])
    with pytest.raises(ConfigError, match=r"generation.parallel.cp is 2, expected 1 for sizes"):
        size("tp2-tp4", "generation.parallel.cp=2")


@pytest.mark.parametrize(
    ("side", "rank", "target", "draft"),
    [(Side.CONTEXT, 0, [0, 4], [0, 2]), (Side.CONTEXT, 1, [4, 8], [2, 4]), (Side.GENERATION, 3, [6, 8], [3, 4])],
)
def test_heads_are_global(side: Side, rank: int, target: list[int], draft: list[int]) -> None:
    layers = layout_report(pair("tp2-tp4"), side, rank)["layers"]
    assert [layer["heads"] for layer in layers] == [target, target, draft, draft]
    assert [layer["local_kv_heads"] for layer in layers] == [hi - lo for lo, hi in (target, target, draft, draft)]
    assert [layer["layer"] for layer in layers] == [0, 1, 2, 3]


def test_a_layer_of_fewer_heads_than_ranks_is_held_by_several() -> None:
    layout = [layout_report(pair("tp2-tp4", "generation.parallel.tp=8"), Side.GENERATION, rank) for rank in range(8)]
    assert [report["layers"][2]["heads"] for report in layout] == [[r // 2, r // 2 + 1] for r in range(8)]


def test_every_kind_of_buffer_has_its_place() -> None:
    found = layout_report(pair("mixed"), Side.CONTEXT, 0)
    pools = [(pool["group"], pool["index"], pool["slot_bytes"], pool["buffer_bytes"]) for pool in found["pools"]]
    assert pools == [(0, 0, 8192, 2048), (0, 1, 8192, 4096), (0, 2, 8192, 8192), (0, 3, 1024, 256), (1, 0, 32768, 8192)]
    scales = [(b["layer"], b["role"], b["offset"]) for b in found["pools"][3]["buffers"]]
    assert scales == [
        (0, "key_block_scale", 0),
        (0, "value_block_scale", 256),
        (3, "key_block_scale", 512),
        (3, "value_block_scale", 768),
    ]
    assert [layer["bytes_per_token"] for layer in found["layers"]] == [144, 256, 256, 144, 512, 512]
    assert found["bytes_per_token"] == 1824


def test_stages_hold_their_share_and_the_last_one_the_drafter() -> None:
    ranks = [layout_report(pair("attention-dp"), Side.CONTEXT, rank) for rank in range(4)]
    assert [[layer["layer"] for layer in rank["layers"]] for rank in ranks] == [[0, 1, 2]] * 2 + [[3, 4, 5]] * 2
    assert all(layer["heads"] == [0, 3] for rank in ranks for layer in rank["layers"] if layer["owner"] == "target")


def test_large_extras_do_not_hide_the_heads() -> None:
    extras = "model.layers.0.extra_buffers={index_key: 100000}"
    assert layout_report(pair("tp2-tp4", extras), Side.CONTEXT, 1)["layers"][0]["heads"] == [4, 8]


@pytest.mark.parametrize("rank", [-1, 2, 10**30])
def test_a_rank_the_side_does_not_have(rank: int) -> None:
    with pytest.raises(ConfigError, match=rf"--rank is {rank}, expected in \[0, 2\), the ranks of context\.parallel"):
        layout_report(pair("tp2-tp4"), Side.CONTEXT, rank)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ("context.parallel={tp: 8, pp: 1000000}", "context: number of ranks is 8000000, expected <= 4096"),
        ("model.layers.0.count=1000000", "context: number of layers is 1000002, expected <= 16384"),
    ],
)
def test_instances_no_one_has_are_refused_at_once(change: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        layout_report(pair("tp2-tp4", change), Side.CONTEXT, 0)


@pytest.mark.parametrize(("tokens", "quota_bytes"), [(1000, 2872576), (4096, 6422528), (8192, 9699328)])
def test_the_cost_of_mixed_layers(tokens: int, quota_bytes: int) -> None:
    found = size("mixed", tokens=tokens, requests=8, iteration_tokens=2048)
    assert (found["context_bytes_per_token"], found["bytes_per_token"]) == (1824, 800)
    assert (found["fixed_bytes_per_request"], found["headroom_tokens"]) == (131072, 15)
    assert (found["quota_bytes"], found["tokens_for_quota"]) == (quota_bytes, tokens)


@given(tokens=st.integers(0, 10**7), requests=st.integers(1, 500))
def test_cost_is_affine_and_the_way_back_exact(tokens: int, requests: int) -> None:
    found = size("mixed", tokens=tokens, requests=requests)
    fixed_bytes = requests * found["fixed_bytes_per_request"]
    assert found["quota_bytes"] == tokens * found["bytes_per_token"] + fixed_bytes
    assert found["tokens_for_quota"] == tokens


@given(blocks=st.integers(4, 255), requests=st.integers(1, 40))
def test_groups_add_up_to_the_load_in_whole_pages(blocks: int, requests: int) -> None:
    found = size("mixed", tokens=requests * blocks * 32, requests=requests)
    assert requests * sum(group["bytes"] for group in found["groups"]) == found["resident_bytes"]
    # The last step begins with one token less, and is 15 ahead. 64 tokens of window and these touch at most 4 blocks.
    assert [group["pages_per_request"] for group in found["groups"]] == [blocks + 1, 4]
    assert found["resident_bytes"] >= found["quota_bytes"]


def test_a_short_request_holds_no_whole_window_and_a_long_one_no_more_than_fits() -> None:
    short = size("mixed", tokens=60, requests=4)
    assert [(g["pages_per_request"], g["bytes"]) for g in short["groups"]] == [(1, 25600), (1, 32768)]
    long = size("mixed", tokens=10**6, requests=2)
    assert (long["tokens_per_request"], long["groups"][0]["pages_per_request"]) == (8192, 257)


def test_bytes_turn_into_tokens() -> None:
    found = size("mixed", requests=2, quota_bytes=2 * 131072 + 800 * 77 + 799)
    assert (found["tokens_for_quota"], found["quota_bytes"]) == (77, 2 * 131072)
    assert found["pool_bytes"] == 10 * (25600 + 32768)
    # Nine pages per pool group: four for each of two requests, of which 15 - 1 positions are ahead.
    assert found["tokens_for_pool"] == 2 * (4 * 32 - 14)


@given(tokens=st.integers(1, 1500), requests=st.integers(1, 12), pages=st.integers(4, 120))
def test_what_is_said_to_fit_fits_into_a_real_cache_and_no_request_more(tokens: int, requests: int, pages: int) -> None:
    small = (f"generation.pool={{pages: {pages}}}", "model.max_seq_len=2048")
    found = size("mixed", *small, tokens=tokens * requests, requests=requests)
    each, headroom = found["tokens_per_request"], found["headroom_tokens"]
    layout = rank_layout(pair("mixed", *small).generation, ParallelPosition())
    cache = PageCacheManager(layout, [pages] * layout.num_pool_groups)
    for count in range(found["requests_for_pool"] + 1):
        held = [
            GroupChange(
                group_id=group.group_id,
                pool_group=group.pool_group,
                kept_pages=0,
                dropped=(),
                needed_pages=found["groups"][group.group_id]["pages_per_request"],
            )
            for group in layout.groups
        ]
        if count < found["requests_for_pool"]:
            cache.exchange(held, thing=f"request {count}")
        else:
            with pytest.raises(CapacityError):
                cache.exchange(held, thing=f"request {count}")
    blocks = -(-(each - 1 + headroom) // 32)
    assert found["groups"][0]["pages_per_request"] == blocks
    assert found["groups"][1]["pages_per_request"] == min(blocks, 4)
    assert (found["tokens_for_pool"] >= requests * each) == (found["requests_for_pool"] >= requests)


def test_windowed_layers_alone_have_no_cap() -> None:
    layers = "model.layers=[{owner: target, kv_heads: 1, head_dim: 16, dtype: float16, window: 64}]"
    found = size("mixed", layers, "speculative=null", tokens=5000, requests=1)
    assert (found["bytes_per_token"], found["tokens_for_quota"]) == (0, None)


def test_a_stage_without_drafter_reserves_for_the_speculative_mode_alone() -> None:
    reports = [size_report(pair("attention-dp"), Side.CONTEXT, rank=rank) for rank in (0, 2)]
    assert [report["headroom_tokens"] for report in reports] == [1 + 3, 2 + 3]


@pytest.mark.parametrize(
    ("load", "message"),
    [
        ({"tokens": -1}, r"--tokens is -1, expected in \[0, "),
        ({"tokens": MAX_COUNT + 1}, "--tokens is"),
        ({"requests": 0}, r"--requests is 0, expected in \[1, "),
        ({"requests": 10**20}, "--requests is"),
        ({"iteration_tokens": -7}, "--iteration-tokens is -7"),
        ({"rank": 4}, r"--rank is 4, expected in \[0, 1\)"),
    ],
)
def test_loads_out_of_range(load: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        size("mixed", **load)
