"""Where workers find each other: torch.distributed's TCPStore, which every launcher of ranks already speaks.

torch is imported when a store is opened or joined, not before: a launcher can reserve the address, start its workers
and import torch while they do the same.
"""

from __future__ import annotations

import socket
import threading
import time
from datetime import timedelta
from typing import TYPE_CHECKING, Final, Self
from urllib.parse import urlsplit

from unikv.errors import ConfigError, LinkBrokenError, LocalProtocolError, explain

if TYPE_CHECKING:
    from torch.distributed import TCPStore  # type: ignore[attr-defined]  # exported at run time only

_PREFIX: Final = "unikv"
_POLL_S: Final = 0.01
_LISTENER_POLL_S: Final = 0.1


class Rendezvous:
    """A small shared dictionary of addresses, by side and rank. A context manager: leaving it closes it."""

    def __init__(self, url: str, *, store: TCPStore | None = None, listener: socket.socket | None = None) -> None:
        self.url = url
        self._store, self._listener = store, listener

    @classmethod
    def reserve(cls, url: str = "tcp://127.0.0.1:0") -> Self:
        """Listen at `url` (port 0 takes a free one); whoever joins waits until `open`.

        Raises:
            ConfigError: `url` is no address of this host, or somebody uses it.
        """
        host, port = _parse(url)
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        try:
            listener = socket.create_server((host, port), family=family)
        except OSError as error:
            cure = f"choose another address or port ({error})"
            raise ConfigError(explain("rendezvous", "address", url, "a free address of this host", cure)) from None
        shown = f"[{host}]" if ":" in host else host
        return cls(f"tcp://{shown}:{listener.getsockname()[1]}", listener=listener)

    def open(self) -> Self:
        """Host the store at the reserved address, and nowhere else."""
        from torch.distributed import TCPStore  # type: ignore[attr-defined]  # noqa: PLC0415 - takes a second

        host, port = _parse(self.url)
        listener, self._listener = self._listener, None
        if listener is None:
            raise LocalProtocolError(explain("rendezvous", "state", "not reserved", "reserved", "open it once"))
        # Left to itself the store would listen on all interfaces, for anybody.
        self._store = TCPStore(
            host, port, is_master=True, wait_for_workers=False, use_libuv=True, master_listen_fd=listener.detach()
        )
        return self

    @classmethod
    def serve(cls, url: str = "tcp://127.0.0.1:0") -> Self:
        """Host a store in this process.

        Raises:
            ConfigError: as `reserve`.
        """
        return cls.reserve(url).open()

    @classmethod
    def join(cls, url: str, *, timeout_s: float = 60.0) -> Self:
        """Join the store at `url` (``tcp://HOST:PORT``), waiting for its host to come up.

        Raises:
            ConfigError: `url` is not such an address.
            LinkBrokenError: nobody hosts it within `timeout_s`.
        """
        from torch.distributed import TCPStore  # type: ignore[attr-defined]  # noqa: PLC0415 - takes a second

        host, port = _parse(url)
        if port == 0:
            cure = "pass the port its host listens at"
            raise ConfigError(explain("rendezvous", "address", url, "a port from 1", cure))
        try:
            _wait_for_listener(host, port, timeout_s)
            store = TCPStore(host, port, is_master=False, wait_for_workers=False, timeout=timedelta(seconds=timeout_s))
        except (RuntimeError, OSError) as error:
            text = explain("rendezvous", "address", url, "a store that answers", f"start its host first ({error})")
            raise LinkBrokenError(text) from None
        return cls(url, store=store)

    def announce(self, kind: str, side: str, rank: int, address: str) -> None:
        """Publish an address: `kind` is "transfer" or "control".

        Raises:
            LinkBrokenError: the store's host is gone.
        """
        try:
            self._open_store().set(_key(kind, side, rank), address)
        except RuntimeError as error:
            raise self._lost(error) from None

    def known(self, kind: str, side: str, ranks: int) -> dict[int, str]:
        """Return the addresses announced so far for ranks ``0 .. ranks-1`` of a side, by rank.

        Raises:
            LinkBrokenError: the store's host is gone.
        """
        store = self._open_store()
        try:
            keys = {rank: _key(kind, side, rank) for rank in range(ranks)}
            return {rank: store.get(key).decode() for rank, key in keys.items() if store.check([key])}
        except RuntimeError as error:
            raise self._lost(error) from None

    def find(self, kind: str, side: str, ranks: int, *, timeout_s: float = 60.0) -> tuple[str, ...]:
        """Return the addresses of ranks ``0 .. ranks-1`` of a side, waiting until all are announced.

        Raises:
            LinkBrokenError: some rank did not announce itself within `timeout_s`, or the store's host is gone.
        """
        # Asked again and again: the store's own wait logs a warning to stderr whenever its time is up.
        deadline_s, pause = time.monotonic() + timeout_s, threading.Event()
        while len(found := self.known(kind, side, ranks)) < ranks:
            if time.monotonic() > deadline_s:
                missing = ", ".join(str(rank) for rank in range(ranks) if rank not in found)
                want = f"announced within {timeout_s:g} s"
                text = explain(f"{side} rank(s) {missing}", f"{kind} address", "unknown", want, "look at their logs")
                raise LinkBrokenError(text)
            pause.wait(_POLL_S)
        return tuple(found[rank] for rank in range(ranks))

    def close(self) -> None:
        """Leave the store; a hosted one ends for everybody. Idempotent."""
        self._store = None  # torch has no other way to end it
        if self._listener is not None:
            self._listener.close()
            self._listener = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_exc: object) -> None:
        self.close()

    def _open_store(self) -> TCPStore:
        if self._store is None:
            raise LocalProtocolError(explain("rendezvous", "state", "not open", "open", "open or join it first"))
        return self._store

    def _lost(self, error: RuntimeError) -> LinkBrokenError:
        text = explain("rendezvous", "address", self.url, "a store that answers", "look for why its host ended")
        return LinkBrokenError(f"{text} ({type(error).__name__})")


def host_of(url: str) -> str:
    """Return the host in ``tcp://HOST:PORT``; IPv6 without brackets. Raises ConfigError as `Rendezvous.join`."""
    return _parse(url)[0]


def _key(kind: str, side: str, rank: int) -> str:
    return f"{_PREFIX}/{kind}/{side}/{rank}"


def _wait_for_listener(host: str, port: int, timeout_s: float) -> None:
    """Wait until somebody listens there; OSError once the time is over.

    The store would wait as well, but deaf to signals, and with warnings and stack traces on stderr.
    """
    deadline_s, pause = time.monotonic() + timeout_s, threading.Event()
    while True:
        try:
            socket.create_connection((host, port), timeout=max(_POLL_S, deadline_s - time.monotonic())).close()
        except OSError:
            if time.monotonic() > deadline_s:
                raise
            pause.wait(_LISTENER_POLL_S)
        else:
            return


def _parse(url: str) -> tuple[str, int]:
    try:
        parts = urlsplit(url)
        host, port = parts.hostname, parts.port
    except ValueError:
        host, port = None, None
    if not url.startswith("tcp://") or not host or port is None:
        raise ConfigError(explain("rendezvous", "address", url, "tcp://HOST:PORT", "pass --rendezvous"))
    return host, port
