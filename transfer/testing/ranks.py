"""Small ranks with real cards and real, mappable memory: what tests of engines and of whole pairs are made of.

A rank has one target layer and one windowed draft layer of another shape, so that a mix-up of the two shows. Every
byte of a filled page follows from layer, role, head, token and position, so that one in a wrong place shows, too.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from transfer.cards import build_card
from transfer.copier import CopyJob, CopyTicket
from transfer.copy_host import HostCopier
from transfer.hello import (
    DraftKVMode,
    MemoryExport,
    ParallelPosition,
    PathKind,
    Side,
    SpeculativeCard,
    StorageCard,
)
from transfer.mapped_storage import MappedStorage
from transfer.pages import SlotArray, live_ordinals
from transfer.peer_memory import local_regions, own_host_identity
from unikv.cp_ledger import CpLedger
from unikv.ids import NO_PAGE, GroupId, LayerId
from unikv.layer_spec import KVCacheLayerSpec, KVDtype, KVLayout, LayerOwner, ReusePolicy
from unikv.layout import CacheLayout, build_layout
from unikv.ranges import head_shard

TOKENS_PER_BLOCK: Final = 4
DRAFT_WINDOW_TOKENS: Final = 24
TARGET_HEADS: Final = 2
SPECULATIVE: Final = SpeculativeCard(method="draft_model", max_draft_tokens=3, block_width=3, num_extra_kv_tokens=2)


def small_layout(position: ParallelPosition, target_heads: int = TARGET_HEADS) -> CacheLayout:
    """Return the layout of one rank: layer 0 is the target's, layer 1 the drafter's."""
    tp, tp_rank = (1, 0) if position.attention_dp else (position.tp, position.tp_rank)
    target, draft = (len(head_shard(heads, tp, tp_rank).heads) for heads in (target_heads, 1))
    specs = [
        KVCacheLayerSpec(
            layer_id=LayerId(0),
            owner=LayerOwner.TARGET,
            num_kv_heads=target,
            total_num_kv_heads=target_heads,
            head_dim=8,
            dtype=KVDtype.BFLOAT16,
        ),
        KVCacheLayerSpec(
            layer_id=LayerId(1),
            owner=LayerOwner.DRAFT,
            num_kv_heads=draft,
            total_num_kv_heads=1,
            head_dim=16,
            dtype=KVDtype.FLOAT32,
            window=DRAFT_WINDOW_TOKENS,
            reuse_policy=ReusePolicy.OPTIONAL,
        ),
    ]
    return build_layout(specs, tokens_per_block=TOKENS_PER_BLOCK, max_seq_len=4096, kv_layout=KVLayout.HND)


class SmallRank:
    """One rank: card, layout and memory. Close it after everything that uses the memory.

    Args:
        address: of the rank's link.
        num_slots: slots of every pool.
        target_heads: heads of the whole model in layer 0.
        card_fields: override what the card says.
    """

    def __init__(
        self,
        side: Side,
        address: str,
        *,
        path: PathKind = PathKind.DIRECT,
        position: ParallelPosition | None = None,
        num_slots: int = 64,
        target_heads: int = TARGET_HEADS,
        **card_fields: Any,
    ) -> None:
        position = position or ParallelPosition()
        self.layout = small_layout(position, target_heads)
        self._dealt = CpLedger(cp_size=position.cp, cp_rank=position.cp_rank, tokens_per_block=TOKENS_PER_BLOCK)
        self._fds: list[int] = []
        self.arrays: list[NDArray[np.uint8]] = []
        exports = [self._allocate(num_slots * pool.slot_bytes) for group in self.layout.groups for pool in group.pools]
        facts: dict[str, Any] = {
            "incarnation": os.urandom(8).hex(),
            "instance": f"{side}-0",
            "speculative": SPECULATIVE,
            "draft_kv": DraftKVMode.PER_VIEW,
            "num_target_layers": 1,
            "num_draft_layers": 1,
            "host": own_host_identity(),
        }
        self.card = build_card(
            self.layout,
            side=side,
            position=position,
            num_slots=num_slots,
            address=address,
            path=path,
            exports=exports,
            **(facts | card_fields),
        )
        self.regions = local_regions(self.card, self.arrays)

    def table(self, tokens: int, first_slot: int = 1) -> dict[GroupId, SlotArray]:
        """Return page tables of slots ``first_slot, first_slot + 1, ...`` for a prompt, for every group."""
        blocks = self._dealt.num_blocks(tokens)
        return {
            group.group_id: np.arange(first_slot, first_slot + blocks, dtype=np.int32) for group in self.layout.groups
        }

    def fill(self, table: dict[GroupId, SlotArray], tokens: int) -> None:
        """Write the pattern into every page of `table`."""
        for row, pattern in self._rows(table, tokens):
            row[:] = pattern

    def wrong_rows(self, table: dict[GroupId, SlotArray], tokens: int) -> int:
        """Return how many rows of live pages do not hold the pattern."""
        return sum(not np.array_equal(row, pattern) for row, pattern in self._rows(table, tokens, live_only=True))

    def touched(self) -> bool:
        """Return whether any byte of the memory is not zero."""
        return any(array.any() for array in self.arrays)

    def close(self) -> None:
        """Close the descriptors and let go of the memory, which goes with its last user."""
        self.regions.clear()
        self.arrays.clear()
        while self._fds:
            os.close(self._fds.pop())

    def _allocate(self, size_bytes: int) -> MemoryExport:
        fd = os.memfd_create("unikv-small-rank")
        self._fds.append(fd)
        os.ftruncate(fd, size_bytes)
        export = MemoryExport(kind="memfd", pid=os.getpid(), fd=fd, inode=os.fstat(fd).st_ino)
        self.arrays.append(MappedStorage(StorageCard(size_bytes=size_bytes, export=export)).array)
        return export

    def _rows(
        self, table: dict[GroupId, SlotArray], tokens: int, *, live_only: bool = False
    ) -> Iterator[tuple[NDArray[np.uint8], NDArray[np.uint8]]]:
        """Yield every row (one head of one token) with its pattern, straight from the views (HND)."""
        for view in self.card.views:
            pool, group = self.card.pool(view.group_id, view.pool_index), self.card.group(view.group_id)
            window = group.window if live_only else None
            live = live_ordinals(
                tokens, tokens_per_block=TOKENS_PER_BLOCK, window=window, sink_blocks=group.sink_blocks
            )
            for entry in view.entries:
                for token in range(tokens):
                    place = self._dealt.local(token // TOKENS_PER_BLOCK)
                    slot = NO_PAGE if place is None else int(table[view.group_id][place])
                    if slot == NO_PAGE or token // TOKENS_PER_BLOCK not in live:
                        continue
                    page = slot * pool.slot_stride_bytes + entry.offset_bytes
                    for index, head in enumerate(range(view.heads.lo, view.heads.hi)):
                        at = page + (index * TOKENS_PER_BLOCK + token % TOKENS_PER_BLOCK) * view.row_bytes
                        row = self.arrays[pool.storage][at : at + view.row_bytes]
                        yield row, _pattern(entry.layer_id, entry.role, head, token, view.row_bytes)


def _pattern(layer: int, role: str, head: int, token: int, size_bytes: int) -> NDArray[np.uint8]:
    first = layer * 41 + (7 if role == "value" else 0) + head * 13 + token * 5
    return ((first + 3 * np.arange(size_bytes)) % 251 + 1).astype(np.uint8)


class GatedCopier(HostCopier):
    """A host copier whose copies land at once until `passing` of them have; later ones land when the gate is open.

    Args:
        passing: copies that are over when submitted.
        on_gate: called when the first copy has to wait.
    """

    def __init__(self, passing: int, on_gate: Callable[[], None] = lambda: None) -> None:
        super().__init__()
        self.submitted = 0
        self.open = False
        self._passing, self._on_gate = passing, on_gate

    def submit(self, job: CopyJob) -> CopyTicket:
        """Copy `job` now, and say so later."""
        self.submitted += 1
        ticket = super().submit(job)
        if self.submitted <= self._passing:
            return ticket
        if self.submitted == self._passing + 1:
            self._on_gate()
        return _GateTicket(self)


class _GateTicket:
    def __init__(self, gate: GatedCopier) -> None:
        self._gate = gate

    def done(self) -> bool:
        return self._gate.open
