"""The device copier over a twin of the device: the suite of all copiers, joined launches, order, and failures."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from transfer.copier import CopyJob, Region
from transfer.copy_device import DeviceCopier
from transfer.copy_tiles import MAX_TILE_VECTORS, SidePlace, cut_lanes
from transfer.testing.copier import CopierConformance, make_lane, make_pages, random_case
from transfer.testing.device import HostEngine
from unikv.errors import CopyError

SUITES = {
    size: CopierConformance(make_copier=lambda size=size: DeviceCopier(HostEngine(tile_vectors=size)))
    for size in (8, 256)
}


@pytest.mark.parametrize("size", SUITES)
@pytest.mark.parametrize("name", CopierConformance.names())
def test_conformance(name: str, size: int) -> None:
    SUITES[size].run(name)


@given(data=st.data())
def test_random_jobs(data: st.DataObject) -> None:
    SUITES[8].check_copies(random_case(lambda low, high: data.draw(st.integers(low, high))))


class Event:
    """Somebody else's event."""

    def __init__(self, handle: int) -> None:
        self.cuda_event = handle


def bytes_of(count: int, seed: int = 1) -> np.ndarray[Any, Any]:
    return np.random.default_rng(seed).integers(1, 256, count, dtype=np.uint8)


class Setup:
    """Whole slots of 64 bytes from one pool to another."""

    def __init__(self, **engine: Any) -> None:
        self.engine = HostEngine(**engine)
        self.copier = DeviceCopier(self.engine)
        self.source, self.destination = bytes_of(640), np.zeros(640, np.uint8)
        self.lanes = (make_lane(run_bytes=64),)
        self.regions = tuple(
            {0: Region(memory=m, slot_stride_bytes=64, num_slots=10)} for m in (self.source, self.destination)
        )

    def job(self, src: list[int], dst: list[int], **fields: Any) -> CopyJob:
        return CopyJob(
            lanes=self.lanes, source=self.regions[0], destination=self.regions[1], pages=make_pages(src, dst), **fields
        )

    def slot(self, number: int) -> bytes:
        return self.destination[64 * number : 64 * number + 64].tobytes()

    def sent(self, number: int) -> bytes:
        return self.source[64 * number : 64 * number + 64].tobytes()


def test_jobs_that_are_ready_together_share_a_launch() -> None:
    setup = Setup()
    with setup.copier.together():
        tickets = [setup.copier.submit(setup.job([n], [n + 1])) for n in range(5)]
        assert setup.engine.launches == 0
    assert setup.engine.launches == 1
    assert all(ticket.done() for ticket in tickets)
    assert [setup.slot(n + 1) for n in range(5)] == [setup.sent(n) for n in range(5)]
    setup.copier.close()


def test_asking_for_a_job_starts_it() -> None:
    setup = Setup()
    with setup.copier.together():
        assert setup.copier.submit(setup.job([3], [4])).done()
    assert setup.engine.launches == 1 and setup.slot(4) == setup.sent(3)
    setup.copier.close()


def test_jobs_wait_for_their_own_events_only() -> None:
    setup = Setup()
    first, second = Event(-7), Event(-8)
    with setup.copier.together():
        setup.copier.submit(setup.job([1], [1], after=(first,)))
        setup.copier.submit(setup.job([2], [2], after=(first,)))
        setup.copier.submit(setup.job([3], [3], after=(second,)))
        setup.copier.submit(setup.job([4], [4], after=()))
    assert setup.engine.launches == 3
    assert [event for event in setup.engine.waited_for if event < 0] == [-7, -8]
    waited = len(setup.engine.waited_for)
    setup.copier.submit(setup.job([5], [5]))  # behind the default stream, through an event of the copier's own
    assert len(setup.engine.waited_for) == waited + 1 and setup.engine.waited_for[-1] > 0
    setup.copier.close()


def test_a_copy_that_runs_is_not_done_and_its_memory_is_not_used_again() -> None:
    setup = Setup(num_streams=3)
    assert setup.copier.submit(setup.job([1], [1])).done()
    setup.engine.hold = True
    tickets = [setup.copier.submit(setup.job([n], [n])) for n in range(2, 8)]
    assert not any(ticket.done() for ticket in tickets)
    setup.engine.let_go()
    assert all(ticket.done() for ticket in tickets)
    assert [setup.slot(n) for n in range(1, 8)] == [setup.sent(n) for n in range(1, 8)]
    setup.copier.close()


@pytest.mark.parametrize(
    ("src", "dst", "words"),
    [
        ([1, 10], [1, 2], "source slot is 10"),
        ([1, -1], [1, 2], "source slot is -1"),
        ([1, 2], [2, 11], "destination slot is 11"),
        ([1, 2, 3], [5, 2, 5], r"\(5, 0\)"),
    ],
)
def test_a_known_job_is_checked_as_well_as_a_new_one(src: list[int], dst: list[int], words: str) -> None:
    setup = Setup()
    assert setup.copier.submit(setup.job([1], [1])).done()
    before = setup.destination.copy()
    with pytest.raises(CopyError, match=words) as caught:
        setup.copier.submit(setup.job(src, dst))
    assert not caught.value.in_doubt and np.array_equal(before, setup.destination)
    setup.copier.close()


def test_columns_of_unequal_length_are_refused_for_known_jobs_too() -> None:
    setup = Setup()
    assert setup.copier.submit(setup.job([1, 2], [1, 2])).done()
    job = setup.job([1, 2], [1, 2])
    job = replace(job, pages=replace(job.pages, dst_sub=make_pages([0], [0]).dst_sub))
    with pytest.raises(CopyError, match="pages is"):
        setup.copier.submit(job)
    setup.copier.close()


def test_more_sub_pages_than_before_are_checked_against_the_lanes() -> None:
    setup = Setup()
    setup.lanes = (make_lane(run_bytes=16, src_sub_stride=16, dst_sub_stride=16),)
    job = setup.job([1], [1])
    assert setup.copier.submit(job).done()
    assert setup.copier.submit(replace(job, pages=make_pages([1], [1], [3], [2]))).done()
    assert setup.slot(1)[32:48] == setup.sent(1)[48:]
    with pytest.raises(CopyError, match="last source byte"):
        setup.copier.submit(replace(job, pages=make_pages([1], [1], [4], [2])))
    setup.copier.close()


def test_a_payload_in_pageable_memory_is_pinned_first() -> None:
    setup = Setup(reaches_everything=False)
    destination = setup.copier.host_chunk(640)
    regions = {0: Region(memory=destination, slot_stride_bytes=64, num_slots=10)}
    for first in (1, 4):  # the second payload is not mistaken for the first
        source = {0: Region(memory=bytes_of(640, seed=first), slot_stride_bytes=64, num_slots=10)}
        job = CopyJob(lanes=setup.lanes, source=source, destination=regions, pages=make_pages([first], [first]))
        assert setup.copier.submit(job).done()
        assert np.array_equal(destination[64 * first : 64 * first + 64], source[0].memory[64 * first : 64 * first + 64])
    with pytest.raises(CopyError, match="pageable host memory"):
        setup.copier.submit(replace(job, destination=setup.regions[1]))
    setup.copier.close()


def test_a_device_that_fails_leaves_its_jobs_in_doubt() -> None:
    setup = Setup()
    setup.engine.hold = True
    running = setup.copier.submit(setup.job([1], [1]))
    setup.engine.broken = "an illegal address"
    failed = setup.copier.submit(setup.job([2], [2]))
    for ticket in (running, failed):
        for _ in range(2):
            with pytest.raises(CopyError, match="an illegal address") as caught:
                ticket.done()
            assert caught.value.in_doubt


def test_chunks_at_other_addresses_use_one_program() -> None:
    setup = Setup()
    setup.copier.submit(setup.job([1], [1]))
    chunks = [np.zeros(640, np.uint8) for _ in range(3)]
    for number, chunk in enumerate(chunks):
        target = {0: Region(memory=chunk, slot_stride_bytes=64, num_slots=10)}
        assert setup.copier.submit(replace(setup.job([number], [2]), destination=target)).done()
    assert [chunk[128:192].tobytes() for chunk in chunks] == [setup.sent(n) for n in range(3)]
    assert len(setup.copier._programs) <= 2  # arrays may differ in their last four address bits
    setup.copier.close()


def test_tiles_are_never_larger_than_a_block_and_cover_every_byte_once() -> None:
    lane = make_lane(
        run_bytes=100_016, inner=replace(make_lane().inner, count=3, src_stride=100_016, dst_stride=100_032)
    )
    place = {0: SidePlace(0, 400_000)}
    for size in (8, 256, MAX_TILE_VECTORS):
        tiles = cut_lanes([lane], place, place, tile_vectors=size)
        assert list(tiles) == [16] and tiles[16]["vectors"].max() <= size
        assert tiles[16]["vectors"].sum() * 16 == 3 * 100_016


def test_the_multiplication_divides_exactly() -> None:
    numbers = np.arange(MAX_TILE_VECTORS, dtype=np.uint64)
    for divisor in [*range(2, 300), 1000, 4097, 2**14 - 1, 2**14, MAX_TILE_VECTORS - 1, MAX_TILE_VECTORS]:
        magic = np.uint64(-(-(2**32) // divisor))
        assert np.array_equal(numbers * magic >> np.uint64(32), numbers // np.uint64(divisor))


def test_a_stride_no_kernel_has_room_for_is_refused() -> None:
    lane = make_lane(inner=replace(make_lane().inner, count=2, src_stride=2**31, dst_stride=8))
    with pytest.raises(CopyError, match="lane 0 strides"):
        cut_lanes([lane], {0: SidePlace(0, 2**33)}, {0: SidePlace(0, 2**33)}, tile_vectors=8)
