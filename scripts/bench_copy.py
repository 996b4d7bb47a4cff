"""Time the host copier on copy programs of real page shapes, as ratios to one large memcpy of the same run.

The model has 32 layers of 8 KV heads of 128 bfloat16 elements and pages of 32 tokens (4 MiB). Both pools lie in shared
memory whose pages exist before the first timing. Machines differ and are shared, so every timing of a row stands
beside a memcpy of 256 MiB taken right before it, and the ratio is the median of the rounds. Bytes are checked after
every row against what was in the source.

    python scripts/bench_copy.py [--rounds 9] [--pages 128] [--threads 1] [--cpu-time] [--json]

With --cpu-time both are timed by the copying thread's processor time: what a machine would do that nobody shared. It
says nothing about further threads.
"""

from __future__ import annotations

import argparse
import json
import mmap
import os
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from statistics import median

import numpy as np
from numpy.typing import NDArray

from transfer.cards import build_card
from transfer.copier import CopyJob, Region
from transfer.copy_host import HostCopier
from transfer.hello import ParallelPosition, RankCard, Side
from transfer.pages import PagePairs
from transfer.plan import Lane, compile_program
from unikv.ids import LayerId
from unikv.layer_spec import KVCacheLayerSpec, KVDtype, KVLayout, LayerOwner
from unikv.layout import build_layout

Clock = Callable[[], float]
LAYERS, HEADS, TOKENS = 32, 8, 32
FLOOR_BYTES = 256 * 1024 * 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """One row: a pair of ranks by layout and tensor-parallel size, and whether slots are neighbours."""

    name: str
    src_layout: KVLayout
    dst_layout: KVLayout
    src_tp: int = 1
    dst_tp: int = 1
    shuffled: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """The result of one row; GB are 10^9 bytes of payload."""

    name: str
    run_bytes: int
    payload_mib: float
    gb_per_s: float
    ratio: float
    ratio_min: float
    ratio_max: float


def works() -> list[Work]:
    """Return the rows of the table."""
    hnd, nhd = KVLayout.HND, KVLayout.NHD
    return [
        Work(name="whole pages, neighbouring slots", src_layout=hnd, dst_layout=hnd, shuffled=False),
        Work(name="whole pages, shuffled slots", src_layout=hnd, dst_layout=hnd),
        Work(name="HND, 8 -> 4 heads", src_layout=hnd, dst_layout=hnd, dst_tp=2),
        Work(name="HND, 4 -> 8 heads", src_layout=hnd, dst_layout=hnd, src_tp=2),
        Work(name="NHD, 8 -> 4 heads", src_layout=nhd, dst_layout=nhd, dst_tp=2),
        Work(name="NHD, 4 -> 8 heads", src_layout=nhd, dst_layout=nhd, src_tp=2),
        Work(name="NHD, 8 -> 1 head", src_layout=nhd, dst_layout=nhd, dst_tp=8),
        Work(name="NHD, 1 -> 8 heads", src_layout=nhd, dst_layout=nhd, src_tp=8),
        Work(name="HND -> NHD, 8 heads", src_layout=hnd, dst_layout=nhd),
    ]


def card_of(side: Side, layout: KVLayout, tp: int, slots: int) -> RankCard:
    """Return the card of rank 0 of `tp`."""
    specs = [
        KVCacheLayerSpec(
            layer_id=LayerId(layer),
            owner=LayerOwner.TARGET,
            num_kv_heads=HEADS // tp,
            total_num_kv_heads=HEADS,
            head_dim=128,
            dtype=KVDtype.BFLOAT16,
        )
        for layer in range(LAYERS)
    ]
    return build_card(
        build_layout(specs, tokens_per_block=TOKENS, max_seq_len=None, kv_layout=layout),
        side=side,
        position=ParallelPosition(tp=tp),
        num_slots=slots,
        incarnation="bench",
        instance=side.value,
        num_target_layers=LAYERS,
        num_draft_layers=0,
    )


def shared_memory(size_bytes: int, seed: int) -> NDArray[np.uint8]:
    """Return random bytes in a memfd, every page of it in place."""
    fd = os.memfd_create("bench")
    os.ftruncate(fd, size_bytes)
    array = np.frombuffer(mmap.mmap(fd, size_bytes, flags=mmap.MAP_SHARED | mmap.MAP_POPULATE), np.uint8)
    os.close(fd)
    array.view(np.uint64)[:] = np.random.default_rng(seed).integers(0, 1 << 63, size_bytes // 8, np.uint64)
    return array


def job_of(work: Work, pages: int, memories: tuple[NDArray[np.uint8], NDArray[np.uint8]]) -> CopyJob:
    """Return the copy of `pages` pages from slots 1.. of one pool to slots of the other."""
    source = card_of(Side.CONTEXT, work.src_layout, work.src_tp, pages + 1)
    destination = card_of(Side.GENERATION, work.dst_layout, work.dst_tp, pages + 1)
    regions = [
        {0: Region(memory=memory, slot_stride_bytes=card.pools[0].slot_stride_bytes, num_slots=pages + 1)}
        for card, memory in zip((source, destination), memories, strict=True)
    ]
    slots = np.arange(1, pages + 1, dtype=np.int32)
    generator = np.random.default_rng(3)
    src, dst = (generator.permutation(slots) if work.shuffled else slots for _ in range(2))
    return CopyJob(
        lanes=compile_program(source, destination, with_draft=False).lanes,
        source=regions[0],
        destination=regions[1],
        pages=PagePairs(src_slot=src, src_sub=np.zeros_like(src), dst_slot=dst, dst_sub=np.zeros_like(dst)),
    )


def seconds(action: Callable[[], object], clock: Clock = time.perf_counter) -> float:
    """Return how long `action` takes."""
    start_s = clock()
    action()
    return clock() - start_s


def measure(work: Work, job: CopyJob, rounds: int, threads: int, clock: Clock = time.perf_counter) -> Row:
    """Time one row and check its bytes."""
    source, destination = job.source[0].memory, job.destination[0].memory
    copier = HostCopier(threads=threads)
    payload = len(job.pages) * sum(lane.page_bytes for lane in job.lanes)
    rates, ratios = [], []
    copier.submit(job)
    for _ in range(rounds):
        floor = FLOOR_BYTES / seconds(lambda: np.copyto(destination[:FLOOR_BYTES], source[:FLOOR_BYTES]), clock)
        rates.append(payload / seconds(lambda: copier.submit(job), clock))
        ratios.append(rates[-1] / floor)
    copier.close()
    check_bytes(job)
    return Row(
        name=work.name,
        run_bytes=job.lanes[0].run_bytes,
        payload_mib=payload / 2**20,
        gb_per_s=median(rates) / 1e9,
        ratio=median(ratios),
        ratio_min=min(ratios),
        ratio_max=max(ratios),
    )


def check_bytes(job: CopyJob) -> None:
    """Compare every row of some pages."""
    for page in (0, len(job.pages) // 2, len(job.pages) - 1):
        for lane in job.lanes:
            check_page(job, lane, page)


def check_page(job: CopyJob, lane: Lane, page: int) -> None:
    """Compare every row of one lane of one page."""
    source, destination = job.source[lane.src_pool], job.destination[lane.dst_pool]
    src = int(job.pages.src_slot[page]) * source.slot_stride_bytes + lane.src_offset
    dst = int(job.pages.dst_slot[page]) * destination.slot_stride_bytes + lane.dst_offset
    for i in range(lane.outer.count):
        for j in range(lane.inner.count):
            of = src + i * lane.outer.src_stride + j * lane.inner.src_stride
            to = dst + i * lane.outer.dst_stride + j * lane.inner.dst_stride
            same = source.memory[of : of + lane.run_bytes] == destination.memory[to : to + lane.run_bytes]
            if not same.all():
                raise SystemExit(f"page {page}, row ({i}, {j}): the copy differs from its source")


def main() -> None:
    """Run the benchmark and print one table."""
    parser = argparse.ArgumentParser(description="host copier against one memcpy of 256 MiB")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--pages", type=int, default=128)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--cpu-time", action="store_true", help="time by processor time, on machines that are shared")
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of the table")
    args = parser.parse_args()
    if args.cpu_time and args.threads > 1:
        parser.error("--cpu-time counts one thread; leave --threads out")
    clock = time.thread_time if args.cpu_time else time.perf_counter
    size_bytes = max((args.pages + 1) * 4 * 2**20, FLOOR_BYTES)
    memories = shared_memory(size_bytes, 1), shared_memory(size_bytes, 2)
    floor = median(
        FLOOR_BYTES / seconds(lambda: np.copyto(memories[1][:FLOOR_BYTES], memories[0][:FLOOR_BYTES]), clock) / 1e9
        for _ in range(args.rounds)
    )
    rows = [measure(work, job_of(work, args.pages, memories), args.rounds, args.threads, clock) for work in works()]
    if args.json:
        print(
            json.dumps(
                {
                    "threads": args.threads,
                    "cpu_time": args.cpu_time,
                    "memcpy_gb_per_s": floor,
                    "rows": [asdict(row) for row in rows],
                }
            )
        )
        return
    print(f"memcpy of 256 MiB, one thread: {floor:.1f} GB/s; copier threads: {args.threads}; rounds: {args.rounds}")
    print(f"{'work':34}{'run bytes':>10}{'MiB':>7}{'GB/s':>7}{'ratio':>7}   min-max")
    for row in rows:
        spread = f"{row.ratio_min:.2f}-{row.ratio_max:.2f}"
        print(f"{row.name:34}{row.run_bytes:10}{row.payload_mib:7.0f}{row.gb_per_s:7.1f}{row.ratio:7.2f}   {spread}")


if __name__ == "__main__":
    main()
