"""Links over ZeroMQ, between processes and hosts.

A link receives on one ROUTER socket and sends on one DEALER socket per address it connected to. libzmq would reconnect
behind our back and lose what was in flight; a link never lets it: a connection is made once, and when it breaks, the
peer is gone. Until a connection stands, messages wait here and not in libzmq.

========================  =====================================================================================
event of the DEALER       what the link makes of it
========================  =====================================================================================
handshake succeeded       the connection stands; what waited is sent
connect failed            another attempt a moment later, until the connect time-out
handshake broken off      the same: a listener that is just dying looks so
handshake refused         the peer is gone: what listens there speaks something else
disconnected              the peer is gone: it closed, died, or did not answer heartbeats
========================  =====================================================================================

Heartbeats are sent and answered by the I/O threads of libzmq: a peer that computes for minutes is not taken for dead.
"""

from __future__ import annotations

import contextlib
import math
import os
import re
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

import zmq
from zmq.utils.monitor import recv_monitor_message

from transfer.link import Frame, LinkEvent, PeerGone, Received, SendTicket
from transfer.link_curve import (
    CurveKeys,
    GateKeeperManager,
    refusal,
    split_key,
    with_key,
)
from transfer.link_guard import (
    CLOSE_TIMEOUT_S,
    CONNECT_TIMEOUT_S,
    MAX_MESSAGE_FRAMES,
    MAX_WAIT_S,
    NAME_BYTES,
    ThreadGuard,
    broken,
    check_frames,
    closed,
    new_name,
)
from transfer.link_ipc import SocketFileManager, check_unused
from transfer.link_sockets import LISTENABLE, Context, Socket, listen, make_dealer, with_host
from transfer.link_ticket import TrackedTicket
from unikv.errors import ConfigError, LocalProtocolError, explain

RETRY_S: Final = 0.05
"""Pause between two attempts to connect."""
FAREWELL_S: Final = 0.01
"""How long a closing link looks for peers that go away at the same moment; their last messages are dropped."""
COPY_BELOW_BYTES: Final = 64 * 1024
"""Shorter frames are copied when sent: that is cheaper than tracking them."""
EVENTS_PER_POLL: Final = 1024
"""Most messages one poll returns, so that a flood cannot keep the caller from its other work."""
_SENDER: Final = re.compile(rb"([0-9a-f]{%d})\.[0-9]{1,19}" % (2 * NAME_BYTES))
"""Routing id of a link's DEALER: the link's name and the number of the connection, so that none is ever used twice."""
_REFUSED: Final = (zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL, zmq.EVENT_HANDSHAKE_FAILED_AUTH)
_FAILED: Final = {
    zmq.EVENT_CLOSED: "no listener",
    zmq.EVENT_DISCONNECTED: "only handshakes broken off",
    zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL: "only handshakes broken off",
}
"""Events that end an attempt to connect, and what to say if every attempt ends so."""
_WATCHED: Final = sum((zmq.EVENT_HANDSHAKE_SUCCEEDED, *_REFUSED, *_FAILED))


class _OutgoingSession:
    """One address a link connected to: attempts to connect, then the connection, then nothing."""

    def __init__(
        self,
        context: Context,
        poller: zmq.Poller,
        address: str,
        routing_id: bytes,
        keys: CurveKeys | None,
        silence_s: float | None,
    ) -> None:
        self.address = address
        self._where, self._server_key = split_key(address)
        self._keys, self._silence_s = keys, silence_s
        self.due_s = 0.0
        self.backlog: list[tuple[Sequence[Frame], TrackedTicket]] = []
        self._context, self._poller, self._routing_id = context, poller, routing_id
        self._dealer: Socket | None = None
        self.monitor: Socket | None = None
        self._stands = False
        self._outcome = "no answer"

    def start(self, now_s: float, timeout_s: float) -> None:
        """Begin to connect; `due_s` is when `service` must be called even if no event arrives."""
        self._timeout_s, self._give_up_at_s = timeout_s, now_s + timeout_s
        self.due_s = now_s

    def service(self, now_s: float) -> str | None:
        """Do what is due and return why the peer is gone, or None where it is not."""
        for event in self._events():
            if event == zmq.EVENT_HANDSHAKE_SUCCEEDED:
                self._stand()
            elif event in _REFUSED:
                return "the handshake is refused: " + (
                    "our CURVE key is not authorized there" if self._keys else "what listens there is no link"
                )
            elif self._stands:
                return "the connection is lost"
            else:
                self.stop(linger_s=0)
                self._outcome, self.due_s = _FAILED[event], now_s + RETRY_S
        if self._stands:
            return None
        if now_s >= self._give_up_at_s:
            return f"{self._outcome} within {self._timeout_s:g} s"
        if self._dealer is None and now_s >= self.due_s:
            return self._attempt()
        return None

    def send(self, frames: Sequence[Frame], ticket: TrackedTicket) -> None:
        """Send now, or keep for when the connection stands. Raises zmq.Again where it has just broken."""
        if self._stands:
            self._transmit(frames, ticket)
        else:
            self.backlog.append((frames, ticket))

    def stop(self, linger_s: float) -> None:
        """Close the sockets of this attempt; what libzmq still holds is sent for up to `linger_s`."""
        # The order matters: an I/O thread that has an event for a monitor nobody reads waits for ever.
        if self._dealer is not None:
            self._dealer.disable_monitor()
        if self.monitor is not None:
            self._poller.unregister(self.monitor)
            self.monitor.close(linger=0)
        if self._dealer is not None:
            self._dealer.close(linger=int(linger_s * 1000))
        self._dealer = self.monitor = None

    def drop(self) -> None:
        """Stop at once and let go of every frame."""
        self.stop(linger_s=0)
        for _, ticket in self.backlog:
            ticket.waiting = False
        self.backlog.clear()

    def _attempt(self) -> str | None:
        self.due_s = self._give_up_at_s
        if not self._where.startswith(LISTENABLE):
            return f"not an address that begins with {' or '.join(LISTENABLE)}"
        if reason := refusal(self._keys, self._server_key):
            return reason
        try:
            self._dealer = make_dealer(self._context, self._routing_id, self._silence_s)
            self._dealer.ipv6 = "[" in self._where
            if self._keys is not None:
                self._dealer.curve_publickey, self._dealer.curve_secretkey = self._keys.public, self._keys.secret
                self._dealer.curve_serverkey = self._server_key
            self.monitor = self._dealer.get_monitor_socket(_WATCHED)
            self.monitor.linger = 0
            self._poller.register(self.monitor, zmq.POLLIN)
            self._dealer.connect(self._where)
        except zmq.ZMQError as error:
            return f"cannot connect: {error}"
        return None

    def _events(self) -> Iterator[zmq.Event]:
        while self.monitor is not None:
            try:
                yield zmq.Event(recv_monitor_message(self.monitor, zmq.NOBLOCK)["event"])
            except zmq.Again:
                return

    def _stand(self) -> None:
        self._stands, self.due_s = True, math.inf
        waiting, self.backlog = self.backlog, []
        for frames, ticket in waiting:
            with contextlib.suppress(zmq.Again):  # broken again already: its event is on its way
                self._transmit(frames, ticket)

    def _transmit(self, frames: Sequence[Frame], ticket: TrackedTicket) -> None:
        assert self._dealer is not None
        ticket.waiting = False
        for left, frame in enumerate(frames, start=1 - len(frames)):
            flags = zmq.NOBLOCK | (zmq.SNDMORE if left else 0)
            if memoryview(frame).nbytes < COPY_BELOW_BYTES:
                self._dealer.send(frame, flags)
            else:
                ticket.trackers.append(self._dealer.send(frame, flags, copy=False, track=True))


class ZmqLink:
    """One ZeroMQ link. See `transfer.link.Link` for the contract.

    Args:
        bind: where to listen: ``tcp://HOST:PORT`` with ``*`` for any free port, ``ipc:///PATH``, or ``ipc://@NAME``
            for a name without a file. Anybody who reaches that address may send to us: keep to loopback, or to a
            network of trusted hosts.
        connect_timeout_s: how long to wait for a listener at an address.
        advertise: host name or address to tell peers instead of the one in `bind`; the port is the same.
        silence_s: a peer whose I/O thread has been silent for so long is gone; None for `HEARTBEAT_TIMEOUT_S`.
        context: a ZeroMQ context to share; None gives the link its own, which it terminates when it closes.
        curve: keys that authenticate and encrypt every connection, in and out; None leaves all of them open. A link
            with keys has a context of its own.

    Raises:
        ConfigError: nothing can listen at `bind`.
    """

    def __init__(
        self,
        bind: str = "tcp://127.0.0.1:*",
        *,
        connect_timeout_s: float = CONNECT_TIMEOUT_S,
        advertise: str | None = None,
        silence_s: float | None = None,
        context: Context | None = None,
        curve: CurveKeys | None = None,
    ) -> None:
        if curve is not None and context is not None:
            raise LocalProtocolError(explain("link", "context", "shared", "None where there are keys", "leave it out"))
        bind, _ = split_key(bind)
        check_unused(bind)
        self._own_context = context is None
        self._context = zmq.Context() if context is None else context
        self._keys, self._gate_keeper = curve, None if curve is None else GateKeeperManager(self._context, curve)
        try:
            self._router, where = listen(self._context, bind, curve, silence_s)
        except ConfigError:
            self._end_context()
            raise
        told = where if advertise is None else with_host(where, advertise)
        self._address = told if curve is None else with_key(told, curve.public)
        self._silence_s = silence_s
        self._socket_file = SocketFileManager.of(where)
        self._connect_timeout_s = connect_timeout_s
        self._name = new_name()
        self._guard = ThreadGuard()
        self._closed = False
        self._connections = 0
        self._outgoing: dict[str, _OutgoingSession] = {}
        self._dropped_messages = 0
        # Reentrant: a signal handler may call `wake` while its own thread is inside `wake` or `close`.
        self._wake_lock = threading.RLock()
        self._wake_fd: int | None = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._poller = zmq.Poller()
        self._poller.register(self._router, zmq.POLLIN)
        self._poller.register(self._wake_fd, zmq.POLLIN)

    @property
    def name(self) -> str:
        """Unguessable name, what peers see as `Received.peer`."""
        return self._name

    @property
    def address(self) -> str:
        """Where other links reach this one, with the port that was chosen."""
        return self._address

    @property
    def dropped_messages(self) -> int:
        """Messages dropped because they came from no link of ours, or had too many frames or none."""
        return self._dropped_messages

    def connect(self, address: str) -> None:
        """Begin to connect to `address`; what cannot be reached, or is no address, is a PeerGone of a later poll."""
        self._check()
        if address in self._outgoing:
            return
        self._connections += 1
        routing_id = f"{self._name}.{self._connections}".encode()
        outgoing = _OutgoingSession(self._context, self._poller, address, routing_id, self._keys, self._silence_s)
        outgoing.start(time.monotonic(), self._connect_timeout_s)
        self._outgoing[address] = outgoing

    def disconnect(self, address: str) -> None:
        """Forget `address`; what has not left this process is dropped."""
        self._check()
        outgoing = self._outgoing.pop(address, None)
        if outgoing is not None:
            outgoing.drop()

    def send(self, address: str, frames: Sequence[Frame]) -> SendTicket:
        """Queue one message; frames of 64 KiB and more are sent from where they are. Never blocks."""
        self._check()
        check_frames(frames, address)
        if address not in self._outgoing:
            raise broken(address)
        ticket = TrackedTicket()
        try:
            self._outgoing[address].send(tuple(frames), ticket)
        except zmq.Again:
            raise broken(address) from None
        return ticket

    def poll(self, timeout_s: float) -> list[LinkEvent]:
        """Return what arrived, waiting for it up to `timeout_s` seconds; messages first."""
        self._guard.adopt()
        self._check()
        deadline_s = time.monotonic() + timeout_s
        while True:
            events, woken = self._turn(deadline_s)
            if events or woken or time.monotonic() >= deadline_s:
                return events

    def wake(self) -> None:
        """Make a running or the next `poll` return early; from any thread, also after close."""
        with self._wake_lock:
            if self._wake_fd is not None:
                os.eventfd_write(self._wake_fd, 1)

    def close(self) -> None:
        """Send what is queued, waiting at most a second, then free everything. Not while another thread polls."""
        deadline_s = time.monotonic() + CLOSE_TIMEOUT_S
        while not self._closed and self._has_backlog() and time.monotonic() < deadline_s:
            self._turn(deadline_s)
        # libzmq would wait the whole second for a peer that is just going away too: see who is gone.
        look_until_s = min(deadline_s, time.monotonic() + FAREWELL_S)
        while not self._closed and self._outgoing and time.monotonic() < look_until_s:
            self._turn(look_until_s)
        self._shut(linger_s=max(0.0, deadline_s - time.monotonic()))

    def abort(self) -> None:
        """Free everything at once. Not while another thread polls."""
        self._shut(linger_s=0.0)

    def _check(self) -> None:
        if self._closed:
            raise closed(self._address)
        self._guard.check(self._address)

    def _has_backlog(self) -> bool:
        return any(outgoing.backlog for outgoing in self._outgoing.values())

    def _turn(self, deadline_s: float) -> tuple[list[LinkEvent], bool]:
        """Wait once and return what came of it, and whether somebody woke us."""
        due_s = min([deadline_s, *(outgoing.due_s for outgoing in self._outgoing.values())])
        wait_s = min(max(0.0, due_s - time.monotonic()), MAX_WAIT_S)
        ready = dict(self._poller.poll(math.ceil(wait_s * 1000)))
        woken = self._wake_fd in ready
        if woken and self._wake_fd is not None:
            os.eventfd_read(self._wake_fd)
        # Look after the connections first: what a peer sent before it left is then usually in our queue.
        gone = self._service(ready)
        received = self._receive() if self._router in ready or gone else []
        return [*received, *gone], woken

    def _service(self, ready: Mapping[Any, int]) -> list[LinkEvent]:
        now_s = time.monotonic()
        gone: list[LinkEvent] = []
        for address, outgoing in list(self._outgoing.items()):
            reason = outgoing.service(now_s) if now_s >= outgoing.due_s or outgoing.monitor in ready else None
            if reason is not None:
                outgoing.drop()
                del self._outgoing[address]
                gone.append(PeerGone(address, reason))
        return gone

    def _receive(self) -> list[LinkEvent]:
        events: list[LinkEvent] = []
        for _ in range(EVENTS_PER_POLL):
            try:
                parts: list[Any] = self._router.recv_multipart(zmq.NOBLOCK, copy=False)
            except zmq.Again:
                break
            sender = _SENDER.fullmatch(parts[0].bytes)
            if sender is None or not 2 <= len(parts) <= MAX_MESSAGE_FRAMES + 1:
                self._dropped_messages += 1
                continue
            events.append(Received(sender[1].decode(), tuple([part.buffer for part in parts[1:]])))
        return events

    def _shut(self, linger_s: float) -> None:
        if self._closed:
            return
        self._closed = True
        for outgoing in self._outgoing.values():
            outgoing.stop(linger_s)
            outgoing.drop()
        self._outgoing.clear()
        self._router.close(linger=0)
        self._socket_file.remove()
        with self._wake_lock:
            wake_fd, self._wake_fd = self._wake_fd, None
            if wake_fd is not None:
                os.close(wake_fd)
        self._end_context()

    def _end_context(self) -> None:
        if self._gate_keeper is not None:
            self._gate_keeper.close()
        if self._own_context:
            self._context.term()
