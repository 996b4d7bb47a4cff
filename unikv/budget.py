"""How large the pools of a cache are: the one setting that turns memory into pages."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from unikv.errors import SpecError, explain
from unikv.ids import GroupId
from unikv.layout import CacheLayout
from unikv.sizing import max_slots_for_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolBudget:
    """How large the pools are: pages or bytes, exactly one of them.

    Attributes:
        pages: slots of every pool group, the null slot included.
        bytes: bytes of all pools together.
        weights: only with `bytes`: pages of each layer group in proportion to the others', None for equal parts.

    Raises:
        SpecError: both or neither are given, one is not positive, or weights come without bytes.
    """

    pages: int | None = None
    bytes: int | None = None
    weights: Mapping[GroupId, int] | None = None

    def __post_init__(self) -> None:
        if (self.pages is None) == (self.bytes is None):
            got = f"pages={self.pages} and bytes={self.bytes}"
            raise SpecError(explain("pool", "budget", got, "either pages or bytes", "give exactly one of them"))
        for name in ("pages", "bytes"):
            value = getattr(self, name)
            if value is not None and (not isinstance(value, int) or value < 1):
                raise SpecError(explain("pool", name, value, "an integer >= 1", f"give the pool some {name}"))
        if self.weights is not None and self.bytes is None:
            cure = "leave them out: every pool group gets the given pages"
            raise SpecError(explain("pool", "weights", dict(self.weights), "None beside pages", cure))

    def slots(self, layout: CacheLayout) -> tuple[int, ...]:
        """Return the slots of each pool group of `layout`, null slots included.

        Raises:
            SpecError: the bytes are too few for a page beside the null slot, or a weight is wrong.
        """
        if self.pages is not None:
            return (self.pages,) * layout.num_pool_groups
        assert self.bytes is not None  # checked on construction
        return tuple(
            max_slots_for_bytes(layout, pool_group, self.bytes, weights=self.weights)
            for pool_group in range(layout.num_pool_groups)
        )
