"""Whole pairs of real processes: every byte arrives, and whatever dies, everybody hears of it and nothing is left."""

from __future__ import annotations

import json
import os
import select
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from transfer.hello import Side
from transfer.link_curve import load_keys, make_keys, split_key
from transfer.link_zmq import ZmqLink
from transfer.testing.mailbox import MailboxManager
from unikv.errors import ConfigError
from workers import cli_run
from workers.cli import main
from workers.client import FleetClient
from workers.config import PairConfig
from workers.config_load import load_pair
from workers.control import CODEC, Stop
from workers.pair_run import PairRun, RunningPair
from workers.rendezvous import Rendezvous
from workers.workload import GRACE_S, Job, RequestRecord, WorkloadDriver

pytestmark = pytest.mark.usefixtures("store_library")

PATIENCE_S = 30.0
TOLD_WITHIN_S = 2.0
"""Longest time from a worker's death to the others' reports."""
PATHS = ("direct", "zmq")

SLOW: dict[str, Any] = {
    "model__max_seq_len": 4096,
    "model__layers": [{"count": 1, "owner": "target", "kv_heads": 4, "head_dim": 8, "dtype": "float16"}],
    "speculative": None,
    "context__parallel": {"tp": 2},
    "context__pool": {"pages": 3000},
    "generation__pool": {"pages": 3000},
    "workload__concurrency": 8,
    "workload__requests": 400,
    "workload__prompt_tokens": [4000, 4000],
}
"""Requests of 250 blocks that move block by block, and many of them: a run takes many seconds."""


def slow(path: str) -> dict[str, Any]:
    return {**SLOW, "transfer": {"path": path, "chunk_bytes": 1, "timeout_s": 20}}


def job(prompt_tokens: int) -> Job:
    return Job(prompt=(), prompt_tokens=prompt_tokens, max_new_tokens=1)


def children(pid: int) -> list[int]:
    """Child processes of a process, oldest first."""
    found: list[int] = []
    for task in Path(f"/proc/{pid}/task").glob("*/children"):
        found += [int(word) for word in task.read_text().split()]
    return sorted(found)


def ended(pid: int) -> bool:
    """Wait for the end of a process that is not our child."""
    try:
        descriptor = os.pidfd_open(pid)
    except ProcessLookupError:
        return True
    try:
        return bool(select.select([descriptor], [], [], PATIENCE_S)[0])
    finally:
        os.close(descriptor)


def is_alive(pid: int) -> bool:
    """Whether a process runs: an orphan that has ended may stay listed until its new parent looks."""
    try:
        status = Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return False
    return status.rpartition(")")[2].split()[0] != "Z"


def answers(address: str) -> bool:
    host, _, port = split_key(address)[0].removeprefix("tcp://").rpartition(":")
    with socket.socket() as probe:
        return probe.connect_ex((host, int(port))) == 0


class Trace:
    """What a running pair has outside this process."""

    def __init__(self, running: RunningPair) -> None:
        self.pids = [worker.pid for worker in running.fleet.workers]
        self.addresses = list(running.client._addresses.values())
        assert all(map(is_alive, self.pids)) and all(map(answers, self.addresses))

    def check_gone(self) -> None:
        assert [pid for pid in self.pids if is_alive(pid)] == []
        assert [address for address in self.addresses if answers(address)] == []


def start(pair_file: str) -> RunningPair:
    return RunningPair(load_pair(pair_file, environ={}), [pair_file])


# --- every byte arrives ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", PATHS)
def test_every_byte_arrives(write_pair: Callable[..., str], path: str) -> None:
    lengths = [1, 16, 17, 63, 100, 200]
    with start(write_pair(context__parallel={"tp": 2}, transfer__path=path)) as running:
        trace = Trace(running)
        assert [(p.context_rank, p.generation_rank, p.path) for p in running.paths] == [(0, 0, path), (1, 0, path)]
        assert running.draft_kv == "per_view"
        for _ in range(2):  # the second run finds pages that the first has used
            run = running.run([job(length) for length in lengths])
            assert [record.reason for record in run.records] == [""] * len(lengths)
            assert [record.verification() for record in run.records] == [(True, 0, "")] * len(lengths)
            assert [record.bytes for record in run.records] == [useful_bytes(length) for length in lengths]
            assert run.deaths == ()
            for record in run.records:
                stages = record.stages()
                assert 0 < sum(stages.values()) <= record.finished_s - record.submitted_s
                assert 0 < (record.ttft_s() or 0) <= record.finished_s - record.submitted_s
    trace.check_gone()
    assert running.fleet.deaths() == ()


def test_links_with_keys_let_in_the_fleet_and_nobody_else(write_pair: Callable[..., str], tmp_path: Path) -> None:
    public, secret = make_keys(tmp_path / "fleet", "fleet")
    curve = {"public": str(public), "secret": str(secret), "authorized": str(public.parent)}
    other = load_keys(*make_keys(tmp_path / "other", "other"), public.parent)
    mail = MailboxManager()
    with start(write_pair(transfer__path="zmq", transfer__curve=curve)) as running:
        trace = Trace(running)
        assert all(split_key(address)[1] in other.authorized for address in trace.addresses)
        stranger = ZmqLink(curve=other)
        mail.add(stranger)
        for address in trace.addresses:
            stranger.connect(address)
            stranger.send(address, CODEC.encode(Stop(reason="I said so"), incarnation="0" * 32, rank=0))
            assert "not authorized there" in mail.wait_gone(stranger, address)
        stranger.abort()
        run = running.run([job(100)])
        assert [record.verification() for record in run.records] == [(True, 0, "")]
    trace.check_gone()


def test_keys_that_are_not_there_are_told_before_anything_starts(
    write_pair: Callable[..., str], tmp_path: Path
) -> None:
    curve = {name: str(tmp_path / name) for name in ("public", "secret", "authorized")}
    with pytest.raises(ConfigError, match=r"CURVE keys: file is .*public \(no file\)"):
        start(write_pair(transfer__curve=curve))


def useful_bytes(prompt_tokens: int) -> int:
    """Whole blocks of 16 tokens: two target layers, and the blocks in the window of 40 of one draft layer."""
    blocks = -(-prompt_tokens // 16)
    live = blocks - max(0, (prompt_tokens + 1 - 40) // 16)
    return 16 * (2 * 2 * 4 * 32 * blocks + 2 * 2 * 16 * live)


def test_requests_wait_for_pages_and_what_never_fits_fails_at_once(write_pair: Callable[..., str]) -> None:
    small = {"context__pool": {"pages": 11}, "generation__pool": {"pages": 7}}  # two requests of 60 tokens, and one
    lengths = [60, 60, 200, 60, 100, 60, 60]
    with start(write_pair(context__parallel={"tp": 2}, workload__concurrency=7, **small)) as running:
        run = running.run([job(length) for length in lengths])
        for length, record in zip(lengths, run.records, strict=True):
            assert record.verification()[0] is (length == 60)
            assert (record.reason == "") is (length == 60)
        never, too_long_for_one_side = run.records[2], run.records[4]
        assert "needs 13 of 10 pages" in never.reason or "needs 13 of 6 pages" in never.reason
        assert "needs 7 of 6 pages" in too_long_for_one_side.reason and "can never fit" in never.reason
        assert min(r.finished_s for r in run.records if not r.reason) > never.submitted_s
        assert never.finished_s < max(record.finished_s for record in run.records)
        assert running.run([job(60)]).records[0].verification()[0]


# --- workers that die ------------------------------------------------------------------------------------------------


def run_and_kill(running: RunningPair, victim: int, number: signal.Signals) -> tuple[PairRun, float, list[int]]:
    """Run the slow workload and send a signal to one worker as soon as three requests are finished.

    Returns the run, when the signal was sent, and the ids of the requests that were finished by then.
    """
    finished: list[int] = []
    sent_s = 0.0

    def on_finished(record: RequestRecord) -> None:
        nonlocal sent_s
        if sent_s == 0.0:
            finished.append(record.request_id)
            if len(finished) == 3:
                os.kill(running.fleet.workers[victim].pid, number)
                sent_s = time.monotonic()

    run = running.run([job(4000)] * running.pair.workload.requests, on_finished)
    return run, sent_s, finished


@pytest.mark.parametrize(
    ("victim", "name", "path"),
    [(0, "context rank 0", "direct"), (2, "generation rank 0", "direct"), (1, "context rank 1", "zmq")],
)
def test_the_others_hear_of_a_killed_worker_within_two_seconds(
    write_pair: Callable[..., str], victim: int, name: str, path: str
) -> None:
    pair_file = write_pair(**slow(path))
    with start(pair_file) as running:
        trace = Trace(running)
        run, killed_s, finished = run_and_kill(running, victim, signal.SIGKILL)
        ended_s = time.monotonic()
        assert [f"{death.side} rank {death.rank} {death.reason}" for death in run.deaths] == [f"{name} signal SIGKILL"]
        # How many were open depends on how many had finished with the third; some of them may have arrived whole.
        open_then = [r for r in run.records if r.submitted_s < killed_s and r.request_id not in finished]
        failed = [record for record in open_then if record.reason]
        assert failed
        for record in failed:
            assert name in record.reason
            assert record.finished_s - killed_s < TOLD_WITHIN_S
            survivors = {(side, rank) for side, count in running.ranks.items() for rank in range(count)}
            assert record.reporters() >= survivors - {(run.deaths[0].side, run.deaths[0].rank)}
        assert all(record.verification()[0] is (not record.reason) for record in run.records)
        assert sum(not record.reason for record in run.records) < len(run.records)
        assert len(run.records) == running.pair.workload.requests
        assert ended_s - killed_s < TOLD_WITHIN_S + GRACE_S
    assert time.monotonic() - ended_s < 5.0, "the others end on time"
    trace.check_gone()


@pytest.mark.parametrize(
    ("path", "split", "side", "victim"),
    [
        ("direct", {"context__parallel": {"tp": 2}, "context__instances": 2}, Side.CONTEXT, 1),
        ("zmq", {"context__parallel": {"tp": 1}, "generation__instances": 2}, Side.GENERATION, 2),
        (
            "direct",  # nobody knows which data-parallel rank has a request, so that asks to the dead one are open
            {
                **{"context__parallel": {"tp": 2, "attention_dp": True}, "context__instances": 2},
                "workload__tell_data_rank": False,
            },
            Side.CONTEXT,
            1,
        ),
    ],
    ids=["context", "generation", "data-parallel"],
)
def test_the_other_instances_go_on_without_a_killed_one(
    write_pair: Callable[..., str], path: str, split: dict[str, Any], side: Side, victim: int
) -> None:
    changes = {**slow(path), **split, "workload__requests": 24, "workload__concurrency": 6}
    with start(write_pair(**changes)) as running:
        trace = Trace(running)
        run, killed_s, finished = run_and_kill(running, victim, signal.SIGKILL)
        [death] = run.deaths
        assert death.side is side and death.reason == "signal SIGKILL"
        name = (death.side, death.rank)
        failed = [record for record in run.records if record.reason]
        # Only what was under way with the dead worker's instance may fail.
        assert all(record.submitted_s < killed_s + TOLD_WITHIN_S for record in failed)
        assert all(record.route is not None and name in record.route.relies_on for record in failed)
        assert all(record.finished_s - killed_s < TOLD_WITHIN_S for record in failed)
        assert len(failed) <= running.pair.workload.concurrency
        assert all(record.verification() == (True, 0, "") for record in run.records if not record.reason)
        later = running.run([job(100)] * 4)
        assert [record.verification() for record in later.records] == [(True, 0, "")] * 4
        assert all(name not in record.route.relies_on for record in later.records if record.route)
        assert len(finished) == 3
    assert running.fleet.unclean() == ()
    trace.check_gone()


def test_a_worker_that_is_asked_to_end_says_so_and_the_run_is_over(write_pair: Callable[..., str]) -> None:
    with start(write_pair(**slow("direct"))) as running:
        trace = Trace(running)
        run, sent_s, _ = run_and_kill(running, 0, signal.SIGTERM)
        [death] = run.deaths
        assert (death.side, death.rank, death.reason, death.orderly) == (Side.CONTEXT, 0, "exit code 0", True)
        failed = [record for record in run.records if record.reason]
        assert failed and all("context rank 0" in record.reason for record in failed)
        assert "context rank 0 is ending: signal SIGTERM" in " ".join(record.reason for record in failed)
        assert time.monotonic() - sent_s < 6.0
    trace.check_gone()


def test_a_benchmark_in_which_a_worker_dies_fails_and_the_next_one_works(
    write_pair: Callable[..., str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    result_file = tmp_path / "result.json"
    killed: list[int] = []

    def progress(_stack: ExitStack) -> Callable[[str, int, int], None]:
        def show(_title: str, finished: int, _total: int) -> None:
            if finished == 3 and not killed:
                [parent] = children(os.getpid())
                killed.extend(children(parent)[-1:])  # the generation worker
                os.kill(killed[0], signal.SIGKILL)

        return show

    monkeypatch.setattr(cli_run, "_progress", progress)
    assert main(["bench", write_pair(**slow("zmq")), "--json", str(result_file)]) == 1
    result = json.loads(result_file.read_text())
    [case] = result.get("cases", [result])
    assert [(death["side"], death["rank"]) for death in case["deaths"]] == [("generation", 0)]
    assert not children(os.getpid())
    assert main(["bench", write_pair(context__parallel={"tp": 2}), "--json", str(result_file)]) == 0
    assert json.loads(result_file.read_text())["summary"]["verified"] == 4


def test_names_are_neither_markup_nor_paths(
    write_pair: Callable[..., str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    name, logs = "../../[bold]x[/nope]", tmp_path / "a" / "b"
    assert main(["bench", write_pair(), "--set", f"name='{name}'", "--log-dir", str(logs)]) == 0
    assert name in capsys.readouterr().out
    assert [path.name for path in logs.iterdir()] == ["_..__bold_x__nope_"]
    assert [path.name for path in (tmp_path / "a").iterdir()] == ["b"]


# --- launch ----------------------------------------------------------------------------------------------------------


class Launched:
    """`python -m workers launch` in a session of its own."""

    def __init__(self, pair_file: str) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-m", "workers", "launch", pair_file],
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        assert self.process.stderr is not None
        self.output = ""
        while "serving" not in self.output:
            line = self.process.stderr.readline()
            assert line, f"it ended: {self.output}"
            self.output += line
        [self.parent] = children(self.process.pid)
        self.workers = children(self.parent)

    def wait(self) -> int:
        """Wait for its end and return the exit code; nothing that it started may be left."""
        assert self.process.stderr is not None
        self.output += self.process.stderr.read()
        code = self.process.wait(PATIENCE_S)
        assert not [pid for pid in (self.parent, *self.workers) if is_alive(pid)]
        return code

    def close(self) -> None:
        self.process.kill()
        self.process.wait()
        if self.process.stderr is not None:
            self.process.stderr.close()


@pytest.fixture
def launch() -> Iterator[Callable[[str], Launched]]:
    launched: list[Launched] = []

    def start_one(pair_file: str) -> Launched:
        launched.append(Launched(pair_file))
        return launched[-1]

    yield start_one
    for one in launched:
        one.close()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_ctrl_c_ends_everybody(
    write_pair: Callable[..., str], launch: Callable[[str], Launched], number: signal.Signals
) -> None:
    launched = launch(write_pair(context__parallel={"tp": 2}))
    assert len(launched.workers) == 3
    launched.process.send_signal(number)
    assert launched.wait() == 0
    assert launched.output.rstrip().endswith("ended")


def test_a_worker_that_somebody_ends_ends_the_launch_in_order(
    write_pair: Callable[..., str], launch: Callable[[str], Launched]
) -> None:
    launched = launch(write_pair())
    os.kill(launched.workers[1], signal.SIGTERM)
    assert launched.wait() == 0
    assert "generation rank 0 was ended" in launched.output


def test_a_worker_that_dies_ends_the_launch_with_its_reason(
    write_pair: Callable[..., str], launch: Callable[[str], Launched]
) -> None:
    launched = launch(write_pair())
    os.kill(launched.workers[0], signal.SIGKILL)
    assert launched.wait() == 1
    assert "context rank 0 died: signal SIGKILL" in launched.output
    assert "context rank 0 serves" in launched.output, "the end of its log"


def test_workers_do_not_outlive_a_killed_launcher(
    write_pair: Callable[..., str], launch: Callable[[str], Launched]
) -> None:
    launched = launch(write_pair())
    launched.process.kill()
    assert ended(launched.parent)
    assert all(ended(pid) for pid in launched.workers)
    assert launched.wait() == -signal.SIGKILL


@pytest.mark.parametrize("command", ["launch", "bench"])
def test_what_the_gate_refuses_is_not_started(
    write_pair: Callable[..., str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], command: str
) -> None:
    def no_process(*_: Any, **__: Any) -> None:
        raise AssertionError("a process was started")

    monkeypatch.setattr("workers.fleet.subprocess.Popen", no_process)
    layers = [{"count": 2, "owner": "target", "kv_heads": 4, "head_dim": 16, "dtype": "bfloat16"}]
    other = [{**layers[0], "dtype": "float16", "head_dim": 32}]
    refused = {"model__layers": ..., "context__layers": layers, "generation__layers": other, "speculative": None}
    assert main([command, write_pair(**refused)]) == 2
    errors = capsys.readouterr().err
    for reason in ("bfloat16", "float16", "head_dim"):
        assert reason in errors


# --- workers started by hand -----------------------------------------------------------------------------------------


def test_workers_started_by_hand_serve_one_caller_after_the_other(write_pair: Callable[..., str]) -> None:
    pair_file = write_pair()
    pair: PairConfig = load_pair(pair_file, environ={})
    with Rendezvous.reserve() as reserved:
        url = reserved.url
    ranks = dict.fromkeys(Side, 1)
    with ExitStack() as stack:
        processes = []
        for side in Side:
            words = ["worker", pair_file, "--side", side, "--rank", "0", "--rendezvous", url]
            words += ["--serve-rendezvous"] if side is Side.CONTEXT else []
            process = subprocess.Popen([sys.executable, "-m", "workers", *words], stderr=subprocess.DEVNULL)
            stack.callback(process.wait)
            stack.callback(process.kill)
            processes.append(process)
        rendezvous = stack.enter_context(Rendezvous.join(url))
        for first_id in (1, 1000):  # workers remember the ids of requests that are over
            with FleetClient(owner=False) as client:
                client.attach(rendezvous, ranks, timeout_s=PATIENCE_S, alive=lambda: None)
                driver = WorkloadDriver(client, ranks, lambda: (), first_id=first_id)
                [record] = driver.run([job(50)], concurrency=1, timeout_s=10.0, on_finished=lambda _: None)
                assert record.verification() == (True, 0, ""), record.reason
        for process in processes:
            process.send_signal(signal.SIGTERM)
        assert [process.wait(PATIENCE_S) for process in processes] == [0, 0]
    assert pair.name
