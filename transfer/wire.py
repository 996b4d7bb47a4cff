"""The wire form of messages: a msgpack header, and behind it the raw frames of page tables and staged bytes.

::

    frame 0    [magic, protocol version, message type, incarnation, rank, {field: value, ...}]
    frame 1..  one per array or payload of the message, in the order in which the header announces them

`decode` turns any bytes whatsoever into a message or a RemoteProtocolError. Another family of messages gets the same
treatment from a `Codec` of its own, with a magic of its own.
"""

from __future__ import annotations

import typing
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final, Generic, TypeVar

import msgpack

from transfer.hello import PROTOCOL_VERSION
from transfer.link import Frame
from transfer.link_guard import MAX_FRAME_BYTES
from transfer.messages import Envelope, Message
from transfer.wire_schema import compile_record
from transfer.wire_values import MAX_TEXT_BYTES, NON_NEGATIVE, TEXT, FieldError, at
from unikv.errors import LocalProtocolError, RemoteProtocolError, SpecError, explain

MAGIC: Final = "unikv-transfer"
MAX_HEADER_BYTES: Final = 4 * 1024**2
"""Longest frame 0; the rank card of a model with hundreds of layers takes well under a tenth of it."""
MAX_PAYLOAD_BYTES: Final = MAX_FRAME_BYTES
"""Longest staged chunk, and so the longest frame of any message."""
MAX_FRAMES: Final = 1024
"""Most frames of one message: the header and a page table for every layer group."""

_HEADER_ITEMS: Final = 6
_DROPPED: Final = "the message is dropped; run the same release on both sides"
_M = TypeVar("_M")


@dataclass(frozen=True, slots=True, kw_only=True)
class Decoded(Generic[_M]):
    """A message of some family, with its sender."""

    incarnation: str
    rank: int
    message: _M


class Codec(Generic[_M]):
    """Encodes and decodes one family of messages. Holds no state between messages.

    Args:
        types: the message types, frozen dataclasses; `transfer.wire_schema` says what they may be made of.
        magic: tells this family from others and from strangers.
        version: both sides must have the same one.

    Raises:
        SpecError: a type has no wire form, or two types have one name.
    """

    def __init__(self, types: Sequence[type[_M]], *, magic: str, version: int = PROTOCOL_VERSION) -> None:
        self._magic, self._version = magic, version
        self._records = {cls.__name__: compile_record(cls, max_payload_bytes=MAX_PAYLOAD_BYTES) for cls in types}
        if len(self._records) != len(types):
            names = sorted(cls.__name__ for cls in types)
            raise SpecError(explain(f"codec {magic}", "message types", names, "one name each", "rename one of them"))

    def encode(self, message: _M, *, incarnation: str, rank: int) -> list[Frame]:
        """Return the frames of `message`; equal messages give equal bytes.

        Payloads are not copied: their memory must stay as it is until the link's ticket is done. Page tables are.

        Raises:
            LocalProtocolError: a field holds what cannot travel, or the message is too long.
        """
        name = type(message).__name__
        frames: list[Frame] = [b""]
        try:
            self._check_name(name)
            sender = at("incarnation", TEXT.pack, incarnation, frames), at("rank", NON_NEGATIVE.pack, rank, frames)
            body = self._records[name].pack(message, frames)
            frames[0] = msgpack.packb((self._magic, self._version, name, *sender, body))
            _check_sizes(frames)
        except FieldError as error:
            cure = "correct what this message is made from"
            raise LocalProtocolError(explain(f"message {name}", error.where, error.got, error.want, cure)) from None
        return frames

    def decode(self, frames: Sequence[Frame]) -> Decoded[_M]:
        """Return the message that `frames` hold. Payloads are the frames themselves, page tables read-only copies.

        Raises:
            RemoteProtocolError: anything else. The text names the message, the field, what was found and expected.
        """
        name = "from a peer"
        try:
            _check_sizes(frames)
            reader = _MessageReader(frames)
            name = self._open(reader)
            incarnation = at("incarnation", TEXT.unpack, reader)
            rank = at("rank", NON_NEGATIVE.unpack, reader)
            message = self._records[name].unpack(reader)
            reader.finish()
        except FieldError as error:
            raise RemoteProtocolError(
                explain(f"message {name}", error.where, error.got, error.want, _DROPPED)
            ) from error.__cause__
        return Decoded(incarnation=incarnation, rank=rank, message=message)

    def _open(self, reader: _MessageReader) -> str:
        """Read up to the message type and return it. The version comes before everything a version may change."""
        items = reader.items("array")
        at("magic", _require, reader, "text", self._magic)
        at("protocol version", _require, reader, "integer", self._version)
        if items != _HEADER_ITEMS:
            raise FieldError(f"a header of {items} items", f"a header of {_HEADER_ITEMS} items")
        name: str = at("type", TEXT.unpack, reader)
        self._check_name(name)
        return name

    def _check_name(self, name: str) -> None:
        if name not in self._records:
            raise FieldError(f"message type {name}", f"one of {', '.join(self._records)}")


_CODEC: Final[Codec[Message]] = Codec(typing.get_args(Message), magic=MAGIC)


def encode(envelope: Envelope) -> list[Frame]:
    """Return the frames of one transfer message; see `Codec.encode`."""
    return _CODEC.encode(envelope.message, incarnation=envelope.incarnation, rank=envelope.rank)


def decode(frames: Sequence[Frame]) -> Envelope:
    """Return the transfer message that `frames` hold; see `Codec.decode`."""
    decoded = _CODEC.decode(frames)
    return Envelope(incarnation=decoded.incarnation, rank=decoded.rank, message=decoded.message)


def _require(reader: _MessageReader, kind: str, want: object) -> None:
    got = reader.scalar(kind)
    if got != want:
        raise FieldError(got, repr(want))


def _check_sizes(frames: Sequence[Frame]) -> None:
    if not 1 <= len(frames) <= MAX_FRAMES:
        raise FieldError(f"{len(frames)} frames", f"1 to {MAX_FRAMES} frames")
    size = memoryview(frames[0]).nbytes
    if size > MAX_HEADER_BYTES:
        raise FieldError(f"a header of {size} bytes", f"at most {MAX_HEADER_BYTES} bytes")


_KIND_ENDS: Final = (
    (0x7F, "integer"),
    (0x8F, "map"),
    (0x9F, "array"),
    (0xBF, "text"),
    (0xC0, "nil"),
    (0xC1, "a byte unknown to msgpack"),
    (0xC3, "boolean"),
    (0xC6, "bytes"),
    (0xC9, "extension"),
    (0xCB, "float"),
    (0xD3, "integer"),
    (0xD8, "extension"),
    (0xDB, "text"),
    (0xDD, "array"),
    (0xDF, "map"),
    (0xFF, "integer"),
)
"""Kinds of msgpack values by the last first byte of each run (msgpack specification, table of formats)."""
_KINDS: Final = tuple(_KIND_ENDS[bisect_left(_KIND_ENDS, first, key=lambda end: end[0])][1] for first in range(256))


class _MessageReader:
    """A `Source` over the frames of one message."""

    def __init__(self, frames: Sequence[Frame]) -> None:
        self._header = bytes(frames[0])
        self._frames = [memoryview(frame).cast("B") for frame in frames[1:]]
        self._next_frame = 0
        self._unpacker: Any = msgpack.Unpacker(
            read_size=max(1, len(self._header)),
            max_buffer_size=MAX_HEADER_BYTES,
            max_str_len=MAX_TEXT_BYTES,
            max_bin_len=MAX_TEXT_BYTES,
            max_ext_len=0,
        )
        self._unpacker.feed(self._header)

    def kind(self) -> str:
        position = self._unpacker.tell()
        return _KINDS[self._header[position]] if position < len(self._header) else "the end of the header"

    def scalar(self, kind: str) -> Any:
        position = self._unpacker.tell()
        if position >= len(self._header) or _KINDS[self._header[position]] is not kind:
            self._expect(kind)
        try:
            return self._unpacker.unpack()
        except (msgpack.UnpackException, ValueError) as error:
            raise _broken_off(kind, error) from None

    def items(self, kind: str) -> int:
        self._expect(kind)
        enter = self._unpacker.read_array_header if kind == "array" else self._unpacker.read_map_header
        count: int = self._read(enter, kind)
        left = len(self._header) - self._unpacker.tell()
        if count > left:
            raise FieldError(f"{kind} of {count} items in {left} bytes", "a whole header")
        return count

    def frame(self) -> memoryview:
        if self._next_frame == len(self._frames):
            raise FieldError(f"{1 + len(self._frames)} frames", "a further frame, as the header announces")
        self._next_frame += 1
        return self._frames[self._next_frame - 1]

    def finish(self) -> None:
        left = len(self._header) - self._unpacker.tell()
        if left:
            raise FieldError(f"{left} further bytes", "the end of the header")
        if self._next_frame != len(self._frames):
            raise FieldError(f"{1 + len(self._frames)} frames", f"{1 + self._next_frame} frames")

    def _expect(self, kind: str) -> None:
        found = self.kind()
        if found != kind:
            raise FieldError(found, kind)

    def _read(self, read: Any, kind: str) -> Any:
        try:
            return read()
        except (msgpack.UnpackException, ValueError) as error:
            raise _broken_off(kind, error) from None


def _broken_off(kind: str, error: Exception) -> FieldError:
    return FieldError(f"{kind} that breaks off or is too long or no UTF-8 ({error})", f"a whole {kind}")
