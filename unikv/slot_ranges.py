"""Neighbouring buffers as ranges of bytes: what copies that take whole runs, not heads, are planned from."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from unikv.errors import SpecError, explain
from unikv.ids import GroupId, LayerId
from unikv.layout import CacheLayout


@dataclass(frozen=True, slots=True, kw_only=True)
class SlotRange:
    """Neighbouring buffers of one pool as one range of bytes: slot s holds it at ``offset_bytes + s * stride_bytes``.

    Attributes:
        offset_bytes: first byte inside slot 0, counted from the base of the pool.
        size_bytes: bytes in every slot.
        stride_bytes: bytes from slot to slot.
    """

    group_id: GroupId
    pool_index: int
    offset_bytes: int
    size_bytes: int
    stride_bytes: int


def aggregated_ranges(
    layout: CacheLayout, group_id: GroupId, buffers: Iterable[tuple[LayerId, str]] | None = None
) -> tuple[SlotRange, ...]:
    """Merge buffers of one layer group that touch inside a slot into the fewest ranges.

    Args:
        layout: the rank's layout.
        group_id: the layer group.
        buffers: (layer, role) names, None for all buffers of the group.

    Returns:
        Ranges ordered by pool and offset.

    Raises:
        UnknownLayerError: there is no such group or layer.
        SpecError: a role its layer does not store, or a layer of another group.
    """
    pools = layout.group(group_id).pools
    named = None if buffers is None else {(layer_id, role) for layer_id, role in buffers}
    for layer_id, role in named or ():
        if (found := layout.buffer(layer_id, role).group_id) != group_id:
            cure = "ask group by group: page ids are scoped to their group"
            raise SpecError(explain(f"layer {layer_id}", "group", found, f"group {group_id}", cure))
    ranges: list[SlotRange] = []
    for pool in pools:
        wanted = [buffer for buffer in pool.buffers if named is None or (buffer.layer_id, buffer.role) in named]
        ranges += [
            SlotRange(
                group_id=group_id,
                pool_index=pool.index,
                offset_bytes=lo * pool.buffer_bytes,
                size_bytes=(hi - lo) * pool.buffer_bytes,
                stride_bytes=pool.slot_bytes,
            )
            for lo, hi in _runs([buffer.layer_offset for buffer in wanted])
        ]
    return tuple(ranges)


def _runs(ordinals: list[int]) -> list[tuple[int, int]]:
    """Return the half-open runs of consecutive numbers in an ascending list."""
    runs: list[tuple[int, int]] = []
    for ordinal in ordinals:
        if runs and runs[-1][1] == ordinal:
            runs[-1] = (runs[-1][0], ordinal + 1)
        else:
            runs.append((ordinal, ordinal + 1))
    return runs
