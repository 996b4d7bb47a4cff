"""The device copier: one kernel that runs a job's lanes over its pages, on CUDA memory and on pinned host memory.

Addresses are computed in the kernel, from the lanes (uploaded once) and the two page tables (a few KiB per job). What a
block copies is a tile of at most 16 KiB, so that large pages and many small rows give equally many equal blocks::

    lane   pages x outer rows x inner rows x parts of a run           one row of the grid's work
    tile   256 threads = (256 / G) rows of G threads, four rows (or four steps along one) in flight per thread
    G      the smallest power of two that covers a part in vectors, at most 256
    V      the widest vector (16, 8, 4 or 1 bytes) that every address and length of the lane is a multiple of

A job is one launch per (vector width, G): lanes of one kind share it, and most programs have one kind.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import gcd
from pathlib import Path
from typing import Any, Final

import cupy
import numpy as np
from numpy.typing import NDArray

from transfer.copier import CopyJob, CopyTicket, Region
from transfer.copy_checks import Extent, check_job, refuse
from transfer.pages import PagePairs
from transfer.plan import Lane
from unikv.errors import CopyError, LocalProtocolError, explain

_THREADS: Final = 256
_STEPS: Final = 4
_PROGRAMS: Final = 256
"""Lane sets kept on the device; a pair of ranks has a few, the staged path two per group pair."""
_RING: Final = 16
"""Page tables that may be under way at one time; the next one waits for the oldest."""
_SOURCE: Final = Path(__file__).with_name("copy_kernel.cu")
_COLUMNS: Final = 16
_MAX_ROWS: Final = 2**31

Key = tuple[tuple[Lane, ...], tuple[tuple[int, int, int], ...], tuple[tuple[int, int, int], ...]]


@dataclass(frozen=True, slots=True)
class _Launch:
    """Lanes of one kind, on the device.

    Attributes:
        lanes: int64 ``[lanes, 16]``, see `_row`.
        rows_per_page: tiles' rows of each lane and page, int64 ``[lanes]`` on the host.
        rows_per_block: rows one block copies.
    """

    lanes: Any
    rows_per_page: NDArray[np.int64]
    vector: int
    group: int
    rows_per_block: int


class _EventTicket:
    """A copy that is over when its event is."""

    def __init__(self, event: Any) -> None:
        self._event = event

    def done(self) -> bool:
        """Return whether every byte has landed.

        Raises:
            CopyError: (in_doubt) the device reports an error.
        """
        try:
            return bool(self._event.done)
        except cupy.cuda.runtime.CUDARuntimeError as error:
            text = explain("copy job", "device", error, "no error", "end the process: its device context is lost")
            raise CopyError(text, in_doubt=True) from error


class _Landed:
    def done(self) -> bool:
        """Return True: there was nothing to copy."""
        return True


class CudaCopier:
    """Copies between CUDA regions, and between those and pinned host memory. Jobs run one after the other.

    `submit` returns at once. The copy begins after everything that was queued on the device's default stream before, so
    that KV which a model has just computed there needs no synchronisation.
    """

    def __init__(self, device: int = 0) -> None:
        """Make a copier for one device.

        Args:
            device: its number in this process.

        Raises:
            CopyError: there is no such device, or the kernel does not compile for it.
        """
        self._device = cupy.cuda.Device(device)
        try:
            with self._device:
                self._stream = cupy.cuda.Stream(non_blocking=True)
                self._kernels = {
                    vector: cupy.RawModule(
                        code=_SOURCE.read_text(), options=(f"-DVECTOR={vector}", "-std=c++14")
                    ).get_function("copy_pages")
                    for vector in (16, 8, 4, 1)
                }
        except (cupy.cuda.runtime.CUDARuntimeError, cupy.cuda.compiler.CompileException) as error:
            text = explain("cuda copier", "device", device, "a CUDA device", f"see `unikv doctor` ({error})")
            raise CopyError(text, in_doubt=False) from error
        self._programs: OrderedDict[Any, tuple[_Launch, ...]] = OrderedDict()
        self._ring: list[_PageSlot | None] = [None] * _RING
        self._next = 0
        self._closed = False

    def submit(self, job: CopyJob) -> CopyTicket:
        """Start `job` on the copier's stream.

        Raises:
            CopyError: (in_doubt False) the job was refused; nothing was copied. (in_doubt) the launch failed.
            LocalProtocolError: the copier is closed.
        """
        if self._closed:
            raise LocalProtocolError(explain("cuda copier", "state", "closed", "open", "make a new copier"))
        source, destination = _extents(job.source, "source"), _extents(job.destination, "destination")
        check_job(job, source, destination)
        if not len(job.pages) or not job.lanes:
            return _Landed()
        with self._device:
            try:
                return self._launch(job, source, destination)
            except cupy.cuda.runtime.CUDARuntimeError as error:
                text = explain("copy job", "launch", error, "no error", "end the process: its device context is lost")
                raise CopyError(text, in_doubt=True) from error

    def close(self) -> None:
        """Wait for what was submitted and free the device memory. Idempotent."""
        if not self._closed:
            self._closed = True
            with self._device:
                self._stream.synchronize()
            self._programs.clear()
            self._ring = []

    def _launch(self, job: CopyJob, source: Mapping[int, Extent], destination: Mapping[int, Extent]) -> CopyTicket:
        ready = cupy.cuda.Event(disable_timing=True)
        ready.record(cupy.cuda.Stream.null)
        self._stream.wait_event(ready)
        launches = self._program(job, source, destination)
        most = max(int(launch.rows_per_page.max()) for launch in launches)
        if most * len(job.pages) > _MAX_ROWS:
            want = f"at most {_MAX_ROWS // most} of {most} rows each"
            raise refuse("pages", len(job.pages), want, "copy fewer pages in one job")
        pages = self._upload(job.pages)
        count = len(job.pages)
        with self._stream:
            for launch in launches:
                blocks = np.zeros(len(launch.rows_per_page) + 1, dtype=np.int64)
                np.cumsum(-(-launch.rows_per_page * count // launch.rows_per_block), out=blocks[1:])
                self._start(launch, pages, count, blocks)
            event = cupy.cuda.Event(block=False, disable_timing=True)
            event.record(self._stream)
        pages.busy_until = event
        return _EventTicket(event)

    def _start(self, launch: _Launch, pages: _PageSlot, count: int, blocks: NDArray[np.int64]) -> None:
        firsts = pages.put_firsts(blocks, self._stream)
        self._kernels[launch.vector](
            (int(blocks[-1]),),
            (_THREADS,),
            (
                launch.lanes,
                np.int32(len(launch.rows_per_page)),
                firsts,
                pages.device,
                np.int32(count),
                np.int32(launch.group),
                np.int32(launch.rows_per_block),
            ),
        )

    def _program(
        self, job: CopyJob, source: Mapping[int, Extent], destination: Mapping[int, Extent]
    ) -> tuple[_Launch, ...]:
        lanes = tuple(job.lanes)
        key = (lanes, _places(job.source, source), _places(job.destination, destination))
        found = self._programs.get(key)
        if found is None:
            found = self._programs[key] = self._compile(lanes, job, source, destination)
            while len(self._programs) > _PROGRAMS:
                self._programs.popitem(last=False)
        else:
            self._programs.move_to_end(key)
        return found

    def _compile(
        self, lanes: Sequence[Lane], job: CopyJob, source: Mapping[int, Extent], destination: Mapping[int, Extent]
    ) -> tuple[_Launch, ...]:
        kinds: dict[tuple[int, int, bool], list[tuple[list[int], int]]] = {}
        for lane in lanes:
            src, dst = job.source[lane.src_pool], job.destination[lane.dst_pool]
            bases = source[lane.src_pool].address, destination[lane.dst_pool].address
            strides = src.slot_stride_bytes, dst.slot_stride_bytes
            vector = _vector(lane, strides, bases)
            part = _part(lane.run_bytes, vector)
            vectors, parts = part // vector, lane.run_bytes // part
            kind = vector, min(_THREADS, 1 << (vectors - 1).bit_length()), vectors > _THREADS
            row = _row(lane, bases, strides, vectors, parts)
            kinds.setdefault(kind, []).append((row, lane.outer.count * lane.inner.count * parts))
        launches = []
        for (vector, group, is_long), rows in sorted(kinds.items(), reverse=True):
            with self._stream:
                device = cupy.asarray(np.array([row for row, _ in rows], dtype=np.int64))
            launches.append(
                _Launch(
                    lanes=device,
                    rows_per_page=np.array([count for _, count in rows], dtype=np.int64),
                    vector=vector,
                    group=group,
                    rows_per_block=1 if is_long else _THREADS // group * _STEPS,
                )
            )
        return tuple(launches)

    def _upload(self, pages: PagePairs) -> _PageSlot:
        """Return the page table on the device; the upload is queued before whatever reads it."""
        number, self._next = self._next, (self._next + 1) % _RING
        slot = self._ring[number]
        if slot is None or slot.capacity < len(pages):
            if slot is not None:
                slot.wait()
            slot = self._ring[number] = _PageSlot(max(1024, 1 << (len(pages) - 1).bit_length()))
        slot.wait()
        slot.put_pages(pages, self._stream)
        return slot


class _PageSlot:
    """Pinned and device memory for one page table and the block numbers of its launches."""

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.busy_until: Any = None
        self.device = cupy.empty(4 * capacity, dtype=cupy.int32)
        self._pinned = _pinned(16 * capacity).view(np.int32)
        self._firsts: list[tuple[Any, NDArray[np.int64]]] = []
        self._used = 0

    def wait(self) -> None:
        """Wait until the last job that used this slot is over."""
        if self.busy_until is not None:
            self.busy_until.synchronize()
            self.busy_until = None
        self._used = 0

    def put_pages(self, pages: PagePairs, stream: Any) -> None:
        count = len(pages)
        for number, column in enumerate((pages.src_slot, pages.src_sub, pages.dst_slot, pages.dst_sub)):
            self._pinned[number * count : (number + 1) * count] = column
        _to_device(self.device, self._pinned[: 4 * count], stream)

    def put_firsts(self, blocks: NDArray[np.int64], stream: Any) -> Any:
        """Return the first block of every lane on the device."""
        if self._used == len(self._firsts) or self._firsts[self._used][1].size < blocks.size:
            size = max(64, blocks.size)
            entry = (cupy.empty(size, dtype=cupy.int64), _pinned(8 * size).view(np.int64))
            self._firsts[self._used : self._used + 1] = [entry]
        device, pinned = self._firsts[self._used]
        self._used += 1
        pinned[: blocks.size] = blocks
        _to_device(device, pinned[: blocks.size], stream)
        return device


def _to_device(device: Any, host: NDArray[Any], stream: Any) -> None:
    cupy.cuda.runtime.memcpyAsync(
        device.data.ptr, host.ctypes.data, host.nbytes, cupy.cuda.runtime.memcpyHostToDevice, stream.ptr
    )


def _pinned(size_bytes: int) -> NDArray[np.uint8]:
    memory = cupy.cuda.alloc_pinned_memory(size_bytes)
    return np.frombuffer(memory, dtype=np.uint8, count=size_bytes)


def _vector(lane: Lane, slot_strides: tuple[int, int], bases: tuple[int, int]) -> int:
    """Return the widest vector that divides every address and length of a lane."""
    lengths = (
        lane.run_bytes, lane.src_offset, lane.dst_offset, lane.src_sub_stride, lane.dst_sub_stride,
        lane.outer.src_stride, lane.outer.dst_stride, lane.inner.src_stride, lane.inner.dst_stride,
        *slot_strides, *bases,
    )  # fmt: skip
    common = gcd(*lengths, 16)
    return 16 if common == 16 else 8 if common % 8 == 0 else 4 if common % 4 == 0 else 1


def _part(run_bytes: int, vector: int) -> int:
    """Return how long the parts are that long runs are cut into: equal ones, of at most a tile if that is possible."""
    tile = _THREADS * _STEPS * vector
    if run_bytes <= tile:
        return run_bytes
    vectors = run_bytes // vector
    fewest = -(-run_bytes // tile)
    for parts in range(fewest, min(vectors, 4 * fewest) + 1):
        if vectors % parts == 0:
            return run_bytes // parts
    return run_bytes


def _row(lane: Lane, bases: tuple[int, int], slot_strides: tuple[int, int], part_vectors: int, parts: int) -> list[int]:
    """Return a lane as the kernel reads it; the names are those of its struct."""
    row = [
        bases[0] + lane.src_offset, bases[1] + lane.dst_offset, slot_strides[0], slot_strides[1],
        lane.src_sub_stride, lane.dst_sub_stride, lane.outer.src_stride, lane.outer.dst_stride,
        lane.inner.src_stride, lane.inner.dst_stride, lane.inner.count, lane.outer.count,
        part_vectors, parts, 0, 0,
    ]  # fmt: skip
    assert len(row) == _COLUMNS
    return row


def _places(regions: Mapping[int, Region], extents: Mapping[int, Extent]) -> tuple[tuple[int, int, int], ...]:
    return tuple((pool, extents[pool].address, region.slot_stride_bytes) for pool, region in sorted(regions.items()))


def _extents(regions: Mapping[int, Region], side: str) -> dict[int, Extent]:
    """Return where the regions lie, after checking that a kernel may touch them."""
    extents = {}
    for pool, region in regions.items():
        memory = region.memory
        sound = isinstance(memory, cupy.ndarray | np.ndarray) and memory.dtype == np.uint8 and memory.ndim == 1
        if not sound or not memory.flags.c_contiguous:
            got = f"{memory.dtype} array of shape {memory.shape}" if hasattr(memory, "shape") else type(memory).__name__
            want = "a contiguous one-dimensional uint8 array"
            raise refuse(f"{side} region {pool} memory", got, want, "pass the pool's bytes")
        if isinstance(memory, cupy.ndarray):
            extents[pool] = Extent(address=memory.data.ptr, size_bytes=memory.size)
        else:
            extents[pool] = Extent(address=_pinned_address(memory, side, pool), size_bytes=memory.size)
    return extents


def _pinned_address(memory: NDArray[np.uint8], side: str, pool: int) -> int:
    if side == "destination" and not memory.flags.writeable:
        raise refuse(f"{side} region {pool} memory", "read-only", "writable", "pass memory that may be written")
    address = int(memory.__array_interface__["data"][0])
    try:
        known = memory.size == 0 or cupy.cuda.runtime.pointerGetAttributes(address).type != _UNREGISTERED
    except cupy.cuda.runtime.CUDARuntimeError:
        known = False
    if not known:
        want = "device memory or pinned host memory"
        raise refuse(f"{side} region {pool} memory", "pageable host memory", want, "pin it: a kernel cannot reach it")
    return address


_UNREGISTERED: Final = 0
"""cudaMemoryTypeUnregistered."""
