"""The parts of a message that hold others: optional values, tuples, mappings, records; and what follows as frames."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

import numpy as np

from transfer.link import Frame
from transfer.wire_values import NON_NEGATIVE, TEXT, FieldError, Node, Source, at
from unikv.errors import UnikvError

MAX_ITEMS: Final = 1024**2
"""Most items of one array or map in a header: the tokens of the longest prompt anybody sends."""
MAX_ARRAY_BYTES: Final = 16 * 1024**2
"""Longest array frame: a page table of four million blocks."""


class OptionalNode:
    """Nil for None, else the inner value."""

    def __init__(self, inner: Node) -> None:
        self._inner = inner

    def pack(self, value: Any, frames: list[Frame]) -> Any:
        """Return None or the inner plain form."""
        return None if value is None else self._inner.pack(value, frames)

    def unpack(self, source: Source) -> Any:
        """Read nil or the inner value."""
        return source.scalar("nil") if source.kind() == "nil" else self._inner.unpack(source)


class TupleNode:
    """``tuple[X, ...]`` (one node), or with `fixed` a tuple of exactly these nodes."""

    def __init__(self, nodes: Sequence[Node], *, fixed: bool) -> None:
        self._nodes, self._fixed = nodes, fixed

    def pack(self, value: Any, frames: list[Frame]) -> Any:
        """Return the items as a list."""
        if not isinstance(value, tuple):
            raise FieldError(type(value).__name__, "a tuple")
        nodes = self._each(len(value))
        return [at(f"[{i}]", node.pack, item, frames) for i, (node, item) in enumerate(zip(nodes, value, strict=True))]

    def unpack(self, source: Source) -> Any:
        """Read an array."""
        nodes = self._each(source.items("array"))
        return tuple([at(f"[{i}]", node.unpack, source) for i, node in enumerate(nodes)])

    def _each(self, count: int) -> Sequence[Node]:
        if self._fixed and count != len(self._nodes):
            raise FieldError(f"{count} items", f"{len(self._nodes)} items")
        _check_count(count)
        return self._nodes if self._fixed else [self._nodes[0]] * count


class MappingNode:
    """``Mapping[str, X]``, written in the order of its keys."""

    def __init__(self, inner: Node) -> None:
        self._inner = inner

    def pack(self, value: Any, frames: list[Frame]) -> Any:
        """Return a sorted dict."""
        if not isinstance(value, Mapping):
            raise FieldError(type(value).__name__, "a mapping")
        _check_count(len(value))
        keys = sorted(TEXT.pack(key, frames) for key in value)
        return {key: at(f"[{key!r}]", self._inner.pack, value[key], frames) for key in keys}

    def unpack(self, source: Source) -> Any:
        """Read a map with text keys, none of them twice."""
        count = source.items("map")
        _check_count(count)
        values: dict[str, Any] = {}
        for _ in range(count):
            key = _read_key(source, values)
            values[key] = at(f"[{key!r}]", self._inner.unpack, source)
        return values


class Record:
    """A dataclass: a map of exactly its fields; written in the order of their declaration, read in any."""

    def __init__(self, cls: type, nodes: Mapping[str, Node]) -> None:
        self._cls, self._nodes = cls, nodes

    def pack(self, value: Any, frames: list[Frame]) -> Any:
        """Return the fields by name."""
        if type(value) is not self._cls:
            raise FieldError(type(value).__name__, f"a {self._cls.__name__}")
        packed = {}
        for name, node in self._nodes.items():
            try:  # as `at` does, without a call for every field: headers are on the way of every request
                packed[name] = node.pack(getattr(value, name), frames)
            except FieldError as error:
                error.path.append(f".{name}")
                raise
        return packed

    def unpack(self, source: Source) -> Any:
        """Read the fields and build the dataclass."""
        values: dict[str, Any] = {}
        for _ in range(source.items("map")):
            key = _read_key(source, values)
            if key not in self._nodes:
                raise FieldError(f"unknown key {key}", f"one of {', '.join(self._nodes)}")
            try:
                values[key] = self._nodes[key].unpack(source)
            except FieldError as error:
                error.path.append(f".{key}")
                raise
        missing = [name for name in self._nodes if name not in values]
        if missing:
            raise FieldError(f"without {', '.join(missing)}", f"every field of {self._cls.__name__}")
        return self._build(values)

    def _build(self, values: Mapping[str, Any]) -> Any:
        try:
            return self._cls(**values)
        except (UnikvError, ValueError, TypeError) as error:
            raise FieldError(str(error), f"a valid {self._cls.__name__}") from error


class ArrayNode:
    """A one-dimensional array. What is read is a copy: aligned, read-only, independent of the frame."""

    def __init__(self, dtype: np.dtype[Any]) -> None:
        self._native, self._wire = dtype, dtype.newbyteorder("<")

    def pack(self, value: Any, frames: list[Frame]) -> Any:
        """Append a copy of the elements to `frames` and return its length in bytes."""
        want = f"a one-dimensional {self._native} array of at most {MAX_ARRAY_BYTES} bytes"
        if not isinstance(value, np.ndarray):
            raise FieldError(type(value).__name__, want)
        if value.dtype != self._native or value.ndim != 1 or value.nbytes > MAX_ARRAY_BYTES:
            raise FieldError(f"{value.dtype}{list(value.shape)}", want)
        frames.append(value.astype(self._wire).tobytes())
        return value.nbytes

    def unpack(self, source: Source) -> Any:
        """Read a length and take the next frame."""
        frame = _next_frame(source, MAX_ARRAY_BYTES)
        if frame.nbytes % self._wire.itemsize:
            raise FieldError(f"{frame.nbytes} bytes", f"whole {self._native} elements")
        array = np.frombuffer(frame, dtype=self._wire).astype(self._native)
        array.flags.writeable = False
        return array


class PayloadNode:
    """Raw bytes. What is written and read is the memory itself, never a copy."""

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes

    def pack(self, value: Any, frames: list[Frame]) -> Any:
        """Append the memory to `frames` and return its length in bytes."""
        want = f"a contiguous memoryview of at most {self._max_bytes} bytes"
        if not isinstance(value, memoryview):
            raise FieldError(type(value).__name__, want)
        if not value.c_contiguous or value.nbytes > self._max_bytes:
            raise FieldError(f"memory of {value.nbytes} bytes", want)
        frames.append(value.cast("B") if value.nbytes else b"")
        return value.nbytes

    def unpack(self, source: Source) -> Any:
        """Read a length and return the next frame."""
        return _next_frame(source, self._max_bytes)


def _check_count(count: int) -> None:
    if count > MAX_ITEMS:
        raise FieldError(f"{count} items", f"at most {MAX_ITEMS} items")


def _read_key(source: Source, seen: Mapping[str, Any]) -> str:
    key: str = TEXT.unpack(source)
    if key in seen:
        raise FieldError(f"key {key} twice", "every key once")
    return key


def _next_frame(source: Source, max_bytes: int) -> memoryview:
    size = NON_NEGATIVE.unpack(source)
    frame = source.frame()
    if frame.nbytes != size or size > max_bytes:
        raise FieldError(f"a frame of {frame.nbytes} bytes", f"the announced {size} bytes, at most {max_bytes}")
    return frame
