"""Time what the cache manager itself costs the CPU, at several sizes, so that growth can be seen.

The cache has full-attention target layers and a windowed drafter, pages of 32 tokens. Every row is timed with 1, 64 and
256 requests resident, and where lengths matter with short and with 128k-token sequences: a row whose time follows what
exists, and not what the call changes, shows it here. Times are medians of the rounds, with the smallest and largest.

    python scripts/bench_manager.py [--rounds 15] [--json]
"""

from __future__ import annotations

import argparse
import gc
import json
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from statistics import median

import numpy as np

from unikv.budget import PoolBudget
from unikv.cache_manager import UnifiedKVCacheManager
from unikv.ids import GroupId, LayerId, RequestId
from unikv.layer_spec import KVCacheLayerSpec, KVDtype, LayerOwner, ReusePolicy
from unikv.request import KVCacheRequest

TOKENS_PER_BLOCK, LONG, SHORT, WINDOW = 32, 131_072, 1_024, 2_048
RESIDENT = (1, 64, 256)
TARGET, DRAFT = GroupId(0), GroupId(1)
DRAFTS = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One measurement, in microseconds."""

    what: str
    resident: int
    tokens: int
    median_us: float
    min_us: float
    max_us: float


def layer(number: int, owner: LayerOwner, window: int | None) -> KVCacheLayerSpec:
    """Return a small layer: the manager does not look at the bytes."""
    return KVCacheLayerSpec(
        layer_id=LayerId(number),
        owner=owner,
        num_kv_heads=1,
        head_dim=8,
        dtype=KVDtype.FLOAT16,
        window=window,
        reuse_policy=ReusePolicy.REQUIRED if window is None else ReusePolicy.OPTIONAL,
    )


@contextmanager
def cache(resident: int, tokens: int) -> Iterator[tuple[UnifiedKVCacheManager, list[KVCacheRequest]]]:
    """Yield a manager with `resident` requests of `tokens` tokens each, all of them final."""
    specs = [layer(0, LayerOwner.TARGET, None), layer(1, LayerOwner.DRAFT, WINDOW)]
    pages = (resident + 2) * (tokens // TOKENS_PER_BLOCK + 4) + 2 * LONG // TOKENS_PER_BLOCK
    manager = UnifiedKVCacheManager(
        specs, tokens_per_block=TOKENS_PER_BLOCK, max_seq_len=2 * LONG, pool=PoolBudget(pages=pages)
    )
    requests = [manager.create_request(RequestId(number)) for number in range(resident)]
    for number, request in enumerate(requests):
        history = tokens + number % TOKENS_PER_BLOCK  # so that they do not all need a block in the same step
        request.resize(history + 8, history)
    try:
        yield manager, requests
    finally:
        for request in requests:
            request.close()
        manager.close()


def timed(what: str, resident: int, tokens: int, rounds: int, action: Callable[[int], object]) -> Row:
    """Time `action(round)`; the first round does not count."""
    times = []
    for number in range(rounds + 1):
        start_s = time.perf_counter()
        action(number)
        times.append(1e6 * (time.perf_counter() - start_s))
    rest = times[1:]
    return Row(what=what, resident=resident, tokens=tokens, median_us=median(rest), min_us=min(rest), max_us=max(rest))


def steps(resident: int, tokens: int, rounds: int) -> Iterator[Row]:
    """One decode step of all residents (grow and settle), one page-table export, one block of growth."""
    with cache(resident, tokens) as (manager, requests):

        def step(_: int) -> None:
            for request in requests:
                request.grow(DRAFTS)
            for request in requests:
                request.rewind(1, request.history_tokens + 2)

        def grow_a_block(_: int) -> None:
            requests[0].resize(requests[0].capacity_tokens + TOKENS_PER_BLOCK)

        yield timed("decode step of all residents", resident, tokens, rounds, step)
        yield timed("page tables of one request", resident, tokens, rounds, lambda _: requests[0].page_tables())
        yield timed("one more block for one request", resident, tokens, rounds, grow_a_block)
        ids = [request.request_id for request in requests]
        yield timed("block table of the batch", resident, tokens, rounds, lambda _: manager.block_table(TARGET, ids))


def reuse(resident: int, prompt_tokens: int, rounds: int) -> Iterator[Row]:
    """Match, claim, run and commit a prompt that is cached."""
    with cache(resident, SHORT) as (manager, _):
        prompt = np.random.default_rng(7).integers(0, 32_000, prompt_tokens + 1)
        first = manager.create_request(RequestId(10_000), prompt)
        first.resume()
        first.resize(prompt_tokens + 1)
        start_s = time.perf_counter()
        first.commit(prompt[:prompt_tokens], is_end=True)
        commit_us = 1e6 * (time.perf_counter() - start_s)
        first.close()

        def create(number: int) -> None:
            request = manager.create_request(RequestId(20_000 + number), prompt)
            request.resume([DRAFT])
            assert request.history_tokens == prompt_tokens
            request.close()

        yield Row(
            what="commit",
            resident=resident,
            tokens=prompt_tokens,
            median_us=commit_us,
            min_us=commit_us,
            max_us=commit_us,
        )
        yield timed("match", resident, prompt_tokens, rounds, lambda _: manager.probe(prompt))
        yield timed("create, match, resume, close", resident, prompt_tokens, rounds, create)
        writer = manager.create_request(RequestId(30_000), prompt)
        writer.resume([DRAFT])

        def commit_a_block(number: int) -> None:
            writer.resize(writer.history_tokens + TOKENS_PER_BLOCK)
            writer.commit(np.arange(TOKENS_PER_BLOCK) + number)

        yield timed("resize and commit one more block", resident, prompt_tokens, rounds, commit_a_block)
        writer.close()


def rows(rounds: int) -> Iterator[Row]:
    """Run everything."""
    for resident in RESIDENT:
        yield from steps(resident, SHORT, rounds)
    for resident in RESIDENT[:2]:
        yield from steps(resident, LONG, rounds)
    for prompt_tokens in (1_024, 2_048, 4_096, 8_192, 16_384, LONG):
        yield from reuse(1, prompt_tokens, rounds)
    for resident in RESIDENT[1:]:
        yield from reuse(resident, 8_192, rounds)


def main() -> None:
    """Run the benchmark and print one table."""
    parser = argparse.ArgumentParser(description="what the cache manager costs the CPU")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of the table")
    args = parser.parse_args()
    gc.collect()
    gc.freeze()
    found = list(rows(args.rounds))
    if args.json:
        print(json.dumps({"rounds": args.rounds, "rows": [asdict(row) for row in found]}))
        return
    print(f"{'what':34}{'resident':>9}{'tokens':>9}{'median us':>11}   min-max")
    for row in found:
        print(f"{row.what:34}{row.resident:9}{row.tokens:9}{row.median_us:11.1f}   {row.min_us:.1f}-{row.max_us:.1f}")


if __name__ == "__main__":
    main()
