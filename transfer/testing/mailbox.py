"""Links that one test polls together, and a look at what they left open."""

from __future__ import annotations

import os
import threading
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

from transfer.link import Link, LinkEvent, PeerGone, Received, SendTicket

PATIENCE_S = 20.0
"""How long a test waits for what must happen; only something broken takes so long."""
QUIET_S = 0.1
"""How long a test watches that nothing happens."""


class MailboxManager:
    """Polls several links in one thread and keeps what each of them got until the test asks for it."""

    def __init__(self) -> None:
        self._links: list[Link] = []
        self._boxes: dict[int, list[LinkEvent]] = {}

    def add(self, link: Link) -> Link:
        """Poll `link` from now on, and return it."""
        self._links.append(link)
        self._boxes[id(link)] = []
        return link

    def remove(self, link: Link) -> None:
        """Stop polling `link`."""
        self._links = [other for other in self._links if other is not link]

    def close(self, link: Link) -> None:
        """Close `link` in an orderly way and poll it no more."""
        self.remove(link)
        link.close()

    def abort(self, link: Link) -> None:
        """Abort `link` and poll it no more."""
        self.remove(link)
        link.abort()

    def pump(self) -> None:
        """Poll every link once."""
        for link in self._links:
            self._boxes[id(link)] += link.poll(0.001)

    def count(self, link: Link) -> int:
        """Return how many events of `link` wait to be taken."""
        return len(self._boxes[id(link)])

    def take(self, link: Link) -> list[LinkEvent]:
        """Return every event of `link` since the last time."""
        events, self._boxes[id(link)] = self._boxes[id(link)], []
        return events

    def receive(self, link: Link, count: int) -> list[Received]:
        """Return the next `count` messages of `link`. More of them, or another event, is a failure."""
        self.wait_for(lambda: self.count(link) >= count, f"{count} messages")
        events = self.take(link)
        messages = [event for event in events if isinstance(event, Received)]
        assert len(messages) == len(events) == count, f"expected {count} messages, got {events}"
        return messages

    def wait_gone(self, link: Link, address: str) -> str:
        """Return why the peer at `address` is gone from `link`. Any other event is a failure."""
        self.wait_for(lambda: self.count(link) > 0, f"the loss of {address}")
        (event,) = self.take(link)
        assert isinstance(event, PeerGone), f"expected the loss of {address}, got {event}"
        assert event.address == address
        return event.reason

    def wait_done(self, ticket: SendTicket) -> None:
        """Poll until `ticket` is done."""
        self.wait_for(ticket.done, "the ticket")

    def wait_for(self, condition: Callable[[], bool], what: str) -> None:
        """Poll until `condition` holds; fail with `what` where it never does."""
        give_up_at_s = time.monotonic() + PATIENCE_S
        while not condition():
            assert time.monotonic() < give_up_at_s, f"waited {PATIENCE_S:g} s for {what} in vain"
            self.pump()

    def assert_quiet(self, link: Link) -> None:
        """Fail if anything arrives at `link` within a short time."""
        give_up_at_s = time.monotonic() + QUIET_S
        while time.monotonic() < give_up_at_s:
            self.pump()
        assert self.take(link) == []


def contents(message: Received) -> list[bytes]:
    """Return the frames of `message` as bytes."""
    return [bytes(frame) for frame in message.frames]


def expect(error: type[Exception], words: str, call: Callable[[], Any]) -> None:
    """Fail unless `call` raises `error` with `words` in its text."""
    try:
        call()
    except error as raised:
        assert words in str(raised), f"{words!r} is not in {str(raised)!r}"
    else:
        raise AssertionError(f"{error.__name__} was not raised")


def error_in_thread(call: Callable[[], Any]) -> Exception | None:
    """Return what `call` raised in a thread of its own, or None."""
    errors: list[Exception] = []

    def run() -> None:
        try:
            call()
        except Exception as error:
            errors.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    return errors[0] if errors else None


def assert_nothing_left(before: Counter[str]) -> None:
    """Fail unless everything opened since `before` (from `open_things`) is closed. The kernel may take a moment."""
    give_up_at_s = time.monotonic() + PATIENCE_S
    while left := open_things() - before:
        assert time.monotonic() < give_up_at_s, f"still open: {dict(left)}"
        os.sched_yield()


def open_things() -> Counter[str]:
    """Return how many threads and descriptors, by what they are, this process has; descriptors are not numbered."""
    found = Counter(["thread"] * len(list(Path("/proc/self/task").iterdir())))
    for entry in Path("/proc/self/fd").iterdir():
        try:
            target = str(entry.readlink())
        except FileNotFoundError:  # the descriptor this very listing used
            continue
        found[target.partition("[")[0] if target.startswith("socket:") else target] += 1
    return found
