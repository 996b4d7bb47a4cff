"""How pages look on the host: as they are, or with K and V as FP8 at half the size.

The FP8 codec keeps one scale per page, buffer and head: the largest magnitude becomes 448, the largest number of
float8_e4m3fn. A value ``x`` comes back as ``y`` with ::

    |x - y| <= 2**-4 * |x| + 2**-10 * s + half an ulp of the page's own dtype,      s = largest magnitude / 448

half a step of the 3-bit mantissa for normal numbers, half of the smallest step near zero. Where a page holds an
infinity or a NaN, these come back as NaN, and ``s`` is of the finite values. Block scales and extra buffers are always
kept bit for bit.
"""

from __future__ import annotations

from typing import Final, Protocol

import torch

from unikv.buffers import Tensor
from unikv.host_tier_options import check_codec
from unikv.layer_spec import KEY, VALUE, KVDtype, KVLayout
from unikv.layout import CacheLayout, PoolLayout

_FP8_MAX: Final = 448.0
_SCALE_BYTES: Final = 4
_TORCH: Final = {KVDtype.FLOAT16: torch.float16, KVDtype.BFLOAT16: torch.bfloat16}


class ColdCodec(Protocol):
    """Turns slots of one pool into rows of bytes for the host, and back."""

    def row_bytes(self, pool: PoolLayout) -> int:
        """Return the bytes of one slot on the host."""
        ...

    def encode(self, pool: PoolLayout, slots: Tensor) -> Tensor:
        """Return ``[n, row_bytes]`` uint8 for ``[n, slot_bytes]`` uint8."""
        ...

    def decode(self, pool: PoolLayout, rows: Tensor) -> Tensor:
        """Return ``[n, slot_bytes]`` uint8 for ``[n, row_bytes]`` uint8."""
        ...


class IdentityCodec:
    """Keeps every bit."""

    def row_bytes(self, pool: PoolLayout) -> int:
        """Return the slot's own size."""
        return pool.slot_bytes

    def encode(self, pool: PoolLayout, slots: Tensor) -> Tensor:
        """Return `slots`."""
        return slots

    def decode(self, pool: PoolLayout, rows: Tensor) -> Tensor:
        """Return `rows`."""
        return rows


class Fp8Codec:
    """Keeps K and V of 16-bit layers as FP8 with a scale per page, buffer and head; the module has the error bound."""

    def __init__(self, layout: CacheLayout) -> None:
        """Read the dtype from the specs.

        Raises:
            SpecError: the layers differ in dtype, or theirs has not 16 bits.
        """
        check_codec("fp8", layout.specs)
        self._layout = layout
        self._dtype = _TORCH[layout.specs[0].dtype]

    def row_bytes(self, pool: PoolLayout) -> int:
        """Return half a byte per byte of K and V and four bytes per head; other buffers keep their size."""
        if not self._is_kv(pool):
            return pool.slot_bytes
        return sum(pool.buffer_bytes // 2 + _SCALE_BYTES * heads for heads in self._heads(pool))

    def encode(self, pool: PoolLayout, slots: Tensor) -> Tensor:
        """Scale and round."""
        if not self._is_kv(pool):
            return slots
        parts = []
        for number, heads in enumerate(self._heads(pool)):
            data = slots[:, number * pool.buffer_bytes : (number + 1) * pool.buffer_bytes].contiguous()
            values = self._by_head(data.view(self._dtype), heads).float()
            largest = torch.where(values.isfinite(), values, 0.0).abs().amax(dim=2)
            scale = torch.where(largest > 0, largest / _FP8_MAX, 1.0)
            small = (values / scale[:, :, None]).masked_fill(~values.isfinite(), float("nan"))
            packed = small.clamp(-_FP8_MAX, _FP8_MAX).to(torch.float8_e4m3fn).view(torch.uint8)
            parts += [packed.flatten(1), scale.contiguous().view(torch.uint8)]
        return torch.cat(parts, dim=1)

    def decode(self, pool: PoolLayout, rows: Tensor) -> Tensor:
        """Scale back."""
        if not self._is_kv(pool):
            return rows
        parts, start = [], 0
        for heads in self._heads(pool):
            size = pool.buffer_bytes // 2
            packed = rows[:, start : start + size].contiguous().view(torch.float8_e4m3fn).float()
            scale = rows[:, start + size : start + size + _SCALE_BYTES * heads].contiguous().view(torch.float32)
            values = packed.view(packed.shape[0], heads, -1) * scale[:, :, None]
            limit = torch.finfo(self._dtype).max
            parts.append(self._by_slot(values.clamp(-limit, limit).to(self._dtype)))
            start += size + _SCALE_BYTES * heads
        return torch.cat(parts, dim=1)

    def _is_kv(self, pool: PoolLayout) -> bool:
        return all(buffer.role in (KEY, VALUE) for buffer in pool.buffers)

    def _heads(self, pool: PoolLayout) -> list[int]:
        return [self._layout.spec(buffer.layer_id).num_kv_heads for buffer in pool.buffers]

    def _by_head(self, values: Tensor, heads: int) -> Tensor:
        """Return ``[n, heads, tokens * head_dim]``."""
        count, tpb = values.shape[0], self._layout.tokens_per_block
        if self._layout.kv_layout is KVLayout.HND:
            return values.view(count, heads, -1)
        return values.view(count, tpb, heads, -1).transpose(1, 2).reshape(count, heads, -1)

    def _by_slot(self, values: Tensor) -> Tensor:
        """Return the bytes of one buffer, ``[n, buffer_bytes]``, from ``[n, heads, tokens * head_dim]``."""
        count, heads, _ = values.shape
        if self._layout.kv_layout is not KVLayout.HND:
            values = values.view(count, heads, self._layout.tokens_per_block, -1).transpose(1, 2)
        return values.reshape(count, -1).view(torch.uint8)


def choose_codec(name: str, layout: CacheLayout) -> ColdCodec:
    """Return the codec called `name`.

    Raises:
        SpecError: there is none of that name, or it cannot take these layers.
    """
    check_codec(name, layout.specs)
    return IdentityCodec() if name == "identity" else Fp8Codec(layout)
