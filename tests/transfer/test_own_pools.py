"""Pools of an engine's own: what may be described, what is refused, and bytes between all kinds of layouts."""

from __future__ import annotations

import logging
import secrets
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import product
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from transfer import ContextEndpoint, GenerationEndpoint, ParallelPosition, PathKind, Side
from transfer.cards import build_card
from transfer.copier import CopyJob
from transfer.copy_host import HostCopier
from transfer.gate import check
from transfer.hello import DraftKVMode, MemoryExport, RankCard, SpeculativeCard
from transfer.link_memory import MemoryNetwork
from transfer.own_pools import OwnLayer, OwnPools, RawTensor, shared_array
from transfer.pages import SlotArray, pair_pages
from transfer.paths import Regions
from transfer.peer_memory import local_regions, own_host_identity
from transfer.plan import compile_program
from unikv import KVCacheLayerSpec, KVDtype, KVLayout, LayerOwner, PoolBudget, ReusePolicy, UnifiedKVCacheManager
from unikv.errors import SpecError
from unikv.ids import NO_PAGE, GroupId, LayerId
from unikv.layout import build_layout
from unikv.ranges import Span, ceil_div, head_shard
from unikv.views import describe_views

HEADS, DIM, SLOTS, TOKENS = 4, 8, 12, 37
LAYERS = (
    (0, LayerOwner.TARGET, None),
    (1, LayerOwner.TARGET, None),
    (2, LayerOwner.DRAFT, 16),
)
"""(layer, owner, window) of the model that every layout here stores, as float16 of equal heads."""

KINDS = ("kv-first", "kv-inside", "hnd", "tokens", "layers-inside", "one-file")


def value(layer: int, role: int, head: int, token: int) -> NDArray[np.float16]:
    """Return what one head of one token of a layer holds: no two are alike."""
    number = ((layer * 2 + role) * HEADS + head) * TOKENS + token
    return (np.arange(DIM) + number).astype(np.uint16).view(np.float16)


@dataclass
class Store:
    """One rank's KV however stored: `kv[layer][role]` is an array ``[slots, tokens, heads, dim]`` over its memory."""

    card: RankCard
    regions: Regions
    kv: dict[int, list[NDArray[np.float16]]]
    heads: Span
    tokens_per_block: int
    groups: dict[int, GroupId]
    tables: dict[GroupId, SlotArray] = field(default_factory=dict)

    def rows(self, *, live: bool) -> Iterator[tuple[NDArray[np.float16], NDArray[np.float16]]]:
        """Yield every row of the prompt with what it must hold; only those that travel, if `live`."""
        for layer, _, window in LAYERS:
            table = self.tables[self.groups[layer]]
            for role, head, token in product(range(2), range(self.heads.lo, self.heads.hi), range(TOKENS)):
                if live and window is not None and token <= TOKENS - window:
                    continue
                slot, inside = table[token // self.tokens_per_block], token % self.tokens_per_block
                yield self.kv[layer][role][slot, inside, head - self.heads.lo], value(layer, role, head, token)


def own_store(
    kind: str,
    side: Side,
    *,
    tpb: int,
    tp: int = 1,
    rank: int = 0,
    address: str = "",
    path: PathKind = PathKind.AUTO,
    speculative: SpeculativeCard | None = None,
) -> tuple[Store, list[Any]]:
    """Return a rank whose layers are stored as engines of one kind do it, and what to close."""
    shard = head_shard(HEADS, tp, rank)
    local = len(shard.heads)
    layers, kv, shared = [], {}, []
    whole = None
    if kind == "one-file":
        bytes_per_layer = 2 * SLOTS * local * tpb * DIM * 2
        shared.append(shared_array(64 + len(LAYERS) * bytes_per_layer))
        whole = torch.frombuffer(shared[0].array, dtype=torch.float16)[32:]
    elif kind == "layers-inside":
        whole = torch.zeros(SLOTS, len(LAYERS), 2, tpb, local, DIM, dtype=torch.float16)
    for number, (layer, owner, window) in enumerate(LAYERS):
        axes: str
        tensors: Any
        if kind == "kv-first":
            tensors, axes = torch.zeros(2, SLOTS, tpb, local, DIM, dtype=torch.float16), "kv slots tokens heads dim"
            kv[layer] = [tensors[role].numpy() for role in range(2)]
        elif kind == "kv-inside":
            tensors, axes = np.zeros((SLOTS, 2, tpb, local, DIM), np.float16), "slots kv tokens heads dim"
            kv[layer] = [tensors[:, role] for role in range(2)]
        elif kind == "hnd":
            tensors = {role: np.zeros((SLOTS, local, tpb, DIM), np.float16) for role in ("key", "value")}
            axes = "slots heads tokens dim"
            kv[layer] = [array.transpose(0, 2, 1, 3) for array in tensors.values()]
        elif kind == "tokens":
            tensors = {r: torch.zeros(SLOTS * tpb, local, DIM, dtype=torch.float16) for r in ("key", "value")}
            axes = "tokens heads dim"
            kv[layer] = [tensor.numpy().reshape(SLOTS, tpb, local, DIM) for tensor in tensors.values()]
        elif kind == "layers-inside":
            assert whole is not None
            tensors, axes = whole[:, number], "slots kv tokens heads dim"
            kv[layer] = [tensors[:, role].numpy() for role in range(2)]
        else:
            assert whole is not None
            items = bytes_per_layer // 2
            tensors = whole[number * items : (number + 1) * items].view(2, SLOTS, local, tpb, DIM)
            axes = "kv slots heads tokens dim"
            kv[layer] = [tensors[role].numpy().transpose(0, 2, 1, 3) for role in range(2)]
        layers.append(
            OwnLayer(
                layer_id=layer,
                owner=owner,
                tensors=tensors,
                axes=axes,
                total_heads=HEADS,
                first_head=shard.heads.lo,
                window=window,
                reuse_policy=ReusePolicy.OPTIONAL if owner is LayerOwner.DRAFT else ReusePolicy.REQUIRED,
            )
        )
    pools = OwnPools(layers, tokens_per_block=tpb, position=ParallelPosition(tp=tp, tp_rank=rank), shared=shared)
    card = pools.card(
        side=side,
        instance=f"{side}-0",
        address=address,
        draft_kv=DraftKVMode.PER_VIEW,
        speculative=speculative or SPECULATIVE,
        path=path,
    )
    groups = {layer: pools.group_of(layer) for layer, _, _ in LAYERS}
    return Store(card, pools.regions(card), kv, shard.heads, tpb, groups), [*shared]


SPECULATIVE = SpeculativeCard(method="draft_model", max_draft_tokens=3, block_width=3, num_extra_kv_tokens=0)


def manager_store(
    side: Side, *, tpb: int, tp: int = 1, rank: int = 0, address: str = "", layout: KVLayout = KVLayout.HND
) -> tuple[Store, list[Any]]:
    """Return a rank of our own cache manager."""
    shard = head_shard(HEADS, tp, rank)
    manager = UnifiedKVCacheManager(
        [
            KVCacheLayerSpec(
                layer_id=LayerId(layer),
                owner=owner,
                num_kv_heads=len(shard.heads),
                total_num_kv_heads=HEADS,
                head_dim=DIM,
                dtype=KVDtype.FLOAT16,
                window=window,
                reuse_policy=ReusePolicy.OPTIONAL if owner is LayerOwner.DRAFT else ReusePolicy.REQUIRED,
            )
            for layer, owner, window in LAYERS
        ],
        tokens_per_block=tpb,
        max_seq_len=256,
        pool=PoolBudget(pages=SLOTS),
        kv_layout=layout,
    )
    card = build_card(
        manager.layout,
        side=side,
        position=ParallelPosition(tp=tp, tp_rank=rank),
        num_slots=SLOTS,
        incarnation=secrets.token_hex(16),
        instance=f"{side}-0",
        address=address,
        num_target_layers=2,
        num_draft_layers=1,
        speculative=SPECULATIVE,
        draft_kv=DraftKVMode.PER_VIEW,
        exports=[MemoryExport(kind="memfd", pid=e.pid, fd=e.fd, inode=e.inode) for e in manager.pools.exports() if e],
        host=own_host_identity(),
    )
    regions = local_regions(card, [manager.pools.numpy(number) for number in range(len(card.storages))])
    kv, groups = {}, {}
    for layer, _, _ in LAYERS:
        buffers = manager.get_buffers(LayerId(layer))
        assert buffers is not None
        order = (0, 2, 1, 3) if layout is KVLayout.HND else (0, 1, 2, 3)
        kv[layer] = [buffers[:, role].numpy().transpose(order) for role in range(2)]
        groups[layer] = manager.layer_group_id(LayerId(layer))
    return Store(card, regions, kv, shard.heads, tpb, groups), [manager]


def store(kind: str, side: Side, **fields: Any) -> tuple[Store, list[Any]]:
    if kind.startswith("manager"):
        return manager_store(side, layout=KVLayout.NHD if kind.endswith("nhd") else KVLayout.HND, **fields)
    return own_store(kind, side, **fields)


def give_tables(one: Store, seed: int) -> None:
    """Give every group shuffled slots for the prompt."""
    blocks = ceil_div(TOKENS, one.tokens_per_block)
    for number, group in enumerate(sorted(set(one.groups.values()))):
        order = np.random.default_rng([seed, number]).permutation(SLOTS - 1)[:blocks] + 1
        one.tables[group] = order.astype(np.int32)


def snapshot(one: Store) -> list[bytes]:
    return [np.ascontiguousarray(array).tobytes() for arrays in one.kv.values() for array in arrays]


def fill(one: Store) -> None:
    for row, want in one.rows(live=False):
        row[:] = want


def copy_all(contexts: Sequence[Store], generations: Sequence[Store]) -> None:
    """Move the prompt between all ranks with compiled programs, and no endpoint."""
    copier = HostCopier()
    for context, generation in product(contexts, generations):
        report = check(context.card, generation.card)
        assert report.compatible, report
        program = compile_program(context.card, generation.card, with_draft=True)
        for number, pair in enumerate(program.pairs):
            job = CopyJob(
                lanes=[lane for lane in program.lanes if lane.pair == number],
                source=context.regions[pair.src_group],
                destination=generation.regions[pair.dst_group],
                pages=pair_pages(pair, context.tables[pair.src_group], generation.tables[pair.dst_group], TOKENS),
            )
            assert copier.submit(job).done()


def check_rows(generation: Store) -> None:
    wrong = sum(not np.array_equal(row.view(np.uint16), w.view(np.uint16)) for row, w in generation.rows(live=True))
    assert wrong == 0


def check_nothing_else(generation: Store) -> None:
    """Slots that no table names are still zero."""
    for layer, group in generation.groups.items():
        free = sorted(set(range(SLOTS)) - set(generation.tables[group].tolist()))
        assert all(not np.asarray(array[free]).view(np.uint16).any() for array in generation.kv[layer])


@settings(max_examples=40)
@given(
    kinds=st.tuples(*[st.sampled_from([*KINDS, "manager-hnd", "manager-nhd"])] * 2),
    tpbs=st.sampled_from([(4, 4), (8, 8), (4, 8), (8, 4), (4, 16)]),
    tps=st.tuples(*[st.sampled_from([1, 2, 4, 8])] * 2),
    seed=st.integers(0, 2**16),
)
def test_bytes_are_right_between_any_two_layouts(
    kinds: tuple[str, str], tpbs: tuple[int, int], tps: tuple[int, int], seed: int
) -> None:
    made, closing = [], []
    for side, kind, tpb, tp in zip((Side.CONTEXT, Side.GENERATION), kinds, tpbs, tps, strict=True):
        ranks = [store(kind, side, tpb=tpb, tp=tp, rank=rank) for rank in range(tp)]
        closing += [thing for _, things in ranks for thing in things]
        made.append([one for one, _ in ranks])
        for one in made[-1]:
            give_tables(one, seed)
    try:
        for context in made[0]:
            fill(context)
        before = [snapshot(context) for context in made[0]]
        copy_all(*made)
        for generation in made[1]:
            check_rows(generation)
            check_nothing_else(generation)
        assert [snapshot(context) for context in made[0]] == before
    finally:
        made.clear()
        for thing in closing:
            thing.close()


PAIRS = [
    ("kv-first", "tokens", "zmq"),
    ("tokens", "kv-first", "zmq"),
    ("kv-first", "one-file", "direct"),
    ("one-file", "manager-hnd", "direct"),
    ("manager-nhd", "one-file", "direct"),
    ("manager-hnd", "kv-first", "zmq"),
]


@pytest.mark.parametrize(("context_kind", "generation_kind", "path"), PAIRS)
def test_endpoints_move_own_pools(context_kind: str, generation_kind: str, path: str) -> None:
    network = MemoryNetwork()
    links = [network.link(), network.link()]
    sent, sent_things = store(context_kind, Side.CONTEXT, tpb=8, address=links[0].address)
    got, got_things = store(generation_kind, Side.GENERATION, tpb=4, address=links[1].address)
    for one in (sent, got):
        give_tables(one, 5)
    fill(sent)
    try:
        with (
            ContextEndpoint(sent.card, link=links[0], regions=sent.regions, copier=HostCopier()) as context,
            GenerationEndpoint(got.card, link=links[1], regions=got.regions, copier=HostCopier()) as generation,
        ):
            instance = generation.connect([links[0].address])
            assert [(rank.path.value, rank.moves_bytes) for rank in instance.ranks] == [(path, True)]
            context.publish(3, sent.tables, TOKENS)  # type: ignore[arg-type]
            outcome = generation.receive(3, got.tables, TOKENS, instance=instance).wait(10)  # type: ignore[arg-type]
            assert outcome is not None and outcome.ok, outcome
        check_rows(got)
        check_nothing_else(got)
    finally:
        for thing in (*sent_things, *got_things):
            thing.close()
