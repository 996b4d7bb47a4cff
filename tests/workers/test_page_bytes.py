"""Bytes of pages by meaning: against the tensors a model uses, and against live tokens counted one by one."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from transfer.hello import ParallelPosition, RankCard, Side
from unikv.ids import NO_PAGE, GroupId, LayerId, RequestId
from unikv.layer_spec import KEY, VALUE, KVCacheLayerSpec, KVDtype, LayerOwner
from unikv.layout import build_layout
from workers.config import PairConfig
from workers.config_load import load_pair
from workers.page_bytes import buffer_bytes, live_units, missing_tokens
from workers.runner import PromptPages
from workers.topology import rank_card


@pytest.mark.parametrize("layout", ["HND", "NHD"])
@pytest.mark.parametrize("rank", [0, 1])
def test_rows_are_what_the_model_writes(
    tiny_pair: Callable[..., PairConfig], memory_of: Callable[..., Any], layout: str, rank: int
) -> None:
    memory = memory_of(tiny_pair(model__kv_layout=layout, generation__parallel={"tp": 2}), Side.GENERATION, rank)
    number = 0
    for layer in (0, 1, 2):
        tensor = memory.manager.get_buffers(layer)
        for index in np.ndindex(*tensor.shape[:-1]):
            tensor[index] = torch.full((tensor.shape[-1],), float(number % 251), dtype=tensor.dtype)
            number += 1
    found = {(buffer.layer_id, buffer.role): buffer for buffer in buffer_bytes(memory.card, memory.arrays)}
    assert found.keys() == {(layer, role) for layer in (0, 1, 2) for role in (KEY, VALUE)}
    for (layer, role), buffer in found.items():
        tensor = memory.manager.get_buffers(layer)[:, 0 if role == KEY else 1]
        by_head = tensor if layout == "HND" else tensor.transpose(1, 2)
        expected = by_head.contiguous().view(torch.uint8).numpy()
        np.testing.assert_array_equal(buffer.pages, expected)
        assert len(buffer.heads) == buffer.pages.shape[1]
        assert buffer.heads.lo == rank * buffer.pages.shape[1]
        assert buffer.row_bytes == expected.shape[-1]


def test_extra_buffers_and_scales_are_buffers_too(
    tiny_pair: Callable[..., PairConfig], memory_of: Callable[..., Any]
) -> None:
    layers = [
        {"count": 1, "owner": "target", "kv_heads": 2, "head_dim": 32, "dtype": "nvfp4", "extra_buffers": {"index": 3}}
    ]
    memory = memory_of(tiny_pair(model__layers=layers, speculative=None))
    found = {buffer.role: buffer for buffer in buffer_bytes(memory.card, memory.arrays)}
    assert {role: buffer.pages.shape[1:] for role, buffer in found.items()} == {
        "key": (2, 16, 16),
        "value": (2, 16, 16),
        "key_block_scale": (2, 16, 2),
        "value_block_scale": (2, 16, 2),
        "index": (1, 16, 3),
    }
    memory.manager.get_extra(0, "index")[3, 7] = torch.tensor([1, 2, 3], dtype=torch.uint8)
    assert found["index"].pages[3, 0, 7].tolist() == [1, 2, 3]


def card_with(window: int | None, sink_tokens: int, tokens_per_block: int) -> RankCard:
    spec = KVCacheLayerSpec(
        layer_id=LayerId(0),
        owner=LayerOwner.TARGET,
        num_kv_heads=1,
        head_dim=8,
        dtype=KVDtype.FLOAT16,
        window=window,
        sink_tokens=sink_tokens if window else 0,
    )
    layout = build_layout([spec], tokens_per_block=tokens_per_block, max_seq_len=4096)
    pair = load_pair("pattern-small", overrides=["context.parallel.tp=1"], environ={})
    return rank_card(pair, Side.CONTEXT, ParallelPosition(), layout=layout, num_slots=8)


CARDS = {
    (window, sinks, block): card_with(window, sinks, block)
    for window in (None, 40, 64)
    for sinks in (0, 20)
    for block in (16, 64)
}


@given(
    st.sampled_from(sorted(CARDS, key=str)),
    st.integers(1, 400),
    st.sampled_from([8, 16]),
    st.sets(st.integers(0, 30)),
    st.integers(0, 3),
)
def test_live_units_cover_every_live_token_once(
    key: tuple[int | None, int, int], prompt: int, unit: int, holes: set[int], headroom: int
) -> None:
    window, sinks, block = key
    blocks = -(-prompt // block) + headroom
    table = np.array([NO_PAGE if n in holes else 100 + n for n in range(blocks)], dtype=np.int32)
    pages = PromptPages(request_id=RequestId(1), tables={GroupId(0): table}, prompt_tokens=prompt, unit_tokens=unit)
    live = live_units(CARDS[key], GroupId(0), pages)
    covered = {
        unit * int(number) + step
        for number, tokens in zip(live.units, live.tokens, strict=True)
        for step in range(int(tokens))
    }
    assert len(covered) == int(live.tokens.sum())
    # A token is live when it is a sink or can be seen from the next one; whole units travel.
    own_sinks = -(-sinks // block) * block if window and sinks else 0
    seen = {t for t in range(prompt) if window is None or t < own_sinks or t > prompt - window}
    wanted = {t for t in range(prompt) if any(t // unit == s // unit for s in (seen | {prompt - 1}))}
    there = {t for t in wanted if t // block not in holes}
    assert there <= covered <= {t for t in range(prompt) if t // block not in holes}
    assert missing_tokens(live, prompt) >= len(wanted) - len(there)
    assert all(slot == 100 + int(u) * unit // block for u, slot in zip(live.units, live.slots, strict=True))
    assert all(sub == int(u) % (block // unit) for u, sub in zip(live.units, live.subs, strict=True))


@pytest.mark.parametrize("cp", [2, 3])
@given(
    key=st.sampled_from(sorted(CARDS, key=str)),
    prompt=st.integers(1, 400),
    cached_blocks=st.integers(0, 5),
    stale=st.booleans(),
)
def test_context_parallel_ranks_have_their_own_blocks_and_together_all(
    cp: int, key: tuple[int | None, int, int], prompt: int, cached_blocks: int, stale: bool
) -> None:
    unit, block, group = 8, key[2], GroupId(0)
    blocks = np.arange(-(-prompt // block), dtype=np.int32)
    cached = {group: cached_blocks * block}

    def units_of(size: int, rank: int) -> list[tuple[int, int, int, int]]:
        card = replace(CARDS[key], position=ParallelPosition(cp=size, cp_rank=rank))
        tables = {group: blocks[rank::size] + np.int32(100)}
        pages = PromptPages(
            request_id=RequestId(1), tables=tables, prompt_tokens=prompt, unit_tokens=unit, cached_tokens=cached
        )
        live = live_units(card, group, pages, stale=stale)
        assert not len(live.missing)
        columns = (live.units, live.slots, live.subs, live.tokens)
        return list(zip(*(column.tolist() for column in columns), strict=True))

    shares = [units_of(cp, rank) for rank in range(cp)]
    assert sorted(row for share in shares for row in share) == units_of(1, 0)
    for rank, share in enumerate(shares):
        assert all(slot == 100 + number * unit // block and (slot - 100) % cp == rank for number, slot, *_ in share)


def test_rows_of_units_come_from_their_place_in_the_block(
    tiny_pair: Callable[..., PairConfig], memory_of: Callable[..., Any]
) -> None:
    memory = memory_of(tiny_pair())
    request = memory.request(1, 40)
    buffer = next(buffer_bytes(memory.card, memory.arrays))
    for ordinal, slot in enumerate(request.page_tables()[GroupId(0)][:3]):
        for token in range(16):
            buffer.pages[slot, :, token] = ordinal * 16 + token
    live = live_units(memory.card, GroupId(0), memory.pages(request, 40, unit_tokens=8))
    rows = buffer.rows(live)
    assert rows.shape == (5, 4, 8, 32)
    assert rows[:, 2, :, 5].ravel().tolist() == list(range(40))
    assert (live.missing.tolist(), live.tokens.tolist()) == ([], [8] * 5)


def test_a_table_that_ends_too_early_misses_pages(
    tiny_pair: Callable[..., PairConfig], memory_of: Callable[..., Any]
) -> None:
    memory = memory_of(tiny_pair())
    table = np.array([5, NO_PAGE], dtype=np.int32)
    pages = PromptPages(
        request_id=RequestId(1),
        tables={GroupId(0): table, GroupId(1): table},
        prompt_tokens=40,
        unit_tokens=16,
    )
    live = live_units(memory.card, GroupId(0), pages)
    assert (live.units.tolist(), live.missing.tolist()) == ([0], [1, 2])
    assert missing_tokens(live, 40) == 24
