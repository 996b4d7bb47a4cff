"""Workers of both sides in one process, turned by hand: what they do with work, with callers, and at the end."""

from __future__ import annotations

import logging
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

import pytest

from transfer.hello import Side
from transfer.link_zmq import ZmqLink
from transfer.messages import AuxData
from unikv.errors import ConfigError
from unikv.ids import RequestId
from workers import worker_loop
from workers.client import FleetClient
from workers.config import PairConfig
from workers.context import ContextWorker
from workers.control import (
    CODEC,
    ControlMessage,
    DecodeReport,
    DigestReport,
    EvidenceReport,
    GiveUp,
    PromptReport,
    Ready,
    RunDecode,
    RunPrompt,
    Stop,
)
from workers.evidence import compare
from workers.evidence_report import read_evidence
from workers.generation import GenerationWorker
from workers.rank_runtime import RankRuntime
from workers.rendezvous import Rendezvous
from workers.runner import Decoded, Evidence
from workers.runner_pattern import PatternRunner
from workers.worker_main import run_worker

pytestmark = pytest.mark.usefixtures("store_library")

TURNS = 2000


class Moody(PatternRunner):
    """A pattern runner that can be told to fail."""

    fails_at = ""

    def prefill(
        self, request: Any, prompt: tuple[int, ...], prompt_tokens: int, publish_at: Any = None, on_layer: Any = None
    ) -> AuxData:
        if self.fails_at == "prefill":
            raise ZeroDivisionError("the model is broken")
        return super().prefill(request, prompt, prompt_tokens, publish_at, on_layer)

    def examine(self, pages: Any, *, with_draft: bool) -> Evidence:
        if self.fails_at == "examine":
            raise IndexError("no such row")
        return super().examine(pages, with_draft=with_draft)

    def decode(self, *arguments: Any) -> Decoded:
        if self.fails_at == "decode":
            raise MemoryError
        request, prompt_tokens, max_new = arguments[0], arguments[0].history_tokens, arguments[4]
        for number in range(1, max_new):  # as a decoder whose drafts are all refused
            request.grow(3)
            request.rewind(0, prompt_tokens + number)
        return super().decode(*arguments)


class Scene:
    """One worker of each side and a caller, all turned by the test's thread."""

    def __init__(self, pair: PairConfig, stack: ExitStack, *, owner: bool = False) -> None:
        self.pair, self.stack = pair, stack
        self.rendezvous = stack.enter_context(Rendezvous.serve())
        self.runners = {side: Moody() for side in Side}
        self.workers: dict[Side, Any] = {}
        for side, build in ((Side.CONTEXT, ContextWorker), (Side.GENERATION, GenerationWorker)):
            runtime = stack.enter_context(RankRuntime(pair, side, 0, instance=f"{side}-0"))
            # Log records keep errors, errors keep frames, frames keep workers: let at least the memory go.
            stack.callback(vars(self.runners[side]).clear)
            runtime.bind(self.runners[side])
            worker = self.workers[side] = build(runtime, self.runners[side], self.rendezvous)
            stack.callback(_take_down, worker)
            self.rendezvous.announce("control", side, 0, runtime.control.address)
        self.workers[Side.GENERATION].connect()
        self.reports: list[PromptReport | DecodeReport] = []
        self.client = self.attach(owner=owner)

    def attach(self, *, owner: bool = False) -> FleetClient:
        client = self.stack.enter_context(FleetClient(owner=owner))
        client.attach(self.rendezvous, dict.fromkeys(Side, 1), timeout_s=10.0, alive=self.turn)
        return client

    def turn(self) -> None:
        for worker in self.workers.values():
            worker._turn(0.0)

    def send(self, message: ControlMessage, *sides: Side) -> None:
        for side in sides or Side:
            self.client.send(side, message)

    def ask(self, number: int, prompt_tokens: int = 50, *sides: Side, max_new_tokens: int = 1) -> None:
        common = {"request_id": RequestId(number), "prompt": (), "prompt_tokens": prompt_tokens, "verify": True}
        if not sides or Side.GENERATION in sides:
            self.send(RunDecode(max_new_tokens=max_new_tokens, **common), Side.GENERATION)
        if not sides or Side.CONTEXT in sides:
            self.send(RunPrompt(**common), Side.CONTEXT)

    def until(self, condition: Callable[[], bool]) -> None:
        for _ in range(TURNS):
            self.turn()
            self.reports += self.client.poll(0.001)
            if condition():
                return
        pytest.fail(f"not within {TURNS} turns; reports so far: {self.reports}")

    def report(self, side: Side, number: int) -> Any:
        """The report of one side on a request, waited for; each comes once."""
        kind = PromptReport if side is Side.CONTEXT else DecodeReport

        def found() -> list[Any]:
            return [r for r in self.reports if isinstance(r, kind) and r.request_id == number]

        self.until(lambda: bool(found()))
        assert len(found()) == 1
        return found()[0]

    def reasons(self, number: int) -> tuple[str, str]:
        return self.report(Side.CONTEXT, number).reason, self.report(Side.GENERATION, number).reason

    def free_pages(self) -> list[int]:
        managers = [worker.runtime.manager for worker in self.workers.values()]
        return [manager.num_free_pages(group.group_id) for manager in managers for group in manager.layout.groups]


def _take_down(worker: Any) -> None:
    worker.close()
    worker._endpoint = worker._published = worker._receiving = None


@pytest.fixture
def play() -> Iterator[Callable[..., Scene]]:
    with ExitStack() as stack:
        yield lambda pair, **options: Scene(pair, stack, **options)


@pytest.fixture
def scene(play: Callable[..., Scene], tiny_pair: Callable[..., PairConfig]) -> Iterator[Scene]:
    found = play(tiny_pair())
    yield found
    found.stack.close()
    vars(found).clear()  # pytest keeps the object; the memory goes back


# --- work ------------------------------------------------------------------------------------------------------------


def test_a_request_goes_from_pages_to_pages(scene: Scene) -> None:
    before = scene.free_pages()
    scene.ask(1, 50)
    prompt, decode = scene.report(Side.CONTEXT, 1), scene.report(Side.GENERATION, 1)
    assert (prompt.reason, decode.reason, decode.tokens) == ("", "", (50,))
    assert prompt.evidence.checked_bytes == decode.evidence.checked_bytes > 0
    assert prompt.evidence.mismatched_bytes == decode.evidence.mismatched_bytes == 0
    assert [(leg.peer, leg.path) for leg in decode.legs] == [(0, "direct")]
    assert decode.usable_s > 0
    scene.until(lambda: scene.free_pages() == before)


def test_ready_says_what_was_agreed(scene: Scene) -> None:
    assert scene.client.ready[Side.CONTEXT, 0] == Ready(side=Side.CONTEXT, rank=0, device="cpu")
    ready = scene.client.ready[Side.GENERATION, 0]
    assert ready.draft_kv == "shared"
    assert [(path.context_rank, path.generation_rank, path.path) for path in ready.paths] == [(0, 0, "direct")]


@pytest.mark.parametrize("crowded", list(Side))
def test_requests_wait_for_pages_and_all_come_through(
    play: Callable[..., Scene], tiny_pair: Callable[..., PairConfig], crowded: Side
) -> None:
    scene = play(tiny_pair(**{f"{crowded}__pool": {"pages": 7}}))  # one request of 5 blocks at a time
    for number in range(1, 7):
        scene.ask(number, 60)
    assert [scene.reasons(number) for number in range(1, 7)] == [("", "")] * 6


def test_no_output_runs_out_of_pages_that_others_wait_with(
    play: Callable[..., Scene], tiny_pair: Callable[..., PairConfig]
) -> None:
    scene = play(tiny_pair(generation__pool={"pages": 9}))  # two prompts fit, and one with its output
    for number in range(1, 5):
        scene.ask(number, 50, Side.GENERATION, max_new_tokens=60)
    scene.until(lambda: scene.workers[Side.GENERATION].in_use() == (1,))
    for number in range(1, 5):
        scene.ask(number, 50, Side.CONTEXT)
    assert [scene.reasons(number) for number in range(1, 5)] == [("", "")] * 4
    scene.ask(5, 100, max_new_tokens=60)
    assert "can never fit" in scene.report(Side.GENERATION, 5).reason
    scene.ask(6, 100, max_new_tokens=20)
    assert scene.reasons(6) == ("", "")


@pytest.mark.parametrize(("crowded", "needed"), [(Side.CONTEXT, 13), (Side.GENERATION, 13)])
def test_a_request_that_can_never_fit_fails_before_its_turn(
    play: Callable[..., Scene], tiny_pair: Callable[..., PairConfig], crowded: Side, needed: int
) -> None:
    scene = play(tiny_pair(**{f"{crowded}__pool": {"pages": 8}}))
    scene.ask(1, 80, crowded)  # holds its pages: the other side has not heard of it
    scene.until(lambda: scene.workers[crowded].in_use() == (1,))
    scene.ask(2, 80, crowded)  # waits for them
    scene.ask(3, 200)
    reason = scene.report(crowded, 3).reason
    assert f"needs {needed} of 7 pages" in reason and "can never fit" in reason
    assert scene.workers[crowded].in_use() == (1,)
    other = Side.CONTEXT if crowded is Side.GENERATION else Side.GENERATION
    scene.send(GiveUp(request_id=RequestId(3), reason=reason))
    assert reason in scene.report(other, 3).reason
    for number in (1, 2):
        scene.ask(number, 80, other)
        assert scene.reasons(number) == ("", "")


def test_a_prompt_longer_than_any_sequence_is_refused(scene: Scene) -> None:
    scene.ask(1, 257)
    want = "request 1: prompt_tokens is 257, expected in [1, 256]; shorten it, or raise max_seq_len"
    assert scene.reasons(1) == (want, want)
    scene.ask(3, 256)
    assert scene.reasons(3) == ("", "")
    scene.ask(2, 50)
    assert scene.reasons(2) == ("", "")


def test_waiting_for_pages_has_an_end(
    play: Callable[..., Scene], tiny_pair: Callable[..., PairConfig], monkeypatch: pytest.MonkeyPatch
) -> None:
    scene = play(tiny_pair(generation__pool={"pages": 7}))
    scene.ask(1, 60, Side.GENERATION)
    scene.ask(2, 60, Side.GENERATION)
    generation = scene.workers[Side.GENERATION]
    scene.until(lambda: generation.in_use() == (1,) and bool(generation._waiting))
    later_s = worker_loop.now_s() + 20.1
    monkeypatch.setattr(worker_loop, "now_s", lambda: later_s)
    reason = scene.report(Side.GENERATION, 2).reason
    assert reason == "generation rank 0: no pages within 20 s; enlarge the pool or send less at once"
    monkeypatch.undo()
    scene.ask(1, 60, Side.CONTEXT)
    assert scene.reasons(1) == ("", "")


def test_an_id_that_is_open_is_not_taken_again(scene: Scene, caplog: pytest.LogCaptureFixture) -> None:
    scene.ask(1, 50, Side.CONTEXT)
    scene.ask(1, 50, Side.CONTEXT)
    scene.until(lambda: "request 1 is open" in caplog.text)
    scene.ask(1, 50, Side.GENERATION)
    assert scene.reasons(1) == ("", "")


def test_work_of_the_other_side_is_dropped(scene: Scene, caplog: pytest.LogCaptureFixture) -> None:
    scene.client.send(
        Side.CONTEXT,
        RunDecode(request_id=RequestId(1), prompt=(), prompt_tokens=5, max_new_tokens=1, verify=True),
    )
    scene.until(lambda: "dropped a RunDecode" in caplog.text)
    scene.ask(1)
    assert scene.reasons(1) == ("", "")


# --- failures --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("side", "fails_at", "reason"),
    [
        (Side.CONTEXT, "prefill", "prompt on context rank 0: ZeroDivisionError: the model is broken"),
        (Side.CONTEXT, "examine", "verification on context rank 0: IndexError: no such row"),
        (Side.GENERATION, "examine", "decoding on generation rank 0: IndexError: no such row"),
        (Side.GENERATION, "decode", "decoding on generation rank 0: MemoryError: "),
    ],
)
def test_what_a_model_raises_fails_that_request_alone(
    scene: Scene, caplog: pytest.LogCaptureFixture, side: Side, fails_at: str, reason: str
) -> None:
    before = scene.free_pages()
    scene.runners[side].fails_at = fails_at
    scene.ask(1)
    assert scene.report(side, 1).reason == reason
    other = scene.reasons(1)[0 if side is Side.GENERATION else 1]
    assert other.endswith(reason) if fails_at == "prefill" else other == ""
    assert "Traceback" in caplog.text
    scene.runners[side].fails_at = ""
    scene.ask(2)
    assert scene.reasons(2) == ("", "")
    scene.until(lambda: scene.free_pages() == before)


@pytest.mark.parametrize("aux", [None, AuxData(prompt_tokens=50)])
def test_a_prompt_without_its_first_token_fails_alone(scene: Scene, aux: AuxData | None) -> None:
    sent = scene.runners[Side.CONTEXT].prefill
    scene.runners[Side.CONTEXT].prefill = lambda *words: (sent(*words), aux)[1]  # type: ignore[method-assign]
    scene.ask(1)
    context, generation = scene.reasons(1)
    assert context == "" and "request 1: first_tokens is 'empty', expected at least one token" in generation
    scene.runners[Side.CONTEXT].prefill = sent  # type: ignore[method-assign]
    scene.ask(2)
    assert scene.reasons(2) == ("", "")


@pytest.mark.parametrize("path", ["direct", "zmq"])
def test_prompts_may_leave_while_they_are_computed(
    play: Callable[..., Scene], tiny_pair: Callable[..., PairConfig], path: str
) -> None:
    scene = play(tiny_pair(transfer__layer_bands=2, transfer__path=path))
    before = scene.free_pages()
    for number, tokens in enumerate((1, 16, 100), start=1):
        scene.ask(number, tokens)
        assert scene.reasons(number) == ("", "")
        context, generation = (scene.report(side, number).evidence for side in Side)
        seen = read_evidence(generation)
        assert compare(read_evidence(context).digests, seen) == (0, "") and seen.checked_bytes > 0
    scene.until(lambda: scene.free_pages() == before)
    scene.runners[Side.CONTEXT].fails_at = "prefill"
    scene.ask(4)
    assert [("the model is broken" in reason) for reason in scene.reasons(4)] == [True, True]
    scene.runners[Side.CONTEXT].fails_at = ""
    scene.ask(5)
    assert scene.reasons(5) == ("", "")
    scene.until(lambda: scene.free_pages() == before)


@pytest.mark.parametrize("asked", [(Side.CONTEXT,), (Side.GENERATION,)])
def test_giving_up_ends_what_only_one_side_has_begun(scene: Scene, asked: tuple[Side, ...]) -> None:
    before = scene.free_pages()
    scene.ask(1, 50, *asked)
    scene.until(lambda: scene.workers[asked[0]].in_use() == (1,))
    scene.send(GiveUp(request_id=RequestId(1), reason="nobody wants it"))
    assert scene.report(asked[0], 1).reason == "nobody wants it"
    scene.until(lambda: scene.free_pages() == before)


def test_giving_up_what_is_over_or_unknown_does_nothing(scene: Scene) -> None:
    scene.ask(1)
    assert scene.reasons(1) == ("", "")
    for number in (1, 99):
        scene.send(GiveUp(request_id=RequestId(number), reason="too late"))
    scene.ask(2)
    assert scene.reasons(2) == ("", "")


def test_evidence_that_cannot_travel_makes_a_reason(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    row = DigestReport(layer=0, role="key", head=0, units=(), sizes_bytes=(), digests=bytes(100_000))
    huge = EvidenceReport(checked_bytes=1, mismatched_bytes=0, first_mismatch="", digests=(row,))
    monkeypatch.setattr("workers.generation.evidence_report", lambda _: huge)
    scene.ask(1)
    report = scene.report(Side.GENERATION, 1)
    assert "digests" in report.reason and report.evidence is None


def test_control_messages_nobody_can_read_are_dropped(scene: Scene, caplog: pytest.LogCaptureFixture) -> None:
    link = ZmqLink()
    scene.stack.callback(link.close)
    address = scene.workers[Side.CONTEXT].runtime.control.address
    link.connect(address)
    link.send(address, [b"\x80\x04 not a message"])
    link.send(address, CODEC.encode(Ready(side=Side.CONTEXT, rank=0, device="cpu"), incarnation="x", rank=0))
    link.poll(0.1)
    scene.until(lambda: caplog.text.count("dropped a control message") == 2)
    scene.ask(1)
    assert scene.reasons(1) == ("", "")


# --- callers ---------------------------------------------------------------------------------------------------------


def test_a_worker_of_its_own_outlives_its_caller_and_serves_the_next(scene: Scene) -> None:
    before = scene.free_pages()
    scene.ask(1, 50, Side.GENERATION)  # will never be computed
    scene.until(lambda: scene.workers[Side.GENERATION].in_use() == (1,))
    scene.client.close()
    scene.client = FleetClient()  # for `until` to poll
    scene.stack.callback(scene.client.close)
    scene.until(lambda: scene.free_pages() == before and not any(w._caller for w in scene.workers.values()))
    assert not any(worker._over() for worker in scene.workers.values())
    scene.client = scene.attach()
    scene.ask(2)
    assert scene.reasons(2) == ("", "")


def test_an_owned_worker_ends_with_its_caller(play: Callable[..., Scene], tiny_pair: Callable[..., PairConfig]) -> None:
    scene = play(tiny_pair(), owner=True)
    scene.ask(1, 50, Side.GENERATION)
    scene.until(lambda: scene.workers[Side.GENERATION].in_use() == (1,))
    scene.client.close()
    scene.client = FleetClient()
    scene.stack.callback(scene.client.close)
    scene.until(lambda: all(worker._over() for worker in scene.workers.values()))
    assert "the caller is gone" in scene.workers[Side.CONTEXT]._stopping


def test_a_second_caller_waits_while_the_first_is_there(scene: Scene, caplog: pytest.LogCaptureFixture) -> None:
    second = scene.stack.enter_context(FleetClient())
    with pytest.raises(Exception, match=r"workers: not ready is 'context 0, generation 0', expected all within 0\.2 s"):
        second.attach(scene.rendezvous, dict.fromkeys(Side, 1), timeout_s=0.2, alive=scene.turn)
    assert "still there" in caplog.text
    scene.ask(1)
    assert scene.reasons(1) == ("", "")
    scene.client.close()
    scene.client = second  # its attach was remembered: we hear of the first one's end after it went
    scene.until(lambda: len(second.ready) == 2)
    scene.ask(2)
    assert scene.reasons(2) == ("", "")


# --- the end ---------------------------------------------------------------------------------------------------------


def test_a_worker_that_ends_takes_nothing_new_and_finishes_what_moves(
    play: Callable[..., Scene], tiny_pair: Callable[..., PairConfig]
) -> None:
    scene = play(tiny_pair(generation__pool={"pages": 7}))
    generation = scene.workers[Side.GENERATION]
    scene.ask(1, 60, Side.GENERATION)
    scene.ask(2, 60, Side.GENERATION)
    scene.until(lambda: generation.in_use() == (1,) and bool(generation._waiting))
    scene.send(Stop(reason="enough"), Side.GENERATION)
    scene.until(lambda: bool(generation._stopping))
    assert not generation._over()
    assert scene.report(Side.GENERATION, 2).reason == "generation rank 0 is ending: enough"
    scene.ask(3, 60, Side.GENERATION)
    assert scene.report(Side.GENERATION, 3).reason == "generation rank 0 is ending: enough"
    scene.ask(1, 60, Side.CONTEXT)
    assert scene.reasons(1) == ("", "")
    scene.until(generation._over)


def test_what_does_not_end_in_time_fails(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    generation = scene.workers[Side.GENERATION]
    scene.ask(1, 60, Side.GENERATION)
    scene.until(lambda: generation.in_use() == (1,))
    scene.send(Stop(reason="enough"), Side.GENERATION)
    scene.until(lambda: bool(generation._stopping) and not generation._over())
    later_s = worker_loop.now_s() + worker_loop.DRAIN_S + 0.1
    monkeypatch.setattr(worker_loop, "now_s", lambda: later_s)
    scene.until(generation._over)
    assert scene.report(Side.GENERATION, 1).reason == "generation rank 0 is ending: enough"


def test_pages_that_never_get_quiet_do_not_keep_the_worker(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    generation = scene.workers[Side.GENERATION]
    monkeypatch.setattr(generation, "stop_transfer", lambda *_: None)
    scene.ask(1, 60, Side.GENERATION)
    scene.until(lambda: generation.in_use() == (1,))
    scene.send(Stop(reason="enough"), Side.GENERATION)
    scene.until(lambda: bool(generation._stopping) and not generation._over())
    later_s = worker_loop.now_s() + worker_loop.DRAIN_S + worker_loop.QUIET_S + 0.1
    monkeypatch.setattr(worker_loop, "now_s", lambda: later_s)
    assert generation._over()
    assert generation.in_use() == (1,)


def test_a_signal_stops_and_wakes_and_the_second_one_kills(scene: Scene) -> None:
    context = scene.workers[Side.CONTEXT]
    previous = signal.signal(signal.SIGUSR1, context._on_signal)
    try:
        context.runtime.control.poll(0.0)
        with context.runtime.control._wake_lock:  # as if the signal came in the middle of a wake
            signal.raise_signal(signal.SIGUSR1)
        assert context._stopping == "signal SIGUSR1"
        assert signal.getsignal(signal.SIGUSR1) == signal.SIG_DFL
        assert context._over()
    finally:
        signal.signal(signal.SIGUSR1, previous)


# --- start -----------------------------------------------------------------------------------------------------------


@pytest.fixture
def run() -> Iterator[Callable[..., int]]:
    """`run_worker`, without what it changes for the whole process."""
    interval_s, level = sys.getswitchinterval(), logging.getLogger().level
    yield run_worker
    sys.setswitchinterval(interval_s)
    logging.getLogger().setLevel(level)


def test_a_rank_that_does_not_exist_is_refused(run: Callable[..., int], tiny_pair: Callable[..., PairConfig]) -> None:
    with (
        Rendezvous.serve() as host,
        pytest.raises(ConfigError, match=r"worker: rank is 7, expected in \[0, 2\); match instances and parallel"),
    ):
        run(tiny_pair(context__parallel={"tp": 2}), Side.CONTEXT, 7, host.url, serve=False)


def test_a_taken_port_is_refused(run: Callable[..., int], tiny_pair: Callable[..., PairConfig]) -> None:
    with Rendezvous.serve() as host, pytest.raises(ConfigError, match="expected a free address of this host"):
        run(tiny_pair(), Side.CONTEXT, 0, host.url, serve=True)
