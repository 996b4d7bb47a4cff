"""The host copier: the conformance suite on one and several threads, random jobs, and what is its own."""

from __future__ import annotations

import threading
import tracemalloc
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from transfer import copy_host
from transfer.copier import CopyJob, Region
from transfer.copy_host import HostCopier
from transfer.copy_moves import find_moves
from transfer.plan import Rows
from transfer.testing.copier import CopierConformance, make_lane, make_pages, random_case
from unikv.errors import ConfigError, CopyError, LocalProtocolError

MIB = 1024 * 1024
SUITE = CopierConformance(make_copier=HostCopier)
THREADED_SUITE = CopierConformance(make_copier=partial(HostCopier, threads=3, split_from_bytes=0))


@pytest.fixture(autouse=True)
def no_thread_left() -> Any:
    before = set(threading.enumerate())
    yield
    assert set(threading.enumerate()) == before


@pytest.mark.parametrize("name", CopierConformance.names())
def test_conformance(name: str) -> None:
    SUITE.run(name)


@pytest.mark.parametrize("name", CopierConformance.names())
def test_conformance_on_three_threads(name: str) -> None:
    THREADED_SUITE.run(name)


@settings(deadline=None, max_examples=60)
@given(data=st.data())
def test_any_sound_job_copies_exactly_its_bytes(data: st.DataObject) -> None:
    SUITE.check_copies(random_case(lambda lo, hi: data.draw(st.integers(lo, hi))))


def region(memory: Any, stride: int = 8, slots: int = 4) -> Region:
    return Region(memory=memory, slot_stride_bytes=stride, num_slots=slots)


def job(**fields: Any) -> CopyJob:
    """Slot 1 to slot 2 of 4 slots of 8 bytes, except for `fields`."""
    plain = CopyJob(
        lanes=(make_lane(run_bytes=8),),
        source={0: region(np.arange(32, dtype=np.uint8))},
        destination={0: region(np.zeros(32, np.uint8))},
        pages=make_pages([1], [2]),
    )
    return replace(plain, **fields)


def read_only() -> Any:
    memory = np.zeros(32, np.uint8)
    memory.flags.writeable = False
    return memory


@pytest.mark.parametrize(
    ("memory", "words"),
    [
        (bytearray(32), "memory is 'bytearray'"),
        (np.zeros(32, np.int8), "int8 array of shape (32,)"),
        (np.zeros((4, 8), np.uint8), "uint8 array of shape (4, 8)"),
        (np.zeros(64, np.uint8)[::2], "strides (2,)"),
        (read_only(), "memory is 'read-only', expected writable"),
    ],
)
def test_memory_of_another_kind_is_refused(memory: Any, words: str) -> None:
    with pytest.raises(CopyError) as caught:
        HostCopier().submit(job(destination={0: region(memory)}))
    assert words in str(caught.value)
    assert "destination region 0" in str(caught.value)
    assert not caught.value.in_doubt


def test_a_read_only_source_is_fine() -> None:
    wanted = job(source={0: region(read_only())}, destination={0: region(np.ones(32, np.uint8))})
    HostCopier().submit(wanted)
    assert wanted.destination[0].memory.tolist() == [1] * 16 + [0] * 8 + [1] * 8


TWO_LANES = (make_lane(run_bytes=4), make_lane(src_offset=4, dst_offset=4, dst_pool=1, run_bytes=4))


def test_two_pools_in_one_memory_are_checked_as_one() -> None:
    memory = np.zeros(32, np.uint8)
    both = {0: region(memory), 1: region(memory)}
    HostCopier().submit(job(lanes=TWO_LANES, destination=both))
    assert memory.tolist() == [0] * 16 + list(range(8, 16)) + [0] * 8
    clash = (TWO_LANES[0], replace(TWO_LANES[1], dst_offset=3))
    with pytest.raises(CopyError, match="destination byte of a slot is 3, expected written once"):
        HostCopier().submit(job(lanes=clash, destination=both))


def test_pools_that_overlap_otherwise_are_refused() -> None:
    memory = np.zeros(64, np.uint8)
    apart, across = region(memory[32:]), region(memory[31:63])
    HostCopier().submit(job(lanes=TWO_LANES, destination={0: region(memory[:32]), 1: apart}))
    with pytest.raises(CopyError, match=r"destination regions is \(0, 1\), expected the same memory and stride"):
        HostCopier().submit(job(lanes=TWO_LANES, destination={0: region(memory[:32]), 1: across}))


def test_a_slot_of_rows_without_distance_is_refused_before_it_is_spread_out() -> None:
    lane = make_lane(inner=Rows(count=1 << 40, src_stride=0, dst_stride=0), run_bytes=8)
    with pytest.raises(CopyError, match="destination byte of a slot is 0"):
        HostCopier().submit(job(lanes=(lane,)))


def test_a_verdict_on_lanes_does_not_outlive_the_strides_it_was_made_for() -> None:
    HostCopier().submit(job())
    with pytest.raises(CopyError, match="last destination byte is 8, expected <= the slot stride of 7"):
        HostCopier().submit(job(destination={0: region(np.zeros(32, np.uint8), stride=7)}))


@pytest.mark.parametrize("run_bytes", [256, 1024, 65536])
def test_nothing_of_the_payloads_size_is_allocated(run_bytes: int) -> None:
    slots = 4 * MIB // (2 * run_bytes)
    lane = make_lane(run_bytes=run_bytes)
    source, destination = np.ones(4 * MIB, np.uint8), np.zeros(2 * MIB, np.uint8)
    copy = CopyJob(
        lanes=(lane,),
        source={0: region(source, 2 * run_bytes, slots)},
        destination={0: region(destination, run_bytes, slots)},
        pages=make_pages(range(slots), range(slots)),
    )
    tracemalloc.start()
    HostCopier().submit(copy)
    peak_bytes = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert destination.all()
    assert peak_bytes < 2 * MIB // 4 + 64 * slots


def test_neighbouring_pages_move_together() -> None:
    pages = make_pages([3, 4, 5, 9, 1, 2], [6, 7, 8, 1, 3, 4])
    assert find_moves(pages, 0, 6, 0) == [
        ((slice(6, 9), 0), (slice(3, 6), 0)),
        ((1, 0), (9, 0)),
        ((slice(3, 5), 0), (slice(1, 3), 0)),
    ]


def test_sub_pages_of_one_slot_move_together_with_neighbouring_slots() -> None:
    pages = make_pages([5, 5, 6, 6], [7, 8, 9, 10], [0, 1, 0, 1])
    assert find_moves(pages, 0, 4, 0) == [
        ((slice(7, 9), 0), (5, slice(0, 2))),
        ((slice(9, 11), 0), (6, slice(0, 2))),
    ]


def test_moves_keep_to_their_limit_and_their_part_of_the_pages() -> None:
    pages = make_pages(range(10), range(20, 30))
    assert find_moves(pages, 2, 7, 2) == [
        ((slice(22, 24), 0), (slice(2, 4), 0)),
        ((slice(24, 26), 0), (slice(4, 6), 0)),
        ((26, 0), (6, 0)),
    ]


def test_a_closed_copier_says_so() -> None:
    copier = HostCopier(threads=2)
    copier.close()
    with pytest.raises(LocalProtocolError, match="host copier: state is 'closed'"):
        copier.submit(job())


def test_no_threads_at_all_is_a_configuration_error() -> None:
    with pytest.raises(ConfigError, match="threads is 0, expected an integer >= 1"):
        HostCopier(threads=0)


@pytest.mark.parametrize("failing_part", [0, 1])
def test_a_failed_copy_waits_for_every_thread_before_it_says_so(
    monkeypatch: pytest.MonkeyPatch, failing_part: int
) -> None:
    gate, finished = threading.Event(), []

    def copy(_job: object, _subs: object, first: int, _end: int) -> None:
        if first == failing_part:
            gate.set()
            raise MemoryError("no room")
        gate.wait(10)
        finished.append(first)

    monkeypatch.setattr(copy_host, "_copy_pages", copy)
    copier = HostCopier(threads=2, split_from_bytes=0)
    with pytest.raises(CopyError, match="no room") as caught:
        copier.submit(job(pages=make_pages([1, 2], [0, 3])))
    copier.close()
    assert finished == [1 - failing_part]
    assert not caught.value.in_doubt
