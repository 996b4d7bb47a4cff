"""Lanes cut into tiles: what one block of a device kernel copies. Made once per program, in arrays, without a device.

A tile is some rows of equal length at equal distances, on each side at its own::

    address of vector k of a tile, source side

        src + slot * src_slot + sub * src_sub                    the tile of this page
            + (k // row_vectors) * src_row                       its row
            + (k %  row_vectors) * vector width

Long runs are cut into parts of at most a tile, so that large pages and many small rows give blocks of equal work. A
block finds its tile by its number, reads 64 bytes and the page's slots, and copies: nothing is searched or divided
(``k // row_vectors`` is one multiplication with a number computed here).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import gcd
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from transfer.lanes import Lane, Rows
from unikv.errors import CopyError, explain

TILE: Final = np.dtype(
    [
        ("src", "<i8"),
        ("dst", "<i8"),
        ("src_slot", "<i8"),
        ("dst_slot", "<i8"),
        ("src_sub", "<i4"),
        ("dst_sub", "<i4"),
        ("src_row", "<i4"),
        ("dst_row", "<i4"),
        ("vectors", "<i4"),
        ("row_vectors", "<i4"),
        ("magic", "<u4"),
        ("unused", "<i4"),
    ]
)
"""As the kernel's struct. `vectors` is what the whole tile has; `magic` is ``ceil(2**32 / row_vectors)``, 0 for 1."""

VECTORS_BYTES: Final = (16, 8, 4, 1)
"""Widths of the loads and stores a kernel comes in."""
MAX_TILE_VECTORS: Final = 1 << 15
"""Up to here the multiplication gives the quotient exactly: both numbers have 15 bits."""
_MAX_STRIDE: Final = 2**31

Tiles = NDArray[Any]


@dataclass(frozen=True, slots=True)
class SidePlace:
    """One pool of one side: where slot 0 begins, and the distance of slots, both in bytes."""

    address: int
    slot_stride_bytes: int


def cut_lanes(
    lanes: Sequence[Lane],
    source: Mapping[int, SidePlace],
    destination: Mapping[int, SidePlace],
    *,
    tile_vectors: int,
) -> dict[int, Tiles]:
    """Return the tiles of `lanes` by vector width.

    Args:
        lanes: lanes that passed `transfer.copy_checks`.
        source, destination: the pools they name.
        tile_vectors: most vectors of one tile.

    Raises:
        CopyError: (in_doubt False) a stride of 2 GiB or more.
    """
    found: dict[int, list[Tiles]] = {}
    for number, lane in enumerate(lanes):
        places = source[lane.src_pool], destination[lane.dst_pool]
        _check_strides(number, lane)
        width = vector_width(lane, *places)
        found.setdefault(width, []).append(_cut(lane, *places, width, min(tile_vectors, MAX_TILE_VECTORS)))
    return {width: np.concatenate(found[width]) for width in sorted(found, reverse=True)}


def vector_width(lane: Lane, src: SidePlace, dst: SidePlace) -> int:
    """Return the widest vector that divides every address and length of a lane, in bytes."""
    lengths = (
        lane.run_bytes, lane.src_offset, lane.dst_offset, lane.src_sub_stride, lane.dst_sub_stride,
        lane.outer.src_stride, lane.outer.dst_stride, lane.inner.src_stride, lane.inner.dst_stride,
        src.address, src.slot_stride_bytes, dst.address, dst.slot_stride_bytes,
    )  # fmt: skip
    common = gcd(*lengths, VECTORS_BYTES[0])
    return next(width for width in VECTORS_BYTES if common % width == 0)


def _cut(lane: Lane, src: SidePlace, dst: SidePlace, width: int, most: int) -> Tiles:
    run = lane.run_bytes // width
    outer, inner = _folded(lane)
    if run > most:  # parts of one row
        starts, lengths = _parts(run, most)
        offsets = [_offsets(outer, inner, side)[:, None] + starts * width for side in ("src", "dst")]
        vectors = np.broadcast_to(lengths, offsets[0].shape).ravel()
        return _tiles(lane, src, dst, (offsets[0].ravel(), offsets[1].ravel()), vectors, vectors, None)
    fits = max(1, most // run)
    others, along = (outer, inner) if min(inner.count, fits) >= min(outer.count, fits) else (inner, outer)
    starts, lengths = _parts(along.count, fits)
    shifted = [
        _offsets(others, Rows(count=1, src_stride=0, dst_stride=0), side)[:, None]
        + starts * getattr(along, f"{side}_stride")
        for side in ("src", "dst")
    ]
    rows = np.broadcast_to(lengths, shifted[0].shape).ravel()
    row_vectors = np.full(rows.shape, run, np.int64)
    return _tiles(lane, src, dst, (shifted[0].ravel(), shifted[1].ravel()), rows * run, row_vectors, along)


def _folded(lane: Lane) -> tuple[Rows, Rows]:
    """Return (outer, inner); where outer rows go on as the inner ones do, all rows are inner ones."""
    outer, inner = lane.outer, lane.inner
    if inner.count == 1:
        return inner, outer
    goes_on = outer.src_stride == inner.count * inner.src_stride and outer.dst_stride == inner.count * inner.dst_stride
    if outer.count > 1 and goes_on:
        joined = Rows(count=outer.count * inner.count, src_stride=inner.src_stride, dst_stride=inner.dst_stride)
        return Rows(count=1, src_stride=0, dst_stride=0), joined
    return outer, inner


def _parts(count: int, most: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return starts and lengths of as few parts as possible, of nearly equal length."""
    bounds = np.arange(-(-count // most) + 1, dtype=np.int64) * count // -(-count // most)
    return bounds[:-1], np.diff(bounds)


def _offsets(outer: Rows, inner: Rows, side: str) -> NDArray[np.int64]:
    """Return where the rows of both dimensions begin, outermost first."""
    far, near = (
        np.arange(rows.count, dtype=np.int64) * int(getattr(rows, f"{side}_stride")) for rows in (outer, inner)
    )
    return np.add.outer(far, near).ravel()


def _tiles(
    lane: Lane,
    src: SidePlace,
    dst: SidePlace,
    offsets: tuple[NDArray[np.int64], NDArray[np.int64]],
    vectors: NDArray[np.int64],
    row_vectors: NDArray[np.int64],
    along: Rows | None,
) -> Tiles:
    tiles = np.zeros(vectors.shape, TILE)
    tiles["src"] = src.address + lane.src_offset + offsets[0]
    tiles["dst"] = dst.address + lane.dst_offset + offsets[1]
    tiles["src_slot"], tiles["dst_slot"] = src.slot_stride_bytes, dst.slot_stride_bytes
    tiles["src_sub"], tiles["dst_sub"] = lane.src_sub_stride, lane.dst_sub_stride
    if along is not None:
        tiles["src_row"], tiles["dst_row"] = along.src_stride, along.dst_stride
    tiles["vectors"], tiles["row_vectors"] = vectors, row_vectors
    tiles["magic"] = np.where(row_vectors > 1, -(-(2**32) // row_vectors), 0)
    return tiles


def _check_strides(number: int, lane: Lane) -> None:
    strides = (
        lane.src_sub_stride, lane.dst_sub_stride, lane.outer.src_stride, lane.outer.dst_stride,
        lane.inner.src_stride, lane.inner.dst_stride,
    )  # fmt: skip
    if max(strides) >= _MAX_STRIDE:
        want = f"< {_MAX_STRIDE} bytes"
        text = explain("copy job", f"lane {number} strides", strides, want, "use smaller pages on a device")
        raise CopyError(text, in_doubt=False)
