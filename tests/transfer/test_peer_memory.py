"""Mapping a peer's memory: across two processes, within one, every refusal, and nothing left behind."""

from __future__ import annotations

import fcntl
import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from transfer.copier import CopyJob
from transfer.copy_host import HostCopier
from transfer.hello import (
    DraftKVMode,
    HostIdentity,
    MemoryExport,
    ParallelPosition,
    PathKind,
    PoolCard,
    RankCard,
    Side,
    StorageCard,
)
from transfer.peer_memory import MappedStorage, PeerMemory, can_map, local_regions, own_host_identity
from transfer.testing.copier import make_lane, make_pages
from unikv.errors import IncompatiblePeerError, LinkBrokenError, LocalProtocolError, RemoteProtocolError, SpecError
from unikv.ids import GroupId
from unikv.layer_spec import KVLayout

SIZE = 64 * 1024
NOBODY = 65534


def count_descriptors() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


def count_mappings() -> int:
    return Path("/proc/self/maps").read_text().count("/memfd:")


@pytest.fixture(autouse=True)
def nothing_left_behind() -> Iterator[None]:
    before = count_descriptors(), count_mappings()
    yield
    assert (count_descriptors(), count_mappings()) == before


@pytest.fixture
def memfd() -> Iterator[int]:
    """A memfd of SIZE zero bytes that allows seals."""
    fd = os.memfd_create("pool", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    os.ftruncate(fd, SIZE)
    yield fd
    os.close(fd)


def storage_of(descriptor: int, **changes: Any) -> StorageCard:
    export = MemoryExport(kind="memfd", pid=os.getpid(), fd=descriptor, inode=os.fstat(descriptor).st_ino)
    return StorageCard(size_bytes=SIZE, export=replace(export, **changes))


def card_of(*storages: StorageCard, pools: tuple[PoolCard, ...] = ()) -> RankCard:
    return RankCard(
        incarnation="i",
        instance="gen",
        side=Side.GENERATION,
        position=ParallelPosition(),
        address="",
        device="cpu",
        kv_layout=KVLayout.HND,
        tokens_per_block=4,
        num_target_layers=1,
        num_draft_layers=0,
        groups=(),
        storages=storages,
        pools=pools,
        views=(),
        speculative=None,
        draft_kv=DraftKVMode.AUTO,
        path=PathKind.AUTO,
    )


def pool(storage: int = 0, stride: int = 1024, slots: int = 64, index: int = 0, group: int = 0) -> PoolCard:
    return PoolCard(
        group_id=GroupId(group), pool_index=index, storage=storage, slot_stride_bytes=stride, num_slots=slots
    )


EXPORTER = """
import json, os, sys
fd = os.memfd_create("pool")
os.ftruncate(fd, {size})
os.pwrite(fd, b"from the peer", 100)
print(json.dumps(dict(pid=os.getpid(), fd=fd, inode=os.fstat(fd).st_ino)), flush=True)
sys.stdin.readline()
data = os.pread(fd, {size}, 0)
print(json.dumps([data.count(0xAB), data.index(0xAB), data.rindex(0xAB)]), flush=True)
sys.stdin.readline()
"""


@contextmanager
def exporting_process() -> Iterator[tuple[subprocess.Popen[str], StorageCard]]:
    """A process that exports a memfd, and counts the bytes 0xAB in it when it reads a line."""
    command = [sys.executable, "-c", EXPORTER.format(size=SIZE)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as child:
        assert child.stdout is not None
        export = MemoryExport(kind="memfd", **json.loads(child.stdout.readline()))
        try:
            yield child, StorageCard(size_bytes=SIZE, export=export)
        finally:
            child.kill()


def ask(child: subprocess.Popen[str]) -> Any:
    assert child.stdin is not None
    assert child.stdout is not None
    child.stdin.write("\n")
    child.stdin.flush()
    return json.loads(child.stdout.readline())


def test_a_copy_into_mapped_pages_is_seen_by_the_peer_and_touches_nothing_else() -> None:
    with exporting_process() as (child, storage):
        card = card_of(storage, pools=(pool(),))
        with PeerMemory(card) as peer:
            regions = peer.regions(GroupId(0))
            assert regions[0].memory[100:113].tobytes() == b"from the peer"
            local = np.full(SIZE, 0xAB, np.uint8)
            job = CopyJob(
                lanes=(make_lane(src_offset=4, dst_offset=8, run_bytes=1000),),
                source=local_regions(card, [local])[GroupId(0)],
                destination=regions,
                pages=make_pages([1, 2, 3], [7, 8, 30]),
            )
            HostCopier().submit(job)
            del regions, job
            assert ask(child) == [3000, 7 * 1024 + 8, 30 * 1024 + 1007]


def test_a_mapping_stays_readable_after_the_peer_died() -> None:
    with exporting_process() as (child, storage):
        mapped = MappedStorage(storage)
        child.kill()
        child.wait()
        assert mapped.array[100:113].tobytes() == b"from the peer"
        mapped.close()


def test_a_dead_process_cannot_be_mapped() -> None:
    with exporting_process() as (child, storage):
        child.kill()
        child.wait()
        with pytest.raises(LinkBrokenError, match=r"storage: export is '/proc/\d+/fd/\d+'.*the peer is gone"):
            MappedStorage(storage)


def test_an_export_of_this_very_process_is_mapped_too(memfd: int) -> None:
    mapped = MappedStorage(storage_of(memfd))
    mapped.array[5] = 77
    assert os.pread(memfd, 1, 5) == b"\x4d"
    os.pwrite(memfd, b"\x4e", 6)
    assert mapped.array[6] == 0x4E
    assert mapped.array.dtype == np.uint8
    assert mapped.array.shape == (SIZE,)
    mapped.close()


def test_a_closed_descriptor_is_a_broken_link(memfd: int) -> None:
    with pytest.raises(LinkBrokenError, match="closed its pool"):
        MappedStorage(storage_of(memfd, fd=1 << 20))


def test_another_inode_is_a_recycled_descriptor(memfd: int) -> None:
    inode = os.fstat(memfd).st_ino
    with pytest.raises(LinkBrokenError, match=f"inode is {inode}, expected {inode + 1} as announced"):
        MappedStorage(storage_of(memfd, inode=inode + 1))


@pytest.mark.parametrize("size_bytes", [SIZE - 1, SIZE + 1, 0])
def test_another_size_is_a_wrong_card(memfd: int, size_bytes: int) -> None:
    with pytest.raises(RemoteProtocolError, match=f"size in bytes is {SIZE}, expected {size_bytes} as announced"):
        MappedStorage(replace(storage_of(memfd), size_bytes=size_bytes))


def test_an_empty_memfd_is_refused() -> None:
    fd = os.memfd_create("empty")
    with pytest.raises(RemoteProtocolError, match="size in bytes is 0"):
        MappedStorage(replace(storage_of(fd), size_bytes=0))
    os.close(fd)


def test_a_file_that_is_no_memfd_is_never_written(tmp_path: Path) -> None:
    path = tmp_path / "precious"
    path.write_bytes(bytes(SIZE))
    with path.open("r+b") as file, pytest.raises(RemoteProtocolError, match="precious', expected a memfd"):
        MappedStorage(storage_of(file.fileno()))


def test_a_pipe_is_refused_without_waiting() -> None:
    reader, writer = os.pipe()
    with pytest.raises(RemoteProtocolError, match="expected a memfd"):
        MappedStorage(storage_of(reader))
    os.close(reader)
    os.close(writer)


def test_a_directory_is_refused() -> None:
    directory = os.open("/", os.O_RDONLY)
    with pytest.raises(RemoteProtocolError, match="Is a directory"):
        MappedStorage(storage_of(directory))
    os.close(directory)


def test_a_file_sealed_against_writing_says_so(memfd: int) -> None:
    fcntl.fcntl(memfd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_WRITE)
    with pytest.raises(IncompatiblePeerError, match="expected shared and writable") as caught:
        MappedStorage(storage_of(memfd))
    assert caught.value.mismatches == ("Operation not permitted",)


def test_the_memory_of_another_user_is_refused_with_the_cure(memfd: int) -> None:
    os.fchmod(memfd, 0)
    is_root = os.geteuid() == 0
    if is_root:
        os.seteuid(NOBODY)
    try:
        with pytest.raises(IncompatiblePeerError, match="run both workers as one user"):
            MappedStorage(storage_of(memfd))
    finally:
        if is_root:
            os.seteuid(0)


@pytest.mark.parametrize(
    ("storage", "words"),
    [
        (StorageCard(size_bytes=SIZE), "export is None, expected memfd; use a staged path"),
        (
            StorageCard(size_bytes=SIZE, export=MemoryExport(kind="cuda", pid=1, fd=0, inode=0)),
            "export is 'cuda', expected memfd; use a staged path",
        ),
    ],
)
def test_other_kinds_of_export_are_refused(storage: StorageCard, words: str) -> None:
    with pytest.raises(RemoteProtocolError, match=words):
        MappedStorage(storage)


def test_closing_leaves_no_descriptor_and_no_mapping(memfd: int) -> None:
    before = count_descriptors(), count_mappings()
    mapped = MappedStorage(storage_of(memfd), thing="gen rank 0 storage 3")
    assert (count_descriptors(), count_mappings()) == (before[0], before[1] + 1)
    mapped.close()
    mapped.close()
    assert (count_descriptors(), count_mappings()) == before
    with pytest.raises(LocalProtocolError, match="gen rank 0 storage 3: state is 'closed'"):
        _ = mapped.array


def test_a_view_outlives_close_and_takes_the_mapping_with_it(memfd: int) -> None:
    before = count_descriptors(), count_mappings()
    mapped = MappedStorage(storage_of(memfd))
    view = mapped.array.reshape(64, 1024)[3:5, 10]
    mapped.close()
    view[:] = 9
    assert os.pread(memfd, 1, 4 * 1024 + 10) == b"\x09"
    assert (count_descriptors(), count_mappings()) == (before[0], before[1] + 1)
    del view
    assert count_mappings() == before[1]


def test_regions_follow_the_pool_cards(memfd: int) -> None:
    pools = (pool(stride=512, slots=128), pool(stride=1000, slots=65, index=1), pool(stride=512, slots=128, group=3))
    card = card_of(storage_of(memfd), pools=pools)
    array = np.zeros(SIZE, np.uint8)
    with PeerMemory(card) as peer:
        for group in (GroupId(0), GroupId(3)):
            own, mapped = local_regions(card, [array])[group], peer.regions(group)
            assert own.keys() == mapped.keys() == ({0, 1} if group == 0 else {0})
            for index, region in own.items():
                assert region.memory is array
                assert (region.slot_stride_bytes, region.num_slots) == ((512, 128), (1000, 65))[index]
                assert mapped[index].memory.size == SIZE
                assert (mapped[index].slot_stride_bytes, mapped[index].num_slots) == ((512, 128), (1000, 65))[index]
        with pytest.raises(KeyError):
            peer.regions(GroupId(1))
        del region, own, mapped
    with pytest.raises(LocalProtocolError, match="generation gen rank 0: mapped memory is 'closed'"):
        peer.regions(GroupId(0))
    peer.close()


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        (pool(storage=1), r"group 0 pool 0: storage is 1, expected in \[0, 1\)"),
        (pool(storage=-1), "storage is -1"),
        (pool(slots=65), "size is '65 slots of 1024 bytes', expected .* at most 65536 bytes in storage 0"),
        (pool(slots=1, stride=SIZE + 1), f"size is '1 slots of {SIZE + 1} bytes'"),
        (pool(slots=0), "at least one slot"),
        (pool(stride=0), "64 slots of 0 bytes"),
    ],
)
def test_a_pool_that_does_not_fit_its_storage_is_refused_on_both_sides(memfd: int, wrong: PoolCard, words: str) -> None:
    card = card_of(storage_of(memfd), pools=(wrong,))
    with pytest.raises(RemoteProtocolError, match="generation gen rank 0 " + words if "group" in words else words):
        PeerMemory(card)
    with pytest.raises(SpecError, match=words):
        local_regions(card, [np.zeros(SIZE, np.uint8)])


def test_a_peer_that_maps_only_in_part_is_not_mapped_at_all(memfd: int) -> None:
    before = count_mappings()
    card = card_of(storage_of(memfd), storage_of(memfd, inode=1))
    with pytest.raises(LinkBrokenError, match="generation gen rank 0 storage 1: inode") as caught:
        PeerMemory(card)
    assert count_mappings() == before
    assert caught.value  # The error is still held: not its end freed the first mapping.


def test_own_arrays_must_match_the_card_in_number(memfd: int) -> None:
    with pytest.raises(SpecError, match="arrays is 0, expected 1, one per storage"):
        local_regions(card_of(storage_of(memfd)), [])


OWN = HostIdentity(hostname="a", boot_id="b1", pid_namespace="pid:[1]", pid=7)


@pytest.mark.parametrize(
    ("peer", "possible", "words"),
    [
        (replace(OWN, pid=8), True, "same host a and pid namespace"),
        (replace(OWN, hostname="b", pid=8), True, "same host b"),
        (replace(OWN, boot_id="b2"), False, "another host: boot id b2 of a, ours is b1"),
        (
            replace(OWN, pid_namespace="pid:[2]"),
            False,
            r"another container: pid namespace pid:\[2\], ours is pid:\[1\]",
        ),
        (None, False, "does not say on which host"),
    ],
)
def test_whether_a_peer_can_be_mapped(peer: HostIdentity | None, possible: bool, words: str) -> None:
    verdict, reason = can_map(peer, OWN)
    assert verdict is possible
    assert re.search(words, reason)


def test_this_process_can_map_its_own_kind() -> None:
    own = own_host_identity()
    assert own.pid == os.getpid()
    assert own.pid_namespace.startswith("pid:[")
    assert len(own.boot_id) == 36
    assert can_map(own, own_host_identity())[0]
