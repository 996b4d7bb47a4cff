"""One request on a context rank: a state machine without I/O.

Each generation rank that wants bytes is a *leg*. Legs move independently; the request succeeds when every expected leg
has settled and fails as soon as one of them does. Pages are released once, on proof that no leg touches them.

==================  ==========================================================================
leg state           meaning
==================  ==========================================================================
ABSENT              the generation rank has not asked
ASKED               it asked; its KV is not ready here
MOVING              a copy towards it may touch our pages and its pages
DRAINING_*          the copy is being stopped (on cancel, failure, or loss of the peer)
SETTLED             every byte has landed, or was sent and left our pages
FAILED              it was told that nothing more comes
CANCELLED           it asked to stop, and was told that we are quiet
LOST                it is gone
==================  ==========================================================================
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Final

from transfer.story import PeerKey, Story, illegal
from unikv.ids import RequestId


class Leg(StrEnum):
    """Where one generation rank's share of the request stands."""

    ABSENT = "absent"
    ASKED = "asked"
    MOVING = "moving"
    DRAINING_CANCEL = "draining_cancel"
    DRAINING_FAILURE = "draining_failure"
    DRAINING_LOSS = "draining_loss"
    SETTLED = "settled"
    FAILED = "failed"
    CANCELLED = "cancelled"
    LOST = "lost"


class Input(StrEnum):
    """What can happen to a leg."""

    ASK = "ask"
    KV_READY = "kv_ready"
    MOVED = "moved"
    MOVE_FAILED = "move_failed"
    MOVE_STOPPED = "move_stopped"
    CANCEL = "cancel"
    FAIL = "fail"
    PEER_LOST = "peer_lost"


class Do(StrEnum):
    """What the driver must do for a leg, or (peer None) for the request."""

    START_MOVE = "start_move"
    STOP_MOVE = "stop_move"
    SEND_DONE = "send_done"
    SEND_FAILED = "send_failed"
    SEND_CANCEL_ACK = "send_cancel_ack"
    REPORT = "report"
    RELEASE = "release"


MOVING_LEGS: Final = frozenset({Leg.MOVING, Leg.DRAINING_CANCEL, Leg.DRAINING_FAILURE, Leg.DRAINING_LOSS})
"""States in which a copy may still touch pages."""

ENDED_LEGS: Final = frozenset({Leg.SETTLED, Leg.FAILED, Leg.CANCELLED, Leg.LOST})
"""States a leg never leaves."""

TRANSITIONS: Final[dict[tuple[Leg, Input], tuple[Leg, tuple[Do, ...]]]] = {
    (Leg.ABSENT, Input.ASK): (Leg.ASKED, ()),
    (Leg.ABSENT, Input.KV_READY): (Leg.ABSENT, ()),
    (Leg.ABSENT, Input.FAIL): (Leg.ABSENT, ()),
    (Leg.ABSENT, Input.CANCEL): (Leg.CANCELLED, (Do.SEND_CANCEL_ACK,)),
    (Leg.ABSENT, Input.PEER_LOST): (Leg.LOST, ()),
    (Leg.ASKED, Input.ASK): (Leg.ASKED, ()),
    (Leg.ASKED, Input.KV_READY): (Leg.MOVING, (Do.START_MOVE,)),
    (Leg.ASKED, Input.FAIL): (Leg.FAILED, (Do.SEND_FAILED,)),
    (Leg.ASKED, Input.CANCEL): (Leg.CANCELLED, (Do.SEND_CANCEL_ACK,)),
    (Leg.ASKED, Input.PEER_LOST): (Leg.LOST, ()),
    (Leg.MOVING, Input.ASK): (Leg.MOVING, ()),
    (Leg.MOVING, Input.MOVED): (Leg.SETTLED, (Do.SEND_DONE,)),
    (Leg.MOVING, Input.MOVE_FAILED): (Leg.FAILED, (Do.SEND_FAILED,)),
    (Leg.MOVING, Input.CANCEL): (Leg.DRAINING_CANCEL, (Do.STOP_MOVE,)),
    (Leg.MOVING, Input.FAIL): (Leg.DRAINING_FAILURE, (Do.STOP_MOVE,)),
    (Leg.MOVING, Input.PEER_LOST): (Leg.DRAINING_LOSS, (Do.STOP_MOVE,)),
    **{
        (draining, event): (draining, ())
        for draining in (Leg.DRAINING_CANCEL, Leg.DRAINING_FAILURE)
        for event in (Input.ASK, Input.FAIL)
    },
    (Leg.DRAINING_CANCEL, Input.CANCEL): (Leg.DRAINING_CANCEL, ()),
    (Leg.DRAINING_FAILURE, Input.CANCEL): (Leg.DRAINING_CANCEL, ()),
    **{
        (draining, Input.PEER_LOST): (Leg.DRAINING_LOSS, ())
        for draining in (Leg.DRAINING_CANCEL, Leg.DRAINING_FAILURE, Leg.DRAINING_LOSS)
    },
    **{
        (draining, event): ended
        for draining, ended in (
            (Leg.DRAINING_CANCEL, (Leg.CANCELLED, (Do.SEND_CANCEL_ACK,))),
            (Leg.DRAINING_FAILURE, (Leg.FAILED, (Do.SEND_FAILED,))),
            (Leg.DRAINING_LOSS, (Leg.LOST, ())),
        )
        for event in (Input.MOVED, Input.MOVE_FAILED, Input.MOVE_STOPPED)
    },
    **{(Leg.DRAINING_LOSS, event): (Leg.DRAINING_LOSS, ()) for event in (Input.ASK, Input.FAIL, Input.CANCEL)},
    **{
        (ended, event): (ended, ())
        for ended in ENDED_LEGS
        for event in (Input.ASK, Input.KV_READY, Input.FAIL, Input.PEER_LOST)
    },
    # Whoever asks us to stop after the end hears again that we are quiet: the first answer may have crossed the cancel.
    **{(ended, Input.CANCEL): (ended, (Do.SEND_CANCEL_ACK,)) for ended in ENDED_LEGS},
}
"""(state, input) -> (next state, actions). A pair that is not here is a bug or a protocol violation."""


@dataclass(frozen=True, slots=True)
class Action:
    """One thing to do: for the leg of `peer`, or for the whole request where `peer` is None."""

    do: Do
    peer: PeerKey | None = None


@dataclass(slots=True)
class _LegState:
    state: Leg = Leg.ABSENT
    reason: str = ""


@dataclass(slots=True)
class ContextSession:
    """One request's life on a context rank. Feed it events; carry out the actions it returns, in order.

    The session holds no pages and no tables: it says when to
    move and when to let go.

    Attributes:
        request_id: the request, as known on both sides.
        deadline_s: when to give up, on the caller's clock.
        reason: why the request failed, empty while it has not.
    """

    request_id: RequestId
    deadline_s: float
    reason: str = ""
    _ready: bool = False
    _expected: frozenset[PeerKey] | None = None
    _legs: dict[PeerKey, _LegState] = field(default_factory=dict)
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
        """Whether the pages were let go: the session is over."""
        return self._released

    def leg(self, peer: PeerKey) -> Leg:
        """Return where the leg of `peer` stands."""
        return self._legs[peer].state if peer in self._legs else Leg.ABSENT

    def leg_reason(self, peer: PeerKey) -> str:
        """Return why the leg of `peer` failed, or the request's reason."""
        return (self._legs[peer].reason if peer in self._legs else "") or self.reason

    def peers(self, *states: Leg) -> tuple[PeerKey, ...]:
        """Return the peers whose legs are in one of `states`."""
        return tuple(peer for peer, leg in self._legs.items() if leg.state in states)

    def kv_ready(self) -> list[Action]:
        """The KV of the whole prompt is in our pages."""
        self._ready = True
        return self._everywhere(Input.KV_READY)

    def expect(self, peers: Iterable[PeerKey]) -> list[Action]:
        """These peers, and no others, will want bytes. Until this is known the request cannot succeed."""
        self._expected = frozenset(peers)
        self._story.note(f"expect {sorted(map(str, self._expected))}")
        return self._conclude([])

    def asked(self, peer: PeerKey) -> list[Action]:
        """`peer` reserved pages and asked for its share."""
        actions = self._step(peer, Input.ASK)
        if self.failed:
            actions += self._step(peer, Input.FAIL)
        elif self._ready and self.leg(peer) is Leg.ASKED:
            actions += self._step(peer, Input.KV_READY)
        return self._conclude(actions)

    def moved(self, peer: PeerKey) -> list[Action]:
        """The copy for `peer` is complete."""
        return self._conclude(self._step(peer, Input.MOVED))

    def move_failed(self, peer: PeerKey, reason: str) -> list[Action]:
        """The copy for `peer` failed and touches nothing any more."""
        return self._leg_failed(peer, Input.MOVE_FAILED, reason)

    def move_stopped(self, peer: PeerKey) -> list[Action]:
        """The copy for `peer` was stopped and touches nothing any more."""
        return self._conclude(self._step(peer, Input.MOVE_STOPPED))

    def peer_cancelled(self, peer: PeerKey, reason: str) -> list[Action]:
        """`peer` no longer wants the request; it waits for our acknowledgement before it reuses its pages."""
        already_over = self.leg(peer) in ENDED_LEGS
        actions = self._step(peer, Input.CANCEL)
        if already_over:
            return self._conclude(actions)
        return self._fail(f"cancelled by generation rank {peer}: {reason}", actions)

    def forget(self, peer: PeerKey) -> bool:
        """`peer` has its request from elsewhere. Return False where that cannot be: the request is here, or over."""
        if self._ready or self.leg(peer) is not Leg.ASKED:
            return False
        del self._legs[peer]
        self._story.note(f"{peer}: withdrawn")
        return True

    def peer_lost(self, peer: PeerKey, reason: str) -> list[Action]:
        """The process behind `peer` is gone."""
        if self.leg(peer) in ENDED_LEGS:
            return []
        return self._leg_failed(peer, Input.PEER_LOST, reason)

    def fail(self, reason: str) -> list[Action]:
        """Our own side gives the request up (cancelled by its caller, prefill failed, time is over)."""
        return self._fail(reason, [])

    def tick(self, now_s: float) -> list[Action]:
        """Let time pass: a request that is not decided by its deadline fails."""
        if now_s < self.deadline_s or self._reported:
            return []
        waiting = ", ".join(f"{peer} {leg.state}" for peer, leg in self._legs.items()) or "nobody asked"
        return self._fail(f"timed out on the context side ({'KV ready' if self._ready else 'no KV'}; {waiting})", [])

    def _leg_failed(self, peer: PeerKey, event: Input, reason: str) -> list[Action]:
        self._legs.setdefault(peer, _LegState()).reason = reason
        return self._fail(reason, self._step(peer, event))

    def _fail(self, reason: str, actions: list[Action]) -> list[Action]:
        """Fail the request once: its legs are told, those that move are drained first."""
        if not self.reason and not self._reported:
            self.reason = reason
            self._story.note(f"fail: {reason}")
            for peer in list(self._legs):
                actions += self._step(peer, Input.FAIL)
        return self._conclude(actions)

    def _everywhere(self, event: Input) -> list[Action]:
        actions: list[Action] = []
        for peer in list(self._legs):
            actions += self._step(peer, event)
        return self._conclude(actions)

    def _step(self, peer: PeerKey, event: Input) -> list[Action]:
        leg = self._legs.setdefault(peer, _LegState())
        found = TRANSITIONS.get((leg.state, event))
        if found is None:
            raise illegal(f"request {self.request_id}, leg {peer}", leg.state, event, self._story)
        before, (leg.state, todo) = leg.state, found
        self._story.note(f"{peer}: {before} --{event}--> {leg.state}")
        return [Action(do, peer) for do in todo]

    def _conclude(self, actions: list[Action]) -> list[Action]:
        """Add the outcome and the release of the pages where they are due. Each happens once."""
        if not self._reported and (self.failed or self._all_settled()):
            self._reported = True
            actions.append(Action(Do.REPORT))
        if self._reported and not self._released and not any(leg.state in MOVING_LEGS for leg in self._legs.values()):
            self._released = True
            actions.append(Action(Do.RELEASE))
        return actions

    def _all_settled(self) -> bool:
        if not self._ready or self._expected is None:
            return False
        return all(self.leg(peer) is Leg.SETTLED for peer in self._expected)
