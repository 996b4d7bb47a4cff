"""Moves step by step: direct and staged, with credits that run out, stops in the middle and copies that fail."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

import numpy as np
import pytest

from transfer.carrier_zmq import LinkSource
from transfer.copier import CopyJob, CopyTicket
from transfer.copy_host import HostCopier
from transfer.hello import CAPABILITY_NIXL, PathKind, Side
from transfer.link import Frame, SendTicket
from transfer.messages import Berth
from transfer.pages import PagePairs, pair_pages
from transfer.path_choice import choose_path
from transfer.paths import CREDITS, Batch, BatchQueue, CopyInFlight, DirectMove, MoveState, StagedMove
from transfer.plan import CopyProgram, compile_program
from transfer.staging import HostChunkPool
from transfer.testing.ranks import GatedCopier, SmallRank
from unikv.errors import CopyError, IncompatiblePeerError, LinkBrokenError

TOKENS = 40  # 10 blocks; the draft window leaves the last 6 live
WANTED_PAGES = [10, 6]


@pytest.fixture
def ranks() -> Iterator[tuple[SmallRank, SmallRank]]:
    pair = (SmallRank(Side.CONTEXT, "memory://c"), SmallRank(Side.GENERATION, "memory://g"))
    pair[0].fill(pair[0].table(TOKENS), TOKENS)
    yield pair
    for rank in pair:
        rank.close()


@pytest.fixture
def plan(ranks: tuple[SmallRank, SmallRank]) -> tuple[CopyProgram, list[PagePairs]]:
    context, generation = ranks
    program = compile_program(context.card, generation.card, with_draft=True)
    source, target = context.table(TOKENS), generation.table(TOKENS, 20)
    pages = [pair_pages(p, source[p.src_group], target[p.dst_group], TOKENS) for p in program.pairs]
    assert [len(page) for page in pages] == WANTED_PAGES
    return program, pages


class Wire:
    """Takes chunks as a link would; a test says when they have left."""

    def __init__(self) -> None:
        self.sent: list[tuple[Batch, bytes]] = []
        self.tickets: list[Wire.Ticket] = []
        self.refuses = False

    class Ticket:
        def __init__(self) -> None:
            self.left = False

        def done(self) -> bool:
            return self.left

    def send(self, batch: Batch, frame: Frame, berth: Berth | None = None) -> SendTicket:
        if self.refuses:
            raise LinkBrokenError("generation rank 0 is gone")
        self.sent.append((batch, bytes(frame)))
        self.tickets.append(Wire.Ticket())
        return self.tickets[-1]

    def leave(self) -> None:
        for ticket in self.tickets:
            ticket.left = True


class FailingCopier(HostCopier):
    """Fails at submission, or when asked whether it has landed."""

    def __init__(self, error: Exception, *, when: str) -> None:
        super().__init__()
        self._error, self._when = error, when

    def submit(self, job: CopyJob) -> CopyTicket:
        if self._when == "submit":
            raise self._error
        return self  # type: ignore[return-value]

    def done(self) -> bool:
        raise self._error


def direct(ranks: tuple[SmallRank, SmallRank], plan: tuple, copier: HostCopier, chunk_bytes: int = 1) -> DirectMove:
    context, generation = ranks
    program, pages = plan
    return DirectMove(
        program,
        pages,
        source=context.regions,
        destination=generation.regions,
        copier=copier,
        todo=BatchQueue(program, pages, chunk_bytes),
    )


def staged(
    ranks: tuple[SmallRank, SmallRank], plan: tuple, wire: Wire, pool: HostChunkPool, copier: HostCopier | None = None
) -> StagedMove:
    program, pages = plan
    return StagedMove(
        program,
        pages,
        source=ranks[0].regions,
        copier=copier or HostCopier(),
        carrier=LinkSource(pool),
        todo=BatchQueue(program, pages, pool.chunk_bytes),
        send=wire.send,
    )


def batches(program: CopyProgram, pages: Sequence[PagePairs], chunk_bytes: int) -> list[Batch]:
    queue, found = BatchQueue(program, pages, chunk_bytes), list[Batch]()
    while (batch := queue.take()) is not None:
        found.append(batch)
    assert queue.over
    return found


def run(move: DirectMove | StagedMove, limit: int = 100) -> list[MoveState]:
    """Step until the move waits or is done."""
    states = []
    while len(states) < limit:
        states.append(move.step())
        if states[-1] is not MoveState.RUNNING:
            return states
    raise AssertionError("the move never ends")


def account_of(move: DirectMove | StagedMove) -> list[tuple[int, int]]:
    return [(item.pages, item.bytes) for item in move.account()]


# --- batches ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("chunk_bytes", [1, 256, 257, 1000, 10**9])
def test_batches_cover_every_page_once_and_fit_the_chunk(plan: tuple, chunk_bytes: int) -> None:
    program, pages = plan
    cut = list(batches(program, pages, chunk_bytes))
    for number, pair in enumerate(program.pairs):
        mine = [batch for batch in cut if batch.pair == number]
        assert [page for batch in mine for page in range(batch.first, batch.first + batch.count)] == list(
            range(WANTED_PAGES[number])
        )
        for batch in mine:
            assert batch.bytes == batch.count * pair.page_bytes
            assert batch.bytes <= chunk_bytes or batch.count == 1  # a page is never split


# --- direct -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("chunk_bytes", [1, 600, 10**9])
def test_a_direct_move_brings_every_byte_to_its_place(ranks: tuple, plan: tuple, chunk_bytes: int) -> None:
    move = direct(ranks, plan, HostCopier(), chunk_bytes)
    states = run(move)
    assert states[-1] is MoveState.DONE and move.quiet
    assert len(states) - 1 == len(list(batches(*plan, chunk_bytes)))
    assert ranks[1].wrong_rows(ranks[1].table(TOKENS, 20), TOKENS) == 0
    assert account_of(move) == [(n, n * pair.page_bytes) for n, pair in zip(WANTED_PAGES, plan[0].pairs, strict=True)]
    assert move.step() is MoveState.DONE


def test_a_direct_move_waits_for_its_copy_and_is_not_quiet_meanwhile(ranks: tuple, plan: tuple) -> None:
    copier = GatedCopier(passing=2)
    move = direct(ranks, plan, copier)
    assert run(move) == [MoveState.RUNNING] * 3 + [MoveState.WAITING]
    assert not move.quiet and move.step() is MoveState.WAITING and copier.submitted == 3
    copier.open = True
    assert move.quiet and run(move)[-1] is MoveState.DONE


def test_a_stopped_direct_move_ends_with_its_running_copy(ranks: tuple, plan: tuple) -> None:
    copier = GatedCopier(passing=2)
    move = direct(ranks, plan, copier)
    run(move)
    move.stop()
    assert move.step() is MoveState.WAITING and not move.quiet
    copier.open = True
    assert move.step() is MoveState.DONE and move.quiet and copier.submitted == 3
    assert account_of(move)[0][0] == 3  # what was submitted, not what was planned


def test_credits_mean_nothing_to_a_direct_move(ranks: tuple, plan: tuple) -> None:
    move = direct(ranks, plan, HostCopier())
    move.credit(5)
    assert run(move)[-1] is MoveState.DONE


# --- staged -----------------------------------------------------------------------------------------------------------


def test_a_staged_move_stops_when_credits_run_out_and_goes_on_when_they_come_back(ranks: tuple, plan: tuple) -> None:
    wire, pool = Wire(), HostChunkPool(chunks=20, chunk_bytes=1)
    move = staged(ranks, plan, wire, pool)
    assert run(move) == [MoveState.RUNNING] * CREDITS + [MoveState.WAITING]
    assert len(wire.sent) == CREDITS and move.quiet
    move.credit(1)
    assert run(move) == [MoveState.RUNNING, MoveState.WAITING] and len(wire.sent) == CREDITS + 1
    move.credit(10**9)  # more than ever were out
    assert run(move) == [MoveState.RUNNING] * CREDITS + [MoveState.WAITING]
    for useless in (0, -7):
        move.credit(useless)
        assert move.step() is MoveState.WAITING
    while run(move)[-1] is MoveState.WAITING:
        move.credit(CREDITS)
    assert account_of(move) == [(n, n * pair.page_bytes) for n, pair in zip(WANTED_PAGES, plan[0].pairs, strict=True)]
    assert [(batch.pair, batch.first) for batch, _ in wire.sent] == [(0, n) for n in range(10)] + [
        (1, n) for n in range(6)
    ]
    assert all(len(payload) == batch.bytes for batch, payload in wire.sent)


def test_a_staged_move_waits_for_chunks_and_two_moves_share_them(ranks: tuple, plan: tuple) -> None:
    wire, pool = Wire(), HostChunkPool(chunks=3, chunk_bytes=1)
    first, second = staged(ranks, plan, wire, pool), staged(ranks, plan, wire, pool)
    assert run(first) == [MoveState.RUNNING] * 3 + [MoveState.WAITING]
    assert second.step() is MoveState.WAITING and pool.in_use == 3
    wire.leave()
    assert second.step() is MoveState.RUNNING and pool.in_use == 1


def test_a_page_larger_than_a_chunk_travels_whole(ranks: tuple, plan: tuple) -> None:
    wire, pool = Wire(), HostChunkPool(chunks=1, chunk_bytes=1)
    move = staged(ranks, plan, wire, pool)
    assert move.step() is MoveState.RUNNING
    (batch, payload) = wire.sent[0]
    assert batch.count == 1 and len(payload) == plan[0].pairs[0].page_bytes > 1


def test_a_staged_move_stopped_in_the_middle_sends_nothing_more_and_gives_its_chunk_back(
    ranks: tuple, plan: tuple
) -> None:
    wire, pool, copier = Wire(), HostChunkPool(chunks=4, chunk_bytes=1), GatedCopier(passing=2)
    move = staged(ranks, plan, wire, pool, copier)
    assert run(move) == [MoveState.RUNNING] * 2 + [MoveState.WAITING]
    move.stop()
    assert move.step() is MoveState.WAITING and not move.quiet and pool.in_use == 3
    copier.open = True
    assert move.step() is MoveState.DONE and move.quiet
    assert len(wire.sent) == 2 and account_of(move)[0][0] == 2
    wire.leave()
    assert pool.in_use == 0
    pool.check_integrity()


def test_a_link_that_refuses_a_chunk_gives_it_back(ranks: tuple, plan: tuple) -> None:
    wire, pool = Wire(), HostChunkPool(chunks=2, chunk_bytes=1)
    move = staged(ranks, plan, wire, pool)
    wire.refuses = True
    with pytest.raises(LinkBrokenError):
        move.step()
    assert pool.in_use == 0 and move.quiet and account_of(move)[0] == (0, 0)
    pool.check_integrity()


# --- copies that fail -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("when", ["submit", "done"])
@pytest.mark.parametrize(
    ("error", "quiet"),
    [
        (CopyError("refused", in_doubt=False), True),
        (CopyError("timed out", in_doubt=True), False),
        (OSError("nobody foresaw this"), False),
    ],
    ids=["refused", "in doubt", "unforeseen"],
)
@pytest.mark.parametrize("kind", ["direct", "staged"])
def test_a_failed_copy_is_quiet_only_where_that_is_certain(
    ranks: tuple, plan: tuple, kind: str, error: Exception, quiet: bool, when: str
) -> None:
    pool, copier = HostChunkPool(chunks=2, chunk_bytes=1), FailingCopier(error, when=when)
    move = direct(ranks, plan, copier) if kind == "direct" else staged(ranks, plan, Wire(), pool, copier)
    with pytest.raises(type(error), match=str(error)):
        run(move)
    assert move.quiet is quiet
    if kind == "staged":
        assert pool.in_use == (0 if quiet else 1)  # a chunk in doubt is never used again
    pool.check_integrity()


def test_asking_whether_it_is_quiet_does_not_swallow_a_failure() -> None:
    copy = CopyInFlight()
    copier = FailingCopier(CopyError("refused", in_doubt=False), when="done")
    copy.start(copier, None)  # type: ignore[arg-type]
    assert copy.quiet
    for _ in range(2):
        with pytest.raises(CopyError, match="refused"):
            copy.landed()


def test_what_is_gathered_is_what_the_pages_hold(ranks: tuple, plan: tuple) -> None:
    """The chunks, unpacked by definition: page after page, lane after lane."""
    wire, pool = Wire(), HostChunkPool(chunks=20, chunk_bytes=600)
    move = staged(ranks, plan, wire, pool)
    while run(move)[-1] is MoveState.WAITING:
        move.credit(CREDITS)
    program, pages = plan
    for number, pair in enumerate(program.pairs):
        payload = b"".join(data for batch, data in wire.sent if batch.pair == number)
        assert len(payload) == WANTED_PAGES[number] * pair.page_bytes
        assert sorted(payload) == sorted(_source_bytes(ranks[0], program, pages[number], number))


def _source_bytes(rank: SmallRank, program: CopyProgram, pages: PagePairs, number: int) -> Sequence[int]:
    found: list[int] = []
    for lane in (lane for lane in program.lanes if lane.pair == number):
        region = rank.regions[program.pairs[number].src_group][lane.src_pool]
        for slot, i, j in np.ndindex(len(pages), lane.outer.count, lane.inner.count):
            at = int(pages.src_slot[slot]) * region.slot_stride_bytes + lane.src_offset
            at += i * lane.outer.src_stride + j * lane.inner.src_stride
            found += region.memory[at : at + lane.run_bytes].tolist()
    return found


# --- choice -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("asked", "host", "want"),
    [
        (PathKind.AUTO, True, PathKind.DIRECT),
        (PathKind.DIRECT, True, PathKind.DIRECT),
        (PathKind.ZMQ, True, PathKind.ZMQ),
        (PathKind.AUTO, False, PathKind.ZMQ),
        (PathKind.DIRECT, False, None),
        (PathKind.NIXL, True, None),
    ],
)
def test_the_path_is_what_was_asked_for_or_an_error(asked: PathKind, host: bool, want: PathKind | None) -> None:
    context = SmallRank(Side.CONTEXT, "memory://c", path=asked)
    generation = SmallRank(Side.GENERATION, "memory://g", path=asked, **({} if host else {"host": None}))
    try:
        if want is None:
            with pytest.raises(IncompatiblePeerError, match=r"set transfer.path: auto"):
                choose_path(context.card, generation.card)
        else:
            path, reason = choose_path(context.card, generation.card)
            assert path is want and reason
    finally:
        context.close()
        generation.close()


@pytest.mark.parametrize(
    ("asked", "far", "have", "want", "says"),
    [
        (PathKind.NIXL, False, "both", PathKind.NIXL, "asked for"),
        (PathKind.NIXL, True, "both", PathKind.NIXL, "asked for"),
        (PathKind.NIXL, False, "context", None, "the generation rank 0 has no NIXL"),
        (PathKind.AUTO, True, "both", PathKind.NIXL, "different hosts"),
        (PathKind.AUTO, True, "generation", PathKind.ZMQ, "the context rank 0 has no NIXL"),
        (PathKind.AUTO, False, "both", PathKind.DIRECT, "can be mapped"),
    ],
)
def test_nixl_is_taken_where_it_is_asked_for_or_between_hosts(
    asked: PathKind, far: bool, have: str, want: PathKind | None, says: str
) -> None:
    ranks = [SmallRank(side, f"memory://{side}", path=asked) for side in Side]
    cards = []
    for rank in ranks:
        card = rank.card
        if have in ("both", card.side):
            card = replace(card, capabilities=(*card.capabilities, CAPABILITY_NIXL))
        if far and card.side is Side.GENERATION:
            assert card.host is not None
            card = replace(card, host=replace(card.host, boot_id="another"))
        cards.append(card)
    try:
        if want is None:
            with pytest.raises(IncompatiblePeerError, match=f"{says}.*set transfer.path: auto"):
                choose_path(cards[0], cards[1])
        else:
            path, reason = choose_path(cards[0], cards[1])
            assert path is want and says in reason
    finally:
        for rank in ranks:
            rank.close()
