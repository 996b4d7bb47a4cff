import contextlib
import errno
import fcntl
import gc
import mmap
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from unikv.buffers import BASE_ALIGNMENT_BYTES, PoolStorage
from unikv.errors import LocalProtocolError, SpecError
from unikv.geometry import kv_geometry
from unikv.ids import GroupId, LayerId
from unikv.layer_spec import KVCacheLayerSpec, KVDtype, LayerOwner
from unikv.layout import build_layout

needs_cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")


@pytest.fixture(autouse=True, scope="module")
def cuda_is_up():
    """Open the CUDA context before any test, where there is a device: it keeps its descriptors for good."""
    if torch.cuda.is_available():
        torch.zeros(1, device="cuda").cpu()


def spec(layer_id, *, heads=2, head_dim=64, dtype=KVDtype.BFLOAT16, owner=LayerOwner.TARGET, **fields):
    return KVCacheLayerSpec(
        layer_id=LayerId(layer_id), owner=owner, num_kv_heads=heads, head_dim=head_dim, dtype=dtype, **fields
    )


def two_groups():
    """A target pool of 16384 bytes a slot, and a draft pool of 8192."""
    layers = [spec(0), spec(1, heads=1, owner=LayerOwner.DRAFT)]
    return build_layout(layers, tokens_per_block=32, max_seq_len=1024)


def shared_pool_group():
    """Two layer groups with equal slots: full attention and a window."""
    return build_layout([spec(0), spec(1, window=64)], tokens_per_block=32, max_seq_len=1024)


def open_descriptors():
    return {entry.name for entry in Path("/proc/self/fd").iterdir()}


def mapped_pools():
    lines = Path("/proc/self/maps").read_text().splitlines()
    return sorted(line.split()[4] for line in lines if "memfd:unikv-pool" in line)


@contextlib.contextmanager
def opened(layout, slots, **kwargs):
    pools = PoolStorage(layout, slots, **kwargs)
    try:
        yield pools
    finally:
        pools.close()


def test_one_storage_per_pool_zeroed_and_aligned():
    with opened(two_groups(), (5, 3)) as pools:
        assert [storage.numel() for storage in pools.storages] == [5 * 16384, 3 * 8192]
        assert [pools.slot_stride_bytes(i) for i in range(2)] == [16384, 8192]
        assert all(storage.dtype == torch.uint8 and storage.ndim == 1 for storage in pools.storages)
        assert all(storage.data_ptr() % BASE_ALIGNMENT_BYTES == 0 for storage in pools.storages)
        assert not any(storage.any() for storage in pools.storages)


def test_groups_of_one_pool_group_share_their_memory():
    layout = shared_pool_group()
    assert [group.pool_group for group in layout.groups] == [0, 0]
    with opened(layout, (4,)) as pools:
        assert len(pools.storages) == 1
        assert pools.storage_of(GroupId(0), 0) == pools.storage_of(GroupId(1), 0) == 0


def test_numpy_and_tensor_see_the_same_bytes():
    with opened(two_groups(), (5, 3)) as pools:
        pools.numpy(1)[8192 + 7] = 42
        assert pools.storages[1][8192 + 7] == 42
        view = pools.tensor(kv_geometry(two_groups(), LayerId(0), 5))
        view[3, 1, 0, 0, 0] = 1.0
        assert pools.numpy(0)[3 * 16384 + 8192 :][:2].tolist() == [0x80, 0x3F]


def test_an_export_names_the_memory():
    with opened(two_groups(), (5, 3)) as pools:
        exports = pools.exports()
        assert [export.size_bytes for export in exports] == [5 * 16384, 3 * 8192]
        assert {export.pid for export in exports} == {os.getpid()}
        for export in exports:
            assert Path(f"/proc/{export.pid}/fd/{export.fd}").stat().st_ino == export.inode
        assert len({export.inode for export in exports}) == 2


READER = """
import mmap, os, sys
pid, fd, inode, size, at = map(int, sys.argv[1:])
handle = os.open(f"/proc/{pid}/fd/{fd}", os.O_RDWR)
assert os.fstat(handle).st_ino == inode
memory = mmap.mmap(handle, size)
print(memory[at : at + 5].decode())
memory[at : at + 5] = b"reply"
"""


def test_another_process_maps_an_export_and_both_see_each_others_bytes():
    with opened(two_groups(), (5, 3)) as pools:
        memory = pools.numpy(0)
        at = 2 * 16384 + 100
        memory[at : at + 5] = np.frombuffer(b"hello", dtype=np.uint8)
        export = pools.exports()[0]
        numbers = [export.pid, export.fd, export.inode, export.size_bytes, at]
        done = subprocess.run(
            [sys.executable, "-c", READER, *map(str, numbers)], capture_output=True, text=True, timeout=60, check=False
        )
        assert (done.returncode, done.stdout.strip()) == (0, "hello"), done.stderr
        assert bytes(memory[at : at + 5]) == b"reply"


def test_nobody_can_shorten_or_lengthen_an_exported_pool():
    with opened(two_groups(), (5, 3)) as pools:
        export = pools.exports()[0]
        seals = fcntl.fcntl(export.fd, fcntl.F_GET_SEALS)
        assert seals == fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL
        for size in (0, 2 * export.size_bytes):
            with pytest.raises(PermissionError) as caught:
                os.truncate(f"/proc/self/fd/{export.fd}", size)
            assert caught.value.errno == errno.EPERM


def test_close_returns_descriptors_and_memory_and_can_be_repeated():
    gc.collect()
    descriptors, mappings = open_descriptors(), mapped_pools()
    pools = PoolStorage(two_groups(), (5, 3))
    assert len(mapped_pools()) == len(mappings) + 2
    pools.close()
    pools.close()
    assert open_descriptors() == descriptors
    assert mapped_pools() == mappings


def test_views_outlive_close_and_free_the_memory_with_the_last_one():
    gc.collect()
    mappings = mapped_pools()
    pools = PoolStorage(two_groups(), (5, 3))
    view = pools.tensor(kv_geometry(two_groups(), LayerId(0), 5))
    array = pools.numpy(0)
    view[4].fill_(1.0)
    pools.close()
    assert float(view[4].sum()) == 2 * 32 * 64 * 2
    assert len(mapped_pools()) == len(mappings) + 1
    del view
    assert array[-1] == 0x3F
    del array
    assert mapped_pools() == mappings


@pytest.mark.parametrize("use", [lambda p: p.storages, lambda p: p.numpy(0), lambda p: p.exports()])
def test_a_closed_storage_says_so(use):
    pools = PoolStorage(two_groups(), (5, 3))
    pools.close()
    with pytest.raises(LocalProtocolError, match="pool storage: state is 'closed', expected open"):
        use(pools)


def test_memory_that_cannot_be_had_is_refused_and_nothing_leaks():
    descriptors, mappings = open_descriptors(), mapped_pools()
    with pytest.raises(SpecError, match=r"pool storage on cpu: size_bytes is \d+, expected memory that is free"):
        PoolStorage(two_groups(), (5, 1 << 36))
    assert open_descriptors() == descriptors
    assert mapped_pools() == mappings


@pytest.mark.parametrize("device", ["tpu", "cpu:0", "cuda:x", "cuda:", "cuda:-1", "", "cuda:99"])
def test_unknown_devices_are_refused(device):
    with pytest.raises(SpecError, match="pool storage: device is"):
        PoolStorage(two_groups(), (5, 3), device=device)


def test_the_memory_is_not_inherited_by_programs_started_here():
    with opened(two_groups(), (5, 3)) as pools:
        assert not any(os.get_inheritable(export.fd) for export in pools.exports())


def test_a_mapping_is_writable_through_the_descriptor():
    with opened(two_groups(), (5, 3)) as pools:
        export = pools.exports()[0]
        with mmap.mmap(export.fd, export.size_bytes) as memory:
            memory[10] = 77
        assert pools.numpy(0)[10] == 77


@pytest.mark.gpu
@needs_cuda
def test_pools_on_cuda():
    layout = two_groups()
    with opened(layout, (5, 3), device="cuda:0") as pools:
        assert all(storage.is_cuda and not storage.any() for storage in pools.storages)
        assert all(storage.data_ptr() % BASE_ALIGNMENT_BYTES == 0 for storage in pools.storages)
        exports = pools.exports()
        assert [export.size_bytes for export in exports] == [storage.numel() for storage in pools.storages]
        assert len({export.handle for export in exports}) == 2 and all(len(e.handle) == 64 for e in exports)
        assert {export.offset_bytes for export in exports} == {0} and {len(e.device_uuid) for e in exports} == {32}
        view = pools.tensor(kv_geometry(layout, LayerId(0), 5))
        view[3, 1].fill_(1.0)
        raw = pools.storages[0].cpu().numpy()
        assert raw[: 3 * 16384 + 8192].sum() == 0
        assert (raw[3 * 16384 + 8192 : 4 * 16384].view(np.uint16) == 0x3F80).all()
        with pytest.raises(SpecError, match="device is 'cuda:0', expected cpu"):
            pools.numpy(0)
