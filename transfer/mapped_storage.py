"""One allocation of a peer on the same host, mapped into this process.

The peer keeps each storage in an anonymous file (memfd) and tells its process id, descriptor and inode. On Linux
``/proc/<pid>/fd/<fd>`` opens that very file again for a process of the same user, so nothing has to be handed over.
Two things are checked after opening, because process ids and descriptors are recycled and a card is only a claim: the
file is a memfd with the announced inode, and it has the announced size.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import stat
import weakref
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from transfer.hello import MemoryExport, StorageCard
from unikv.errors import IncompatiblePeerError, LinkBrokenError, LocalProtocolError, RemoteProtocolError, explain

MEMFD: Final = "memfd"
"""The kind of export this module maps."""


class MappedStorage:
    """One storage of a peer, mapped shared and writable. Holds no descriptor.

    Arrays taken from `array` may outlive `close`: the mapping goes when the last of them does, so that no reader ever
    meets unmapped memory. Nothing is copied; what is written here, the peer sees.
    """

    def __init__(self, storage: StorageCard, *, thing: str = "storage") -> None:
        """Map `storage`; every page is mapped in at once (its memory is the exporter's already).

        Args:
            storage: the peer's card of one storage.
            thing: what error messages call it.

        Raises:
            RemoteProtocolError: the card offers no memfd, or the file is not what the card says.
            LinkBrokenError: the process or its descriptor is gone, or names another file by now.
            IncompatiblePeerError: the operating system forbids it (another user, a sealed file, memory limits).
        """
        export = storage.export
        if export is None or export.kind != MEMFD:
            got = None if export is None else export.kind
            raise RemoteProtocolError(explain(thing, "export", got, MEMFD, "use a staged path to this peer"))
        fd = _open(export, thing)
        try:
            _check_file(fd, export, storage.size_bytes, thing)
            self._array: NDArray[np.uint8] | None = _map_shared(fd, storage.size_bytes, thing)
        finally:
            os.close(fd)
        self._thing = thing

    @property
    def array(self) -> NDArray[np.uint8]:
        """The bytes, one-dimensional and writable.

        Raises:
            LocalProtocolError: the mapping is closed.
        """
        if self._array is None:
            raise LocalProtocolError(explain(self._thing, "state", "closed", "open", "map the storage again"))
        return self._array

    def close(self) -> None:
        """Give the mapping up; it ends now, or with the last array taken from it. Idempotent, never fails."""
        self._array = None


def _open(export: MemoryExport, thing: str) -> int:
    path = f"/proc/{export.pid:d}/fd/{export.fd:d}"
    try:
        # Not blocking and not a terminal: a wrong card may name a pipe or a device, which is refused right after.
        return os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOCTTY)
    except (FileNotFoundError, ProcessLookupError) as error:
        cure = "the peer is gone or closed its pool; connect to its next incarnation"
        raise LinkBrokenError(explain(thing, "export", path, "an open descriptor of a live process", cure)) from error
    except PermissionError as error:
        want = "a descriptor this user may open"
        cure = "run both workers as one user, or use a staged path"
        raise IncompatiblePeerError(explain(thing, "export", path, want, cure), mismatches=[str(error)]) from error
    except OSError as error:
        cure = "correct the card, or use a staged path"
        raise RemoteProtocolError(explain(thing, "export", f"{path} ({error})", "a memfd", cure)) from error


def _check_file(fd: int, export: MemoryExport, size_bytes: int, thing: str) -> None:
    """Refuse everything but the memfd that the card means: a forged card must not make us write into other files."""
    status = os.fstat(fd)
    name = str(Path(f"/proc/self/fd/{fd:d}").readlink())
    if not (stat.S_ISREG(status.st_mode) and name.startswith("/memfd:")):
        raise RemoteProtocolError(explain(thing, "export", name, "a memfd", "correct the card of that peer"))
    if status.st_ino != export.inode:
        cure = "the peer is gone and its descriptor names another file; connect to its next incarnation"
        raise LinkBrokenError(explain(thing, "inode", status.st_ino, f"{export.inode} as announced", cure))
    if status.st_size != size_bytes or size_bytes < 1:
        cure = "correct the card of that peer"
        raise RemoteProtocolError(explain(thing, "size in bytes", status.st_size, f"{size_bytes} as announced", cure))


_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_ssize_t]
_libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
_MAP_FAILED: Final = ctypes.c_void_p(-1).value


def _map_shared(fd: int, size_bytes: int, thing: str) -> NDArray[np.uint8]:
    """Return the file as an array whose memory is unmapped when the last view of it is gone.

    Calls the C library, because the mmap object of the standard library keeps a descriptor of its own and cannot be
    closed while views exist.
    """
    access, flags = mmap.PROT_READ | mmap.PROT_WRITE, mmap.MAP_SHARED | mmap.MAP_POPULATE
    address = _libc.mmap(None, size_bytes, access, flags, fd, 0)
    if address == _MAP_FAILED:
        reason = os.strerror(ctypes.get_errno())
        cure = "look at this process's memory limits and the peer's seals, or use a staged path"
        text = explain(thing, "mapping", f"{size_bytes} bytes: {reason}", "shared and writable", cure)
        raise IncompatiblePeerError(text, mismatches=[reason])
    owner: Any = (ctypes.c_uint8 * size_bytes).from_address(address)
    ending = weakref.finalize(owner, _libc.munmap, address, size_bytes)
    ending.atexit = False  # At exit other threads may still be copying; the operating system unmaps after them.
    array: NDArray[np.uint8] = np.frombuffer(owner, np.uint8)
    return array
