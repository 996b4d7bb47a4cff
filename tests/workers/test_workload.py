"""Workloads: what is sent, how reports of all ranks are joined, and how a run ends when something is wrong."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from transfer.hello import Side
from transfer.messages import StageTimes
from unikv.ids import RequestId
from workers.bench_case import percentile
from workers.client import Report
from workers.control import (
    ControlMessage,
    DecodeReport,
    DigestReport,
    EvidenceReport,
    GiveUp,
    LegRecord,
    Proceed,
    PromptReport,
    RunDecode,
    RunPrompt,
)
from workers.fleet import Death
from workers.request_record import CANCELLED, Job, RequestRecord
from workers.routing import RankGroup, RouteManager, WorkerName
from workers.workload import GRACE_S, WorkloadDriver

RANKS = {Side.CONTEXT: 2, Side.GENERATION: 1}
GOOD = EvidenceReport(checked_bytes=64, mismatched_bytes=0, first_mismatch="", digests=())
KILLED = Death(side=Side.CONTEXT, rank=1, reason="signal SIGKILL", orderly=False, tail="")


def job(prompt_tokens: int = 100) -> Job:
    return Job(prompt=(), prompt_tokens=prompt_tokens, max_new_tokens=1)


def prompt(request_id: int, rank: int = 0, reason: str = "", **facts: Any) -> PromptReport:
    facts = {"prefill_s": 0.0, "evidence": None if reason else GOOD, **facts}
    return PromptReport(request_id=RequestId(request_id), rank=rank, reason=reason, **facts)


def decode(request_id: int, rank: int = 0, reason: str = "", **facts: Any) -> DecodeReport:
    facts = {"evidence": None if reason else GOOD, "tokens": () if reason else (7,), **facts}
    return DecodeReport(request_id=RequestId(request_id), rank=rank, reason=reason, **facts)


@dataclass(slots=True)
class Workers:
    """Stands for both sides: answers what `script` says to each message, and time passes with every poll."""

    script: Callable[[ControlMessage], list[Report]]
    now_s: float = 100.0
    sent: list[tuple[Side, ControlMessage]] = field(default_factory=list)
    lost: dict[WorkerName, str] = field(default_factory=dict)
    dead: list[Death] = field(default_factory=list)
    most_open: int = 0
    _answers: list[Report] = field(default_factory=list)
    _over: set[int] = field(default_factory=set)

    @property
    def gone(self) -> dict[WorkerName, str]:
        return self.lost

    def send(self, side: Side, message: ControlMessage, ranks: object = None) -> None:
        self.sent.append((side, message))
        self._answers += self.script(message)
        asked = {m.request_id for _, m in self.sent if isinstance(m, RunPrompt)}
        self.most_open = max(self.most_open, len(asked - self._over))

    def poll(self, timeout_s: float = 0.1) -> list[Report]:
        self.now_s += 0.1
        answers, self._answers = self._answers, []
        return answers

    def driver(self) -> WorkloadDriver:
        return WorkloadDriver(self, RANKS, lambda: self.dead, clock=lambda: self.now_s)

    def run(self, count: int = 1, *, concurrency: int = 4, timeout_s: float = 5.0) -> list[RequestRecord]:
        return self.driver().run(
            [job(100 + number) for number in range(count)],
            concurrency=concurrency,
            timeout_s=timeout_s,
            on_finished=lambda record: self._over.add(record.request_id),
        )


def obedient(message: ControlMessage) -> list[Report]:
    """All ranks do what they are told, in no particular order."""
    match message:
        case RunPrompt(request_id=number):
            return [prompt(number, 1), prompt(number, 0)]
        case RunDecode(request_id=number):
            return [decode(number)]
    return []


# --- a run that goes well --------------------------------------------------------------------------------------------


def test_both_sides_hear_of_every_request_with_what_it_needs() -> None:
    workers = Workers(obedient)
    [record] = workers.driver().run(
        [Job(prompt=(4, 5, 6), prompt_tokens=3, max_new_tokens=9)],
        concurrency=1,
        timeout_s=1.0,
        on_finished=lambda _: None,
    )
    assert workers.sent == [
        (
            Side.GENERATION,
            RunDecode(request_id=RequestId(1), prompt=(4, 5, 6), prompt_tokens=3, max_new_tokens=9, verify=True),
        ),
        (Side.CONTEXT, RunPrompt(request_id=RequestId(1), prompt=(4, 5, 6), prompt_tokens=3, verify=True)),
    ]
    assert (record.reason, record.tokens, record.verification()) == ("", (7,), (True, 0, ""))
    assert record.reporters() == {(Side.CONTEXT, 0), (Side.CONTEXT, 1), (Side.GENERATION, 0)}


@pytest.mark.parametrize("concurrency", [1, 3, 20])
def test_records_are_in_the_order_of_the_jobs_and_concurrency_is_kept(concurrency: int) -> None:
    workers = Workers(obedient)
    records = workers.run(7, concurrency=concurrency)
    assert [record.job.prompt_tokens for record in records] == [100 + number for number in range(7)]
    assert workers.most_open == min(7, concurrency)
    assert all(record.finished_s > record.submitted_s for record in records)


def test_ids_do_not_come_back_in_the_next_run() -> None:
    driver = Workers(obedient).driver()
    ids = [
        record.request_id
        for _ in range(3)
        for record in driver.run([job(), job()], concurrency=2, timeout_s=1.0, on_finished=lambda _: None)
    ]
    assert len(set(ids)) == 6


def test_no_job_is_no_run() -> None:
    assert Workers(obedient).run(0) == []


def test_a_request_is_finished_when_every_rank_has_reported() -> None:
    answers: list[list[Report]] = [[decode(1)], [prompt(1, 0)], [prompt(1, 0)], [prompt(1, 1)]]
    workers = Workers(lambda _: [])
    finished: list[int] = []
    ended_with: list[int] = []

    def poll(_timeout_s: float) -> list[Report]:
        ended_with.append(len(finished))
        workers.now_s += 0.1
        return answers.pop(0)

    workers_poll = type("Scripted", (), {"gone": {}, "send": workers.send, "poll": staticmethod(poll)})()
    driver = WorkloadDriver(workers_poll, RANKS, lambda: [], clock=lambda: workers.now_s)
    driver.run([job()], concurrency=1, timeout_s=5.0, on_finished=lambda record: finished.append(record.request_id))
    assert (ended_with, finished) == ([0, 0, 0, 0], [1])


# --- a run that does not ---------------------------------------------------------------------------------------------


def test_a_failed_rank_makes_the_others_give_up_once() -> None:
    def script(message: ControlMessage) -> list[Report]:
        match message:
            case RunDecode(request_id=1):
                return [decode(1, reason="needs 9 of 8 pages")]
            case GiveUp(request_id=number, reason=reason):
                return [prompt(number, 0, reason), prompt(number, 1, reason)]
            case RunDecode() | RunPrompt(request_id=2):
                return obedient(message)
        return []

    workers = Workers(script)
    failed, fine = workers.run(2)
    assert (failed.reason, failed.finished_s > 0) == ("needs 9 of 8 pages", True)
    assert (fine.reason, fine.verification()[0]) == ("", True)
    given_up = [(side, message) for side, message in workers.sent if isinstance(message, GiveUp)]
    assert given_up == [(side, GiveUp(request_id=RequestId(1), reason="needs 9 of 8 pages")) for side in Side]
    assert failed.verification() == (False, 0, "generation rank 0: no evidence")


def test_the_death_of_a_worker_ends_the_run_as_soon_as_the_others_have_reported() -> None:
    def script(message: ControlMessage) -> list[Report]:
        if isinstance(message, RunPrompt) and message.request_id == 3:
            workers.dead.append(KILLED)
        if isinstance(message, GiveUp):
            number, reason = message.request_id, message.reason
            return [prompt(number, 0, reason), decode(number, 0, reason)]
        return obedient(message) if getattr(message, "request_id", 9) < 3 else []

    workers = Workers(script)
    records = workers.run(6, concurrency=3)
    assert [record.reason for record in records] == ["", ""] + ["context rank 1 died (signal SIGKILL)"] * 4
    assert workers.now_s < 100.0 + GRACE_S
    sent = {m.request_id for _, m in workers.sent if isinstance(m, RunPrompt)}
    assert {record.request_id for record in records[len(sent) :]}.isdisjoint(sent), "nothing is sent after a death"
    assert len({record.request_id for record in records}) == 6


def test_survivors_that_do_not_report_are_waited_for_only_so_long() -> None:
    workers = Workers(lambda message: workers.dead.append(KILLED) or [] if isinstance(message, RunPrompt) else [])
    [record] = workers.run(1, timeout_s=60.0)
    assert record.reason == record.abandoned == "context rank 1 died (signal SIGKILL)"
    assert record.finished_s == 0.0
    assert GRACE_S < workers.now_s - 100.0 < GRACE_S + 0.5


def test_a_lost_connection_is_a_death_too() -> None:
    workers = Workers(lambda _: [])
    workers.lost[Side.GENERATION, 0] = "the connection is lost"
    [record] = workers.run(1)
    assert workers.sent == [], "nobody is there to serve it"
    assert record.reason == "generation rank 0 is gone (the connection is lost)"


def test_silence_ends_the_run() -> None:
    workers = Workers(lambda message: obedient(message) if getattr(message, "request_id", 9) == 1 else [])
    records = workers.run(3, concurrency=1, timeout_s=2.0)
    reason = "no worker reported anything for 2 s"
    assert [record.reason for record in records] == ["", reason, reason]
    assert workers.now_s - 100.0 < 2.5
    assert [m for _, m in workers.sent if isinstance(m, GiveUp)][-1] == GiveUp(request_id=RequestId(2), reason=reason)


def test_reports_of_a_run_that_is_over_are_dropped() -> None:
    late: list[Report] = [decode(1, reason="late"), prompt(1, 0), prompt(1, 1)]
    workers = Workers(lambda message: [] if getattr(message, "request_id", 0) == 1 else [*late, *obedient(message)])
    driver = workers.driver()
    first = driver.run([job()], concurrency=1, timeout_s=1.0, on_finished=lambda _: None)
    second = driver.run([job()], concurrency=1, timeout_s=1.0, on_finished=lambda _: None)
    assert [record.reason for record in (*first, *second)] == ["no worker reported anything for 1 s", ""]


# --- several instances -----------------------------------------------------------------------------------------------


@dataclass(slots=True)
class Instances(Workers):
    """Two context instances of two ranks each, one generation rank; only those that are asked answer."""

    asked: list[tuple[Side, str, tuple[int, ...]]] = field(default_factory=list)
    routes: RouteManager = field(
        default_factory=lambda: RouteManager(
            {
                Side.CONTEXT: [instance(Side.CONTEXT, 0, 0, 1), instance(Side.CONTEXT, 1, 2, 3)],
                Side.GENERATION: [instance(Side.GENERATION, 0, 0)],
            }
        )
    )

    def send(self, side: Side, message: ControlMessage, ranks: object = None) -> None:
        assert isinstance(ranks, tuple)
        self.asked.append((side, type(message).__name__, ranks))
        self.sent.append((side, message))
        for rank in ranks:
            if all((death.side, death.rank) != (side, rank) for death in self.dead):
                self._answers += self._answer(message, rank)

    def _answer(self, message: ControlMessage, rank: int) -> list[Report]:
        answers = []
        for answer in self.script(message):
            if answer.rank == 0:
                answers.append(replace(answer, rank=rank))
        return answers

    def driver(self) -> WorkloadDriver:
        ranks = {Side.CONTEXT: 4, Side.GENERATION: 1}
        return WorkloadDriver(self, ranks, lambda: self.dead, routes=self.routes, clock=lambda: self.now_s)


def instance(side: Side, number: int, *workers: int) -> RankGroup:
    names = frozenset((side, worker) for worker in workers)
    return RankGroup(instance=number, data_rank=0, workers=names, mates=names)


def run_jobs(workers: Workers, *jobs: Job, concurrency: int = 1) -> list[RequestRecord]:
    return workers.driver().run(jobs, concurrency=concurrency, timeout_s=5.0, on_finished=lambda _: None)


def asked_for(workers: Instances, kind: type[ControlMessage]) -> list[tuple[int, ...]]:
    return [ranks for _, name, ranks in workers.asked if name == kind.__name__]


def test_only_the_ranks_of_the_route_are_asked_and_waited_for() -> None:
    workers = Instances(obedient)
    records = run_jobs(workers, job(), job(), job())
    assert asked_for(workers, RunPrompt) == [(0, 1), (2, 3), (0, 1)]
    assert asked_for(workers, RunDecode) == [(0,)] * 3
    assert [sorted(record.prompts) for record in records] == [[0, 1], [2, 3], [0, 1]]
    assert [m.context_instance for _, m in workers.sent if isinstance(m, RunDecode)] == [0, 1, 0]
    assert all(record.verification()[0] for record in records)


def test_a_conversation_stays_where_its_prefix_is_and_the_caller_may_pick() -> None:
    workers = Instances(obedient)
    picked = workers.routes.pick(context=1, generation=0)
    run_jobs(workers, job(), replace(job(), after=0), job(), replace(job(), after=2), replace(job(), route=picked))
    assert asked_for(workers, RunPrompt) == [(0, 1), (0, 1), (2, 3), (2, 3), (2, 3)]


def test_the_others_go_on_without_a_dead_instance() -> None:
    def script(message: ControlMessage) -> list[Report]:
        match message:
            case GiveUp(request_id=number, reason=reason):
                return [prompt(number, 0, reason), decode(number, 0, reason)]
            case RunPrompt(request_id=3) | RunDecode(request_id=3):
                return []  # it is with the instance that dies; the next one, with the other, is not troubled
            case RunPrompt(request_id=4):
                workers.dead.append(KILLED)
        return obedient(message)

    workers = Instances(script)
    records = run_jobs(workers, *[job()] * 4, replace(job(), after=2), *[job()] * 3, concurrency=2)
    assert [record.reason for record in records] == ["", "", "context rank 1 died (signal SIGKILL)", *[""] * 5]
    assert [record.ranks(Side.CONTEXT) for record in records[3:]] == [(2, 3)] * 5, "the conversation moves, too"
    assert asked_for(workers, GiveUp) == [(0, 1), (0,)], "nobody else is troubled"


def test_a_request_without_context_goes_to_the_generation_side_alone() -> None:
    workers = Instances(obedient)
    [record] = run_jobs(workers, replace(job(), local=True))
    assert asked_for(workers, RunDecode) == [(0,)]
    assert asked_for(workers, RunPrompt) == [()]
    assert [m.context_instance for _, m in workers.sent if isinstance(m, RunDecode)] == [None]
    assert record.verification() == (True, 0, "")


# --- cancelling ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("after_s", [0.0, 1.0])
def test_a_request_is_cancelled_when_it_is_due(after_s: float) -> None:
    def script(message: ControlMessage) -> list[Report]:
        match message:
            case GiveUp(request_id=number, reason=reason):
                told_s.append(workers.now_s)
                return [
                    prompt(number, 0, reason),
                    prompt(number, 1, f"cancelled by x: {reason}"),
                    decode(number, 0, reason),
                ]
        return []

    told_s: list[float] = []
    workers = Workers(script)
    [record] = run_jobs(workers, replace(job(), cancel_after_s=after_s))
    assert told_s == pytest.approx([100.0 + after_s] * 2, abs=0.11)
    assert (record.cancelled, record.was_cancelled, record.reason) == (True, True, CANCELLED)
    assert record.verification()[0] is False


def test_what_was_over_before_is_not_cancelled_and_other_failures_are_no_cancels() -> None:
    [fine] = run_jobs(Workers(obedient), replace(job(), cancel_after_s=60.0))
    assert (fine.cancelled, fine.was_cancelled, fine.verification()[0]) == (False, False, True)
    late = record_of(prompt(1), prompt(1, 1), decode(1))
    late.cancelled = True  # it crossed the last report
    assert late.was_cancelled is False
    broken = record_of(prompt(1, 0, CANCELLED), decode(1, 0, "copy failed"))
    broken.cancelled = True
    assert broken.was_cancelled is False


# --- records ---------------------------------------------------------------------------------------------------------


def record_of(*reports: Report) -> RequestRecord:
    record = RequestRecord(RequestId(1), job(), submitted_s=10.0)
    for report in reports:
        record.add(report)
    return record


def test_the_first_reason_that_tells_something_counts() -> None:
    cancelled = "cancelled by generation rank 0: context rank 1: copy failed"
    record = record_of(
        prompt(1, 0, cancelled), decode(1, 0, "context rank 1: copy failed"), decode(1, 1, "something else")
    )
    assert record.reason == "context rank 1: copy failed"
    assert record_of(prompt(1, 0, cancelled)).reason == cancelled
    assert record_of(prompt(1, 0), decode(1)).reason == ""


def test_the_first_word_of_a_rank_counts() -> None:
    record = record_of(decode(1), decode(1, reason="changed my mind"))
    assert (record.reason, record.tokens) == ("", (7,))


def leg(peer: int, queue_s: float, plan_s: float, move_s: float, size: int = 1000) -> LegRecord:
    times = StageTimes(queue_s=queue_s, plan_s=plan_s, move_s=move_s)
    return LegRecord(peer=peer, path="direct", bytes=size, draft_bytes=size // 10, times=times)


def test_stages_are_those_of_the_slowest_rank_and_bytes_add_up() -> None:
    record = record_of(
        prompt(1, 0, prefill_s=0.5),
        prompt(1, 1, prefill_s=0.75),
        decode(1, 0, legs=(leg(0, 0.1, 0.01, 1.0), leg(1, 0.3, 0.02, 4.0)), settle_s=0.25),
        decode(1, 1, legs=(leg(0, 0.2, 0.05, 2.5), replace(leg(1, 9, 9, 9), times=None)), settle_s=0.125),
    )
    # Context rank 0 moves for both generation ranks: 1.0 + 2.5 seconds; rank 1 for one of them: 4.0.
    assert record.stages() == {"queue_s": 0.3, "plan_s": 0.05, "move_s": 4.0, "settle_s": 0.25}
    assert (record.bytes, record.draft_bytes, record.prefill_s) == (4000, 400, 0.75)
    assert record_of().stages() == {"queue_s": 0.0, "plan_s": 0.0, "move_s": 0.0, "settle_s": 0.0}


def test_time_to_first_token_is_that_of_the_ranks_that_have_one() -> None:
    fine = record_of(prompt(1), decode(1, 0, usable_s=12.5), decode(1, 1, usable_s=99.0, tokens=()))
    assert fine.ttft_s() == 2.5
    assert fine.tokens == (7,)
    assert record_of(decode(1, reason="failed")).ttft_s() is None
    assert record_of(decode(1, 0, usable_s=12.5), decode(1, 1, "failed")).ttft_s() is None


# --- verification ----------------------------------------------------------------------------------------------------


def digest(head: int, value: bytes, size: int = 32) -> DigestReport:
    return DigestReport(layer=0, role="key", head=head, units=(4,), sizes_bytes=(size,), digests=value)


def evidence(*digests: DigestReport, wrong: int = 0, place: str = "") -> EvidenceReport:
    checked = sum(sum(row.sizes_bytes) for row in digests) or 64
    return EvidenceReport(checked_bytes=checked, mismatched_bytes=wrong, first_mismatch=place, digests=digests)


A, B = b"aaaaaaaa", b"bbbbbbbb"


def test_digests_are_proven_by_any_context_rank() -> None:
    contexts = (prompt(1, 0, evidence=evidence(digest(0, A))), prompt(1, 1, evidence=evidence(digest(1, B))))
    good = record_of(*contexts, decode(1, evidence=evidence(digest(0, A), digest(1, B))))
    assert good.verification() == (True, 0, "")
    bad = record_of(*contexts, decode(1, evidence=evidence(digest(0, A), digest(1, A))))
    place = "generation rank 0: layer 0 key head 1 unit 4 differs from the context side"
    assert bad.verification() == (False, 32, place)


def test_without_the_context_sides_digests_nothing_is_proven() -> None:
    record = record_of(prompt(1, evidence=None), decode(1, evidence=evidence(digest(0, A))))
    place = "generation rank 0: layer 0 key head 0 unit 4 is not known to the context side"
    assert record.verification() == (False, 32, place)


def test_what_ranks_found_wrong_themselves_counts_on_both_sides() -> None:
    record = record_of(
        prompt(1, 1, evidence=evidence(wrong=5, place="layer 3 holds zeros")),
        decode(1, 0, evidence=evidence(wrong=2, place="layer 1 holds poison")),
        decode(1, 1, evidence=GOOD),
    )
    assert record.verification() == (False, 7, "context rank 1: layer 3 holds zeros")


@pytest.mark.parametrize(
    "reports",
    [
        (),
        (prompt(1),),
        (prompt(1), decode(1, evidence=None)),
        (prompt(1), decode(1, evidence=replace(GOOD, checked_bytes=0))),
        (prompt(1), decode(1), decode(1, rank=1, reason="failed")),
        (prompt(1, 0, "failed"), decode(1)),
    ],
)
def test_a_request_with_a_gap_is_not_verified(reports: tuple[Report, ...]) -> None:
    assert record_of(*reports).verification()[0] is False


def test_a_request_nobody_waits_for_is_not_verified() -> None:
    record = record_of(prompt(1), decode(1))
    assert record.verification()[0] is True
    record.abandoned = "no worker reported anything for 2 s"
    assert record.verification()[0] is False


# --- percentiles -----------------------------------------------------------------------------------------------------


@given(st.lists(st.floats(0, 1e6), max_size=50), st.sampled_from([0.0, 0.01, 0.5, 0.9, 0.99, 1.0]))
def test_a_percentile_is_the_smallest_value_that_enough_values_do_not_exceed(values: list[float], share: float) -> None:
    ordered = sorted(values)
    found = percentile(ordered, share)
    if not ordered:
        assert found == 0.0
        return
    needed = max(1, math.ceil(share * len(ordered) - 1e-9))
    assert found == ordered[needed - 1]


def test_a_held_request_proceeds_once_the_whole_context_side_is_through() -> None:
    order: list[str] = []

    def script(message: ControlMessage) -> list[Report]:
        order.append(type(message).__name__)
        if isinstance(message, RunDecode):
            assert message.hold
        if isinstance(message, RunPrompt):
            return [prompt(message.request_id, 0), prompt(message.request_id, 1)]
        return [decode(message.request_id)] if isinstance(message, Proceed) else []

    workers = Workers(script)
    held = replace(job(), hold=True)
    (record,) = workers.driver().run([held], concurrency=1, timeout_s=5.0, on_finished=lambda _: None)
    assert record.reason == "" and record.tokens == (7,)
    assert order == ["RunDecode", "RunPrompt", "Proceed"]
