"""What sequences cost in bytes, and how many fit: one affine rule and its exact inverse.

Of T tokens in all requests together, the first N (one iteration's worth) are in prefill and keep every layer; the rest
keep what never leaves a window. Each of B resident requests pays for its windows once:

=============  ====================================================================  =========
bytes          per                                                                   name
=============  ====================================================================  =========
C              token in prefill: every layer                                         context
G              token behind it: the layers without a window                          generation
R              request: windows, in whole pages, layer by layer, and attention sinks  fixed
=============  ====================================================================  =========

::

    quota(T) = min(T, N) * C + max(0, T - N) * G + B * R

A quota counts what requests hold. The null slot each pool group keeps back (slot 0) is not in it: whoever turns bytes
of memory into a quota takes `unikv.sizing_fit.null_bytes` off first, whoever makes pools for a quota adds them.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Self

from unikv.errors import SpecError, explain
from unikv.layer_spec import KVCacheLayerSpec
from unikv.sizing_layers import LayerCosts


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheCost:
    """Bytes a cache needs for its tokens, as three numbers and the load they are meant for.

    Attributes:
        context_bytes_per_token: C, cost of a token in prefill.
        generation_bytes_per_token: G, cost of every token behind the first `max_num_tokens`.
        fixed_bytes_per_request: R, what the windowed layers of one request hold at most.
        max_requests: B, requests resident at the same time.
        max_num_tokens: N, tokens one iteration may process.
    """

    context_bytes_per_token: int
    generation_bytes_per_token: int
    fixed_bytes_per_request: int
    max_requests: int
    max_num_tokens: int

    def __post_init__(self) -> None:
        for name in self.__slots__:
            value = getattr(self, name)
            if not isinstance(value, int) or value < 0:
                raise SpecError(explain("cache cost", name, value, "an integer >= 0", "pass a count"))

    @classmethod
    def from_specs(  # noqa: PLR0913 - a load has as many numbers
        cls,
        specs: Iterable[KVCacheLayerSpec],
        *,
        tokens_per_block: int,
        max_seq_len: int | None,
        generation_headroom_tokens: int,
        max_requests: int,
        max_num_tokens: int,
        lookahead_tokens: int = 0,
        share_window_scratch: bool = False,
        draft_scratch_tokens: int = 0,
    ) -> Self:
        """Add up the layers of `specs`.

        Args:
            specs: the layers to pay for: all of a rank, or the draft layers alone.
            tokens_per_block: token positions of one page.
            max_seq_len: longest sequence in tokens; windows that reach it count as full attention. None: unknown.
            generation_headroom_tokens: most tokens the capacity of a request is ahead of its history, at least 1.
            max_requests: requests resident at the same time.
            max_num_tokens: tokens one iteration may process.
            lookahead_tokens: see `unikv.ranges.effective_window`.
            share_window_scratch: count layers of equal window, sinks, policy, owner and size once in prefill, where
                they write blocks behind the window to one shared place.
            draft_scratch_tokens: positions a drafter of its own writes per request and never keeps, in its layers.

        Raises:
            SpecError: no specs, or a number out of range.
        """
        layers = LayerCosts.from_specs(
            specs, tokens_per_block=tokens_per_block, max_seq_len=max_seq_len, lookahead_tokens=lookahead_tokens
        )
        scratch_bytes = draft_scratch_tokens * layers.draft_bytes_per_token
        return cls(
            context_bytes_per_token=layers.context_bytes_per_token(share_window_scratch=share_window_scratch),
            generation_bytes_per_token=layers.full_bytes_per_token,
            fixed_bytes_per_request=layers.fixed_bytes(generation_headroom_tokens) + scratch_bytes,
            max_requests=max_requests,
            max_num_tokens=max_num_tokens,
        )

    @property
    def slope_bytes_per_token(self) -> int:
        """Slope of the straight line that holds from `max_num_tokens` on: G."""
        return self.generation_bytes_per_token

    @property
    def intercept_bytes(self) -> int:
        """Bytes at zero tokens of that line: ``B * R + (C - G) * N``."""
        prefill = (self.context_bytes_per_token - self.generation_bytes_per_token) * self.max_num_tokens
        return self.max_requests * self.fixed_bytes_per_request + prefill

    def quota_bytes(self, tokens: int) -> int:
        """Return the bytes that `tokens` tokens, over all requests, need.

        Raises:
            SpecError: fewer than no tokens.
        """
        if tokens < 0:
            raise SpecError(explain("cache cost", "tokens", tokens, ">= 0", "pass a count"))
        context = min(tokens, self.max_num_tokens)
        fixed_bytes = self.max_requests * self.fixed_bytes_per_request
        generation = (tokens - context) * self.generation_bytes_per_token
        return context * self.context_bytes_per_token + generation + fixed_bytes

    def tokens(self, quota_bytes: int) -> int | None:
        """Return the most tokens whose quota fits into `quota_bytes`, None where no number of tokens exceeds it.

        ``tokens(quota_bytes(t)) == t`` wherever a token costs anything. A cache of windowed layers alone has no cap
        once it has room for its windows and one iteration.
        """
        left_bytes = quota_bytes - self.max_requests * self.fixed_bytes_per_request
        if left_bytes < 0:
            return 0
        prefill_bytes = self.max_num_tokens * self.context_bytes_per_token
        if left_bytes < prefill_bytes:
            return left_bytes // self.context_bytes_per_token
        if self.generation_bytes_per_token == 0:
            return None
        return self.max_num_tokens + (left_bytes - prefill_bytes) // self.generation_bytes_per_token
