"""How prefixes are reused: what an engine decides once, when it builds the manager."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from unikv.errors import SpecError, explain
from unikv.prefix_match import ReuseStatus


@dataclass(frozen=True, slots=True, kw_only=True)
class ReuseOptions:
    """How prefixes are reused.

    Attributes:
        partial_blocks: whether the last block of a match may be used in part, at the price of one page copy.
        backoff_tokens: how many prompt tokens ahead a hosted drafter reads; as many matched ones are computed again,
            and windows keep as many tokens more.
        max_utilisation: share of a pool group's pages in use above which no request is resumed beside running ones, in
            (0, 1]. Pages of suspended requests are in use where no host tier can take them. Where no request runs, the
            next one is resumed whatever is in use: else all of them could wait for one another.

    Raises:
        SpecError: a value is out of its range.
    """

    partial_blocks: bool = True
    backoff_tokens: int = 0
    max_utilisation: float = 1.0

    def __post_init__(self) -> None:
        if not 0.0 < self.max_utilisation <= 1.0:
            want, cure = "in (0, 1]", "0.97 leaves room for the requests that run"
            raise SpecError(explain("prefix reuse", "max_utilisation", self.max_utilisation, want, cure))
        if self.backoff_tokens < 0:
            raise SpecError(explain("prefix reuse", "backoff_tokens", self.backoff_tokens, ">= 0", "pass a count"))


DEFAULT_REUSE: Final = ReuseOptions()
"""Partial blocks, no back-off, no watermark."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefixProbe:
    """What a request would take over.

    ``num_tokens <= divergence_tokens <= lookup_tokens``

    Attributes:
        num_tokens: tokens that need not be computed again.
        divergence_tokens: how far the prompt is the same as one computed before.
        lookup_tokens: tokens that were looked up.
        status: what each layer group could take over, by group id.
    """

    num_tokens: int
    divergence_tokens: int
    lookup_tokens: int
    status: tuple[ReuseStatus, ...]
