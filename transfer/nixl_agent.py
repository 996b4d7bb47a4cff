"""NIXL's agent as the carrier needs it: registered host memory, and writes into a peer's."""

from __future__ import annotations

import logging
from collections.abc import Callable
from importlib import import_module
from importlib.util import find_spec
from secrets import token_hex
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from unikv.errors import ConfigError, LinkBrokenError, RemoteProtocolError, explain

_MODULES: Final = ("nixl_cu13", "nixl_cu12", "nixl")
_BACKEND: Final = "UCX"
_PROGRESS_CALLS: Final = 8
"""Calls of one turn: where data comes over TCP, each takes some more of it off the socket."""
_CURE: Final = "pip install 'unikv[nixl]', or set transfer.path: auto"


def why_no_nixl() -> str:
    """Return why this process cannot use NIXL, "" where its package is installed. Imports nothing."""
    return "" if _module() else f"no NIXL package ({', '.join(_MODULES)}) is installed"


def require_nixl() -> None:
    """Refuse a path that needs NIXL where it is not installed.

    Raises:
        ConfigError: with the cure.
    """
    if reason := why_no_nixl():
        raise ConfigError(explain("transfer", "path", "nixl", f"another path, since {reason}", _CURE))


def _module() -> str:
    return next((name for name in _MODULES if find_spec(name) is not None), "")


def _api() -> Any:
    require_nixl()
    complaining = logging.raiseExceptions
    api = import_module(f"{_module()}._api")
    logging.raiseExceptions = complaining  # its import turns that off for the whole process
    logger = logging.getLogger("nixl")  # which writes to stdout, where only results belong
    logger.handlers.clear()
    logger.propagate = True
    logger.setLevel(logging.WARNING)
    return api


class NixlSession:
    """One NIXL agent over UCX, and the host memory registered with it. Used by one thread."""

    def __init__(self, name: str, *, progress_thread: bool = False) -> None:
        """Start an agent; takes up to a second.

        Args:
            name: for logs; a random suffix makes it unique.
            progress_thread: whether NIXL works in a thread of its own, which spins.

        Raises:
            ConfigError: NIXL is not installed, or cannot start here.
        """
        api = _api()
        config = api.nixl_agent_config(enable_prog_thread=progress_thread, backends=[_BACKEND])
        try:
            self._agent: Any = api.nixl_agent(f"{name}-{token_hex(8)}", config)
        except Exception as error:  # whatever its bindings raise
            want = f"an agent that starts ({error!r})"
            raise ConfigError(explain("transfer", "path", "nixl", want, _CURE)) from error
        self._registered: dict[int, tuple[NDArray[np.uint8], Any]] = {}
        self._writes: list[NixlWrite] = []

    def memory(self, size_bytes: int) -> NDArray[np.uint8]:
        """Return registered memory, zeroed, which lives until `forget` or `close`."""
        return self.register(np.zeros(size_bytes, np.uint8))

    def register(self, array: NDArray[np.uint8]) -> NDArray[np.uint8]:
        """Register host memory of somebody else's making; return it. It lives until `forget` or `close`."""
        registration = self._agent.register_memory([(address_of(array), array.size, 0, "")], "DRAM")
        self._registered[id(array)] = array, registration
        return array

    def forget(self, array: NDArray[np.uint8]) -> None:
        """Give registered memory up; no write from or into it may be under way."""
        _, registration = self._registered.pop(id(array))
        self._agent.deregister_memory(registration)

    def describe(self, array: NDArray[np.uint8]) -> bytes:
        """Return what a peer needs to write into `array`."""
        _, registration = self._registered[id(array)]
        described: bytes = self._agent.get_partial_agent_metadata(registration, True, [_BACKEND])
        return described

    def meet(self, described: bytes) -> str:
        """Take what a peer's `describe` returned; return the name of its agent.

        Raises:
            RemoteProtocolError: it is not that.
        """
        try:
            name = self._agent.add_remote_agent(described)
        except Exception as error:
            got, want = f"{len(described)} bytes", f"the metadata of a NIXL agent ({error!r})"
            raise RemoteProtocolError(explain("ask", "landing", got, want, "run the same release of NIXL")) from error
        return name.decode() if isinstance(name, bytes) else str(name)

    def part(self, name: str) -> None:
        """Forget a peer's agent."""
        try:
            self._agent.remove_remote_agent(name)
        except Exception as error:
            logging.getLogger(__name__).debug("agent %s was forgotten already: %r", name, error)

    def write(self, name: str, source: NDArray[np.uint8], size_bytes: int, address: int) -> NixlWrite:
        """Start to write the first bytes of `source` to `address` of the peer.

        Raises:
            LinkBrokenError: NIXL refuses.
        """
        runs = [np.array([[start, size_bytes, 0]], np.uint64) for start in (address_of(source), address)]
        return self.write_runs(name, runs[0], runs[1])

    def write_runs(self, name: str, source: NDArray[np.uint64], target: NDArray[np.uint64]) -> NixlWrite:
        """Start to write many runs with one request.

        Args:
            name: the peer's agent.
            source, target: ``[run, (address, bytes, 0)]`` here and there, in registered memory.

        Raises:
            LinkBrokenError: NIXL refuses.
        """
        try:
            local = self._agent.get_xfer_descs(source, "DRAM")
            remote = self._agent.get_xfer_descs(target, "DRAM")
            handle = self._agent.initialize_xfer("WRITE", local, remote, name)
            write = NixlWrite(handle, self._agent.transfer(handle), self._agent.check_xfer_state)
        except Exception as error:
            raise LinkBrokenError(f"NIXL cannot write to {name}: {error!r}") from error
        self._writes = [known for known in self._writes if known.open] + [write]
        return write

    def progress(self) -> None:
        """Give NIXL a chance to go on with what peers want of us."""
        for _ in range(_PROGRESS_CALLS):
            self._agent.get_new_notifs()

    def close(self) -> None:
        """Give everything up; writes under way are cancelled as far as that is possible. Idempotent."""
        for write in self._writes:
            write.abandon()
        self._writes.clear()
        for array, _ in list(self._registered.values()):
            self.forget(array)
        self._agent = None


class NixlWrite:
    """A write under way."""

    def __init__(self, handle: Any, state: str, check: Callable[[Any], str]) -> None:
        self._handle, self._state, self._check = handle, state, check

    @property
    def open(self) -> bool:
        """Whether it is under way."""
        return self._handle is not None

    def done(self) -> bool:
        """Return whether the bytes are in the peer's memory.

        Raises:
            LinkBrokenError: they are not, and nothing reads or writes for this write any more.
        """
        if self._handle is None:
            return self._state == "DONE"
        try:
            if self._state == "PROC":
                self._state = self._check(self._handle)
            if self._state == "PROC":
                return False
            self._release()
        except Exception as error:
            self._state = "ERR"
            self._release()
            raise LinkBrokenError(f"a NIXL write failed: {error!r}") from error
        if self._state != "DONE":
            raise LinkBrokenError(f"a NIXL write ended with {self._state}")
        return True

    def abandon(self) -> None:
        """Let go of it, whatever becomes of the bytes."""
        self._state = "ERR"
        self._release()

    def _release(self) -> None:
        handle, self._handle, self._check = self._handle, None, _nothing
        try:
            if handle is not None:
                handle.release()
        except Exception as error:
            logging.getLogger(__name__).debug("a NIXL write was not released: %r", error)


def _nothing(_handle: Any) -> str:
    return "ERR"


def address_of(array: NDArray[np.uint8]) -> int:
    """Return where the bytes of `array` begin."""
    address: int = array.__array_interface__["data"][0]
    return address
