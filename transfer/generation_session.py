"""One request on a generation rank: a state machine without I/O.

Each context rank that sends bytes is a *leg*. The request succeeds when every leg has settled; it fails as soon as one
does, and then asks the others to stop. Our pages are released (or handed over) once, on proof that no peer touches
them any more: its last word, its acknowledgement, or its death.

Under attention data parallelism on the context side one group of its ranks has the request. Where nobody said which,
all are asked; the first that sends anything *holds* it, and the asks to the others are withdrawn.

==================  ==========================================================================
leg state           meaning
==================  ==========================================================================
ASKED               the context rank may write into our pages
CANCELLING          we asked it to stop and wait for its acknowledgement
WITHDRAWING         another group holds the request; we wait for the acknowledgement that this one forgot our ask
IN_DOUBT            the connection broke, the process may still be writing
SETTLED             every byte is in our pages and its account agrees with our plan
FAILED, CANCELLED   it said that it touches our pages no more
LOST                it is gone
==================  ==========================================================================
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Final

from transfer.story import PeerKey, Story, illegal
from unikv.ids import RequestId


class Leg(StrEnum):
    """Where one context rank's share of the request stands."""

    ASKED = "asked"
    CANCELLING = "cancelling"
    WITHDRAWING = "withdrawing"
    IN_DOUBT = "in_doubt"
    SETTLED = "settled"
    FAILED = "failed"
    CANCELLED = "cancelled"
    LOST = "lost"


class Input(StrEnum):
    """What can happen to a leg."""

    SETTLED = "settled"
    BAD_DELIVERY = "bad_delivery"
    PEER_FAILED = "peer_failed"
    CANCEL_ACKED = "cancel_acked"
    STOP = "stop"
    WITHDRAW = "withdraw"
    LOST_QUIET = "lost_quiet"
    LOST_IN_DOUBT = "lost_in_doubt"


class Do(StrEnum):
    """What the driver must do for a leg, or (peer None) for the request."""

    SEND_ASK = "send_ask"
    SEND_CANCEL = "send_cancel"
    SEND_WITHDRAW = "send_withdraw"
    REPORT = "report"
    RELEASE = "release"


ENDED_LEGS: Final = frozenset({Leg.SETTLED, Leg.FAILED, Leg.CANCELLED, Leg.LOST})
"""States a leg never leaves: the peer touches our pages no more."""

TRANSITIONS: Final[dict[tuple[Leg, Input], tuple[Leg, tuple[Do, ...]]]] = {
    (Leg.ASKED, Input.SETTLED): (Leg.SETTLED, ()),
    # A wrong account comes with the peer's last word: it is quiet, and its bytes are not to be used.
    (Leg.ASKED, Input.BAD_DELIVERY): (Leg.FAILED, ()),
    (Leg.ASKED, Input.PEER_FAILED): (Leg.FAILED, ()),
    (Leg.ASKED, Input.STOP): (Leg.CANCELLING, (Do.SEND_CANCEL,)),
    (Leg.ASKED, Input.WITHDRAW): (Leg.WITHDRAWING, (Do.SEND_WITHDRAW,)),
    (Leg.ASKED, Input.LOST_QUIET): (Leg.LOST, ()),
    (Leg.ASKED, Input.LOST_IN_DOUBT): (Leg.IN_DOUBT, ()),
    (Leg.CANCELLING, Input.STOP): (Leg.CANCELLING, ()),
    # The peer's last word may cross our cancel; it means quiet just as the acknowledgement does, which then follows.
    (Leg.CANCELLING, Input.SETTLED): (Leg.CANCELLED, ()),
    (Leg.CANCELLING, Input.BAD_DELIVERY): (Leg.CANCELLED, ()),
    (Leg.CANCELLING, Input.PEER_FAILED): (Leg.CANCELLED, ()),
    (Leg.CANCELLING, Input.CANCEL_ACKED): (Leg.CANCELLED, ()),
    (Leg.CANCELLING, Input.LOST_QUIET): (Leg.LOST, ()),
    (Leg.CANCELLING, Input.LOST_IN_DOUBT): (Leg.IN_DOUBT, ()),
    # A failure here may have crossed our withdrawal, bytes must not have: the session fails on those.
    (Leg.WITHDRAWING, Input.STOP): (Leg.WITHDRAWING, ()),
    (Leg.WITHDRAWING, Input.SETTLED): (Leg.FAILED, ()),
    (Leg.WITHDRAWING, Input.BAD_DELIVERY): (Leg.FAILED, ()),
    (Leg.WITHDRAWING, Input.PEER_FAILED): (Leg.CANCELLED, ()),
    (Leg.WITHDRAWING, Input.CANCEL_ACKED): (Leg.CANCELLED, ()),
    (Leg.WITHDRAWING, Input.LOST_QUIET): (Leg.LOST, ()),
    (Leg.WITHDRAWING, Input.LOST_IN_DOUBT): (Leg.IN_DOUBT, ()),
    (Leg.IN_DOUBT, Input.STOP): (Leg.IN_DOUBT, ()),
    (Leg.IN_DOUBT, Input.LOST_IN_DOUBT): (Leg.IN_DOUBT, ()),
    (Leg.IN_DOUBT, Input.LOST_QUIET): (Leg.LOST, ()),
    # Half a broken connection may still deliver the peer's last word, which proves that it is quiet.
    **{
        (Leg.IN_DOUBT, event): (Leg.CANCELLED, ())
        for event in (Input.SETTLED, Input.BAD_DELIVERY, Input.PEER_FAILED, Input.CANCEL_ACKED)
    },
    **{(ended, event): (ended, ()) for ended in ENDED_LEGS for event in Input},
}
"""(state, input) -> (next state, actions). A pair that is not here is a bug or a protocol violation."""


@dataclass(frozen=True, slots=True)
class Action:
    """One thing to do: for the leg of `peer`, or for the whole request where `peer` is None."""

    do: Do
    peer: PeerKey | None = None


@dataclass(slots=True)
class GenerationSession:
    """One request's life on a generation rank. Feed it events; carry out the actions it returns, in order.

    Attributes:
        request_id: the request, as known on both sides.
        epoch: random number of this attempt; answers that carry another one are not for this session.
        deadline_s: when to give up, on the caller's clock.
        reason: why the request failed, empty while it has not.
    """

    request_id: RequestId
    epoch: int
    deadline_s: float
    reason: str = ""
    _legs: dict[PeerKey, Leg] = field(default_factory=dict)
    _groups: dict[PeerKey, int] = field(default_factory=dict)
    _holder: int | None = None
    _started: bool = False
    _reported: bool = False
    _released: bool = False
    _story: Story = field(default_factory=Story)

    @property
    def failed(self) -> bool:
        """Whether the request can no longer succeed."""
        return bool(self.reason)

    @property
    def reported(self) -> bool:
        """Whether the outcome is decided."""
        return self._reported

    @property
    def released(self) -> bool:
        """Whether no peer touches our pages any more: the session is over."""
        return self._released

    def leg(self, peer: PeerKey) -> Leg | None:
        """Return where the leg of `peer` stands, None where it has none."""
        return self._legs.get(peer)

    def peers(self, *states: Leg) -> tuple[PeerKey, ...]:
        """Return the peers whose legs are in one of `states`."""
        return tuple(peer for peer, leg in self._legs.items() if leg in states)

    def withdrawn(self, peer: PeerKey) -> bool:
        """Return whether `peer` has no part in the request: another group holds it."""
        return self._holder is not None and self._groups.get(peer) != self._holder

    def start(self, peers: Mapping[PeerKey, int]) -> list[Action]:
        """Ask every one of `peers` (those with bytes or an end to tell us; none at all settles at once).

        Args:
            peers: the data-parallel rank of each; with one among them it is known who holds the request.
        """
        if self._started:
            raise illegal(f"request {self.request_id}", "started", "start", self._story)
        self._started = True
        self._groups = dict(peers)
        self._legs = dict.fromkeys(peers, Leg.ASKED)
        if len(set(peers.values())) == 1:
            self._holder = next(iter(peers.values()))
        self._story.note(f"asked {', '.join(map(str, self._legs)) or 'nobody'}")
        return self._conclude([Action(Do.SEND_ASK, peer) for peer in self._legs])

    def heard(self, peer: PeerKey) -> list[Action]:
        """Bytes of `peer` arrive: its group holds the request, and no other may."""
        if self.failed:
            return []
        if self._holder is None:
            return self._hold(peer)
        return self._fail(self._two_holders(peer), []) if self.withdrawn(peer) else []

    def settled(self, peer: PeerKey) -> list[Action]:
        """Everything of `peer` is in our pages, and its account agrees with our plan."""
        actions = self._hold(peer) if self._holder is None and not self.failed else []
        actions += self._step(peer, Input.SETTLED)
        return self._fail(self._two_holders(peer), actions) if self.withdrawn(peer) else self._conclude(actions)

    def bad_delivery(self, peer: PeerKey, reason: str) -> list[Action]:
        """`peer` says it is done, but what it moved is not what was asked for."""
        return self._leg_failed(peer, Input.BAD_DELIVERY, reason)

    def peer_failed(self, peer: PeerKey, reason: str) -> list[Action]:
        """`peer` gave the request up and touches our pages no more."""
        if self.withdrawn(peer):
            return self._conclude(self._step(peer, Input.PEER_FAILED))
        return self._leg_failed(peer, Input.PEER_FAILED, reason)

    def cancel_acked(self, peer: PeerKey) -> list[Action]:
        """`peer` acknowledged our cancel: it touches our pages no more."""
        if self._legs.get(peer) is Leg.ASKED:
            return self._leg_failed(peer, Input.PEER_FAILED, f"{peer} acknowledged a cancel that nobody sent")
        return self._conclude(self._step(peer, Input.CANCEL_ACKED))

    def peer_lost(self, peer: PeerKey, reason: str, *, quiet: bool) -> list[Action]:
        """The connection to `peer` broke. `quiet`: it is proven that nothing of it can still write."""
        if self._legs.get(peer) in (None, *ENDED_LEGS):
            return []
        event = Input.LOST_QUIET if quiet else Input.LOST_IN_DOUBT
        if self.withdrawn(peer):
            return self._conclude(self._step(peer, event))
        return self._leg_failed(peer, event, reason)

    def peer_quiet(self, peer: PeerKey) -> list[Action]:
        """It is now proven that a lost `peer` writes no more."""
        return self._conclude(self._step(peer, Input.LOST_QUIET))

    def cancel(self, reason: str) -> list[Action]:
        """Our own side gives the request up."""
        return self._fail(reason, [])

    def tick(self, now_s: float) -> list[Action]:
        """Let time pass: a request that is not decided by its deadline fails."""
        if now_s < self.deadline_s or self._reported:
            return []
        waiting = ", ".join(str(peer) for peer in self.peers(Leg.ASKED, Leg.WITHDRAWING, Leg.IN_DOUBT))
        return self._fail(f"timed out on the generation side, waiting for {waiting or 'nobody'}", [])

    def _hold(self, peer: PeerKey) -> list[Action]:
        """The group of `peer` holds the request; take the asks to the others back."""
        self._holder = self._groups.get(peer)
        self._story.note(f"held by data-parallel rank {self._holder}")
        others = [other for other in self.peers(Leg.ASKED) if self.withdrawn(other)]
        return [action for other in others for action in self._step(other, Input.WITHDRAW)]

    def _two_holders(self, peer: PeerKey) -> str:
        return (
            f"context ranks of data-parallel ranks {self._holder} and {self._groups.get(peer)} both sent it; "
            "route a request to one of them"
        )

    def _leg_failed(self, peer: PeerKey, event: Input, reason: str) -> list[Action]:
        return self._fail(reason, self._step(peer, event))

    def _fail(self, reason: str, actions: list[Action]) -> list[Action]:
        if not self.reason and not self._reported:
            self.reason = reason
            self._story.note(f"fail: {reason}")
            for peer in list(self._legs):
                actions += self._step(peer, Input.STOP)
        return self._conclude(actions)

    def _step(self, peer: PeerKey, event: Input) -> list[Action]:
        before = self._legs.get(peer)
        found = TRANSITIONS.get((before, event)) if before is not None else None
        if found is None:
            raise illegal(f"request {self.request_id}, leg {peer}", before, event, self._story)
        self._legs[peer], todo = found
        self._story.note(f"{peer}: {before} --{event}--> {self._legs[peer]}")
        return [Action(do, peer) for do in todo]

    def _conclude(self, actions: list[Action]) -> list[Action]:
        if not self._reported and (self.failed or self._all_settled()):
            self._reported = True
            actions.append(Action(Do.REPORT))
        if self._reported and not self._released and all(leg in ENDED_LEGS for leg in self._legs.values()):
            self._released = True
            actions.append(Action(Do.RELEASE))
        return actions

    def _all_settled(self) -> bool:
        """Whether every byte is here, and nobody who was asked in vain can still send any."""
        ended = (Leg.SETTLED,), tuple(ENDED_LEGS)
        return all(leg in ended[self.withdrawn(peer)] for peer, leg in self._legs.items())
