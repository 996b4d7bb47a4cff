"""Compiles frozen dataclasses into codecs of their fields, from type hints alone.

=========================  ==============================================================================
type hint                  in the header
=========================  ==============================================================================
dataclass                  map of its fields by name, all of them, nothing else
X | None                   nil, or X
tuple, Mapping[str, X]     array, map
enum with text values      the value
int                        integer of 64 bits; a NewType of int, `request_id` and `epoch` are never negative
float, str, bytes, bool    the same; floats are finite
NDArray of a fixed dtype   its length in bytes; the elements follow as a frame of their own, little-endian
memoryview                 its length in bytes; the bytes follow as a frame of their own, uncopied
=========================  ==============================================================================

Reading is driven by the types: a value is looked at before it is read, so what a peer sends can neither nest deeper
than our own types nor make us build anything they do not ask for.
"""

from __future__ import annotations

import dataclasses
import types
import typing
from collections.abc import Mapping
from enum import Enum
from typing import Any, Final, NewType

import numpy as np

from transfer.wire_parts import ArrayNode, MappingNode, OptionalNode, PayloadNode, Record, TupleNode
from transfer.wire_values import BOOLEAN, BYTES, FLOAT, INTEGER, NON_NEGATIVE, TEXT, EnumNode, Node
from unikv.errors import SpecError, explain

NON_NEGATIVE_FIELDS: Final = frozenset({"request_id", "epoch"})
_SCALARS: Final[Mapping[Any, Node]] = {bool: BOOLEAN, int: INTEGER, float: FLOAT, str: TEXT, bytes: BYTES}


def compile_record(cls: type, *, max_payload_bytes: int) -> Record:
    """Return the codec of dataclass `cls`.

    Args:
        cls: a dataclass whose fields have types of the table above.
        max_payload_bytes: longest memoryview.

    Raises:
        SpecError: a field whose type has no wire form, or a dataclass inside itself.
    """
    return _RecordCompiler(max_payload_bytes).record(cls)


class _NoWireForm(Exception):  # noqa: N818 - not an error by itself: `record` names the field it is about
    pass


class _RecordCompiler:
    def __init__(self, max_payload_bytes: int) -> None:
        self._payload = PayloadNode(max_payload_bytes)
        self._open: list[type] = []

    def record(self, cls: type) -> Record:
        if not dataclasses.is_dataclass(cls) or cls in self._open:
            want = "a dataclass that does not contain itself"
            raise SpecError(explain("message", "type", cls.__name__, want, "flatten the message"))
        self._open.append(cls)
        hints = typing.get_type_hints(cls)
        nodes = {field.name: self._field(cls, field.name, hints[field.name]) for field in dataclasses.fields(cls)}
        self._open.pop()
        return Record(cls, nodes)

    def _field(self, cls: type, name: str, hint: Any) -> Node:
        if hint is int and name in NON_NEGATIVE_FIELDS:
            return NON_NEGATIVE
        try:
            return self._node(hint)
        except _NoWireForm:
            want = "a type that has a wire form"
            cure = "use dataclasses, tuples, enums with text values and scalars"
            raise SpecError(explain(f"message {cls.__name__}", f"type of {name}", hint, want, cure)) from None

    def _node(self, hint: Any) -> Node:
        if hint in _SCALARS:
            return _SCALARS[hint]
        if hint is memoryview:
            return self._payload
        if isinstance(hint, NewType):
            return NON_NEGATIVE if hint.__supertype__ is int else self._node(hint.__supertype__)
        if isinstance(hint, type) and issubclass(hint, Enum) and all(isinstance(item.value, str) for item in hint):
            return EnumNode(hint)
        if isinstance(hint, type) and dataclasses.is_dataclass(hint):
            return self.record(hint)
        return self._generic(typing.get_origin(hint), typing.get_args(hint))

    def _generic(self, origin: Any, args: tuple[Any, ...]) -> Node:
        if origin is np.ndarray:
            return ArrayNode(np.dtype(typing.get_args(args[-1])[0]))
        # From numpy 2.5 on NDArray is a lazy alias of its own kind, whose argument is the element type.
        if typing.get_origin(getattr(origin, "__value__", None)) is np.ndarray:
            return ArrayNode(np.dtype(args[0]))
        if origin in (types.UnionType, typing.Union):
            inner = [arg for arg in args if arg is not types.NoneType]
            if len(inner) == 1:
                return OptionalNode(self._node(inner[0]))
        if origin is Mapping and args[0] is str:
            return MappingNode(self._node(args[1]))
        if origin is tuple:
            nodes = [self._node(arg) for arg in args if arg is not Ellipsis]
            return TupleNode(nodes, fixed=args[-1:] != (Ellipsis,))
        raise _NoWireForm
