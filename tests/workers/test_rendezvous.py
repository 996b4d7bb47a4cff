"""The rendezvous: addresses by side and rank, on one interface, gone when it is closed."""

from __future__ import annotations

import signal
import socket
import threading
import time
from pathlib import Path
from types import FrameType

import pytest

from unikv.errors import ConfigError, LinkBrokenError, LocalProtocolError
from workers.rendezvous import Rendezvous

pytestmark = pytest.mark.usefixtures("store_library")


def test_addresses_are_found_by_kind_side_and_rank() -> None:
    with Rendezvous.serve() as host, Rendezvous.join(host.url) as guest:
        guest.announce("transfer", "context", 1, "tcp://127.0.0.1:2")
        assert host.known("transfer", "context", 2) == {1: "tcp://127.0.0.1:2"}
        host.announce("transfer", "context", 0, "tcp://127.0.0.1:1")
        host.announce("control", "context", 0, "tcp://127.0.0.1:9")
        host.announce("transfer", "generation", 0, "tcp://127.0.0.1:8")
        assert guest.find("transfer", "context", 2) == ("tcp://127.0.0.1:1", "tcp://127.0.0.1:2")
        assert guest.known("control", "generation", 4) == {}


def test_the_last_announcement_counts() -> None:
    with Rendezvous.serve() as host:
        host.announce("control", "context", 0, "old")
        host.announce("control", "context", 0, "new")
        assert host.find("control", "context", 1) == ("new",)


def test_finding_waits_for_late_ranks() -> None:
    with Rendezvous.serve() as host, Rendezvous.join(host.url) as guest:
        found: list[tuple[str, ...]] = []
        finder = threading.Thread(target=lambda: found.append(guest.find("transfer", "context", 2)))
        finder.start()
        host.announce("transfer", "context", 1, "second")
        host.announce("transfer", "context", 0, "first")
        finder.join(10)
        assert found == [("first", "second")]


def test_a_rank_that_never_comes_is_named() -> None:
    with Rendezvous.serve() as host:
        host.announce("transfer", "context", 1, "x")
        text = r"context rank\(s\) 0, 2: transfer address is 'unknown', expected announced within 0.05 s; look at"
        with pytest.raises(LinkBrokenError, match=text):
            host.find("transfer", "context", 3, timeout_s=0.05)


def test_guests_may_come_before_the_store_is_open() -> None:
    reserved = Rendezvous.reserve()
    seen: list[dict[int, str]] = []

    def visit() -> None:
        with Rendezvous.join(reserved.url) as guest:
            guest.announce("control", "context", 0, "early")
            seen.append(guest.known("control", "context", 1))

    visitor = threading.Thread(target=visit)
    visitor.start()
    with reserved.open() as host:
        visitor.join(10)
        assert seen == [{0: "early"}] == [host.known("control", "context", 1)]


def test_the_store_listens_where_it_was_told_to_and_nowhere_else() -> None:
    with Rendezvous.serve() as host:
        port = int(host.url.rpartition(":")[2])
        tables = [Path("/proc/net", name).read_text().splitlines()[1:] for name in ("tcp", "tcp6")]
        local = [line.split()[1] for lines in tables for line in lines if line.split()[3] == "0A"]
        assert [address for address in local if address.endswith(f":{port:04X}")] == [f"0100007F:{port:04X}"]


def test_a_taken_address_is_refused() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        url = f"tcp://127.0.0.1:{taken.getsockname()[1]}"
        with pytest.raises(ConfigError, match=f"rendezvous: address is '{url}', expected a free address of this host"):
            Rendezvous.serve(url)


def test_a_foreign_address_is_refused() -> None:
    with pytest.raises(ConfigError, match="a free address of this host; choose another address or port"):
        Rendezvous.reserve("tcp://192.0.2.1:0")


@pytest.mark.parametrize("url", ["127.0.0.1:29500", "tcp://127.0.0.1", "udp://127.0.0.1:1", "tcp://:5", "tcp://h:port"])
def test_what_is_no_address_is_refused(url: str) -> None:
    for use in (Rendezvous.join, Rendezvous.serve):
        with pytest.raises(ConfigError, match="expected tcp://HOST:PORT; pass --rendezvous"):
            use(url)


def test_closing_frees_the_port() -> None:
    host = Rendezvous.serve()
    address = ("127.0.0.1", int(host.url.rpartition(":")[2]))
    host.close()
    host.close()
    socket.create_server(address).close()
    with pytest.raises(LocalProtocolError, match="rendezvous: state is 'not open', expected open"):
        host.announce("control", "context", 0, "x")


def test_a_reserved_address_is_freed_without_opening() -> None:
    reserved = Rendezvous.reserve()
    address = ("127.0.0.1", int(reserved.url.rpartition(":")[2]))
    reserved.close()
    socket.create_server(address).close()


def test_a_store_is_opened_once() -> None:
    with Rendezvous.serve() as host, pytest.raises(LocalProtocolError, match="open it once"):
        host.open()


def test_guests_notice_that_the_host_is_gone() -> None:
    host = Rendezvous.serve()
    with Rendezvous.join(host.url) as guest:
        host.close()
        started_s = time.monotonic()
        text = f"rendezvous: address is '{host.url}', expected a store that answers; look for why its host ended"
        with pytest.raises(LinkBrokenError, match=text):
            guest.find("control", "context", 1)
        with pytest.raises(LinkBrokenError, match=text):
            guest.announce("control", "context", 0, "x")
        assert time.monotonic() - started_s < 5


def test_waiting_for_the_host_can_be_interrupted() -> None:
    with Rendezvous.reserve() as reserved:
        url = reserved.url

    def interrupt(_number: int, _frame: FrameType | None) -> None:
        raise KeyboardInterrupt

    previous = signal.signal(signal.SIGALRM, interrupt)
    signal.setitimer(signal.ITIMER_REAL, 0.3)
    started_s = time.monotonic()
    try:
        with pytest.raises(KeyboardInterrupt):
            Rendezvous.join(url, timeout_s=20)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, previous)
    assert time.monotonic() - started_s < 5


def test_a_guest_needs_a_port() -> None:
    with pytest.raises(ConfigError, match="expected a port from 1"):
        Rendezvous.join("tcp://127.0.0.1:0")


def test_nobody_at_the_address_is_an_error_within_the_time_given() -> None:
    with Rendezvous.reserve() as reserved:
        url = reserved.url
    with pytest.raises(LinkBrokenError, match="start its host first"):
        Rendezvous.join(url, timeout_s=0.5)
