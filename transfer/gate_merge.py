"""Folds the findings of many layers and many pairs of ranks into a report a person can read.

A fact that every pair of ranks agrees on is one row without ranks; where pairs differ, each value gets its own row
that names the ranks. Equal values of several layers share a row.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace

from transfer.gate_facts import role_order
from transfer.gate_findings import Finding
from transfer.gate_report import GateCheck, Verdict, mismatch
from transfer.gate_text import numbers_text
from unikv.ids import LayerId, Rank

Ranks = frozenset[Rank]


@dataclass(frozen=True, slots=True, kw_only=True)
class Observation:
    """Findings that hold for every pair of these context and generation ranks."""

    findings: tuple[Finding, ...]
    context_ranks: Ranks
    generation_ranks: Ranks


Judge = Callable[[Finding], tuple[Verdict, str]]
"""Returns the verdict on a finding and the cure its reason should end with."""


def merge(observations: Iterable[Observation], judge: Judge) -> tuple[GateCheck, ...]:
    """Return the rows of a report, checks in the order of their first finding, layers ascending."""
    rows: dict[tuple[Finding, str], dict[LayerId, list[str]]] = {}
    for finding, ranks in _with_ranks(observations):
        layers = rows.setdefault((replace(finding, layer=None, role=""), ranks), defaultdict(list))
        if finding.layer is not None:
            layers[finding.layer].append(finding.role)
    checks = [
        _row(fact, scope, judge) for (fact, ranks), layers in rows.items() for scope in _scopes(fact, ranks, layers)
    ]
    order = {name: number for number, name in enumerate(dict.fromkeys(check.name for check in checks))}
    return tuple(sorted(checks, key=lambda check: order[check.name]))


def _with_ranks(observations: Iterable[Observation]) -> Iterator[tuple[Finding, str]]:
    """Yield every distinct finding with the text of its ranks, "" where all pairs that compare the fact agree."""
    subjects: dict[tuple[object, ...], dict[Finding, list[tuple[Ranks, Ranks]]]] = {}
    for seen in observations:
        for finding in seen.findings:
            subject = (finding.name, finding.scope, finding.layer, finding.role)
            places = subjects.setdefault(subject, {}).setdefault(finding, [])
            places.append((seen.context_ranks, seen.generation_ranks))
    for values in subjects.values():
        for finding, places in values.items():
            for text in _rank_texts(places) if len(values) > 1 else [""]:
                yield finding, text


def _rank_texts(places: Iterable[tuple[Ranks, Ranks]]) -> Iterator[str]:
    """Yield one text per block of context ranks that meet the same generation ranks."""
    peers: dict[Rank, set[Rank]] = defaultdict(set)
    for context, generation in places:
        for rank in context:
            peers[rank] |= generation
    blocks: dict[Ranks, list[Rank]] = defaultdict(list)
    for rank, generation_ranks in peers.items():
        blocks[frozenset(generation_ranks)].append(rank)
    for generation, context_ranks in blocks.items():
        yield f"{numbers_text('context rank', context_ranks)} -> {numbers_text('generation rank', generation)}, "


def _scopes(fact: Finding, ranks: str, layers: dict[LayerId, list[str]]) -> Iterator[str]:
    if not layers:
        yield f"{ranks}{fact.scope}"
    by_roles: dict[tuple[str, ...], list[LayerId]] = defaultdict(list)
    for layer in sorted(layers):
        by_roles[tuple(sorted(filter(None, layers[layer]), key=role_order))].append(layer)
    for roles, same in by_roles.items():
        owner = "draft " if fact.draft else ""
        yield f"{ranks}{owner}{numbers_text('layer', same)} {', '.join(roles)}".rstrip()


def _row(fact: Finding, scope: str, judge: Judge) -> GateCheck:
    verdict, cure = judge(fact)
    what = fact.name if scope in ("instance", "draft") else f"{scope}: {fact.name}"
    return GateCheck(
        name=fact.name,
        scope=scope,
        context=fact.context,
        generation=fact.generation,
        verdict=verdict,
        reason="" if verdict is Verdict.OK else mismatch(what, fact.context, fact.generation, cure),
    )
