"""Context parallelism on the generation side: one sequence's blocks are dealt to several ranks, block by block.

::

    cp_size 3      block ordinal   0  1  2 | 3  4  5 | 6
    rank 0         local index     0       | 1       | 2
    rank 1                            0    |    1    |
    rank 2                               0 |       1 |

Token positions stay global everywhere; what a rank keeps, drops and attends to is computed on the blocks it has. A
block has `tokens_per_block` tokens whoever holds it; `ledger_tokens_per_block` is what all ranks together get.
"""

from __future__ import annotations

from dataclasses import dataclass

from unikv.errors import SpecError, explain
from unikv.ranges import Span, ceil_div, stale_blocks


@dataclass(frozen=True, slots=True, kw_only=True)
class CpLedger:
    """Which blocks of every sequence one rank has. With one rank it has them all, and local is global.

    Attributes:
        cp_size: ranks that share each sequence.
        cp_rank: this one.
        tokens_per_block: tokens of a physical block.

    Raises:
        SpecError: a size below 1, or no such rank.
    """

    cp_size: int = 1
    cp_rank: int = 0
    tokens_per_block: int

    def __post_init__(self) -> None:
        for name in ("cp_size", "tokens_per_block"):
            if getattr(self, name) < 1:
                raise SpecError(explain("context parallelism", name, getattr(self, name), ">= 1", "pass a size"))
        if not 0 <= self.cp_rank < self.cp_size:
            want = f"in [0, {self.cp_size})"
            raise SpecError(explain("context parallelism", "cp_rank", self.cp_rank, want, "pass the rank's own number"))

    @property
    def ledger_tokens_per_block(self) -> int:
        """Tokens after which every rank has one more block."""
        return self.tokens_per_block * self.cp_size

    def num_blocks(self, capacity_tokens: int) -> int:
        """Return how many blocks of a sequence with `capacity_tokens` positions this rank has."""
        return self._below(ceil_div(capacity_tokens, self.tokens_per_block))

    def ordinal(self, local: int) -> int:
        """Return the ordinal of this rank's block number `local`."""
        return local * self.cp_size + self.cp_rank

    def local(self, ordinal: int) -> int | None:
        """Return this rank's number of a block, None where another rank has it."""
        return ordinal // self.cp_size if ordinal % self.cp_size == self.cp_rank else None

    def stale(self, history_tokens: int, window: int | None, sink_blocks: int) -> Span:
        """Return the local blocks that left the window; `sink_blocks` are the sequence's, the first ones."""
        stale = stale_blocks(history_tokens, window, sink_blocks, self.tokens_per_block)
        return Span(self._below(stale.lo), self._below(stale.hi))

    def num_tokens(self, tokens: int) -> int:
        """Return how many of the first `tokens` positions of a sequence lie in this rank's blocks."""
        whole = self._below(tokens // self.tokens_per_block) * self.tokens_per_block
        rest = tokens % self.tokens_per_block
        return whole + (rest if self.local(tokens // self.tokens_per_block) is not None else 0)

    def retained(self, history_tokens: int, window: int | None, sink_blocks: int) -> tuple[Span, ...]:
        """Return the global token ranges of a final history that this rank keeps, ascending, one per run of blocks."""
        stale, found = self.stale(history_tokens, window, sink_blocks), list[Span]()
        for local in range(self.num_blocks(history_tokens)):
            if local not in stale:
                start = self.ordinal(local) * self.tokens_per_block
                found.append(Span(start, min(start + self.tokens_per_block, history_tokens)))
        return _joined(found)

    def _below(self, ordinals: int) -> int:
        """Return how many of the first `ordinals` blocks this rank has."""
        return max(0, ceil_div(ordinals - self.cp_rank, self.cp_size)) if ordinals > self.cp_rank else 0


def _joined(spans: list[Span]) -> tuple[Span, ...]:
    joined: list[Span] = []
    for span in spans:
        if joined and joined[-1].hi == span.lo:
            joined[-1] = Span(joined[-1].lo, span.hi)
        else:
            joined.append(span)
    return tuple(joined)
