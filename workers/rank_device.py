"""What a rank's device means for its parts: which one it is, how peers map its memory, what copies it."""

from __future__ import annotations

from transfer.copier import Copier
from transfer.copy_host import HostCopier
from transfer.device_bytes import DeviceBytes
from transfer.hello import MemoryExport, RankCard
from transfer.ipc_memory import CUDA, device_number, reachable_devices
from transfer.mapped_storage import MEMFD
from transfer.paths import Regions
from transfer.peer_memory import local_regions
from unikv.buffers import CudaExport, MemfdExport, PoolStorage, device_count
from workers.config import SideConfig

CPU = "cpu"


def rank_device(config: SideConfig, rank: int) -> str:
    """Return the device of a rank on this machine: "cpu" or "cuda:<number>"."""
    return config.device_of(rank, device_count() if config.device != CPU else 0)


def rank_reach(device: str) -> tuple[str, ...]:
    """Return the devices whose memory kernels on `device` can write, for the rank's card; none for a CPU."""
    return () if device == CPU else reachable_devices(device_number(device))


def make_copier(device: str, *, timed: bool = False, threads: int = 1) -> Copier:
    """Return a copier for pools on `device`; on CUDA its kernel is compiled or found in CuPy's cache.

    Args:
        device: "cpu" or "cuda:<number>".
        timed: measure copies on the device, where there is one.
        threads: threads that share a copy between host pools.

    Raises:
        CopyError: the device cannot run it.
    """
    if device == CPU:
        return HostCopier(threads=threads)
    from transfer.copy_cupy import CudaCopier  # noqa: PLC0415 - CuPy is an extra

    return CudaCopier(device_number(device), timed=timed)


def memory_export(export: MemfdExport | CudaExport) -> MemoryExport:
    """Return what a card says of one storage of our manager."""
    if isinstance(export, CudaExport):
        return MemoryExport(
            kind=CUDA,
            pid=export.pid,
            handle=export.handle,
            offset_bytes=export.offset_bytes,
            device=export.device_uuid,
        )
    return MemoryExport(kind=MEMFD, pid=export.pid, fd=export.fd, inode=export.inode)


def pool_regions(card: RankCard, pools: PoolStorage) -> Regions:
    """Return the regions of our manager's pools, which they keep alive."""
    if pools.device.type == CPU:
        return local_regions(card, [pools.numpy(storage) for storage in range(len(card.storages))])
    return local_regions(card, [DeviceBytes(pointer=s.data_ptr(), size=s.numel(), keep=s) for s in pools.storages])
