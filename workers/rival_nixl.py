"""What NIXL alone makes of a pair's pages: one WRITE with a descriptor per run, the way an engine would use it.

Page tables, pools and bytes are those of the benchmark's longest request. With progress thread and without are both
measured, as are runs cut at the buffers of a layer, which engines with a tensor per layer have, and runs as long as the
pools allow. Making descriptors counts: an engine makes them for every request. Poisoned before and verified after
every write.
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from transfer.hello import RankCard, Side
from transfer.nixl_agent import NixlSession, address_of, why_no_nixl
from transfer.plan import CopyProgram, Lane, compile_program
from unikv.errors import LinkBrokenError
from workers.config import PairConfig
from workers.rival_target import POISON, digest
from workers.topology import dry_cards

ROUNDS: Final = 5
FEW_ROUNDS: Final = 3
LONG_S: Final = 0.5
"""A round that takes longer is repeated `FEW_ROUNDS` times only."""
Runs = NDArray[np.uint64]
"""``[run, (address, bytes, 0)]``."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunPair:
    """The same runs on both sides, as offsets into one memory each."""

    source: Runs
    target: Runs


@dataclass(frozen=True, slots=True, kw_only=True)
class _Work:
    """What goes to one generation rank, and how much memory it has."""

    runs: RunPair
    bytes: int


def compare_with_nixl(pair: PairConfig, ours_gb_per_s: float) -> dict[str, Any]:
    """Return NIXL's rates for one request, its best one, and how often ours is that; ``absent`` says why there is none.

    Args:
        pair: what was benchmarked; one context rank.
        ours_gb_per_s: our own rate.
    """
    contexts, generations = dry_cards(pair, Side.CONTEXT), dry_cards(pair, Side.GENERATION)
    absent = why_no_nixl() or ("" if len(contexts) == 1 else "several context ranks write at once")
    if absent:
        return {"absent": absent}
    rates = []
    for merged in (False, True) if _can_merge(contexts[0], generations) else (False,):
        rates += [_rate(pair, contexts[0], generations, threaded=on, merged=merged) for on in (True, False)]
    best = {merged: max((r for r in rates if r["merged"] <= merged), key=_median) for merged in (False, True)}
    return {
        "absent": "",
        "settings": rates,
        "gb_per_s": best[False]["gb_per_s"],
        "ratio": ours_gb_per_s / _median(best[False]),
        "merged_gb_per_s": best[True]["gb_per_s"],
        "merged_ratio": ours_gb_per_s / _median(best[True]),
    }


def _can_merge(context: RankCard, generations: Sequence[RankCard]) -> bool:
    """Return whether runs reach beyond one buffer of a layer."""
    return any(
        len(_runs(context, card, 1, merged=True).source) < len(_runs(context, card, 1, merged=False).source)
        for card in generations
    )


def _runs(context: RankCard, generation: RankCard, pages: int, *, merged: bool) -> RunPair:
    program = compile_program(context, generation, with_draft=True)
    return runs_of(program, context, generation, pages, merged=merged)


def _median(rate: dict[str, Any]) -> float:
    return float(rate["gb_per_s"]["median"])


def _rate(
    pair: PairConfig, context: RankCard, generations: Sequence[RankCard], *, threaded: bool, merged: bool
) -> dict[str, Any]:
    pages = -(-pair.workload.prompt_tokens[1] // context.tokens_per_block)
    works = [_Work(runs=_runs(context, card, pages, merged=merged), bytes=_memory_bytes(card)) for card in generations]
    with ExitStack() as stack:
        session = NixlSession("rival-source", progress_thread=threaded)
        stack.callback(session.close)
        memory = session.memory(_memory_bytes(context))
        memory[:] = np.random.default_rng(7).integers(0, 256, memory.size, np.uint8)
        targets = [stack.enter_context(_target(session, work.bytes, threaded=threaded)) for work in works]
        wanted = [digest(_expected(memory, work.runs, work.bytes)) for work in works]
        once = partial(_write_all, targets, works, wanted, memory)
        times = [once() for _ in range(ROUNDS if once() < LONG_S else FEW_ROUNDS)]
    size = sum(int(work.runs.source[:, 1].sum()) for work in works)
    rates = [size / taken_s / 1e9 for taken_s in times]
    return {
        "progress_thread": threaded,
        "merged": merged,
        "descriptors": sum(len(work.runs.source) for work in works),
        "bytes": size,
        "gb_per_s": {"median": statistics.median(rates), "min": min(rates), "max": max(rates)},
    }


def _write_all(
    targets: Sequence[TargetSession], works: Sequence[_Work], wanted: Sequence[str], memory: NDArray[np.uint8]
) -> float:
    """Write to every target, one after the other; return the seconds of all writes."""
    return sum(target.write(memory, work.runs, want) for target, work, want in zip(targets, works, wanted, strict=True))


def runs_of(program: CopyProgram, context: RankCard, generation: RankCard, pages: int, *, merged: bool) -> RunPair:
    """Return the runs of `pages` pages in slots 1, 2, ... of every group, as offsets into the storages end to end.

    Args:
        program: from one card to the other.
        context, generation: whose pools.
        pages: blocks of the request.
        merged: as long as the program has them; else cut where a buffer of a layer ends.
    """
    sides: tuple[list[Runs], list[Runs]] = [], []
    for lane in program.lanes:
        pair = program.pairs[lane.pair]
        step = lane.run_bytes if merged else min(lane.run_bytes, _buffer_bytes(context, pair.src_group))
        for runs, card, group, ours in zip(
            sides, (context, generation), (pair.src_group, pair.dst_group), (True, False), strict=True
        ):
            runs.append(_lane_runs(lane, card, group, pages, step, ours=ours))
    return RunPair(source=np.concatenate(sides[0]), target=np.concatenate(sides[1]))


def _lane_runs(lane: Lane, card: RankCard, group: int, pages: int, step: int, *, ours: bool) -> Runs:
    pool = next(
        p for p in card.pools if (p.group_id, p.pool_index) == (group, lane.src_pool if ours else lane.dst_pool)
    )
    rows = (lane.outer.src_stride, lane.inner.src_stride) if ours else (lane.outer.dst_stride, lane.inner.dst_stride)
    base = _storage_starts(card)[pool.storage] + pool.offset_bytes + (lane.src_offset if ours else lane.dst_offset)
    axes = (
        base + np.arange(1, pages + 1) * pool.slot_stride_bytes,
        np.arange(lane.outer.count) * rows[0],
        np.arange(lane.inner.count) * rows[1],
        np.arange(0, lane.run_bytes, step),
    )
    starts = axes[0]
    for axis in axes[1:]:
        starts = np.add.outer(starts, axis).ravel()
    runs = np.zeros((starts.size, 3), np.uint64)
    runs[:, 0], runs[:, 1] = starts, np.tile(np.minimum(step, lane.run_bytes - axes[3]), starts.size // axes[3].size)
    return runs


def _buffer_bytes(card: RankCard, group: int) -> int:
    """Return the bytes of one role of one layer in a page of `group`."""
    view = next(view for view in card.views if view.group_id == group)
    return len(view.heads) * view.tokens_per_block * view.row_bytes


def _storage_starts(card: RankCard) -> list[int]:
    sizes = [storage.size_bytes for storage in card.storages]
    return [sum(sizes[:number]) for number in range(len(sizes))]


def _memory_bytes(card: RankCard) -> int:
    return sum(storage.size_bytes for storage in card.storages)


def _expected(memory: NDArray[np.uint8], runs: RunPair, size_bytes: int) -> NDArray[np.uint8]:
    """Return the target's memory after a write, copied run by run."""
    expected = np.full(size_bytes, POISON, np.uint8)
    pairs = zip(runs.source.astype(np.int64).tolist(), runs.target[:, 0].astype(np.int64).tolist(), strict=True)
    for (start, size, _), to in pairs:
        expected[to : to + size] = memory[start : start + size]
    return expected


class TargetSession:
    """The other process, and our agent's way to it."""

    def __init__(self, session: NixlSession, process: subprocess.Popen[str]) -> None:
        self._session, self._process = session, process
        hello = self._hear()
        self._agent, self._address = session.meet(bytes.fromhex(hello["agent"])), int(hello["address"])

    def write(self, memory: NDArray[np.uint8], runs: RunPair, wanted: str) -> float:
        """Poison, write all runs, verify; return the seconds of the write.

        Raises:
            LinkBrokenError: the bytes are not those that were sent.
        """
        self._ask("poison")
        started_s = time.perf_counter()
        source, target = runs.source.copy(), runs.target.copy()
        source[:, 0] += np.uint64(address_of(memory))
        target[:, 0] += np.uint64(self._address)
        write = self._session.write_runs(self._agent, source, target)
        while not write.done():
            pass
        taken_s = time.perf_counter() - started_s
        if self._ask("digest")["digest"] != wanted:
            raise LinkBrokenError("NIXL did not bring the bytes that were sent")
        return taken_s

    def _ask(self, word: str) -> dict[str, Any]:
        assert self._process.stdin is not None
        self._process.stdin.write(word + "\n")
        self._process.stdin.flush()
        return self._hear()

    def _hear(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if line.startswith("{"):  # what libraries print is not meant for us
                answer: dict[str, Any] = json.loads(line)
                return answer
        raise LinkBrokenError(f"the process that NIXL writes to ended with {self._process.wait()}")


@contextmanager
def _target(session: NixlSession, size_bytes: int, *, threaded: bool) -> Iterator[TargetSession]:
    words = [sys.executable, "-m", "workers.rival_target", str(size_bytes), str(int(threaded))]
    with subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        try:
            yield TargetSession(session, process)
        finally:
            assert process.stdin is not None
            process.stdin.close()
            process.wait()
