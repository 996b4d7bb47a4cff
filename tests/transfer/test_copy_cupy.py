"""The device copier: the suite of all copiers on CUDA memory and on pinned memory, random jobs, and what is its own."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from transfer.testing.copier import CopierConformance, CopyCase, make_lane, make_pages, random_case
from transfer.testing.copy_cases import PoolShape

pytestmark = pytest.mark.gpu
cupy = pytest.importorskip("cupy", reason="needs cupy")
copy_cupy = pytest.importorskip("transfer.copy_cupy")
if not cupy.cuda.is_available():
    pytest.skip("no CUDA device", allow_module_level=True)


def to_pinned(array: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    pinned = np.frombuffer(cupy.cuda.alloc_pinned_memory(max(1, array.size)), dtype=np.uint8, count=array.size)
    pinned[:] = array
    return pinned


def from_pinned(array: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    return array.copy()


DEVICE = CopierConformance(make_copier=copy_cupy.CudaCopier, to_device=cupy.asarray, from_device=cupy.asnumpy)
PINNED = CopierConformance(make_copier=copy_cupy.CudaCopier, to_device=to_pinned, from_device=from_pinned)


@pytest.mark.parametrize("name", CopierConformance.names())
def test_conformance_on_the_device(name: str) -> None:
    DEVICE.run(name)


@pytest.mark.parametrize("name", CopierConformance.names())
def test_conformance_on_pinned_host_memory(name: str) -> None:
    PINNED.run(name)


@settings(max_examples=60)
@given(data=st.data())
def test_random_jobs(data: st.DataObject) -> None:
    DEVICE.check_copies(random_case(lambda low, high: data.draw(st.integers(low, high))))


@pytest.mark.parametrize("run_bytes", [16 * 1024, 16 * 1024 + 16, 1 << 20, (1 << 20) + 4, 3 * 49152, 100_003])
def test_long_runs_are_cut_into_tiles(run_bytes: int) -> None:
    shape = PoolShape(slot_stride_bytes=run_bytes, num_slots=3)
    lanes = (make_lane(run_bytes=run_bytes),)
    pages = make_pages([2, 0], [0, 2])
    case = CopyCase(lanes=lanes, source={0: shape}, destination={0: shape}, pages=pages)
    memory = [np.random.default_rng(n).integers(0, 256, 3 * run_bytes, dtype=np.uint8) for n in (1, 2)]
    source, destination = (cupy.asarray(array) for array in memory)
    from transfer.copier import CopyJob, Region  # noqa: PLC0415

    regions = [{0: Region(memory=m, slot_stride_bytes=run_bytes, num_slots=3)} for m in (source, destination)]
    copier = copy_cupy.CudaCopier()
    ticket = copier.submit(CopyJob(lanes=case.lanes, source=regions[0], destination=regions[1], pages=case.pages))
    copier.close()
    assert ticket.done()
    found = cupy.asnumpy(destination).reshape(3, run_bytes)
    assert np.array_equal(found[[0, 2]], memory[0].reshape(3, run_bytes)[[2, 0]])
    assert np.array_equal(found[1], memory[1].reshape(3, run_bytes)[1])
