"""Lanes: strided copies that repeat for every page. Building, packing and bounds, without any memory.

One head slice of one buffer, HND (4 heads, slice ``[1, 3)``) and NHD (3 heads, slice ``[1, 3)``)::

    HND  | h0: t0 t1 t2 t3 | h1: t0 t1 t2 t3 | h2: ... | h3: ... |      one run of 2 heads
                            ^^^^^^^^^^^^^^^^^^^^^^^^^^^^
    NHD  | t0: h0 h1 h2 | t1: h0 h1 h2 | t2: h0 h1 h2 | t3: ...  |      one run of 2 rows per token
                  ^^^^^           ^^^^^           ^^^^^
    row (h, t) of a buffer is at   h * head_stride + t * token_stride    on either side
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

from unikv.errors import SpecError, explain
from unikv.layer_spec import KVLayout
from unikv.ranges import Span
from unikv.views import KVView, ViewEntry


@dataclass(frozen=True, slots=True, kw_only=True)
class Rows:
    """One row dimension of a lane: `count` rows, with the stride in bytes on each side (0 where there is one row)."""

    count: int
    src_stride: int
    dst_stride: int


SINGLE_ROW = Rows(count=1, src_stride=0, dst_stride=0)
"""A row dimension that is not used."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Lane:
    """One strided copy that repeats for every page of group pair number `pair`.

    Attributes:
        src_pool, dst_pool: pool index inside the group on each side.
        packed_offset: where this lane's bytes start inside a packed page (staged paths), rows contiguous there.
    """

    pair: int
    src_pool: int
    dst_pool: int
    src_offset: int
    dst_offset: int
    src_sub_stride: int
    dst_sub_stride: int
    outer: Rows
    inner: Rows
    run_bytes: int
    packed_offset: int

    @property
    def page_bytes(self) -> int:
        """Bytes this lane moves for one page."""
        return self.outer.count * self.inner.count * self.run_bytes

    @property
    def is_single_run(self) -> bool:
        """Whether the lane is one run of bytes per page."""
        return self.outer.count == self.inner.count == 1

    def reach(self, side: str, subs: int) -> Span:
        """Return the bytes of a slot the lane touches on `side` ("src" or "dst"), over `subs` sub-pages of a slot.

        Strides are never negative, so the last row of the last sub-page ends the range.
        """
        offset: int = getattr(self, f"{side}_offset")
        sub_stride: int = getattr(self, f"{side}_sub_stride")
        rows = sum((rows.count - 1) * int(getattr(rows, f"{side}_stride")) for rows in (self.outer, self.inner))
        return Span(offset, offset + rows + (subs - 1) * sub_stride + self.run_bytes)


@dataclass(frozen=True, slots=True, kw_only=True)
class Placement:
    """Where the rows of one head slice lie inside a slot on one side, in bytes.

    Attributes:
        offset: row of the first head and first token.
        head_stride, token_stride: distance between heads and between tokens.
        sub_stride: distance between sub-pages; 0 where the slot is a whole page of the pair.
    """

    pool: int
    offset: int
    head_stride: int
    token_stride: int
    sub_stride: int


def place(view: KVView, entry: ViewEntry, heads: Span, page_tokens: int) -> Placement:
    """Return where global `heads` of one buffer lie, for (sub-)pages of `page_tokens` tokens."""
    head_stride = view.row_bytes * (view.tokens_per_block if view.kv_layout is KVLayout.HND else 1)
    token_stride = view.row_bytes * (len(view.heads) if view.kv_layout is KVLayout.NHD else 1)
    return Placement(
        pool=view.pool_index,
        offset=entry.offset_bytes + (heads.lo - view.heads.lo) * head_stride,
        head_stride=head_stride,
        token_stride=token_stride,
        sub_stride=page_tokens * token_stride if view.tokens_per_block > page_tokens else 0,
    )


def build_lane(src: Placement, dst: Placement, *, heads: int, tokens: int, row_bytes: int) -> Lane:
    """Return the lane of one head slice of one buffer: as few and as long runs as both sides allow.

    The pair number and the packed offset are set later, by `number_lanes`.
    """
    by_head = Rows(count=heads, src_stride=src.head_stride, dst_stride=dst.head_stride)
    by_token = Rows(count=tokens, src_stride=src.token_stride, dst_stride=dst.token_stride)
    run_bytes, dims = _join_rows(row_bytes, [by_head, by_token])
    outer, inner = [SINGLE_ROW] * (2 - len(dims)) + dims
    return Lane(
        pair=0,
        src_pool=src.pool,
        dst_pool=dst.pool,
        src_offset=src.offset,
        dst_offset=dst.offset,
        src_sub_stride=src.sub_stride,
        dst_sub_stride=dst.sub_stride,
        outer=outer,
        inner=inner,
        run_bytes=run_bytes,
        packed_offset=0,
    )


def _join_rows(run_bytes: int, dims: Iterable[Rows]) -> tuple[int, list[Rows]]:
    """Lengthen the run by every dimension that is contiguous on both sides; return it with the dimensions left.

    What is left is ordered by the stride of the destination, widest first, so that writes stay close together.
    """
    left = [rows for rows in dims if rows.count > 1]
    joined = True
    while joined:
        joined = False
        for rows in left:
            if rows.src_stride == rows.dst_stride == run_bytes:
                run_bytes *= rows.count
                left.remove(rows)
                joined = True
                break
    return run_bytes, sorted(left, key=lambda rows: -rows.dst_stride)


def number_lanes(lanes: Iterable[Lane], pair: int) -> tuple[Lane, ...]:
    """Return `lanes` as lanes of group pair number `pair`, laid one after the other in a packed page."""
    numbered: list[Lane] = []
    packed = 0
    for lane in lanes:
        numbered.append(replace(lane, pair=pair, packed_offset=packed))
        packed += lane.page_bytes
    return tuple(numbered)


def check_reach(lane: Lane, side: str, *, subs: int, slot_bytes: int, thing: str) -> None:
    """Refuse a lane that leaves its slot on `side` ("src" or "dst").

    Raises:
        SpecError: some byte of some row of some sub-page lies outside ``[0, slot_bytes)``; `thing` opens the message.
    """
    reach = lane.reach(side, subs)
    if reach.hi > slot_bytes:
        want = f"inside the slot of {slot_bytes} bytes"
        raise SpecError(explain(thing, "bytes of a lane", (reach.lo, reach.hi), want, "correct that rank's card"))


def packed_destination(lane: Lane) -> Lane:
    """Return `lane` with a packed page as its destination: pool 0, slot = page number in the chunk, rows contiguous."""
    inner, outer = lane.inner, lane.outer
    return replace(
        lane,
        dst_pool=0,
        dst_offset=lane.packed_offset,
        dst_sub_stride=0,
        inner=replace(inner, dst_stride=lane.run_bytes),
        outer=replace(outer, dst_stride=lane.run_bytes * inner.count),
    )


def packed_source(lane: Lane) -> Lane:
    """Return `lane` with a packed page as its source: pool 0, slot = page number in the chunk, rows contiguous."""
    inner, outer = lane.inner, lane.outer
    return replace(
        lane,
        src_pool=0,
        src_offset=lane.packed_offset,
        src_sub_stride=0,
        inner=replace(inner, src_stride=lane.run_bytes),
        outer=replace(outer, src_stride=lane.run_bytes * inner.count),
    )
