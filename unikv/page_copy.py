"""Copies of pages from slot to slot inside the pools."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from unikv.buffers import PoolStorage
from unikv.ids import GroupId
from unikv.layout import CacheLayout


@dataclass(frozen=True, slots=True)
class PageMove:
    """One page: where it is and where it goes, as slots of its pool group (or of the host tier)."""

    source: int
    target: int


class PageCopier:
    """Stand-in."""

    def __init__(self, layout: CacheLayout, pools: PoolStorage) -> None:
        self.layout, self.pools = layout, pools

    def copy(self, moves: Mapping[GroupId, Sequence[PageMove]]) -> None:
        for group_id, copies in moves.items():
            group = self.layout.group(group_id)
            for i, pool in enumerate(group.pools):
                storage = self.pools.storages[self.pools.storage_of(group_id, i)].view(-1, pool.slot_bytes)
                for move in copies:
                    storage[move.target] = storage[move.source]
