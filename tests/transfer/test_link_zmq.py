"""What is special about the ZeroMQ link: other processes, foreign sockets, real files. The contract is in test_link."""

import os
import pickle
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import zmq

import transfer
from transfer import link_sockets, link_zmq
from transfer.link_zmq import ZmqLink
from transfer.messages import Envelope, Goodbye
from transfer.testing.mailbox import PATIENCE_S, MailboxManager, contents
from transfer.wire import decode, encode
from unikv.errors import ConfigError, RemoteProtocolError

ECHO = """
import sys
from transfer.link_zmq import ZmqLink
link = ZmqLink(sys.argv[1])
print(link.address, flush=True)
while True:
    for message in link.poll(1.0):
        if hasattr(message, "frames"):
            address = bytes(message.frames[0]).decode()
            link.connect(address)
            link.send(address, message.frames[1:])
"""
COMPUTE = """
import sys
from transfer.link_zmq import ZmqLink
link = ZmqLink(sys.argv[1])
print(link.address, flush=True)
while True:
    pass
"""


@contextmanager
def process(code: str, bind: str = "tcp://127.0.0.1:*") -> Iterator[tuple[subprocess.Popen[str], str]]:
    """Run a child that prints the address of its link; kill it in the end."""
    root = Path(transfer.__file__).parents[1]
    command = [sys.executable, "-c", code, bind]
    environment = {**os.environ, "PYTHONPATH": str(root)}
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment) as child:
        try:
            assert child.stdout is not None
            yield child, child.stdout.readline().strip()
        finally:
            child.kill()


@contextmanager
def foreign(address: str, name: bytes | None) -> Iterator[zmq.Socket[bytes]]:
    """Connect a socket that is no link of ours; without a name libzmq gives it one."""
    with zmq.Context() as context, context.socket(zmq.DEALER) as dealer:
        dealer.linger = int(PATIENCE_S * 1000)
        if name is not None:
            dealer.routing_id = name
        dealer.connect(address)
        yield dealer


@pytest.fixture
def mail() -> MailboxManager:
    return MailboxManager()


@pytest.fixture
def link(mail: MailboxManager) -> Iterator[ZmqLink]:
    link = ZmqLink(connect_timeout_s=PATIENCE_S)
    mail.add(link)
    yield link
    link.abort()


@pytest.fixture
def impatient(mail: MailboxManager) -> Iterator[ZmqLink]:
    link = ZmqLink(connect_timeout_s=0.3)
    mail.add(link)
    yield link
    link.abort()


# other processes


def round_trip(mail: MailboxManager, link: ZmqLink, address: str, *frames: bytes) -> None:
    link.send(address, [link.address.encode(), *frames])
    assert contents(mail.receive(link, 1)[0]) == list(frames)


def test_another_process_gets_and_returns_large_and_empty_frames(mail: MailboxManager, link: ZmqLink) -> None:
    with process(ECHO) as (_, address):
        link.connect(address)
        for _ in range(3):
            round_trip(mail, link, address, b"", os.urandom(8 * 1024**2), b"end")
        link.disconnect(address)


def test_a_killed_process_is_gone_within_two_seconds(mail: MailboxManager, link: ZmqLink) -> None:
    with process(ECHO) as (child, address):
        link.connect(address)
        round_trip(mail, link, address, b"alive")
        killed_at_s = time.monotonic()
        child.kill()
        assert mail.wait_gone(link, address) == "the connection is lost"
        assert time.monotonic() - killed_at_s < 2
        mail.assert_quiet(link)


def test_a_process_killed_in_the_middle_of_a_stream_leaves_no_ticket_behind(
    mail: MailboxManager, link: ZmqLink
) -> None:
    with process(COMPUTE) as (child, address):
        link.connect(address)
        tickets = [link.send(address, [bytes(4 * 1024**2)]) for _ in range(16)]
        mail.wait_done(tickets[0])
        child.kill()
        mail.wait_gone(link, address)
        for ticket in tickets:
            mail.wait_done(ticket)


def test_a_process_restarted_on_its_port_gets_new_messages_only(mail: MailboxManager, link: ZmqLink) -> None:
    address = "tcp://127.0.0.1:*"
    for n in range(3):
        with process(ECHO, address) as (child, address):
            link.connect(address)
            round_trip(mail, link, address, b"run %d" % n)
            os.kill(child.pid, signal.SIGKILL)
            mail.wait_gone(link, address)


def test_a_frozen_process_is_gone_after_the_heartbeat_timeout(
    mail: MailboxManager, link: ZmqLink, monkeypatch: pytest.MonkeyPatch
) -> None:
    hurry(monkeypatch)
    with process(ECHO) as (child, address):
        link.connect(address)
        round_trip(mail, link, address, b"alive")
        os.kill(child.pid, signal.SIGSTOP)
        assert mail.wait_gone(link, address) == "the connection is lost"


def test_a_process_that_computes_and_never_polls_is_not_gone(
    mail: MailboxManager, link: ZmqLink, monkeypatch: pytest.MonkeyPatch
) -> None:
    hurry(monkeypatch)
    with process(COMPUTE) as (_, address):
        link.connect(address)
        mail.wait_done(link.send(address, [bytes(1_000_000)]))
        watched_until_s = time.monotonic() + 3 * link_sockets.HEARTBEAT_TIMEOUT_S
        while time.monotonic() < watched_until_s:
            mail.assert_quiet(link)
        link.disconnect(address)


def hurry(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(link_sockets, "HEARTBEAT_INTERVAL_S", 0.1)
    monkeypatch.setattr(link_sockets, "HEARTBEAT_TIMEOUT_S", 0.5)


# what comes in from strangers


@pytest.mark.parametrize(
    "name",
    [
        None,
        b"guest",
        b"0" * 32,
        b"0" * 31 + b".1",
        b"0" * 32 + b".x",
        b"G" * 32 + b".1",
        b"0" * 32 + b".1\n",
        b"\xff" * 99,
    ],
)
def test_messages_of_sockets_that_are_no_links_are_dropped(
    mail: MailboxManager, link: ZmqLink, name: bytes | None
) -> None:
    with foreign(link.address, name) as stranger:
        stranger.send_multipart([b"let", b"me", b"in"])
        mail.wait_for(lambda: link.dropped_messages == 1, "the dropped message")
        assert_still_works(mail, link)


def test_messages_with_too_many_frames_are_dropped(
    mail: MailboxManager, link: ZmqLink, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(link_zmq, "MAX_MESSAGE_FRAMES", 100)
    with foreign(link.address, b"0" * 32 + b".1") as stranger:
        stranger.send_multipart([b"x"] * 101)
        stranger.send_multipart([b"x"] * 100)
        (message,) = mail.receive(link, 1)
    assert (link.dropped_messages, len(message.frames)) == (1, 100)


def test_a_frame_that_is_too_long_cuts_its_sender_off(mail: MailboxManager, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(link_sockets, "MAX_FRAME_BYTES", 1_000_000)
    small, sender = ZmqLink(), ZmqLink()
    mail.add(small)
    mail.add(sender)
    sender.connect(small.address)
    sender.send(small.address, [bytes(1_000_000)])
    assert len(mail.receive(small, 1)) == 1
    sender.send(small.address, [bytes(1_000_001)])
    mail.wait_gone(sender, small.address)
    assert_still_works(mail, small)
    small.abort()
    sender.abort()


def test_bytes_that_are_no_zeromq_do_no_harm(mail: MailboxManager, link: ZmqLink) -> None:
    port = int(link.address.rpartition(":")[2])
    for junk in (b"GET / HTTP/1.1\r\n\r\n" * 10, os.urandom(1000), b"\xff" + bytes(8) + b"\x7f" + b"\xff" * 200):
        with socket.create_connection(("127.0.0.1", port)) as raw:
            raw.sendall(junk)
            assert_still_works(mail, link)


def test_hostile_messages_end_in_protocol_errors_and_the_next_one_is_heard(mail: MailboxManager, link: ZmqLink) -> None:
    class Bomb:
        def __reduce__(self) -> tuple[object, ...]:
            return os.abort, ()

    hostile = [pickle.dumps(Bomb()), os.urandom(10_000), bytes(32 * 1024**2), b"\x96", b"\x91" * 1000, b""]
    good = encode(Envelope(incarnation="me", rank=0, message=Goodbye(reason="enough")))
    with foreign(link.address, b"0" * 32 + b".1") as stranger:
        for frame in hostile:
            stranger.send_multipart([frame])
        stranger.send_multipart(good)
        messages = mail.receive(link, len(hostile) + 1)
    for message in messages[:-1]:
        with pytest.raises(RemoteProtocolError, match="message is dropped"):
            decode(message.frames)
    assert decode(messages[-1].frames).message == Goodbye(reason="enough")


def assert_still_works(mail: MailboxManager, link: ZmqLink) -> None:
    link.connect(link.address)
    link.send(link.address, [b"note to self"])
    assert contents(mail.receive(link, 1)[0]) == [b"note to self"]


# what we connect to


@pytest.mark.parametrize(
    ("address", "words"),
    [
        ("inproc://x", "not an address"),
        ("ipc://relative", "not an address"),
        ("", "not an address"),
        ("tcp://127.0.0.1", "cannot connect"),
        ("tcp://:\x00", "cannot connect"),
        ("ipc:///" + "x" * 200, "cannot connect"),
    ],
)
def test_what_is_no_address_is_a_gone_peer(mail: MailboxManager, link: ZmqLink, address: str, words: str) -> None:
    link.connect(address)
    ticket = link.send(address, [b"x"])
    assert words in mail.wait_gone(link, address)
    assert ticket.done()


def test_a_listener_with_other_rules_refuses(mail: MailboxManager, link: ZmqLink) -> None:
    with zmq.Context() as context, context.socket(zmq.ROUTER) as other:
        other.plain_server = True
        address = f"tcp://127.0.0.1:{other.bind_to_random_port('tcp://127.0.0.1')}"
        link.connect(address)
        assert mail.wait_gone(link, address) == "the handshake is refused: what listens there is no link"


def test_a_listener_of_another_kind_is_no_peer(mail: MailboxManager, impatient: ZmqLink) -> None:
    with zmq.Context() as context, context.socket(zmq.PUB) as other:
        address = f"tcp://127.0.0.1:{other.bind_to_random_port('tcp://127.0.0.1')}"
        impatient.connect(address)
        assert mail.wait_gone(impatient, address) == "only handshakes broken off within 0.3 s"


def test_a_listener_that_never_answers_is_no_peer(mail: MailboxManager, impatient: ZmqLink) -> None:
    with socket.create_server(("127.0.0.1", 0)) as mute:
        address = f"tcp://127.0.0.1:{mute.getsockname()[1]}"
        impatient.connect(address)
        assert mail.wait_gone(impatient, address) == "no answer within 0.3 s"


def test_connecting_anew_never_meets_the_remains_of_the_last_connection(mail: MailboxManager, link: ZmqLink) -> None:
    other = ZmqLink()
    mail.add(other)
    for n in range(30):
        link.connect(other.address)
        link.send(other.address, [b"%d" % n])
        assert contents(mail.receive(other, 1)[0]) == [b"%d" % n]
        link.disconnect(other.address)
    other.abort()


# addresses of our own


@pytest.mark.parametrize("bind", ["tcp://127.0.0.1:1:1", "ipc://relative", "ipc://*", "inproc://x", "nonsense"])
def test_what_cannot_be_bound_is_refused(bind: str) -> None:
    with pytest.raises(ConfigError, match=r"link: bind address .* is .*expected a free address") as caught:
        ZmqLink(bind)
    assert bind in str(caught.value)


def test_an_address_in_use_is_refused(tmp_path: Path, link: ZmqLink) -> None:
    with pytest.raises(ConfigError, match="Address already in use"):
        ZmqLink(link.address)
    first = ZmqLink(f"ipc://{tmp_path}/socket")
    with pytest.raises(ConfigError, match="expected an address nobody uses"):
        ZmqLink(first.address)
    first.close()


def test_a_socket_file_left_by_a_killed_process_is_no_obstacle(tmp_path: Path, mail: MailboxManager) -> None:
    address = f"ipc://{tmp_path}/socket"
    with process(ECHO, address) as (child, _):
        child.kill()
        child.wait()
    assert (tmp_path / "socket").is_socket()
    link = ZmqLink(address)
    mail.add(link)
    assert_still_works(mail, link)
    link.close()
    assert not (tmp_path / "socket").exists()


def test_closing_leaves_the_socket_file_of_a_successor_alone(tmp_path: Path, mail: MailboxManager) -> None:
    path = tmp_path / "socket"
    first = ZmqLink(f"ipc://{path}")
    path.unlink()
    second = ZmqLink(f"ipc://{path}")
    mail.add(second)
    first.close()
    assert_still_works(mail, second)
    second.close()
    assert not path.exists()


def test_links_may_share_a_context(mail: MailboxManager) -> None:
    with zmq.Context() as context:
        one, two = ZmqLink(context=context), ZmqLink(context=context)
        mail.add(one)
        mail.add(two)
        one.connect(two.address)
        one.send(two.address, [b"x"])
        assert contents(mail.receive(two, 1)[0]) == [b"x"]
        mail.close(two)
        assert isinstance(mail.wait_gone(one, two.address), str)
        one.close()
