"""Pools out of scattered buffers: which of them share slots of one stride, and where in an allocation slots begin.

Two layers side by side in every slot, K and V apart; a pool reaches from one slot's first byte to the next one's::

    allocation  | slot 0: L0.key L1.key | slot 1: L0.key L1.key | ... | slot 0: L0.value L1.value | ...
    pools         0 from here, two buffers                              1 from here, two buffers
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import combinations, pairwise

from transfer.own_cut import OwnBuffer
from unikv.errors import SpecError, explain
from unikv.ids import GroupId
from unikv.ranges import Span


@dataclass(frozen=True, slots=True, kw_only=True)
class OwnPool:
    """Buffers of one layer group that step by one stride: slot ``s`` is at ``address + s * stride``.

    Attributes:
        allocation: the memory it lies in, as addresses.
    """

    address: int
    stride: int
    num_slots: int
    allocation: Span
    buffers: tuple[OwnBuffer, ...]

    @property
    def end(self) -> int:
        """Address behind its last slot."""
        return self.address + self.num_slots * self.stride


def merge_allocations(spans: Iterable[Span]) -> tuple[Span, ...]:
    """Return what `spans` cover, overlapping ones joined: several tensors may look into one piece of memory."""
    merged: list[Span] = []
    for span in sorted(spans):
        if merged and span.lo < merged[-1].hi:
            merged[-1] = Span(merged[-1].lo, max(merged[-1].hi, span.hi))
        else:
            merged.append(span)
    return tuple(merged)


def arrange(buffers: Sequence[OwnBuffer], allocations: Sequence[Span]) -> tuple[OwnPool, ...]:
    """Return the pools of one layer group, in the order of their addresses.

    Raises:
        SpecError: buffers with different slot counts, a last slot that leaves its allocation, or pools that interleave
            and are no slots of one stride.
    """
    for buffer in buffers:
        if buffer.num_slots != buffers[0].num_slots:
            want = f"{buffers[0].num_slots}, as {buffers[0].thing} of the same layer group has"
            cure = "layers of one group share page tables: give them equally many slots"
            raise SpecError(explain(buffer.thing, "number of slots", buffer.num_slots, want, cure))
    homes = {id(b): next(span for span in allocations if b.address in span) for b in buffers}
    ordered = sorted(buffers, key=lambda b: (homes[id(b)].lo, b.slot_stride, b.address))
    clusters: list[list[OwnBuffer]] = []
    for buffer in ordered:
        first = clusters[-1][0] if clusters else None
        alike = first is not None and (homes[id(first)], first.slot_stride) == (homes[id(buffer)], buffer.slot_stride)
        if alike and buffer.address + buffer.size_bytes <= clusters[-1][0].address + buffer.slot_stride:
            clusters[-1].append(buffer)
        else:
            clusters.append([buffer])
    pools = sorted((_pool(members, homes[id(members[0])]) for members in clusters), key=lambda pool: pool.address)
    for before, after in pairwise(pools):
        if after.address < before.end:
            thing, other = after.buffers[0].thing, before.buffers[0].thing
            want = f">= {before.end}, behind the last slot of {other}, or inside its slots"
            cure = "their slots interleave at different places; pass tensors that begin at one slot"
            raise SpecError(explain(thing, "address", after.address, want, cure))
    return tuple(pools)


def check_apart(groups: Sequence[tuple[GroupId, OwnBuffer]], *, groups_share_slots: bool) -> None:
    """Refuse buffers that share a byte.

    Args:
        groups: every buffer with its layer group.
        groups_share_slots: one allocator deals the slots of all groups, so that layers of different groups may lie in
            the same slots.

    Raises:
        SpecError: two buffers overlap; the text names both.
    """
    for (group, one), (other_group, two) in combinations(sorted(groups, key=lambda item: item[1].address), 2):
        if two.address >= one.end or not _share_bytes(one, two):
            continue
        if groups_share_slots and group != other_group and _same_slots(one, two):
            continue
        want = f"memory apart from {one.thing} [{one.address}, {one.end})"
        cure = "give every layer and role memory of its own"
        if group != other_group and groups_share_slots:
            cure = "layer groups that share slots must step alike, and slots must begin at the same addresses"
        elif group != other_group:
            cure += ", or set groups_share_slots where one allocator deals the slots of both layer groups"
        raise SpecError(explain(two.thing, "addresses", f"[{two.address}, {two.end})", want, cure))


def _share_bytes(one: OwnBuffer, two: OwnBuffer) -> bool:
    """Return whether two buffers whose ranges overlap share a byte; unequal strides count as sharing."""
    if one.slot_stride != two.slot_stride:
        return True
    shift = (two.address - one.address) % one.slot_stride
    return shift < one.size_bytes or one.slot_stride - shift < two.size_bytes


def _same_slots(one: OwnBuffer, two: OwnBuffer) -> bool:
    span = max(one.address + one.size_bytes, two.address + two.size_bytes) - min(one.address, two.address)
    return one.slot_stride == two.slot_stride and span <= one.slot_stride


def _pool(members: Sequence[OwnBuffer], home: Span) -> OwnPool:
    """Place the slots of `members`: on the allocation's own grid where that fits, else from the first buffer on."""
    first, stride, count = members[0], members[0].slot_stride, members[0].num_slots
    extent = max(buffer.address + buffer.size_bytes for buffer in members) - first.address
    on_grid = first.address - (first.address - home.lo) % stride
    for address in (on_grid, first.address, home.hi - count * stride):
        lo, hi = first.address + extent - stride, first.address
        if home.lo <= address and lo <= address <= hi and address + count * stride <= home.hi:
            return OwnPool(address=address, stride=stride, num_slots=count, allocation=home, buffers=tuple(members))
    want = f"<= {home.hi}, the end of its memory"
    cure = "pass a tensor of whole slots, or a RawTensor with the allocation it is a part of"
    raise SpecError(explain(first.thing, "end of the last slot", first.address + count * stride, want, cure))
