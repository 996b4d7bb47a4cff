"""Two processes on one GPU over CUDA IPC: whole transfers, order behind events, and either process ended in mid copy.

The other process runs this file as a script. "Mid" is certain: the copy waits on the device for an event that is behind
a kernel which lasts. Memory is compared whole, so a byte outside of its page is seen as well as a byte that is missing.
"""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
    pytest.mark.timeout(180),
]
if torch.cuda.is_available():
    pytest.importorskip("cupy")

from transfer import ContextEndpoint, GenerationEndpoint, TransferOptions  # noqa: E402
from transfer.device_bytes import DeviceBytes  # noqa: E402
from transfer.hello import MemoryExport, PathKind, Side, StorageCard  # noqa: E402
from transfer.ipc_memory import CUDA, MappedDeviceStorage, ipc_mappings, reachable_devices  # noqa: E402
from transfer.link_zmq import ZmqLink  # noqa: E402
from transfer.outcome import TransferHandle  # noqa: E402
from transfer.peer_memory import local_regions  # noqa: E402
from transfer.testing.ranks import SmallRank  # noqa: E402
from unikv.cuda_driver import CudaAllocation, driver  # noqa: E402
from unikv.errors import LinkBrokenError  # noqa: E402
from unikv.ids import RequestId  # noqa: E402

TOKENS = 600
NUM_SLOTS = 400
CANARY = 0xC5
PATIENCE_S = 60.0
LASTING_CYCLES = 4_000_000_000
"""Of a kernel that keeps a copy waiting: two seconds or more."""


class GpuRank(SmallRank):
    """A small rank with its memory on a GPU; `arrays` are a mirror in host memory."""

    def __init__(self, side: Side, address: str, *, path: PathKind, device: int = 0) -> None:
        self.device = device
        self.tensors: list[Any] = []
        name, reach = f"cuda:{device}", reachable_devices(device)
        super().__init__(side, address, path=path, num_slots=NUM_SLOTS, device=name, reach=reach)
        memory = [DeviceBytes(pointer=t.data_ptr(), size=t.numel(), keep=t) for t in self.tensors]
        self.regions = local_regions(self.card, memory)

    def push(self) -> None:
        for tensor, array in zip(self.tensors, self.arrays, strict=True):
            tensor.copy_(torch.from_numpy(array))
        torch.cuda.synchronize(self.device)

    def fill_device(self, tokens: int, first_slot: int = 1) -> None:
        self.fill(self.table(tokens, first_slot), tokens)
        self.push()

    def fill_with_canaries(self) -> None:
        for array in self.arrays:
            array[:] = CANARY
        self.push()

    def wrong_bytes(self, tokens: int, first_slot: int = 1) -> int:
        """Bytes of the whole memory that are neither the pattern where it belongs nor the canary elsewhere."""
        torch.cuda.synchronize(self.device)
        for array in self.arrays:
            array[:] = CANARY
        for row, pattern in self._rows(self.table(tokens, first_slot), tokens, live_only=True):
            row[:] = pattern
        found = [tensor.cpu().numpy() for tensor in self.tensors]
        return sum(int((a != b).sum()) for a, b in zip(found, self.arrays, strict=True))

    def close(self) -> None:
        self.tensors.clear()
        super().close()

    def _allocate(self, size_bytes: int) -> MemoryExport:
        memory = CudaAllocation(self.device, size_bytes)
        self.tensors.append(torch.as_tensor(memory, device=f"cuda:{self.device}").zero_())
        self.arrays.append(np.zeros(size_bytes, np.uint8))
        handle, offset = memory.export()
        uuid = driver().uuid(self.device)
        return MemoryExport(kind=CUDA, pid=1, handle=handle, offset_bytes=offset, device=uuid)


class Worker:
    """One endpoint with its rank, in whichever process."""

    def __init__(self, side: Side, path: PathKind, device: int = 0) -> None:
        from transfer.copy_cupy import CudaCopier  # noqa: PLC0415

        torch.zeros(1, device=f"cuda:{device}")
        self.link = ZmqLink(connect_timeout_s=2.0)
        self.rank = GpuRank(side, self.link.address, path=path, device=device)
        kind: Any = ContextEndpoint if side is Side.CONTEXT else GenerationEndpoint
        self.endpoint: Any = kind(
            self.rank.card,
            link=self.link,
            regions=self.rank.regions,
            copier=CudaCopier(device),
            options=TransferOptions(timeout_s=PATIENCE_S, chunk_bytes=1 << 14),
        )

    def publish(self, request_id: int, *, first_slot: int = 1, written: Any = None) -> TransferHandle:
        table = self.rank.table(TOKENS, first_slot)
        handle: TransferHandle = self.endpoint.publish(RequestId(request_id), table, TOKENS, written=written)
        return handle

    def receive(self, request_id: int, address: str, first_slot: int = 1) -> TransferHandle:
        instance = self.endpoint.connect([address])
        table = self.rank.table(TOKENS, first_slot)
        handle: TransferHandle = self.endpoint.receive(RequestId(request_id), table, TOKENS, instance=instance)
        return handle

    def close(self) -> bool:
        drained: bool = self.endpoint.close()
        self.rank.close()
        return drained


# --- the other process ------------------------------------------------------------------------------------------------


def tell(**facts: object) -> None:
    print(json.dumps(facts), flush=True)


def child(path: str, address: str, device: str) -> None:
    """Be a generation rank: fetch, cancel or look when told to; end when the parent closes our input."""
    worker = Worker(Side.GENERATION, PathKind(path), int(device))
    tell(ready=True)
    handles: dict[int, TransferHandle] = {}
    for line in sys.stdin:
        what, request_id = line.split()[0], int(line.split()[1])
        if what == "fetch":
            worker.rank.fill_with_canaries()
            handles[request_id] = worker.receive(request_id, address)
            tell(asked=True)
        elif what == "cancel":
            worker.endpoint.cancel(RequestId(request_id), "no longer wanted")
            outcome = handles[request_id].wait(PATIENCE_S)
            tell(reason=outcome.reason if outcome else "open", quiet=handles[request_id].quiet)
        else:  # look, or only hear of the end
            outcome, quiet = handles[request_id].wait(PATIENCE_S), handles[request_id].wait_quiet(PATIENCE_S)
            wrong = worker.rank.wrong_bytes(TOKENS) if what == "look" else 0
            tell(reason=outcome.reason if outcome else "open", quiet=quiet, wrong_bytes=wrong)
    worker.close()


class Process:
    """The other process, seen from the test."""

    def __init__(self, path: PathKind, address: str, device: int = 0) -> None:
        root = str(Path(__file__).parents[2])
        self._process = subprocess.Popen(
            [sys.executable, "-c", f"import sys; sys.argv[1:] = {[path.value, address, str(device)]!r}; "
             f"import runpy; runpy.run_path({__file__!r}, run_name='__main__')"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            cwd=root,
        )  # fmt: skip
        assert self.hear() == {"ready": True}

    def order(self, what: str, request_id: int) -> dict[str, Any]:
        self.tell(what, request_id)
        return self.hear()

    def tell(self, what: str, request_id: int) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(f"{what} {request_id}\n")
        self._process.stdin.flush()

    def hear(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        assert line, f"the process ended with {self._process.wait(10)}"
        facts: dict[str, Any] = json.loads(line)
        return facts

    def end(self, *, kill: bool = False) -> int:
        assert self._process.stdin is not None and self._process.stdout is not None
        if kill:
            self._process.send_signal(signal.SIGKILL)
        self._process.stdin.close()
        code = self._process.wait(PATIENCE_S)
        self._process.stdout.close()
        return code


ARRIVED = {"reason": "", "quiet": True, "wrong_bytes": 0}


def lasting_event(device: int = 0) -> Any:
    """An event behind a kernel that lasts, on a stream of its own."""
    stream = torch.cuda.Stream(device)
    with torch.cuda.stream(stream):
        torch.cuda._sleep(LASTING_CYCLES)
        event = torch.cuda.Event()
        event.record(stream)
    return event


@pytest.fixture
def context() -> Iterator[Worker]:
    worker = Worker(Side.CONTEXT, PathKind.AUTO)
    worker.rank.fill_device(TOKENS)
    yield worker
    assert worker.close()
    assert len(ipc_mappings()) == 0


@pytest.mark.parametrize("path", [PathKind.AUTO, PathKind.ZMQ])
def test_every_byte_arrives_and_no_other_changes(path: PathKind) -> None:
    worker = Worker(Side.CONTEXT, path)
    worker.rank.fill_device(TOKENS)
    process = Process(path, worker.link.address)
    for request_id in (1, 2, 3):
        sent = worker.publish(request_id)
        process.order("fetch", request_id)
        assert process.order("look", request_id) == ARRIVED
        outcome = sent.wait(PATIENCE_S)
        assert outcome is not None and outcome.ok and sent.wait_quiet(PATIENCE_S)
        assert [leg.path for leg in outcome.legs] == [PathKind.DIRECT if path is PathKind.AUTO else path]
    assert process.end() == 0
    assert worker.close()


def test_a_copy_waits_on_the_device_for_what_is_still_being_computed(context: Worker) -> None:
    """The pages are written behind a kernel that lasts; without the event the copy would take what was there before."""
    process = Process(PathKind.AUTO, context.link.address)
    arrays = [array.copy() for array in context.rank.arrays]
    stream = torch.cuda.Stream()
    sources = [torch.from_numpy(array).pin_memory() for array in arrays]
    for tensor in context.rank.tensors:
        tensor.fill_(7)
    torch.cuda.synchronize()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(LASTING_CYCLES // 8)
        for tensor, source in zip(context.rank.tensors, sources, strict=True):
            tensor.copy_(source, non_blocking=True)
        event = torch.cuda.Event()
        event.record(stream)
    sent = context.publish(1, written=[event])
    assert not event.query()  # nobody waited on the host
    process.order("fetch", 1)
    assert process.order("look", 1) == ARRIVED
    assert sent.wait_quiet(PATIENCE_S) and process.end() == 0


def test_a_thousand_requests_leave_nothing_behind(context: Worker) -> None:
    process = Process(PathKind.AUTO, context.link.address)
    free = []
    for request_id in range(1, 1001):
        sent = context.publish(request_id)
        process.order("fetch", request_id)
        last = request_id in (1, 1000)
        assert process.order("look" if last else "hear", request_id) == ARRIVED
        assert sent.wait_quiet(PATIENCE_S)
        if request_id in (100, 1000):
            free.append(torch.cuda.mem_get_info()[0])
    assert len(ipc_mappings()) == len(context.rank.card.storages)
    assert free[1] >= free[0] - (1 << 20)
    assert process.end() == 0


def test_a_cancel_in_mid_copy_fails_at_once_and_is_quiet_when_the_copy_is_over(context: Worker) -> None:
    process = Process(PathKind.AUTO, context.link.address)
    sent = context.publish(1, written=[lasting_event()])
    process.order("fetch", 1)
    started_s = time.monotonic()
    assert process.order("cancel", 1) == {"reason": "no longer wanted", "quiet": False}
    assert time.monotonic() - started_s < 1.0
    assert process.order("hear", 1) == {"reason": "no longer wanted", "quiet": True, "wrong_bytes": 0}
    assert sent.wait_quiet(PATIENCE_S)
    again = context.publish(2)
    process.order("fetch", 2)
    assert process.order("look", 2) == ARRIVED
    assert again.wait_quiet(PATIENCE_S) and process.end() == 0


def test_a_generation_process_killed_in_mid_copy(context: Worker) -> None:
    process = Process(PathKind.AUTO, context.link.address)
    sent = context.publish(1, written=[lasting_event()])
    process.order("fetch", 1)
    deadline_s = time.monotonic() + PATIENCE_S
    while not context.endpoint._engine.copying() and time.monotonic() < deadline_s:
        sent.wait(0.001)
    assert context.endpoint._engine.copying() and not sent.quiet
    assert process.end(kill=True) == -signal.SIGKILL
    outcome = sent.wait(PATIENCE_S)
    assert outcome is not None and "is gone" in outcome.reason
    assert sent.wait_quiet(PATIENCE_S)  # the copy went into memory that stayed mapped, and no error came of it
    torch.cuda.synchronize()
    again = Process(PathKind.AUTO, context.link.address)
    sent = context.publish(2)
    again.order("fetch", 2)
    assert again.order("look", 2) == ARRIVED
    assert sent.wait_quiet(PATIENCE_S) and again.end() == 0


def test_memory_of_a_process_that_is_gone_cannot_be_opened(context: Worker) -> None:
    code = (
        "import torch; torch.zeros(1, device='cuda'); from unikv.cuda_driver import CudaAllocation; "
        "m = CudaAllocation(0, 1 << 20); print(m.export()[0].hex(), flush=True)"
    )
    root = str(Path(__file__).parents[2])
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=root)
    export = MemoryExport(kind=CUDA, pid=1, handle=bytes.fromhex(done.stdout.strip()))
    with pytest.raises(LinkBrokenError, match="the peer is gone"):
        MappedDeviceStorage(StorageCard(size_bytes=1 << 20, export=export), incarnation="i", device=0)


def test_two_endpoints_of_one_process_use_plain_pointers(context: Worker) -> None:
    generation = Worker(Side.GENERATION, PathKind.AUTO)
    generation.rank.fill_with_canaries()
    sent = context.publish(1)
    got = generation.receive(1, context.link.address)
    outcome = got.wait(PATIENCE_S)
    assert outcome is not None and outcome.ok, outcome
    assert [leg.path for leg in outcome.legs] == [PathKind.DIRECT] and len(ipc_mappings()) == 0
    assert generation.rank.wrong_bytes(TOKENS) == 0
    assert sent.wait_quiet(PATIENCE_S) and generation.close()


@pytest.mark.gpu2
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
def test_every_byte_arrives_on_another_device(context: Worker) -> None:
    process = Process(PathKind.AUTO, context.link.address, device=1)
    for request_id in (1, 2):
        sent = context.publish(request_id)
        process.order("fetch", request_id)
        assert process.order("look", request_id) == ARRIVED
        outcome = sent.wait(PATIENCE_S)
        direct = driver().uuid(1) in reachable_devices(0)
        assert outcome is not None and [leg.path for leg in outcome.legs] == [
            PathKind.DIRECT if direct else PathKind.ZMQ
        ]
    assert process.end() == 0


if __name__ == "__main__":
    child(sys.argv[1], sys.argv[2], sys.argv[3])
