"""Cuts a tensor into pages by the names of its axes, and refuses what is not made of rows without gaps."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from transfer.own_tensors import TensorFacts
from unikv.errors import SpecError, explain
from unikv.ids import LayerId
from unikv.layer_spec import KEY, VALUE, KVLayout

_SLOTS, _KV, _HEADS, _TOKENS, _DIM = AXES = ("slots", "kv", "heads", "tokens", "dim")
"""Every axis a tensor may have."""

DATA: Final = (KEY, VALUE)
"""The roles along axis kv."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OwnBuffer:
    """One role of one layer as pages: slot ``s`` is at ``address + s * slot_stride``, `size_bytes` long.

    Attributes:
        row_bytes: one head of one token.
        orders: the head orders its memory can be read in; both where there is one head or one token.
        facts: the tensor it is a part of.
    """

    layer_id: LayerId
    role: str
    address: int
    slot_stride: int
    num_slots: int
    heads: int
    tokens: int
    row_bytes: int
    orders: frozenset[KVLayout]
    facts: TensorFacts

    @property
    def thing(self) -> str:
        """How error texts name it."""
        return f"layer {self.layer_id} {self.role}"

    @property
    def size_bytes(self) -> int:
        """Bytes of one page."""
        return self.heads * self.tokens * self.row_bytes

    @property
    def end(self) -> int:
        """Address behind its last page."""
        return self.address + (self.num_slots - 1) * self.slot_stride + self.size_bytes


def parse_axes(text: str | None, thing: str) -> tuple[str, ...]:
    """Return the names of the axes in `text`; `thing` opens error messages.

    Raises:
        SpecError: no text, a name that is unknown or there twice, or tokens or dim missing.
    """
    if text is None:
        raise SpecError(explain(thing, "axes", None, "an order of axes for every role", "name its axes"))
    axes = tuple(text.replace(",", " ").split())
    sound = len(set(axes)) == len(axes) and set(axes) <= set(AXES) and {_TOKENS, _DIM} <= set(axes)
    if not sound:
        want = f"{_TOKENS}, {_DIM} and perhaps {_SLOTS}, {_KV}, {_HEADS}, each once"
        raise SpecError(explain(thing, "axes", text, want, "name the tensor's axes in their order"))
    return axes


@dataclass(frozen=True, slots=True, kw_only=True)
class Cut:
    """A tensor cut into pages; strides are in bytes.

    Attributes:
        kv: roles in the tensor, `kv_stride` apart.
        tokens: tokens of one page.
        orders: as in `OwnBuffer`.
    """

    kv: int
    kv_stride: int
    num_slots: int
    slot_stride: int
    heads: int
    tokens: int
    row_bytes: int
    orders: frozenset[KVLayout]

    @staticmethod
    def of(facts: TensorFacts, axes: tuple[str, ...], tokens_per_block: int, thing: str) -> Cut:
        """Cut the tensor `facts` with `axes` into pages; `thing` opens error messages.

        Raises:
            SpecError: axes and shape differ, sizes do not divide, pages overlap, or rows have gaps.
        """
        if len(axes) != len(facts.shape):
            want = f"{len(facts.shape)} names for shape {facts.shape}"
            raise SpecError(explain(thing, "axes", " ".join(axes), want, "name every axis of the tensor once"))
        lengths = dict.fromkeys(AXES, 1) | dict(zip(axes, facts.shape, strict=True))
        strides = dict.fromkeys(AXES, 0) | dict(zip(axes, facts.strides, strict=True))
        if _SLOTS not in axes:
            _cut_tokens(lengths, strides, tokens_per_block, thing)
        _check_lengths(lengths, tokens_per_block, thing)
        row_bytes = lengths[_DIM] * facts.item_bytes
        orders = _orders(lengths, strides, facts.item_bytes, thing)
        page_bytes = lengths[_HEADS] * lengths[_TOKENS] * row_bytes
        for axis in (_SLOTS, _KV):
            if lengths[axis] > 1 and strides[axis] < page_bytes:
                want = f">= {page_bytes}, the bytes of a page"
                cure = "pages overlap; pass a tensor whose pages have memory of their own"
                raise SpecError(explain(thing, f"stride of axis {axis} in bytes", strides[axis], want, cure))
        return Cut(
            kv=lengths[_KV],
            kv_stride=strides[_KV],
            num_slots=lengths[_SLOTS],
            # The stride of a single slot means nothing, and libraries fill in anything.
            slot_stride=strides[_SLOTS] if lengths[_SLOTS] > 1 else page_bytes,
            heads=lengths[_HEADS],
            tokens=lengths[_TOKENS],
            row_bytes=row_bytes,
            orders=orders,
        )

    def buffer(self, facts: TensorFacts, layer_id: LayerId, role: str, number: int) -> OwnBuffer:
        """Return number `number` along axis kv as the buffer of `role`."""
        return OwnBuffer(
            layer_id=layer_id,
            role=role,
            address=facts.address + number * self.kv_stride,
            slot_stride=self.slot_stride,
            num_slots=self.num_slots,
            heads=self.heads,
            tokens=self.tokens,
            row_bytes=self.row_bytes,
            orders=self.orders,
            facts=facts,
        )


def _cut_tokens(lengths: dict[str, int], strides: dict[str, int], tokens_per_block: int, thing: str) -> None:
    """Make slots of consecutive tokens."""
    slots, rest = divmod(lengths[_TOKENS], tokens_per_block)
    if rest or not slots:
        want = f"a multiple of tokens_per_block={tokens_per_block}"
        cure = "pass whole pages only, or the engine's own page size as tokens_per_block"
        raise SpecError(explain(thing, "length of axis tokens", lengths[_TOKENS], want, cure))
    lengths[_SLOTS], strides[_SLOTS] = slots, strides[_TOKENS] * tokens_per_block
    lengths[_TOKENS] = tokens_per_block


def _check_lengths(lengths: Mapping[str, int], tokens_per_block: int, thing: str) -> None:
    if lengths[_TOKENS] != tokens_per_block:
        want = f"tokens_per_block={tokens_per_block}"
        cure = "pass the engine's page size, or leave the slots axis away where pages are consecutive tokens"
        raise SpecError(explain(thing, "length of axis tokens", lengths[_TOKENS], want, cure))
    if lengths[_KV] > len(DATA):
        want = "1 (key) or 2 (key and value)"
        raise SpecError(explain(thing, "length of axis kv", lengths[_KV], want, "name the axes in their order"))


def _orders(lengths: Mapping[str, int], strides: Mapping[str, int], item_bytes: int, thing: str) -> frozenset[KVLayout]:
    """Return the orders in which the rows of a page follow one another without a gap."""
    heads, tokens = lengths[_HEADS], lengths[_TOKENS]
    if lengths[_DIM] > 1 and strides[_DIM] != item_bytes:
        cure = "rows must be contiguous: store dim last, or copy the tensor into that order"
        raise SpecError(explain(thing, "stride of axis dim in bytes", strides[_DIM], f"{item_bytes}", cure))
    row = lengths[_DIM] * item_bytes
    by_head, by_token = strides[_HEADS], strides[_TOKENS]
    orders: set[KVLayout] = set()
    if (heads == 1 or by_head == row) and (tokens == 1 or by_token == row * heads):
        orders.add(KVLayout.NHD)
    if (tokens == 1 or by_token == row) and (heads == 1 or by_head == row * tokens):
        orders.add(KVLayout.HND)
    if not orders:
        want = f"{(row, row * heads)} (heads next to each other) or {(row * tokens, row)} (tokens next to each other)"
        cure = "heads and tokens of a page must lie without gaps; give K and V tensors or pages of their own"
        raise SpecError(explain(thing, "strides of axes (heads, tokens) in bytes", (by_head, by_token), want, cure))
    return frozenset(orders)
