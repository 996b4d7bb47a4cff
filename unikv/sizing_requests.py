"""What one request costs in bytes, in the units a scheduler admits by."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Self

from unikv.errors import SpecError, explain
from unikv.layer_spec import KVCacheLayerSpec
from unikv.ranges import ceil_div
from unikv.sizing_layers import LayerCosts

CONTEXT = "context"
GENERATION = "generation"
REQUEST_STATES = (CONTEXT, GENERATION)
"""A request in prefill, and one behind it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestCost:
    """Bytes of single requests.

    Attributes:
        layers: what the layers cost.
        fixed_bytes: what the windows of one request hold at most during generation.
        extra_tokens: positions every allocation in prefill adds beyond the prompt.
        share_window_scratch: whether equal windowed layers share their scratch in prefill.
    """

    layers: LayerCosts
    fixed_bytes: int
    extra_tokens: int = 0
    share_window_scratch: bool = False

    @classmethod
    def from_specs(
        cls,
        specs: Iterable[KVCacheLayerSpec],
        *,
        tokens_per_block: int,
        max_seq_len: int | None,
        generation_headroom_tokens: int = 1,
        extra_tokens: int = 0,
        share_window_scratch: bool = False,
    ) -> Self:
        """Add up the layers of `specs`; arguments as in `unikv.sizing.CacheCost.from_specs`."""
        layers = LayerCosts.from_specs(specs, tokens_per_block=tokens_per_block, max_seq_len=max_seq_len)
        return cls(
            layers=layers,
            fixed_bytes=layers.fixed_bytes(generation_headroom_tokens),
            extra_tokens=extra_tokens,
            share_window_scratch=share_window_scratch,
        )

    @property
    def bytes_per_token(self) -> int:
        """Bytes of one token in all layers."""
        return self.layers.context_bytes_per_token(share_window_scratch=False)

    def bytes(self, state: str, prompt_tokens: int, new_tokens: int = 0) -> int:
        """Return the bytes of one request.

        In prefill every layer keeps every token; where layers share scratch, the first of a kind pays for it and the
        others for the pages in their window. Behind it the layers without a window keep all tokens, the others theirs.

        Args:
            state: "context" or "generation".
            prompt_tokens: length of the prompt.
            new_tokens: tokens generated so far; none in prefill.

        Raises:
            SpecError: another state, or a number below 0.
        """
        for name, value in (("prompt_tokens", prompt_tokens), ("new_tokens", new_tokens)):
            if value < 0:
                raise SpecError(explain("request", name, value, ">= 0", "pass a count"))
        if state == CONTEXT:
            return self._context_bytes(prompt_tokens + self.extra_tokens)
        if state == GENERATION:
            return (prompt_tokens + new_tokens) * self.layers.full_bytes_per_token + self.fixed_bytes
        want = f"one of {', '.join(REQUEST_STATES)}"
        raise SpecError(explain("request", "state", state, want, "cost requests that hold pages only"))

    def _context_bytes(self, positions: int) -> int:
        shared_bytes = self.layers.context_bytes_per_token(share_window_scratch=self.share_window_scratch)
        if not self.share_window_scratch:
            return positions * shared_bytes
        page = self.layers.tokens_per_block
        held_bytes = sum(
            min(ceil_div(positions, page), layer.sink_blocks + ceil_div(layer.window, page))
            * page
            * layer.bytes_per_token
            for layer in self.layers.windowed
            if layer.repeats
        )
        return positions * shared_bytes + held_bytes
