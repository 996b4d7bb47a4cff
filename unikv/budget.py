"""How large the pools of a cache are: the one setting that turns memory into pages."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from unikv.errors import SpecError, explain
from unikv.ids import GroupId
from unikv.layout import CacheLayout
from unikv.sizing_pages import Batch
from unikv.sizing_split import split_layout
from unikv.sizing_weights import max_slots_for_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolSplit:
    """How pools of several pool groups share bytes, by what requests will hold. See `unikv.sizing_split.split_layout`.

    Attributes:
        ratios: part of the bytes per layer group, summing to 1.0.
        typical: the load to be good at, where there are no ratios.
        constraints: batches that must fit, each on its own.
        headroom_tokens: most tokens the capacity of a request is ahead of its history.
        granularity_bytes: every pool takes a whole multiple of this.
    """

    ratios: Sequence[float] | None = None
    typical: Batch | None = None
    constraints: Sequence[Batch] = ()
    headroom_tokens: int = 1
    granularity_bytes: int = 1

    def slots(self, layout: CacheLayout, quota_bytes: int) -> tuple[int, ...]:
        """Return the slots of each pool group of `layout`, null slots included.

        Raises:
            SpecError: wrong ratios, or too few bytes for what must fit.
        """
        return split_layout(
            layout,
            quota_bytes,
            ratios=self.ratios,
            typical=self.typical,
            constraints=self.constraints,
            headroom_tokens=self.headroom_tokens,
            granularity_bytes=self.granularity_bytes,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolBudget:
    """How large the pools are: pages or bytes, exactly one of them.

    With bytes alone every layer group gets equally many pages, so that whatever fits into one fits into all, a prompt
    prefilled in one go too; with windows that is more than they need, and `split` (or `weights`) says better.

    Attributes:
        pages: slots of every pool group, the null slot included.
        bytes: bytes of all pools together, null slots included.
        weights: only with `bytes`: pages of each layer group in proportion to the others', None for equal parts.
        split: only with `bytes`, instead of `weights`: share them by what requests will hold.

    Raises:
        SpecError: both or neither are given, one is not positive, weights or a split come without bytes, or both do.
    """

    pages: int | None = None
    bytes: int | None = None
    weights: Mapping[GroupId, int] | None = None
    split: PoolSplit | None = None

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
        if self.split is not None and (self.bytes is None or self.weights is not None):
            beside = "pages" if self.bytes is None else "weights"
            raise SpecError(explain("pool", "split", self.split, f"None beside {beside}", "give one of them"))

    def slots(self, layout: CacheLayout) -> tuple[int, ...]:
        """Return the slots of each pool group of `layout`, null slots included.

        Raises:
            SpecError: the bytes are too few for a page beside the null slot, or a weight or ratio is wrong.
        """
        if self.pages is not None:
            return (self.pages,) * layout.num_pool_groups
        assert self.bytes is not None  # checked on construction
        if self.split is not None:
            return self.split.slots(layout, self.bytes)
        return tuple(
            max_slots_for_bytes(layout, pool_group, self.bytes, weights=self.weights)
            for pool_group in range(layout.num_pool_groups)
        )
