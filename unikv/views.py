"""Views: buffers of one pool that can be head-sliced alike, described without memory.

A view is what two ranks compare and cut: it names global heads, so that any tensor-parallel split can be intersected
with any other, and it never mixes target with draft or K/V with scales.
"""

from __future__ import annotations

from dataclasses import dataclass

from unikv.ids import GroupId, LayerId
from unikv.layer_spec import KVLayout, LayerOwner
from unikv.layout import CacheLayout
from unikv.ranges import Span


@dataclass(frozen=True, slots=True, kw_only=True)
class ViewEntry:
    """One buffer of a view: `offset_bytes` is its first byte inside a slot of the view's pool."""

    layer_id: LayerId
    role: str
    offset_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class KVView:
    """Buffers of one pool with equal geometry.

    One buffer is ``[heads, tokens_per_block, row_bytes]`` bytes (HND) or ``[tokens_per_block, heads, row_bytes]``
    (NHD); a row is one head of one token.

    Attributes:
        heads: global half-open head range this rank holds.
        replica, replicas: which copy of these heads it is, and how many ranks hold them.
        total_heads: heads of the whole model in these layers (1 for replicated extras).
        head_dim: elements per head as the spec declares it (0 for extras, whose rows are opaque bytes).
        dtype: element type of the rows (scale views: float8_e4m3fn; extras: "bytes").
        row_bytes: bytes of one head of one token.
    """

    group_id: GroupId
    pool_index: int
    owner: LayerOwner
    roles: tuple[str, ...]
    heads: Span
    replica: int
    replicas: int
    total_heads: int
    head_dim: int
    dtype: str
    kv_layout: KVLayout
    tokens_per_block: int
    row_bytes: int
    entries: tuple[ViewEntry, ...]

    @property
    def buffer_bytes(self) -> int:
        """Bytes of one page of one buffer."""
        return len(self.heads) * self.tokens_per_block * self.row_bytes


def describe_views(layout: CacheLayout, *, tp: int, tp_rank: int) -> tuple[KVView, ...]:
    """Return the views of `layout` on tensor-parallel rank `tp_rank` of `tp`, ordered by pool and offset."""
    raise NotImplementedError
