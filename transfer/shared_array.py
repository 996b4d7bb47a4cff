"""Host memory that a peer on the same host can map, for engines that allocate their own pools."""

from __future__ import annotations

import fcntl
import os
from types import TracebackType
from typing import Self

import numpy as np
from numpy.typing import NDArray

from transfer.hello import MemoryExport, StorageCard
from transfer.mapped_storage import MEMFD, MappedStorage
from unikv.errors import LocalProtocolError, SpecError, explain


class SharedArray:
    """Zeroed shared memory without a name in any file system; make it with `shared_array`.

    Tensors may be laid over `array` (``torch.frombuffer(memory.array, dtype=...)``) and share its memory. After `close`
    they stay usable, and the memory goes with the last of them; peers can no longer find it.
    """

    def __init__(self, fd: int, array: NDArray[np.uint8]) -> None:
        """Take over descriptor `fd` of a memfd and the mapping of all of it."""
        self._fd: int | None = fd
        self._array = array

    @property
    def array(self) -> NDArray[np.uint8]:
        """The bytes, one-dimensional and writable, aligned to a memory page."""
        return self._array

    @property
    def size_bytes(self) -> int:
        """Bytes of the memory."""
        return self._array.size

    @property
    def address(self) -> int:
        """Address of the first byte in this process."""
        return int(self._array.__array_interface__["data"][0])

    def export(self) -> MemoryExport:
        """Return how a peer maps the memory; valid while this process lives and the array is open.

        Raises:
            LocalProtocolError: it is closed.
        """
        if self._fd is None:
            cure = "close it after the endpoints that use it"
            raise LocalProtocolError(explain("shared array", "state", "closed", "open", cure))
        return MemoryExport(kind=MEMFD, pid=os.getpid(), fd=self._fd, inode=os.fstat(self._fd).st_ino)

    def close(self) -> None:
        """Close the descriptor, so that nobody maps the memory any more. Idempotent; arrays stay usable."""
        fd, self._fd = self._fd, None
        if fd is not None:
            os.close(fd)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def shared_array(size_bytes: int) -> SharedArray:
    """Return `size_bytes` of zeroed memory that peers of the same user on this host can map.

    Raises:
        SpecError: fewer than one byte, or the system does not give the memory.
    """
    if size_bytes < 1:
        raise SpecError(explain("shared array", "size_bytes", size_bytes, ">= 1", "ask for the bytes of the pool"))
    fd = os.memfd_create("unikv-own", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        os.ftruncate(fd, size_bytes)
        # A peer that maps the memory must not be able to shorten it under us: touching the lost part is a SIGBUS.
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL)
        export = MemoryExport(kind=MEMFD, pid=os.getpid(), fd=fd, inode=os.fstat(fd).st_ino)
        storage = MappedStorage(StorageCard(size_bytes=size_bytes, export=export), thing="shared array")
        return SharedArray(fd, storage.array)
    except (OSError, OverflowError) as error:
        os.close(fd)
        cure = f"choose a smaller pool ({error})"
        raise SpecError(explain("shared array", "size_bytes", size_bytes, "memory that is free", cure)) from error
    except BaseException:
        os.close(fd)
        raise
