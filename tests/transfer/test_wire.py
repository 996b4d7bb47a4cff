import dataclasses
import enum
import pickle
import tracemalloc
import types
import typing
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NewType

import msgpack
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from transfer import wire, wire_parts
from transfer.hello import DraftKVMode, GroupCard, ParallelPosition, PathKind, RankCard, Side
from transfer.link import Frame
from transfer.messages import (
    Ask,
    AuxData,
    Cancel,
    Chunk,
    Done,
    Envelope,
    Failed,
    Goodbye,
    GroupTable,
    Hello,
    Message,
    PairAccount,
    StageTimes,
)
from transfer.wire import MAGIC, MAX_FRAMES, MAX_HEADER_BYTES, Codec, decode, encode
from transfer.wire_values import MAX_TEXT_BYTES
from unikv.errors import LocalProtocolError, RemoteProtocolError, SpecError
from unikv.ids import RequestId
from unikv.layer_spec import KVLayout
from unikv.ranges import Span

ASK = Ask(
    request_id=RequestId(7),
    epoch=9,
    reply_to="tcp://h:1",
    prompt_tokens=41,
    tables=(
        GroupTable(group_id=0, slots=np.array([5, -1, 70_000], np.int32)),
        GroupTable(group_id=1, slots=np.array([], np.int32)),
    ),
)

# every message, built from its type hints


def values_of(hint: Any, name: str = "") -> st.SearchStrategy[Any]:
    """Strategy of one field: written apart from the codec, so that the two must agree about every type."""
    known: dict[Any, st.SearchStrategy[Any]] = {
        int: st.integers(0 if name in ("request_id", "epoch") else -(2**63), 2**63 - 1),
        float: st.floats(allow_nan=False, allow_infinity=False),
        str: st.text(st.characters(codec="utf-8"), max_size=30),
        bool: st.booleans(),
        bytes: st.binary(max_size=30),
        memoryview: st.binary(max_size=300).map(memoryview),
        NDArray[np.int32]: st.lists(st.integers(-(2**31), 2**31 - 1), max_size=9).map(lambda x: np.array(x, np.int32)),
        Span: st.tuples(*2 * [st.integers(0, 2**63 - 1)]).map(lambda ends: Span(min(ends), max(ends))),
    }
    if hint in known:
        return known[hint]
    if isinstance(hint, NewType):
        return st.integers(0, 2**63 - 1)
    if isinstance(hint, type) and issubclass(hint, enum.Enum):
        return st.sampled_from(hint)
    if dataclasses.is_dataclass(hint):
        return messages_of(hint)
    inner = [values_of(arg) for arg in typing.get_args(hint) if arg not in (Ellipsis, types.NoneType)]
    if typing.get_origin(hint) is tuple:
        return st.lists(inner[0], max_size=3).map(tuple)
    assert typing.get_origin(hint) is types.UnionType, hint
    return st.none() | st.one_of(inner)


def messages_of(cls: Any) -> st.SearchStrategy[Any]:
    hints = typing.get_type_hints(cls)
    return st.builds(cls, **{field.name: values_of(hints[field.name], field.name) for field in dataclasses.fields(cls)})


def envelopes_of(message: st.SearchStrategy[Any]) -> st.SearchStrategy[Envelope]:
    return st.builds(Envelope, incarnation=values_of(str), rank=st.integers(0, 2**31), message=message)


def plain(value: Any) -> Any:
    """What can be compared with ==, arrays and memory included."""
    if isinstance(value, np.ndarray):
        return (value.dtype.str, value.tolist())
    if isinstance(value, memoryview):
        return value.tobytes()
    if isinstance(value, tuple):
        return tuple(plain(item) for item in value)
    if dataclasses.is_dataclass(value):
        return (type(value), *[plain(getattr(value, field.name)) for field in dataclasses.fields(value)])
    return (type(value), value)


def copied(frames: Sequence[Frame]) -> list[bytes]:
    return [bytes(frame) for frame in frames]


MESSAGES = typing.get_args(Message)


@pytest.mark.parametrize("cls", MESSAGES, ids=lambda cls: cls.__name__)
def test_every_message_survives_the_trip(cls: type[Message]) -> None:
    @settings(max_examples=25)
    @given(envelopes_of(messages_of(cls)))
    def survives(envelope: Envelope) -> None:
        frames = copied(encode(envelope))
        assert plain(decode(frames)) == plain(envelope)
        assert copied(encode(decode(frames))) == frames  # one form only

    survives()


def test_the_bytes_of_a_message_are_these() -> None:
    header, first, second = encode(Envelope(incarnation="abc", rank=3, message=ASK))
    assert bytes(header) == (
        b"\x96\xaeunikv-transfer\x01\xa3Ask\xa3abc\x03"
        b"\x86\xaarequest_id\x07\xa5epoch\x09\xa8reply_to\xa9tcp://h:1\xadprompt_tokens\x29\xa6tables\x92"
        b"\x82\xa8group_id\x00\xa5slots\x0c\x82\xa8group_id\x01\xa5slots\x00\xa7landing\xc4\x00"
    )
    assert bytes(first) == b"\x05\x00\x00\x00\xff\xff\xff\xff\x70\x11\x01\x00"
    assert bytes(second) == b""


def test_enums_optionals_and_spans_have_plain_forms() -> None:
    done = Done(
        request_id=RequestId(1),
        epoch=2,
        account=(PairAccount(pair=0, pages=4, bytes=4096),),
        aux=AuxData(first_tokens=(11,), prompt_tokens=41),
        times=StageTimes(queue_s=0.5, plan_s=0.0, move_s=0.25),
    )
    body = msgpack.unpackb(encode(Envelope(incarnation="", rank=0, message=done))[0])[-1]
    assert body["account"] == [{"pair": 0, "pages": 4, "bytes": 4096}]
    assert body["aux"]["first_tokens"] == [11]
    assert body["times"]["queue_s"] == 0.5
    without = dataclasses.replace(done, aux=None)
    assert msgpack.unpackb(encode(Envelope(incarnation="", rank=0, message=without))[0])[-1]["aux"] is None


# frames behind the header


def test_decoded_page_tables_are_aligned_read_only_copies() -> None:
    header, *tables = copied(encode(Envelope(incarnation="", rank=0, message=ASK)))
    wire_memory = bytearray(b"\0" + tables[0])
    message = decode([header, memoryview(wire_memory)[1:], tables[1]]).message
    assert isinstance(message, Ask)
    wire_memory[:] = bytes(len(wire_memory))
    slots = message.tables[0].slots
    assert (slots.tolist(), slots.dtype, slots.flags.writeable, slots.flags.aligned) == (
        [5, -1, 70_000],
        np.dtype(np.int32),
        False,
        True,
    )


def test_page_tables_are_copied_when_encoded() -> None:
    slots = np.array([1, 2, 3], np.int32)
    message = dataclasses.replace(ASK, tables=(GroupTable(group_id=0, slots=slots[::2]),))
    frames = encode(Envelope(incarnation="", rank=0, message=message))
    slots[:] = 0
    assert bytes(frames[1]) == b"\x01\x00\x00\x00\x03\x00\x00\x00"


def test_payloads_are_never_copied() -> None:
    memory = bytearray(1000)
    frames = encode(Envelope(incarnation="", rank=0, message=chunk(memoryview(memory).cast("i"))))
    memory[0] = 1
    assert (memoryview(frames[1]).nbytes, frames[1][0]) == (1000, 1)
    received = bytearray(frames[1])
    message = decode([frames[0], memoryview(received)]).message
    received[0] = 2
    assert isinstance(message, Chunk)
    assert message.payload[0] == 2


def chunk(payload: Any) -> Chunk:
    return Chunk(request_id=RequestId(1), epoch=1, pair=0, first_page=0, pages=1, payload=payload)


# what is refused on the way out


def hello(card: Any = None) -> Hello:
    return Hello(card=card or small_card())


def small_card() -> RankCard:
    return RankCard(
        incarnation="i",
        instance="a",
        side=Side.CONTEXT,
        position=ParallelPosition(),
        address="",
        device="cpu",
        kv_layout=KVLayout.HND,
        tokens_per_block=32,
        num_target_layers=1,
        num_draft_layers=0,
        groups=(),
        storages=(),
        pools=(),
        views=(),
        speculative=None,
        draft_kv=DraftKVMode.AUTO,
        path=PathKind.AUTO,
    )


def cancel(request_id: Any, epoch: int = 1, reason: str = "") -> Cancel:
    return Cancel(request_id=request_id, epoch=epoch, reason=reason)


def ask(**changes: Any) -> Ask:
    return dataclasses.replace(ASK, **changes)


def table(slots: Any) -> GroupTable:
    return GroupTable(group_id=0, slots=slots)


@pytest.mark.parametrize(
    ("message", "words"),
    [
        (cancel(-1), "message Cancel: request_id is -1, expected a non-neg"),
        (cancel(1, epoch=2**63), "epoch is 9223372036854775808, expected a non-neg"),
        (cancel(1, reason="\ud800"), "reason is .*expected text of at most"),
        (cancel(1, reason="x" * (MAX_TEXT_BYTES + 1)), "reason is 'x{80}', expected"),
        (cancel(np.int64(1)), "request_id is .*1.*, expected a non-negative integer"),
        (cancel(True), "request_id is True, expected a non-negative integer"),
        (ask(prompt_tokens=2**63), "prompt_tokens is 9223372036854775808, expected a signed int"),
        (ask(tables=list(ASK.tables)), "tables is 'list', expected a tuple"),
        (
            ask(tables=(table(np.zeros(3, np.int64)),)),
            r"message Ask: tables\[0\].slots is 'int64\[3\]', expected a one-dimensional int32 array",
        ),
        (
            ask(tables=(ASK.tables[0], table([1]))),
            r"tables\[1\].slots is 'list', expected a one-dimensional int32 array",
        ),
        (ask(tables=ASK.tables * 512), "content is '1025 frames', expected 1 to 1024 frames"),
        (chunk(memoryview(bytes(9))[::2]), "payload is 'memory of 5 bytes', expected a contiguous memoryview"),
        (chunk(b"bytes"), "payload is 'bytes', expected a contiguous memoryview"),
        (StageTimes(queue_s=0, plan_s=0, move_s=0), "message type StageTimes'?, expected one of Hello, HelloAck"),
        (hello("me"), "message Hello: card is 'str', expected a RankCard"),
    ],
)
def test_what_cannot_travel_is_the_senders_error(message: Any, words: str) -> None:
    with pytest.raises(LocalProtocolError, match=words):
        encode(Envelope(incarnation="", rank=0, message=message))


@pytest.mark.parametrize("seconds", [float("nan"), float("inf"), True, "1"])
def test_times_are_finite_numbers(seconds: Any) -> None:
    done = Done(
        request_id=RequestId(1), epoch=1, account=(), aux=None, times=StageTimes(queue_s=seconds, plan_s=0, move_s=0)
    )
    with pytest.raises(LocalProtocolError, match=r"times\.queue_s is .*, expected a finite number"):
        encode(Envelope(incarnation="", rank=0, message=done))


def test_the_sender_is_checked_too() -> None:
    with pytest.raises(LocalProtocolError, match="message Goodbye: rank is -1, expected a non-negative integer"):
        encode(Envelope(incarnation="", rank=-1, message=Goodbye(reason="")))


# what is refused on the way in


def packed(*items: Any) -> bytes:
    return bytes(msgpack.packb(items))


def header(name: str, body: Any, **changes: Any) -> bytes:
    items = {"magic": MAGIC, "version": 1, "name": name, "incarnation": "abc", "rank": 3, "body": body, **changes}
    return packed(*items.values())


FAILED = {"request_id": 1, "epoch": 2, "reason": "why"}
CREDIT = {"request_id": 1, "epoch": 2, "chunks": 1}


def test_the_helpers_of_these_tests_make_good_messages() -> None:
    assert decode([header("Failed", FAILED)]).message == Failed(request_id=RequestId(1), epoch=2, reason="why")


@pytest.mark.parametrize(
    ("frames", "words"),
    [
        ([], "message from a peer: content is '0 frames', expected 1 to 1024 frames"),
        ([b""], "content is 'the end of the header', expected array"),
        ([b"\xc1"], "content is 'a byte unknown to msgpack', expected array"),
        ([b"\xc7\x08\xff" + bytes(8)], "content is 'extension', expected array"),
        ([packed()], "magic is 'the end of the header', expected text"),
        ([packed("other", 1)], "magic is 'other', expected 'unikv-transfer'"),
        ([packed(b"unikv-transfer", 1)], "magic is 'bytes', expected text"),
        ([packed(MAGIC)], "protocol version is 'the end of the header', expected integer"),
        ([packed(MAGIC, True)], "protocol version is 'boolean', expected integer"),
        ([packed(MAGIC, 2, "something new")], "protocol version is 2, expected 1; .*run the same release"),
        ([packed(MAGIC, 1, "Failed")], "content is 'a header of 3 items', expected a header of 6 items"),
        ([header("Mystery", {})], "content is 'message type Mystery', expected one of Hello, HelloAck"),
        ([header("Failed", FAILED, incarnation=7)], "message Failed: incarnation is 'integer', expected text"),
        ([header("Failed", FAILED, rank=-1)], "message Failed: rank is -1, expected a non-negative integer"),
        ([header("Failed", FAILED, rank=2**64 - 1)], "rank is 18446744073709551615, expected a non-negative integer"),
        ([header("Failed", FAILED) + b"\0"], "content is '1 further bytes', expected the end of the header"),
        ([header("Failed", FAILED), b""], "content is '2 frames', expected 1 frames"),
        ([header("Failed", [1, 2, "why"])], "content is 'array', expected map"),
        ([header("Failed", None)], "content is 'nil', expected map"),
        (
            [header("Failed", FAILED | {"extra": 1})],
            "content is 'unknown key extra', expected one of request_id, epoch",
        ),
        ([header("Failed", {"epoch": 1})], "content is 'without request_id, reason', expected every field of Failed"),
        ([header("Failed", FAILED | {1: 1})], "content is 'integer', expected text"),
        ([header("Failed", FAILED | {"epoch": -1})], "epoch is -1, expected a non-negative integer of 63 bits"),
        ([header("Failed", FAILED | {"epoch": 2**63})], "epoch is 9223372036854775808, expected a non-negative"),
        ([header("Failed", FAILED | {"epoch": 1.0})], "epoch is 'float', expected integer"),
        ([header("Failed", FAILED | {"epoch": False})], "epoch is 'boolean', expected integer"),
        ([header("Failed", FAILED | {"reason": b"why"})], "reason is 'bytes', expected text"),
        ([header("Failed", FAILED | {"reason": "x" * (MAX_TEXT_BYTES + 1)})], "reason is 'text that breaks off or is"),
        ([header("Failed", FAILED).replace(b"why", b"w\xffy")], "reason is .*no UTF-8.*expected a whole text"),
        ([header("Failed", FAILED)[:-1]], "reason is 'text that breaks off"),
        ([header("Credit", CREDIT | {"chunks": 2**63})], "chunks is 9223372036854775808, expected a signed integer"),
        ([b"\x96" + bytes(MAX_HEADER_BYTES)], f"expected at most {MAX_HEADER_BYTES} bytes"),
        ([header("Failed", FAILED)] + [b""] * MAX_FRAMES, "content is '1025 frames', expected 1 to 1024"),
    ],
)
def test_what_is_no_message_is_the_peers_error(frames: list[bytes], words: str) -> None:
    with pytest.raises(RemoteProtocolError, match=words):
        decode(frames)


def test_a_key_given_twice_is_refused() -> None:
    twice = header("Failed", FAILED).replace(b"\x83", b"\x84").replace(b"\xa5epoch\x02", b"\xa5epoch\x02\xa5epoch\x03")
    with pytest.raises(RemoteProtocolError, match="content is 'key epoch twice', expected every key once"):
        decode([twice])


def test_an_unknown_enum_value_names_the_legal_ones() -> None:
    frames = [b"", *encode(Envelope(incarnation="", rank=0, message=hello()))]
    bad = bytes(frames[1]).replace(b"\xa4side\xa7context", b"\xa4side\xa7nowhere")
    with pytest.raises(RemoteProtocolError, match=r"card\.side is 'nowhere', expected one of context, generation"):
        decode([bad])


def test_a_value_the_dataclass_refuses_is_the_peers_error() -> None:
    codec = Codec((Ranges,), magic="ranges")
    frames = codec.encode(Ranges(spans=(Span(0, 2), Span(1, 3))), incarnation="", rank=0)
    bad = bytes(frames[0]).replace(b"\xa2lo\x01\xa2hi\x03", b"\xa2lo\x09\xa2hi\x03")
    with pytest.raises(RemoteProtocolError, match=r"message Ranges: spans\[1\] is .*\(9, 3\).*, expected a valid Span"):
        codec.decode([bad])


@pytest.mark.parametrize(
    ("size", "frame", "words"),
    [
        (12, b"x" * 8, r"tables\[0\]\.slots is 'a frame of 8 bytes', expected the announced 12 bytes"),
        (6, b"x" * 6, r"tables\[0\]\.slots is '6 bytes', expected whole int32 elements"),
        (-4, b"x" * 4, r"tables\[0\]\.slots is -4, expected a non-negative integer"),
        ([1, 2, 3], b"x" * 12, r"tables\[0\]\.slots is 'array', expected integer"),
        (12, None, r"tables\[0\]\.slots is '1 frames', expected a further frame"),
    ],
)
def test_a_page_table_must_be_the_frame_that_was_announced(size: Any, frame: bytes | None, words: str) -> None:
    body = {"request_id": 1, "epoch": 2, "prompt_tokens": 3, "tables": [{"group_id": 0, "slots": size}]}
    with pytest.raises(RemoteProtocolError, match=words):
        decode([header("Ask", body), *([] if frame is None else [frame])])


def test_page_tables_and_payloads_have_limits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wire_parts, "MAX_ARRAY_BYTES", 8)
    body = {"request_id": 1, "epoch": 2, "prompt_tokens": 3, "tables": [{"group_id": 0, "slots": 12}]}
    with pytest.raises(RemoteProtocolError, match="a frame of 12 bytes', expected the announced 12 bytes, at most 8"):
        decode([header("Ask", body), bytes(12)])
    monkeypatch.setattr(wire, "MAX_PAYLOAD_BYTES", 10)
    codec = Codec((Chunk,), magic="small")
    with pytest.raises(LocalProtocolError, match=r"payload is 'memory of 11 bytes', expected .* at most 10 bytes"):
        codec.encode(chunk(memoryview(bytes(11))), incarnation="", rank=0)


# any bytes at all

GOOD = [
    copied(encode(Envelope(incarnation="me", rank=1, message=message))) for message in (ASK, chunk(memoryview(b"xyz")))
]


def decode_or_refuse(frames: Sequence[bytes]) -> None:
    try:
        envelope = decode(frames)
    except RemoteProtocolError as error:
        assert len(str(error)) < 2000
    else:
        assert isinstance(envelope.message, MESSAGES)


@given(st.lists(st.binary(max_size=200), max_size=4))
def test_random_bytes_end_in_a_protocol_error(frames: list[bytes]) -> None:
    decode_or_refuse(frames)


@given(st.data(), st.sampled_from(GOOD))
def test_damaged_messages_end_in_a_protocol_error(data: st.DataObject, good: list[bytes]) -> None:
    frames = [bytearray(frame) for frame in good]
    for _ in range(data.draw(st.integers(1, 3))):
        frame = data.draw(st.sampled_from([frame for frame in frames if frame] or [bytearray(1)]))
        place = data.draw(st.integers(0, len(frame) - 1))
        match data.draw(st.sampled_from(["flip", "cut", "insert"])):
            case "flip":
                frame[place] ^= 1 << data.draw(st.integers(0, 7))
            case "cut":
                del frame[place:]
            case "insert":
                frame[place:place] = data.draw(st.binary(max_size=6))
    decode_or_refuse([bytes(frame) for frame in frames])


PLAIN = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63), 2**64 - 1) | st.floats() | st.text() | st.binary(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text() | st.sampled_from(sorted(FAILED)), inner),
    max_leaves=12,
)


@given(PLAIN, st.sampled_from([cls.__name__ for cls in MESSAGES]))
def test_bodies_of_another_shape_end_in_a_protocol_error(body: Any, name: str) -> None:
    decode_or_refuse([header(name, body)])


@pytest.mark.parametrize(
    "blob",
    [
        pickle.dumps({"a": [1, 2, 3]}),
        b"\x81\xa1a" * 100_000,
        b"\x91" * 1_000_000,
        header("Failed", FAILED)[:-4] + b"\xdb\xff\xff\xff\xff",
        header("Done", {})[:-1] + b"\xdf\xff\xff\xff\xff",
        header("Ask", {"tables": []})[:-1] + b"\xdd\x7f\xff\xff\xff",
        header("Failed", FAILED)[:-4] + b"\xc6\xff\xff\xff\xff",
        header("Failed", FAILED)[:-4] + b"\xc9\xff\xff\xff\xff\x01",
    ],
    ids=["pickle", "deep maps", "deep arrays", "long text", "long map", "long array", "long bytes", "long extension"],
)
def test_hostile_headers_are_refused_without_building_anything(blob: bytes) -> None:
    tracemalloc.start()
    try:
        with pytest.raises(RemoteProtocolError):
            decode([blob])
        peak_bytes = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak_bytes < 3 * len(blob) + 100_000


def test_arrays_of_too_many_items_are_refused() -> None:
    body = {"request_id": 1, "epoch": 2, "account": [], "aux": {"first_tokens": [0] * (wire_parts.MAX_ITEMS + 1)}}
    with pytest.raises(
        RemoteProtocolError, match=r"aux\.first_tokens is '1048577 items', expected at most 1048576 items"
    ):
        decode([header("Done", body)])


# codecs of other families

Ticks = NewType("Ticks", int)


class Phase(enum.StrEnum):
    EARLY = "early"
    LATE = "late"


@dataclass(frozen=True, slots=True, kw_only=True)
class Ranges:
    spans: tuple[Span, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    phase: Phase
    ticks: Ticks
    limits: Mapping[str, int]
    pair: tuple[str, bool]
    digest: bytes
    card: GroupCard | None
    history: NDArray[np.float64]


def report() -> Report:
    return Report(
        phase=Phase.LATE,
        ticks=Ticks(2**63 - 1),
        limits={"b": -1, "a": 2},
        pair=("x", True),
        digest=b"\x00\xff",
        card=None,
        history=np.array([1.5, -2.5]),
    )


def test_another_family_has_its_own_magic_and_version() -> None:
    codec: Codec[Report | Ranges] = Codec((Report, Ranges), magic="family", version=4)
    frames = copied(codec.encode(report(), incarnation="me", rank=2))
    decoded = codec.decode(frames)
    assert (decoded.incarnation, decoded.rank) == ("me", 2)
    message = decoded.message
    assert isinstance(message, Report)
    assert message.history.tolist() == [1.5, -2.5]
    assert plain(message)[1:-1] == plain(report())[1:-1]
    with pytest.raises(RemoteProtocolError, match="magic is 'family', expected 'unikv-transfer'"):
        decode(frames)
    with pytest.raises(RemoteProtocolError, match="protocol version is 4, expected 5"):
        Codec((Report, Ranges), magic="family", version=5).decode(frames)


def test_mappings_are_written_in_the_order_of_their_keys() -> None:
    codec = Codec((Report,), magic="family")
    other = dataclasses.replace(report(), limits={"a": 2, "b": -1})
    assert codec.encode(report(), incarnation="", rank=0) == codec.encode(other, incarnation="", rank=0)


def test_mappings_and_fixed_tuples_are_checked() -> None:
    codec = Codec((Report,), magic="family")
    good = bytes(codec.encode(report(), incarnation="", rank=0)[0])
    for change, words in [
        ((b"\xa1a\x02\xa1b\xff", b"\xa1a\x02\xa1a\xff"), "limits is 'key a twice'"),
        ((b"\xa1a\x02", b"\xa1a\xc0"), r"limits\['a'\] is 'nil', expected integer"),
        ((b"\x92\xa1x\xc3", b"\x91\xa1x"), "pair is '1 items', expected 2 items"),
        ((b"\x92\xa1x\xc3", b"\x92\xa1x\x01"), r"pair\[1\] is 'integer', expected boolean"),
    ]:
        with pytest.raises(RemoteProtocolError, match=words):
            codec.decode([good.replace(*change), bytes(16)])


@pytest.mark.parametrize(
    "hint",
    [list[int], dict[int, int], int | str, object, complex, np.ndarray, Mapping[int, int], enum.IntEnum("E", "A B")],
    ids=str,
)
def test_types_without_a_wire_form_are_refused_when_the_codec_is_made(hint: Any) -> None:
    cls = dataclasses.make_dataclass("Odd", [("field", hint)], frozen=True)
    with pytest.raises(SpecError, match=r"message Odd: type of field is .*, expected a type that has a wire form"):
        Codec((cls,), magic="odd")


def test_messages_that_contain_themselves_are_refused() -> None:
    with pytest.raises(SpecError, match="type is 'Nest', expected a dataclass that does not contain itself"):
        Codec((Nest,), magic="nest")


def test_two_messages_of_one_name_are_refused() -> None:
    with pytest.raises(SpecError, match=r"message types is .*, expected one name each"):
        Codec((Ranges, dataclasses.make_dataclass("Ranges", [("x", int)])), magic="twice")


@dataclass(frozen=True)
class Nest:
    inner: "Nest | None"
