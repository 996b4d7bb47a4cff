"""The host copier: lanes as strided numpy assignments, without a temporary of the payload's size.

Per lane both pools are seen as one array each, of the same trailing shape, and pages are sliced out of it::

    view   [slot, sub-page, outer row, inner row]            an element is one whole run (short runs), or
    view   [slot, sub-page, outer row, inner row, part]      a part of a run, or a byte (long runs)
    move   destination view[slots, sub] = source view[slots, sub]     slots: one page, or neighbouring pages at once

What was measured and why it is so: an element as large as the run spares numpy its per-row set-up (runs of 16 to 128
bytes copy two to three times faster, 1 KiB by a tenth), and needs no alignment at all. Rows of 32 KiB and more are a
few percent faster in parts of 2 KiB; and numpy frees the interpreter's lock only for more than 500 elements, which so
few bytes an element make of every copy that lasts. A lane that is one run, seen as bytes, is one long copy for the C
library, and if it is the whole slot on both sides, a single one for all neighbouring slots. Runs of 1 to 2 KiB are
moved in strips of 512 bytes, the largest size that the C library copies without its loop for long blocks, page by page
so that the second strip finds its page in the cache.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from transfer.copier import CopyJob, CopyTicket, Region
from transfer.copy_checks import Extent, SubCounts, check_job, refuse
from transfer.copy_moves import Move, find_moves
from transfer.plan import Lane
from unikv.errors import ConfigError, CopyError, LocalProtocolError, explain

_LONGEST_ELEMENT_BYTES: Final = 4 * 1024
"""Runs up to this are one element of the view."""

_PART_BYTES: Final = 2 * 1024
"""The element of longer runs, where there are several rows of a multiple of it; a byte else."""

_STRIP_BYTES: Final = 512
_STRIPPED_RUNS_BYTES: Final = (1024, 1536, 2048)
_STRIP_WINDOW_BYTES: Final = 4 * 1024 * 1024
"""Bytes of a lane moved strip by strip before the next pages: about what stays in the cache."""


class _Landed:
    """The ticket of a copy that was over when submit returned."""

    def done(self) -> bool:
        """Return True: every byte has landed."""
        return True


class HostCopier:
    """Copies between host regions with numpy. `submit` returns when the bytes have landed.

    The interpreter's lock is free during the copies, so other threads run on, and `threads` > 1 splits a job's pages
    among threads of the copier's own. The lock is taken again after every move: beside a thread that runs Python
    without a pause, each one waits up to `sys.getswitchinterval()` for it. Source rows must not be destination rows of
    the same job.
    """

    def __init__(self, *, threads: int = 1, split_from_bytes: int = 4 * 1024 * 1024) -> None:
        """Make a copier.

        Args:
            threads: threads that share the pages of one job, the calling one included. More than one helps only
                where one core does not reach the memory's bandwidth and further cores are idle.
            split_from_bytes: smaller jobs stay on the calling thread; waking another one costs about as much as
                copying a few MiB.

        Raises:
            ConfigError: `threads` is not at least 1.
        """
        if threads < 1:
            raise ConfigError(explain("host copier", "threads", threads, "an integer >= 1", "use 1 to copy in place"))
        self._threads = threads
        self._split_from_bytes = split_from_bytes
        self._helpers = ThreadPoolExecutor(threads - 1, thread_name_prefix="unikv-copy") if threads > 1 else None
        self._closed = False

    def submit(self, job: CopyJob) -> CopyTicket:
        """Copy `job` and return a ticket that is done. Borrows the regions only for the call.

        Raises:
            CopyError: (in_doubt False) the job was refused, nothing was copied; or the copy itself failed, then some
                pages were written, but nothing more will be.
            LocalProtocolError: the copier is closed.
        """
        if self._closed:
            raise LocalProtocolError(explain("host copier", "state", "closed", "open", "make a new copier"))
        subs = check_job(job, _extents(job.source, "source"), _extents(job.destination, "destination"))
        if len(job.pages) and job.lanes:
            self._copy(job, subs)
        return _Landed()

    def close(self) -> None:
        """Stop the copier's threads. Idempotent."""
        self._closed = True
        if self._helpers is not None:
            self._helpers.shutdown(wait=True)
            self._helpers = None

    def _copy(self, job: CopyJob, subs: SubCounts) -> None:
        size = len(job.pages) * sum(lane.page_bytes for lane in job.lanes)
        parts = min(self._threads, len(job.pages)) if size >= self._split_from_bytes else 1
        bounds = [len(job.pages) * part // parts for part in range(parts + 1)]
        work = [partial(_copy_pages, job, subs, lo, hi) for lo, hi in pairwise(bounds)]
        elsewhere = [self._helpers.submit(part) for part in work[1:]] if self._helpers else []
        failures: list[Exception] = []
        waits: list[Callable[[], None]] = [work[0], *(future.result for future in elsewhere)]
        for wait in waits:
            try:
                wait()
            except Exception as failure:
                failures.append(failure)
        if failures:
            text = explain("copy job", "copy", repr(failures[0]), "no failure", "the pages are half written; drop them")
            raise CopyError(text, in_doubt=False) from failures[0]


def _extents(regions: Mapping[int, Region], side: str) -> dict[int, Extent]:
    """Return where the regions lie, after checking that they are what this copier can use."""
    extents = {}
    for pool, region in regions.items():
        memory = region.memory
        sound = isinstance(memory, np.ndarray) and memory.dtype == np.uint8 and memory.ndim == 1
        if not sound or not memory.flags.c_contiguous:
            want = "a contiguous one-dimensional uint8 array"
            raise refuse(f"{side} region {pool} memory", _describe(memory), want, "pass the pool's bytes")
        if side == "destination" and not memory.flags.writeable:
            raise refuse(f"{side} region {pool} memory", "read-only", "writable", "map the pool for writing")
        extents[pool] = Extent(address=memory.__array_interface__["data"][0], size_bytes=memory.size)
    return extents


def _describe(memory: object) -> str:
    if isinstance(memory, np.ndarray):
        return f"{memory.dtype} array of shape {memory.shape}, strides {memory.strides}"
    return type(memory).__name__


def _copy_pages(job: CopyJob, subs: SubCounts, first: int, end: int) -> None:
    """Copy page pairs ``[first, end)`` along all lanes."""
    source, destination = job.source, job.destination
    moves_by_limit: dict[int, list[Move]] = {}
    for lane in job.lanes:
        grain = _Grain.of(lane)
        if grain.pages_per_move not in moves_by_limit:
            moves_by_limit[grain.pages_per_move] = find_moves(job.pages, first, end, grain.pages_per_move)
        moves = moves_by_limit[grain.pages_per_move]
        strips = range(0, lane.run_bytes, grain.strip_bytes)
        from_views = [_view(source[lane.src_pool], grain, _source_dims(lane, subs.src), at) for at in strips]
        to_views = [_view(destination[lane.dst_pool], grain, _destination_dims(lane, subs.dst), at) for at in strips]
        if len(strips) == 1:
            from_view, to_view = from_views[0], to_views[0]
            for to, of in moves:
                to_view[to] = from_view[of]
        else:
            for to, of in moves:
                for to_view, from_view in zip(to_views, from_views, strict=True):
                    to_view[to] = from_view[of]


@dataclass(frozen=True, slots=True)
class _Grain:
    """How a lane's runs are cut: elements of `element_bytes` in strips of `strip_bytes`, so many pages at once."""

    element_bytes: int
    strip_bytes: int
    pages_per_move: int

    @staticmethod
    def of(lane: Lane) -> _Grain:
        """Choose by the length of the run; the module's text says why."""
        run = lane.run_bytes
        if run > _LONGEST_ELEMENT_BYTES:
            in_parts = not lane.is_single_run and run % _PART_BYTES == 0
            return _Grain(_PART_BYTES if in_parts else 1, run, 0)
        if run in _STRIPPED_RUNS_BYTES:
            return _Grain(_STRIP_BYTES, _STRIP_BYTES, max(1, _STRIP_WINDOW_BYTES // lane.page_bytes))
        return _Grain(run, run, 0)


@dataclass(frozen=True, slots=True)
class _Dims:
    """The rows of a lane on one side: shape and strides of (sub-page, outer, inner), and the first byte."""

    offset: int
    counts: tuple[int, int, int]
    strides: tuple[int, int, int]


def _source_dims(lane: Lane, subs: int) -> _Dims:
    strides = (lane.src_sub_stride, lane.outer.src_stride, lane.inner.src_stride)
    return _Dims(lane.src_offset, (subs, lane.outer.count, lane.inner.count), strides)


def _destination_dims(lane: Lane, subs: int) -> _Dims:
    strides = (lane.dst_sub_stride, lane.outer.dst_stride, lane.inner.dst_stride)
    return _Dims(lane.dst_offset, (subs, lane.outer.count, lane.inner.count), strides)


def _view(region: Region, grain: _Grain, dims: _Dims, strip: int) -> NDArray[Any]:
    """Return ``[slot, sub, outer, inner(, part)]`` over one strip of the runs; numpy checks it against the memory."""
    shape: tuple[int, ...] = (region.num_slots, *dims.counts)
    strides: tuple[int, ...] = (region.slot_stride_bytes, *dims.strides)
    if grain.element_bytes < grain.strip_bytes:
        shape, strides = (*shape, grain.strip_bytes // grain.element_bytes), (*strides, grain.element_bytes)
    dtype = np.dtype((np.void, grain.element_bytes)) if grain.element_bytes > 1 else np.dtype(np.uint8)
    return np.ndarray(shape, dtype, region.memory, dims.offset + strip, strides)
