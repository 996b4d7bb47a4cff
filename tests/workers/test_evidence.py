"""Digests that two ranks can compare whatever their heads, layout, block length and slots."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from transfer.hello import Side
from unikv.ids import NO_PAGE, GroupId, RequestId
from workers.config import PairConfig
from workers.control import CODEC, PromptReport
from workers.evidence import compare, digest_pages
from workers.evidence_report import evidence_report, read_evidence
from workers.page_bytes import buffer_bytes
from workers.runner import Digest, Evidence
from workers.runner_pattern import PatternRunner

Pair = Callable[..., PairConfig]
MemoryOf = Callable[..., Any]
PROMPT = 90


def digests(memory: Any, *, unit_tokens: int = 16, with_draft: bool = True, damage: Any = None) -> Evidence:
    """Fill a rank with the pattern of one request, in slots of its own, and digest it."""
    runner = PatternRunner()
    runner.bind(memory.manager, memory.card)
    memory.request(1, 20)  # so that the slots are not those of the other rank
    request = memory.manager.create_request(RequestId(2))
    runner.prefill(request, (), PROMPT)
    pages = memory.pages(request, PROMPT, unit_tokens=unit_tokens)
    if damage:
        damage(memory, pages)
    return digest_pages(memory.card, memory.arrays, pages, with_draft=with_draft)


@pytest.fixture
def context(tiny_pair: Pair, memory_of: MemoryOf) -> Evidence:
    return digests(memory_of(tiny_pair(), Side.CONTEXT))


@pytest.mark.parametrize(
    "other",
    [
        {"generation__parallel": {"tp": 2}},
        {"generation__parallel": {"tp": 4}},  # more ranks than draft heads
        {"generation__kv_layout": "NHD"},
        {"generation__parallel": {"pp": 2}},
    ],
)
def test_ranks_of_other_shapes_come_to_the_same_digests(
    tiny_pair: Pair, memory_of: MemoryOf, context: Evidence, other: dict[str, Any]
) -> None:
    pair = tiny_pair(**other)
    found = {}
    for rank in range(pair.generation.parallel.world_size):
        evidence = digests(memory_of(pair, Side.GENERATION, rank))
        assert compare(context.digests, evidence) == (0, "")
        found |= evidence.digests
    assert found == context.digests


def test_blocks_of_other_lengths_are_compared_in_common_units(tiny_pair: Pair, memory_of: MemoryOf) -> None:
    pair = tiny_pair(model__tokens_per_block=..., context__tokens_per_block=16, generation__tokens_per_block=64)
    small = digests(memory_of(pair, Side.CONTEXT), unit_tokens=16)
    large = digests(memory_of(pair, Side.GENERATION), unit_tokens=16)
    assert compare(small.digests, large) == (0, "")
    assert small.digests == large.digests


def test_sizes_add_up(context: Evidence) -> None:
    target, draft = 2 * 2 * 4 * PROMPT * 32, 2 * 2 * (PROMPT - 48) * 16
    assert context.checked_bytes == sum(digest.size_bytes for digest in context.digests.values()) == target + draft
    assert context.digests[0, "key", 0, 5].size_bytes == 10 * 32  # the last unit holds 10 tokens


def test_draft_layers_can_be_left_out(tiny_pair: Pair, memory_of: MemoryOf, context: Evidence) -> None:
    without = digests(memory_of(tiny_pair()), with_draft=False)
    assert {key[0] for key in without.digests} == {0, 1}
    assert compare(context.digests, without) == (0, "")


def test_one_wrong_byte_makes_its_unit_unproven(tiny_pair: Pair, memory_of: MemoryOf, context: Evidence) -> None:
    def damage(memory: Any, pages: Any) -> None:
        for buffer in buffer_bytes(memory.card, memory.arrays):
            if (buffer.layer_id, buffer.role) in {(1, "value"), (2, "key")}:
                buffer.pages[pages.tables[buffer.group_id][5], 1, 9, 3] ^= 1

    wrong = digests(memory_of(tiny_pair()), damage=damage)
    assert compare(context.digests, wrong) == (
        10 * 32 + 10 * 16,
        "layer 1 value head 1 unit 5 differs from the context side",
    )


def test_swapped_units_are_found(context: Evidence) -> None:
    swapped = dict(context.digests)
    one, two = (0, "key", 0, 1), (0, "key", 0, 2)
    swapped[one], swapped[two] = swapped[two], swapped[one]
    wrong = compare(context.digests, replace(context, digests=swapped))
    assert wrong == (2 * 16 * 32, "layer 0 key head 0 unit 1 differs from the context side")


def test_what_the_context_side_does_not_know_is_unproven(context: Evidence) -> None:
    known = {key: digest for key, digest in context.digests.items() if key[0] != 2}
    mismatched, place = compare(known, context)
    assert mismatched == 2 * 2 * (PROMPT - 48) * 16
    assert place == "layer 2 key head 0 unit 3 is not known to the context side"


def test_a_digest_of_fewer_bytes_is_another_digest() -> None:
    key, value = (0, "key", 0, 0), b"12345678"
    seen = Evidence(checked_bytes=8, digests={key: Digest(value, 8)})
    assert compare({key: Digest(value, 16)}, seen)[0] == 8


def test_a_missing_page_is_unproven(tiny_pair: Pair, memory_of: MemoryOf, context: Evidence) -> None:
    def damage(_memory: Any, pages: Any) -> None:
        pages.tables[GroupId(0)][1] = NO_PAGE

    wrong = digests(memory_of(tiny_pair()), damage=damage)
    assert compare(context.digests, wrong) == (2 * 2 * 4 * 16 * 32, "layer 0 key head 0 token 16 has no page")
    assert wrong.checked_bytes == context.checked_bytes


def test_evidence_survives_the_journey(context: Evidence) -> None:
    report = PromptReport(request_id=RequestId(2), rank=0, reason="", prefill_s=0.0, evidence=evidence_report(context))
    frames = CODEC.encode(report, incarnation="a", rank=0)
    arrived = CODEC.decode([memoryview(frame) for frame in frames]).message
    assert isinstance(arrived, PromptReport) and arrived.evidence is not None
    assert read_evidence(arrived.evidence) == context


def test_digests_that_are_announced_but_not_there_are_left_out(context: Evidence) -> None:
    report = evidence_report(context)
    row = report.digests[0]
    cut = replace(report, digests=(replace(row, digests=row.digests[:-8]),))
    assert len(read_evidence(cut).digests) == len(row.units) - 1
