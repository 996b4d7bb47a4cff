"""The device copier without the device: programs kept there, page tables in a ring, launches joined, events polled.

What touches a device is behind `DeviceEngine`; `transfer/copy_cupy.py` is the one of CUDA, and the twin in
`transfer/testing/device.py` runs the same tiles on the host.

::

    submit   check the job's slots (its lanes were checked before)  ->  one int32 row per page
    flush    rows of all jobs into a pinned buffer, one upload, one launch per program and vector width, one event
    done     asks the event; nothing here ever waits for the device without a limit

Jobs submitted inside `together` are flushed together: requests that are ready at the same time share launches.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from transfer.copier import CopyJob, CopyTicket
from transfer.device_bytes import DeviceBytes
from transfer.device_engine import DeviceEngine
from transfer.device_programs import Known, ProgramPool, Rows
from unikv.errors import CopyError, LocalProtocolError, explain

_log = logging.getLogger(__name__)

MAX_GRID_PAGES: Final = 65_535
"""Pages of one launch."""
CLOSE_S: Final = 5.0
"""Longest time `close` waits for copies that run."""
_CLOSE_POLL_S: Final = 0.001
_ROW_BYTES: Final = 16
_RING_PAGES: Final = 4096
"""Pages of one buffer of the ring; larger batches get a buffer of their own size."""


@dataclass(slots=True)
class _Buffer:
    """Pinned and device memory for the rows of one batch."""

    host: NDArray[np.uint8]
    device: DeviceBytes


@dataclass(slots=True, eq=False)
class _Batch:
    """Jobs whose fate is one event."""

    jobs: list[tuple[Known, Rows]] = field(default_factory=list)
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
        self._programs = ProgramPool(engine)
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
        work = self._programs.judge(job, keep)
        if work is None:
            return _Landed()
        batch = self._batch_for(job.after)
        batch.jobs.append(work)
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
        if left:
            _log.error("device copier: %d copies still run after %g s; their memory is kept", left, CLOSE_S)
            return
        self._programs.clear()
        self._buffers.clear()
        self._events.clear()
        self._engine.close()

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
        by_program: dict[tuple[int, int, int], list[tuple[Known, Rows]]] = {}
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
        self._engine.copy_in(stream, buffer.device, buffer.host[: at * _ROW_BYTES])
        if self._timed:
            batch.events = (self._take_event(),)
            self._engine.record(batch.events[0], stream)
        for known, first, count in launches:
            self._launch(stream, known, buffer.device, first, count)
        batch.events = (*batch.events, self._take_event())
        self._engine.record(batch.events[-1], stream)

    def _launch(self, stream: int, known: Known, rows: DeviceBytes, first: int, count: int) -> None:
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
