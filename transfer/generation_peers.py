"""The context ranks a generation rank knows: what each answered to our hello."""

from __future__ import annotations

import logging
from dataclasses import dataclass

from transfer.agreement import judge, plan_of, shared
from transfer.exchange import PeerKey
from transfer.gate_report import GateReport
from transfer.hello import PathKind, RankCard
from transfer.messages import HelloAck, HelloNack
from transfer.plan import CopyProgram, Lane
from unikv.errors import RemoteProtocolError, explain

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class ContextPeer:
    """One context rank that accepted us.

    Attributes:
        scatter: lanes out of a packed chunk into our pages, by group pair.
    """

    card: RankCard
    address: str
    report: GateReport
    program: CopyProgram
    scatter: tuple[tuple[Lane, ...], ...]
    path: PathKind
    path_reason: str

    @property
    def key(self) -> PeerKey:
        """Who it is, for as long as its process lives."""
        return (self.card.incarnation, self.card.rank)


@dataclass(slots=True)
class Registration:
    """What became of one hello: open, accepted (`peer`) or refused (`refusal`, with the gate's report)."""

    address: str
    peer: ContextPeer | None = None
    answer: HelloNack | None = None
    refusal: str = ""

    @property
    def decided(self) -> bool:
        """Whether the peer has answered, or cannot."""
        return self.peer is not None or bool(self.refusal)


def accept(own: RankCard, address: str, answer: HelloAck) -> ContextPeer:
    """Return the peer behind an acknowledged hello, after making sure that it planned what we plan.

    Raises:
        RemoteProtocolError: its verdict or its program differs from ours.
    """
    card, report = answer.card, judge(answer.card, own)
    thing = f"context rank {card.rank} at {address}"
    cure = "run the same release on both sides"
    if report != answer.report:
        raise RemoteProtocolError(explain(thing, "gate report", "another verdict", "the same as ours", cure))
    plan = plan_of(card, own, report)
    if plan.program.digest != answer.digest:
        raise RemoteProtocolError(explain(thing, "program digest", answer.digest, plan.program.digest, cure))
    _log.info(
        "generation rank %d <- context rank %d: path %s (%s), draft KV %s",
        *(own.rank, card.rank, answer.path, answer.path_reason, report.draft_kv),
    )
    return ContextPeer(
        card=shared(card),
        address=address,
        report=report,
        program=plan.program,
        scatter=plan.scatter,
        path=answer.path,
        path_reason=answer.path_reason,
    )
