"""Time the device copier on copy programs of real page shapes, as ratios to one device copy of the same run.

Pools and pages are those of `bench_copy.py`: 32 layers of 8 KV heads of 128 bfloat16 elements, pages of 32 tokens. A
row's copy time is between events on the copier's stream; "submit" is the host's time from the call to the bytes there.
Bytes are checked after every row against numpy on the host, with the destination poisoned before.

    python scripts/bench_copy_gpu.py [--rounds 15] [--pages 128] [--json]
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from statistics import median
from typing import Any

import cupy
import numpy as np
from bench_copy import HEADS, LAYERS, TOKENS, Work, card_of, works

from transfer.copier import CopyJob, Region
from transfer.copy_cupy import CudaCopier
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
    submit_us_p99: float


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


def device_us(stream: Any, action: Callable[[], object]) -> float:
    """Return how long `action` takes on `stream`."""
    start, end = cupy.cuda.Event(), cupy.cuda.Event()
    start.record(stream)
    action()
    end.record(stream)
    end.synchronize()
    return 1e3 * float(cupy.cuda.get_elapsed_time(start, end))


def host_us(copier: CudaCopier, job: CopyJob) -> float:
    """Return the time from `submit` to the bytes being there."""
    start_s = time.perf_counter()
    ticket = copier.submit(job)
    while not ticket.done():
        pass
    return 1e6 * (time.perf_counter() - start_s)


def measure(work: Work, pages: int, rounds: int, memories: tuple[Any, Any]) -> Row:
    """Time one row beside a device copy of the same bytes, and check its bytes."""
    source, destination = memories
    job = job_of(work, pages, source, destination)
    payload = pages * sum(lane.page_bytes for lane in job.lanes)
    copier = CudaCopier()
    stream = copier._stream  # the only way to time the kernel alone
    copier.submit(job)
    cupy.cuda.Device().synchronize()
    copies = [device_us(stream, lambda: copier.submit(job)) for _ in range(rounds)]
    plain = cupy.cuda.Stream(non_blocking=True)
    runtime = cupy.cuda.runtime
    floors = [
        device_us(
            plain,
            lambda: runtime.memcpyAsync(
                destination.data.ptr, source.data.ptr, payload, runtime.memcpyDeviceToDevice, plain.ptr
            ),
        )
        for _ in range(rounds)
    ]
    waits = sorted(host_us(copier, job) for _ in range(10 * rounds))
    check_bytes(job, copier, destination, source)
    copier.close()
    return Row(
        name=work.name,
        run_bytes=job.lanes[0].run_bytes,
        payload_mib=payload / 2**20,
        copy_us=median(copies),
        gb_per_s=payload / median(copies) / 1e3,
        ratio=median(floors) / median(copies),
        submit_us_p50=waits[len(waits) // 2],
        submit_us_p99=waits[len(waits) * 99 // 100],
    )


def check_bytes(job: CopyJob, copier: CudaCopier, destination: Any, source: Any) -> None:
    """Copy once more over poison, and compare the whole destination with the host copier's."""
    destination.fill(0xA5)
    cupy.cuda.Device().synchronize()
    copier.submit(job)
    cupy.cuda.Device().synchronize()
    expected, original = np.full(destination.size, 0xA5, dtype=np.uint8), cupy.asnumpy(source)
    regions = [
        {0: Region(memory=m, slot_stride_bytes=r[0].slot_stride_bytes, num_slots=r[0].num_slots)}
        for m, r in ((original, job.source), (expected, job.destination))
    ]
    HostCopier().submit(CopyJob(lanes=job.lanes, source=regions[0], destination=regions[1], pages=job.pages))
    if not np.array_equal(expected, cupy.asnumpy(destination)):
        raise SystemExit("the copy differs from the host copier's")


def main() -> None:
    """Run the benchmark and print one table."""
    parser = argparse.ArgumentParser(description="device copier against one device copy")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--pages", type=int, default=128)
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of the table")
    args = parser.parse_args()
    page_bytes = LAYERS * 2 * HEADS * TOKENS * 128 * 2
    memories = tuple(cupy.empty((args.pages + 1) * page_bytes, dtype=cupy.uint8) for _ in range(2))
    memories[0][:] = cupy.random.randint(0, 256, memories[0].size, dtype=cupy.uint8)
    counts = [args.pages, 8, 1]
    rows = [measure(work, args.pages, args.rounds, memories) for work in works()]
    rows += [measure(works()[1], pages, args.rounds, memories) for pages in counts[1:]]
    if args.json:
        print(
            json.dumps(
                {"device": str(cupy.cuda.runtime.getDeviceProperties(0)["name"]), "rows": list(map(asdict, rows))}
            )
        )
        return
    print(f"{'work':34}{'run bytes':>10}{'MiB':>7}{'us':>9}{'GB/s':>8}{'ratio':>7}{'submit us p50':>15}{'p99':>8}")
    for row in rows:
        print(
            f"{row.name:34}{row.run_bytes:10}{row.payload_mib:7.0f}{row.copy_us:9.1f}{row.gb_per_s:8.0f}"
            f"{row.ratio:7.2f}{row.submit_us_p50:15.1f}{row.submit_us_p99:8.1f}"
        )


if __name__ == "__main__":
    main()
