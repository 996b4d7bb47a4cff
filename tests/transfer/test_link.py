import gc
import weakref
from contextlib import closing
from itertools import count
from pathlib import Path
from tempfile import TemporaryDirectory

import zmq

from transfer.link import Link, Received
from transfer.link_curve import CurveKeys
from transfer.link_guard import new_name
from transfer.link_memory import MemoryNetwork
from transfer.link_zmq import ZmqLink
from transfer.testing.link import LinkConformance


class TestMemoryLink(LinkConformance):
    def setup_method(self) -> None:
        super().setup_method()
        self._network = MemoryNetwork()

    def make_link(self, address: str | None = None) -> Link:
        self._network.connect_timeout_s = self.connect_timeout_s
        return self._network.link(address)

    def test_a_ticket_that_is_kept_does_not_keep_the_message(self) -> None:
        with closing(self._network.link()) as sender, closing(self._network.link()) as receiver:
            sender.connect(receiver.address)
            ticket = sender.send(receiver.address, [b"payload"])
            (message,) = receiver.poll(0.0)
            assert isinstance(message, Received)
            frame = weakref.ref(message.frames[0])
            del message
            gc.collect()
            assert ticket.done()
            assert frame() is None


class TestZmqLinkTcp(LinkConformance):
    bind = "tcp://127.0.0.1:*"

    def make_link(self, address: str | None = None) -> Link:
        return ZmqLink(address or self.bind, connect_timeout_s=self.connect_timeout_s)


class TestZmqLinkIpc(LinkConformance):
    def setup_method(self) -> None:
        super().setup_method()
        self._folder = TemporaryDirectory(prefix="unikv-")
        self._numbers = count()

    def teardown_method(self) -> None:
        super().teardown_method()
        assert list(Path(self._folder.name).iterdir()) == []  # every link removed its socket file
        self._folder.cleanup()

    def make_link(self, address: str | None = None) -> Link:
        bind = address or f"ipc://{self._folder.name}/{next(self._numbers)}"
        return ZmqLink(bind, connect_timeout_s=self.connect_timeout_s)


class TestZmqLinkAbstract(LinkConformance):
    def make_link(self, address: str | None = None) -> Link:
        return ZmqLink(address or f"ipc://@unikv-{new_name()}", connect_timeout_s=self.connect_timeout_s)


class TestZmqLinkCurve(LinkConformance):
    """One key for all: the list has our own."""

    connect_timeout_s = 1.5  # a thread that encrypts 64 MiB answers no handshake meanwhile

    def setup_method(self) -> None:
        public, secret = zmq.curve_keypair()
        self._keys = CurveKeys(public=public, secret=secret, authorized=frozenset({public}))
        super().setup_method()

    def make_link(self, address: str | None = None) -> Link:
        bind = address or "tcp://127.0.0.1:*"
        return ZmqLink(bind, connect_timeout_s=self.connect_timeout_s, curve=self._keys)
