"""Time the device copier on copy programs of real page shapes, as ratios to one device copy of the same run.

Pools and pages are those of `bench_copy.py`: 32 layers of 8 KV heads of 128 bfloat16 elements, pages of 32 tokens. A
row's copy time is between events on the copier's stream, upload of the page table included. "submit" is the host's
time in the call, "landed" from the call to the bytes there. Bytes are checked once a row against numpy on the host,
with the destination poisoned before. With `--sweep` every row is timed for many shapes of the kernel.

    python scripts/bench_copy_gpu.py [--rounds 15] [--pages 128] [--json] [--sweep]
"""

from __future__ import annotations

import argparse
import json
import time
from dataclasses import asdict, dataclass
from statistics import median
from typing import Any

import cupy
import numpy as np
from bench_copy import HEADS, LAYERS, TOKENS, Work, card_of, works

from transfer.copier import CopyJob, Region
from transfer.copy_cupy import CudaCopier, KernelShape
from transfer.copy_host import HostCopier
from transfer.hello import Side
from transfer.pages import PagePairs
from transfer.plan import compile_program


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """The result of one row; GB are 10^9 bytes of payload."""

    name: str
    run_bytes: int
    payload_mib: float
    copy_us: float
    gb_per_s: float
    ratio: float
    submit_us_p50: float
    landed_us_p50: float
    landed_us_p99: float


def job_of(work: Work, pages: int, source: Any, destination: Any) -> CopyJob:
    """Return the copy of `pages` pages from slots 1.. of one pool to slots of the other."""
    cards = (
        card_of(Side.CONTEXT, work.src_layout, work.src_tp, pages + 1),
        card_of(Side.GENERATION, work.dst_layout, work.dst_tp, pages + 1),
    )
    regions = [
        {0: Region(memory=memory, slot_stride_bytes=card.pools[0].slot_stride_bytes, num_slots=pages + 1)}
        for card, memory in zip(cards, (source, destination), strict=True)
    ]
    slots, generator = np.arange(1, pages + 1, dtype=np.int32), np.random.default_rng(3)
    src, dst = (generator.permutation(slots) if work.shuffled else slots for _ in range(2))
    return CopyJob(
        lanes=compile_program(*cards, with_draft=False).lanes,
        source=regions[0],
        destination=regions[1],
        pages=PagePairs(src_slot=src, src_sub=np.zeros_like(src), dst_slot=dst, dst_sub=np.zeros_like(dst)),
    )


def copy_us(copier: CudaCopier, job: CopyJob, rounds: int) -> list[float]:
    """Return the device times of `rounds` copies, one after the other."""
    copier.batch_times_s = []
    for _ in range(rounds):
        ticket = copier.submit(job)
        while not ticket.done():
            pass
    return [1e6 * time_s for time_s in copier.batch_times_s]


def floor_us(memories: tuple[Any, Any], size_bytes: int) -> float:
    """Return the device time of one plain copy."""
    runtime, stream = cupy.cuda.runtime, cupy.cuda.Stream(non_blocking=True)
    start, end = cupy.cuda.Event(), cupy.cuda.Event()
    source, destination = (memory.data.ptr for memory in memories)
    start.record(stream)
    runtime.memcpyAsync(destination, source, size_bytes, runtime.memcpyDeviceToDevice, stream.ptr)
    end.record(stream)
    end.synchronize()
    return 1e3 * float(cupy.cuda.get_elapsed_time(start, end))


def host_us(copier: CudaCopier, job: CopyJob) -> tuple[float, float]:
    """Return the time in `submit`, and from it to the bytes being there."""
    start_s = time.perf_counter()
    ticket = copier.submit(job)
    submitted_s = time.perf_counter()
    while not ticket.done():
        pass
    return 1e6 * (submitted_s - start_s), 1e6 * (time.perf_counter() - start_s)


def payload_of(job: CopyJob) -> int:
    """Return the bytes a job moves."""
    return len(job.pages) * sum(lane.page_bytes for lane in job.lanes)


def measure(work: Work, pages: int, rounds: int, memories: tuple[Any, Any]) -> Row:
    """Time one row beside a device copy of the same bytes, and check its bytes."""
    job = job_of(work, pages, *memories)
    payload = payload_of(job)
    copier = CudaCopier(timed=True)
    copy_us(copier, job, 3)
    copies = copy_us(copier, job, rounds)
    floor_us(memories, payload)
    floors = [floor_us(memories, payload) for _ in range(rounds)]
    copier.close()
    copier = CudaCopier()
    waits = [host_us(copier, job) for _ in range(10 * rounds)]
    landed = sorted(wait[1] for wait in waits)
    check_bytes(job, copier, *reversed(memories))
    copier.close()
    return Row(
        name=work.name,
        run_bytes=job.lanes[0].run_bytes,
        payload_mib=payload / 2**20,
        copy_us=median(copies),
        gb_per_s=payload / median(copies) / 1e3,
        ratio=median(floors) / median(copies),
        submit_us_p50=median(wait[0] for wait in waits),
        landed_us_p50=landed[len(landed) // 2],
        landed_us_p99=landed[len(landed) * 99 // 100],
    )


def check_bytes(job: CopyJob, copier: CudaCopier, destination: Any, source: Any) -> None:
    """Copy once more over poison, and compare the whole destination with the host copier's."""
    destination.fill(0xA5)
    ticket = copier.submit(job)
    while not ticket.done():
        pass
    expected, original = np.full(destination.size, 0xA5, dtype=np.uint8), cupy.asnumpy(source)
    regions = [
        {0: Region(memory=m, slot_stride_bytes=r[0].slot_stride_bytes, num_slots=r[0].num_slots)}
        for m, r in ((original, job.source), (expected, job.destination))
    ]
    HostCopier().submit(CopyJob(lanes=job.lanes, source=regions[0], destination=regions[1], pages=job.pages))
    if not np.array_equal(expected, cupy.asnumpy(destination)):
        raise SystemExit("the copy differs from the host copier's")


def sweep(pages: int, rounds: int, memories: tuple[Any, Any]) -> None:
    """Print the ratio of every row for every shape of the kernel."""
    rows = [work for work in works() if "neighbouring" not in work.name]
    jobs = [job_of(work, pages, *memories) for work in rows]
    floors = [median(floor_us(memories, payload_of(job)) for _ in range(rounds)) for job in jobs]
    print("threads steps cache " + " ".join(f"{work.name[:20]:>20}" for work in rows))
    for threads in (32, 64, 128, 256):
        for steps in (1, 2, 4, 8, 16):
            for cache in (0, 1, 2):
                copier = CudaCopier(shape=KernelShape(threads=threads, steps=steps, cache=cache), timed=True)
                ratios = []
                for job, floor in zip(jobs, floors, strict=True):
                    copy_us(copier, job, 2)
                    ratios.append(floor / median(copy_us(copier, job, rounds)))
                copier.close()
                print(f"{threads:7} {steps:5} {cache:5} " + " ".join(f"{ratio:20.3f}" for ratio in ratios), flush=True)


def main() -> None:
    """Run the benchmark and print one table."""
    parser = argparse.ArgumentParser(description="device copier against one device copy")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--pages", type=int, default=128)
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of the table")
    parser.add_argument("--sweep", action="store_true", help="time many shapes of the kernel")
    args = parser.parse_args()
    page_bytes = LAYERS * 2 * HEADS * TOKENS * 128 * 2
    memories = tuple(cupy.empty((args.pages + 1) * page_bytes, dtype=cupy.uint8) for _ in range(2))
    memories[0][:] = cupy.random.randint(0, 256, memories[0].size, dtype=cupy.uint8)
    if args.sweep:
        sweep(args.pages, args.rounds, memories)
        return
    rows = [measure(work, args.pages, args.rounds, memories) for work in works()]
    rows += [measure(works()[1], pages, args.rounds, memories) for pages in (8, 1)]
    if args.json:
        device = str(cupy.cuda.runtime.getDeviceProperties(0)["name"])
        print(json.dumps({"device": device, "rows": list(map(asdict, rows))}))
        return
    columns = ("run bytes", "MiB", "us", "GB/s", "ratio", "submit p50", "landed p50", "p99")
    print(f"{'work':34}" + "".join(f"{column:>11}" for column in columns))
    for row in rows:
        print(
            f"{row.name:34}{row.run_bytes:11}{row.payload_mib:11.0f}{row.copy_us:11.1f}{row.gb_per_s:11.0f}"
            f"{row.ratio:11.2f}{row.submit_us_p50:11.1f}{row.landed_us_p50:11.1f}{row.landed_us_p99:11.1f}"
        )


if __name__ == "__main__":
    main()
