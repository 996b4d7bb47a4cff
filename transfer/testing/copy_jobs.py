"""The jobs of the conformance suite of copiers: those to carry out, those to refuse, and random ones."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Final

from transfer.pages import PagePairs
from transfer.plan import Lane, Rows
from transfer.testing.copy_cases import (
    CopyCase,
    PageShape,
    PoolShape,
    make_lane,
    make_pages,
    merge_runs,
    slice_case,
)


def _whole(src: Sequence[int], dst: Sequence[int], page_bytes: int = 96) -> CopyCase:
    shape = PoolShape(slot_stride_bytes=page_bytes, num_slots=16)
    lanes = (make_lane(run_bytes=page_bytes),)
    return CopyCase(lanes=lanes, source={0: shape}, destination={0: shape}, pages=make_pages(src, dst))


def _odd_rows(run_bytes: int) -> CopyCase:
    """Rows of `run_bytes` at odd offsets and distances, in both dimensions, with gaps on both sides."""
    step = run_bytes + 5
    lane = make_lane(
        src_offset=3,
        dst_offset=7,
        outer=Rows(count=2, src_stride=3 * step + 1, dst_stride=run_bytes + 1),
        inner=Rows(count=3, src_stride=step, dst_stride=2 * run_bytes + 9),
        run_bytes=run_bytes,
    )
    source = PoolShape(slot_stride_bytes=lane.reach("src", 1).hi + 4, num_slots=5, base_offset=1)
    destination = PoolShape(slot_stride_bytes=lane.reach("dst", 1).hi + 2, num_slots=6, base_offset=3)
    pages = make_pages([1, 2, 3, 0], [3, 4, 5, 0])
    return CopyCase(lanes=(lane,), source={0: source}, destination={0: destination}, pages=pages)


def _several_pools() -> CopyCase:
    lanes = (
        make_lane(src_pool=0, dst_pool=1, src_offset=8, dst_offset=0, run_bytes=24),
        make_lane(src_pool=2, dst_pool=0, src_offset=0, dst_offset=4, run_bytes=12),
        make_lane(src_pool=2, dst_pool=1, src_offset=12, dst_offset=30, run_bytes=10),
    )
    source = {0: PoolShape(slot_stride_bytes=40, num_slots=8), 2: PoolShape(slot_stride_bytes=22, num_slots=8)}
    destination = {0: PoolShape(slot_stride_bytes=16, num_slots=9), 1: PoolShape(slot_stride_bytes=40, num_slots=9)}
    return CopyCase(lanes=lanes, source=source, destination=destination, pages=make_pages([6, 7, 1], [8, 2, 3]))


def _crosswise() -> CopyCase:
    """Pages that go on by slot on one side and by sub-page on the other, and then the other way round."""
    shape = PoolShape(slot_stride_bytes=32, num_slots=3)
    lanes = (make_lane(src_sub_stride=10, dst_sub_stride=12, run_bytes=9),)
    pages = make_pages([0, 1, 1, 2], [0, 0, 1, 1], [0, 0, 1, 1], [0, 1, 1, 2])
    return CopyCase(lanes=lanes, source={0: shape}, destination={0: replace(shape, slot_stride_bytes=40)}, pages=pages)


def _nothing() -> CopyCase:
    return replace(_whole([], []), lanes=(make_lane(run_bytes=8),))


_HND: Final = PageShape(hnd=True, heads=4, tokens=6, row_bytes=10)
_NHD: Final = replace(_HND, hnd=False)


def _cut(src: PageShape, dst: PageShape, *, src_head: int = 0, dst_head: int = 0, heads: int = 4) -> CopyCase:
    return slice_case(src, dst, src_head=src_head, dst_head=dst_head, heads=heads)


def _kv_cases() -> dict[str, CopyCase]:
    cases = {}
    for name, full in (("hnd", _HND), ("nhd", _NHD)):
        half, small = replace(full, heads=2), replace(full, tokens=2)
        cases[f"{name}: half the heads out of a page"] = _cut(full, half, src_head=2, heads=2)
        cases[f"{name}: half the heads into a page"] = _cut(half, full, dst_head=1, heads=2)
        cases[f"{name}: large pages to small"] = _cut(full, small)
        cases[f"{name}: small pages to large"] = _cut(small, full)
        cases[f"{name}: small pages to half the heads of large"] = _cut(small, half, src_head=1, heads=2)
    cases["hnd to nhd"] = _cut(_HND, _NHD)
    cases["nhd to hnd"] = _cut(_NHD, _HND)
    cases["hnd to nhd: some heads, large pages to small"] = _cut(_HND, replace(_NHD, tokens=3), src_head=1, heads=3)
    return cases


_ODD_RUNS_BYTES: Final = (1, 2, 3, 7, 8, 16, 72, 512, 1024, 1536, 2048, 4100, 16384, 16385, 24576, 40000)

COPIES: Final[Mapping[str, CopyCase]] = {
    "one page": _whole([3], [9]),
    "whole pages, neighbours": _whole(range(2, 9), range(6, 13)),
    "whole pages, shuffled": _whole([5, 1, 7, 6, 5, 0], [0, 4, 3, 2, 15, 14]),
    "whole pages, descending": _whole([5, 4, 3, 2], [9, 8, 7, 6]),
    "whole pages, neighbours on one side": _whole([1, 2, 3, 4, 6], [7, 8, 9, 3, 5]),
    "long whole pages, some neighbours": _whole([1, 2, 9, 10, 11], [3, 4, 5, 6, 8], 20_000),
    "several pools": _several_pools(),
    "sub-pages crosswise": _crosswise(),
    "no pages": _nothing(),
    "no lanes": replace(_whole([1], [2]), lanes=()),
    **_kv_cases(),
    **{f"{name}, merged": merge_runs(case) for name, case in _kv_cases().items()},
    **{f"odd rows of {run} bytes": _odd_rows(run) for run in _ODD_RUNS_BYTES},
}
"""Jobs every copier must carry out."""


def _refuse(**changes: object) -> CopyCase:
    """Return a sound job of two rows a page, except for `changes` to the case, the lane or the pages."""
    case = CopyCase(
        lanes=(make_lane(inner=Rows(count=2, src_stride=8, dst_stride=8), run_bytes=8),),
        source={0: PoolShape(slot_stride_bytes=16, num_slots=4)},
        destination={0: PoolShape(slot_stride_bytes=24, num_slots=5)},
        pages=make_pages([1, 2, 3], [4, 1, 2]),
    )
    return replace(case, **changes)  # type: ignore[arg-type]


def _lane(**fields: object) -> tuple[Lane, ...]:
    return (replace(_refuse().lanes[0], **fields),)  # type: ignore[arg-type]


def _rows(count: int, src_stride: int, dst_stride: int) -> Rows:
    return Rows(count=count, src_stride=src_stride, dst_stride=dst_stride)


_ROW_LANES: Final = (make_lane(run_bytes=8), make_lane(dst_offset=7, run_bytes=8))

REFUSALS: Final[Mapping[str, tuple[CopyCase, str]]] = {
    "a hole as source": (_refuse(pages=make_pages([1, -1], [2, 3])), "source slot is -1"),
    "a hole as destination": (_refuse(pages=make_pages([1, 2], [2, -1])), "destination slot is -1"),
    "a source slot past the end": (_refuse(pages=make_pages([4], [2])), "source slot is 4"),
    "a destination slot past the end": (_refuse(pages=make_pages([1], [5])), "destination slot is 5"),
    "a destination page twice": (_refuse(pages=make_pages([1, 2, 3], [4, 1, 4])), "(4, 0)"),
    "a negative sub-page": (_refuse(pages=make_pages([1], [2], [-1], [0])), "src_sub is -1"),
    "a sub-page past the source slot": (
        _refuse(lanes=_lane(src_sub_stride=16), pages=make_pages([1], [2], [1], [0])),
        "last source byte is 32",
    ),
    "a sub-page past the destination slot": (
        _refuse(lanes=_lane(dst_sub_stride=16), pages=make_pages([1], [2], [0], [1])),
        "last destination byte is 32",
    ),
    "sub-pages that overlap": (
        _refuse(lanes=_lane(dst_sub_stride=8), pages=make_pages([1, 2], [2, 2], [0, 0], [0, 1])),
        "destination byte of a slot is 8",
    ),
    "a row past the source slot": (_refuse(lanes=_lane(inner=_rows(2, 9, 8))), "last source byte is 17"),
    "a row past the destination slot": (_refuse(lanes=_lane(inner=_rows(2, 8, 17))), "last destination byte is 25"),
    "a lane past the source slot": (_refuse(lanes=_lane(src_offset=1)), "last source byte is 17"),
    "rows that overlap": (_refuse(lanes=_lane(inner=_rows(2, 8, 7))), "destination byte of a slot is 7"),
    "lanes that overlap": (_refuse(lanes=_ROW_LANES), "destination byte of a slot is 7"),
    "a negative offset": (_refuse(lanes=_lane(dst_offset=-1)), "lane 0 offsets and strides"),
    "a negative stride": (_refuse(lanes=_lane(inner=_rows(2, -8, 8), src_offset=8)), "lane 0 offsets and strides"),
    "a lane without rows": (_refuse(lanes=_lane(inner=_rows(0, 8, 8))), "lane 0 rows and run bytes"),
    "a lane without bytes": (_refuse(lanes=_lane(run_bytes=0)), "lane 0 rows and run bytes"),
    "a source pool without region": (_refuse(lanes=_lane(src_pool=3)), "source pool of a lane is 3"),
    "a destination pool without region": (_refuse(lanes=_lane(dst_pool=2)), "destination pool of a lane is 2"),
    "a source memory too small": (
        _refuse(source={0: PoolShape(slot_stride_bytes=16, num_slots=4, missing_bytes=1)}),
        "source region 0 size is 63",
    ),
    "a destination memory too small": (
        _refuse(destination={0: PoolShape(slot_stride_bytes=24, num_slots=5, missing_bytes=24)}),
        "destination region 0 size is 96",
    ),
    "page columns of unequal length": (
        _refuse(pages=replace(make_pages([1, 2], [2, 3]), dst_sub=make_pages([1], [1]).dst_sub)),
        "pages is (2, 2, 2, 1)",
    ),
}
"""Jobs every copier must refuse, and a part of the text it must say."""

Chooser = Callable[[int, int], int]
"""Returns an integer of an inclusive range: a random generator, or a property-based test's draw."""


def random_case(choose: Chooser) -> CopyCase:
    """Return a sound job with up to three lanes, chosen by `choose`: rows nested in any order, with gaps or without."""
    subs = (choose(1, 3), choose(1, 3))
    lanes: list[Lane] = []
    for _ in range(choose(1, 3)):
        base = lanes[-1].reach("dst", subs[1]).hi if lanes else 0
        lanes.append(_random_lane(choose, subs, base))
    pools = []
    for side, count in zip(("src", "dst"), subs, strict=True):
        stride = max(lane.reach(side, count).hi for lane in lanes) + choose(0, 5)
        pools.append({0: PoolShape(slot_stride_bytes=stride, num_slots=choose(1, 6), base_offset=choose(0, 9))})
    source, destination = pools
    pages = _random_pages(choose, (source[0].num_slots, subs[0]), (destination[0].num_slots, subs[1]))
    return CopyCase(lanes=tuple(lanes), source=source, destination=destination, pages=pages)


def _random_lane(choose: Chooser, subs: tuple[int, int], base: int) -> Lane:
    run_bytes = (choose(1, 9), choose(1, 80), 8 * choose(1, 4), 512 * choose(1, 4))[choose(0, 3)]
    outer, inner = choose(1, 3), choose(1, 4)
    src = _nest(choose, (subs[0], outer, inner), run_bytes)
    dst = _nest(choose, (subs[1], outer, inner), run_bytes)
    return make_lane(
        src_offset=choose(0, 9),
        dst_offset=base + choose(0, 9),
        src_sub_stride=src[0],
        dst_sub_stride=dst[0],
        outer=_rows(outer, src[1], dst[1]),
        inner=_rows(inner, src[2], dst[2]),
        run_bytes=run_bytes,
    )


def _nest(choose: Chooser, counts: tuple[int, int, int], run_bytes: int) -> list[int]:
    """Return strides that lay the dimensions out one inside the other, in a random order, so that no rows overlap."""
    order, strides, extent = [0, 1, 2], [0, 0, 0], run_bytes
    while order:
        at = order.pop(choose(0, len(order) - 1))
        strides[at] = extent + choose(0, 3)
        extent = (counts[at] - 1) * strides[at] + extent
    return strides


def _random_pages(choose: Chooser, src: tuple[int, int], dst: tuple[int, int]) -> PagePairs:
    """Pair some destination (slot, sub-page)s, each once and often neighbours, with any source ones."""
    free = [(slot, sub) for slot in range(dst[0]) for sub in range(dst[1])]
    src_all = [(slot, sub) for slot in range(src[0]) for sub in range(src[1])]
    pairs: list[tuple[tuple[int, int], tuple[int, int]]] = []
    at = choose(0, len(src_all) - 1)
    for _ in range(choose(0, len(free))):
        follow = choose(0, 2) > 0
        at = (at + src[1] ** choose(0, 1)) % len(src_all) if follow else choose(0, len(src_all) - 1)
        pairs.append((src_all[at], free.pop(0 if follow else choose(0, len(free) - 1))))
    of, to = [page for page, _ in pairs], [page for _, page in pairs]
    return make_pages([p[0] for p in of], [p[0] for p in to], [p[1] for p in of], [p[1] for p in to])
