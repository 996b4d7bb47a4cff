"""Decides whether two sides may talk and whether draft KV travels. Reports every check, not the first failure.

Cards become facts (`gate_facts`), facts are compared (`gate_checks`, `gate_layers`), the findings settle what happens
to draft KV (`gate_draft`), and only then does each finding get its verdict and its row (`gate_merge`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

from transfer.gate_checks import check_headers
from transfer.gate_draft import cure, decide, verdict
from transfer.gate_facts import HeaderFacts, header_facts, layer_facts
from transfer.gate_findings import Finding, Rule
from transfer.gate_layers import check_coverage, check_layers
from transfer.gate_merge import Observation, merge
from transfer.gate_report import DraftKV, GateCheck, GateReport, Verdict, format_report, require_compatible
from transfer.hello import RankCard
from unikv.ids import Rank

__all__ = [
    "DraftKV",
    "GateCheck",
    "GateReport",
    "Verdict",
    "check",
    "check_instances",
    "format_report",
    "require_compatible",
]

Facts = TypeVar("Facts")


def check(context: RankCard, generation: RankCard) -> GateReport:
    """Compare two rank cards: the report both ranks act on when they meet. Never raises, never stops early.

    Layers only one of the two ranks holds are no difference here: pipeline stages hold different layers. Whether an
    instance as a whole has everything is what `check_instances` looks at.
    """
    ours, theirs = header_facts(context), header_facts(generation)
    findings = (*check_headers(ours, theirs), *check_layers(layer_facts(context), layer_facts(generation)))
    seen = Observation(
        findings=findings, context_ranks=frozenset({context.rank}), generation_ranks=frozenset({generation.rank})
    )
    return _report([seen], [ours], [theirs])


def check_instances(context: Sequence[RankCard], generation: Sequence[RankCard]) -> GateReport:
    """Compare every rank of two instances and merge equal findings into one report.

    Draft KV travels only if it may between all pairs. Beyond `check`, both instances must be complete, and the context
    side must hold every layer and head the generation side holds. Ranks with equal facts are compared once.
    """
    seen = [
        *_compare_kinds(context, generation, header_facts, check_headers),
        *_compare_kinds(context, generation, layer_facts, check_layers),
        Observation(
            findings=(_ranks(context, generation), *check_coverage(context, generation)),
            context_ranks=frozenset(card.rank for card in context),
            generation_ranks=frozenset(card.rank for card in generation),
        ),
    ]
    return _report(seen, [header_facts(card) for card in context], [header_facts(card) for card in generation])


def _report(
    seen: Sequence[Observation], context: Sequence[HeaderFacts], generation: Sequence[HeaderFacts]
) -> GateReport:
    decision = decide([finding for part in seen for finding in part.findings], context, generation)
    rows = merge(seen, lambda finding: (verdict(finding, decision), cure(finding, decision)))
    return GateReport(checks=(*rows, *decision.rows), draft_kv=decision.draft_kv)


def _compare_kinds(
    context: Sequence[RankCard],
    generation: Sequence[RankCard],
    describe: Callable[[RankCard], Facts],
    compare: Callable[[Facts, Facts], list[Finding]],
) -> list[Observation]:
    """Compare every kind of context rank with every kind of generation rank, where a kind shares its facts."""
    return [
        Observation(findings=tuple(compare(ours, theirs)), context_ranks=ranks, generation_ranks=peers)
        for ours, ranks in _kinds(context, describe).items()
        for theirs, peers in _kinds(generation, describe).items()
    ]


def _kinds(cards: Sequence[RankCard], describe: Callable[[RankCard], Facts]) -> dict[Facts, frozenset[Rank]]:
    kinds: dict[Facts, set[Rank]] = {}
    for card in cards:
        kinds.setdefault(describe(card), set()).add(card.rank)
    return {facts: frozenset(ranks) for facts, ranks in kinds.items()}


def _ranks(context: Sequence[RankCard], generation: Sequence[RankCard]) -> Finding:
    (ours, complete), (theirs, also_complete) = _presence(context), _presence(generation)
    return Finding(
        name="ranks",
        context=ours,
        generation=theirs,
        agrees=complete and also_complete,
        rule=Rule.TARGET,
        cure="start every rank of parallel.tp x pp x cp exactly once",
    )


def _presence(cards: Sequence[RankCard]) -> tuple[str, bool]:
    """Return how many ranks of an instance are there, and whether that is each of them once."""
    shapes = {(p.tp, p.pp, p.cp, p.attention_dp) for p in (card.position for card in cards)}
    if len(shapes) != 1:
        return f"{len(cards)} cards of {len(shapes)} parallel shapes", False
    world = cards[0].position.world_size
    ranks = {card.rank for card in cards}
    return f"{len(ranks)} of {world}", len(cards) == world and ranks == set(range(len(cards)))
