"""What compiling yields: group pairs, slices and the copy program, with a digest two ranks can compare."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from hashlib import blake2b
from typing import Final

from transfer.lanes import Lane
from unikv.ids import GroupId, LayerId, Rank
from unikv.layer_spec import LayerOwner
from unikv.ranges import Span

DIGEST_BYTES: Final = 16
PROGRAM_FORM: Final = "unikv-program-2"
"""Opens the text a digest is taken of; to be changed whenever the meaning of a field changes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupPair:
    """One layer group of each side whose pages pair by token position.

    Attributes:
        src_group, dst_group: group ids on the context and the generation rank.
        window: sliding window in tokens (None: full attention), as the generation rank declares it.
        sink_blocks: blocks of ``min(src, dst)`` tokens at the start that never leave the window.
        src_tokens, dst_tokens: tokens per block of each side; the smaller divides the larger.
        page_bytes: bytes all lanes of this pair move for one pair of (sub-)pages of ``min(src, dst)`` tokens.
        ordinal_start, ordinal_step: only ordinals ``start, start + step, ...`` pass between these two ranks (context
            parallelism deals blocks out in turn); 0 and 1 without it.
        src_deal, dst_deal: ranks the blocks of each side are dealt to; a page table of such a rank has its own blocks
            only, ordinal ``o`` in place ``o // deal``.
    """

    src_group: GroupId
    dst_group: GroupId
    owner: LayerOwner
    window: int | None
    sink_blocks: int
    src_tokens: int
    dst_tokens: int
    page_bytes: int
    ordinal_start: int = 0
    ordinal_step: int = 1
    src_deal: int = 1
    dst_deal: int = 1

    @property
    def page_tokens(self) -> int:
        """Tokens of one pair of (sub-)pages."""
        return min(self.src_tokens, self.dst_tokens)


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

    @property
    def page_bytes(self) -> int:
        """Bytes one page of every group pair moves together."""
        return sum(pair.page_bytes for pair in self.pairs)


def digest_of(context_rank: Rank, generation_rank: Rank, parts: Sequence[GroupPair | Lane | Slice]) -> str:
    """Return the digest of the canonical text: one line per part, fields in the order of their declaration."""
    lines = [PROGRAM_FORM, f"{context_rank} {generation_rank}"]
    for part in parts:
        values = (f"{field.name}={getattr(part, field.name)}" for field in fields(part))
        lines.append(f"{type(part).__name__} {' '.join(values)}")
    return blake2b("\n".join(lines).encode(), digest_size=DIGEST_BYTES).hexdigest()
