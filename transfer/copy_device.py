"""The device copier without the device: programs kept there, page tables in a ring, launches joined, events polled.

What touches a device is behind `DeviceEngine`; `transfer/copy_cupy.py` is the one of CUDA, and the twin in
`transfer/testing_device.py` runs the same tiles on the host.

::

    submit   check the job's slots (its lanes were checked before)  ->  one int32 row per page
    flush    rows of all jobs into a pinned buffer, one upload, one launch per program and vector width, one event
    done     asks the event; nothing here ever waits for the device without a limit

Jobs submitted inside `together` are flushed together: requests that are ready at the same time share launches.
"""

from __future__ import annotations

import logging
import time
from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Final, Protocol

import numpy as np
from numpy.typing import NDArray

from transfer.copier import CopyJob, CopyTicket, Region
from transfer.copy_checks import Extent, SubCounts, check_job, refuse
from transfer.copy_tiles import SidePlace, Tiles, cut_lanes
from transfer.device_bytes import DeviceBytes
from transfer.pages import PagePairs
from transfer.plan import Lane
from unikv.errors import CopyError, LocalProtocolError, explain

_log = logging.getLogger(__name__)

PROGRAMS: Final = 256
"""Programs kept on the device; a pair of ranks has a few."""
MAX_GRID_PAGES: Final = 65_535
"""Pages of one launch."""
CLOSE_S: Final = 5.0
"""Longest time `close` waits for copies that run."""
_CLOSE_POLL_S: Final = 0.001
_ROW_BYTES: Final = 16
_RING_PAGES: Final = 4096
"""Pages of one buffer of the ring; larger batches get a buffer of their own size."""

Rows = NDArray[np.int32]


class DeviceEngine(Protocol):
    """One device: memory, streams, events and the kernel. Handles are whatever the engine makes them.

    Attributes:
        tile_vectors: most vectors of one tile of its kernel.
        num_streams: streams of its own; jobs on different ones may run at the same time.
    """

    tile_vectors: int
    num_streams: int

    def adopt_thread(self) -> None:
        """Make the calling thread able to use the device."""
        ...

    def reaches(self, array: NDArray[Any]) -> bool:
        """Return whether kernels can touch this host memory."""
        ...

    def pinned(self, size_bytes: int) -> NDArray[np.uint8]:
        """Return host memory that kernels can touch; it goes with its last user."""
        ...

    def allocate(self, size_bytes: int) -> DeviceBytes:
        """Return device memory of the engine's own; it goes with its last user."""
        ...

    def copy_in(self, stream: int, target: DeviceBytes, source: NDArray[Any]) -> None:
        """Queue the copy of pinned memory to the device."""
        ...

    def launch(
        self, stream: int, width: int, tiles: DeviceBytes, rows: tuple[DeviceBytes, int], shifts: tuple[int, int]
    ) -> None:
        """Queue the kernel over all of `tiles` for each of `rows` (where they are, and how many)."""
        ...

    def new_event(self) -> Any:
        """Return an event to `record`."""
        ...

    def record(self, event: Any, stream: int | None) -> None:
        """Let `event` happen when everything queued so far is over: on a stream, or (None) on the default stream."""
        ...

    def wait(self, stream: int, event: Any) -> None:
        """Let a stream wait for an event, on the device. Also takes events of others (`DeviceEvent.cuda_event`)."""
        ...

    def happened(self, event: Any) -> bool:
        """Return whether `event` has happened."""
        ...

    def elapsed_s(self, start: Any, end: Any) -> float:
        """Return the time between two events that have happened."""
        ...

    def close(self) -> None:
        """Free streams and events. Nothing runs any more."""
        ...


@dataclass(frozen=True, slots=True)
class _Launch:
    width: int
    tiles: DeviceBytes


@dataclass(slots=True)
class _Program:
    """Lanes between two sets of regions, checked, on the device."""

    launches: tuple[_Launch, ...]
    uploaded: Any
    """Event of the upload, None once it is known to have happened."""


@dataclass(slots=True)
class _Known:
    """A job's lanes and regions, recognised by identity. They are not changed while jobs use them, nor after."""

    lanes: Sequence[Lane]
    source: Mapping[int, Region]
    destination: Mapping[int, Region]
    program: _Program
    shifts: tuple[int, int]
    limits: NDArray[np.uint32]
    """First (source slot, source sub-page, destination slot, destination sub-page) that may not be named."""


@dataclass(slots=True)
class _Buffer:
    """Pinned and device memory for the rows of one batch."""

    host: NDArray[np.uint8]
    device: DeviceBytes


@dataclass(slots=True, eq=False)
class _Batch:
    """Jobs whose fate is one event."""

    jobs: list[tuple[_Known, Rows]] = field(default_factory=list)
    keep: list[Any] = field(default_factory=list)
    after: Sequence[Any] | None = None
    stream: int = -1
    buffer: _Buffer | None = None
    events: tuple[Any, ...] = ()
    elapsed_s: float | None = None
    error: CopyError | None = None
    over: bool = False


class DeviceTicket:
    """The fate of one job: that of its batch."""

    def __init__(self, copier: DeviceCopier, batch: _Batch) -> None:
        self._copier, self._batch = copier, batch

    def done(self) -> bool:
        """Return whether every byte has landed.

        Raises:
            CopyError: (in_doubt) the device reports an error.
        """
        return self._copier.is_over(self._batch)

    @property
    def elapsed_s(self) -> float | None:
        """Seconds the batch took on the device, where the copier was asked to time; None until it is over."""
        return self._batch.elapsed_s


class _Landed:
    elapsed_s: float | None = 0.0

    def done(self) -> bool:
        """Return True: there was nothing to copy."""
        return True


class DeviceCopier:
    """Copies between regions one device can touch: its own, other devices' and pinned host memory.

    `submit` returns at once. A copy begins after what its job's `after` says: the events given, or everything that was
    queued on the device's default stream, so that KV that a model has just computed needs no synchronisation. Copies
    of different batches may overlap.

    Attributes:
        asynchronous: jobs run while the caller goes on, so that several may be under way.
        last_batch_s: device time of the latest timed batch that is over.
    """

    asynchronous = True

    def __init__(self, engine: DeviceEngine, *, timed: bool = False) -> None:
        """Make a copier over `engine`, which it closes.

        Args:
            engine: the device.
            timed: measure every batch on the device.
        """
        self._engine, self._timed = engine, timed
        self._known: OrderedDict[tuple[int, int, int], _Known] = OrderedDict()
        self._programs: OrderedDict[Any, _Program] = OrderedDict()
        self._pending: list[_Batch] = []
        self._running: list[_Batch] = []
        self._buffers: list[_Buffer] = []
        self._events: list[Any] = []
        self._together = 0
        self._next_stream = 0
        self._closed = False
        self.batch_times_s: list[float] = []

    def submit(self, job: CopyJob) -> CopyTicket:
        """Start `job`, or inside `together` take it up for the common start.

        Raises:
            CopyError: (in_doubt False) the job was refused; nothing was copied.
            LocalProtocolError: the copier is closed.
        """
        if self._closed:
            raise LocalProtocolError(explain("device copier", "state", "closed", "open", "make a new copier"))
        self._engine.adopt_thread()
        keep: list[Any] = []
        known = self._recognise(job, keep)
        rows = _rows(job.pages)
        if rows is None or not self._is_sound(known, rows):
            # Whatever is wrong, the full check says it; it may also just be the first job with so many sub-pages.
            known = self._learn(job, keep)
            rows = _rows(job.pages)
        if rows is None or not len(rows) or not job.lanes:
            return _Landed()
        batch = self._batch_for(job.after)
        batch.jobs.append((known, rows))
        batch.keep += [*keep, job.source, job.destination]
        if not self._together:
            self.flush()
        return DeviceTicket(self, batch)

    @contextmanager
    def together(self) -> Iterator[None]:
        """Start the jobs submitted inside at the end of it, in as few launches as possible."""
        self._together += 1
        try:
            yield
        finally:
            self._together -= 1
            if not self._together:
                self.flush()

    def flush(self) -> None:
        """Start what was submitted. Never raises: a launch that fails is the fate of its jobs."""
        pending, self._pending = self._pending, []
        for batch in pending:
            try:
                self._start(batch)
            except Exception as error:
                cure = "end the process: its device context is lost"
                batch.error = CopyError(explain("copy job", "launch", repr(error), "no error", cure), in_doubt=True)
            self._running.append(batch)

    def is_over(self, batch: _Batch) -> bool:
        """Return whether a batch has landed; raise its error. `DeviceTicket.done` is this."""
        if batch.over:
            return True
        if batch in self._pending:
            self.flush()
        if batch.error is None:
            self._engine.adopt_thread()
            try:
                if not self._engine.happened(batch.events[-1]):
                    return False
            except Exception as error:
                cure = "end the process: its device context is lost"
                batch.error = CopyError(explain("copy job", "device", repr(error), "no error", cure), in_doubt=True)
        if batch.error is not None:
            raise batch.error
        self._retire(batch)
        return True

    def host_chunk(self, size_bytes: int) -> NDArray[np.uint8]:
        """Return host memory that copies can reach, for chunks of the staged path."""
        self._engine.adopt_thread()
        return self._engine.pinned(size_bytes)

    def close(self) -> None:
        """Wait a limited time for what was submitted, and free the device memory. Idempotent.

        What still runs then keeps its memory, and the log says so.
        """
        if self._closed:
            return
        self._closed = True
        self.flush()
        deadline_s = time.monotonic() + CLOSE_S
        while (left := self._still_running()) and time.monotonic() < deadline_s:
            time.sleep(_CLOSE_POLL_S)
        self._known.clear()
        if left:
            _log.error("device copier: %d copies still run after %g s; their memory is kept", left, CLOSE_S)
            return
        self._programs.clear()
        self._buffers.clear()
        self._events.clear()
        self._engine.close()

    # --- what is known of a job ------------------------------------------------------------------------------------

    def _recognise(self, job: CopyJob, keep: list[Any]) -> _Known:
        key = (id(job.lanes), id(job.source), id(job.destination))
        known = self._known.get(key)
        if known is not None:  # the entry keeps the three alive, so their identities are theirs alone
            self._known.move_to_end(key)
            return known
        return self._learn(job, keep)

    def _learn(self, job: CopyJob, keep: list[Any]) -> _Known:
        """Check a job completely, and put its program on the device if it is not there yet."""
        extents = self._extents(job.source, "source", keep), self._extents(job.destination, "destination", keep)
        subs = check_job(job, *extents)
        lanes = tuple(job.lanes)
        sides = [_side(lanes, regions, found, name) for regions, found, name in _sides(job, extents)]
        program = self._program(lanes, sides)
        known = _Known(
            lanes=job.lanes,
            source=job.source,
            destination=job.destination,
            program=program,
            shifts=(sides[0].shift, sides[1].shift),
            limits=_limits(job, subs),
        )
        if not keep:  # a bounced payload is of this job alone
            self._known[id(job.lanes), id(job.source), id(job.destination)] = known
            while len(self._known) > PROGRAMS:
                self._known.popitem(last=False)
        return known

    def _program(self, lanes: tuple[Lane, ...], sides: Sequence[_Side]) -> _Program:
        key = lanes, sides[0].key, sides[1].key
        found = self._programs.get(key)
        if found is None:
            found = self._programs[key] = self._upload(lanes, sides)
            while len(self._programs) > PROGRAMS:
                self._programs.popitem(last=False)
        else:
            self._programs.move_to_end(key)
        return found

    def _upload(self, lanes: tuple[Lane, ...], sides: Sequence[_Side]) -> _Program:
        tiles = cut_lanes(lanes, sides[0].places, sides[1].places, tile_vectors=self._engine.tile_vectors)
        launches, event = [], self._engine.new_event()
        for width, part in tiles.items():
            launches.append(_Launch(width, self._upload_tiles(part)))
        self._engine.record(event, 0)
        return _Program(launches=tuple(launches), uploaded=event)

    def _upload_tiles(self, tiles: Tiles) -> DeviceBytes:
        pinned, target = self._engine.pinned(tiles.nbytes), self._engine.allocate(tiles.nbytes)
        pinned[: tiles.nbytes] = tiles.view(np.uint8)
        self._engine.copy_in(0, target, pinned[: tiles.nbytes])
        # The pinned side stays with the device side: nobody has to know when the upload is over.
        return DeviceBytes(pointer=target.pointer, size=tiles.nbytes, keep=(target.keep, pinned))

    def _extents(self, regions: Mapping[int, Region], side: str, keep: list[Any]) -> dict[int, Extent]:
        return {pool: self._extent(region, f"{side} region {pool} memory", side, keep) for pool, region in regions.items()}

    def _extent(self, region: Region, field: str, side: str, keep: list[Any]) -> Extent:
        memory = region.memory
        if isinstance(memory, DeviceBytes):
            return Extent(address=memory.pointer, size_bytes=memory.size)
        if isinstance(memory, np.ndarray):
            return self._host_extent(memory, field, side, keep)
        interface = getattr(memory, "__cuda_array_interface__", None)
        if interface is None or interface["typestr"] != "|u1" or len(interface["shape"]) != 1 or _has_gaps(interface):
            raise refuse(field, _describe(memory), "contiguous bytes of a device", "pass the pool's bytes")
        return Extent(address=int(interface["data"][0]), size_bytes=int(interface["shape"][0]))

    def _host_extent(self, array: NDArray[Any], field: str, side: str, keep: list[Any]) -> Extent:
        if array.dtype != np.uint8 or array.ndim != 1 or not array.flags.c_contiguous:
            raise refuse(field, _describe(array), "a contiguous one-dimensional uint8 array", "pass the pool's bytes")
        if side == "destination" and not array.flags.writeable:
            raise refuse(field, "read-only", "writable", "pass memory that may be written")
        if not self._engine.reaches(array):
            if side == "destination":
                want = "device memory or pinned host memory"
                raise refuse(field, "pageable host memory", want, "pin it: a kernel cannot reach it")
            pinned = self._engine.pinned(array.size)[: array.size]
            np.copyto(pinned, array)
            keep.append(pinned)
            array = pinned
        return Extent(address=int(array.__array_interface__["data"][0]), size_bytes=array.size)

    @staticmethod
    def _is_sound(known: _Known, rows: Rows) -> bool:
        """Return whether no slot leaves its region and no destination page comes twice. False only means: look closely.

        Negative numbers are large ones here.
        """
        if not len(rows):
            return True
        if not (rows.view(np.uint32).max(axis=0) < known.limits).all():
            return False
        slots = rows[:, 2]
        if (slots[1:] > slots[:-1]).all():
            return True
        keys = slots.astype(np.int64) * int(known.limits[3]) + rows[:, 3]
        keys.sort()
        return bool((keys[1:] != keys[:-1]).all())

    # --- batches ---------------------------------------------------------------------------------------------------

    def _batch_for(self, after: Sequence[Any] | None) -> _Batch:
        """Return the pending batch a job joins: only jobs that wait for the same things share one."""
        for batch in self._pending:
            if batch.after is after or (batch.after is not None and after is not None and [*batch.after] == [*after]):
                return batch
        batch = _Batch(after=after)
        self._pending.append(batch)
        return batch

    def _start(self, batch: _Batch) -> None:
        by_program: dict[tuple[int, int, int], list[tuple[_Known, Rows]]] = {}
        for known, rows in batch.jobs:
            by_program.setdefault((id(known.program), *known.shifts), []).append((known, rows))
        stream = batch.stream = self._pick_stream()
        self._order(stream, batch)
        buffer = batch.buffer = self._take_buffer(sum(len(rows) for _, rows in batch.jobs))
        host, at = buffer.host.view(np.int32).reshape(-1, 4), 0
        launches = []
        for jobs in by_program.values():
            first = at
            for _, rows in jobs:
                host[at : at + len(rows)] = rows
                at += len(rows)
            launches.append((jobs[0][0], first, at - first))
        if self._timed:
            batch.events = (self._take_event(),)
            self._engine.record(batch.events[0], stream)
        self._engine.copy_in(stream, buffer.device, buffer.host[: at * _ROW_BYTES])
        for known, first, count in launches:
            self._launch(stream, known, buffer.device, first, count)
        batch.events = (*batch.events, self._take_event())
        self._engine.record(batch.events[-1], stream)

    def _launch(self, stream: int, known: _Known, rows: DeviceBytes, first: int, count: int) -> None:
        for start in range(first, first + count, MAX_GRID_PAGES):
            part = rows[start * _ROW_BYTES :], min(MAX_GRID_PAGES, first + count - start)
            for launch in known.program.launches:
                self._engine.launch(stream, launch.width, launch.tiles, part, known.shifts)

    def _order(self, stream: int, batch: _Batch) -> None:
        """Let the stream wait for the producers, and for uploads that may still run on another stream."""
        if batch.after is None:
            ready = self._take_event()
            self._engine.record(ready, None)
            self._engine.wait(stream, ready)
            self._events.append(ready)  # the wait is queued: recording the event anew does not change it
        else:
            for event in batch.after:
                self._engine.wait(stream, event.cuda_event)
        for known, _ in batch.jobs:
            program = known.program
            if program.uploaded is None:
                continue
            if self._engine.happened(program.uploaded):
                self._events.append(program.uploaded)
                program.uploaded = None
            elif stream:
                self._engine.wait(stream, program.uploaded)

    def _pick_stream(self) -> int:
        """Return a stream that is free, or the next one in turn."""
        self._still_running()
        busy = {batch.stream for batch in self._running}
        for stream in range(self._engine.num_streams):
            if stream not in busy:
                return stream
        self._next_stream = (self._next_stream + 1) % self._engine.num_streams
        return self._next_stream

    def _still_running(self) -> int:
        """Retire what is over; return how many batches are not, as far as anybody knows."""
        for batch in list(self._running):
            try:
                self.is_over(batch)
            except CopyError:
                continue
        return len(self._running)

    def _retire(self, batch: _Batch) -> None:
        batch.over = True
        if self._timed and len(batch.events) == 2:
            batch.elapsed_s = self._engine.elapsed_s(*batch.events)
            self.batch_times_s.append(batch.elapsed_s)
        if batch in self._running:
            self._running.remove(batch)
        self._events += batch.events
        if batch.buffer is not None:
            self._buffers.append(batch.buffer)
        batch.jobs, batch.keep, batch.buffer = [], [], None

    def _take_event(self) -> Any:
        return self._events.pop() if self._events else self._engine.new_event()

    def _take_buffer(self, pages: int) -> _Buffer:
        for number, buffer in enumerate(self._buffers):
            if len(buffer.host) >= pages * _ROW_BYTES:
                return self._buffers.pop(number)
        size = max(_RING_PAGES, pages) * _ROW_BYTES
        return _Buffer(host=self._engine.pinned(size)[:size], device=self._engine.allocate(size))


@dataclass(frozen=True, slots=True)
class _Side:
    """One side of a program. Where all lanes name one region its address is left out and added at the launch, so that
    one program serves every chunk of the staged path."""

    places: dict[int, SidePlace]
    shift: int

    @property
    def key(self) -> tuple[tuple[int, int, int], ...]:
        return tuple((pool, place.address, place.slot_stride_bytes) for pool, place in sorted(self.places.items()))


def _sides(
    job: CopyJob, extents: tuple[Mapping[int, Extent], Mapping[int, Extent]]
) -> tuple[tuple[Mapping[int, Region], Mapping[int, Extent], str], ...]:
    return (job.source, extents[0], "src_pool"), (job.destination, extents[1], "dst_pool")


def _side(lanes: Sequence[Lane], regions: Mapping[int, Region], extents: Mapping[int, Extent], name: str) -> _Side:
    pools = {getattr(lane, name) for lane in lanes}
    if len(pools) != 1:
        return _Side({p: SidePlace(extents[p].address, regions[p].slot_stride_bytes) for p in pools}, 0)
    pool = pools.pop()
    address = extents[pool].address
    # The rest keeps the alignment, which decides how wide loads are.
    return _Side({pool: SidePlace(address % 16, regions[pool].slot_stride_bytes)}, address - address % 16)


def _limits(job: CopyJob, subs: SubCounts) -> NDArray[np.uint32]:
    slots = [
        min((regions[pool].num_slots for pool in {getattr(lane, name) for lane in job.lanes}), default=0)
        for regions, name in ((job.source, "src_pool"), (job.destination, "dst_pool"))
    ]
    return np.array([slots[0], subs.src, slots[1], subs.dst], dtype=np.uint32)


def _rows(pages: PagePairs) -> Rows | None:
    """Return the pages as the kernel reads them, int32 ``[pages, 4]``; None where the columns differ in length."""
    count = len(pages.src_slot)
    if not count == len(pages.src_sub) == len(pages.dst_slot) == len(pages.dst_sub):
        return None
    rows = np.empty((count, 4), dtype=np.int32)
    rows[:, 0], rows[:, 1], rows[:, 2], rows[:, 3] = pages.src_slot, pages.src_sub, pages.dst_slot, pages.dst_sub
    return rows


def _has_gaps(interface: Mapping[str, Any]) -> bool:
    strides = interface.get("strides")
    return strides is not None and tuple(strides) != (1,)


def _describe(memory: Any) -> str:
    return f"{memory.dtype} array of shape {memory.shape}" if hasattr(memory, "shape") else type(memory).__name__
