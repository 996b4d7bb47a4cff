"""Compile two rank cards into a copy program: who moves which heads of which buffers, as strided lanes.

A lane is one copy that repeats for every page. It has two row dimensions (outer, inner) with their own strides on each
side, so that head slices, HND <-> NHD and unequal page sizes are all the same loop::

    for page p in pairs:                                       # slots and sub-pages come from the two page tables
      for i in range(outer.count):
        for j in range(inner.count):
          copy run_bytes
            from  source base + src_slot[p] * src_stride + src_sub[p] * src_sub_stride
                              + src_offset + i * outer.src_stride + j * inner.src_stride
            to    destination base + (the same with dst)

Buffers meet by (global layer id, role), never by position or count. Their heads are global ranges that are
intersected, so every pair of tensor-parallel sizes works; where several context ranks hold the same heads, exactly one
of them serves a given generation rank.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from transfer.hello import RankCard
from transfer.lane_merge import merge_lanes
from transfer.lanes import (
    Lane,
    Placement,
    Rows,
    build_lane,
    check_reach,
    number_lanes,
    packed_destination,
    packed_source,
    place,
)
from transfer.match import Cut, OrdinalShare, common_ordinals, find_cuts, rank_name
from transfer.program import CopyProgram, GroupPair, Slice, digest_of
from unikv.errors import SpecError, explain
from unikv.ids import GroupId, Rank
from unikv.layer_spec import STANDARD_ROLES

__all__ = [
    "CopyProgram",
    "GroupPair",
    "Lane",
    "Rows",
    "Slice",
    "compile_program",
    "gather_lanes",
    "scatter_lanes",
    "writers_for",
]


def compile_program(context: RankCard, generation: RankCard, *, with_draft: bool) -> CopyProgram:
    """Return what `context` sends to `generation`.

    Args:
        context, generation: cards of one rank each. Under attention data parallelism the context rank is the one that
            holds the request.
        with_draft: the gate's verdict on draft KV; False leaves every layer the drafter owns out.

    Raises:
        SpecError: the cards contradict each other (the gate refuses such peers earlier) or themselves: different
            geometry for one layer and role, page sizes that do not divide, a buffer that leaves its slot, a pool that
            leaves its storage, destination buffers that overlap.
    """
    share = common_ordinals(context, generation)
    cuts = find_cuts(context, generation, with_draft=with_draft) if share else ()
    grouped = _in_bands(cuts, context.layer_bands)
    pairs: list[GroupPair] = []
    lanes: list[Lane] = []
    slices: list[Slice] = []
    for number, key in enumerate(sorted(grouped)):
        pair_slices, pair_lanes = _compile_cuts(number, grouped[key], _page_tokens(context, generation))
        page_bytes = sum(lane.page_bytes for lane in pair_lanes)
        pairs.append(_group_pair(context, generation, key[:2], page_bytes, share or OrdinalShare()))
        _check_lanes(pairs[-1], pair_lanes, context, generation)
        lanes += pair_lanes
        slices += pair_slices
    return CopyProgram(
        context_rank=context.rank,
        generation_rank=generation.rank,
        pairs=tuple(pairs),
        lanes=tuple(lanes),
        slices=tuple(slices),
        digest=digest_of(context.rank, generation.rank, [*pairs, *lanes, *slices]),
    )


def gather_lanes(program: CopyProgram, pair: int) -> tuple[Lane, ...]:
    """Return the lanes of group pair `pair` with packed pages of a staging chunk as their destination.

    A packed page takes `GroupPair.page_bytes`; its slot is its number inside the chunk, its pool index 0.
    """
    return tuple(packed_destination(lane) for lane in program.lanes if lane.pair == pair)


def scatter_lanes(program: CopyProgram, pair: int) -> tuple[Lane, ...]:
    """Return the lanes of group pair `pair` with packed pages as their source: what `gather_lanes` gathered."""
    return tuple(packed_source(lane) for lane in program.lanes if lane.pair == pair)


def writers_for(generation: RankCard, contexts: Iterable[RankCard], *, with_draft: bool) -> tuple[Rank, ...]:
    """Return the context ranks that have something to send to `generation`, in the order given.

    Under attention data parallelism on the context side pass only the card of the rank that holds the request.
    """
    programs = (compile_program(card, generation, with_draft=with_draft) for card in contexts)
    return tuple(program.context_rank for program in programs if program.lanes)


def _in_bands(cuts: Iterable[Cut], bands: int) -> dict[tuple[GroupId, GroupId, int], list[Cut]]:
    """Return cuts by the layer groups they join and the band of layers they lie in, each about as many layers."""
    grouped: dict[tuple[GroupId, GroupId], list[Cut]] = {}
    for cut in cuts:
        grouped.setdefault((cut.src.view.group_id, cut.dst.view.group_id), []).append(cut)
    banded: dict[tuple[GroupId, GroupId, int], list[Cut]] = {}
    for (src, dst), members in grouped.items():
        layers = sorted({cut.dst.entry.layer_id for cut in members})
        band_of = {layer: number * bands // len(layers) for number, layer in enumerate(layers)}
        for cut in members:
            banded.setdefault((src, dst, band_of[cut.dst.entry.layer_id]), []).append(cut)
    return banded


def _page_tokens(context: RankCard, generation: RankCard) -> int:
    """Return the tokens of one pair of (sub-)pages: the smaller block, which must divide the larger."""
    small, large = sorted((context.tokens_per_block, generation.tokens_per_block))
    if large % small:
        want = f"a divisor or multiple of the generation's {generation.tokens_per_block}"
        cure = "give both sides one block size, or one that divides the other"
        raise SpecError(explain(rank_name(context), "tokens_per_block", context.tokens_per_block, want, cure))
    return small


def _compile_cuts(number: int, cuts: Iterable[Cut], tokens: int) -> tuple[list[Slice], tuple[Lane, ...]]:
    """Return the slices, ordered by layer and role, and the merged lanes of group pair `number`."""
    slices: list[Slice] = []
    lanes: list[Lane] = []
    for cut in cuts:
        src = place(cut.src.view, cut.src.entry, cut.heads, tokens)
        dst = place(cut.dst.view, cut.dst.entry, cut.heads, tokens)
        row_bytes = cut.dst.view.row_bytes
        lanes.append(build_lane(src, dst, heads=len(cut.heads), tokens=tokens, row_bytes=row_bytes))
        slices.append(_slice(number, cut, src, dst, len(cut.heads) * tokens * row_bytes))
    return sorted(slices, key=_reading_order), number_lanes(merge_lanes(lanes), number)


def _slice(number: int, cut: Cut, src: Placement, dst: Placement, bytes_per_page: int) -> Slice:
    return Slice(
        pair=number,
        layer_id=cut.dst.entry.layer_id,
        owner=cut.dst.view.owner,
        role=cut.dst.entry.role,
        heads=cut.heads,
        src_pool=src.pool,
        dst_pool=dst.pool,
        src_offset=src.offset,
        dst_offset=dst.offset,
        bytes_per_page=bytes_per_page,
    )


def _reading_order(piece: Slice) -> tuple[int, int, str]:
    """Order slices by layer, standard roles (K before V, data before scales) before extras."""
    order = STANDARD_ROLES.index(piece.role) if piece.role in STANDARD_ROLES else len(STANDARD_ROLES)
    return (piece.layer_id, order, piece.role)


def _group_pair(
    context: RankCard, generation: RankCard, key: tuple[GroupId, GroupId], page_bytes: int, share: OrdinalShare
) -> GroupPair:
    group = generation.group(key[1])
    return GroupPair(
        src_group=key[0],
        dst_group=key[1],
        owner=group.owner,
        window=group.window,
        sink_blocks=_sink_pages(context, generation, key),
        src_tokens=context.tokens_per_block,
        dst_tokens=generation.tokens_per_block,
        page_bytes=page_bytes,
        ordinal_start=share.start,
        ordinal_step=share.step,
        src_deal=context.position.cp,
        dst_deal=generation.position.cp,
    )


def _sink_pages(context: RankCard, generation: RankCard, key: tuple[GroupId, GroupId]) -> int:
    """Return the sinks in (sub-)pages of the pair.

    Each side rounds the same sink tokens up to its own blocks, so the smaller of the two is all either must hold::

        sinks 20 tokens   blocks of 16: [0,16) [16,32) -> 32      blocks of 64: [0,64) -> 64      pages of 16: 2
    """
    src_blocks, dst_blocks = context.group(key[0]).sink_blocks, generation.group(key[1]).sink_blocks
    src, dst = context.tokens_per_block, generation.tokens_per_block
    if src == dst:
        return dst_blocks
    # Some number of sink tokens must round up to both; no tokens round up to no blocks only.
    lo = max((src_blocks - 1) * src, (dst_blocks - 1) * dst)
    if bool(src_blocks) != bool(dst_blocks) or (src_blocks and lo >= min(src_blocks * src, dst_blocks * dst)):
        want = f"the tokens of the generation's {dst_blocks} blocks of {dst}"
        cure = "give both sides the same sink tokens"
        raise SpecError(explain(f"{rank_name(context)} group {key[0]}", "sink_blocks", src_blocks, want, cure))
    return min(src_blocks * src, dst_blocks * dst) // min(src, dst)


def _check_lanes(pair: GroupPair, lanes: Sequence[Lane], context: RankCard, generation: RankCard) -> None:
    """Refuse lanes that leave their slot, and pools that leave their storage, on either side."""
    for lane in lanes:
        for card, side, group, pool, tokens in (
            (context, "src", pair.src_group, lane.src_pool, pair.src_tokens),
            (generation, "dst", pair.dst_group, lane.dst_pool, pair.dst_tokens),
        ):
            slot_bytes = _slot_bytes(card, group, pool)
            thing = f"{rank_name(card)} group {group} pool {pool}"
            check_reach(lane, side, subs=tokens // pair.page_tokens, slot_bytes=slot_bytes, thing=thing)


def _slot_bytes(card: RankCard, group: GroupId, index: int) -> int:
    """Return the slot stride of one pool after checking that its last slot lies inside its storage."""
    thing = f"{rank_name(card)} group {group} pool {index}"
    try:
        pool = card.pool(group, index)
        size = card.storages[pool.storage].size_bytes
    except (KeyError, IndexError):
        want = "described with its storage, as a view uses it"
        raise SpecError(explain(thing, "pool", "missing", want, "complete that rank's card")) from None
    end = pool.offset_bytes + pool.num_slots * pool.slot_stride_bytes
    if pool.offset_bytes < 0:
        raise SpecError(explain(thing, "offset_bytes", pool.offset_bytes, ">= 0", "correct that rank's card"))
    if end > size:
        want = f"<= the {size} bytes of storage {pool.storage}"
        raise SpecError(explain(thing, "end of the last slot in bytes", end, want, "correct that rank's card"))
    return pool.slot_stride_bytes
