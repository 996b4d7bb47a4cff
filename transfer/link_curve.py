"""CURVE on ZeroMQ links: keys from files, addresses that carry the listener's key, and who is let in.

Every link has one key pair, for listening and for connecting. A listener's address ends in its public key; whoever
connects refuses keys that are not in its own list, so that an address from a rendezvous that lies leads nowhere. A
listener lets in whoever proves to have the secret of a listed key, and nobody else.
"""

from __future__ import annotations

import logging
import os
import re
import stat
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import zmq
from zmq.auth import create_certificates, load_certificate
from zmq.auth.thread import ThreadAuthenticator
from zmq.utils import z85

from unikv.errors import ConfigError, explain

_log = logging.getLogger(__name__)

ZAP_DOMAIN: Final = b"unikv"
MAX_KEY_FILE_BYTES: Final = 64 * 1024
MAX_STRANGERS_LOGGED: Final = 256
CURVE_OVERHEAD_BYTES: Final = 64
"""What encryption may add to a frame; a listener's limit on frames allows for it."""

_MARK: Final = "#curve="
_WITH_KEY: Final = re.compile(r"(.*)#curve=([0-9a-f]{64})", re.DOTALL)
_NAME: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,99}")


@dataclass(frozen=True, slots=True, kw_only=True)
class CurveKeys:
    """What a link needs to prove who it is, and to know others. Keys are in Z85, 40 bytes each.

    Attributes:
        public, secret: this process's own pair; the secret is in no text this object makes.
        authorized: public keys of those who may connect to us and to whom we connect. Our own is in it only if listed.

    Raises:
        ConfigError: a key is malformed, the two are no pair, or nobody is authorized.
    """

    public: bytes
    secret: bytes = field(repr=False)
    authorized: frozenset[bytes]

    def __post_init__(self) -> None:
        for name, key in (("public", self.public), *(("authorized", key) for key in self.authorized)):
            _check_key(name, key)
        try:
            pair = len(self.secret) == 40 and zmq.curve_public(self.secret) == self.public
        except (ValueError, zmq.ZMQError):
            pair = False
        if not pair:
            want, cure = "the other half of the public key", "make both files together with unikv keygen"
            raise ConfigError(explain("CURVE keys", "secret", "a key that is not shown", want, cure))
        if not self.authorized:
            want, cure = "at least one public key", "copy the .key files of the other side's workers there"
            raise ConfigError(explain("CURVE keys", "authorized", "empty", want, cure))


def load_keys(public: Path, secret: Path, authorized: Path) -> CurveKeys:
    """Read a key pair and a directory of public keys (``*.key``), in the format of pyzmq's certificates.

    Raises:
        ConfigError: a file is missing, no key file, or a secret others may read.
    """
    own, _ = _read(public)
    _, hidden = _read(secret)
    if hidden is None:
        cure = "name the .key_secret file that unikv keygen made"
        raise ConfigError(explain("CURVE keys", "secret", str(secret), "a file with a secret-key", cure))
    mode = stat.S_IMODE(secret.stat().st_mode)
    if mode & 0o077:
        cure = f"chmod 600 {secret}"
        raise ConfigError(explain("CURVE keys", "mode of the secret file", oct(mode), "readable by you alone", cure))
    if not authorized.is_dir():
        cure = "name a directory with the public .key files of your peers"
        raise ConfigError(explain("CURVE keys", "authorized", str(authorized), "a directory", cure))
    listed = frozenset(_read(path)[0] for path in sorted(authorized.glob("*.key")))
    return CurveKeys(public=own, secret=hidden, authorized=listed)


def make_keys(folder: Path, name: str) -> tuple[Path, Path]:
    """Write a new pair ``NAME.key`` and ``NAME.key_secret`` into `folder`; the latter is readable by its owner alone.

    Raises:
        ConfigError: `name` is no file name, a file is there already, or `folder` cannot be written to.
    """
    if not _NAME.fullmatch(name):
        raise ConfigError(explain("CURVE keys", "name", name, "letters, digits, _, . and -", "choose another name"))
    public, secret = folder / f"{name}.key", folder / f"{name}.key_secret"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for path, mode in ((secret, 0o600), (public, 0o644)):
            # Claimed first, with its mode: a secret is never readable by others, not even for a moment.
            os.close(os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY, mode))
        create_certificates(folder, name)
    except FileExistsError as error:
        cure = "choose another name, or remove the old pair where it is no longer listed anywhere"
        raise ConfigError(explain("CURVE keys", "file", error.filename, "a new file", cure)) from None
    except OSError as error:
        cure = f"choose another directory ({error.strerror})"
        raise ConfigError(explain("CURVE keys", "directory", str(folder), "one that can be written to", cure)) from None
    return public, secret


def with_key(address: str, public: bytes) -> str:
    """Return a listener's address with its public key behind it."""
    return f"{address}{_MARK}{z85.decode(public).hex()}"


def split_key(address: str) -> tuple[str, bytes | None]:
    """Return an address as libzmq wants it, and the key that was behind it; None where there was none."""
    found = _WITH_KEY.fullmatch(address)
    return (found[1], z85.encode(bytes.fromhex(found[2]))) if found else (address, None)


def refusal(keys: CurveKeys | None, server_key: bytes | None) -> str:
    """Return why we do not connect to a listener with `server_key`, "" where we do."""
    if keys is None:
        return "it wants CURVE and we have no keys; set transfer.curve on both sides" if server_key else ""
    if server_key is None:
        return "its address has no CURVE key and we have keys; set transfer.curve on both sides"
    if server_key not in keys.authorized:
        return f"its CURVE key {server_key.decode()} is not authorized here; add its .key file if you know it"
    return ""


class GateKeeperManager:
    """Answers libzmq's questions about who may connect to the listeners of one context, in a thread of pyzmq's."""

    def __init__(self, context: zmq.Context[Any], keys: CurveKeys) -> None:
        self._keys = keys
        self._strangers: set[bytes] = set()
        self._authenticator = ThreadAuthenticator(context, log=_QUIET)
        self._authenticator.start()
        self._authenticator.configure_curve_callback(ZAP_DOMAIN.decode(), credentials_provider=self)

    def callback(self, domain: str, key: bytes) -> bool:
        """Return whether the owner of `key` (Z85) may connect; strangers are logged once each, up to a limit."""
        if key in self._keys.authorized:
            return True
        if key not in self._strangers and len(self._strangers) < MAX_STRANGERS_LOGGED:
            self._strangers.add(key)
            _log.warning(
                "%s: refused a peer whose CURVE key %s is not authorized", domain, key.decode("ascii", "replace")
            )
        return False

    def close(self) -> None:
        """End the thread. Idempotent; before the context is terminated."""
        self._authenticator.stop()


_QUIET: Final = logging.getLogger(f"{__name__}.zap")
_QUIET.setLevel(logging.CRITICAL)  # we say ourselves what matters, once


def _check_key(name: str, key: bytes) -> None:
    try:
        sound = len(key) == 40 and len(z85.decode(key)) == 32
    except Exception:  # whatever pyzmq raises for a malformed key
        sound = False
    if not sound:
        cure = "make keys with unikv keygen"
        raise ConfigError(explain("CURVE keys", name, f"{len(key)} bytes", "a key of 40 Z85 characters", cure))


def _read(path: Path) -> tuple[bytes, bytes | None]:
    try:
        if path.is_file() and path.stat().st_size <= MAX_KEY_FILE_BYTES:
            return load_certificate(path)
        why = "no file" if not path.is_file() else "too long"
    except (OSError, ValueError) as error:
        why = str(error.strerror if isinstance(error, OSError) else "no public-key in it")
    cure = "make it with unikv keygen"
    raise ConfigError(explain("CURVE keys", "file", f"{path} ({why})", "a key file", cure))
