"""Copies inside the pools: whole pages for requests that continue somebody's block, and single tokens for tree drafts.

Every copy is one gather and one scatter per pool, however many pages or layers it has, on the device's current stream.
All sources are read before any target is written.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from unikv.buffers import PoolStorage, Tensor
from unikv.errors import SpecError, explain
from unikv.ids import GroupId
from unikv.layer_spec import KVLayout
from unikv.layout import CacheLayout, GroupLayout, PoolLayout
from unikv.page_moves import PageMove, TokenMove


class PageCopier:
    """Copies pages and tokens of one manager's pools. Borrows their memory."""

    def __init__(self, layout: CacheLayout, pools: PoolStorage) -> None:
        """Look into `pools`, whose layout is `layout`."""
        self._layout, self._pools = layout, pools

    def copy(self, moves: Mapping[GroupId, Sequence[PageMove]]) -> None:
        """Copy whole slots, in all pools of their groups."""
        for group_id, pages in moves.items():
            if pages:
                for pool in self._layout.group(group_id).pools:
                    slots = self._slots(pool)
                    sources, targets = self._indexes(zip(*((move.source, move.target) for move in pages), strict=True))
                    slots.index_copy_(0, targets, slots.index_select(0, sources))

    def relocate(self, group_id: GroupId, moves: Sequence[TokenMove]) -> None:
        """Copy the KV of single tokens, in all layers of a group: accepted drafts go behind the history.

        The layout must have passed `check_relocatable`.
        """
        if not moves:
            return
        group = self._layout.group(group_id)
        for pool in group.pools:
            tokens = self._tokens(group, pool)
            from_slot, from_offset, to_slot, to_offset = self._indexes(zip(*moves, strict=True))
            tokens[to_slot, to_offset] = tokens[from_slot, from_offset]

    def _slots(self, pool: PoolLayout) -> Tensor:
        """Return a pool as bytes, ``[slots, slot_bytes]``."""
        return self._pools.storages[self._pools.storage_of(pool.group_id, pool.index)].view(-1, pool.slot_bytes)

    def _tokens(self, group: GroupLayout, pool: PoolLayout) -> Tensor:
        """Return a pool as rows, ``[slots, tokens_per_block, buffers, heads, row_bytes]`` bytes."""
        heads = self._layout.spec(group.layer_ids[0]).num_kv_heads
        tpb = self._layout.tokens_per_block
        if self._layout.kv_layout is KVLayout.HND:
            return (
                self._slots(pool)
                .view(-1, pool.scale, heads, tpb, pool.buffer_bytes // (heads * tpb))
                .permute(0, 3, 1, 2, 4)
            )
        return self._slots(pool).view(-1, pool.scale, tpb, heads, pool.buffer_bytes // (heads * tpb)).transpose(1, 2)

    def _indexes(self, columns: object) -> list[Tensor]:
        return [torch.tensor(column, device=self._pools.device) for column in columns]  # type: ignore[attr-defined]


def check_relocatable(layout: CacheLayout) -> None:
    """Check that accepted draft tokens can be moved in every layer at once.

    That takes one window, one head count, one head size and one dtype, K and V in every layer, and no extra buffers.

    Raises:
        SpecError: a layer differs; the text names it, the field and the layer it differs from.
    """
    first = layout.specs[0]
    for spec in layout.specs:
        for field in ("window", "num_kv_heads", "head_dim", "dtype"):
            got, want = getattr(spec, field), getattr(first, field)
            if got != want:
                text = f"{want} as in layer {first.layer_id}, so that draft tokens can be moved in all layers at once"
                cure = "use chains of drafts, or a separate cache for the drafter"
                raise SpecError(explain(f"layer {spec.layer_id}", field, got, text, cure))
        if spec.kv_factor != 2 or spec.extra_buffers:
            field = "kv_factor" if spec.kv_factor != 2 else "extra_buffers"
            got = spec.kv_factor if spec.kv_factor != 2 else sorted(spec.extra_buffers)
            want = "K and V and nothing else, so that draft tokens can be moved"
            raise SpecError(explain(f"layer {spec.layer_id}", field, got, want, "use chains of drafts"))
