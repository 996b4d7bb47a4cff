"""The laws of slots and cached pages, checked one by one with their terms printed."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

from unikv.cached_page import CachedPage
from unikv.errors import InternalError, explain
from unikv.ids import NO_PAGE
from unikv.slots import SlotAllocator


def check_slots_referred(
    allocators: Sequence[SlotAllocator],
    cached: Mapping[tuple[int, int], CachedPage],
    referred: Mapping[tuple[int, int], int],
) -> None:
    """Check that every slot has as many references as there are things that name it.

    Args:
        allocators: device slots, one per pool group.
        cached: cached pages by (pool group, slot).
        referred: references of requests and pins to (pool group, slot).

    Raises:
        InternalError: it has not, or slots are not conserved.
    """
    for pool_group, allocator in enumerate(allocators):
        allocator.check_integrity()
        for slot in range(allocator.num_slots):
            want = referred.get((pool_group, slot), 0) + ((pool_group, slot) in cached)
            got = allocator.references(slot)
            if got != want:
                thing = f"{allocator.name}, slot {slot}"
                wanted = f"{want}, the page tables, pins and cached pages that name it"
                raise InternalError(explain(thing, "references", got, wanted, "report this"))


def check_page(page: CachedPage, laws: Mapping[str, tuple[object, object]]) -> None:
    """Check laws of one page, each a pair of what is and what should be.

    Raises:
        InternalError: one is broken.
    """
    for field, (got, want) in laws.items():
        if got != want:
            thing = f"page of group {page.group_id}, ordinal {page.ordinal}, slot {page.slot}, host slot {page.cold}"
            raise InternalError(explain(thing, field, got, str(want), "report this"))


def check_cold_slots(pool_group: int, cold: SlotAllocator, pages: Collection[CachedPage]) -> None:
    """Check that the host slots in use are those of the pages that are on the host.

    Raises:
        InternalError: they are not.
    """
    cold.check_integrity()
    there = sum(page.pool_group == pool_group and page.cold != NO_PAGE for page in pages)
    if there != cold.num_used:
        raise InternalError(f"host pool {pool_group}: {cold.num_used} slots used, {there} pages there")
