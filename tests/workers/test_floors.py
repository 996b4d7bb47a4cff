"""Floors: what one thread copies, measured while nothing else of ours runs; and the runs a rival is given."""

from __future__ import annotations

import subprocess
import sys
from itertools import pairwise

import numpy as np
import pytest

from transfer.copier import CopyJob
from transfer.copy_host import HostCopier
from transfer.hello import RankCard, Side
from transfer.nixl_agent import why_no_nixl
from transfer.pages import PagePairs
from transfer.paths import lanes_by_pair
from transfer.peer_memory import local_regions
from transfer.plan import compile_program
from workers.config import PairConfig
from workers.config_load import load_pair
from workers.floors import FloorSession, wait_until_idle
from workers.rival_nixl import RunPair, compare_with_nixl, runs_of
from workers.topology import dry_cards

SMALL = (
    "workload.prompt_tokens=[256, 256]",
    "context.pool.pages=10",
    "generation.pool.pages=10",
    "model.max_seq_len=256",
    "model.layers.0.count=3",
)
CASES = ["hnd-tp1-tp2", "nhd-tp1-tp2", "nhd-hnd"]


def small(case: str | None = None) -> PairConfig:
    return load_pair("host-slices" if case else "host-direct", overrides=SMALL, case=case, environ={})


def test_a_floor_is_a_rate() -> None:
    floor = FloorSession(1 << 20)
    rates = [floor.sample() for _ in range(3)]
    assert all(0.001 < rate < 10_000 for rate in rates)


def test_idle_processes_are_not_waited_for() -> None:
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        wait_until_idle([process.pid])
        assert process.poll() is None and process.stdin is not None
        process.stdin.close()
        process.wait()
        wait_until_idle([process.pid])  # gone: nothing to wait for
        assert process.returncode is not None


def ends(pair: PairConfig) -> tuple[RankCard, RankCard]:
    return dry_cards(pair, Side.CONTEXT)[0], dry_cards(pair, Side.GENERATION)[-1]


def memories(card: RankCard, value: int | None) -> np.ndarray:
    size = sum(storage.size_bytes for storage in card.storages)
    return (
        np.random.default_rng(1).integers(0, 256, size, np.uint8) if value is None else np.full(size, value, np.uint8)
    )


def storages(card: RankCard, memory: np.ndarray) -> list[np.ndarray]:
    bounds = np.cumsum([0, *(storage.size_bytes for storage in card.storages)])
    return [memory[lo:hi] for lo, hi in pairwise(bounds)]


def copied_by_runs(runs: RunPair, source: np.ndarray, target: np.ndarray) -> np.ndarray:
    for (start, size, _), (to, other, _) in zip(runs.source.astype(int), runs.target.astype(int), strict=True):
        assert size == other
        target[to : to + size] = source[start : start + size]
    return target


@pytest.mark.parametrize("merged", [True, False])
@pytest.mark.parametrize("case", [None, *CASES])
def test_the_rival_moves_the_bytes_that_we_move(case: str | None, merged: bool) -> None:
    context, generation = ends(small(case))
    program = compile_program(context, generation, with_draft=True)
    source, target = memories(context, None), memories(generation, 0xEE)
    theirs = copied_by_runs(runs_of(program, context, generation, 8, merged=merged), source, target.copy())
    ours, lanes = target.copy(), lanes_by_pair(program)
    regions = local_regions(context, storages(context, source)), local_regions(generation, storages(generation, ours))
    slots, zeros = np.arange(1, 9, dtype=np.int32), np.zeros(8, np.int32)
    pages = PagePairs(src_slot=slots, src_sub=zeros, dst_slot=slots, dst_sub=zeros)
    copier = HostCopier()
    for number, pair in enumerate(program.pairs):
        maps = regions[0][pair.src_group], regions[1][pair.dst_group]
        copier.submit(CopyJob(lanes=lanes[number], source=maps[0], destination=maps[1], pages=pages))
    assert (ours == theirs).all() and (ours != target).any()


def test_runs_are_cut_where_a_buffer_of_a_layer_ends() -> None:
    context, generation = ends(small())
    program = compile_program(context, generation, with_draft=True)
    merged, cut = (runs_of(program, context, generation, 8, merged=merged).source[:, 1] for merged in (True, False))
    assert sorted(set(cut.tolist())) == [4 * 32 * 128, 8 * 32 * 256]  # draft: 4 heads of 64 bf16; target: 8 of 128
    assert (len(merged), len(cut)) == (8 * 2, 8 * (3 * 2 + 4 * 2)) and merged.sum() == cut.sum()


@pytest.mark.skipif(bool(why_no_nixl()), reason=why_no_nixl())
def test_nixl_alone_is_measured_and_verified() -> None:
    found = compare_with_nixl(small("hnd-tp1-tp2"), 10.0)
    assert found["absent"] == "" and len(found["settings"]) == 2  # no run is longer than a buffer: nothing to merge
    assert found["gb_per_s"]["median"] > 0 and found["ratio"] == 10.0 / found["gb_per_s"]["median"]


def test_a_missing_rival_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("transfer.nixl_agent._MODULES", ("no_such_nixl",))
    assert "no_such_nixl" in compare_with_nixl(small(), 10.0)["absent"]
