"""The receiver's books: which chunks are taken, which accounts are believed."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np
import pytest

from transfer.carrier_zmq import LinkSource
from transfer.copier import CopyJob, CopyTicket
from transfer.copy_host import HostCopier
from transfer.delivery import Delivery
from transfer.gate import check
from transfer.generation_peers import ContextPeer, accept
from transfer.hello import PathKind, Side
from transfer.messages import Chunk, HelloAck, PairAccount
from transfer.pages import pair_pages
from transfer.paths import CREDITS, Batch, BatchQueue, StagedMove
from transfer.plan import compile_program
from transfer.staging import HostChunkPool
from transfer.testing.ranks import GatedCopier, SmallRank
from unikv.errors import CopyError, LocalProtocolError, RemoteProtocolError
from unikv.ids import RequestId

TOKENS = 40  # 10 target pages, 6 draft pages


@dataclass
class Case:
    context: SmallRank
    generation: SmallRank
    peer: ContextPeer
    delivery: Delivery
    chunks: list[Chunk]

    @property
    def account(self) -> tuple[PairAccount, ...]:
        sizes = [pair.page_bytes for pair in self.peer.program.pairs]
        return tuple(PairAccount(pair=n, pages=p, bytes=p * sizes[n]) for n, p in enumerate((10, 6)))

    def scatter(self, chunk: Chunk, copier: HostCopier | None = None) -> None:
        self.delivery.scatter(chunk, self.generation.regions, copier or HostCopier())


@pytest.fixture(params=[PathKind.ZMQ])
def case(request: pytest.FixtureRequest) -> Iterator[Case]:
    context = SmallRank(Side.CONTEXT, "memory://c", path=request.param)
    generation = SmallRank(Side.GENERATION, "memory://g", path=request.param)
    context.fill(context.table(TOKENS), TOKENS)
    program = compile_program(context.card, generation.card, with_draft=True)
    ack = HelloAck(
        card=context.card,
        report=check(context.card, generation.card),
        digest=program.digest,
        path=request.param,
        path_reason="asked for",
    )
    peer = accept(generation.card, "memory://c", ack)
    target = generation.table(TOKENS, 20)
    delivery = Delivery(peer, target, TOKENS)
    yield Case(context, generation, peer, delivery, list(chunks_of(context, peer, target)))
    context.close()
    generation.close()


def chunks_of(context: SmallRank, peer: ContextPeer, target: dict) -> Iterator[Chunk]:
    source = context.table(TOKENS)
    pages = [pair_pages(p, source[p.src_group], target[p.dst_group], TOKENS) for p in peer.program.pairs]
    made: list[Chunk] = []

    def send(batch: Batch, payload: object, berth: object = None) -> object:
        data = memoryview(bytes(payload))  # type: ignore[arg-type]
        made.append(replace(NO_CHUNK, pair=batch.pair, first_page=batch.first, pages=batch.count, payload=data))
        return type("Sent", (), {"done": lambda self: True})()

    move = StagedMove(
        peer.program,
        pages,
        source=context.regions,
        copier=HostCopier(),
        carrier=LinkSource(HostChunkPool(chunks=1, chunk_bytes=1000)),
        todo=BatchQueue(peer.program, pages, 1000),
        send=send,  # type: ignore[arg-type]
    )
    while move.step().name != "DONE":
        move.credit(CREDITS)
    return iter(made)


def test_all_chunks_and_a_true_account_make_a_whole_request(case: Case) -> None:
    for chunk in case.chunks:
        case.scatter(chunk)
    assert case.delivery.landed() and case.delivery.take_landed() == len(case.chunks) > 2
    assert case.delivery.take_landed() == 0
    assert case.delivery.audit(case.account) == ""
    assert case.generation.wrong_rows(case.generation.table(TOKENS, 20), TOKENS) == 0
    draft = case.account[1].bytes
    assert (case.delivery.bytes, case.delivery.draft_bytes) == (case.account[0].bytes + draft, draft)


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("short", "9 pages"),
        ("long", "11 pages"),
        ("other bytes", "10 pages, 1 bytes"),
        ("one pair only", "none"),
        ("nothing", "none"),
        ("a pair twice", "10 pages"),
        ("unknown pair", "unknown group pairs [2]"),
        ("negative pair", "unknown group pairs [-1]"),
    ],
)
def test_a_wrong_account_is_not_believed(case: Case, name: str, says: str) -> None:
    for chunk in case.chunks:
        case.scatter(chunk)
    first, second = case.account
    size = first.bytes // first.pages
    account = {
        "short": (replace(first, pages=9, bytes=9 * size), second),
        "long": (replace(first, pages=11, bytes=11 * size), second),
        "other bytes": (replace(first, bytes=1), second),
        "one pair only": (first,),
        "nothing": (),
        "a pair twice": (first, first, second),
        "unknown pair": (first, second, replace(second, pair=2)),
        "negative pair": (first, second, replace(second, pair=-1)),
    }[name]
    wrong = case.delivery.audit(account)
    assert "coverage" in wrong and says in wrong


def test_an_account_of_bytes_that_never_came_is_not_believed(case: Case) -> None:
    for chunk in case.chunks[:-1]:
        case.scatter(chunk)
    assert "pages received" in case.delivery.audit(case.account)


def wrong_chunks(chunk: Chunk) -> dict[str, tuple[Chunk, str]]:
    longer = memoryview(bytes(chunk.payload) + b"!")
    return {
        "a pair that does not exist": (replace(chunk, pair=2), "group pair is 2"),
        "a negative pair": (replace(chunk, pair=-1), "group pair is -1"),
        "a negative page": (replace(chunk, first_page=-1), "range is 'pages [-1,"),
        "a page too far": (replace(chunk, first_page=1), "range is 'pages [1,"),
        "no pages": (replace(chunk, pages=0), "range is 'pages [0, 0)'"),
        "negative pages": (replace(chunk, pages=-3), "range is 'pages [0, -3)'"),
        "too many pages": (replace(chunk, pages=11), "range is 'pages [0, 11)'"),
        "a payload too long": (replace(chunk, payload=longer), "payload bytes"),
        "a payload too short": (replace(chunk, payload=longer[:-2]), "payload bytes"),
        "no payload": (replace(chunk, payload=memoryview(b"")), "payload bytes is 0"),
    }


NO_CHUNK = Chunk(request_id=RequestId(7), epoch=1, pair=0, first_page=0, pages=1, payload=memoryview(b""))


@pytest.mark.parametrize("name", wrong_chunks(NO_CHUNK))
def test_a_wrong_chunk_is_refused_and_nothing_is_written(case: Case, name: str) -> None:
    wrong, says = wrong_chunks(case.chunks[0])[name]
    with pytest.raises(RemoteProtocolError) as refused:
        case.scatter(wrong)
    assert says in str(refused.value) and "request 7 from context rank 0" in str(refused.value)
    assert not case.generation.touched() and case.delivery.take_landed() == 0
    case.scatter(case.chunks[0])  # the right one is still welcome


def test_chunks_of_one_pair_come_in_order_and_once(case: Case) -> None:
    first, second = case.chunks[:2]
    with pytest.raises(RemoteProtocolError, match="a range from 0 up to 10"):
        case.scatter(second)
    case.scatter(first)
    with pytest.raises(RemoteProtocolError, match=f"a range from {first.pages} up to 10"):
        case.scatter(first)


@pytest.mark.parametrize("case", [PathKind.DIRECT], indirect=True)
def test_a_peer_on_the_direct_path_may_send_no_chunks_and_only_accounts(case: Case) -> None:
    with pytest.raises(RemoteProtocolError, match="path is 'direct'"):
        case.scatter(case.chunks[0])
    assert not case.generation.touched()
    assert case.delivery.audit(case.account) == ""


def test_pages_that_are_not_wanted_are_not_expected(case: Case) -> None:
    table = case.generation.table(TOKENS, 20)
    for slots in table.values():
        slots[:8] = -1
    delivery = Delivery(case.peer, table, TOKENS)
    want = tuple(replace(item, pages=2, bytes=2 * item.bytes // item.pages) for item in case.account)
    assert delivery.audit(want) != ""  # two pages of each pair are due, none came
    assert delivery.bytes == sum(item.bytes for item in want)
    nothing = Delivery(case.peer, {}, TOKENS)
    assert nothing.bytes == 0 and nothing.audit(tuple(replace(item, pages=0, bytes=0) for item in want)) == ""


def test_a_table_that_ends_before_the_prompt_is_our_callers_mistake(case: Case) -> None:
    short = {group: np.arange(1, 4, dtype=np.int32) for group in case.generation.table(TOKENS)}
    with pytest.raises(LocalProtocolError, match="length of the generation page table is 3"):
        Delivery(case.peer, short, TOKENS)


def test_a_chunk_has_landed_when_its_copy_says_so(case: Case) -> None:
    copier = GatedCopier(passing=1)
    for chunk in case.chunks[:3]:
        case.scatter(chunk, copier)
    assert not case.delivery.landed() and not case.delivery.quiet
    assert case.delivery.take_landed() == 1
    copier.open = True
    assert case.delivery.quiet and case.delivery.take_landed() == 2


@pytest.mark.parametrize(
    ("error", "in_doubt"),
    [
        (CopyError("it broke", in_doubt=False), False),
        (CopyError("it broke", in_doubt=True), True),
        (OSError("it broke"), True),
    ],
)
def test_a_copy_that_fails_later_fails_the_audit(case: Case, error: Exception, in_doubt: bool) -> None:
    class Failing(HostCopier):
        def submit(self, job: CopyJob) -> CopyTicket:
            return self  # type: ignore[return-value]

        def done(self) -> bool:
            raise error

    case.scatter(case.chunks[0], Failing())
    assert case.delivery.landed()  # nothing more is to be waited for
    assert "a chunk of context rank 0 was not copied: it broke" in case.delivery.audit(case.account)
    assert case.delivery.in_doubt is in_doubt and case.delivery.quiet is not in_doubt
    assert case.delivery.take_landed() == 0
