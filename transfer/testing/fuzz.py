"""What no peer may bring about, in a form a fuzzer can drive: decoders fed any bytes, engines fed forged messages.

`scripts/fuzz.py` drives these with atheris, and tests with hypothesis. Nothing here chooses anything by itself.
"""

from __future__ import annotations

import typing
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, Final

import numpy as np

from transfer import wire
from transfer.context_engine import ContextEngine
from transfer.copy_host import HostCopier
from transfer.exchange import Exchange
from transfer.generation_engine import GenerationEngine
from transfer.hello import PathKind, Side
from transfer.link_memory import MemoryLink, MemoryNetwork
from transfer.messages import (
    Ask,
    AuxData,
    Cancel,
    CancelAck,
    Chunk,
    Credit,
    Done,
    Envelope,
    Failed,
    Goodbye,
    GroupTable,
    Hello,
    Message,
    PairAccount,
    Reregister,
    StageTimes,
    Withdraw,
)
from transfer.options import TransferOptions
from transfer.outcome import TransferHandle
from transfer.testing.ranks import SmallRank
from unikv.errors import InternalError, LinkBrokenError, LocalProtocolError, RemoteProtocolError
from unikv.ids import RequestId

TIMEOUT_S: Final = 30.0
MAX_TOKENS: Final = 40
REQUESTS: Final = 6
_NO_TIME: Final = StageTimes(queue_s=0.0, plan_s=0.0, move_s=0.0)


def check_frames(frames: Sequence[bytes]) -> bool:
    """Decode `frames`; return whether they were a message.

    Raises:
        AssertionError: a message that does not survive a round trip. Anything else but a RemoteProtocolError, which
            counts as refused, goes through.
    """
    try:
        envelope = wire.decode(frames)
    except RemoteProtocolError as error:
        assert str(error)
        return False
    again = [bytes(frame) for frame in wire.encode(envelope)]
    assert [bytes(frame) for frame in wire.encode(wire.decode(again))] == again
    return True


def seed_messages() -> list[list[bytes]]:
    """Return the frames of one sound message of every kind a fuzzer should start from."""
    with_card = SmallRank(Side.GENERATION, "memory://seed")
    try:
        messages: list[Message] = [Hello(card=with_card.card), *_plain_messages()]
        return [
            [bytes(frame) for frame in wire.encode(Envelope(incarnation="ab" * 8, rank=0, message=message))]
            for message in messages
        ]
    finally:
        with_card.close()


def _plain_messages() -> list[Message]:
    request, epoch = RequestId(1), 7
    table = GroupTable(group_id=0, slots=np.array([1, -1, 3], np.int32))
    account = (PairAccount(pair=0, pages=1, bytes=64),)
    return [
        Ask(request_id=request, epoch=epoch, reply_to="memory://seed", prompt_tokens=9, tables=(table,)),
        Chunk(request_id=request, epoch=epoch, pair=0, first_page=0, pages=1, payload=memoryview(bytes(64))),
        Credit(request_id=request, epoch=epoch, chunks=1),
        Done(request_id=request, epoch=epoch, account=account, aux=AuxData(first_tokens=(5,)), times=_NO_TIME),
        Failed(request_id=request, epoch=epoch, reason="no"),
        Cancel(request_id=request, epoch=epoch, reason="enough"),
        CancelAck(request_id=request, epoch=epoch),
        Withdraw(request_id=request, epoch=epoch),
        Reregister(reason="who are you"),
        Goodbye(reason="bye"),
    ]


class _Clock:
    def __init__(self) -> None:
        self.now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


class _Node:
    """One engine, with its rank and link."""

    def __init__(self, side: Side, path: PathKind, network: MemoryNetwork, clock: _Clock) -> None:
        self.link: MemoryLink = network.link()
        self.rank = SmallRank(side, self.link.address, path=path)
        kind = ContextEngine if side is Side.CONTEXT else GenerationEngine
        options = TransferOptions(chunk_bytes=1, timeout_s=TIMEOUT_S)
        self.engine: Any = kind(self.link, self.rank.card, self.rank.regions, HostCopier(), options, clock)

    @property
    def exchange(self) -> Exchange:
        """What its engine says things with; messages sent here are forged in its name."""
        return typing.cast(Exchange, self.engine._exchange)


class ForgeryDriver:
    """Two honest engines and two that also forge, all registered with one another; every choice comes from outside.

    Args:
        choose: returns an integer between two others, both included.
        take: returns at most so many bytes.
    """

    def __init__(self, choose: Callable[[int, int], int], take: Callable[[int], bytes]) -> None:
        self._choose, self._take = choose, take
        self._clock, network = _Clock(), MemoryNetwork()
        path = PathKind.ZMQ if choose(0, 1) else PathKind.DIRECT
        self.context, self._false_context = (_Node(Side.CONTEXT, path, network, self._clock) for _ in range(2))
        self.generation, self._false_generation = (_Node(Side.GENERATION, path, network, self._clock) for _ in range(2))
        self._nodes = [self.context, self.generation, self._false_context, self._false_generation]
        self.handles: list[TransferHandle] = []
        for array in self.context.rank.arrays:
            array[:] = 7
        for context in (self.context, self._false_context):
            self.generation.engine.register(context.link.address)
        self._false_generation.engine.register(self.context.link.address)
        self._turn_all(4)
        self._steps = (
            self._turn,
            self._turn,
            self._publish,
            self._receive,
            self._give_up,
            self._pass_time,
            self._forge_to_context,
            self._forge_to_generation,
            self._forge_to_generation,
            self._send_bytes,
        )

    def step(self) -> None:
        """Do one thing."""
        self._steps[self._choose(0, len(self._steps) - 1)]()

    def check(self) -> None:
        """Let everything end; then nothing may be open, no handler may have failed, no foreign page have changed.

        Raises:
            InternalError: one of these is not so.
        """
        for _ in range(3):
            self._turn_all(200)
            self._clock.now_s += TIMEOUT_S + 1
        self._turn_all(200)
        failed = [node.rank.card.side for node in self._nodes[:2] if node.exchange.refused["internal"]]
        undecided = [handle.request_id for handle in self.handles if handle.outcome is None]
        slots = self.generation.rank.arrays[0].reshape(64, -1)  # pages 50.. are nobody's
        if failed or undecided or slots[50:].any():
            raise InternalError(f"handlers failed: {failed}; open: {undecided}; foreign bytes: {slots[50:].any()}")

    def close(self) -> None:
        """Free everything."""
        for node in self._nodes:
            node.engine.close()
            node.link.close()
            node.rank.close()

    # --- honest steps -------------------------------------------------------------------------------------------------

    def _turn(self) -> None:
        self._nodes[self._choose(0, 3)].engine.turn(0.0)

    def _turn_all(self, rounds: int) -> None:
        """Turn every engine until all are idle, `rounds` times at most."""
        for _ in range(rounds):
            mail = [bool(node.link._inbox) for node in self._nodes]
            busy = [node.engine.turn(0.0) for node in self._nodes]
            if not any(mail) and not any(busy) and not any(node.link._inbox for node in self._nodes):
                return

    def _publish(self) -> None:
        node, tokens = self._nodes[2 * self._choose(0, 1)], self._tokens()
        handle = TransferHandle(self._request())
        self._try(lambda: node.engine.publish(handle, node.rank.table(tokens, 1), tokens, None), handle)

    def _receive(self) -> None:
        whom, tokens, handle = self._nodes[2 * self._choose(0, 1)], self._tokens(), TransferHandle(self._request())
        table = self.generation.rank.table(tokens, 20)
        self._try(lambda: self.generation.engine.receive(handle, table, tokens, [whom.link.address]), handle)

    def _give_up(self) -> None:
        if self._choose(0, 1):
            self.context.engine.fail(self._request(), "no more")
        else:
            self.generation.engine.cancel(self._request(), "no more")

    def _pass_time(self) -> None:
        self._clock.now_s += (0.01, 1.0, TIMEOUT_S + 1)[self._choose(0, 2)]

    def _try(self, call: Callable[[], None], handle: TransferHandle) -> None:
        """Do what a caller may do; an id that is used twice, or a peer that is gone, is told to it."""
        try:
            call()
        except (LocalProtocolError, LinkBrokenError):
            return
        self.handles.append(handle)

    # --- forgeries ----------------------------------------------------------------------------------------------------

    def _forge_to_context(self) -> None:
        request, epoch, reason = self._request(), self._epoch(), "forged"
        card = self._false_generation.rank.card
        messages: list[Message] = [
            Ask(
                request_id=request,
                epoch=epoch,
                reply_to=card.address,
                prompt_tokens=self._number(),
                tables=self._tables(),
            ),
            Cancel(request_id=request, epoch=epoch, reason=reason),
            Withdraw(request_id=request, epoch=epoch),
            Credit(request_id=request, epoch=epoch, chunks=self._number()),
            Goodbye(reason=reason),
            Hello(card=replace(card, draft_kv=card.draft_kv)),
            Failed(request_id=request, epoch=epoch, reason=reason),
        ]
        self._say(self._false_generation, self.context, messages)

    def _forge_to_generation(self) -> None:
        request, epoch, reason = self._request(), self._epoch(), "forged"
        payload = memoryview(self._take(self._choose(0, 300)))
        pair, first, pages = self._choose(0, 3), self._number(), self._number()
        account = tuple(
            PairAccount(pair=number, pages=self._number(), bytes=self._number()) for number in range(self._choose(0, 3))
        )
        aux = AuxData(
            first_tokens=(self._number(),), draft_tokens=(1,) * self._choose(0, 5), prompt_tokens=self._number()
        )
        messages: list[Message] = [
            Chunk(request_id=request, epoch=epoch, pair=pair, first_page=first, pages=pages, payload=payload),
            Done(request_id=request, epoch=epoch, account=account, aux=aux, times=_NO_TIME),
            Failed(request_id=request, epoch=epoch, reason=reason),
            CancelAck(request_id=request, epoch=epoch),
            Reregister(reason=reason),
            Goodbye(reason=reason),
            Cancel(request_id=request, epoch=epoch, reason=reason),
        ]
        self._say(self._false_context, self.generation, messages)

    def _say(self, sender: _Node, receiver: _Node, messages: Sequence[Message]) -> None:
        message = messages[self._choose(0, len(messages) - 1)]
        try:
            sender.exchange.send(receiver.link.address, message)
        except LocalProtocolError:
            return  # a field that cannot travel

    def _send_bytes(self) -> None:
        target = self._nodes[self._choose(0, 1)]
        frames = [self._take(self._choose(0, 60)) for _ in range(self._choose(1, 4))]
        sender = self._false_context if target is self.generation else self._false_generation
        if self._choose(0, 1):  # sound up to here
            frames[0] = seed_messages()[self._choose(0, 10)][0]
        sender.exchange.post(target.link.address, frames)

    # --- values -------------------------------------------------------------------------------------------------------

    def _request(self) -> RequestId:
        return RequestId(self._choose(1, REQUESTS))

    def _tokens(self) -> int:
        return self._choose(1, MAX_TOKENS)

    def _epoch(self) -> int:
        """Return an epoch that is in use, or one that never was."""
        known = [request.session.epoch for request in self.generation.engine._requests.values()]
        number = self._choose(0, len(known))
        return int(known[number]) if number < len(known) else self._choose(0, 3)

    def _number(self) -> int:
        return (0, 1, 2, 9, 40, -1, 2**31, 2**62)[self._choose(0, 7)]

    def _tables(self) -> tuple[GroupTable, ...]:
        return tuple(
            GroupTable(
                group_id=self._choose(0, 3),
                slots=np.array([self._choose(-2, 70) for _ in range(self._choose(0, 12))], np.int32),
            )
            for _ in range(self._choose(0, 3))
        )
