"""The driver: calls from any thread, errors that travel, an engine that fails, a shutdown that drains."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from transfer import driver as driver_module
from transfer.driver import TransferDriver
from transfer.link import Link
from transfer.link_memory import MemoryNetwork
from transfer.outcome import Outcome, TransferHandle
from unikv.errors import InternalError, LinkClosedError, LocalProtocolError
from unikv.ids import RequestId


class ScriptedEngine:
    """An engine that does what a test says, and notes what the driver did with it."""

    def __init__(self) -> None:
        self.link: Link = MemoryNetwork().link()
        self.on_turn: Callable[[], None] = lambda: None
        self.turns, self.told = 0, []
        self.is_drained = True
        self.is_expecting = True
        self.handles = [TransferHandle(RequestId(number)) for number in range(3)]
        self.threads: set[int] = set()

    def turn(self, timeout_s: float) -> bool:
        self.turns += 1
        self.threads.add(threading.get_ident())
        self.link.poll(timeout_s)
        self.on_turn()
        return False

    def copying(self) -> bool:
        return False

    def expecting(self) -> bool:
        return self.is_expecting

    def shut_down(self, reason: str) -> None:
        self.told.append(f"shut down: {reason}")

    def drained(self) -> bool:
        return self.is_drained

    def abandon(self, reason: str) -> None:
        self.told.append("abandon")
        for handle in self.handles:
            handle.decide(Outcome(request_id=handle.request_id, reason=reason))

    def close(self) -> None:
        self.told.append("close")


@pytest.fixture
def engine() -> ScriptedEngine:
    return ScriptedEngine()


@pytest.fixture
def driver(engine: ScriptedEngine) -> Iterator[TransferDriver]:
    made = TransferDriver(engine, name="test-driver")
    yield made
    made.close("the test is over")


def test_calls_of_many_threads_run_in_the_engines_thread_and_all_are_answered(
    engine: ScriptedEngine, driver: TransferDriver
) -> None:
    count, seen = [0], set()

    def add() -> int:
        seen.add(threading.get_ident())
        count[0] += 1  # no lock: only the engine's thread does this
        return count[0]

    with ThreadPoolExecutor(8) as pool:
        answers = list(pool.map(lambda _: driver.call(add), range(800)))
    assert sorted(answers) == list(range(1, 801))
    assert seen == engine.threads and len(seen) == 1


def test_a_call_wakes_an_idle_engine(engine: ScriptedEngine, driver: TransferDriver) -> None:
    started_s = time.monotonic()
    for _ in range(50):
        driver.call(lambda: None)
    assert time.monotonic() - started_s < 50 * 0.05  # waiting out the idle poll each time would take this long


def test_what_a_call_raises_travels_to_its_caller_and_the_engine_goes_on(driver: TransferDriver) -> None:
    def wrong() -> None:
        raise LocalProtocolError("request 7: not like this")

    with pytest.raises(LocalProtocolError, match="request 7: not like this"):
        driver.call(wrong)
    with pytest.raises(KeyError):
        driver.call(lambda: {}["no such key"])
    assert driver.call(lambda: 5) == 5


def test_a_call_that_gave_up_never_runs(engine: ScriptedEngine, driver: TransferDriver) -> None:
    reached, go, ran = threading.Event(), threading.Event(), []

    def block() -> None:
        reached.set()
        go.wait(10)

    with ThreadPoolExecutor(1) as pool:
        blocking = pool.submit(driver.call, block)
        assert reached.wait(10)
        with pytest.raises(LocalProtocolError, match=r"no answer.*within 0.01 s.*copy that blocks"):
            driver.call(lambda: ran.append("too late"), timeout_s=0.01)
        go.set()
        blocking.result(10)
    assert driver.call(lambda: list(ran)) == []


def test_a_call_that_runs_when_its_time_is_up_is_not_waited_for(driver: TransferDriver) -> None:
    reached, go, ran = threading.Event(), threading.Event(), []

    def slow() -> None:
        reached.set()
        go.wait(10)
        ran.append("ended unheard")

    with ThreadPoolExecutor(1) as pool:
        calling = pool.submit(driver.call, slow, timeout_s=0.05)
        assert reached.wait(10)
        with pytest.raises(LocalProtocolError, match="no answer"):
            calling.result(10)
    go.set()
    assert driver.call(lambda: list(ran)) == ["ended unheard"]


def test_an_engine_that_fails_decides_everything_and_refuses_later_calls(
    engine: ScriptedEngine, driver: TransferDriver
) -> None:
    def fail() -> None:
        raise OSError("the device fell off the bus")

    engine.on_turn = fail
    engine.link.wake()
    for handle in engine.handles:
        outcome = handle.wait(10)
        assert outcome is not None and "the device fell off the bus" in outcome.reason
        assert not handle.quiet  # nobody knows
    with pytest.raises(InternalError, match="the device fell off the bus") as refused:
        driver.call(lambda: None)
    assert isinstance(refused.value.__cause__, OSError)
    assert driver.close("over") is False
    assert engine.told == ["abandon", "close"]


def test_calls_that_wait_when_the_engine_fails_hear_of_it_at_once(
    engine: ScriptedEngine, driver: TransferDriver
) -> None:
    reached, go = threading.Event(), threading.Event()

    def block_then_fail() -> None:
        reached.set()
        go.wait(10)
        raise OSError("the device fell off the bus")

    engine.on_turn = block_then_fail
    engine.link.wake()
    assert reached.wait(10)
    with ThreadPoolExecutor(4) as pool:
        waiting = [pool.submit(driver.call, lambda: None) for _ in range(4)]
        while len(driver._calls) < 4:
            threading.Event().wait(0.001)
        started_s = time.monotonic()
        go.set()
        for call in waiting:
            with pytest.raises(InternalError, match="the device fell off the bus"):
                call.result(10)
    assert time.monotonic() - started_s < 5  # not the 30 s a call waits


def test_close_shuts_down_drains_and_closes_once(engine: ScriptedEngine) -> None:
    driver = TransferDriver(engine, name="test-driver")
    engine.is_drained = False
    looks = [0]

    def drained() -> bool:
        looks[0] += 1
        return looks[0] > 2

    engine.drained = drained  # type: ignore[method-assign]
    assert driver.close("the worker is closing")
    assert engine.told == ["shut down: the worker is closing", "close"] and looks[0] >= 3
    assert driver.close("again") and engine.told.count("close") == 1
    with pytest.raises(LinkClosedError, match="make a new endpoint"):
        driver.call(lambda: None)


def test_close_from_many_threads_is_one_close(engine: ScriptedEngine) -> None:
    driver = TransferDriver(engine, name="test-driver")
    with ThreadPoolExecutor(4) as pool:
        assert list(pool.map(lambda _: driver.close("over"), range(4))) == [True] * 4
    assert engine.told == ["shut down: over", "close"]


def test_close_says_so_when_something_did_not_drain_in_time(engine: ScriptedEngine) -> None:
    driver = TransferDriver(engine, name="test-driver")
    engine.is_drained = False
    assert driver.close("over", drain_s=0.05) is False
    assert engine.told == ["shut down: over", "close"]


def test_a_callback_cannot_wait_for_its_own_thread(driver: TransferDriver) -> None:
    for what in (lambda: driver.call(lambda: None), lambda: driver.close("from a callback")):
        with pytest.raises(LocalProtocolError, match="from your own threads, not from a callback"):
            driver.call(what)
    assert driver.call(lambda: 1) == 1


def test_a_callback_that_fails_harms_nobody() -> None:
    def fail() -> None:
        raise ValueError("a bug of the caller")

    handle = TransferHandle(RequestId(1), fail)
    handle.decide(Outcome(request_id=RequestId(1), reason="why not"))
    handle.settle_quiet()
    assert handle.outcome is not None and not handle.outcome.ok and handle.quiet


@pytest.mark.parametrize("expecting", [True, False])
def test_an_engine_that_had_something_to_do_is_watched_for_a_while_where_that_is_asked_for(
    engine: ScriptedEngine, expecting: bool
) -> None:
    waits: list[float] = []
    enough = threading.Event()
    poll = engine.link.poll

    def noting(timeout_s: float) -> bool:
        waits.append(timeout_s)
        if len(waits) >= 3:
            enough.set()
        poll(min(timeout_s, 0.001))
        return False

    def start() -> None:
        waits.clear()
        enough.clear()

    engine.turn = noting  # type: ignore[method-assign]
    engine.is_expecting = expecting
    driver = TransferDriver(engine, name="test-driver", watch_s=60.0)
    try:
        driver.call(start)
        assert enough.wait(10.0)
        assert (max(waits[1:3]) == 0.0) is expecting
    finally:
        driver.close("the test is over")


def test_a_thread_that_does_not_end_in_time_is_not_called_over(
    engine: ScriptedEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(driver_module, "END_S", 0.05)
    began, go_on = threading.Event(), threading.Event()

    def block() -> None:
        began.set()
        go_on.wait(10)

    engine.on_turn = block
    driver = TransferDriver(engine, name="test-driver")
    assert began.wait(10)
    assert driver.close("over", drain_s=0.01) is False and not driver.ended
    assert "close" not in engine.told
    go_on.set()
    assert driver.close("over", drain_s=5.0) is True and driver.ended
