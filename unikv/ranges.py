"""Half-open ranges and the arithmetic of heads, stages, blocks and windows.

=================  ===========================================  =======================================
range              meaning                                      rule
=================  ===========================================  =======================================
heads              global KV heads of a tensor-parallel rank    ``[r*h/tp, (r+1)*h/tp)`` or one replica
layers             layers of a pipeline stage                   even split, earlier stages take the rest
stale              block ordinals that left the window          ``[sinks, (h+1-W)//tpb)``
live               block ordinals a later step may read         sinks, then ``[(h+1-W)//tpb, ceil(c/tpb))``
=================  ===========================================  =======================================
"""

from __future__ import annotations

from dataclasses import dataclass

from unikv.errors import SpecError, explain


@dataclass(frozen=True, slots=True, order=True)
class Span:
    """A half-open range ``[lo, hi)`` of integers; empty when ``lo == hi``."""

    lo: int
    hi: int

    def __post_init__(self) -> None:
        if self.lo < 0 or self.hi < self.lo:
            raise SpecError(explain("span", "[lo, hi)", (self.lo, self.hi), "0 <= lo <= hi", "pass an ordered range"))

    def __len__(self) -> int:
        return self.hi - self.lo

    def __contains__(self, value: int) -> bool:
        return self.lo <= value < self.hi

    def intersect(self, other: Span) -> Span:
        """Return the common part (an empty span where there is none)."""
        lo = max(self.lo, other.lo)
        return Span(lo, max(lo, min(self.hi, other.hi)))


def ceil_div(numerator: int, denominator: int) -> int:
    """Return ``numerator / denominator`` rounded up, for non-negative numerators."""
    return -(-numerator // denominator)


@dataclass(frozen=True, slots=True)
class HeadShard:
    """The KV heads one tensor-parallel rank holds, and which copy of them it is.

    Attributes:
        heads: global half-open head range.
        replica: this rank's number among the ranks that hold exactly these heads.
        replicas: how many ranks hold them.
    """

    heads: Span
    replica: int
    replicas: int


def head_shard(total_heads: int, tp: int, tp_rank: int, *, thing: str = "layer") -> HeadShard:
    """Return the heads of rank `tp_rank` of `tp`: a slice where ``tp <= heads``, else a replica of head ``r*h//tp``.

    Raises:
        SpecError: heads and tp do not divide one another, or the rank is not one of them; `thing` opens the message.
    """
    _check_rank(thing, "tp_rank", tp_rank, tp)
    if total_heads < 1:
        raise SpecError(explain(thing, "kv_heads", total_heads, "an integer >= 1", "give the model's head count"))
    if tp <= total_heads:
        if total_heads % tp:
            raise SpecError(
                explain(thing, "kv_heads", total_heads, f"a multiple of tp={tp}", "choose a tp that divides the heads")
            )
        local = total_heads // tp
        return HeadShard(Span(tp_rank * local, (tp_rank + 1) * local), 0, 1)
    if tp % total_heads:
        raise SpecError(
            explain(thing, "kv_heads", total_heads, f"a divisor of tp={tp}", "choose a tp that is a multiple of it")
        )
    replicas = tp // total_heads
    head = tp_rank // replicas
    return HeadShard(Span(head, head + 1), tp_rank % replicas, replicas)


def _check_rank(thing: str, name: str, rank: int, size: int) -> None:
    if not 0 <= rank < size:
        raise SpecError(explain(thing, name, rank, f"in [0, {size})", "pass the rank inside its instance"))


def stage_layers(num_layers: int, pp: int, pp_rank: int) -> Span:
    """Return the layers of pipeline stage `pp_rank`: as even as possible, earlier stages take the remainder.

    Raises:
        SpecError: there is no such stage.
    """
    _check_rank("pipeline", "pp_rank", pp_rank, pp)
    share, rest = divmod(num_layers, pp)
    lo = pp_rank * share + min(pp_rank, rest)
    return Span(lo, lo + share + (1 if pp_rank < rest else 0))


def effective_window(window: int | None, max_seq_len: int | None, *, lookahead_tokens: int = 0) -> int | None:
    """Return the window in tokens, or None (full attention) where it can never cut anything off.

    Used for grouping and for sizing alike, so that a window as long as the longest sequence is no window in both.

    Args:
        window: tokens a query sees, its own included; None for full attention.
        max_seq_len: longest sequence in tokens, None where unknown: then every window stays.
        lookahead_tokens: tokens a reader may step back after a prefix match; the window grows by as many.
    """
    if window is None:
        return None
    grown = window + lookahead_tokens
    return None if max_seq_len is not None and grown >= max_seq_len else grown


def stale_blocks(history_tokens: int, window: int | None, sink_blocks: int, tokens_per_block: int) -> Span:
    """Return the block ordinals that left the window once `history_tokens` tokens are final.

    The token at position ``h`` is processed next and attends to ``[h+1-W, h]``, hence the ``+1``.
    """
    beg = min(ceil_div(history_tokens, tokens_per_block), sink_blocks)
    if window is None:
        return Span(beg, beg)
    end = max(beg, (history_tokens + 1 - window) // tokens_per_block)
    return Span(beg, end)


def max_live_blocks(window: int, headroom_tokens: int, tokens_per_block: int) -> int:
    """Return the most blocks (without sinks) a windowed group ever holds while ``capacity <= history + headroom``.

    Exact: ``W + H - 1`` consecutive positions touch at most ``(W + H - 1 + 2*tpb - 2) // tpb`` blocks.
    """
    return (window + headroom_tokens - 1 + 2 * tokens_per_block - 2) // tokens_per_block
