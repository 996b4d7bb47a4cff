"""GPU memory of another process, over the twin of the driver: mapping, sharing, ends; and whole transfers into it.

The other process runs this file as a script. What a GPU alone can show is in `test_gpu_two_processes.py`.
"""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from transfer import ContextEndpoint, GenerationEndpoint, TransferOptions
from transfer.copy_device import DeviceCopier
from transfer.hello import MemoryExport, PathKind, RankCard, Side, StorageCard
from transfer.ipc_memory import CUDA, MappedDeviceStorage, ipc_mappings, reachable_devices
from transfer.link_zmq import ZmqLink
from transfer.outcome import TransferHandle
from transfer.path_choice import choose_path
from transfer.peer_memory import PeerMemory
from transfer.testing.device import HostDriver, HostEngine, host_view
from transfer.testing.ranks import SmallRank
from unikv.cuda_driver import CudaAllocation, driver, installed
from unikv.errors import IncompatiblePeerError, LinkBrokenError, LocalProtocolError, RemoteProtocolError
from unikv.ids import RequestId

SIZE = 4096
TOKENS = 1200
NUM_SLOTS = 700
PATIENCE_S = 30.0


def export_of(memory: CudaAllocation, **changes: Any) -> StorageCard:
    handle, offset = memory.export()
    uuid = driver().uuid(memory.device)
    export = MemoryExport(kind=CUDA, pid=1, handle=handle, offset_bytes=offset, device=uuid)
    return StorageCard(size_bytes=memory.size_bytes, export=replace(export, **changes))


class DeviceRank(SmallRank):
    """A small rank whose memory is the twin's."""

    def __init__(self, side: Side, address: str, *, path: PathKind = PathKind.DIRECT) -> None:
        self._allocations: list[CudaAllocation] = []
        reach = reachable_devices(0)
        super().__init__(side, address, path=path, num_slots=NUM_SLOTS, device="cuda:0", reach=reach)

    def close(self) -> None:
        super().close()
        self._allocations.clear()

    def _allocate(self, size_bytes: int) -> MemoryExport:
        memory = CudaAllocation(0, size_bytes)
        self._allocations.append(memory)
        fds = driver()._memory[memory.pointer]  # type: ignore[attr-defined]  # the twin's
        self.arrays.append(fds[1].array)
        export = export_of(memory).export
        assert export is not None
        return export


class Worker:
    """One endpoint over twin memory, in whichever process."""

    def __init__(self, side: Side, path: PathKind = PathKind.DIRECT) -> None:
        self.link = ZmqLink(connect_timeout_s=1.0)
        self.rank = DeviceRank(side, self.link.address, path=path)
        self.engine = HostEngine()
        kind: Any = ContextEndpoint if side is Side.CONTEXT else GenerationEndpoint
        self.endpoint: Any = kind(
            self.rank.card,
            link=self.link,
            regions=self.rank.regions,
            copier=DeviceCopier(self.engine),
            options=TransferOptions(timeout_s=PATIENCE_S, chunk_bytes=1 << 14),
        )

    def publish(self, request_id: int, first_slot: int = 1) -> TransferHandle:
        table = self.rank.table(TOKENS, first_slot)
        self.rank.fill(table, TOKENS)
        handle: TransferHandle = self.endpoint.publish(RequestId(request_id), table, TOKENS)
        return handle

    def receive(self, request_id: int, address: str) -> TransferHandle:
        instance = self.endpoint.connect([address])
        table = self.rank.table(TOKENS)
        handle: TransferHandle = self.endpoint.receive(RequestId(request_id), table, TOKENS, instance=instance)
        return handle

    def close(self) -> bool:
        drained: bool = self.endpoint.close()
        self.rank.close()
        return drained


# --- the other process ------------------------------------------------------------------------------------------------


def tell(**facts: object) -> None:
    print(json.dumps(facts), flush=True)


def child(what: str, path: str, address: str) -> None:
    """Export some memory, or be a generation rank that fetches a request; end when the parent closes our input."""
    with installed(HostDriver()):
        if what == "memory":
            memory = CudaAllocation(0, SIZE)
            handle, offset = memory.export()
            tell(handle=handle.hex(), offset=offset)
            sys.stdin.readline()
            tell(seen=int(driver()._memory[memory.pointer][1].array[100]))  # type: ignore[attr-defined]
            sys.stdin.read()
            return
        worker = Worker(Side.GENERATION, PathKind(path))
        for line in sys.stdin:
            handle = worker.receive(int(line), address)
            outcome = handle.wait(PATIENCE_S)
            quiet = handle.wait_quiet(PATIENCE_S)
            wrong = worker.rank.wrong_rows(worker.rank.table(TOKENS), TOKENS)
            tell(reason=outcome.reason if outcome else "open", quiet=quiet, wrong_rows=wrong)
        worker.close()


class Process:
    """The other process, seen from the test."""

    def __init__(self, what: str, path: PathKind = PathKind.DIRECT, address: str = "") -> None:
        root = str(Path(__file__).parents[2])
        self._process = subprocess.Popen(
            [sys.executable, __file__, what, path.value, address],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            cwd=root,
            env={"PYTHONPATH": root},
        )

    def ask(self, line: object) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(f"{line}\n")
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


@pytest.fixture(autouse=True)
def twin() -> Iterator[HostDriver]:
    """Give every test a driver of its own, and look that it left nothing mapped or allocated."""
    host = HostDriver()
    with installed(host):
        yield host
    assert (len(ipc_mappings()), host.open_handles, host.allocations) == (0, 0, 0)


def test_what_is_written_into_a_mapping_the_other_process_sees() -> None:
    process = Process("memory")
    facts = process.hear()
    export = MemoryExport(kind=CUDA, pid=1, handle=bytes.fromhex(facts["handle"]), device="x")
    storage = MappedDeviceStorage(StorageCard(size_bytes=SIZE, export=export), incarnation="i", device=0)
    host_view(storage.array)[100] = 77
    process.ask("look")
    assert process.hear() == {"seen": 77}
    storage.close()
    assert process.end() == 0


def test_one_mapping_serves_all_storages_of_an_allocation_and_ends_with_the_last(twin: HostDriver) -> None:
    process = Process("memory")
    handle = bytes.fromhex(process.hear()["handle"])
    cards = [
        StorageCard(size_bytes=1024, export=MemoryExport(kind=CUDA, pid=1, handle=handle, offset_bytes=at, device="x"))
        for at in (0, 1024, 3072)
    ]
    storages = [MappedDeviceStorage(card, incarnation="i", device=0) for card in cards]
    assert [s.array.pointer - storages[0].array.pointer for s in storages] == [0, 1024, 3072]
    assert (len(ipc_mappings()), twin.opened_ever) == (1, 1)
    other = MappedDeviceStorage(cards[0], incarnation="j", device=0)  # another life of the peer: another mapping
    assert (len(ipc_mappings()), twin.opened_ever) == (2, 2)
    for storage in storages[:2]:
        storage.close()
        storage.close()
    assert len(ipc_mappings()) == 2
    storages[2].close()
    other.close()
    with pytest.raises(LocalProtocolError, match="state is 'closed'"):
        _ = other.array
    assert process.end() == 0


@pytest.mark.parametrize(("offset", "size"), [(0, SIZE + 1), (SIZE, 1), (1, SIZE), (-1, 16), (0, 0)])
def test_a_storage_outside_its_allocation_is_refused_and_nothing_stays_mapped(offset: int, size: int) -> None:
    process = Process("memory")
    export = MemoryExport(kind=CUDA, pid=1, handle=bytes.fromhex(process.hear()["handle"]), offset_bytes=offset)
    with pytest.raises(RemoteProtocolError, match=f"size is '{size} bytes from byte {offset} on'"):
        MappedDeviceStorage(StorageCard(size_bytes=size, export=export), incarnation="i", device=0)
    assert process.end() == 0


@pytest.mark.parametrize(
    "export",
    [None, MemoryExport(kind="memfd", pid=1, fd=3, inode=3), MemoryExport(kind=CUDA, pid=1, handle=b"short")],
)
def test_other_kinds_of_export_are_refused(export: MemoryExport | None) -> None:
    with pytest.raises(RemoteProtocolError, match="expected cuda with a handle of 64 bytes"):
        MappedDeviceStorage(StorageCard(size_bytes=SIZE, export=export), incarnation="i", device=0)


def test_memory_of_a_process_that_is_gone_is_a_broken_link() -> None:
    process = Process("memory")
    handle = bytes.fromhex(process.hear()["handle"])
    assert process.end() == 0
    export = MemoryExport(kind=CUDA, pid=1, handle=handle)
    with pytest.raises(LinkBrokenError):
        MappedDeviceStorage(StorageCard(size_bytes=SIZE, export=export), incarnation="i", device=0)


def test_memory_of_this_process_is_used_where_it_is(twin: HostDriver) -> None:
    memory = CudaAllocation(0, SIZE)
    storage = MappedDeviceStorage(export_of(memory), incarnation="i", device=0)
    assert storage.array.pointer == memory.pointer and twin.opened_ever == 0
    host_view(storage.array[8:16])[:] = 5
    assert host_view(storage.array)[:17].tolist() == [0] * 8 + [5] * 8 + [0]
    storage.close()


def rank_card(side: Side, path: PathKind = PathKind.AUTO) -> RankCard:
    rank = DeviceRank(side, "a")
    card = replace(rank.card, path=path)
    rank.close()
    return card


def test_devices_without_peer_access_take_the_staged_path_and_say_so() -> None:
    context, generation = rank_card(Side.CONTEXT), rank_card(Side.GENERATION)
    assert choose_path(context, generation)[0] is PathKind.DIRECT
    far = replace(context, reach=("another",))
    assert choose_path(far, generation) == (
        PathKind.ZMQ,
        "the context rank's GPU has no peer access to the generation rank's",
    )
    with pytest.raises(IncompatiblePeerError, match="no peer access"):
        choose_path(replace(far, path=PathKind.DIRECT), replace(generation, path=PathKind.DIRECT))


def test_the_devices_in_reach_are_those_the_hardware_connects() -> None:
    with installed(HostDriver(devices=3, apart=frozenset({(0, 2)}))):
        assert reachable_devices(0) == (driver().uuid(0), driver().uuid(1))
        assert reachable_devices(2) == tuple(driver().uuid(n) for n in (2, 0, 1))


def test_regions_of_a_peer_lie_where_its_card_says() -> None:
    rank = DeviceRank(Side.GENERATION, "a")
    with PeerMemory(rank.card, device="cuda:0") as memory:
        for group in rank.layout.groups:
            for index, region in memory.regions(group.group_id).items():
                own = rank.regions[group.group_id][index]
                assert region.memory.pointer == own.memory.__array_interface__["data"][0]
                assert (region.slot_stride_bytes, region.num_slots) == (own.slot_stride_bytes, own.num_slots)
    rank.close()


@pytest.mark.parametrize("path", [PathKind.AUTO, PathKind.ZMQ])
def test_requests_arrive_in_the_other_process_and_nothing_leaks(path: PathKind, twin: HostDriver) -> None:
    context = Worker(Side.CONTEXT, path)
    process = Process("generation", path, context.link.address)
    for request_id in range(1, 6):
        sent = context.publish(request_id)
        process.ask(request_id)
        assert process.hear() == {"reason": "", "quiet": True, "wrong_rows": 0}
        outcome = sent.wait(PATIENCE_S)
        assert outcome is not None and outcome.ok and sent.wait_quiet(PATIENCE_S)
        wanted = PathKind.DIRECT if path is PathKind.AUTO else path
        assert [leg.path for leg in outcome.legs] == [wanted]
    assert twin.open_handles == (1 if path is PathKind.AUTO else 0) * len(context.rank.card.storages)
    assert process.end() == 0
    assert context.close()


def test_a_peer_that_dies_while_its_memory_is_written_is_let_go_when_the_copy_is_over(twin: HostDriver) -> None:
    context = Worker(Side.CONTEXT)
    process = Process("generation", address=context.link.address)
    context.engine.hold = True
    launched, launch = threading.Event(), context.engine.launch
    context.engine.launch = lambda *args: (launch(*args), launched.set())[0]  # type: ignore[method-assign]
    sent = context.publish(1)
    process.ask(1)
    assert launched.wait(PATIENCE_S)
    assert process.end(kill=True) == -signal.SIGKILL
    outcome = sent.wait(PATIENCE_S)
    assert outcome is not None and "is gone" in outcome.reason
    assert not sent.quiet and twin.open_handles > 0
    context.engine.let_go()
    assert sent.wait_quiet(PATIENCE_S)
    again = Process("generation", address=context.link.address)
    sent = context.publish(2)
    again.ask(2)
    assert again.hear() == {"reason": "", "quiet": True, "wrong_rows": 0}
    assert twin.open_handles == len(context.rank.card.storages)  # those of the new process alone
    assert again.end() == 0
    assert context.close()


def test_twin_memory_is_seen_as_an_array() -> None:
    memory = CudaAllocation(0, SIZE)
    storage = MappedDeviceStorage(export_of(memory), incarnation="i", device=0)
    assert np.array_equal(host_view(storage.array), np.zeros(SIZE, np.uint8))
    storage.close()


if __name__ == "__main__":
    child(sys.argv[1], sys.argv[2], sys.argv[3])
