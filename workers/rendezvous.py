"""Where workers find each other: torch.distributed's TCPStore, which every launcher of ranks already speaks."""

from __future__ import annotations

import logging
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
        try:
            self._store.wait(keys, timedelta(seconds=timeout_s))
            return tuple(self._store.get(key).decode() for key in keys)
        except RuntimeError as error:
            missing = [rank for rank, key in enumerate(keys) if not self._has(key)]
            text = explain(
                f"{side} ranks {missing}", "address", "not announced", f"within {timeout_s} s", "see their log"
            )
            raise LinkBrokenError(f"{text} ({type(error).__name__})") from None

    def _has(self, key: str) -> bool:
        try:
            return bool(self._store.check([key]))
        except RuntimeError:
            return False


def _parse(url: str) -> tuple[str, int]:
    try:
        parts = urlsplit(url)
        host, port = parts.hostname, parts.port
    except ValueError:
        host, port = None, None
    if not url.startswith("tcp://") or not host or not port:
        raise ConfigError(explain("rendezvous", "address", url, "tcp://HOST:PORT", "pass --rendezvous"))
    return host, port
