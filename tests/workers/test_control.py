"""Control messages survive the journey, and their codec is not the transfer's."""

from __future__ import annotations

import typing
from dataclasses import fields

import pytest

from transfer import wire
from transfer.hello import Side
from transfer.messages import Cancel, Envelope, StageTimes
from unikv.errors import RemoteProtocolError
from unikv.ids import RequestId
from workers.control import (
    CODEC,
    Attach,
    ControlMessage,
    DecodeReport,
    DigestReport,
    EvidenceReport,
    GiveUp,
    LegRecord,
    PathReport,
    Proceed,
    PromptReport,
    Ready,
    RunDecode,
    RunPrompt,
    Stop,
)

EVIDENCE = EvidenceReport(
    checked_bytes=4096,
    mismatched_bytes=3,
    first_mismatch="layer 1 key head 0 token 9 holds zeros",
    digests=(
        DigestReport(layer=1, role="key", head=0, units=(0, 1, 7), sizes_bytes=(512, 512, 32), digests=bytes(24)),
    ),
)
MESSAGES: list[ControlMessage] = [
    Attach(reply_to="tcp://127.0.0.1:5000", owner=True),
    Ready(
        side=Side.GENERATION,
        rank=3,
        device="cpu",
        paths=(PathReport(context_rank=1, generation_rank=3, path="direct", reason="same host"),),
        draft_kv="shared",
    ),
    RunPrompt(request_id=RequestId(2**63 - 1), prompt=(1, 0, 151_000), prompt_tokens=3, verify=True),
    RunDecode(request_id=RequestId(1), prompt=(), prompt_tokens=900, max_new_tokens=32, verify=False),
    Proceed(request_id=RequestId(5)),
    GiveUp(request_id=RequestId(1), reason="context rank 0 died (signal SIGKILL)"),
    PromptReport(request_id=RequestId(1), rank=0, reason="", prefill_s=0.25, evidence=EVIDENCE),
    DecodeReport(
        request_id=RequestId(1),
        rank=1,
        reason="",
        usable_s=12.5,
        settle_s=0.001,
        verify_s=0.5,
        decode_s=2.0,
        tokens=(5, 6, 7),
        steps=2,
        proposed=10,
        accepted=1,
        accepted_lengths=(1, 0),
        legs=(
            LegRecord(
                peer=0, path="zmq", bytes=10, draft_bytes=2, times=StageTimes(queue_s=0.1, plan_s=0.2, move_s=0.3)
            ),
            LegRecord(peer=1, path="zmq", bytes=0, draft_bytes=0, times=None),
        ),
        evidence=EVIDENCE,
    ),
    DecodeReport(request_id=RequestId(4), rank=0, reason="timed out"),
    Stop(reason="the run is over"),
]


@pytest.mark.parametrize("message", MESSAGES, ids=lambda message: type(message).__name__)
def test_messages_survive_the_journey(message: ControlMessage) -> None:
    frames = CODEC.encode(message, incarnation="an incarnation", rank=2)
    arrived = CODEC.decode([memoryview(frame) for frame in frames])
    assert (arrived.incarnation, arrived.rank, arrived.message) == ("an incarnation", 2, message)


def test_every_kind_of_message_is_covered() -> None:
    assert {type(message) for message in MESSAGES} == set(typing.get_args(ControlMessage))
    for message in MESSAGES:
        assert fields(message), type(message)


def test_the_transfer_does_not_take_control_messages_and_control_takes_no_transfer() -> None:
    with pytest.raises(RemoteProtocolError, match="unikv-transfer"):
        wire.decode(CODEC.encode(Stop(reason="x"), incarnation="a", rank=0))
    cancel = Envelope(incarnation="a", rank=0, message=Cancel(request_id=RequestId(1), epoch=1, reason="x"))
    with pytest.raises(RemoteProtocolError, match="unikv-control"):
        CODEC.decode(wire.encode(cancel))


def test_a_side_that_does_not_exist_is_refused() -> None:
    frames = CODEC.encode(Ready(side=Side.CONTEXT, rank=0, device="cpu"), incarnation="a", rank=0)
    forged = [bytes(frame).replace(b"context", b"sideway") for frame in frames]
    with pytest.raises(RemoteProtocolError, match="sideway"):
        CODEC.decode(forged)
