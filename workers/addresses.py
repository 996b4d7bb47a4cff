"""Where a worker listens, and the address it gives to its peers.

Loopback unless told otherwise. Where the rendezvous is on a network, workers listen at the address of the interface
that leads there: whoever reaches the rendezvous can reach that network too.
"""

from __future__ import annotations

import fcntl
import ipaddress
import logging
import socket
import struct
from dataclasses import dataclass
from typing import Final

from unikv.errors import ConfigError, explain

_log = logging.getLogger(__name__)

LOOPBACK: Final = "127.0.0.1"
_GET_INTERFACE_ADDRESS: Final = 0x8915  # SIOCGIFADDR
_INTERFACE_NAME_BYTES: Final = 15
_CURE: Final = "set transfer.listen to the interface or address of this host that the other hosts reach"


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkAddress:
    """Where links of this process listen (an IP address) and what peers are told (an address or a host name)."""

    listen: str
    advertise: str

    @property
    def bind(self) -> str:
        """For `ZmqLink`: any free port."""
        return f"tcp://{bracketed(self.listen)}:*"


ON_LOOPBACK: Final = LinkAddress(listen=LOOPBACK, advertise=LOOPBACK)


def bracketed(host: str) -> str:
    """Return a host as it stands in an address: IPv6 in brackets."""
    return f"[{host}]" if ":" in host else host


def choose_address(
    rendezvous_host: str, *, listen: str | None = None, advertise: str | None = None, several_hosts: bool = False
) -> LinkAddress:
    """Decide where to listen, and log it.

    Args:
        rendezvous_host: name or address of the host of the rendezvous.
        listen: interface, address or name of this host; None to follow the route to the rendezvous.
        advertise: what peers are told instead, for hosts behind a forwarded port range or with a name in DNS.
        several_hosts: some peers are known to run elsewhere, so loopback will not do.

    Raises:
        ConfigError: `listen` is nothing of this host, nothing leads to the rendezvous, or only loopback does although
            there are several hosts.
    """
    where = _route_to(rendezvous_host) if listen is None else _own_address(listen)
    told = advertise or where
    if ipaddress.ip_address(where).is_unspecified and advertise is None:
        cure = "set transfer.advertise to the name or address of this host that the others reach"
        raise ConfigError(explain("transfer", "advertise", None, f"an address, as it listens at {where}", cure))
    if several_hosts and is_loopback(told):
        got = f"{told}, as {rendezvous_host} is loopback here" if listen is None else told
        raise ConfigError(explain("worker", "address", got, "one that other hosts reach", _CURE))
    why = f"the route to the rendezvous at {rendezvous_host}" if listen is None else f"transfer.listen {listen}"
    level = logging.DEBUG if is_loopback(where) and is_loopback(told) else logging.INFO  # on one host nobody wonders
    _log.log(level, "listening at %s, announced as %s (%s)", where, told, why)
    return LinkAddress(listen=where, advertise=told)


def is_loopback(host: str) -> bool:
    """Return whether `host` is a loopback address, or ``localhost``."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def _route_to(host: str) -> str:
    """Return our address on the way to `host`. Nothing is sent: connecting a datagram socket only looks for a route."""
    try:
        family, _, _, _, where = socket.getaddrinfo(host, 9, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect(where)
            address = str(probe.getsockname()[0])
    except OSError as error:
        want = "a host that this one has a route to"
        raise ConfigError(explain("rendezvous", "host", f"{host} ({error})", want, _CURE)) from None
    return LOOPBACK if address.startswith("127.") else address


def _own_address(listen: str) -> str:
    """Return the address that an interface, address or name of this host means."""
    address = _interface_address(listen)
    if address is None:
        try:
            address = str(socket.getaddrinfo(listen, 0, type=socket.SOCK_STREAM)[0][4][0])
            with socket.create_server((address, 0), family=socket.AF_INET6 if ":" in address else socket.AF_INET):
                pass
        except OSError as error:
            interfaces = ", ".join(name for _, name in socket.if_nameindex())
            want = f"an address of this host or one of its interfaces: {interfaces}"
            raise ConfigError(explain("transfer", "listen", f"{listen} ({error})", want, "name one of them")) from None
    return address


def _interface_address(name: str) -> str | None:
    """Return the IPv4 address of an interface; None where there is no such interface.

    Raises:
        ConfigError: it has no IPv4 address.
    """
    if name not in {other for _, other in socket.if_nameindex()}:
        return None
    request = struct.pack("256s", name.encode()[:_INTERFACE_NAME_BYTES])
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            reply = fcntl.ioctl(probe.fileno(), _GET_INTERFACE_ADDRESS, request)
        except OSError as error:
            want = "an interface with an IPv4 address"
            cure = "give it one, or set transfer.listen to an address"
            raise ConfigError(explain("transfer", "listen", f"{name} ({error.strerror})", want, cure)) from None
    return socket.inet_ntoa(reply[20:24])
