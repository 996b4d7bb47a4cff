"""What the gate found: one row per compared fact, readable as text and decisive as an exception."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from unikv.errors import IncompatiblePeerError


class Verdict(StrEnum):
    """What one check found."""

    OK = "ok"
    FALLBACK = "fallback"
    REFUSE = "refuse"


class DraftKV(StrEnum):
    """Whether draft KV travels, and by which rule."""

    SHARED = "shared"
    PER_VIEW = "per_view"
    OFF = "off"


@dataclass(frozen=True, slots=True, kw_only=True)
class GateCheck:
    """One compared fact.

    Attributes:
        name: stable identifier of the check, e.g. "tokens_per_block".
        scope: what it is about: "instance", "draft", "layer 3 key", "draft layers 32-35 key, value"; in a report on
            instances whose ranks disagree, the ranks in front ("context rank 1 -> generation rank 0, layer 3 key").
        context, generation: both values as text.
        reason: empty for OK; else what differs and which setting to change.
    """

    name: str
    scope: str
    context: str
    generation: str
    verdict: Verdict
    reason: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class GateReport:
    """The verdict on a pair of ranks, or of instances, with every check that led to it."""

    checks: tuple[GateCheck, ...]
    draft_kv: DraftKV

    @property
    def compatible(self) -> bool:
        """True when nothing is refused."""
        return not self.refused

    @property
    def refused(self) -> tuple[GateCheck, ...]:
        """The checks that keep the two sides apart."""
        return tuple(check for check in self.checks if check.verdict is Verdict.REFUSE)


def mismatch(what: str, context: str, generation: str, cure: str) -> str:
    """Return the sentence every reason of the gate is made of; both values are always in it."""
    return f"{what} is {context} on context and {generation} on generation; {cure}"


def require_compatible(report: GateReport) -> None:
    """Do nothing where the report lets the two sides talk.

    Raises:
        IncompatiblePeerError: some check was refused; `mismatches` holds one sentence for each of them.
    """
    refused = report.refused
    if not refused:
        return
    raise IncompatiblePeerError(
        f"refused by {len(refused)} check(s) of the gate; align the two sides as each line says",
        mismatches=[f"{check.name} [{check.scope}]: {check.reason}" for check in refused],
    )


def format_report(report: GateReport) -> str:
    """Return the report as plain lines for a log: the outcome first, then every check in order."""
    refused = len(report.refused)
    outcome = (
        f"refused by {refused} of {len(report.checks)} checks" if refused else f"passed {len(report.checks)} checks"
    )
    return "\n".join([f"gate: {outcome}; draft KV {report.draft_kv.value}", *map(_format_check, report.checks)])


def _format_check(check: GateCheck) -> str:
    values = f"context {check.context}, generation {check.generation}"
    line = f"  {check.verdict.value:<8}  {check.name} [{check.scope}]: {values}"
    return f"{line}\n            {check.reason}" if check.reason else line
