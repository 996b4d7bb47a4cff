"""Tensors of any library as plain numbers: address, shape, strides in bytes. Nothing is copied, no library imported.

============================  ===============================================================================
what is passed                what is asked of it
============================  ===============================================================================
torch tensors and their like  ``data_ptr()``, ``shape``, ``stride()``, ``element_size()``, ``dtype``, ``device``
numpy arrays, buffers         ``__array_interface__`` or the buffer protocol
`RawTensor`                   a pointer with shape, strides and element type
============================  ===============================================================================
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from unikv.errors import SpecError, explain
from unikv.ranges import Span

_ITEM_BYTES: Final = {"float32": 4, "float16": 2, "bfloat16": 2, "float8_e4m3fn": 1, "uint8": 1}


@dataclass(frozen=True, slots=True, kw_only=True)
class RawTensor:
    """Memory that somebody else keeps alive for as long as an endpoint uses it.

    Attributes:
        pointer: address of the first element.
        shape, strides_bytes: one number per axis.
        dtype: element type: float32, float16, bfloat16, float8_e4m3fn or uint8.
        device: where it is: "cpu", or as torch names devices.
        allocation: addresses that belong to the same allocation, half-open; None: those of the tensor alone.
    """

    pointer: int
    shape: tuple[int, ...]
    strides_bytes: tuple[int, ...]
    dtype: str
    device: str = "cpu"
    allocation: Span | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorFacts:
    """What a tensor is, in numbers.

    Attributes:
        allocation: addresses of the memory the tensor is a part of, half-open.
        strides: in bytes.
        keep: what keeps the memory alive, or None where the caller does.
    """

    address: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    item_bytes: int
    dtype: str
    device: str
    writable: bool
    allocation: Span
    keep: object = field(default=None, repr=False)


def read_tensor(tensor: Any, thing: str) -> TensorFacts:
    """Return the facts of `tensor`; `thing` opens error messages.

    Raises:
        SpecError: it is no tensor this module knows, has no memory, an empty axis or a negative stride.
    """
    if isinstance(tensor, RawTensor):
        facts = _of_raw(tensor, thing)
    elif hasattr(tensor, "data_ptr"):
        facts = _of_torch(tensor, thing)
    else:
        facts = _of_array(tensor, thing)
    if min(facts.shape, default=0) < 1:
        raise SpecError(explain(thing, "shape", facts.shape, "axes of at least one element", "leave out empty tensors"))
    if min(facts.strides) < 0:
        raise SpecError(explain(thing, "strides in bytes", facts.strides, ">= 0", "pass the tensor without flips"))
    reach = _reach(facts.address, facts.shape, facts.strides, facts.item_bytes)
    if facts.address < 1 or reach.lo < facts.allocation.lo or reach.hi > facts.allocation.hi:
        want = f"inside its allocation [{facts.allocation.lo}, {facts.allocation.hi})"
        got = f"[{reach.lo}, {reach.hi})"
        raise SpecError(explain(thing, "addresses", got, want, "pass a tensor that has memory of its own"))
    return facts


def _of_raw(raw: RawTensor, thing: str) -> TensorFacts:
    if raw.dtype not in _ITEM_BYTES:
        want = f"one of {', '.join(_ITEM_BYTES)}"
        raise SpecError(explain(thing, "dtype", raw.dtype, want, "name the type the bytes have, or uint8"))
    if len(raw.shape) != len(raw.strides_bytes):
        want = f"{len(raw.shape)}, one per axis"
        raise SpecError(explain(thing, "number of strides", len(raw.strides_bytes), want, "give every axis a stride"))
    item_bytes = _ITEM_BYTES[raw.dtype]
    alone = _reach(max(0, raw.pointer), raw.shape, raw.strides_bytes, item_bytes)
    return TensorFacts(
        address=raw.pointer,
        shape=raw.shape,
        strides=raw.strides_bytes,
        item_bytes=item_bytes,
        dtype=raw.dtype,
        device=raw.device,
        writable=True,
        allocation=alone if raw.allocation is None else raw.allocation,
    )


def _of_torch(tensor: Any, thing: str) -> TensorFacts:
    try:
        item_bytes = int(tensor.element_size())
        shape = tuple(int(length) for length in tensor.shape)
        strides = tuple(int(stride) * item_bytes for stride in tensor.stride())
        address, dtype = int(tensor.data_ptr()), str(tensor.dtype).rpartition(".")[2]
    except (AttributeError, RuntimeError, TypeError) as error:
        want = "a dense tensor with data_ptr(), shape, stride(), element_size() and dtype"
        raise SpecError(
            explain(thing, "tensor", f"{type(tensor).__name__} ({error})", want, "pass its data")
        ) from error
    allocation = _reach(max(0, address), shape, strides, item_bytes)
    if hasattr(tensor, "untyped_storage"):
        storage = tensor.untyped_storage()
        allocation = Span(int(storage.data_ptr()), int(storage.data_ptr()) + int(storage.nbytes()))
    return TensorFacts(
        address=address,
        shape=shape,
        strides=strides,
        item_bytes=item_bytes,
        dtype=dtype,
        device=str(getattr(tensor, "device", "cpu")),
        writable=True,
        allocation=allocation,
        keep=tensor,
    )


def _of_array(tensor: Any, thing: str) -> TensorFacts:
    known = hasattr(tensor, "__array_interface__") or isinstance(tensor, bytearray | memoryview)
    if not known:
        want = "a numpy array, a buffer, a RawTensor, or a tensor with data_ptr()"
        raise SpecError(explain(thing, "tensor", type(tensor).__name__, want, "pass the tensor itself or a RawTensor"))
    array = np.asarray(tensor)
    root: NDArray[Any] = array
    while isinstance(root.base, np.ndarray):
        root = root.base
    below = sum((length - 1) * stride for length, stride in zip(root.shape, root.strides, strict=True) if stride < 0)
    first = int(root.__array_interface__["data"][0])
    return TensorFacts(
        address=int(array.__array_interface__["data"][0]),
        shape=array.shape,
        strides=array.strides,
        item_bytes=array.itemsize,
        # Foreign byte order would travel as it is and be read as something else.
        dtype=array.dtype.name if array.dtype.isnative else array.dtype.str,
        device="cpu",
        writable=array.flags.writeable,
        allocation=Span(first + below, _reach(first, root.shape, root.strides, root.itemsize).hi),
        keep=tensor,
    )


def _reach(address: int, shape: tuple[int, ...], strides: tuple[int, ...], item_bytes: int) -> Span:
    """Return the addresses a tensor touches; strides below zero count as none, they are refused later."""
    steps = ((length - 1) * stride for length, stride in zip(shape, strides, strict=True))
    return Span(address, address + sum(max(0, step) for step in steps) + item_bytes)
