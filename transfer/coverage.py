"""Whether the programs of all context ranks together fill a generation rank: every head once, no head twice.

Each program is right for its own pair of ranks; only all of them together can show a stage that is missing or a layer
that two ranks believe to be theirs. Readiness is coverage, not a number of writers.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Sequence

from transfer.hello import RankCard
from transfer.match import buffers_of, rank_name
from transfer.program import CopyProgram
from unikv.errors import explain
from unikv.ids import LayerId
from unikv.layer_spec import LayerOwner

_HeadKey = tuple[LayerId, str, int, int]
"""Layer, role, global head, ordinal modulo the common period."""


def coverage_gaps(generation: RankCard, programs: Sequence[CopyProgram], *, with_draft: bool) -> tuple[str, ...]:
    """Return, in words, every buffer of `generation` that is not written exactly once; empty when all is well.

    Args:
        generation: the card of one generation rank.
        programs: the programs of every context rank towards it (under attention data parallelism on the context side:
            of the ranks that hold one request).
        with_draft: the gate's verdict; False leaves every layer the drafter owns out.

    Raises:
        SpecError: the card contradicts itself.
    """
    position = generation.position
    period = math.lcm(position.cp, *(pair.ordinal_step for program in programs for pair in program.pairs))
    writers = _count_writers(programs, period)
    gaps: list[str] = []
    for (layer, role), buffer in buffers_of(generation).items():
        if buffer.view.owner is LayerOwner.DRAFT and not with_draft:
            continue
        heads = range(buffer.view.heads.lo, buffer.view.heads.hi)
        owned = range(position.cp_rank, period, position.cp)
        found = {writers[layer, role, head, ordinal] for head in heads for ordinal in owned}
        if found != {1}:
            gaps.append(_gap(generation, f"layer {layer} {role}", sorted(found)))
    return tuple(gaps)


def _count_writers(programs: Iterable[CopyProgram], period: int) -> Counter[_HeadKey]:
    return Counter(
        (piece.layer_id, piece.role, head, ordinal)
        for program in programs
        for piece in program.slices
        for head in range(piece.heads.lo, piece.heads.hi)
        for ordinal in range(program.pairs[piece.pair].ordinal_start, period, program.pairs[piece.pair].ordinal_step)
    )


def _gap(generation: RankCard, buffer: str, found: list[int]) -> str:
    got = " or ".join(map(str, found))
    cure = "let the context ranks hold every layer the generation side holds, each on one stage"
    return explain(rank_name(generation), f"context ranks that write a head of {buffer}", got, "exactly 1", cure)
