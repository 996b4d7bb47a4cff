"""The pattern runner finds every wrong byte, counts them, and names what the first wrong row holds instead."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from transfer.hello import Side
from unikv.errors import InternalError, SpecError
from unikv.ids import NO_PAGE, NULL_SLOT, GroupId, RequestId
from unikv.layer_spec import STANDARD_ROLES
from workers.config import PairConfig
from workers.page_bytes import BufferBytes, buffer_bytes
from workers.pattern import BITS, Place, read_row, role_number, scramble, unscramble
from workers.prefix_reuse import open_for_prefill
from workers.runner_pattern import POISON, STEP, PatternRunner

Pair = Callable[..., PairConfig]
MemoryOf = Callable[..., Any]

TARGET_ROW, DRAFT_ROW = 32, 16
PROMPT = 100  # blocks 0..6, 4 tokens in the last; the draft's window of 40 leaves blocks 3..6
DRAFT_TOKENS = PROMPT - 3 * 16


class Filled:
    """A generation rank whose pages hold the right pattern for one request."""

    def __init__(self, memory: Any, prompt_tokens: int = PROMPT, request_id: int = 7) -> None:
        self.memory, self.runner, self.prompt_tokens = memory, PatternRunner(), prompt_tokens
        self.runner.bind(memory.manager, memory.card)
        self.request = memory.manager.create_request(RequestId(request_id))
        self.aux = self.runner.prefill(self.request, (), prompt_tokens)

    @property
    def pages(self) -> Any:
        return self.memory.pages(self.request, self.prompt_tokens)

    def examine(self, *, with_draft: bool = True) -> Any:
        return self.runner.examine(self.pages, with_draft=with_draft)

    def buffer(self, layer: int, role: str) -> BufferBytes:
        found = buffer_bytes(self.memory.card, self.memory.arrays)
        return next(buffer for buffer in found if (buffer.layer_id, buffer.role) == (layer, role))

    def row(self, layer: int, role: str, head: int, token: int) -> Any:
        """A view of the row of a global head."""
        buffer = self.buffer(layer, role)
        slot = self.request.page_tables()[buffer.group_id][token // 16]
        return buffer.pages[slot, head - buffer.heads.lo, token % 16]


@pytest.fixture
def filled(tiny_pair: Pair, memory_of: MemoryOf) -> Iterator[Filled]:
    found = Filled(memory_of(tiny_pair()))
    yield found
    vars(found).clear()  # pytest keeps the object; the memory goes back


# --- what is right ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("layout", ["HND", "NHD"])
@pytest.mark.parametrize(("tp", "rank", "heads"), [(1, 0, (4, 2)), (2, 1, (2, 1)), (4, 3, (1, 1))])
def test_what_prefill_wrote_is_right_in_every_live_byte(
    tiny_pair: Pair, memory_of: MemoryOf, layout: str, tp: int, rank: int, heads: tuple[int, int]
) -> None:
    pair = tiny_pair(model__kv_layout=layout, generation__parallel={"tp": tp})
    filled = Filled(memory_of(pair, Side.GENERATION, rank))
    target = 2 * 2 * heads[0] * PROMPT * TARGET_ROW
    draft = 2 * heads[1] * DRAFT_TOKENS * DRAFT_ROW
    evidence = filled.examine()
    assert (evidence.mismatched_bytes, evidence.first_mismatch) == (0, "")
    assert evidence.checked_bytes == target + draft
    assert filled.examine(with_draft=False).checked_bytes == target
    assert filled.aux.first_tokens == (PROMPT,)
    assert filled.request.history_tokens == PROMPT


@pytest.mark.parametrize("prompt", [1, 15, 16, 17, 33, 48, 64, 200])
def test_prompts_of_every_length(tiny_pair: Pair, memory_of: MemoryOf, prompt: int) -> None:
    evidence = Filled(memory_of(tiny_pair()), prompt).examine()
    live = prompt - max(0, (prompt + 1 - 40) // 16) * 16
    assert (evidence.mismatched_bytes, evidence.first_mismatch) == (0, "")
    assert evidence.checked_bytes == 2 * 2 * 4 * prompt * TARGET_ROW + 2 * 2 * live * DRAFT_ROW


def test_rows_of_odd_lengths(tiny_pair: Pair, memory_of: MemoryOf) -> None:
    layers = [
        {
            **{"count": 1, "owner": "target", "kv_heads": 2, "head_dim": 32, "dtype": "nvfp4"},
            "extra_buffers": {"index": 3, "wide": 20},
        }
    ]
    filled = Filled(memory_of(tiny_pair(model__layers=layers, speculative=None)))
    assert filled.examine().mismatched_bytes == 0
    filled.row(0, "index", 0, 9)[2] ^= 1
    filled.row(0, "value_block_scale", 1, 9)[1] ^= 1
    filled.row(0, "wide", 0, 9)[19] ^= 1
    evidence = filled.examine()
    assert evidence.mismatched_bytes == 3
    assert "layer 0" in evidence.first_mismatch and "token 9 holds" in evidence.first_mismatch


def test_a_layout_of_every_rank_agrees_on_every_row(tiny_pair: Pair, memory_of: MemoryOf) -> None:
    """The row of a head is the same wherever it lies: under another TP degree, layout and set of layers."""
    layers = [
        {
            **{"count": 1, "owner": "target", "kv_heads": 4, "head_dim": 16, "dtype": "bfloat16"},
            "extra_buffers": {"alpha": 8},
        },
        {
            **{"count": 1, "owner": "target", "kv_heads": 4, "head_dim": 16, "dtype": "bfloat16"},
            "extra_buffers": {"beta": 8},
        },
    ]
    common = {"model__layers": layers, "speculative": None}
    whole = Filled(memory_of(tiny_pair(**common), Side.GENERATION, 0))
    pair = tiny_pair(**common, generation__parallel={"tp": 2, "pp": 2}, generation__kv_layout="NHD")
    last = Filled(memory_of(pair, Side.GENERATION, 3))  # heads 2, 3 of layer 1
    for role, head in (("key", 2), ("value", 3), ("beta", 0)):
        assert whole.row(1, role, head, 50).tobytes() == last.row(1, role, head, 50).tobytes()


# --- what is wrong ---------------------------------------------------------------------------------------------------


def test_a_misplaced_row_is_named(filled: Filled) -> None:
    filled.row(1, "value", 2, 21)[:] = filled.row(1, "value", 2, 22)
    evidence = filled.examine()
    assert evidence.first_mismatch == ("layer 1 value head 2 token 21 holds the row of layer 1 value head 2 token 22")
    assert evidence.mismatched_bytes == count_differing(
        filled.row(1, "value", 2, 22), expected(filled, 1, "value", 2, 21)
    )


@pytest.mark.parametrize(
    ("source", "name"),
    [
        ((0, "value", 2, 21), "layer 0 value head 2 token 21"),
        ((1, "key", 2, 21), "layer 1 key head 2 token 21"),
        ((1, "value", 3, 21), "layer 1 value head 3 token 21"),
    ],
)
def test_rows_of_another_layer_role_or_head_are_named(
    filled: Filled, source: tuple[int, str, int, int], name: str
) -> None:
    filled.row(1, "value", 2, 21)[:] = filled.row(*source)
    assert filled.examine().first_mismatch == f"layer 1 value head 2 token 21 holds the row of {name}"


def test_a_row_of_another_request_is_named(filled: Filled) -> None:
    other = filled.memory.manager.create_request(RequestId(1024 + 3))
    filled.runner.prefill(other, (), 30)
    slot = other.page_tables()[GroupId(0)][1]
    filled.row(0, "key", 0, 16)[:] = filled.buffer(0, "key").pages[slot, 0, 0]
    assert filled.examine().first_mismatch == (
        "layer 0 key head 0 token 16 holds the row of layer 0 key head 0 token 16 of another request (3 modulo 1024)"
    )


def test_a_row_that_was_never_written_is_named(filled: Filled) -> None:
    filled.row(0, "key", 3, 99)[:] = POISON
    evidence = filled.examine()
    assert evidence.first_mismatch == "layer 0 key head 3 token 99 holds poison: nothing was written there"
    expected_bytes = count_differing(np.full(TARGET_ROW, POISON, np.uint8), expected(filled, 0, "key", 3, 99))
    assert evidence.mismatched_bytes == expected_bytes


def test_a_row_of_zeros_is_named(filled: Filled) -> None:
    filled.row(2, "value", 1, 60)[:] = 0
    assert filled.examine().first_mismatch == "layer 2 value head 1 token 60 holds zeros"


def test_one_wrong_byte_is_named_and_counted(filled: Filled) -> None:
    filled.row(1, "key", 0, 0)[20] ^= 0x40
    evidence = filled.examine()
    assert evidence.mismatched_bytes == 1
    assert evidence.first_mismatch.startswith("layer 1 key head 0 token 0 holds its own row up to byte 20, then ")


def test_bytes_nobody_wrote_are_shown(filled: Filled) -> None:
    filled.row(0, "key", 0, 5)[:] = np.arange(TARGET_ROW)
    assert filled.examine().first_mismatch == ("layer 0 key head 0 token 5 holds unknown bytes, 0001020304050607 first")


def test_every_wrong_byte_counts_and_the_first_is_named(filled: Filled) -> None:
    damaged = [(0, "key", 1, 3), (1, "value", 3, 77), (2, "key", 0, 50)]
    for place in damaged:
        filled.row(*place)[2:7] ^= 0xFF
    evidence = filled.examine()
    assert evidence.mismatched_bytes == 15
    assert evidence.first_mismatch.startswith("layer 0 key head 1 token 3 holds ")
    assert filled.examine(with_draft=False).mismatched_bytes == 10


def test_a_missing_page_is_wrong_in_every_byte(filled: Filled) -> None:
    pages = filled.pages
    pages.tables[GroupId(0)][2] = NO_PAGE
    evidence = filled.runner.examine(pages, with_draft=True)
    assert evidence.mismatched_bytes == 16 * 4 * TARGET_ROW * 4  # tokens, heads, layers x (K, V)
    assert evidence.first_mismatch == "layer 0 key head 0 token 32 has no page"
    assert evidence.checked_bytes == filled.examine().checked_bytes


def test_what_is_not_live_does_not_count(filled: Filled) -> None:
    """Rows behind the prompt, pages behind it, and everything before the window."""
    tables = filled.request.page_tables()
    target, draft = filled.buffer(0, "key"), filled.buffer(2, "key")
    target.pages[tables[target.group_id][6], :, 4:] = 0x55
    assert (tables[draft.group_id][:3] == NO_PAGE).all()
    draft.pages[[slot for slot in range(24) if slot not in tables[draft.group_id]]] = 0x55
    assert filled.examine().mismatched_bytes == 0
    draft.pages[tables[draft.group_id][3], 0, 0, 0] ^= 1
    assert filled.examine().first_mismatch.startswith("layer 2 key head 0 token 48 holds ")


def test_smaller_units_see_the_same_bytes(filled: Filled) -> None:
    units = filled.memory.pages(filled.request, PROMPT, unit_tokens=8)
    small, whole = filled.runner.examine(units, with_draft=True), filled.examine()
    # In units of 8 the draft's window (from token 61 on) begins at token 56 instead of 48.
    assert small.checked_bytes == whole.checked_bytes - 8 * 2 * 2 * DRAFT_ROW
    assert small.mismatched_bytes == 0
    filled.row(1, "key", 2, 43)[:] = 0
    assert filled.runner.examine(units, with_draft=True).first_mismatch == "layer 1 key head 2 token 43 holds zeros"


# --- poison ----------------------------------------------------------------------------------------------------------


def test_pages_are_poisoned_before_use_and_the_null_page_is_not(tiny_pair: Pair, memory_of: MemoryOf) -> None:
    memory = memory_of(tiny_pair())
    PatternRunner().bind(memory.manager, memory.card)
    for buffer in buffer_bytes(memory.card, memory.arrays):
        assert (buffer.pages[NULL_SLOT + 1 :] == POISON).all()
        assert not buffer.pages[NULL_SLOT].any()


def test_discarding_poisons_the_pages_of_that_request_only(filled: Filled) -> None:
    other = filled.memory.manager.create_request(RequestId(8))
    filled.runner.prefill(other, (), 20)
    gone = filled.request.page_tables()
    filled.runner.discard(gone)
    assert filled.examine().first_mismatch == ("layer 0 key head 0 token 0 holds poison: nothing was written there")
    for buffer in buffer_bytes(filled.memory.card, filled.memory.arrays):
        slots = gone[buffer.group_id]
        assert (buffer.pages[slots[slots != NO_PAGE]] == POISON).all()
    assert filled.runner.examine(filled.memory.pages(other, 20), with_draft=True).mismatched_bytes == 0


# --- prefixes that are reused -----------------------------------------------------------------------------------------


def serve(filled: Filled, number: int, prompt: tuple[int, ...]) -> tuple[int, Any]:
    """Fill, check and close one request for tokens; return what it took over and what was found."""
    manager = filled.memory.manager
    request, publish_at = open_for_prefill(manager, RequestId(number), prompt)
    cached = request.history_tokens
    filled.runner.prefill(request, prompt, len(prompt), publish_at)
    pages = replace(filled.memory.pages(request, len(prompt)), prompt=prompt)
    evidence = filled.runner.examine(pages, with_draft=True)
    request.close()
    manager.check_integrity()
    return cached, evidence


def test_requests_use_one_anothers_prefixes_and_every_byte_is_right(filled: Filled) -> None:
    shared = tuple(range(100))
    prompts = [(*shared[:length], *range(1000 + length, 1030 + length)) for length in (100, 100, 70, 33, 5)]
    prompts += [(*shared, 7, 8, 9), shared[:60]]
    found = [serve(filled, 20 + index, prompt) for index, prompt in enumerate(prompts)]
    assert [evidence.first_mismatch for _, evidence in found] == [""] * len(prompts)
    assert [cached for cached, _ in found][:2] == [0, len(prompts[0]) - 1]
    assert all(cached >= 0.4 * len(prompt) for (cached, _), prompt in zip(found[2:4], prompts[2:4], strict=True))


@given(st.lists(st.tuples(st.integers(0, 3), st.integers(1, 120), st.integers(0, 120)), min_size=2, max_size=6))
@settings(max_examples=25, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_whatever_is_shared_no_byte_is_wrong(filled: Filled, requests: list[tuple[int, int, int]]) -> None:
    filled.request.close()
    filled.memory.manager.clear_reusable_blocks()
    for index, (branch, length, fork) in enumerate(requests):
        prompt = tuple(token if token < fork else 1000 * (branch + 1) + token for token in range(length))
        _, evidence = serve(filled, 20 + index, prompt)
        assert (evidence.mismatched_bytes, evidence.first_mismatch) == (0, "")


def test_a_page_of_another_prefix_is_wrong(filled: Filled) -> None:
    manager, prompt = filled.memory.manager, tuple(range(40))
    request = manager.create_request(RequestId(30), ())
    request.resume()
    filled.runner.prefill(request, prompt, len(prompt))
    other = (*prompt[:20], 999, *prompt[21:])
    pages = replace(filled.memory.pages(request, len(prompt)), prompt=other)
    assert "token 20 holds the row of layer 0 key head 0 token 20 of another request" in (
        filled.runner.examine(pages, with_draft=True).first_mismatch
    )


# --- batches of a fixed size ------------------------------------------------------------------------------------------


def test_rows_without_a_request_write_to_the_null_slot_and_nowhere_else(tiny_pair: Pair, memory_of: MemoryOf) -> None:
    filled = Filled(memory_of(tiny_pair()))
    runner = PatternRunner(pad_rows=3)
    runner.bind(filled.memory.manager, filled.memory.card)
    runner.prefill(filled.request, (), PROMPT)
    other = filled.memory.request(8, 20)
    buffers = list(buffer_bytes(filled.memory.card, filled.memory.arrays))
    before = [buffer.pages.copy() for buffer in buffers]
    filled.request.resize(filled.memory.manager.generation_capacity(PROMPT, 3))
    runner.decode(filled.request, (), 1, 0, 1)
    for buffer, old in zip(buffers, before, strict=True):
        slot = filled.request.page_tables()[buffer.group_id][PROMPT // 16]
        changed = {tuple(place[:1]) + tuple(place[2:3]) for place in np.argwhere(buffer.pages != old).tolist()}
        assert changed == {(NULL_SLOT, PROMPT % 16), (int(slot), PROMPT % 16)}
        assert (buffer.pages[[NULL_SLOT, slot], :, PROMPT % 16] == STEP).all()
    assert runner.examine(filled.pages, with_draft=True).mismatched_bytes == 0
    assert other.capacity_tokens > 0


def test_a_row_that_reaches_a_page_is_found_out(filled: Filled, monkeypatch: pytest.MonkeyPatch) -> None:
    manager, victim = filled.memory.manager, filled.memory.request(8, 110)
    runner = PatternRunner(pad_rows=2)
    runner.bind(manager, filled.memory.card)
    filled.request.resize(manager.generation_capacity(PROMPT, 3))
    real = manager.block_table
    monkeypatch.setattr(
        manager, "block_table", lambda group, rows: real(group, [row or victim.request_id for row in rows])
    )
    with pytest.raises(
        InternalError, match=r"slots of a padded step is \[\d+, \d+, \d+\], expected a page, then 2 times"
    ):
        runner.decode(filled.request, (), 1, 0, 1)


# --- the pattern itself ----------------------------------------------------------------------------------------------


@given(st.tuples(*(st.integers(0, (1 << bits) - 1) for bits in BITS.values())))
def test_every_place_can_be_read_back(fields: tuple[int, ...]) -> None:
    packed = 0
    for bits, number in zip(BITS.values(), fields, strict=True):
        packed = packed << bits | number
    word = int(scramble(np.array([packed], dtype=np.uint64))[0])
    assert unscramble(word) == Place(*fields)
    assert sum(BITS.values()) == 64


def test_short_rows_cannot_be_read(filled: Filled) -> None:
    row = filled.row(0, "value", 1, 2).tobytes()
    assert read_row(row) == Place(request=7, role=1, layer=0, head=1, token=2)
    assert read_row(row[:8]) == read_row(row)
    assert read_row(row[:7]) is None
    assert read_row(row[:8] + bytes(8)) is None


def test_roles_have_the_same_number_everywhere() -> None:
    assert [role_number(role) for role in STANDARD_ROLES] == [0, 1, 2, 3]
    extras = {role_number(role) for role in ("index_key", "alpha", "beta", "gamma")}
    assert len(extras) == 4 and min(extras) > 3 and max(extras) < 256


def test_a_pair_too_large_for_the_pattern_is_refused(tiny_pair: Pair, memory_of: MemoryOf) -> None:
    memory = memory_of(tiny_pair(model__max_seq_len=(1 << 22) + 1))
    with pytest.raises(SpecError, match=r"pattern runner: token count is 4194305, expected <= 4194304"):
        PatternRunner().bind(memory.manager, memory.card)


def expected(filled: Filled, layer: int, role: str, head: int, token: int) -> Any:
    """The right row, written out: words that count up from the scrambled place."""
    packed = ((7 << 8 | role_number(role)) << 12 | layer) << 34 | head << 22 | token
    first = int(scramble(np.array([packed], dtype=np.uint64))[0])
    words = [(first + step * 0x9E3779B97F4A7C15) % 2**64 for step in range(TARGET_ROW // 8)]
    return np.array(words, dtype="<u8").view(np.uint8)


def count_differing(row: Any, other: Any) -> int:
    return int((np.asarray(row) != np.asarray(other)).sum())
