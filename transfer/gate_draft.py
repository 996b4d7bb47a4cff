"""Decides whether draft KV travels, and what every difference is worth once that is decided.

=========  =========================  ==============================  ==========================================
draft_kv   no draft obstacle          only obstacles heads cut        any other draft obstacle
                                      per view would lift
=========  =========================  ==============================  ==========================================
auto       shared                     off, rows say fallback          off, rows say fallback
1          shared                     off, rows say refuse            off, rows say refuse
per_view   shared                     per_view if both sides can      off, rows say fallback
0          off                        off                             off
=========  =========================  ==============================  ==========================================

Without draft layers on either side there is nothing to decide; sides that were asked for different things are refused.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from transfer.gate_facts import HeaderFacts
from transfer.gate_findings import Finding, Rule
from transfer.gate_report import DraftKV, GateCheck, Verdict, mismatch
from transfer.hello import CAPABILITY_PER_VIEW_HEADS, DraftKVMode

PER_VIEW_HINT = "or set transfer.draft_kv: per_view"


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftDecision:
    """The decision, and the means to judge the findings it came from.

    Attributes:
        rule: which rule decided, in words.
        failed: verdict of a draft check that failed.
        lifted: whether obstacles that per-view heads overcome are none.
        hint: another way out for those obstacles, or "".
        rows: the report rows of the decision itself.
    """

    draft_kv: DraftKV
    failed: Verdict
    lifted: bool = False
    hint: str = ""
    rows: tuple[GateCheck, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class _Situation:
    """What the decision depends on: texts of both sides' modes and capabilities, and the names of failed checks."""

    modes: tuple[str, str]
    mode: DraftKVMode | None
    has_draft: bool
    able: tuple[bool, bool]
    hard: tuple[str, ...]
    split: tuple[str, ...]


def decide(
    findings: Iterable[Finding], context: Sequence[HeaderFacts], generation: Sequence[HeaderFacts]
) -> DraftDecision:
    """Return the decision for one pair of ranks, or for two instances: the weakest any of their pairs would get."""
    return _decide(_situation(findings, context, generation))


def verdict(finding: Finding, decision: DraftDecision) -> Verdict:
    """Return what `finding` is worth under `decision`."""
    if finding.agrees or finding.rule is Rule.NOTE:
        return Verdict.OK
    if finding.rule is Rule.TARGET:
        return Verdict.REFUSE
    if finding.rule is Rule.SLOWER:
        return Verdict.FALLBACK
    if finding.rule is Rule.DRAFT_SPLIT and decision.lifted:
        return Verdict.OK
    if finding.rule is Rule.DRAFT_COVERAGE and decision.draft_kv is not DraftKV.OFF:
        return Verdict.REFUSE
    return decision.failed


def cure(finding: Finding, decision: DraftDecision) -> str:
    """Return what to do about a failed `finding`, and what happens otherwise."""
    if finding.rule not in (Rule.DRAFT, Rule.DRAFT_SPLIT, Rule.DRAFT_COVERAGE):
        return finding.cure
    stays = "draft KV does not travel, " if decision.draft_kv is DraftKV.OFF else ""
    hint = f", {decision.hint}" if decision.hint and finding.rule is Rule.DRAFT_SPLIT else ""
    return f"{stays}{finding.cure}{hint}"


def _situation(
    findings: Iterable[Finding], context: Sequence[HeaderFacts], generation: Sequence[HeaderFacts]
) -> _Situation:
    failed = [finding for finding in findings if not finding.agrees]
    everyone = (*context, *generation)
    modes = {facts.draft_kv for facts in everyone}
    return _Situation(
        modes=(_modes_text(context), _modes_text(generation)),
        mode=modes.pop() if len(modes) == 1 else None,
        has_draft=any(facts.num_draft_layers for facts in everyone),
        able=(_able(context), _able(generation)),
        hard=_names(failed, Rule.DRAFT),
        split=_names(failed, Rule.DRAFT_SPLIT),
    )


def _decide(seen: _Situation) -> DraftDecision:
    if not seen.has_draft:
        return _decision(seen, DraftKV.OFF, "no draft layers", Verdict.OK)
    if seen.mode is None:
        return _decision(seen, DraftKV.OFF, "the sides disagree", Verdict.FALLBACK, row=Verdict.REFUSE)
    if seen.mode is DraftKVMode.OFF:
        return _decision(seen, DraftKV.OFF, "switched off", Verdict.OK)
    failed = Verdict.REFUSE if seen.mode is DraftKVMode.REQUIRE else Verdict.FALLBACK
    if not seen.hard and not seen.split:
        return _decision(seen, DraftKV.SHARED, "all draft checks agree", failed)
    if not seen.hard and _lifted(seen):
        return _decision(
            seen, DraftKV.PER_VIEW, f"heads are cut per view, so unequal {_list(seen.split)} is fine", failed
        )
    return _decision(seen, DraftKV.OFF, f"unequal {_list((*seen.hard, *seen.split))}", failed, row=failed)


def _decision(
    seen: _Situation, draft_kv: DraftKV, rule: str, failed: Verdict, *, row: Verdict = Verdict.OK
) -> DraftDecision:
    ours, theirs = (f"{mode}: {draft_kv.value} ({rule})" for mode in seen.modes)
    hint = PER_VIEW_HINT if not seen.hard and all(seen.able) and seen.mode is not DraftKVMode.PER_VIEW else ""
    reason = "" if row is Verdict.OK else mismatch("transfer.draft_kv", *seen.modes, _way_out(seen, rule, hint))
    decided = GateCheck(name="draft_kv", scope="draft", context=ours, generation=theirs, verdict=row, reason=reason)
    return DraftDecision(
        draft_kv=draft_kv, failed=failed, lifted=_lifted(seen), hint=hint, rows=(_capability_row(seen), decided)
    )


def _way_out(seen: _Situation, rule: str, hint: str) -> str:
    if seen.mode is None:
        return "set the same transfer.draft_kv (UNIKV_SHARED_DRAFT_KV overrides it) on both sides"
    if seen.mode is DraftKVMode.REQUIRE:
        hint = f"{hint}, or set transfer.draft_kv: auto".lstrip(", ")
    return ", ".join(filter(None, [f"but draft KV cannot travel: {rule}", "align the two sides", hint]))


def _lifted(seen: _Situation) -> bool:
    return seen.mode is DraftKVMode.PER_VIEW and all(seen.able)


def _capability_row(seen: _Situation) -> GateCheck:
    """Missing per-view heads only matter to those who asked for them and need them."""
    ours, theirs = (CAPABILITY_PER_VIEW_HEADS if able else "none" for able in seen.able)
    missed = seen.has_draft and seen.mode is DraftKVMode.PER_VIEW and bool(seen.split) and not all(seen.able)
    advice = f"transfer.draft_kv: per_view needs it on both sides, align {_list(seen.split)} or update unikv"
    return GateCheck(
        name="capabilities",
        scope="draft",
        context=ours,
        generation=theirs,
        verdict=Verdict.FALLBACK if missed else Verdict.OK,
        reason=mismatch(f"capability {CAPABILITY_PER_VIEW_HEADS}", ours, theirs, advice) if missed else "",
    )


def _modes_text(cards: Sequence[HeaderFacts]) -> str:
    return " and ".join(sorted({facts.draft_kv.value for facts in cards})) or "unknown"


def _able(cards: Sequence[HeaderFacts]) -> bool:
    return all(CAPABILITY_PER_VIEW_HEADS in facts.capabilities for facts in cards)


def _names(failed: Iterable[Finding], rule: Rule) -> tuple[str, ...]:
    return tuple(dict.fromkeys(finding.name for finding in failed if finding.rule is rule))


def _list(names: Sequence[str]) -> str:
    return ", ".join(names)
