"""Shapes and strides of the tensors that look into a pool, as plain numbers: no memory, no tensor library.

One layer's K/V view over N slots. Dimension 0 steps by the physical slot, whatever else lies in it, so the raw slot
id of a page table is the index, for every layer of every mixture::

    pool      | slot 0: A.key  B.key  B.value | slot 1: A.key  B.key  B.value | ...
    view of B          [0,0]  [0,1]                     [1,0]  [1,1]
              storage offset = B.layer_offset * page,  stride 0 = scale * page,  stride 1 = page   (page in elements)
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from unikv.errors import SpecError, explain
from unikv.ids import GroupId, LayerId
from unikv.kernel_index import sub_pages_per_block
from unikv.layer_spec import (
    KEY,
    KEY_BLOCK_SCALE,
    NVFP4_SCALE_ELEMENTS,
    STANDARD_ROLES,
    VALUE,
    VALUE_BLOCK_SCALE,
    KVDtype,
    KVLayout,
)
from unikv.layout import BufferLayout, CacheLayout, role_bytes_per_token

_ITEM_BYTES: Final = {"float32": 4, "float16": 2, "bfloat16": 2, "float8_e4m3fn": 1, "uint8": 1}


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorGeometry:
    """How a strided tensor lies over one pool. Lengths, strides and the offset are in elements of `dtype`.

    Attributes:
        group_id, pool_index: the pool it looks into; dimension 0 is the slot unless the function says otherwise.
        dtype: torch's name of the element type; packed NVFP4 data is "uint8", two elements a byte.
        storage_offset: element of the pool where the tensor starts.
    """

    group_id: GroupId
    pool_index: int
    dtype: str
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    storage_offset: int

    @property
    def item_bytes(self) -> int:
        """Bytes of one element."""
        return _ITEM_BYTES[self.dtype]

    @property
    def end(self) -> int:
        """Elements from the pool's base to just behind the last one the tensor reaches."""
        reach = sum((length - 1) * stride for length, stride in zip(self.shape, self.strides, strict=True))
        return self.storage_offset + reach + 1


def kv_geometry(layout: CacheLayout, layer_id: LayerId, num_slots: int) -> TensorGeometry | None:
    """Return the geometry of a layer's K and V.

    Returns:
        Shape ``[num_slots, kv_factor, heads, tokens_per_block, head_dim]`` (HND) or
        ``[num_slots, kv_factor, tokens_per_block, heads, head_dim]`` (NHD), indexed by raw slot id. NVFP4 data is
        uint8 with ``head_dim / 2`` as the last dimension. None for a layer that stores extras only.

    Raises:
        UnknownLayerError: this rank holds no such layer.
        SpecError: the layout does not put V right behind K, or elements do not fill its buffers.
    """
    spec = layout.spec(layer_id)
    packed = spec.dtype is KVDtype.NVFP4
    row_items = spec.head_dim // 2 if packed else spec.head_dim
    return _strided(layout, layer_id, (KEY, VALUE), num_slots, row_items, "uint8" if packed else spec.dtype.value)


def scale_geometry(layout: CacheLayout, layer_id: LayerId, num_slots: int) -> TensorGeometry | None:
    """Return the geometry of an NVFP4 layer's block scales, None for every other layer.

    Returns:
        The leading dimensions of `kv_geometry`, the last one ``head_dim / 16``; dtype float8_e4m3fn. The slot stride is
        that of the scale pool.

    Raises:
        UnknownLayerError: this rank holds no such layer.
        SpecError: the layout does not put the scales of V right behind those of K.
    """
    roles = (KEY_BLOCK_SCALE, VALUE_BLOCK_SCALE)
    row_items = layout.spec(layer_id).head_dim // NVFP4_SCALE_ELEMENTS
    return _strided(layout, layer_id, roles, num_slots, row_items, KVDtype.FLOAT8_E4M3FN.value)


def extra_geometry(layout: CacheLayout, layer_id: LayerId, role: str, num_slots: int) -> TensorGeometry:
    """Return the geometry of an extra buffer: uint8 ``[num_slots, tokens_per_block, bytes_per_token]``.

    Raises:
        UnknownLayerError: this rank holds no such layer.
        SpecError: the layer declares no such extra.
    """
    buffer = layout.buffer(layer_id, role)
    if role in STANDARD_ROLES:
        cure = "use kv_geometry or scale_geometry for the standard roles"
        raise SpecError(explain(f"layer {layer_id}", "role", role, "an extra role", cure))
    row_bytes = role_bytes_per_token(layout.spec(layer_id), role)
    return TensorGeometry(
        group_id=buffer.group_id,
        pool_index=buffer.pool_index,
        dtype="uint8",
        shape=(num_slots, layout.tokens_per_block, row_bytes),
        strides=(layout.pool_of(buffer).slot_bytes, row_bytes, 1),
        storage_offset=buffer.offset_bytes,
    )


def flat_geometry(
    layout: CacheLayout, layer_id: LayerId, num_slots: int, *, sub_page_tokens: int | None = None
) -> TensorGeometry:
    """Return the geometry of the page list that kernels with separate K and V page ids read.

    Page ids come from `unikv.kernel_index.flat_page_index`. The list starts at this layer's K in slot 0 and ends behind
    its V in the last slot, so it never runs past the pool. With `sub_page_tokens` every page is read as that many
    smaller pages, each ``[heads, sub, row]`` or ``[sub, heads, row]`` in itself: under HND whoever writes such pages
    must also be the one who reads them.

    Returns:
        Shape ``[(num_slots - 1) * scale * d + kv_factor * d, heads, tokens, row]`` (HND) or with tokens before heads
        (NHD), where ``d`` sub-pages make a block.

    Raises:
        UnknownLayerError: this rank holds no such layer.
        SpecError: the layer stores no K, or `sub_page_tokens` does not divide the block.
    """
    key = layout.buffer(layer_id, KEY)
    whole = kv_geometry(layout, layer_id, num_slots)
    assert whole is not None  # a layer that stores a key has K/V geometry
    parts = 1 if sub_page_tokens is None else sub_pages_per_block(layout, sub_page_tokens)
    page_shape = _page_shape(layout, layer_id, layout.tokens_per_block // parts, whole.shape[-1])
    pages = ((num_slots - 1) * layout.pool_of(key).scale + whole.shape[1]) * parts
    return TensorGeometry(
        group_id=whole.group_id,
        pool_index=whole.pool_index,
        dtype=whole.dtype,
        shape=(pages, *page_shape),
        strides=_contiguous((pages, *page_shape)),
        storage_offset=whole.storage_offset,
    )


def _strided(
    layout: CacheLayout, layer_id: LayerId, roles: tuple[str, str], num_slots: int, row_items: int, dtype: str
) -> TensorGeometry | None:
    found = [buffer for role in roles if (buffer := layout.find_buffer(layer_id, role)) is not None]
    if not found:
        return None
    first, pool = found[0], layout.pool_of(found[0])
    if len(found) > 1:
        _check_adjacent(first, found[1])
    page_shape = _page_shape(layout, layer_id, layout.tokens_per_block, row_items)
    shape = (num_slots, len(found), *page_shape)
    page_items = first.size_bytes // _ITEM_BYTES[dtype]
    if _contiguous(page_shape)[0] * page_shape[0] * _ITEM_BYTES[dtype] != first.size_bytes:
        want = f"the {first.size_bytes} bytes of its buffer"
        raise SpecError(explain(f"layer {layer_id}", f"{dtype} page shape", page_shape, want, "rebuild the layout"))
    return TensorGeometry(
        group_id=first.group_id,
        pool_index=first.pool_index,
        dtype=dtype,
        shape=shape,
        strides=(pool.scale * page_items, page_items, *_contiguous(page_shape)),
        storage_offset=first.layer_offset * page_items,
    )


def _page_shape(layout: CacheLayout, layer_id: LayerId, tokens: int, row_items: int) -> tuple[int, int, int]:
    heads = layout.spec(layer_id).num_kv_heads
    return (heads, tokens, row_items) if layout.kv_layout is KVLayout.HND else (tokens, heads, row_items)


def _contiguous(shape: tuple[int, ...]) -> tuple[int, ...]:
    strides = [1]
    for length in reversed(shape[1:]):
        strides.insert(0, strides[0] * length)
    return tuple(strides)


def _check_adjacent(key: BufferLayout, value: BufferLayout) -> None:
    want = (key.pool_index, key.offset_bytes + key.size_bytes)
    got = (value.pool_index, value.offset_bytes)
    if got != want:
        field = f"(pool, offset_bytes) of {value.role}"
        cure = f"build the layout so that it lies right behind {key.role}"
        raise SpecError(explain(f"layer {key.layer_id}", field, got, str(want), cure))
