"""What two rank cards lead to, worked out once for all pairs of ranks that are alike: report, program, shared parts.

Verdict and program follow from what a card says of the cache and of the place it is in, not from which process says it.
A fleet has few kinds of ranks and many pairs, so a rank that meets its thousandth peer has met its like before.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Final

from transfer.gate import check
from transfer.gate_report import DraftKV, GateReport
from transfer.hello import RankCard, StorageCard
from transfer.plan import CopyProgram, Lane, compile_program, scatter_lanes

KINDS: Final = 1024
"""Pairs of kinds of ranks, and kinds, that are remembered; the least recently used one goes first."""


def judge(context: RankCard, generation: RankCard) -> GateReport:
    """Return what `transfer.check` says of two cards. Never raises."""
    return _judge(_kind(context), _kind(generation))


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """What two ranks move, and how. Equal pairs of ranks share one.

    Attributes:
        lanes: the program's lanes by group pair.
        scatter: lanes out of a packed chunk into the generation rank's pages, by group pair.
    """

    program: CopyProgram
    lanes: tuple[tuple[Lane, ...], ...]
    scatter: tuple[tuple[Lane, ...], ...]


def plan_of(context: RankCard, generation: RankCard, report: GateReport) -> Plan:
    """Return the plan of two ranks whose gate said `report`.

    Raises:
        SpecError: as `compile_program`.
    """
    return _compile(_kind(context), _kind(generation), report.draft_kv is not DraftKV.OFF)


def shared(card: RankCard) -> RankCard:
    """Return `card` with the large parts in common with other cards of its kind: for keeping many of them."""
    like = _first(_kind(card))
    return replace(card, groups=like.groups, pools=like.pools, views=like.views)


def _kind(card: RankCard) -> RankCard:
    """Return a card without what tells one process from another of its kind."""
    host = None if card.host is None else replace(card.host, pid=0)
    storages = tuple(map(_storage_kind, card.storages))
    return replace(card, incarnation="", instance="", address="", host=host, storages=storages)


def _storage_kind(storage: StorageCard) -> StorageCard:
    export = storage.export
    return (
        storage
        if export is None
        else replace(storage, export=replace(export, pid=0, fd=0, inode=0, handle=b"", offset_bytes=0))
    )


@lru_cache(KINDS)
def _first(kind: RankCard) -> RankCard:
    return kind


@lru_cache(KINDS)
def _judge(context: RankCard, generation: RankCard) -> GateReport:
    return check(context, generation)


@lru_cache(KINDS)
def _compile(context: RankCard, generation: RankCard, with_draft: bool) -> Plan:
    program = compile_program(context, generation, with_draft=with_draft)
    numbers = range(len(program.pairs))
    return Plan(
        program=program,
        lanes=tuple(tuple(lane for lane in program.lanes if lane.pair == number) for number in numbers),
        scatter=tuple(scatter_lanes(program, number) for number in numbers),
    )
