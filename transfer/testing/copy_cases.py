"""Copy jobs as plain data, without memory: what `transfer.testing.copier` runs, and how such jobs are made."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from transfer.lanes import number_lanes, packed_destination, packed_source
from transfer.pages import PagePairs
from transfer.plan import Lane, Rows


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolShape:
    """One pool of a case.

    Attributes:
        slot_stride_bytes, num_slots: as in `transfer.copier.Region`.
        base_offset: bytes the pool starts off an aligned address.
        missing_bytes: bytes by which the memory is smaller than the slots need (only in jobs to be refused).
    """

    slot_stride_bytes: int
    num_slots: int
    base_offset: int = 0
    missing_bytes: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class CopyCase:
    """One job without memory; the runner of the case makes it."""

    lanes: tuple[Lane, ...]
    source: Mapping[int, PoolShape]
    destination: Mapping[int, PoolShape]
    pages: PagePairs


@dataclass(frozen=True, slots=True, kw_only=True)
class PageShape:
    """A slot of `buffers` K or V buffers, each ``[heads, tokens, row]`` (HND) or ``[tokens, heads, row]`` bytes."""

    hnd: bool
    heads: int
    tokens: int
    row_bytes: int
    buffers: int = 2

    @property
    def head_stride(self) -> int:
        """Bytes between heads of one token."""
        return self.row_bytes * (self.tokens if self.hnd else 1)

    @property
    def token_stride(self) -> int:
        """Bytes between tokens of one head."""
        return self.row_bytes * (1 if self.hnd else self.heads)

    @property
    def buffer_bytes(self) -> int:
        """Bytes of one buffer of one slot."""
        return self.heads * self.tokens * self.row_bytes


def make_lane(**fields: object) -> Lane:
    """Return a lane of pool 0 to pool 0 with one row at offset 0, except for `fields`."""
    one = Rows(count=1, src_stride=0, dst_stride=0)
    plain = Lane(
        pair=0,
        src_pool=0,
        dst_pool=0,
        src_offset=0,
        dst_offset=0,
        src_sub_stride=0,
        dst_sub_stride=0,
        outer=one,
        inner=one,
        run_bytes=1,
        packed_offset=0,
    )
    return replace(plain, **fields)  # type: ignore[arg-type]


def make_pages(
    src: Sequence[int], dst: Sequence[int], src_sub: Sequence[int] = (), dst_sub: Sequence[int] = ()
) -> PagePairs:
    """Return page pairs of these slots; sub-pages left out are all zero."""
    columns = (src, src_sub or [0] * len(src), dst, dst_sub or [0] * len(dst))
    src_slot, src_subs, dst_slot, dst_subs = (np.array(column, dtype=np.int32) for column in columns)
    return PagePairs(src_slot=src_slot, src_sub=src_subs, dst_slot=dst_slot, dst_sub=dst_subs)


def slice_case(src: PageShape, dst: PageShape, *, src_head: int, dst_head: int, heads: int) -> CopyCase:
    """Return the copy of `heads` heads of every buffer, from head `src_head` to `dst_head`, for two larger pages.

    Unequal page sizes give sub-pages of the smaller size, as many as the larger holds.
    """
    tokens = min(src.tokens, dst.tokens)
    by_token = Rows(count=tokens, src_stride=src.token_stride, dst_stride=dst.token_stride)
    by_head = Rows(count=heads, src_stride=src.head_stride, dst_stride=dst.head_stride)
    lanes = tuple(
        make_lane(
            src_offset=buffer * src.buffer_bytes + src_head * src.head_stride,
            dst_offset=buffer * dst.buffer_bytes + dst_head * dst.head_stride,
            src_sub_stride=tokens * src.token_stride if src.tokens > tokens else 0,
            dst_sub_stride=tokens * dst.token_stride if dst.tokens > tokens else 0,
            outer=by_head,
            inner=by_token,
            run_bytes=src.row_bytes,
        )
        for buffer in range(src.buffers)
    )
    src_slots, dst_slots = [4, 5, 1, 0, 3, 2], [2, 3, 5, 1, 0, 6]
    units = 2 * max(src.tokens, dst.tokens) // tokens
    pages = make_pages(
        [src_slots[unit * tokens // src.tokens] for unit in range(units)],
        [dst_slots[unit * tokens // dst.tokens] for unit in range(units)],
        [unit % (src.tokens // tokens) for unit in range(units)],
        [unit % (dst.tokens // tokens) for unit in range(units)],
    )
    shapes = (PoolShape(slot_stride_bytes=page.buffers * page.buffer_bytes, num_slots=7) for page in (src, dst))
    source, destination = shapes
    return CopyCase(lanes=lanes, source={0: source}, destination={0: destination}, pages=pages)


def merge_runs(case: CopyCase) -> CopyCase:
    """Return `case` with every row dimension that is contiguous on both sides joined to the run, as plans do it."""
    return replace(case, lanes=tuple(_merge(_merge(lane)) for lane in case.lanes))


def _merge(lane: Lane) -> Lane:
    one = Rows(count=1, src_stride=0, dst_stride=0)
    for name in ("inner", "outer"):
        rows: Rows = getattr(lane, name)
        if rows.src_stride == rows.dst_stride == lane.run_bytes:
            lane = replace(lane, **{name: one}, run_bytes=lane.run_bytes * rows.count)  # type: ignore[arg-type]
    return lane


def gather_case(case: CopyCase) -> CopyCase:
    """Return `case` with packed pages 0, 1, ... of one chunk as destination."""
    count, page_bytes = len(case.pages), sum(lane.page_bytes for lane in case.lanes)
    packed = np.arange(count, dtype=np.int32)
    return CopyCase(
        lanes=tuple(packed_destination(lane) for lane in number_lanes(case.lanes, 0)),
        source=case.source,
        destination={0: PoolShape(slot_stride_bytes=page_bytes, num_slots=count)},
        pages=replace(case.pages, dst_slot=packed, dst_sub=np.zeros_like(packed)),
    )


def scatter_case(case: CopyCase) -> CopyCase:
    """Return `case` with packed pages 0, 1, ... of one chunk as source: the other half of `gather_case`."""
    count, page_bytes = len(case.pages), sum(lane.page_bytes for lane in case.lanes)
    packed = np.arange(count, dtype=np.int32)
    return CopyCase(
        lanes=tuple(packed_source(lane) for lane in number_lanes(case.lanes, 0)),
        source={0: PoolShape(slot_stride_bytes=page_bytes, num_slots=count)},
        destination=case.destination,
        pages=replace(case.pages, src_slot=packed, src_sub=np.zeros_like(packed)),
    )
