"""What faulty links, copiers and clocks do, and that without faults they are as good as what is behind them."""

from collections.abc import Iterator

import numpy as np
import pytest

from transfer.copier import CopyJob, Region
from transfer.copy_host import HostCopier
from transfer.link import Link, PeerGone
from transfer.link_memory import MemoryNetwork
from transfer.link_zmq import ZmqLink
from transfer.testing.copier import CopierConformance, make_lane, make_pages
from transfer.testing.faults import Fault, FaultyCopier, FaultyLink, ScriptedFaults, SeededFaults, SteppingClock
from transfer.testing.link import LinkConformance
from transfer.testing.mailbox import MailboxManager, contents
from unikv.errors import ConfigError, CopyError, LinkBrokenError

SUITE = CopierConformance(make_copier=lambda: FaultyCopier(HostCopier(), ScriptedFaults()))


class TestFaultlessMemoryLink(LinkConformance):
    def setup_method(self) -> None:
        super().setup_method()
        self._network = MemoryNetwork()

    def make_link(self, address: str | None = None) -> Link:
        self._network.connect_timeout_s = self.connect_timeout_s
        return FaultyLink(self._network.link(address), ScriptedFaults())


class TestFaultlessZmqLink(LinkConformance):
    def make_link(self, address: str | None = None) -> Link:
        inner = ZmqLink(address or "tcp://127.0.0.1:*", connect_timeout_s=self.connect_timeout_s)
        return FaultyLink(inner, ScriptedFaults())


@pytest.mark.parametrize("name", CopierConformance.names())
def test_a_copier_without_faults_conforms(name: str) -> None:
    SUITE.run(name)


# --- links ------------------------------------------------------------------------------------------------------------


class Pair:
    """A faulty link that is connected to a sound one."""

    def __init__(self, one: Link, two: Link) -> None:
        self.plan, self.mail = ScriptedFaults(), MailboxManager()
        self.one, self.two = FaultyLink(one, self.plan), two
        self.mail.add(self.one)
        self.mail.add(two)
        self.one.connect(two.address)

    def send(self, *texts: bytes) -> None:
        for text in texts:
            assert self.one.send(self.two.address, [text]) is not None

    def received(self, count: int) -> list[bytes]:
        return [contents(message)[0] for message in self.mail.receive(self.two, count)]


@pytest.fixture(params=["memory", "zmq"])
def pair(request: pytest.FixtureRequest) -> Iterator[Pair]:
    network = MemoryNetwork()
    one, two = (network.link() if request.param == "memory" else ZmqLink() for _ in range(2))
    made = Pair(one, two)
    yield made
    made.one.abort()
    two.abort()


def test_a_dropped_message_is_lost_alone(pair: Pair) -> None:
    pair.plan.arm(Fault.PASS, Fault.DROP)
    pair.send(b"a", b"b", b"c")
    assert pair.received(2) == [b"a", b"c"]
    pair.mail.assert_quiet(pair.two)


def test_a_duplicate_comes_twice(pair: Pair) -> None:
    pair.plan.arm(Fault.DUPLICATE)
    pair.send(b"a", b"b")
    assert pair.received(3) == [b"a", b"a", b"b"]


def test_what_is_held_is_overtaken_and_comes_when_released(pair: Pair) -> None:
    memory = bytearray(b"first")
    pair.plan.arm(Fault.HOLD)
    ticket = pair.one.send(pair.two.address, [memory])
    assert ticket.done() and pair.one.held == 1
    memory[:] = b"spoil"  # the ticket is done: the memory is the sender's again
    pair.send(b"second")
    assert pair.received(1) == [b"second"]
    assert (pair.one.release(), pair.one.held) == (1, 0)
    assert pair.received(1) == [b"first"]


def test_a_corrupted_message_differs_in_one_bit(pair: Pair) -> None:
    pair.plan.arm(Fault.CORRUPT)
    pair.send(bytes(8))
    (text,) = pair.received(1)
    assert [bin(byte).count("1") for byte in text] == [0] * 7 + [1]


def test_a_cut_loses_the_message_and_the_connection(pair: Pair) -> None:
    pair.send(b"a")
    assert pair.received(1) == [b"a"]
    pair.plan.arm(Fault.HOLD, Fault.CUT)
    pair.send(b"held")
    with pytest.raises(LinkBrokenError):
        pair.send(b"b")
    assert pair.mail.wait_gone(pair.one, pair.two.address) == "the connection was cut on purpose"
    with pytest.raises(LinkBrokenError):
        pair.send(b"c")
    assert pair.one.release() == 0  # nowhere to go
    pair.one.connect(pair.two.address)
    pair.send(b"d")
    assert pair.received(1) == [b"d"]


def test_disarmed_means_no_faults(pair: Pair) -> None:
    pair.plan.arm(Fault.DROP, Fault.DROP)
    pair.plan.disarm()
    pair.send(b"a")
    assert pair.received(1) == [b"a"]


# --- copiers ----------------------------------------------------------------------------------------------------------


@pytest.fixture
def job() -> CopyJob:
    """Four pages of eight bytes, from 1, 2, 3, 4 to nothing."""
    source = np.repeat(np.arange(1, 5, dtype=np.uint8), 8)
    sides = [Region(memory=memory, slot_stride_bytes=8, num_slots=4) for memory in (source, np.zeros(32, np.uint8))]
    pages = make_pages(range(4), range(4))
    return CopyJob(lanes=[make_lane(run_bytes=8)], source={0: sides[0]}, destination={0: sides[1]}, pages=pages)


@pytest.fixture
def plan() -> ScriptedFaults:
    return ScriptedFaults()


@pytest.fixture
def copier(plan: ScriptedFaults) -> Iterator[FaultyCopier]:
    made = FaultyCopier(HostCopier(), plan)
    yield made
    made.close()


def copied(job: CopyJob) -> list[int]:
    return [int(page[0]) for page in job.destination[0].memory.reshape(4, 8)]


def test_a_refused_copy_copies_nothing(copier: FaultyCopier, plan: ScriptedFaults, job: CopyJob) -> None:
    plan.arm(Fault.DROP)
    with pytest.raises(CopyError, match="refused on purpose") as caught:
        copier.submit(job)
    assert not caught.value.in_doubt and copied(job) == [0, 0, 0, 0]
    assert copier.submit(job).done() and copied(job) == [1, 2, 3, 4]


def test_a_held_copy_is_made_when_released(copier: FaultyCopier, plan: ScriptedFaults, job: CopyJob) -> None:
    plan.arm(Fault.HOLD)
    ticket = copier.submit(job)
    assert (ticket.done(), copier.held, copied(job)) == (False, 1, [0, 0, 0, 0])
    assert copier.release() == 1
    assert (ticket.done(), copier.held, copied(job)) == (True, 0, [1, 2, 3, 4])


def test_a_copy_that_fails_half_way_is_over(copier: FaultyCopier, plan: ScriptedFaults, job: CopyJob) -> None:
    plan.arm(Fault.CORRUPT)
    with pytest.raises(CopyError, match="half way") as caught:
        copier.submit(job).done()
    assert not caught.value.in_doubt and copied(job) == [1, 2, 0, 0]


def test_a_copy_in_doubt_may_come_late(copier: FaultyCopier, plan: ScriptedFaults, job: CopyJob) -> None:
    plan.arm(Fault.CUT)
    ticket = copier.submit(job)
    with pytest.raises(CopyError, match="does not answer") as caught:
        ticket.done()
    assert caught.value.in_doubt and (copier.in_doubt, copied(job)) == (1, [0, 0, 0, 0])
    assert copier.release_in_doubt() == 1 and copied(job) == [1, 2, 3, 4]


def test_what_a_dead_process_held_is_never_made(copier: FaultyCopier, plan: ScriptedFaults, job: CopyJob) -> None:
    plan.arm(Fault.HOLD, Fault.CUT)
    copier.submit(job)
    copier.submit(job)
    copier.drop()
    assert (copier.release(), copier.release_in_doubt(), copied(job)) == (0, 0, [0, 0, 0, 0])


# --- plans and clocks -------------------------------------------------------------------------------------------------


def test_a_seed_is_a_run() -> None:
    rates = {Fault.DROP: 0.2, Fault.HOLD: 0.3}
    one, two = (SeededFaults(5, rates) for _ in range(2))
    drawn = [one.next() for _ in range(2000)]
    assert drawn == [two.next() for _ in range(2000)] and one.counts == two.counts
    assert 300 < one.counts[Fault.DROP] < 500 and 500 < one.counts[Fault.HOLD] < 700
    assert sum(one.counts.values()) == 2000 and one.counts[Fault.CUT] == 0
    assert {one.pick(3) for _ in range(50)} == {0, 1, 2}


@pytest.mark.parametrize("rates", [{Fault.DROP: -0.1}, {Fault.DROP: 0.6, Fault.CUT: 0.5}])
def test_rates_that_are_none_are_refused(rates: dict[Fault, float]) -> None:
    with pytest.raises(ConfigError, match="rates"):
        SeededFaults(1, rates)


def test_a_clock_goes_on_and_never_back() -> None:
    clock = SteppingClock(5.0)
    clock.advance(1.5)
    assert clock() == 6.5
    with pytest.raises(ConfigError, match="time only goes on"):
        clock.advance(-1)


def test_a_gone_peer_is_told_as_the_link_behind_tells_it() -> None:
    network = MemoryNetwork()
    one, two = FaultyLink(network.link(), ScriptedFaults()), network.link()
    one.connect(two.address)
    two.abort()
    assert one.poll(0.0) == [PeerGone(two.address, "the peer closed its link")]
    one.abort()
