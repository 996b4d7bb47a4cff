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
"""

from __future__ import annotations

from dataclasses import dataclass

from transfer.hello import RankCard
from unikv.ids import GroupId, LayerId, Rank
from unikv.layer_spec import LayerOwner
from unikv.ranges import Span


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupPair:
    """One layer group of each side whose pages pair by token position.

    Attributes:
        src_group, dst_group: group ids on the context and the generation rank.
        src_tokens, dst_tokens: tokens per block of each side; the smaller divides the larger.
        page_bytes: bytes all lanes of this pair move for one pair of (sub-)pages of ``min(src, dst)`` tokens.
    """

    src_group: GroupId
    dst_group: GroupId
    owner: LayerOwner
    window: int | None
    sink_blocks: int
    src_tokens: int
    dst_tokens: int
    page_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Rows:
    """One row dimension of a lane: `count` rows, with the stride in bytes on each side."""

    count: int
    src_stride: int
    dst_stride: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Lane:
    """One strided copy that repeats for every page of group pair number `pair`.

    Attributes:
        src_pool, dst_pool: pool index inside the group on each side.
        packed_offset: where this lane's bytes start inside a packed page (staged paths), rows contiguous there.
    """

    pair: int
    src_pool: int
    dst_pool: int
    src_offset: int
    dst_offset: int
    src_sub_stride: int
    dst_sub_stride: int
    outer: Rows
    inner: Rows
    run_bytes: int
    packed_offset: int

    @property
    def page_bytes(self) -> int:
        """Bytes this lane moves for one page."""
        return self.outer.count * self.inner.count * self.run_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Slice:
    """The heads of one buffer that a pair of ranks moves: what people read and accounts are kept in.

    Attributes:
        heads: global and half-open.
        src_offset, dst_offset: first byte inside the slot of the pool that holds the buffer on that rank.
        bytes_per_page: bytes for one page of the smaller page size.
    """

    pair: int
    layer_id: LayerId
    owner: LayerOwner
    role: str
    heads: Span
    src_pool: int
    dst_pool: int
    src_offset: int
    dst_offset: int
    bytes_per_page: int


@dataclass(frozen=True, slots=True, kw_only=True)
class CopyProgram:
    """Everything one context rank moves to one generation rank. Empty `lanes`: nothing; the pair need not talk.

    Attributes:
        digest: hexadecimal digest of the whole program; both ranks compile it and must agree.
    """

    context_rank: Rank
    generation_rank: Rank
    pairs: tuple[GroupPair, ...]
    lanes: tuple[Lane, ...]
    slices: tuple[Slice, ...]
    digest: str


def compile_program(context: RankCard, generation: RankCard, *, with_draft: bool) -> CopyProgram:
    """Return what `context` sends to `generation`; `with_draft` is the gate's verdict on draft KV."""
    raise NotImplementedError
