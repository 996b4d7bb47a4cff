"""What every copier refuses before it copies a byte. Pure arithmetic: no memory is read, no device is called.

A job is sound when, for ``S`` slots of ``stride`` bytes in a region and ``U`` sub-pages used per slot::

    slots        0 <= slot < S                      and  S * stride <= bytes of the region
    one lane     0 <= offset                        and  offset + (U-1)*sub_stride + (outer-1)*outer_stride
                                                         + (inner-1)*inner_stride + run_bytes <= stride
    destination  no (slot, sub) twice, no two rows of a slot share a byte, no two regions share a byte

Together: every row lies inside its region and no byte is written twice, whatever the page tables say.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from transfer.copier import CopyJob, Region
from transfer.pages import PagePairs
from transfer.plan import Lane
from unikv.errors import CopyError, explain

_THING = "copy job"
_CHECKED_LANE_SETS = 64
"""Lane sets whose verdict is remembered: there are a few per pair of ranks, and checking outlasts a small copy."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Extent:
    """Where the memory of a region lies: `address` of its first byte and its length in bytes."""

    address: int
    size_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class SubCounts:
    """How many sub-pages per slot a job may touch on each side: the highest one it names, plus one."""

    src: int
    dst: int


def refuse(field: str, got: object, want: str, cure: str) -> CopyError:
    """Return the error for a job that was refused: nothing was copied, nothing is in doubt."""
    return CopyError(explain(_THING, field, got, want, cure), in_doubt=False)


def check_job(job: CopyJob, source: Mapping[int, Extent], destination: Mapping[int, Extent]) -> SubCounts:
    """Check one job completely; costs little for lanes that were checked before.

    Args:
        job: the job.
        source, destination: the extent of every region of the job, by the same pool index.

    Returns:
        The sub-pages per slot that the job may touch.

    Raises:
        CopyError: (in_doubt False) any rule of the module's table is broken.
    """
    lanes = tuple(job.lanes)
    subs = _check_pages(job.pages)
    for side, regions, extents, slots in (
        ("source", job.source, source, job.pages.src_slot),
        ("destination", job.destination, destination, job.pages.dst_slot),
    ):
        named = {lane.src_pool if side == "source" else lane.dst_pool for lane in lanes}
        _check_regions(side, regions, extents, named)
        _check_slots(side, slots, min((regions[pool].num_slots for pool in named), default=None))
    _check_pages_differ(job.pages, subs.dst)
    homes = _check_regions_apart({lane.dst_pool for lane in lanes}, job.destination, destination)
    _check_lanes(lanes, subs, _strides(job.source), _strides(job.destination), homes)
    return subs


def _check_pages(pages: PagePairs) -> SubCounts:
    lengths = tuple(len(array) for array in (pages.src_slot, pages.src_sub, pages.dst_slot, pages.dst_sub))
    if len(set(lengths)) != 1:
        want = "one length for src_slot, src_sub, dst_slot, dst_sub"
        raise refuse("pages", lengths, want, "pair the pages anew")
    counts = []
    for name, array in (("src_sub", pages.src_sub), ("dst_sub", pages.dst_sub)):
        if len(array) and int(array.min()) < 0:
            raise refuse(name, int(array.min()), "a sub-page >= 0", "pair the pages anew")
        counts.append(int(array.max()) + 1 if len(array) else 1)
    return SubCounts(src=counts[0], dst=counts[1])


def _check_regions(
    side: str, regions: Mapping[int, Region], extents: Mapping[int, Extent], named: Iterable[int]
) -> None:
    for pool in named:
        if pool not in regions:
            have = ", ".join(map(str, sorted(regions))) or "none"
            raise refuse(f"{side} pool of a lane", pool, f"a pool with a region ({have})", "add the region")
        region = regions[pool]
        if region.slot_stride_bytes < 1 or region.num_slots < 0:
            got = (region.slot_stride_bytes, region.num_slots)
            want = "slot_stride_bytes >= 1 and num_slots >= 0"
            raise refuse(f"{side} region {pool}", got, want, "describe the pool again")
        needed = region.slot_stride_bytes * region.num_slots
        if extents[pool].size_bytes < needed:
            want = f">= {needed} bytes ({region.num_slots} slots of {region.slot_stride_bytes} bytes)"
            raise refuse(f"{side} region {pool} size", extents[pool].size_bytes, want, "pass the whole pool")


def _check_slots(side: str, slots: NDArray[np.int32], num_slots: int | None) -> None:
    if num_slots is None or not len(slots):
        return
    lowest, highest = int(slots.min()), int(slots.max())
    if lowest < 0 or highest >= num_slots:
        got = lowest if lowest < 0 else highest
        raise refuse(f"{side} slot", got, f"in [0, {num_slots})", "drop holes and check the page table")


def _check_pages_differ(pages: PagePairs, subs: int) -> None:
    if len(pages) < 2:
        return
    keys = pages.dst_slot.astype(np.int64) * subs + pages.dst_sub
    if (keys[1:] > keys[:-1]).all():
        return
    keys.sort()
    twice = np.flatnonzero(keys[1:] == keys[:-1])
    if len(twice):
        got = tuple(int(part) for part in divmod(int(keys[twice[0]]), subs))
        raise refuse("destination (slot, sub-page)", got, "each at most once", "two pages would overlap; split the job")


def _check_regions_apart(
    named: Iterable[int], regions: Mapping[int, Region], extents: Mapping[int, Extent]
) -> tuple[tuple[int, int], ...]:
    """Return (pool, first pool with the same memory) pairs; refuse memory that is shared in any other way."""
    spans = sorted((extents[pool].address, regions[pool].slot_stride_bytes, pool) for pool in named)
    homes: dict[int, int] = {}
    for at, (address, stride, pool) in enumerate(spans):
        same = at > 0 and spans[at - 1][:2] == (address, stride)
        homes[pool] = homes[spans[at - 1][2]] if same else pool
    ends = [address + stride * regions[pool].num_slots for address, stride, pool in spans]
    for (left, right), end in zip(pairwise(spans), ends, strict=False):
        if right[0] < end and right[:2] != left[:2]:
            want = "the same memory and stride, or memory apart"
            raise refuse("destination regions", (left[2], right[2]), want, "they overlap; describe them as one pool")
    return tuple(sorted(homes.items()))


def _strides(regions: Mapping[int, Region]) -> tuple[tuple[int, int], ...]:
    return tuple(sorted((pool, region.slot_stride_bytes) for pool, region in regions.items()))


@lru_cache(maxsize=_CHECKED_LANE_SETS)
def _check_lanes(
    lanes: tuple[Lane, ...],
    subs: SubCounts,
    src_strides: tuple[tuple[int, int], ...],
    dst_strides: tuple[tuple[int, int], ...],
    homes: tuple[tuple[int, int], ...],
) -> None:
    """Check what does not depend on slots. A refusal is raised anew each time; only sound lanes are remembered."""
    src_stride_of, dst_stride_of = dict(src_strides), dict(dst_strides)
    for number, lane in enumerate(lanes):
        _check_shape(number, lane)
        _check_reach(number, "source", lane.reach("src", subs.src).hi, src_stride_of[lane.src_pool])
        _check_reach(number, "destination", lane.reach("dst", subs.dst).hi, dst_stride_of[lane.dst_pool])
    for home in {first for _, first in homes}:
        members = {pool for pool, first in homes if first == home}
        _check_rows_apart([lane for lane in lanes if lane.dst_pool in members], subs.dst)


def _check_shape(number: int, lane: Lane) -> None:
    counts = (lane.outer.count, lane.inner.count, lane.run_bytes)
    if min(counts) < 1:
        raise refuse(f"lane {number} rows and run bytes", counts, "all >= 1", "leave out lanes that copy nothing")
    on_source = (lane.src_offset, lane.src_sub_stride, lane.outer.src_stride, lane.inner.src_stride)
    on_destination = (lane.dst_offset, lane.dst_sub_stride, lane.outer.dst_stride, lane.inner.dst_stride)
    distances = on_source + on_destination
    if min(distances) < 0:
        raise refuse(f"lane {number} offsets and strides", distances, "all >= 0", "compile the program again")


def _check_reach(number: int, side: str, reach: int, stride: int) -> None:
    if reach > stride:
        want = f"<= the slot stride of {stride} bytes"
        raise refuse(f"lane {number} last {side} byte", reach, want, "a row would leave its slot; check the pool card")


def _check_rows_apart(lanes: list[Lane], subs: int) -> None:
    """Refuse lanes of one memory whose rows share a byte of a slot: sorted by start, each must end before the next."""
    for lane in lanes:
        dims = ((subs, lane.dst_sub_stride), *((rows.count, rows.dst_stride) for rows in (lane.outer, lane.inner)))
        if any(count > 1 and stride == 0 for count, stride in dims):
            raise _shared_byte(lane.dst_offset)
    starts = np.concatenate([_row_starts(lane, subs) for lane in lanes])
    sizes = np.repeat([lane.run_bytes for lane in lanes], [_rows(lane) * subs for lane in lanes])
    order = np.argsort(starts, kind="stable")
    starts, ends = starts[order], (starts + sizes)[order]
    shared = np.flatnonzero(ends[:-1] > starts[1:])
    if len(shared):
        raise _shared_byte(int(starts[shared[0] + 1]))


def _shared_byte(offset: int) -> CopyError:
    return refuse("destination byte of a slot", offset, "written once", "rows of the lanes overlap; compile them again")


def _rows(lane: Lane) -> int:
    return lane.outer.count * lane.inner.count


def _row_starts(lane: Lane, subs: int) -> NDArray[np.int64]:
    starts = np.array([lane.dst_offset], np.int64)
    for count, stride in (
        (subs, lane.dst_sub_stride),
        (lane.outer.count, lane.outer.dst_stride),
        (lane.inner.count, lane.inner.dst_stride),
    ):
        starts = np.add.outer(starts, np.arange(count, dtype=np.int64) * stride).ravel()
    return starts
