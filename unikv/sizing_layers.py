"""What each layer of a cache costs, before any load is known: the walk over the specs all other sizing starts from."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Self

from unikv.errors import SpecError, explain
from unikv.layer_spec import KVCacheLayerSpec, check_layer_specs
from unikv.pool_layout import bytes_per_token
from unikv.ranges import ceil_div, effective_window, max_live_blocks


@dataclass(frozen=True, slots=True, kw_only=True)
class WindowedLayer:
    """A layer that forgets.

    Attributes:
        window: normalised window in tokens.
        sink_blocks: blocks at the start that never leave it.
        bytes_per_token: of all roles of the layer.
        repeats: an earlier layer has the same window, sinks, policy, owner and size, so that in prefill both may write
            blocks behind the window to one scratch place.
    """

    window: int
    sink_blocks: int
    bytes_per_token: int
    repeats: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerCosts:
    """The layers of a rank as a scheduler sees them.

    Attributes:
        tokens_per_block: token positions of one page.
        full_bytes_per_token: of all layers without a window together.
        draft_bytes_per_token: of all draft layers together, windowed or not.
        windowed: the other layers, one by one: each is rounded to pages on its own.
    """

    tokens_per_block: int
    full_bytes_per_token: int
    draft_bytes_per_token: int
    windowed: tuple[WindowedLayer, ...]

    @classmethod
    def from_specs(
        cls,
        specs: Iterable[KVCacheLayerSpec],
        *,
        tokens_per_block: int,
        max_seq_len: int | None,
        lookahead_tokens: int = 0,
    ) -> Self:
        """Sort the layers of `specs`.

        Args:
            specs: the layers to pay for: all of a rank, or the draft layers alone.
            tokens_per_block: token positions of one page.
            max_seq_len: longest sequence in tokens; windows that reach it count as full attention. None: unknown.
            lookahead_tokens: see `unikv.ranges.effective_window`.

        Raises:
            SpecError: no specs, or no page size.
        """
        if tokens_per_block < 1:
            raise SpecError(
                explain("cache cost", "tokens_per_block", tokens_per_block, ">= 1", "give pages some tokens")
            )
        full_bytes = draft_bytes = 0
        windowed: list[WindowedLayer] = []
        seen: set[object] = set()
        for spec in check_layer_specs(specs):
            size_bytes = bytes_per_token(spec)
            draft_bytes += size_bytes if spec.is_draft else 0
            window = effective_window(spec.window, max_seq_len, lookahead_tokens=lookahead_tokens)
            if window is None:
                full_bytes += size_bytes
                continue
            sinks = ceil_div(spec.sink_tokens, tokens_per_block)
            # The owner is part of the kind: a drafter's scratch lives at other times than the target's.
            kind = (window, sinks, spec.reuse_policy, spec.owner, size_bytes)
            windowed.append(
                WindowedLayer(window=window, sink_blocks=sinks, bytes_per_token=size_bytes, repeats=kind in seen)
            )
            seen.add(kind)
        return cls(
            tokens_per_block=tokens_per_block,
            full_bytes_per_token=full_bytes,
            draft_bytes_per_token=draft_bytes,
            windowed=tuple(windowed),
        )

    def context_bytes_per_token(self, *, share_window_scratch: bool) -> int:
        """Return the bytes of one token in prefill, where windowed layers hold it too."""
        shared = (layer.bytes_per_token for layer in self.windowed if not (share_window_scratch and layer.repeats))
        return self.full_bytes_per_token + sum(shared)

    def fixed_bytes(self, headroom_tokens: int) -> int:
        """Return what the windowed layers of one request hold at most, in whole pages, sinks included.

        Args:
            headroom_tokens: most tokens the capacity of a request is ahead of its history.

        Raises:
            SpecError: no headroom; the token being generated is always ahead.
        """
        if headroom_tokens < 1:
            cure = "count at least the token being generated"
            raise SpecError(explain("cache cost", "headroom_tokens", headroom_tokens, ">= 1", cure))
        return sum(
            (layer.sink_blocks + max_live_blocks(layer.window, headroom_tokens, self.tokens_per_block))
            * self.tokens_per_block
            * layer.bytes_per_token
            for layer in self.windowed
        )
