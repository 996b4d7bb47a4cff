"""The conformance suite of copiers: every copier, host or device, proves itself with the same jobs.

Use it from any test runner::

    suite = CopierConformance(make_copier=HostCopier)

    @pytest.mark.parametrize("name", CopierConformance.names())
    def test_conformance(name):
        suite.run(name)

A case is plain data (`CopyCase`): lanes, pools, page pairs. `check_copies` carries it out and compares the whole
destination memory, guard bytes around the pools included, with an oracle that follows the definition of a lane byte by
byte: a byte too many is noticed as surely as a byte too few. `check_refuses` wants the refusal and untouched memory.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from transfer.copier import Copier, CopyJob, Region
from transfer.testing.copy_cases import CopyCase, PoolShape, gather_case, make_lane, make_pages, scatter_case
from transfer.testing.copy_jobs import COPIES, REFUSALS, random_case
from unikv.errors import CopyError

__all__ = ["CopierConformance", "CopyCase", "PoolShape", "expected_bytes", "make_lane", "make_pages", "random_case"]

Bytes = NDArray[np.uint8]

_GUARD_BYTES: Final = 192
"""Guard before and after every pool; a multiple of 64, so that `PoolShape.base_offset` alone decides the alignment."""

_PATIENCE_S: Final = 30.0
_RANDOM_JOBS: Final = 40


def expected_bytes(case: CopyCase, sources: Mapping[int, Bytes], destinations: Mapping[int, Bytes]) -> dict[int, Bytes]:
    """Return what the destinations (without guards, by pool index) must be after `case`, byte by byte by definition."""
    memory = {pool: bytearray(bytes(array)) for pool, array in destinations.items()}
    for lane in case.lanes:
        of, to = sources[lane.src_pool], memory[lane.dst_pool]
        for page in range(len(case.pages)):
            src = int(case.pages.src_slot[page]) * case.source[lane.src_pool].slot_stride_bytes + lane.src_offset
            dst = int(case.pages.dst_slot[page]) * case.destination[lane.dst_pool].slot_stride_bytes + lane.dst_offset
            src += int(case.pages.src_sub[page]) * lane.src_sub_stride
            dst += int(case.pages.dst_sub[page]) * lane.dst_sub_stride
            for i in range(lane.outer.count):
                for j in range(lane.inner.count):
                    from_row = src + i * lane.outer.src_stride + j * lane.inner.src_stride
                    to_row = dst + i * lane.outer.dst_stride + j * lane.inner.dst_stride
                    for byte in range(lane.run_bytes):
                        to[to_row + byte] = int(of[from_row + byte])
    return {pool: np.frombuffer(bytes(array), np.uint8) for pool, array in memory.items()}


@dataclass(frozen=True, slots=True)
class _Memory:
    """One side of a case: whole allocations on the device, and where the pool lies in each."""

    whole: dict[int, Any]
    bounds: dict[int, slice]

    def regions(self, pools: Mapping[int, PoolShape]) -> dict[int, Region]:
        return {
            index: Region(
                memory=self.whole[index][self.bounds[index]],
                slot_stride_bytes=pool.slot_stride_bytes,
                num_slots=pool.num_slots,
            )
            for index, pool in pools.items()
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class CopierConformance:
    """The suite for one kind of copier.

    Attributes:
        make_copier: makes a copier; the suite closes it.
        to_device: turns a host array into memory that the copier's regions take (for host copiers a plain copy); it
            must be sliceable without copying.
        from_device: the way back, as a host array.
    """

    make_copier: Callable[[], Copier]
    to_device: Callable[[Bytes], Any] = np.copy
    from_device: Callable[[Any], Bytes] = np.copy

    @staticmethod
    def names() -> list[str]:
        """Return the names of all checks, for `run`."""
        named = [f"copies {name}" for name in COPIES] + [f"packs and unpacks {name}" for name in COPIES]
        named += [f"refuses {name}" for name in REFUSALS] + [f"copies random job {n}" for n in range(_RANDOM_JOBS)]
        return [*named, "works on after a refusal", "closes twice"]

    def run(self, name: str) -> None:
        """Run one check.

        Raises:
            AssertionError: the copier does not conform.
            KeyError: there is no such check.
        """
        verb, _, rest = name.partition(" ")
        if verb == "packs":
            self.check_packs(COPIES[name.removeprefix("packs and unpacks ")])
        elif verb == "refuses":
            self.check_refuses(*REFUSALS[rest])
        elif rest.startswith("random job "):
            self.check_copies(_numbered_case(int(rest.removeprefix("random job "))))
        elif verb == "copies":
            self.check_copies(COPIES[rest])
        else:
            {"works on after a refusal": self.check_works_on, "closes twice": self.check_closes_twice}[name]()

    def check_copies(self, case: CopyCase) -> None:
        """Carry `case` out from random bytes over random bytes; compare every byte of the destination memory."""
        copier = self.make_copier()
        try:
            sources = self._fill(case.source, seed=1)
            self._copy_and_compare(copier, case, sources)
        finally:
            copier.close()

    def check_packs(self, case: CopyCase) -> None:
        """Gather the pages of `case` into a packed chunk and scatter them from there: the staged way of a job."""
        if not len(case.pages) or not case.lanes:
            return
        copier = self.make_copier()
        try:
            chunk = self._copy_and_compare(copier, gather_case(case), self._fill(case.source, seed=2))
            self._copy_and_compare(copier, scatter_case(case), chunk)
        finally:
            copier.close()

    def check_refuses(self, case: CopyCase, words: str) -> None:
        """Want a CopyError that says `words` and is not in doubt, and a destination without a changed byte."""
        copier = self.make_copier()
        try:
            self._want_refusal(copier, case, words)
        finally:
            copier.close()

    def check_works_on(self) -> None:
        """A refused job must not spoil the copier for the next one."""
        copier = self.make_copier()
        try:
            case = COPIES["several pools"]
            self._want_refusal(copier, *REFUSALS["a hole as source"])
            self._copy_and_compare(copier, case, self._fill(case.source, seed=3))
        finally:
            copier.close()

    def check_closes_twice(self) -> None:
        """Closing is idempotent, also after a job."""
        copier = self.make_copier()
        case = COPIES["one page"]
        self._copy_and_compare(copier, case, self._fill(case.source, seed=4))
        copier.close()
        copier.close()

    def _want_refusal(self, copier: Copier, case: CopyCase, words: str) -> None:
        sources, destinations = self._fill(case.source, seed=5), self._fill(case.destination, seed=6)
        before = {pool: self.from_device(whole) for pool, whole in destinations.whole.items()}
        try:
            copier.submit(_job(case, sources, destinations))
        except CopyError as error:
            assert not error.in_doubt, f"refused before copying, yet in doubt: {error}"
            assert words in str(error), f"the text must say {words!r}: {error}"
        else:
            raise AssertionError(f"the job was not refused; expected an error that says {words!r}")
        for pool, whole in destinations.whole.items():
            assert np.array_equal(self.from_device(whole), before[pool]), f"pool {pool} changed in a refused job"

    def _copy_and_compare(self, copier: Copier, case: CopyCase, sources: _Memory) -> _Memory:
        destinations = self._fill(case.destination, seed=7)
        wanted = {pool: self.from_device(whole) for pool, whole in destinations.whole.items()}
        inside = {pool: whole[destinations.bounds[pool]] for pool, whole in wanted.items()}
        of = {pool: self.from_device(whole)[sources.bounds[pool]] for pool, whole in sources.whole.items()}
        for pool, array in expected_bytes(case, of, inside).items():
            inside[pool][:] = array
        ticket = copier.submit(_job(case, sources, destinations))
        deadline_s = time.monotonic() + _PATIENCE_S
        while not ticket.done():
            assert time.monotonic() < deadline_s, f"the copy is not done after {_PATIENCE_S} s"
        assert ticket.done(), "a ticket that was done must stay done"
        for pool, whole in destinations.whole.items():
            wrong = np.flatnonzero(self.from_device(whole) != wanted[pool])
            first = int(wrong[0]) - destinations.bounds[pool].start if len(wrong) else 0
            assert not len(wrong), f"pool {pool}: {len(wrong)} bytes differ, the first at byte {first} of the pool"
        return destinations

    def _fill(self, pools: Mapping[int, PoolShape], *, seed: int) -> _Memory:
        """Return memory of random bytes with guards around each pool."""
        whole, bounds = {}, {}
        for index, pool in pools.items():
            start = _GUARD_BYTES + pool.base_offset
            end = start + pool.slot_stride_bytes * pool.num_slots
            content = np.random.default_rng([seed, index]).integers(0, 256, end + _GUARD_BYTES, dtype=np.uint8)
            whole[index], bounds[index] = self.to_device(content), slice(start, end - pool.missing_bytes)
        return _Memory(whole, bounds)


def _job(case: CopyCase, sources: _Memory, destinations: _Memory) -> CopyJob:
    return CopyJob(
        lanes=case.lanes,
        source=sources.regions(case.source),
        destination=destinations.regions(case.destination),
        pages=case.pages,
    )


def _numbered_case(number: int) -> CopyCase:
    generator = np.random.default_rng(number)
    return random_case(lambda lo, hi: int(generator.integers(lo, hi + 1)))
