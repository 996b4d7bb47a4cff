"""What every link must do, as tests: the contract of `transfer.link.Link` in a form that can fail.

Subclass `LinkConformance` under a name that pytest collects and say how to make a link::

    class TestMyLink(LinkConformance):
        def make_link(self, address=None):
            return MyLink(address or "my://anywhere", connect_timeout_s=self.connect_timeout_s)

No test sleeps. A test that waits for something polls the links, up to a limit that only a broken link reaches. Each
test ends by looking for threads, descriptors and sockets it left behind; what a library underneath starts once and
keeps must be running before the first test.
"""

# ruff: noqa: D102 - the names of the tests are their documentation
from __future__ import annotations

import mmap
import threading
import time
from collections.abc import Callable
from typing import Any

from transfer.link import Link, PeerGone, Received
from transfer.link_guard import MAX_FRAME_BYTES
from transfer.testing.mailbox import (
    PATIENCE_S,
    MailboxManager,
    assert_nothing_left,
    contents,
    error_in_thread,
    expect,
    open_things,
)
from unikv.errors import LinkBrokenError, LinkClosedError, LocalProtocolError


class LinkConformance:
    """Base class of a link's test class; see the module."""

    connect_timeout_s = 0.3

    def make_link(self, address: str | None = None) -> Link:
        """Return a new link that waits `connect_timeout_s` for listeners.

        Args:
            address: where to listen; it belonged to a link of this test that is closed now. None: anywhere.
        """
        raise NotImplementedError

    def setup_method(self) -> None:
        """Remember what is open."""
        self.mail = MailboxManager()
        self._links: list[Link] = []
        self._open_before = open_things()

    def teardown_method(self) -> None:
        """Close every link, then look for what is left."""
        for link in self._links:
            link.abort()
        assert_nothing_left(self._open_before)

    def link(self, address: str | None = None) -> Link:
        """Return a new link that is closed when the test ends."""
        self._links.append(self.make_link(address))
        return self.mail.add(self._links[-1])

    def pair(self) -> tuple[Link, Link]:
        """Return two links, each connected to the other."""
        one, two = self.link(), self.link()
        one.connect(two.address)
        two.connect(one.address)
        return one, two

    # names and addresses

    def test_names_differ_and_cannot_be_guessed(self) -> None:
        names = {self.link().name for _ in range(4)}
        assert len(names) == 4
        assert all(len(bytes.fromhex(name)) >= 16 for name in names)

    def test_an_address_can_be_listened_on_again_after_close(self) -> None:
        first = self.link()
        self.mail.close(first)
        assert self.link(first.address).address == first.address

    # messages

    def test_messages_arrive_whole_and_in_order(self) -> None:
        one, two = self.pair()
        messages = [[b"%d" % n, *[bytes([n % 256]) * (n % 7) for _ in range(n % 5)]] for n in range(500)]
        for message in messages:
            one.send(two.address, message)
        received = self.mail.receive(two, len(messages))
        assert [contents(message) for message in received] == messages
        assert {message.peer for message in received} == {one.name}

    def test_empty_frames_and_many_frames_keep_their_places(self) -> None:
        one, two = self.pair()
        messages: list[list[bytes]] = [[b""], [b"", b"", b""], [b"", b"x", b""], [b"%d" % n for n in range(1000)]]
        for message in messages:
            one.send(two.address, message)
        assert [contents(message) for message in self.mail.receive(two, 4)] == messages

    def test_every_kind_of_frame_is_sent_as_its_bytes(self) -> None:
        one, two = self.pair()
        numbers = memoryview(bytes(range(16))).cast("i")
        one.send(two.address, [b"bytes", bytearray(b"bytearray"), memoryview(b"memoryview"), numbers])
        (message,) = self.mail.receive(two, 1)
        assert contents(message) == [b"bytes", b"bytearray", b"memoryview", bytes(range(16))]

    def test_a_frame_of_64_mib_arrives(self) -> None:
        one, two = self.pair()
        frame = bytes(range(256)) * (64 * 1024**2 // 256)
        one.send(two.address, [b"head", frame, b"tail"])
        (message,) = self.mail.receive(two, 1)
        head, body, tail = message.frames
        assert (bytes(head), bytes(tail)) == (b"head", b"tail")
        assert body == frame

    def test_both_directions_at_once(self) -> None:
        one, two = self.pair()
        for n in range(100):
            one.send(two.address, [b"from one", b"%d" % n])
            two.send(one.address, [b"from two", b"%d" % n])
        at_two = self.mail.receive(two, 100)
        at_one = self.mail.receive(one, 100)
        assert [contents(message)[1] for message in at_one] == [b"%d" % n for n in range(100)]
        assert {(message.peer, contents(message)[0]) for message in at_two} == {(one.name, b"from one")}

    def test_many_peers_into_one_link(self) -> None:
        target = self.link()
        senders = [self.link() for _ in range(6)]
        for sender in senders:
            sender.connect(target.address)
        for n in range(50):
            for sender in senders:
                sender.send(target.address, [b"%d" % n])
        received = self.mail.receive(target, 300)
        for sender in senders:
            own = [contents(message) for message in received if message.peer == sender.name]
            assert own == [[b"%d" % n] for n in range(50)]

    def test_a_link_may_send_to_itself(self) -> None:
        link = self.link()
        link.connect(link.address)
        link.send(link.address, [b"note to self"])
        (message,) = self.mail.receive(link, 1)
        assert (message.peer, contents(message)) == (link.name, [b"note to self"])

    def test_a_message_no_link_can_carry_is_refused(self) -> None:
        one, two = self.pair()
        expect(LocalProtocolError, "frames is 0", lambda: one.send(two.address, []))
        with mmap.mmap(-1, MAX_FRAME_BYTES + 1) as memory:
            frame = memoryview(memory)
            expect(LocalProtocolError, "longest frame", lambda: one.send(two.address, [frame]))
            frame.release()

    # memory

    def test_frames_may_be_changed_once_the_ticket_is_done(self) -> None:
        one, two = self.pair()
        frames = [bytearray(b"a" * size) for size in (1, 10_000, 1_000_000)]
        ticket = one.send(two.address, frames)
        (message,) = self.mail.receive(two, 1)
        self.mail.wait_done(ticket)
        for frame in frames:
            frame[:] = b"b" * len(frame)
        assert [set(bytes(frame)) for frame in message.frames] == [{ord("a")}] * 3

    def test_received_frames_belong_to_the_receiver(self) -> None:
        one, two = self.pair()
        one.send(two.address, [b"small", b"large" * 100_000])
        (message,) = self.mail.receive(two, 1)
        self.mail.close(one)
        self.mail.close(two)
        assert contents(message) == [b"small", b"large" * 100_000]

    def test_tickets_are_done_when_the_message_is_lost(self) -> None:
        one, gone = self.link(), self.link()
        self.mail.close(gone)
        one.connect(gone.address)
        ticket = one.send(gone.address, [bytes(1_000_000)])
        self.mail.wait_gone(one, gone.address)
        self.mail.wait_done(ticket)

    # peers that come and go

    def test_sending_to_an_address_never_connected_is_an_error(self) -> None:
        one, two = self.link(), self.link()
        expect(LinkBrokenError, "never connected", lambda: one.send(two.address, [b"x"]))

    def test_connecting_twice_is_connecting_once(self) -> None:
        one, two = self.pair()
        one.connect(two.address)
        one.send(two.address, [b"x"])
        assert len(self.mail.receive(two, 1)) == 1
        self.mail.close(two)
        assert self.mail.wait_gone(one, two.address)
        self.mail.assert_quiet(one)

    def test_a_peer_that_closes_is_gone_exactly_once(self) -> None:
        self._leaves(self.mail.close)

    def test_a_peer_that_aborts_is_gone_exactly_once(self) -> None:
        self._leaves(self.mail.abort)

    def test_what_a_peer_sent_before_it_closed_arrives(self) -> None:
        one, two = self.pair()
        one.send(two.address, [b"x"])
        self.mail.receive(two, 1)
        for n in range(50):
            two.send(one.address, [b"%d" % n])
        self.mail.wait_for(lambda: self.mail.count(one) > 0, "the first message")
        self.mail.close(two)
        self.mail.wait_for(lambda: self.mail.count(one) == 51, "50 messages and the loss of the peer")
        events = self.mail.take(one)
        assert [contents(event) for event in events if isinstance(event, Received)] == [[b"%d" % n] for n in range(50)]
        assert [event.address for event in events if isinstance(event, PeerGone)] == [two.address]

    def test_a_listener_may_come_late(self) -> None:
        self.connect_timeout_s = PATIENCE_S
        one, past = self.link(), self.link()
        self.mail.close(past)
        one.connect(past.address)
        one.send(past.address, [b"first"])
        self.mail.assert_quiet(one)
        late = self.link(past.address)
        one.send(past.address, [b"second"])
        assert [contents(message) for message in self.mail.receive(late, 2)] == [[b"first"], [b"second"]]

    def test_no_listener_within_the_connect_timeout_is_a_gone_peer(self) -> None:
        one, past = self.link(), self.link()
        self.mail.close(past)
        one.connect(past.address)
        assert f"no listener within {self.connect_timeout_s:g} s" in self.mail.wait_gone(one, past.address)
        expect(LinkBrokenError, past.address, lambda: one.send(past.address, [b"x"]))
        self.mail.assert_quiet(one)

    def test_a_peer_restarted_at_its_address_can_be_connected_again(self) -> None:
        one, two = self.pair()
        for n in range(3):
            one.send(two.address, [b"before", b"%d" % n])
            assert contents(self.mail.receive(two, 1)[0]) == [b"before", b"%d" % n]
            self.mail.abort(two)
            two = self.link(two.address)
            self.mail.wait_gone(one, two.address)
            self.mail.assert_quiet(one)
            one.connect(two.address)
            one.send(two.address, [b"after"])
            (message,) = self.mail.receive(two, 1)
            assert (message.peer, contents(message)) == (one.name, [b"after"])

    def test_a_disconnected_address_is_forgotten(self) -> None:
        one, two = self.pair()
        one.send(two.address, [b"x"])
        self.mail.receive(two, 1)
        one.disconnect(two.address)
        one.disconnect(two.address)
        expect(LinkBrokenError, two.address, lambda: one.send(two.address, [b"y"]))
        one.connect(two.address)
        one.send(two.address, [b"z"])
        assert contents(self.mail.receive(two, 1)[0]) == [b"z"]
        one.disconnect(two.address)
        self.mail.close(two)
        self.mail.assert_quiet(one)

    # waiting and waking

    def test_poll_waits_as_long_as_it_was_told(self) -> None:
        link = self.link()
        assert link.poll(0) == []
        started_s = time.monotonic()
        assert link.poll(0.05) == []
        assert 0.04 <= time.monotonic() - started_s < PATIENCE_S

    def test_a_message_ends_the_wait(self) -> None:
        one, two = self.pair()
        one.send(two.address, [b"connected"])
        self.mail.receive(two, 1)
        started_s = time.monotonic()
        one.send(two.address, [b"x"])
        assert len(two.poll(PATIENCE_S)) == 1
        assert time.monotonic() - started_s < PATIENCE_S

    def test_wake_ends_a_running_poll(self) -> None:
        link = self.link()
        started_s = time.monotonic()
        waker = threading.Timer(0.05, link.wake)
        waker.start()
        assert link.poll(PATIENCE_S) == []
        waker.join()
        assert time.monotonic() - started_s < PATIENCE_S

    def test_wake_is_remembered_for_one_poll(self) -> None:
        link = self.link()
        link.wake()
        link.wake()
        started_s = time.monotonic()
        assert link.poll(PATIENCE_S) == []
        assert time.monotonic() - started_s < PATIENCE_S
        self.mail.assert_quiet(link)

    def test_another_thread_may_only_wake(self) -> None:
        one, two = self.pair()
        one.poll(0)
        calls: list[Callable[[], Any]] = [
            lambda: one.connect(two.address),
            lambda: one.disconnect(two.address),
            lambda: one.send(two.address, [b"x"]),
            lambda: one.poll(0),
        ]
        for call in calls:
            assert isinstance(error_in_thread(call), LocalProtocolError)
        assert error_in_thread(one.wake) is None

    # the end

    def test_a_closed_link_cannot_be_used(self) -> None:
        self._cannot_be_used_after(self.mail.close)

    def test_an_aborted_link_cannot_be_used(self) -> None:
        self._cannot_be_used_after(self.mail.abort)

    def test_close_and_abort_may_be_repeated(self) -> None:
        link = self.link()
        for end in (link.close, link.close, link.abort, link.close):
            end()

    def test_close_sends_what_is_queued(self) -> None:
        one, two = self.link(), self.link()
        self.mail.remove(one)
        one.connect(two.address)
        for n in range(20):
            one.send(two.address, [b"%d" % n, bytes(100_000)])
        closer = threading.Thread(target=one.close)
        closer.start()
        received = self.mail.receive(two, 20)
        closer.join()
        assert [bytes(message.frames[0]) for message in received] == [b"%d" % n for n in range(20)]

    def test_abort_does_not_wait(self) -> None:
        self.connect_timeout_s = 10 * PATIENCE_S
        one, past = self.link(), self.link()
        self.mail.close(past)
        one.connect(past.address)
        ticket = one.send(past.address, [bytes(1_000_000)])
        started_s = time.monotonic()
        self.mail.abort(one)
        assert time.monotonic() - started_s < PATIENCE_S
        self.mail.wait_done(ticket)

    def test_links_leave_nothing_behind(self) -> None:
        open_before = open_things()
        for _ in range(5):
            one, two = self.pair()
            one.send(two.address, [b"x", bytes(200_000)])
            self.mail.receive(two, 1)
            self.mail.abort(two)
            self.mail.wait_gone(one, two.address)
            self.mail.close(one)
        assert_nothing_left(open_before)

    def _leaves(self, leave: Callable[[Link], None]) -> None:
        one, two = self.pair()
        one.send(two.address, [b"x"])
        self.mail.receive(two, 1)
        leave(two)
        assert self.mail.wait_gone(one, two.address)
        expect(LinkBrokenError, two.address, lambda: one.send(two.address, [b"y"]))
        self.mail.assert_quiet(one)

    def _cannot_be_used_after(self, end: Callable[[Link], None]) -> None:
        one, two = self.pair()
        end(one)
        expect(LinkClosedError, one.address, lambda: one.connect(two.address))
        expect(LinkClosedError, one.address, lambda: one.disconnect(two.address))
        expect(LinkClosedError, one.address, lambda: one.send(two.address, [b"x"]))
        expect(LinkClosedError, one.address, lambda: one.poll(0))
        one.wake()
