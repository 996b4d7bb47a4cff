"""Page tables hold slots; kernels want page indices. The conversion differs per layer and role, never per manager.

A slot of a pool with n buffers ("kernel pages", ``scale`` = n) of b bytes. For the buffer with ordinal o in slot s:

==========  =====================  ==============  =====================================================
mode        base pointer           index           used by kernels that
==========  =====================  ==============  =====================================================
SHARED      pool base + o * b      s * n           take a pointer per layer and one index for all layers
PER_LAYER   pool base              s * n + o       take one pointer and an index per layer
==========  =====================  ==============  =====================================================

``base + index * b`` is the same address both ways. A kernel whose page is smaller than a block (d sub-pages each) sees
every index i as ``i*d .. i*d + d-1``.
"""

from __future__ import annotations

from enum import StrEnum
from typing import Final

import numpy as np
from numpy.typing import NDArray

from unikv.errors import SpecError, explain
from unikv.ids import NO_PAGE, GroupId, LayerId
from unikv.layer_spec import KEY, VALUE
from unikv.layout import BufferLayout, CacheLayout

IndexArray = NDArray[np.int32]
"""Slots or page indices, of any shape; `NO_PAGE` where there is none."""

_INT32_MAX: Final = 2**31 - 1


class PageIndexMode(StrEnum):
    """Whether a layer's offset is in the pointer (SHARED) or in the index (PER_LAYER)."""

    SHARED = "shared"
    PER_LAYER = "per_layer"


def base_offset_bytes(layout: CacheLayout, layer_id: LayerId, role: str, mode: PageIndexMode) -> int:
    """Return where page index 0 of (`layer_id`, `role`) points, counted from the base of its pool."""
    return layout.buffer(layer_id, role).offset_bytes if mode is PageIndexMode.SHARED else 0


def page_stride_bytes(layout: CacheLayout, layer_id: LayerId, role: str, *, expansion: int = 1) -> int:
    """Return the bytes between two page indices of (`layer_id`, `role`).

    Raises:
        SpecError: `expansion` does not divide the buffer.
    """
    buffer = layout.buffer(layer_id, role)
    _check_expansion(buffer, expansion)
    return buffer.size_bytes // expansion


def kernel_page_index(
    layout: CacheLayout, row: IndexArray, layer_id: LayerId, role: str, mode: PageIndexMode, *, expansion: int = 1
) -> IndexArray:
    """Turn slots into page indices of one layer and role.

    Args:
        layout: the rank's layout.
        row: int32 slots, at least one dimension; `NO_PAGE` where there is no page.
        layer_id: the layer.
        role: the role.
        mode: where the layer's offset goes.
        expansion: kernel pages per buffer.

    Returns:
        A new int32 array, the last dimension `expansion` times as long; `NO_PAGE` stays `NO_PAGE`.

    Raises:
        UnknownLayerError: this rank holds no such layer.
        SpecError: the layer stores no such role, `expansion` does not divide its buffer, or an index exceeds int32.
    """
    buffer = layout.buffer(layer_id, role)
    _check_expansion(buffer, expansion)
    lane = buffer.layer_offset if mode is PageIndexMode.PER_LAYER else 0
    return _expand(row, layout.pool_of(buffer).scale, lane, expansion)


def flat_page_index(
    layout: CacheLayout, row: IndexArray, layer_id: LayerId, role: str, *, sub_page_tokens: int | None = None
) -> IndexArray:
    """Turn slots into ids of the page list of `unikv.geometry.flat_geometry`, where V pages have ids of their own.

    With d sub-pages per block the K of slot s is ``s * scale * d + j`` and its V ``s * scale * d + d + j`` (``j < d``).

    Raises:
        UnknownLayerError: this rank holds no such layer.
        SpecError: the layer stores no such role, or `sub_page_tokens` does not divide the block.
    """
    key, buffer = layout.buffer(layer_id, KEY), layout.buffer(layer_id, role)
    if role not in (KEY, VALUE):
        raise SpecError(explain(f"layer {layer_id}", "role", role, f"{KEY} or {VALUE}", "only K and V are page lists"))
    parts = 1 if sub_page_tokens is None else sub_pages_per_block(layout, sub_page_tokens)
    return _expand(row, layout.pool_of(buffer).scale, buffer.layer_offset - key.layer_offset, parts)


def pair_page_index(layout: CacheLayout, row: IndexArray, layer_id: LayerId) -> IndexArray:
    """Turn slots into indices of K/V pairs counted from this layer's first K, for kernels that know pairs only.

    Raises:
        UnknownLayerError: this rank holds no such layer.
        SpecError: slots or the layer's place in them are not whole pairs: odd slots would hit a neighbour's bytes.
    """
    factor = layout.spec(layer_id).kv_factor
    buffer = layout.buffer(layer_id, KEY)
    scale = layout.pool_of(buffer).scale
    if not pair_index_is_legal(layout, layer_id):
        want = f"multiples of kv_factor={factor}"
        cure = "use slot-strided views with raw slot ids for this layer"
        got = (scale, buffer.layer_offset)
        raise SpecError(explain(f"layer {layer_id}", "(scale, layer_offset)", got, want, cure))
    return _expand(row, scale // factor, 0, 1)


def pair_index_is_legal(layout: CacheLayout, layer_id: LayerId) -> bool:
    """Return whether slots, and this layer's place in them, are whole K/V pairs."""
    factor = layout.spec(layer_id).kv_factor
    buffer = layout.buffer(layer_id, KEY)
    return layout.pool_of(buffer).scale % factor == 0 and buffer.layer_offset % factor == 0


def upper_bound(layout: CacheLayout, layer_id: LayerId, role: str, num_slots: int, *, expansion: int = 1) -> int:
    """Return how many page indices lie between the SHARED base of (`layer_id`, `role`) and the end of the pool."""
    buffer = layout.buffer(layer_id, role)
    return (layout.pool_of(buffer).scale * num_slots - buffer.layer_offset) * expansion


def slots_of_upper_bound(layout: CacheLayout, layer_id: LayerId, role: str, bound: int, *, expansion: int = 1) -> int:
    """Return the slots of a pool from an upper bound: the inverse of `upper_bound`, for any kv_factor.

    Raises:
        SpecError: `bound` is not an upper bound of this layer and role.
    """
    buffer = layout.buffer(layer_id, role)
    pages, rest = divmod(bound, expansion)
    slots, odd = divmod(pages + buffer.layer_offset, layout.pool_of(buffer).scale)
    if rest or odd:
        want = f"(scale * slots - {buffer.layer_offset}) * {expansion}"
        raise SpecError(explain(f"layer {layer_id}", "upper bound", bound, want, "pass the bound of the same layer"))
    return slots


def sub_pages_per_block(layout: CacheLayout, sub_page_tokens: int) -> int:
    """Return how many pages of `sub_page_tokens` tokens make a block.

    Raises:
        SpecError: they do not make a whole block.
    """
    if sub_page_tokens < 1 or layout.tokens_per_block % sub_page_tokens:
        want = f"a divisor of tokens_per_block={layout.tokens_per_block}"
        raise SpecError(explain("kernel page", "tokens", sub_page_tokens, want, "choose a page that divides the block"))
    return layout.tokens_per_block // sub_page_tokens


def sharing_key(layout: CacheLayout, layer_id: LayerId, *, expansion: int = 1) -> tuple[GroupId, int, int, int]:
    """Return what layers must have in common to share converted SHARED indices: group, scale, kv_factor, expansion."""
    buffer = layout.buffer(layer_id, KEY)
    return buffer.group_id, layout.pool_of(buffer).scale, layout.spec(layer_id).kv_factor, expansion


def _expand(row: IndexArray, scale: int, lane: int, parts: int) -> IndexArray:
    """Return ``(row * scale + lane) * parts + j`` for ``j < parts``, side by side in the last dimension."""
    slots = np.asarray(row, dtype=np.int64)
    first = (slots * scale + lane) * parts
    if first.size and first.max() + parts - 1 > _INT32_MAX:
        want = f"page indices up to {_INT32_MAX}"
        raise SpecError(explain("page table", "largest page index", int(first.max()), want, "use fewer slots per pool"))
    pages = first[..., None] + np.arange(parts)
    pages = np.where(slots[..., None] == NO_PAGE, NO_PAGE, pages)
    return pages.reshape(*slots.shape[:-1], slots.shape[-1] * parts).astype(np.int32)


def _check_expansion(buffer: BufferLayout, expansion: int) -> None:
    if expansion < 1 or buffer.size_bytes % expansion:
        want = f"a divisor of its {buffer.size_bytes} bytes"
        cure = "choose a kernel page that divides the block"
        raise SpecError(explain(f"layer {buffer.layer_id}", f"pages per {buffer.role}", expansion, want, cure))
