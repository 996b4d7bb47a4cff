"""Decides whether two sides may talk and whether draft KV travels. Reports every check, not the first failure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

from transfer.hello import RankCard


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
        scope: what it is about: "instance", "group 0", "layer 3 key", "draft".
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
        return all(check.verdict is not Verdict.REFUSE for check in self.checks)


def check(context: RankCard, generation: RankCard) -> GateReport:
    """Compare two rank cards."""
    raise NotImplementedError


def check_instances(context: Sequence[RankCard], generation: Sequence[RankCard]) -> GateReport:
    """Compare every rank of two instances and merge equal findings into one report."""
    raise NotImplementedError
