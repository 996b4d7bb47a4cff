"""What a device copier knows of its jobs: lanes that passed every check, as tiles on the device.

Whoever moves pages submits the same lanes between the same regions again and again. They are recognised by identity,
so that a job costs the checks of its slots alone; whatever looks wrong there goes through the complete check, which
also says what it is.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from transfer.copier import CopyJob, Region
from transfer.copy_checks import Extent, SubCounts, check_job, refuse
from transfer.copy_tiles import SidePlace, Tiles, cut_lanes
from transfer.device_bytes import DeviceBytes
from transfer.device_engine import DeviceEngine
from transfer.pages import PagePairs
from transfer.plan import Lane

PROGRAMS: Final = 256
"""Programs kept on the device; a pair of ranks has a few."""

Rows = NDArray[np.int32]


@dataclass(frozen=True, slots=True)
class Launch:
    """Tiles of one vector width, on the device."""

    width: int
    tiles: DeviceBytes


@dataclass(slots=True)
class Program:
    """Lanes between two sets of regions, checked, on the device."""

    launches: tuple[Launch, ...]
    uploaded: Any
    """Event of the upload, None once it is known to have happened."""


@dataclass(slots=True)
class Known:
    """A job's lanes and regions, recognised by identity. They are not changed while jobs use them, nor after."""

    lanes: Sequence[Lane]
    source: Mapping[int, Region]
    destination: Mapping[int, Region]
    program: Program
    shifts: tuple[int, int]
    limits: NDArray[np.uint32]
    """First (source slot, source sub-page, destination slot, destination sub-page) that may not be named."""


class ProgramPool:
    """Programs on one device, by what they copy between. Bounded: the oldest go first."""

    def __init__(self, engine: DeviceEngine) -> None:
        self._engine = engine
        self._known: OrderedDict[tuple[int, int, int], Known] = OrderedDict()
        self._programs: OrderedDict[Any, Program] = OrderedDict()

    def __len__(self) -> int:
        return len(self._programs)

    def clear(self) -> None:
        """Let go of everything."""
        self._known.clear()
        self._programs.clear()

    def judge(self, job: CopyJob, keep: list[Any]) -> tuple[Known, Rows] | None:
        """Return what is known of a job and its pages as the kernel reads them; None where there is nothing to copy.

        Args:
            job: the job.
            keep: takes what must stay alive until the job is over.

        Raises:
            CopyError: (in_doubt False) the job is refused.
        """
        known = self._recognise(job, keep)
        rows = _rows(job.pages)
        if rows is None or not _is_sound(known, rows):
            # Whatever is wrong, the full check says it; it may also just be the first job with so many sub-pages.
            known = self._learn(job, keep)
        if rows is None or not len(rows) or not job.lanes:
            return None
        return known, rows

    def _recognise(self, job: CopyJob, keep: list[Any]) -> Known:
        key = (id(job.lanes), id(job.source), id(job.destination))
        known = self._known.get(key)
        if known is not None:  # the entry keeps the three alive, so their identities are theirs alone
            self._known.move_to_end(key)
            return known
        return self._learn(job, keep)

    def _learn(self, job: CopyJob, keep: list[Any]) -> Known:
        """Check a job completely, and put its program on the device if it is not there yet."""
        extents = self._extents(job.source, "source", keep), self._extents(job.destination, "destination", keep)
        subs = check_job(job, *extents)
        lanes = tuple(job.lanes)
        sides = [_side(lanes, regions, found, name) for regions, found, name in _sides(job, extents)]
        program = self._program(lanes, sides)
        known = Known(
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

    def _program(self, lanes: tuple[Lane, ...], sides: Sequence[_Side]) -> Program:
        key = lanes, sides[0].key, sides[1].key
        found = self._programs.get(key)
        if found is None:
            found = self._programs[key] = self._upload(lanes, sides)
            while len(self._programs) > PROGRAMS:
                self._programs.popitem(last=False)
        else:
            self._programs.move_to_end(key)
        return found

    def _upload(self, lanes: tuple[Lane, ...], sides: Sequence[_Side]) -> Program:
        tiles = cut_lanes(lanes, sides[0].places, sides[1].places, tile_vectors=self._engine.tile_vectors)
        launches, event = [], self._engine.new_event()
        for width, part in tiles.items():
            launches.append(Launch(width, self._upload_tiles(part)))
        self._engine.record(event, 0)
        return Program(launches=tuple(launches), uploaded=event)

    def _upload_tiles(self, tiles: Tiles) -> DeviceBytes:
        pinned, target = self._engine.pinned(tiles.nbytes), self._engine.allocate(tiles.nbytes)
        pinned[: tiles.nbytes] = tiles.view(np.uint8)
        self._engine.copy_in(0, target, pinned[: tiles.nbytes])
        # The pinned side stays with the device side: nobody has to know when the upload is over.
        return DeviceBytes(pointer=target.pointer, size=tiles.nbytes, keep=(target.keep, pinned))

    def _extents(self, regions: Mapping[int, Region], side: str, keep: list[Any]) -> dict[int, Extent]:
        return {
            pool: self._extent(region, f"{side} region {pool} memory", side, keep) for pool, region in regions.items()
        }

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


@dataclass(frozen=True, slots=True)
class _Side:
    """One side of a program. Where all lanes name one region its address is left out and added at the launch, so that
    one program serves every chunk of the staged path.
    """

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


def _is_sound(known: Known, rows: Rows) -> bool:
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
