"""Ranks that see things at different times decide the same things, in the same order, and only when they may."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest
from hypothesis import given
from hypothesis import strategies as st

from transfer.consensus import Decisions, LedgerManager, RankView, Standing, decide, must_exchange
from transfer.outcome import Outcome, TransferHandle
from unikv.errors import LocalProtocolError
from unikv.ids import RequestId

ONE, TWO = RequestId(1), RequestId(2)
OPEN, DONE = Standing(), Standing(done=True, quiet=True)
FAILED, STILL = Standing(reason="no room", quiet=True), Standing(reason="no room")


def view(**standings: Standing) -> RankView:
    return RankView(requests={RequestId(int(name[1:])): standing for name, standing in standings.items()})


@pytest.mark.parametrize(
    ("views", "want"),
    [
        ([view(r1=OPEN), view(r1=DONE)], Decisions()),
        ([view(r1=DONE), view(r1=DONE)], Decisions(completed=(ONE,), retired=(ONE,))),
        ([view(r1=DONE), view(r1=STILL)], Decisions(failed={ONE: "no room"})),
        ([view(r1=DONE), view(r1=FAILED)], Decisions(failed={ONE: "no room"}, retired=(ONE,))),
        ([view(r1=OPEN), view(r1=FAILED)], Decisions(failed={ONE: "no room"})),
        ([view(r1=DONE), view()], Decisions()),  # the other has not heard of it
        ([view(r1=FAILED), view()], Decisions(failed={ONE: "no room"})),
        ([view(r1=DONE), None], Decisions(failed={ONE: "rank 1 of the instance is lost"}, retired=(ONE,))),
        ([None, view(r1=OPEN)], Decisions(failed={ONE: "rank 0 of the instance is lost"})),
        ([view(r2=DONE, r1=DONE), view(r1=DONE, r2=OPEN)], Decisions(completed=(ONE,), retired=(ONE,))),
        ([None, None], Decisions()),
    ],
)
def test_decisions_are_these(views: list[RankView | None], want: Decisions) -> None:
    assert decide(views) == want


@given(st.lists(st.booleans(), max_size=9))
def test_one_rank_with_news_is_enough(news: list[bool]) -> None:
    assert must_exchange(iter(news)) == (True in news)


def test_a_request_is_tracked_once() -> None:
    ledger = LedgerManager()
    ledger.track(TransferHandle(ONE))
    with pytest.raises(LocalProtocolError, match="request 1: state is 'tracked', expected new"):
        ledger.track(TransferHandle(ONE))


def test_news_are_what_was_not_said() -> None:
    ledger, handle = LedgerManager(), TransferHandle(ONE)
    ledger.track(handle)
    assert not ledger.has_news()
    handle.decide(Outcome(request_id=ONE))
    assert ledger.has_news() and ledger.view() == view(r1=Standing(done=True))
    assert not ledger.has_news()
    handle.settle_quiet()
    assert ledger.has_news() and ledger.view() == view(r1=DONE)


def test_a_completed_request_fails_where_a_rank_is_lost_before_it_retires() -> None:
    ledger, handle = LedgerManager(), TransferHandle(ONE)
    ledger.track(handle)
    handle.decide(Outcome(request_id=ONE))
    still = view(r1=Standing(done=True))
    assert ledger.take(decide([ledger.view(), still])) == Decisions(completed=(ONE,))
    lost = "rank 1 of the instance is lost"
    assert ledger.take(decide([ledger.view(), None])) == Decisions(failed={ONE: lost})
    handle.settle_quiet()
    assert ledger.take(decide([ledger.view(), None])) == Decisions(retired=(ONE,))
    assert len(ledger) == 0


@dataclass
class Instance:
    """Ranks that exchange views in rounds; `history` has what each was told to do."""

    ranks: int
    ledgers: list[LedgerManager] = field(default_factory=list)
    handles: list[dict[RequestId, TransferHandle]] = field(default_factory=list)
    history: list[list[tuple[str, RequestId]]] = field(default_factory=list)
    lost: set[int] = field(default_factory=set)

    def __post_init__(self) -> None:
        self.ledgers = [LedgerManager() for _ in range(self.ranks)]
        self.handles = [{} for _ in range(self.ranks)]
        self.history = [[] for _ in range(self.ranks)]

    def living(self) -> list[int]:
        return [rank for rank in range(self.ranks) if rank not in self.lost]

    def exchange(self) -> None:
        views = [None if rank in self.lost else self.ledgers[rank].view() for rank in range(self.ranks)]
        for rank in self.living():
            new = self.ledgers[rank].take(decide(views))
            self.history[rank] += [("fail", request_id) for request_id in new.failed]
            self.history[rank] += [("complete", request_id) for request_id in new.completed]
            self.history[rank] += [("retire", request_id) for request_id in new.retired]
            for request_id, reason in new.failed.items():  # what an endpoint does with a cancel
                if self.handles[rank][request_id].outcome is None:
                    self.handles[rank][request_id].decide(Outcome(request_id=request_id, reason=reason))


EVENTS = st.lists(
    st.tuples(st.sampled_from(["succeed", "fail", "quiet", "exchange", "lose"]), st.integers(0, 3), st.integers(1, 4)),
    max_size=60,
)


@given(st.integers(1, 4), EVENTS)
def test_all_ranks_do_the_same_and_nothing_is_forgotten(ranks: int, events: list[tuple[str, int, int]]) -> None:
    instance, requests = Instance(ranks), [RequestId(number) for number in range(1, 5)]
    for rank in range(ranks):
        for request_id in requests:
            handle = instance.handles[rank][request_id] = TransferHandle(request_id)
            instance.ledgers[rank].track(handle)
    for event, number, request in events:
        rank, request_id = number % ranks, RequestId(request)
        handle = instance.handles[rank][request_id]
        if event == "exchange":
            if must_exchange(instance.ledgers[rank].has_news() for rank in instance.living()) or instance.lost:
                instance.exchange()
        elif event == "lose" and len(instance.lost) < ranks - 1:
            instance.lost.add(rank)
        elif event == "quiet" and handle.outcome is not None:
            handle.settle_quiet()
        elif event in ("succeed", "fail") and handle.outcome is None:
            handle.decide(Outcome(request_id=request_id, reason="" if event == "succeed" else "it broke"))
        check(instance, requests)
    for rank in instance.living():  # everything ends
        for handle in instance.handles[rank].values():
            if handle.outcome is None:
                handle.decide(Outcome(request_id=handle.request_id))
            handle.settle_quiet()
    for _ in range(3):
        instance.exchange()
        check(instance, requests)
    assert all(len(instance.ledgers[rank]) == 0 for rank in instance.living())


def check(instance: Instance, requests: list[RequestId]) -> None:
    """The ranks that live did the same, each thing once, and nothing before its time."""
    living = instance.living()
    histories = [instance.history[rank] for rank in living]
    assert all(history == histories[0] for history in histories)
    done = histories[0]
    assert len(set(done)) == len(done)
    for request_id in requests:
        told = [word for word, which in done if which == request_id]
        assert told in ([], ["fail"], ["complete"], ["complete", "fail"], ["fail", "retire"], ["complete", "retire"],
                        ["complete", "fail", "retire"])  # fmt: skip
        handles = [instance.handles[rank][request_id] for rank in living]
        if "complete" in told:
            assert all(handle.outcome is not None and handle.outcome.ok for handle in handles)
        if told == ["fail"] or "retire" in told:
            assert (
                instance.lost or "complete" in told or any(h.outcome is not None and h.outcome.reason for h in handles)
            )
        if "retire" in told:
            assert all(handle.quiet for handle in handles)
