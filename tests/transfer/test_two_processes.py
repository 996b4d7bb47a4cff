"""Two processes over ZeroMQ, on both paths: whole transfers, and either process killed in mid transfer.

The other process runs this file as a script. "Mid" is certain: one side's copier holds a copy back, says so, and never
lets it land. Nobody sleeps; both processes wait on pipes and handles.
"""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from transfer import ContextEndpoint, GenerationEndpoint, TransferOptions
from transfer.copy_host import HostCopier
from transfer.hello import PathKind, Side
from transfer.link_zmq import ZmqLink
from transfer.outcome import TransferHandle
from transfer.testing.ranks import GatedCopier, SmallRank
from unikv.errors import LinkBrokenError
from unikv.ids import RequestId

TOKENS = 1200  # 300 target pages and 6 draft pages, one chunk each
NUM_SLOTS = 700
NEVER = 10**9
HELD_BACK = 40
"""Copies that land before one is held back."""
KILL_S = 2.0
"""How soon after the kill the survivor must know."""
PATIENCE_S = 60.0
CONNECT_S = 1.0


class Worker:
    """One endpoint with its rank, in whichever process."""

    def __init__(self, side: Side, path: PathKind, copier: HostCopier) -> None:
        self.link = ZmqLink(connect_timeout_s=CONNECT_S)
        self.rank = SmallRank(side, self.link.address, path=path, num_slots=NUM_SLOTS)
        kind: Any = ContextEndpoint if side is Side.CONTEXT else GenerationEndpoint
        self.endpoint: Any = kind(
            self.rank.card,
            link=self.link,
            regions=self.rank.regions,
            copier=copier,
            options=TransferOptions(chunk_bytes=1, timeout_s=PATIENCE_S),
        )

    def publish(self, request_id: int, first_slot: int = 1) -> TransferHandle:
        table = self.rank.table(TOKENS, first_slot)
        self.rank.fill(table, TOKENS)
        handle: TransferHandle = self.endpoint.publish(RequestId(request_id), table, TOKENS)
        return handle

    def receive(self, request_id: int, address: str, first_slot: int = 1) -> TransferHandle:
        instance = self.endpoint.connect([address])
        table = self.rank.table(TOKENS, first_slot)
        handle: TransferHandle = self.endpoint.receive(RequestId(request_id), table, TOKENS, instance=instance)
        return handle

    def wrong_rows(self, first_slot: int = 1) -> int:
        return self.rank.wrong_rows(self.rank.table(TOKENS, first_slot), TOKENS)

    def close(self) -> bool:
        drained: bool = self.endpoint.close()
        self.rank.close()
        return drained


# --- the other process ------------------------------------------------------------------------------------------------


def tell(**facts: object) -> None:
    print(json.dumps(facts), flush=True)


def child(side: str, path: str, request_id: int, passing: int, address: str) -> None:
    """Offer or fetch one request, say what became of it, and end when the parent closes our input."""
    worker = Worker(Side(side), PathKind(path), GatedCopier(passing, on_gate=lambda: tell(mid=True)))
    tell(address=worker.link.address)
    handle = worker.publish(request_id) if side == Side.CONTEXT else worker.receive(request_id, address)
    outcome = handle.wait(PATIENCE_S)
    quiet = handle.wait_quiet(PATIENCE_S)
    wrong = worker.wrong_rows() if side == Side.GENERATION else 0
    tell(reason=outcome.reason if outcome else "still open", quiet=quiet, wrong_rows=wrong)
    sys.stdin.read()
    worker.close()


class Process:
    """The other process, seen from the test."""

    def __init__(self, side: Side, path: PathKind, request_id: int, passing: int = NEVER, address: str = "") -> None:
        arguments = [side.value, path.value, str(request_id), str(passing), address]
        self._process = subprocess.Popen(
            [sys.executable, __file__, *arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            cwd=Path(__file__).parents[2],
            env={"PYTHONPATH": str(Path(__file__).parents[2])},
        )
        self.address: str = self.hear()["address"]

    def hear(self) -> dict[str, Any]:
        """Return the next thing the process says."""
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        assert line, f"the process ended with {self._process.wait(10)}"
        facts: dict[str, Any] = json.loads(line)
        return facts

    def kill(self) -> float:
        """End it as the kernel does when memory runs out; return when."""
        self._process.send_signal(signal.SIGKILL)
        return time.monotonic()

    def end(self) -> int:
        """Let it end in an orderly way (or find it dead) and return its exit code."""
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.close()
        code = self._process.wait(PATIENCE_S)
        self._process.stdout.close()
        return code


@pytest.fixture(params=[PathKind.DIRECT, PathKind.ZMQ])
def path(request: pytest.FixtureRequest) -> Iterator[PathKind]:
    return request.param  # type: ignore[no-any-return]


def assert_a_new_generation_process_is_served(context: Worker, path: PathKind, request_id: int) -> None:
    process = Process(Side.GENERATION, path, request_id, address=context.link.address)
    sent = context.publish(request_id, first_slot=350)
    assert process.hear() == {"reason": "", "quiet": True, "wrong_rows": 0}
    outcome = sent.wait(PATIENCE_S)
    assert outcome is not None and outcome.ok and sent.wait_quiet(PATIENCE_S)
    assert process.end() == 0


def assert_a_new_context_process_serves(generation: Worker, path: PathKind, request_id: int) -> None:
    process = Process(Side.CONTEXT, path, request_id)
    got = generation.receive(request_id, process.address, first_slot=350)
    outcome = got.wait(PATIENCE_S)
    assert outcome is not None and outcome.ok and got.wait_quiet(PATIENCE_S)
    assert generation.wrong_rows(first_slot=350) == 0
    assert [leg.path for leg in outcome.legs] == [path]
    assert process.hear()["reason"] == "" and process.end() == 0


def test_every_byte_arrives_in_the_other_process(path: PathKind) -> None:
    context, generation = (Worker(side, path, HostCopier()) for side in (Side.CONTEXT, Side.GENERATION))
    assert_a_new_generation_process_is_served(context, path, 1)
    assert_a_new_context_process_serves(generation, path, 2)
    assert context.close() and generation.close()


def test_a_context_process_killed_in_mid_transfer(path: PathKind) -> None:
    generation = Worker(Side.GENERATION, path, HostCopier())
    process = Process(Side.CONTEXT, path, 1, passing=HELD_BACK)
    got = generation.receive(1, process.address)
    assert process.hear() == {"mid": True}
    assert got.outcome is None and generation.rank.touched()
    killed_s = process.kill()
    outcome = got.wait(KILL_S)
    assert outcome is not None and "context rank 0 is gone" in outcome.reason, outcome
    assert got.wait_quiet(KILL_S)  # whether or not anybody has waited for the process: its memory is gone
    assert time.monotonic() - killed_s < KILL_S
    assert process.end() == -signal.SIGKILL
    assert_a_new_context_process_serves(generation, path, 2)
    assert generation.close()


def test_a_generation_process_killed_in_mid_transfer(path: PathKind) -> None:
    """On the direct path our own copy into the dead process's memory is still running when it dies."""
    reached = threading.Event()
    ours = GatedCopier(HELD_BACK if path is PathKind.DIRECT else NEVER, on_gate=reached.set)
    context = Worker(Side.CONTEXT, path, ours)
    theirs = NEVER if path is PathKind.DIRECT else HELD_BACK
    process = Process(Side.GENERATION, path, 1, theirs, context.link.address)
    sent = context.publish(1)
    if path is PathKind.DIRECT:
        assert reached.wait(PATIENCE_S)
    else:
        assert process.hear() == {"mid": True}
    assert sent.outcome is None
    killed_s = process.kill()
    outcome = sent.wait(KILL_S)
    assert outcome is not None and "generation rank 0 is gone" in outcome.reason, outcome
    if path is PathKind.DIRECT:
        assert not sent.quiet and ours.submitted == HELD_BACK + 1
        ours.open = True  # the memory we write stays mapped, whoever died
    assert sent.wait_quiet(KILL_S)
    assert time.monotonic() - killed_s < KILL_S
    assert process.end() == -signal.SIGKILL
    assert_a_new_generation_process_is_served(context, path, 2)
    assert context.close()


def test_nobody_is_there_after_a_kill(path: PathKind) -> None:
    """Connecting to a process that died says so, and does not hang."""
    generation = Worker(Side.GENERATION, path, HostCopier())
    process = Process(Side.CONTEXT, path, 1)
    instance = generation.endpoint.connect([process.address])
    process.kill()
    assert process.end() == -signal.SIGKILL
    handle = None
    try:
        handle = generation.endpoint.receive(RequestId(1), generation.rank.table(TOKENS), TOKENS, instance=instance)
    except LinkBrokenError as error:  # the loss was noticed before we asked
        assert "context rank 0 is gone" in str(error)
    if handle is not None:
        outcome = handle.wait(KILL_S)
        assert outcome is not None and "is gone" in outcome.reason and handle.wait_quiet(KILL_S)
    with pytest.raises(LinkBrokenError, match=r"check that its worker runs"):
        generation.endpoint.connect([process.address])
    assert generation.close()


if __name__ == "__main__":
    child(sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4]), sys.argv[5])
