"""The two kinds of ZeroMQ socket a link has, with every option that is not libzmq's default."""

from __future__ import annotations

from typing import Final

import zmq

from transfer.link_curve import CURVE_OVERHEAD_BYTES, ZAP_DOMAIN, CurveKeys
from transfer.link_guard import MAX_FRAME_BYTES
from unikv.errors import ConfigError, explain

HEARTBEAT_INTERVAL_S: Final = 5.0
HEARTBEAT_TIMEOUT_S: Final = 30.0
"""A peer whose I/O thread has been silent for so long is gone (frozen process, cut cable)."""
HANDSHAKE_TIMEOUT_S: Final = 10.0
RECEIVE_QUEUE_MESSAGES: Final = 4096
"""Messages of one peer that may wait for a poll before libzmq stops reading from it."""
LISTEN_BACKLOG: Final = 1024
HANDSHAKE_BYTES: Final = 4096
"""Longest frame a peer may send on a connection we made: handshakes and heartbeats, no message."""
LISTENABLE: Final = ("tcp://", "ipc:///", "ipc://@")
"""Addresses that mean the same in every process; a relative path does not, and libzmq makes one of ``ipc://*``."""

Socket = zmq.Socket[bytes]
Context = zmq.Context[Socket]


def listen(context: Context, bind: str, keys: CurveKeys | None, silence_s: float | None) -> tuple[Socket, str]:
    """Return a listening ROUTER and the address it can be reached at."""
    router = context.socket(zmq.ROUTER)
    _keep_alive(router, silence_s)
    router.ipv6 = "[" in bind
    router.rcvhwm = RECEIVE_QUEUE_MESSAGES
    router.backlog = LISTEN_BACKLOG
    router.maxmsgsize = MAX_FRAME_BYTES if keys is None else MAX_FRAME_BYTES + CURVE_OVERHEAD_BYTES
    if keys is not None:
        router.curve_server, router.zap_domain = True, ZAP_DOMAIN
        router.curve_publickey, router.curve_secretkey = keys.public, keys.secret
    try:
        if not bind.startswith(LISTENABLE):
            raise zmq.ZMQError(zmq.EINVAL)
        router.bind(bind)
    except zmq.ZMQError as error:
        router.close(linger=0)
        want = "a free address such as tcp://127.0.0.1:* or ipc:///PATH"
        cure = "bind to an address of this host that nobody uses"
        raise ConfigError(explain("link", f"bind address ({error.strerror})", bind, want, cure)) from None
    return router, router.get_string(zmq.LAST_ENDPOINT)


def make_dealer(context: Context, routing_id: bytes, silence_s: float | None) -> Socket:
    """Return a DEALER that connects once and never receives."""
    dealer = context.socket(zmq.DEALER)
    _keep_alive(dealer, silence_s)
    dealer.routing_id = routing_id
    dealer.reconnect_ivl = -1
    dealer.sndhwm = 0  # callers bound what they queue; a send never blocks
    dealer.rcvhwm = 1  # nobody answers on this connection
    dealer.maxmsgsize = HANDSHAKE_BYTES
    return dealer


def with_host(address: str, host: str) -> str:
    """Return a tcp address with another host and the same port."""
    shown = f"[{host}]" if ":" in host else host
    return f"tcp://{shown}:{address.rpartition(':')[2]}"


def _keep_alive(socket: Socket, silence_s: float | None) -> None:
    silence_s = HEARTBEAT_TIMEOUT_S if silence_s is None else silence_s
    socket.linger = 0
    socket.heartbeat_ivl = max(1, min(int(HEARTBEAT_INTERVAL_S * 1000), int(silence_s * 1000 / 6)))
    socket.heartbeat_timeout = int(silence_s * 1000)
    socket.heartbeat_ttl = int(silence_s * 1000)
    socket.handshake_ivl = int(HANDSHAKE_TIMEOUT_S * 1000)
