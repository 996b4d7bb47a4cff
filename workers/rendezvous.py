"""Where workers find each other: torch.distributed's TCPStore, which every launcher of ranks already speaks."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Sequence
from datetime import timedelta
from typing import Final, Self
from urllib.parse import urlsplit

from torch.distributed import TCPStore  # type: ignore[attr-defined]  # exported at run time only

from unikv.errors import ConfigError, LinkBrokenError, explain

_log = logging.getLogger(__name__)

_PREFIX: Final = "unikv"
_POLL_S: Final = 0.05


class Rendezvous:
    """A small shared dictionary of addresses, by side and rank."""

    def __init__(self, store: TCPStore, url: str) -> None:
        self._store = store
        self.url = url

    @classmethod
    def serve(cls, host: str = "127.0.0.1", port: int = 0) -> Self:
        """Host the store in this process; port 0 takes a free one.

        Raises:
            ConfigError: the address cannot be bound.
        """
        try:
            store = TCPStore(host, port, is_master=True, wait_for_workers=False, use_libuv=True)
        except (RuntimeError, OSError) as error:
            cure = "choose another address or port"
            raise ConfigError(explain("rendezvous", "address", f"{host}:{port}", "free", f"{cure} ({error})")) from None
        return cls(store, f"tcp://{host}:{store.port}")

    @classmethod
    def join(cls, url: str, *, timeout_s: float = 60.0) -> Self:
        """Join the store at `url` (``tcp://HOST:PORT``), waiting for its host to come up.

        Raises:
            ConfigError: `url` is not such an address.
            LinkBrokenError: nobody hosts it within `timeout_s`.
        """
        host, port = _parse(url)
        try:
            store = TCPStore(host, port, is_master=False, wait_for_workers=False, timeout=timedelta(seconds=timeout_s))
        except (RuntimeError, OSError) as error:
            text = explain("rendezvous", "address", url, "a store that answers", f"start its host first ({error})")
            raise LinkBrokenError(text) from None
        return cls(store, url)

    def announce(self, kind: str, side: str, rank: int, address: str) -> None:
        """Publish an address: `kind` is "transfer" or "control"."""
        self._store.set(f"{_PREFIX}/{kind}/{side}/{rank}", address)

    def find(self, kind: str, side: str, ranks: int, *, timeout_s: float = 60.0) -> tuple[str, ...]:
        """Return the addresses of ranks ``0 .. ranks-1`` of a side, waiting until all are announced.

        Raises:
            LinkBrokenError: some rank did not announce itself within `timeout_s`.
        """
        keys = [f"{_PREFIX}/{kind}/{side}/{rank}" for rank in range(ranks)]
        # Asked again and again: the store's own wait logs a warning to stderr whenever its time is up.
        deadline_s, pause = time.monotonic() + timeout_s, threading.Event()
        try:
            while not self._store.check(keys):
                if time.monotonic() > deadline_s:
                    missing = [rank for rank, key in enumerate(keys) if not self._store.check([key])]
                    raise LinkBrokenError(_unknown(side, missing, timeout_s))
                pause.wait(_POLL_S)
            return tuple(self._store.get(key).decode() for key in keys)
        except RuntimeError as error:
            raise LinkBrokenError(f"{_unknown(side, range(ranks), timeout_s)} ({error})") from None


def _unknown(side: str, ranks: Sequence[int], timeout_s: float) -> str:
    numbers = ", ".join(map(str, ranks))
    want = f"announced within {timeout_s} s"
    return explain(f"{side} rank(s) {numbers}", "address", "unknown", want, "look at their logs")


def _parse(url: str) -> tuple[str, int]:
    try:
        parts = urlsplit(url)
        host, port = parts.hostname, parts.port
    except ValueError:
        host, port = None, None
    if not url.startswith("tcp://") or not host or not port:
        raise ConfigError(explain("rendezvous", "address", url, "tcp://HOST:PORT", "pass --rendezvous"))
    return host, port
