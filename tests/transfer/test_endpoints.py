"""Both endpoints over the in-memory link and over ZeroMQ, both paths, real cards, real bytes."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import pytest

from transfer import AuxData, ContextEndpoint, GenerationEndpoint, TransferOptions
from transfer.cards import build_card
from transfer.copy_host import HostCopier
from transfer.hello import DraftKVMode, MemoryExport, ParallelPosition, PathKind, RankCard, Side, SpeculativeCard
from transfer.link import Link
from transfer.link_memory import MemoryNetwork
from transfer.link_zmq import ZmqLink
from transfer.outcome import TransferHandle
from transfer.peer_memory import local_regions, own_host_identity
from unikv.errors import IncompatiblePeerError, LocalProtocolError
from unikv.ids import GroupId, LayerId, RequestId
from unikv.layer_spec import KVCacheLayerSpec, KVDtype, KVLayout, LayerOwner, ReusePolicy
from unikv.layout import CacheLayout, build_layout
from unikv.ranges import head_shard, stage_layers

SLOTS = 64
SPECULATIVE = SpeculativeCard(method="draft_model", max_draft_tokens=3, block_width=3, num_extra_kv_tokens=2)


def layout_of(position: ParallelPosition, *, tokens_per_block: int = 8, target_heads: int = 8) -> CacheLayout:
    """Four target layers and two windowed draft layers of another shape, as this rank holds them."""
    specs = []
    for layer in range(*_bounds(stage_layers(4, position.pp, position.pp_rank))):
        shard = head_shard(target_heads, position.tp, position.tp_rank)
        specs.append(
            KVCacheLayerSpec(
                layer_id=LayerId(layer),
                owner=LayerOwner.TARGET,
                num_kv_heads=len(shard.heads),
                total_num_kv_heads=target_heads,
                head_dim=16,
                dtype=KVDtype.BFLOAT16,
            )
        )
    if position.pp_rank == position.pp - 1:
        shard = head_shard(4, position.tp, position.tp_rank)
        specs += [
            KVCacheLayerSpec(
                layer_id=LayerId(4 + draft),
                owner=LayerOwner.DRAFT,
                num_kv_heads=len(shard.heads),
                total_num_kv_heads=4,
                head_dim=32,
                dtype=KVDtype.FLOAT32,
                window=24,
                reuse_policy=ReusePolicy.OPTIONAL,
            )
            for draft in range(2)
        ]
    return build_layout(specs, tokens_per_block=tokens_per_block, max_seq_len=512, kv_layout=KVLayout.HND)


def _bounds(span: object) -> tuple[int, int]:
    return span.lo, span.hi  # type: ignore[attr-defined]


@dataclass
class Rank:
    """One rank of a test: its card and its memory."""

    card: RankCard
    layout: CacheLayout
    arrays: list[np.ndarray]
    link: Link
    fds: list[int]


class World:
    """Makes ranks and endpoints and closes them."""

    def __init__(self, kind: str, path: PathKind) -> None:
        self.network = MemoryNetwork() if kind == "memory" else None
        self.path = path
        self.open: list[ContextEndpoint | GenerationEndpoint] = []
        self.fds: list[int] = []

    def rank(self, side: Side, position: ParallelPosition, **card_fields: object) -> Rank:
        layout = layout_of(position)
        link: Link = self.network.link() if self.network else ZmqLink()
        exports, arrays = [], []
        for group in layout.groups:
            for pool in group.pools:
                size = SLOTS * pool.slot_bytes
                fd = os.memfd_create("unikv-test")
                os.ftruncate(fd, size)
                self.fds.append(fd)
                exports.append(MemoryExport(kind="memfd", pid=os.getpid(), fd=fd, inode=os.fstat(fd).st_ino))
                import mmap  # noqa: PLC0415

                arrays.append(np.frombuffer(mmap.mmap(fd, size), dtype=np.uint8))
        fields: dict[str, object] = {
            "speculative": SPECULATIVE,
            "draft_kv": DraftKVMode.PER_VIEW,
            "path": self.path,
            "num_target_layers": 4,
            "num_draft_layers": 2,
        } | card_fields
        card = build_card(
            layout,
            side=side,
            position=position,
            num_slots=SLOTS,
            incarnation=os.urandom(8).hex(),
            instance=f"{side}-0",
            address=link.address,
            exports=exports,
            host=own_host_identity(),
            **fields,  # type: ignore[arg-type]
        )
        return Rank(card, layout, arrays, link, [])

    def context(self, rank: Rank, **options: object) -> ContextEndpoint:
        return self._start(ContextEndpoint, rank, options)  # type: ignore[return-value]

    def generation(self, rank: Rank, **options: object) -> GenerationEndpoint:
        return self._start(GenerationEndpoint, rank, options)  # type: ignore[return-value]

    def _start(self, kind: type, rank: Rank, options: dict[str, object]) -> object:
        settings = TransferOptions(**({"chunk_bytes": 4096, "timeout_s": 20.0} | options))  # type: ignore[arg-type]
        endpoint = kind(
            rank.card,
            link=rank.link,
            regions=local_regions(rank.card, rank.arrays),
            copier=HostCopier(),
            options=settings,
        )
        self.open.append(endpoint)
        return endpoint

    def close(self) -> None:
        for endpoint in self.open:
            assert endpoint.close(drain_s=5.0)
        self.open.clear()
        for fd in self.fds:
            os.close(fd)


@pytest.fixture(params=[("memory", "direct"), ("memory", "zmq"), ("zmq", "direct"), ("zmq", "zmq")], ids="-".join)
def world(request: pytest.FixtureRequest) -> Iterator[World]:
    kind, path = request.param
    made = World(kind, PathKind(path))
    yield made
    made.close()


def tables(layout: CacheLayout, tokens: int, first_slot: int, *, full: bool = True) -> dict[GroupId, np.ndarray]:
    """Slots ``first_slot, first_slot + 1, ...`` for every block of a prompt, in every group."""
    return {
        group.group_id: np.arange(first_slot, first_slot - (-tokens // layout.tokens_per_block), dtype=np.int32)
        for group in layout.groups
    }


def byte_of(layer: int, role: str, head: int, token: int, dim: int) -> int:
    return (layer * 41 + (7 if role == "value" else 0) + head * 13 + token * 5 + dim * 3 + 1) % 251 + 1


def fill(rank: Rank, table: dict[GroupId, np.ndarray], tokens: int) -> None:
    """Write a pattern that names layer, role, head, token and byte into every page of `table`."""
    for where, head, token, offset, row in rows(rank, table, tokens):
        layer, role = where
        rank_array, at = offset
        rank_array[at : at + row] = [byte_of(layer, role, head, token, dim) for dim in range(row)]


def rows(rank: Rank, table: dict[GroupId, np.ndarray], tokens: int) -> Iterator[tuple]:
    """Yield ((layer, role), global head, token, (array, offset), row bytes) straight from the views (HND)."""
    for view in rank.card.views:
        pool = rank.card.pool(view.group_id, view.pool_index)
        for entry in view.entries:
            for token in range(tokens):
                slot = int(table[view.group_id][token // view.tokens_per_block])
                if slot < 0:
                    continue
                for index, head in enumerate(range(view.heads.lo, view.heads.hi)):
                    inside = (index * view.tokens_per_block + token % view.tokens_per_block) * view.row_bytes
                    at = slot * pool.slot_stride_bytes + entry.offset_bytes + inside
                    yield (entry.layer_id, entry.role), head, token, (rank.arrays[pool.storage], at), view.row_bytes


def wrong_rows(rank: Rank, table: dict[GroupId, np.ndarray], tokens: int, window_start: int) -> list[tuple]:
    """Return the rows that do not hold their own pattern; draft rows before the window are not looked at."""
    wrong = []
    for (layer, role), head, token, (array, at), row in rows(rank, table, tokens):
        if layer >= 4 and token < window_start:
            continue
        want = [byte_of(layer, role, head, token, dim) for dim in range(row)]
        if array[at : at + row].tolist() != want:
            wrong.append((layer, role, head, token))
    return wrong


TOPOLOGIES = {
    "tp1-tp1": ((1, 1), (1, 1)),
    "tp2-tp4": ((2, 1), (4, 1)),
    "tp4-tp1": ((4, 1), (1, 1)),
    "tp2pp2-tp1": ((2, 2), (1, 1)),
    "tp1-tp2pp2": ((1, 1), (2, 2)),
}


def positions(tp: int, pp: int) -> list[ParallelPosition]:
    return [ParallelPosition(tp=tp, tp_rank=t, pp=pp, pp_rank=p) for p in range(pp) for t in range(tp)]


@pytest.mark.parametrize("name", TOPOLOGIES)
@pytest.mark.parametrize("ask_first", [False, True], ids=["kv-first", "ask-first"])
def test_every_byte_arrives_and_pages_are_released(world: World, name: str, ask_first: bool) -> None:
    context_shape, generation_shape = TOPOLOGIES[name]
    contexts = [world.rank(Side.CONTEXT, position) for position in positions(*context_shape)]
    generations = [world.rank(Side.GENERATION, position) for position in positions(*generation_shape)]
    servers = [world.context(rank) for rank in contexts]
    clients = [world.generation(rank) for rank in generations]
    instances = [client.connect([rank.card.address for rank in contexts]) for client in clients]
    tokens, request_id, aux = 45, RequestId(2**40 + 7), AuxData(first_tokens=(5,), draft_tokens=(6, 7))
    sources = [tables(rank.layout, tokens, 1) for rank in contexts]
    targets = [tables(rank.layout, tokens, 20) for rank in generations]
    for rank, table in zip(contexts, sources, strict=True):
        fill(rank, table, tokens)

    sent: list[TransferHandle] = []
    if not ask_first:
        sent = [s.publish(request_id, t, tokens, aux) for s, t in zip(servers, sources, strict=True)]
    got = [
        client.receive(request_id, table, tokens, instance=instance)
        for client, table, instance in zip(clients, targets, instances, strict=True)
    ]
    if ask_first:
        sent = [s.publish(request_id, t, tokens, aux) for s, t in zip(servers, sources, strict=True)]

    for handle in [*got, *sent]:
        outcome = handle.wait(20)
        assert outcome is not None and outcome.ok, outcome
        assert handle.wait_quiet(5)
    assert {handle.outcome.aux for handle in got if handle.outcome} == {aux}
    for rank, table in zip(generations, targets, strict=True):
        assert wrong_rows(rank, table, tokens, window_start=24) == []


def test_the_two_sides_count_the_same_bytes(world: World) -> None:
    context, generation = (world.rank(side, ParallelPosition()) for side in (Side.CONTEXT, Side.GENERATION))
    server, client = world.context(context), world.generation(generation)
    instance = client.connect([context.card.address])
    sent = server.publish(RequestId(1), tables(context.layout, 40, 1), 40)
    got = client.receive(RequestId(1), tables(generation.layout, 40, 1), 40, instance=instance)
    (theirs,), (ours,) = (handle.wait(20).legs for handle in (sent, got))  # type: ignore[union-attr]
    # 5 blocks of 4 target layers; the draft window of 24 tokens leaves blocks 2, 3, 4 of 2 layers live
    assert ours.draft_bytes == 3 * 2 * 2 * 4 * 8 * 32 * 4
    assert ours.bytes == 5 * 4 * 2 * 8 * 8 * 16 * 2 + ours.draft_bytes
    assert (theirs.bytes, theirs.draft_bytes) == (ours.bytes, ours.draft_bytes)


def test_a_failed_prefill_is_heard_at_once_in_either_order(world: World) -> None:
    context, generation = (world.rank(side, ParallelPosition()) for side in (Side.CONTEXT, Side.GENERATION))
    server, client = world.context(context), world.generation(generation)
    instance = client.connect([context.card.address])
    early = client.receive(RequestId(1), tables(generation.layout, 9, 1), 9, instance=instance)
    for request_id in (1, 2):
        server.fail(RequestId(request_id), "the prompt is longer than the model")
    late = client.receive(RequestId(2), tables(generation.layout, 9, 5), 9, instance=instance)
    for handle in (early, late):
        outcome = handle.wait(5)
        assert outcome is not None and "the prompt is longer than the model" in outcome.reason
        assert handle.wait_quiet(5)


def test_cancel_before_the_kv_exists_releases_both_sides(world: World) -> None:
    context, generation = (world.rank(side, ParallelPosition()) for side in (Side.CONTEXT, Side.GENERATION))
    server, client = world.context(context), world.generation(generation)
    instance = client.connect([context.card.address])
    got = client.receive(RequestId(3), tables(generation.layout, 9, 1), 9, instance=instance)
    client.cancel(RequestId(3), "the user went away")
    assert got.wait_quiet(5) and got.outcome is not None and "the user went away" in got.outcome.reason
    sent = server.publish(RequestId(3), tables(context.layout, 9, 1), 9)
    assert sent.wait_quiet(5) and sent.outcome is not None and "the user went away" in sent.outcome.reason


def test_a_request_nobody_serves_times_out_and_is_released(world: World) -> None:
    context, generation = (world.rank(side, ParallelPosition()) for side in (Side.CONTEXT, Side.GENERATION))
    server, client = world.context(context), world.generation(generation, timeout_s=0.2)
    instance = client.connect([context.card.address])
    got = client.receive(RequestId(4), tables(generation.layout, 9, 1), 9, instance=instance)
    outcome = got.wait(5)
    assert outcome is not None and "timed out" in outcome.reason
    assert got.wait_quiet(5)
    assert server.close()


def test_pages_already_held_are_not_sent_and_a_full_hit_settles(world: World) -> None:
    context, generation = (world.rank(side, ParallelPosition()) for side in (Side.CONTEXT, Side.GENERATION))
    server, client = world.context(context), world.generation(generation)
    instance = client.connect([context.card.address])
    source, target = tables(context.layout, 16, 1), tables(generation.layout, 16, 1)
    none = {group: np.full_like(slots, -1) for group, slots in target.items()}
    sent = server.publish(RequestId(5), source, 16)
    got = client.receive(RequestId(5), none, 16, instance=instance)
    for handle in (got, sent):
        outcome = handle.wait(5)
        assert outcome is not None and outcome.ok and [leg.bytes for leg in outcome.legs] == [0]
        assert handle.wait_quiet(5)


def test_a_forged_page_table_is_refused_before_any_copy(world: World) -> None:
    context, generation = (world.rank(side, ParallelPosition()) for side in (Side.CONTEXT, Side.GENERATION))
    server, client = world.context(context), world.generation(generation)
    instance = client.connect([context.card.address])
    server.publish(RequestId(6), tables(context.layout, 9, 1), 9)
    for slots in ([0, 1], [1, 1], [1, SLOTS], [-2, 1]):
        table = {group.group_id: np.array(slots, dtype=np.int32) for group in generation.layout.groups}
        got = client.receive(RequestId(6), table, 9, instance=instance)
        outcome = got.wait(5)
        assert outcome is not None and "slot of ordinal" in outcome.reason
        assert got.wait_quiet(5)
    assert all(not array.any() for array in generation.arrays)


def test_an_incompatible_peer_hears_every_mismatch(world: World) -> None:
    context = world.rank(Side.CONTEXT, ParallelPosition())
    generation = world.rank(Side.GENERATION, ParallelPosition(), num_target_layers=5, checksum="page")
    world.context(context)
    client = world.generation(generation)
    with pytest.raises(IncompatiblePeerError) as refused:
        client.connect([context.card.address])
    assert "target_layers" in str(refused.value) and "checksum" in str(refused.value)


def test_one_request_id_is_used_once(world: World) -> None:
    context, generation = (world.rank(side, ParallelPosition()) for side in (Side.CONTEXT, Side.GENERATION))
    server, client = world.context(context), world.generation(generation)
    instance = client.connect([context.card.address])
    server.publish(RequestId(8), tables(context.layout, 9, 1), 9)
    with pytest.raises(LocalProtocolError, match="request 8"):
        server.publish(RequestId(8), tables(context.layout, 9, 1), 9)
    client.receive(RequestId(9), tables(generation.layout, 9, 1), 9, instance=instance)
    with pytest.raises(LocalProtocolError, match="request 9"):
        client.receive(RequestId(9), tables(generation.layout, 9, 1), 9, instance=instance)


def test_several_requests_are_asked_for_in_one_call(world: World) -> None:
    context, generation = (world.rank(side, ParallelPosition()) for side in (Side.CONTEXT, Side.GENERATION))
    server, client = world.context(context), world.generation(generation)
    instance = client.connect([context.card.address])
    work = [(RequestId(n), tables(generation.layout, 9, 20 + 2 * n), 9) for n in range(3)]
    for number in range(3):
        source = tables(context.layout, 9, 1 + 2 * number)
        fill(context, source, 9)
        server.publish(RequestId(number), source, 9)
    handles = client.receive_all(work, instance=instance)
    assert [handle.request_id for handle in handles] == [0, 1, 2]
    for handle, (_, table, _) in zip(handles, work, strict=True):
        outcome = handle.wait(20)
        assert outcome is not None and outcome.ok, outcome
        assert wrong_rows(generation, table, 9, window_start=0) == []


def test_of_several_requests_none_stays_open_where_one_is_refused(world: World) -> None:
    context, generation = (world.rank(side, ParallelPosition()) for side in (Side.CONTEXT, Side.GENERATION))
    world.context(context)
    client = world.generation(generation)
    instance = client.connect([context.card.address])
    table = tables(generation.layout, 9, 1)
    with pytest.raises(LocalProtocolError, match="request 4"):
        client.receive_all([(RequestId(4), table, 9), (RequestId(4), table, 9)], instance=instance)
    assert client.close(drain_s=10.0)
