"""The conformance suite itself: it notices copiers that copy too little, too much, or what they should refuse."""

from __future__ import annotations

import numpy as np
import pytest

from transfer.copier import CopyJob, CopyTicket
from transfer.copy_host import HostCopier
from transfer.testing.copier import CopierConformance, CopyCase, PoolShape, expected_bytes, make_lane, make_pages
from unikv.errors import CopyError


class _Done:
    def done(self) -> bool:
        return True


class _Lazy:
    """Does nothing, and refuses nothing."""

    def submit(self, job: CopyJob) -> _Done:
        return _Done()

    def close(self) -> None:
        pass


class _Spilling(HostCopier):
    """Copies right, and then changes the byte before the first destination pool."""

    def submit(self, job: CopyJob) -> CopyTicket:
        ticket = super().submit(job)
        memory = next(iter(job.destination.values())).memory
        memory.base[memory.ctypes.data - memory.base.ctypes.data - 1] ^= 1
        return ticket


class _TooLate(HostCopier):
    """Refuses what it must, after it wrote."""

    def submit(self, job: CopyJob) -> CopyTicket:
        job.destination[0].memory[0] ^= 1
        return super().submit(job)


class _Doubtful(HostCopier):
    """Refuses before it writes, and does not know it."""

    def submit(self, job: CopyJob) -> CopyTicket:
        try:
            return super().submit(job)
        except CopyError as error:
            raise CopyError(str(error), in_doubt=True) from error


@pytest.mark.parametrize(
    ("copier", "check", "words"),
    [
        (_Lazy, "copies one page", "pool 0: .* bytes differ, the first at byte 864"),
        (_Lazy, "refuses rows that overlap", "the job was not refused"),
        (_Spilling, "copies several pools", "1 bytes differ, the first at byte -1"),
        (_TooLate, "refuses a hole as source", "changed in a refused job"),
        (_Doubtful, "refuses a hole as source", "yet in doubt"),
    ],
)
def test_a_copier_that_does_not_conform_is_noticed(copier: type, check: str, words: str) -> None:
    with pytest.raises(AssertionError, match=words):
        CopierConformance(make_copier=copier).run(check)


def test_every_name_is_a_check_and_no_name_stands_twice() -> None:
    names = CopierConformance.names()
    assert len(set(names)) == len(names) > 100
    with pytest.raises(KeyError):
        CopierConformance(make_copier=HostCopier).run("copies nothing of the kind")


def test_the_oracle_follows_the_definition_of_a_lane() -> None:
    case = CopyCase(
        lanes=(make_lane(src_offset=1, dst_offset=2, src_sub_stride=3, run_bytes=2),),
        source={0: PoolShape(slot_stride_bytes=8, num_slots=2)},
        destination={0: PoolShape(slot_stride_bytes=5, num_slots=3)},
        pages=make_pages([1], [2], [1], [0]),
    )
    after = expected_bytes(case, {0: np.arange(16, dtype=np.uint8)}, {0: np.zeros(15, np.uint8)})
    assert after[0].tolist() == [0] * 12 + [12, 13] + [0]
