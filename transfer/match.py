"""Which buffers of two ranks meet, with which heads, and which of several replicas serves them.

Election among the ``Rc`` context ranks that hold the same heads, for a generation rank that is replica ``g`` of ``Rg``
(``d`` its rank under attention data parallelism, else 0)::

    serving replica = (g * Rc // Rg + d) % Rc

======================  ====  ====  =========================================
context -> generation    Rc    Rg   served by replica
======================  ====  ====  =========================================
more context replicas    4     2    0 and 2: spread evenly
more generation ranks    2     4    0, 0, 1, 1: in blocks, not in turn
attention DP, rank d     2     1    d % 2: the load rotates over the replicas
======================  ====  ====  =========================================
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import pairwise

from transfer.hello import RankCard
from unikv.errors import SpecError, explain
from unikv.ids import LayerId
from unikv.layer_spec import LayerOwner
from unikv.ranges import Span
from unikv.views import KVView, ViewEntry

BufferKey = tuple[LayerId, str]
"""What buffers meet by: global layer id and role, never a position or a count."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Buffer:
    """One buffer of one rank with the geometry of its view."""

    view: KVView
    entry: ViewEntry


@dataclass(frozen=True, slots=True, kw_only=True)
class Cut:
    """Global `heads` of one buffer that pass from the context rank to the generation rank."""

    src: Buffer
    dst: Buffer
    heads: Span


@dataclass(frozen=True, slots=True, kw_only=True)
class OrdinalShare:
    """Block ordinals ``start, start + step, ...``: what two ranks have in common under context parallelism."""

    start: int = 0
    step: int = 1


def find_cuts(context: RankCard, generation: RankCard, *, with_draft: bool) -> Iterator[Cut]:
    """Yield the cut of every buffer that `context` must send to `generation`, in the order of the generation's views.

    Raises:
        SpecError: the cards contradict each other or themselves.
    """
    held = buffers_of(context)
    check_disjoint(generation)
    for key, dst in buffers_of(generation).items():
        src = held.get(key)
        if src is None or (dst.view.owner is LayerOwner.DRAFT and not with_draft):
            continue
        check_alike(key, src.view, dst.view)
        heads = src.view.heads.intersect(dst.view.heads)
        if len(heads) and src.view.replica == serving_replica(src.view, dst.view, generation):
            yield Cut(src=src, dst=dst, heads=heads)


def buffers_of(card: RankCard) -> Mapping[BufferKey, Buffer]:
    """Return every buffer of a rank by layer and role, in the order of its views.

    Raises:
        SpecError: a layer and role twice, or a view whose blocks differ from the card's.
    """
    found: dict[BufferKey, Buffer] = {}
    for view in card.views:
        if view.tokens_per_block != card.tokens_per_block:
            want = f"{card.tokens_per_block}, as the rank's card says"
            cure = "give all views of a rank one block size"
            raise SpecError(explain(rank_name(card), "tokens_per_block of a view", view.tokens_per_block, want, cure))
        for entry in view.entries:
            key = (entry.layer_id, entry.role)
            if key in found:
                field = f"layer {entry.layer_id} {entry.role}"
                raise SpecError(explain(rank_name(card), field, "described twice", "one buffer", "correct its views"))
            found[key] = Buffer(view=view, entry=entry)
    return found


def check_alike(key: BufferKey, src: KVView, dst: KVView) -> None:
    """Refuse two descriptions of one layer and role that cannot be copied into one another.

    Raises:
        SpecError: owner, global heads, head_dim, dtype or bytes of a row differ; the text gives both values.
    """
    for field in ("owner", "total_heads", "head_dim", "dtype", "row_bytes"):
        ours, theirs = getattr(src, field), getattr(dst, field)
        if ours != theirs:
            want = f"{theirs}, as on the generation rank"
            raise SpecError(
                explain(f"layer {key[0]} {key[1]}", field, ours, want, "give both sides one layer geometry")
            )


def serving_replica(src: KVView, dst: KVView, generation: RankCard) -> int:
    """Return the number of the context replica that serves this generation rank (rule and examples above)."""
    data_rank = generation.position.tp_rank if generation.position.attention_dp else 0
    return (dst.replica * src.replicas // dst.replicas + data_rank) % src.replicas


def check_disjoint(card: RankCard) -> None:
    """Refuse a rank whose buffers overlap inside a slot: one of two transfers would overwrite the other.

    Raises:
        SpecError: two buffers of one pool share a byte.
    """
    pools: dict[tuple[int, int], list[tuple[int, int, BufferKey]]] = {}
    for view in card.views:
        spans = pools.setdefault((view.group_id, view.pool_index), [])
        for entry in view.entries:
            lo = entry.offset_bytes
            spans.append((lo, lo + view.buffer_bytes, (entry.layer_id, entry.role)))
    for pool, spans in pools.items():
        for (_, end, first), (start, _, second) in pairwise(sorted(spans)):
            if start < end:
                thing = f"{rank_name(card)} group {pool[0]} pool {pool[1]}"
                field = f"first byte of layer {second[0]} {second[1]}"
                want = f">= {end}, behind layer {first[0]} {first[1]}"
                raise SpecError(explain(thing, field, start, want, "correct the offsets of its views"))


def common_ordinals(context: RankCard, generation: RankCard) -> OrdinalShare | None:
    """Return the block ordinals both ranks own, or None where there are none.

    Context parallelism deals the blocks out in turn: rank ``r`` of ``cp`` owns the ordinals ``o`` with ``o % cp == r``.

    Raises:
        SpecError: context parallelism together with unequal block sizes.
    """
    src, dst = context.position, generation.position
    if src.cp == dst.cp == 1:
        return OrdinalShare()
    if context.tokens_per_block != generation.tokens_per_block:
        want = f"{generation.tokens_per_block} under context parallelism, as on the generation rank"
        cure = "give both sides one block size"
        raise SpecError(explain(rank_name(context), "tokens_per_block", context.tokens_per_block, want, cure))
    step = math.lcm(src.cp, dst.cp)
    for start in range(step):
        if start % src.cp == src.cp_rank and start % dst.cp == dst.cp_rank:
            return OrdinalShare(start=start, step=step)
    return None


def rank_name(card: RankCard) -> str:
    """Return how error texts name a rank."""
    return f"{card.side} rank {card.rank}"
