"""The socket files of ``ipc:///PATH`` addresses: libzmq takes one over from whoever uses it, and leaves it behind."""

from __future__ import annotations

import socket
from pathlib import Path
from typing import Self

from unikv.errors import ConfigError, explain

_FILE_PREFIX = "ipc:///"


class SocketFileManager:
    """Removes the socket file of one listener, unless another listener has put its own there since."""

    def __init__(self, path: Path | None) -> None:
        self._path = path
        self._inode = path.stat().st_ino if path is not None else 0

    @classmethod
    def of(cls, address: str) -> Self:
        """Return the manager of the file a listener at `address` has just made; one without a file for the rest."""
        return cls(_file_of(address))

    def remove(self) -> None:
        """Remove the file if it is still ours."""
        if self._path is not None and self._path.exists() and self._path.stat().st_ino == self._inode:
            self._path.unlink(missing_ok=True)


def check_unused(address: str) -> None:
    """Refuse an address whose socket file somebody listens on; a file that a dead process left is no obstacle.

    Raises:
        ConfigError: the address is in use.
    """
    path = _file_of(address)
    if path is None or not path.is_socket():
        return
    with socket.socket(socket.AF_UNIX) as probe:
        if probe.connect_ex(str(path)) == 0:
            cure = "choose another path, or stop the process that listens there"
            raise ConfigError(explain("link", "bind address", address, "an address nobody uses", cure))


def _file_of(address: str) -> Path | None:
    return Path("/" + address.removeprefix(_FILE_PREFIX)) if address.startswith(_FILE_PREFIX) else None
