"""How many token positions beyond the history a speculative step needs. The one place that knows.

One generation step with K drafts, the drafter hosted in the target's cache::

    history h         h+1+a           (a of K drafts were accepted)
    | verified: K+1 positions |
                      | drafter's block: block_width positions |
    <------------- generation headroom = extra + K + 1 ------->
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from unikv.errors import SpecError, explain
from unikv.ranges import ceil_div

TABLE_ROW_MULTIPLE: Final = 4
"""Block-table rows are a multiple of this many int32 entries long, so that every row starts 16-byte aligned."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SpeculationShape:
    """What the speculative mode reserves.

    Attributes:
        max_draft_tokens: drafts verified per generation step, K.
        block_width: positions a drafter hosted in the target's cache writes after the context. A standalone draft
            model and a block drafter with shifted labels write K, one whose block includes the last token K + 1.
        num_extra_kv_tokens: positions the speculative mode itself reserves (K - 1 for chained one-model drafting).

    Raises:
        SpecError: a field is negative.
    """

    max_draft_tokens: int
    block_width: int
    num_extra_kv_tokens: int

    def __post_init__(self) -> None:
        for name in self.__slots__:
            value = getattr(self, name)
            if not isinstance(value, int) or value < 0:
                raise SpecError(explain("speculation", name, value, "an integer >= 0 tokens", "correct the shape"))

    @property
    def tokens_per_generation_step(self) -> int:
        """Tokens the target verifies per step: the last accepted one and the drafts."""
        return self.max_draft_tokens + 1

    def extra_tokens(self, hosts_draft: bool) -> int:
        """Return the positions every allocation adds beyond the tokens it is asked for.

        A drafter whose KV lives in the request's own pages writes a whole block after the context. A reserve below
        its width would leave the last position without a page whenever the context ends near a block boundary.

        Args:
            hosts_draft: whether the cache holds draft layers.
        """
        return max(self.num_extra_kv_tokens, self.block_width) if hosts_draft else self.num_extra_kv_tokens

    def generation_headroom(self, hosts_draft: bool) -> int:
        """Return how many tokens the capacity leads the history by during a generation step.

        Args:
            hosts_draft: whether the cache holds draft layers.
        """
        return self.extra_tokens(hosts_draft) + self.tokens_per_generation_step


NO_SPECULATION: Final = SpeculationShape(max_draft_tokens=0, block_width=0, num_extra_kv_tokens=0)
"""One token per step and nothing beyond it."""


def max_blocks_per_sequence(max_seq_len: int, headroom_tokens: int, tokens_per_block: int) -> int:
    """Return the length of a block-table row that fits the longest sequence in the middle of a generation step.

    Args:
        max_seq_len: longest sequence in tokens.
        headroom_tokens: lead of the capacity over the history, see `SpeculationShape.generation_headroom`.
        tokens_per_block: token positions per block.
    """
    blocks = ceil_div(max_seq_len + headroom_tokens, tokens_per_block)
    return ceil_div(blocks, TABLE_ROW_MULTIPLE) * TABLE_ROW_MULTIPLE
