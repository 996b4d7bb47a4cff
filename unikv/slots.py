"""Who owns which slot: one allocator per pool group, with counted references.

One pool group of N slots, at any time::

    slot   0      1 ... N-1
           null   free (recycled, or never used) | used (1 reference per page table, pin or cached page that names it)

    free + used + null == N
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from unikv.errors import CapacityError, InternalError, SpecError, explain
from unikv.ids import NULL_SLOT, GroupId, SlotId


class SlotAllocator:
    """Hands out the slots of one pool group and counts who refers to them.

    Order: the slot that has been free for the longest time comes first, recycled before never used. From there the
    allocator walks upwards as long as the next slot is free too, and starts again at the oldest free slot when the
    run ends. So a request that gives its pages back in order leaves a run, which the next request gets as a run: copies
    merge neighbouring slots. And a slot just given back is reused last.
    """

    # The recycled slots are a dict for its order (oldest first) and its quick look-up by slot. Its values are where a
    # "usable only after this event" will be kept once pages are released while a device still reads them.

    def __init__(
        self, num_slots: int, *, name: str = "pool group 0", on_change: Callable[[int], None] = lambda _: None
    ) -> None:
        """Start with every slot free.

        Args:
            num_slots: slots that exist, the null slot included.
            name: what messages call this allocator.
            on_change: called with every kept slot that its keeper alone refers to from now on, or no longer alone.

        Raises:
            SpecError: fewer than two slots (the null slot alone serves nobody).
        """
        if num_slots < 2:
            cure = "give the pool at least 2 pages: slot 0 stays the null page"
            raise SpecError(explain(name, "num_slots", num_slots, ">= 2", cure))
        self.num_slots = num_slots
        self.name = name
        self._recycled: dict[int, None] = {}
        self._next_fresh = NULL_SLOT + 1
        self._references: dict[int, int] = {}
        self._kept: set[int] = set()
        self._on_change = on_change

    @property
    def num_free(self) -> int:
        """Slots that can be handed out now; ``num_slots - 1`` when nothing is used."""
        return len(self._recycled) + self.num_slots - self._next_fresh

    @property
    def num_used(self) -> int:
        """Slots with at least one reference."""
        return len(self._references)

    def references(self, slot: int) -> int:
        """Return how many references `slot` has; 0 for a free slot and for the null slot."""
        return self._references.get(slot, 0)

    def allocate(self, count: int) -> tuple[SlotId, ...]:
        """Return `count` free slots, each with one reference.

        Raises:
            CapacityError: fewer slots are free; nothing was taken.
        """
        if count > self.num_free:
            raise shortage(self, self.name, count, count, self.num_free)
        taken: list[SlotId] = []
        for _ in range(count):
            taken.append(self._take_next(taken[-1] if taken else None))
        self._references.update(dict.fromkeys(taken, 1))
        return tuple(taken)

    def retain(self, slots: Iterable[int]) -> None:
        """Add one reference to every slot in `slots`.

        Raises:
            InternalError: a slot is not in use; nothing was retained.
        """
        wanted = Counter(slots)
        self._check_references(wanted, dict.fromkeys(wanted, 1), "retained")
        for slot, times in wanted.items():
            before = self._references[slot]
            self._references[slot] = before + times
            if before == 1 and slot in self._kept:
                self._on_change(slot)

    def keep(self, slot: int) -> None:
        """Add the keeper's reference to `slot`: the cache's, which has at most one.

        Raises:
            InternalError: the slot is free, or kept already.
        """
        if slot in self._kept:
            cure = "one cached page has one slot"
            raise InternalError(explain(f"{self.name}, slot {slot}", "keepers", 1, "none before it is kept", cure))
        self.retain((slot,))
        self._kept.add(slot)

    def unkeep(self, slot: int) -> None:
        """Take the keeper's reference from `slot`; it is free where it was the last."""
        self._kept.remove(slot)
        self.release((slot,))

    def release(self, slots: Iterable[int]) -> None:
        """Take one reference from every slot in `slots`; a slot without references is free again.

        Raises:
            InternalError: a slot has fewer references than it is released times; nothing was released.
        """
        dropped = Counter(slots)
        self._check_references(dropped, dropped, "released")
        for slot, times in dropped.items():
            left = self._references[slot] - times
            if left:
                self._references[slot] = left
                if left == 1 and slot in self._kept:
                    self._on_change(slot)
            else:
                del self._references[slot]
                self._recycled[slot] = None

    def reclaim(self, slots: Iterable[int]) -> None:
        """Undo a `release` since which nothing was handed out: add a reference to every slot, free ones included."""
        for slot in slots:
            if slot in self._recycled:
                del self._recycled[slot]
                self._references[slot] = 1
            else:
                self.retain((slot,))

    def freed_by(self, slots: Iterable[int]) -> int:
        """Return how many slots `release(slots)` would make free."""
        return sum(self.references(slot) == times for slot, times in Counter(slots).items())

    def check_integrity(self) -> None:
        """Check the conservation law and that no slot is in two places.

        Raises:
            InternalError: a law is broken; the text prints the terms.
        """
        terms = f"free {self.num_free} + used {self.num_used} + null 1 == {self.num_slots}"
        if self.num_free + self.num_used + 1 != self.num_slots:
            raise InternalError(f"{self.name}: slots are not conserved: {terms}")
        both = self._recycled.keys() & self._references.keys()
        out_of_range = [s for s in (*self._recycled, *self._references) if not NULL_SLOT < s < self._next_fresh]
        if both or out_of_range or min(self._references.values(), default=1) < 1:
            raise InternalError(f"{self.name}: slots {sorted(both)} free and used, {out_of_range} unknown ({terms})")

    def _take_next(self, previous: SlotId | None) -> SlotId:
        slot = next(iter(self._recycled), self._next_fresh)
        if previous is not None and self._is_free(previous + 1):
            slot = previous + 1
        if slot == self._next_fresh:
            self._next_fresh += 1
        else:
            del self._recycled[slot]
        return SlotId(slot)

    def _is_free(self, slot: int) -> bool:
        return slot in self._recycled or self._next_fresh <= slot < self.num_slots

    def _check_references(self, slots: Iterable[int], least: Mapping[int, int], verb: str) -> None:
        for slot in slots:
            if self.references(slot) < least[slot]:
                got = f"{self.references(slot)} reference(s)"
                want = f"at least {least[slot]} before it is {verb}"
                cure = "each page is given back exactly once by whoever holds it"
                raise InternalError(explain(f"{self.name}, slot {slot}", "references", got, want, cure))


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupChange:
    """What one layer group gives back and wants in one step.

    Attributes:
        group_id: the layer group, for messages.
        pool_group: number of the allocator that serves it.
        dropped: slots it gives back.
        kept_pages: slots it has and keeps.
        needed_pages: slots it wants on top.
    """

    group_id: GroupId
    pool_group: int
    kept_pages: int
    dropped: tuple[int, ...]
    needed_pages: int


def check_slots(slots: Sequence[int]) -> None:
    """Check slot counts, one per pool group.

    Raises:
        SpecError: fewer than two slots: the null slot alone serves nobody.
    """
    for pool_group, count in enumerate(slots):
        if count < 2:
            cure = "give the pool at least 2 pages: slot 0 stays the null page"
            raise SpecError(explain(f"pool group {pool_group}", "num_slots", count, ">= 2", cure))


def shortage(allocator: SlotAllocator, thing: str, total: int, needed: int, free: int) -> CapacityError:
    """Return the error for a step of `thing` that needs more pages than it can get.

    Args:
        allocator: whose pages they are.
        thing: whose step it is.
        total: pages it would have in the end; more than exist can never fit.
        needed: pages it lacks.
        free: pages it could get.
    """
    exist = allocator.num_slots - 1
    if total > exist:
        text = f"{thing}: needs {total} of {exist} pages of {allocator.name}, so it can never fit; "
        text += "enlarge the pool or shorten the request"
    else:
        text = f"{thing}: needs {needed} pages of {allocator.name}, where {free} of {exist} are free; "
        text += "wait for pages or free some"
    return CapacityError(text, needed_pages=needed, free_pages=free, permanent=total > exist)
