"""Which pages travel, and which page of one side belongs to which of the other. Ordinals, never list lengths.

A prompt of 41 tokens, window 20, one sink block, blocks of 8 on the context side and of 16 on the generation side;
pages pair in units of 8 tokens (``s`` sink, ``-`` left the window, ``x`` live, ``.`` holds no prompt token)::

    token            0       8       16      24      32      40  41
    unit             |0 s    |1 -    |2 x    |3 x    |4 x    |5 x
    context ordinal  |0      |1      |2      |3      |4      |5
    generation       |0.0            |1.0    |1.1    |2.0    |2.1       ordinal.sub-page

Under context parallelism ordinals stay the sequence's, and a rank's table has its own blocks only::

    ordinal                      0   1   2   3   4   5
    place in rank 1's table of 2     0       1       2
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from transfer.program import GroupPair
from unikv.cp_ledger import CpLedger
from unikv.errors import LocalProtocolError, RemoteProtocolError, SpecError, UnikvError, explain
from unikv.ids import NO_PAGE, NULL_SLOT
from unikv.ranges import ceil_div, stale_blocks

SlotArray = NDArray[np.int32]


@dataclass(frozen=True, slots=True, kw_only=True)
class PagePairs:
    """Pages of one group pair, ready to copy: four int32 arrays of one length.

    Attributes:
        src_slot, dst_slot: slots on each side.
        src_sub, dst_sub: sub-page inside the slot, all zero where the page sizes are equal.
    """

    src_slot: SlotArray
    src_sub: SlotArray
    dst_slot: SlotArray
    dst_sub: SlotArray

    def __len__(self) -> int:
        return int(self.src_slot.shape[0])


def live_ordinals(
    prompt_tokens: int, *, tokens_per_block: int, window: int | None, sink_blocks: int, cached_tokens: int = 0
) -> SlotArray:
    """Return the block ordinals of a prompt that travel, ascending.

    These are the blocks that hold prompt tokens, counted from the front, without those that left the window and
    without those the generation side already holds. Room for draft tokens never counts.

    Args:
        prompt_tokens: tokens whose KV the context side computed.
        tokens_per_block: tokens per block.
        window: sliding window in tokens, None for full attention.
        sink_blocks: blocks at the start that never leave the window.
        cached_tokens: tokens at the start the generation side already holds; rounded down to blocks.

    Raises:
        SpecError: a negative token count.
    """
    if min(prompt_tokens, cached_tokens) < 0:
        got = (prompt_tokens, cached_tokens)
        raise SpecError(explain("prompt", "(prompt_tokens, cached_tokens)", got, ">= 0", "pass counts of tokens"))
    ordinals = np.arange(ceil_div(prompt_tokens, tokens_per_block), dtype=np.int32)
    stale = stale_blocks(prompt_tokens, window, sink_blocks, tokens_per_block)
    cached = cached_tokens // tokens_per_block
    if not len(stale):
        return ordinals[cached:]
    return np.concatenate([ordinals[cached : stale.lo], ordinals[max(cached, stale.hi) :]])


def validate_table(table: SlotArray, *, num_slots: int, max_blocks: int, thing: str) -> None:
    """Refuse a peer's page table that could lead a copy astray.

    Args:
        table: slots by ordinal; `NO_PAGE` where nothing is wanted.
        num_slots: slots of the group's pools on the rank that owns the pages.
        max_blocks: longest table a request of that rank can have.
        thing: opens the message ("request 7 group 0 from generation rank 2").

    Raises:
        RemoteProtocolError: not a one-dimensional int32 array, too long, an entry outside ``[1, num_slots)`` (slot 0
            is the null page), or a slot twice. The text names the ordinal and the slot.
    """
    if table.dtype != np.int32 or table.ndim != 1:
        got = f"{table.dtype} of {table.ndim} dimension(s)"
        raise _refused(thing, "page table", got, "a one-dimensional int32 array")
    if len(table) > max_blocks:
        raise _refused(thing, "length of the page table", len(table), f"<= {max_blocks} blocks")
    held = table[table != NO_PAGE]
    if not len(held):
        return
    if held.min() <= NULL_SLOT or held.max() >= num_slots:
        ordinal = int(np.flatnonzero((table != NO_PAGE) & ((table <= NULL_SLOT) | (table >= num_slots)))[0])
        want = f"{NO_PAGE} or a slot in [{NULL_SLOT + 1}, {num_slots})"
        raise _refused(thing, f"slot of ordinal {ordinal}", int(table[ordinal]), want)
    ordered = np.sort(held)
    again = np.flatnonzero(ordered[1:] == ordered[:-1])
    if len(again):
        slot = int(ordered[again[0]])
        twice = ", ".join(map(str, np.flatnonzero(table == slot)))
        raise _refused(thing, f"slot of ordinals {twice}", slot, "each slot at most once")


def pair_pages(pair: GroupPair, src_table: SlotArray, dst_table: SlotArray, prompt_tokens: int) -> PagePairs:
    """Pair the pages of two tables by token position: every live unit the generation side wants, ascending.

    The window is masked before the tables are looked at, so it does not matter what either side has evicted yet. A
    destination entry of `NO_PAGE`, or an empty destination table, means "not wanted".

    Args:
        pair: the group pair, from the copy program.
        src_table: int32 slots of the context rank's blocks in order, ``[>= ceil(prompt / src_tokens)]``.
        dst_table: int32 slots of the generation rank's blocks in order, ``[>= ceil(prompt / dst_tokens)]``, or empty.
            Of blocks that are dealt to several ranks only the rank's own count.
        prompt_tokens: tokens whose KV travels.

    Raises:
        LocalProtocolError: the context rank lacks a page that is wanted.
        RemoteProtocolError: the destination table ends before the prompt does.
    """
    units = _wanted_units(pair, dst_table, prompt_tokens, RemoteProtocolError)
    src_slot, src_sub = _locate(units, src_table, pair.src_tokens // pair.page_tokens, pair.src_deal)
    if len(src_slot) != len(units) or (len(src_slot) and src_slot.min() <= NULL_SLOT):
        raise _lacking(pair, units, src_table)
    dst_slot, dst_sub = _locate(units, dst_table, pair.dst_tokens // pair.page_tokens, pair.dst_deal)
    return PagePairs(src_slot=src_slot, src_sub=src_sub, dst_slot=dst_slot, dst_sub=dst_sub)


def expected_pages(pair: GroupPair, dst_table: SlotArray, prompt_tokens: int) -> int:
    """Return how many page pairs `pair_pages` yields for this destination table: the receiver's own account.

    Raises:
        LocalProtocolError: the table ends before the prompt does.
    """
    return len(_wanted_units(pair, dst_table, prompt_tokens, LocalProtocolError))


def page_ends(pair: GroupPair, dst_table: SlotArray, prompt_tokens: int) -> SlotArray:
    """Return, for every page pair that `pair_pages` yields, how many tokens of the prompt must be there to copy it.

    Raises:
        RemoteProtocolError: the table ends before the prompt does.
    """
    units = _wanted_units(pair, dst_table, prompt_tokens, RemoteProtocolError)
    ends: SlotArray = np.minimum((units + 1) * np.int32(pair.page_tokens), prompt_tokens).astype(np.int32)
    return ends


def gather_pages(pairs: PagePairs, first: int, count: int) -> PagePairs:
    """Return page pairs ``[first, first + count)`` with packed pages ``0, 1, ...`` of a chunk as destination."""
    src_slot, src_sub = pairs.src_slot[first : first + count], pairs.src_sub[first : first + count]
    packed = np.arange(len(src_slot), dtype=np.int32)
    return PagePairs(src_slot=src_slot, src_sub=src_sub, dst_slot=packed, dst_sub=np.zeros_like(packed))


def scatter_pages(pair: GroupPair, dst_table: SlotArray, prompt_tokens: int, first: int, count: int) -> PagePairs:
    """Return page pairs ``[first, first + count)`` with packed pages ``0, 1, ...`` of a chunk as source.

    The receiver needs its own table only: which pages come, and in which order, follows from it.

    Raises:
        LocalProtocolError: the table ends before the prompt does.
    """
    units = _wanted_units(pair, dst_table, prompt_tokens, LocalProtocolError)[first : first + count]
    dst_slot, dst_sub = _locate(units, dst_table, pair.dst_tokens // pair.page_tokens, pair.dst_deal)
    packed = np.arange(len(units), dtype=np.int32)
    return PagePairs(src_slot=packed, src_sub=np.zeros_like(packed), dst_slot=dst_slot, dst_sub=dst_sub)


def _wanted_units(pair: GroupPair, dst_table: SlotArray, prompt_tokens: int, refusal: type[UnikvError]) -> SlotArray:
    """Return the live units of ``page_tokens`` tokens these two ranks share and the destination has a page for."""
    if not len(dst_table):
        return np.empty(0, dtype=np.int32)
    dealt = CpLedger(
        cp_size=pair.dst_deal, cp_rank=pair.ordinal_start % pair.dst_deal, tokens_per_block=pair.dst_tokens
    )
    blocks = dealt.num_blocks(prompt_tokens)
    if len(dst_table) < blocks:
        want = f">= {blocks} blocks of {pair.dst_tokens} for {prompt_tokens} prompt tokens (or none at all)"
        cure = f"mark pages that are not wanted with {NO_PAGE}"
        raise refusal(explain(_name(pair), "length of the generation page table", len(dst_table), want, cure))
    units = live_ordinals(
        prompt_tokens, tokens_per_block=pair.page_tokens, window=pair.window, sink_blocks=pair.sink_blocks
    )
    if pair.ordinal_step > 1:
        units = units[units % pair.ordinal_step == pair.ordinal_start]
    slots, _ = _locate(units, dst_table, pair.dst_tokens // pair.page_tokens, pair.dst_deal)
    wanted: SlotArray = units[slots != NO_PAGE]
    return wanted


def _locate(units: SlotArray, table: SlotArray, subs: int, deal: int) -> tuple[SlotArray, SlotArray]:
    """Return slot and sub-page of every unit in a table of one rank; stops where the table ends.

    A block holds `subs` units, and `deal` ranks take turns in having one.
    """
    places = units if subs == deal == 1 else units // np.int32(subs * deal)
    if len(places) and places[-1] >= len(table):
        places = places[places < len(table)]
    slots = table[places]
    return slots, np.zeros_like(slots) if subs == 1 else units[: len(slots)] % np.int32(subs)


def _lacking(pair: GroupPair, units: SlotArray, src_table: SlotArray) -> LocalProtocolError:
    """Name the first ordinal the context rank was asked for and has no page of."""
    ordinals = units // np.int32(pair.src_tokens // pair.page_tokens)
    places = ordinals // np.int32(pair.src_deal)
    missing = next(
        int(o) for o, at in zip(ordinals, places, strict=True) if at >= len(src_table) or src_table[at] <= NULL_SLOT
    )
    blocks = int(places[-1]) + 1
    thing = f"{_name(pair)}: context has no page for ordinal {missing}"
    held = f"{int(np.count_nonzero(src_table[:blocks] > NULL_SLOT))} pages in {len(src_table)} blocks"
    want = "every live page the generation side asked for"
    return LocalProtocolError(explain(thing, "page table", held, want, "pin a request's pages until they are sent"))


def _refused(thing: str, field: str, got: object, want: str) -> RemoteProtocolError:
    return RemoteProtocolError(explain(thing, field, got, want, "the request is refused, nothing was copied"))


def _name(pair: GroupPair) -> str:
    return f"group {pair.src_group} -> {pair.dst_group} ({pair.owner})"
