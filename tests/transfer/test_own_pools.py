"""Pools of an engine's own: what may be described, what is refused, and bytes between all kinds of layouts."""

from __future__ import annotations

import gc
import logging
import secrets
import weakref
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
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
from transfer.peer_memory import PeerMemory, local_regions, own_host_identity
from transfer.plan import compile_program
from unikv import KVCacheLayerSpec, KVDtype, KVLayout, LayerOwner, PoolBudget, ReusePolicy, UnifiedKVCacheManager
from unikv.errors import LocalProtocolError, RemoteProtocolError, SpecError
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


# --- what is refused -------------------------------------------------------------------------------------------------

BLOCK = 4


def layer(tensors: Any = None, axes: Any = "kv slots tokens heads dim", **fields: Any) -> OwnLayer:
    tensors = np.zeros((2, 5, BLOCK, 2, DIM), np.float16) if tensors is None else tensors
    return OwnLayer(**({"layer_id": 3, "owner": LayerOwner.TARGET, "tensors": tensors, "axes": axes} | fields))


def zeros(*shape: int, dtype: Any = np.float16) -> NDArray[Any]:
    return np.zeros(shape, dtype)


def refusal(*layers: OwnLayer, **fields: Any) -> str:
    with pytest.raises(SpecError) as caught:
        OwnPools(layers, **({"tokens_per_block": BLOCK} | fields))
    return str(caught.value)


PAGE = (5, BLOCK, 2, DIM)
KV_SHAPE = (2, *PAGE)
PAGE_BYTES = BLOCK * 2 * DIM * 2


@pytest.mark.parametrize(
    ("broken", "parts"),
    [
        pytest.param(
            layer(zeros(2, 5, BLOCK, 2, DIM + 1)[..., :DIM][..., ::2]),
            ("layer 3", "stride of axis dim in bytes is 4", "expected 2", "rows must be contiguous"),
            id="rows-with-gaps",
        ),
        pytest.param(
            layer(zeros(2, 5, BLOCK, 4, DIM)[:, :, :, ::2]),
            ("layer 3", "strides of axes (heads, tokens) in bytes is (32, 64)", "(16, 32)", "without gaps"),
            id="heads-with-gaps",
        ),
        pytest.param(
            layer(zeros(2, 5, 2, BLOCK + 1, DIM)[:, :, :, :BLOCK], "kv slots heads tokens dim"),
            ("layer 3", "strides of axes (heads, tokens) in bytes is (80, 16)", "(64, 16)", "without gaps"),
            id="tokens-with-gaps",
        ),
        pytest.param(
            layer(zeros(5 * BLOCK, 2, 2, DIM), "tokens kv heads dim"),
            ("layer 3", "strides of axes (heads, tokens) in bytes is (16, 64)", "K and V tensors"),
            id="key-and-value-per-token",
        ),
        pytest.param(
            layer(np.broadcast_to(zeros(2, 1, BLOCK, 2, DIM), KV_SHAPE)),
            ("layer 3", "stride of axis slots in bytes is 0", f">= {PAGE_BYTES}", "pages overlap"),
            id="broadcast",
        ),
        pytest.param(
            layer(zeros(*KV_SHAPE)[:, ::-1]), ("layer 3", "strides in bytes", ">= 0", "without flips"), id="flipped"
        ),
        pytest.param(
            layer(zeros(5 * BLOCK + 1, 2, DIM), "tokens heads dim"),
            ("layer 3", "length of axis tokens is 21", "a multiple of tokens_per_block=4", "whole pages"),
            id="tokens-that-do-not-divide",
        ),
        pytest.param(
            layer(zeros(2, 5, 8, 2, DIM)),
            ("layer 3", "length of axis tokens is 8", "tokens_per_block=4", "the engine's page size"),
            id="another-page-size",
        ),
        pytest.param(
            layer(zeros(3, *PAGE)),
            ("layer 3", "length of axis kv is 3", "1 (key) or 2", "in their order"),
            id="kv-of-3",
        ),
        pytest.param(
            layer({"key": zeros(2, *PAGE)}),
            ("layer 3 key", "length of axis kv is 2", "1 in a tensor of one role", "as one tensor"),
            id="kv-in-a-role",
        ),
        pytest.param(
            layer({"value": zeros(*PAGE)}, "slots tokens heads dim"),
            ("layer 3", "roles is ('value',)", "key among them", "pass the key tensor"),
            id="no-key",
        ),
        pytest.param(
            layer({"key": zeros(*PAGE), "key_block_scale": zeros(*PAGE, dtype=np.uint8)}, "slots tokens heads dim"),
            ("layer 3 key_block_scale", "bytes of one row is 8", "0, as its key needs"),
            id="scales-of-other-data",
        ),
        pytest.param(
            layer({"key": zeros(*PAGE), "value": zeros(6, *PAGE[1:])}, "slots tokens heads dim"),
            ("layer 3 value", "length of axis slots is 6", "5, as its key has", "one geometry"),
            id="key-and-value-differ",
        ),
        pytest.param(
            layer({"key": zeros(*PAGE), "index": zeros(*PAGE)}, "slots tokens heads dim"),
            ("layer 3 index", "length of axis heads is 2", "expected 1", "leave the axis away"),
            id="extra-with-heads",
        ),
        pytest.param(
            layer(zeros(*KV_SHAPE, dtype=np.int16)),
            ("layer 3 key", "dtype is 'int16'", "one of float32", "set OwnLayer.dtype"),
            id="unknown-dtype",
        ),
        pytest.param(
            layer(zeros(*KV_SHAPE, dtype=">f4")), ("layer 3 key", "dtype is '>f4'", "OwnLayer.dtype"), id="byte-order"
        ),
        pytest.param(
            layer(zeros(*KV_SHAPE), dtype=KVDtype.FLOAT32),
            ("layer 3 key", "dtype is 'float32'", "2 byte(s) like the tensor's elements (float16)", "correct"),
            id="dtype-of-another-size",
        ),
        pytest.param(
            layer(axes="kv slots tokens heads"), ("layer 3", "axes", "tokens, dim", "in their order"), id="no-dim"
        ),
        pytest.param(
            layer(axes="slots tokens heads dim"),
            ("layer 3", "axes is 'slots tokens heads dim'", "5 names for shape (2, 5, 4, 2, 8)", "every axis"),
            id="missing-axis",
        ),
        pytest.param(layer(axes="kv slots slots heads tokens dim"), ("layer 3", "axes", "each once"), id="axis-twice"),
        pytest.param(
            layer({"key": zeros(*PAGE)}, {"value": "x"}), ("layer 3 key", "axes is None", "every role"), id="no-axes"
        ),
        pytest.param(layer([1, 2]), ("layer 3", "tensor is 'list'", "RawTensor", "pass the tensor itself"), id="list"),
        pytest.param(
            layer(torch.zeros(KV_SHAPE, device="meta")), ("layer 3", "addresses", "memory of its own"), id="no-memory"
        ),
        pytest.param(layer(zeros(2, 0, BLOCK, 2, DIM)), ("layer 3", "shape", "at least one element"), id="empty"),
        pytest.param(
            layer(first_head=1, total_heads=4),
            ("layer 3", "first_head is 1", "a multiple of the 2 heads", "first head"),
            id="first-head",
        ),
        pytest.param(
            layer(first_head=4, total_heads=4), ("layer 3", "first_head is 4", "at most 2"), id="first-head-outside"
        ),
        pytest.param(
            layer(total_heads=4), ("layer 3", "total_heads is 4", "a divisor of 2 heads x tp=1", "evenly"), id="total"
        ),
        pytest.param(layer(replica=1), ("layer 3", "replica is 1", "in [0, 1)", "number the ranks"), id="replica"),
        pytest.param(layer(window=0), ("layer 3", "window is 0"), id="window"),
    ],
)
def test_wrong_descriptions_are_named(broken: OwnLayer, parts: tuple[str, ...]) -> None:
    text = refusal(broken)
    assert all(part in text for part in parts), text


def test_overlapping_tensors_are_refused_by_name() -> None:
    memory = zeros(3, *PAGE)
    text = refusal(layer(memory[:2], layer_id=0), layer(memory[1:], layer_id=1))
    assert "layer 1 key: addresses is" in text and "apart from layer 0 value" in text and "memory of its own" in text
    assert "groups_share_slots" not in text


def test_layers_of_different_groups_may_lie_in_one_memory_only_where_one_allocator_deals_their_slots() -> None:
    memory = zeros(*KV_SHAPE)
    layers = layer(memory, layer_id=0), layer(memory, layer_id=1, window=8)
    assert "groups_share_slots" in refusal(*layers)
    pools = OwnPools(layers, tokens_per_block=BLOCK, groups_share_slots=True)
    assert pools.group_of(0) != pools.group_of(1)
    torn = layer(memory[:, :-1], layer_id=0), layer(memory[:, 1:], layer_id=1, window=8)
    text = refusal(*torn, groups_share_slots=True)
    assert "apart from" in text and "slots must begin at the same addresses" in text


def test_layers_must_agree_in_order_slots_and_device() -> None:
    other = layer(zeros(2, 5, 2, BLOCK, DIM), "kv slots heads tokens dim", layer_id=4)
    assert "layer 4 key: order of heads and tokens is 'HND', expected NHD, as in layer 3 key" in refusal(layer(), other)
    more = layer(zeros(2, 6, *PAGE[1:]), layer_id=4)
    assert "number of slots is 6, expected 5" in refusal(layer(), more)
    raw = RawTensor(
        pointer=4096, shape=KV_SHAPE, strides_bytes=zeros(*KV_SHAPE).strides, dtype="float16", device="cuda:0"
    )
    assert "layer 4 key: device is 'cuda:0', expected cpu" in refusal(layer(), layer(raw, layer_id=4))
    assert "device is 'cuda:0', expected cpu; pass make_memory" in refusal(layer(raw))


def test_one_head_is_readable_in_both_orders() -> None:
    latent = layer({"key": zeros(5, BLOCK, DIM)}, "slots tokens dim", layer_id=0)
    card = OwnPools([latent, layer()], tokens_per_block=BLOCK).card(side=Side.CONTEXT, instance="c")
    assert card.kv_layout is KVLayout.NHD
    assert (card.num_target_layers, card.num_draft_layers) == (2, 0)


def test_raw_pointers_are_described_like_tensors() -> None:
    memory = zeros(5, 3, *PAGE[1:])
    at = int(memory.__array_interface__["data"][0])
    raw = RawTensor(pointer=at + PAGE_BYTES, shape=PAGE, strides_bytes=memory[:, 1].strides, dtype="float16")
    assert "layer 3 key: end of the last slot" in refusal(layer({"key": raw}, "slots tokens heads dim"))
    whole = RawTensor(
        pointer=raw.pointer,
        shape=PAGE,
        strides_bytes=raw.strides_bytes,
        dtype="float16",
        allocation=Span(at, at + memory.nbytes),
    )
    pools = OwnPools([layer({"key": whole}, "slots tokens heads dim")], tokens_per_block=BLOCK)
    card = pools.card(side=Side.CONTEXT, instance="c")
    (region,) = (region for by_pool in pools.regions(card).values() for region in by_pool.values())
    assert (region.slot_stride_bytes, region.num_slots) == (3 * PAGE_BYTES, 5)
    memory[2, 1, 0, 0, 0] = 1
    offset = card.views[0].entries[0].offset_bytes
    assert region.memory[2 * region.slot_stride_bytes + offset :][:2].view(np.float16)[0] == 1
    wrong = RawTensor(pointer=at, shape=PAGE, strides_bytes=(2,), dtype="int4")
    assert "dtype is 'int4'" in refusal(layer(wrong))
    few = RawTensor(pointer=at, shape=PAGE, strides_bytes=(2,), dtype="float16")
    assert "number of strides is 1, expected 4" in refusal(layer(few))


NAMES = ("slots", "kv", "heads", "tokens", "dim")
PAGED_ORDERS = st.tuples(st.permutations(NAMES[:2]), st.permutations(NAMES[2:4])).map(
    lambda two: [*two[0], *two[1], "dim"]
)


def is_gapless(strides: dict[str, int], shape: dict[str, int]) -> bool:
    """Return whether a page is [heads, tokens, dim] or [tokens, heads, dim] without gaps, listing every place."""
    for outer, inner in (("heads", "tokens"), ("tokens", "heads")):
        places = [
            o * strides[outer] + i * strides[inner] + d * strides["dim"]
            for o, i, d in product(range(shape[outer]), range(shape[inner]), range(shape["dim"]))
        ]
        if places == [2 * number for number in range(len(places))]:
            return True
    return False


@given(
    stored=st.one_of(PAGED_ORDERS, PAGED_ORDERS, PAGED_ORDERS, st.permutations(NAMES)),
    shown=st.permutations(NAMES),
    slots=st.integers(1, 4),
    kv=st.integers(1, 2),
    heads=st.integers(1, 3),
    tokens=st.integers(1, 3),
    padding=st.tuples(*[st.sampled_from([0] * 9 + [1])] * 5),
)
def test_any_order_of_axes_is_found_byte_for_byte_or_refused(
    stored: list[str], shown: list[str], slots: int, kv: int, heads: int, tokens: int, padding: tuple[int, ...]
) -> None:
    shape = {"slots": slots, "kv": kv, "heads": heads, "tokens": tokens, "dim": 2}
    memory = zeros(*[shape[axis] + more for axis, more in zip(stored, padding, strict=True)])
    cut = memory[tuple(slice(shape[axis]) for axis in stored)]
    tensor = cut.transpose([stored.index(axis) for axis in shown])
    strides = dict(zip(shown, tensor.strides, strict=True))
    one = layer(tensor, " ".join(shown))
    page = heads * tokens * 2 * 2
    apart = (slots == 1 or strides["slots"] >= page) and (kv == 1 or strides["kv"] >= page)
    if not (is_gapless(strides, shape) and apart):
        assert "layer 3" in refusal(one, tokens_per_block=tokens)
        return
    own = OwnPools([one], tokens_per_block=tokens)
    card = own.card(side=Side.CONTEXT, instance="c")
    regions = own.regions(card)
    by_name = tensor.transpose([shown.index(axis) for axis in NAMES])
    by_name[...] = np.arange(by_name.size).reshape(by_name.shape)
    found = 0
    for view in card.views:
        region = regions[view.group_id][view.pool_index]
        assert region.slot_stride_bytes >= page and region.num_slots == slots
        for entry, slot in product(view.entries, range(slots)):
            at = slot * region.slot_stride_bytes + entry.offset_bytes
            got = region.memory[at : at + page].view(np.float16)
            got = got.reshape((heads, tokens, 2) if view.kv_layout is KVLayout.HND else (tokens, heads, 2))
            order = (0, 1, 2) if view.kv_layout is KVLayout.HND else (1, 0, 2)
            assert np.array_equal(got.transpose(order), by_name[slot, ("key", "value").index(entry.role)])
            found += 1
    assert found == slots * kv


def only_pools(own: OwnPools) -> list[tuple[int, int, int, list[int]]]:
    """Return (offset, stride, slots, offsets of buffers) of every pool."""
    card = own.card(side=Side.CONTEXT, instance="c")
    return [
        (
            pool.offset_bytes,
            pool.slot_stride_bytes,
            pool.num_slots,
            sorted(
                entry.offset_bytes
                for view in card.views
                if (view.group_id, view.pool_index) == (pool.group_id, pool.pool_index)
                for entry in view.entries
            ),
        )
        for pool in card.pools
    ]


def test_some_layers_of_a_slot_keep_to_the_slots_of_the_whole() -> None:
    memory = zeros(2, 5, 3, *PAGE[1:])
    one = layer(memory[:, :, 1], "kv slots tokens heads dim")
    stride = 3 * PAGE_BYTES
    assert only_pools(OwnPools([one], tokens_per_block=BLOCK)) == [
        (0, stride, 5, [PAGE_BYTES]),
        (5 * stride, stride, 5, [PAGE_BYTES]),
    ]
    outer = [layer(memory[:, :, number], layer_id=number) for number in (0, 2)]
    assert only_pools(OwnPools(outer, tokens_per_block=BLOCK)) == [
        (0, stride, 5, [0, 2 * PAGE_BYTES]),
        (5 * stride, stride, 5, [0, 2 * PAGE_BYTES]),
    ]


@pytest.mark.parametrize("header", [0, 2, 70, PAGE_BYTES, 2 * PAGE_BYTES])
@pytest.mark.parametrize("trailer", [0, 2, PAGE_BYTES])
def test_slots_may_begin_behind_a_header_of_any_size(header: int, trailer: int) -> None:
    memory = zeros(header + 5 * 2 * PAGE_BYTES + trailer, dtype=np.uint8)
    kv = memory[header : header + 5 * 2 * PAGE_BYTES].view(np.float16).reshape(5, 2, *PAGE[1:])
    for number in range(2):
        own = OwnPools([layer({"key": kv[:, number]}, "slots tokens heads dim")], tokens_per_block=BLOCK)
        ((offset, stride, slots, (at,)),) = only_pools(own)
        assert (stride, slots, offset + at) == (2 * PAGE_BYTES, 5, header + number * PAGE_BYTES)
        assert offset >= 0 and offset + slots * stride <= memory.size and 0 <= at <= stride - PAGE_BYTES


def test_tensors_that_interleave_at_different_slots_are_refused() -> None:
    memory = zeros(6, 2, *PAGE[1:])
    text = refusal(layer({"key": memory[:-2, 0], "value": memory[2:, 1]}, "slots tokens heads dim"))
    assert "interleave at different places" in text and "layer 3 value: address" in text


def test_buffers_that_overlap_around_the_end_of_a_slot_are_refused() -> None:
    memory = zeros(5 * 3 * PAGE_BYTES, dtype=np.uint8)
    at, half = int(memory.__array_interface__["data"][0]), PAGE_BYTES // 2

    def pages(offset: int) -> RawTensor:
        strides = (3 * half, *zeros(*PAGE).strides[1:])
        whole = Span(at, at + memory.size)
        return RawTensor(pointer=at + offset, shape=PAGE, strides_bytes=strides, dtype="float16", allocation=whole)

    text = refusal(layer({"key": pages(0), "value": pages(2 * half)}, "slots tokens heads dim"))
    assert "layer 3 value: addresses" in text and "apart from layer 3 key" in text
    assert "apart from" in refusal(layer({"key": pages(0), "value": pages(half)}, "slots tokens heads dim"))


def test_nvfp4_scales_and_extras_are_the_managers_own() -> None:
    tensors = {
        "key": zeros(5, BLOCK, 2, 16, dtype=np.uint8),
        "value": zeros(5, BLOCK, 2, 16, dtype=np.uint8),
        "key_block_scale": zeros(5, BLOCK, 2, 2, dtype=np.uint8),
        "value_block_scale": zeros(5, BLOCK, 2, 2, dtype=np.uint8),
        "index_key": zeros(5, BLOCK, 24, dtype=np.uint8),
    }
    axes = dict.fromkeys(tensors, "slots tokens heads dim") | {"index_key": "slots tokens dim"}
    own = OwnPools(
        [layer(tensors, axes, dtype=KVDtype.NVFP4, layer_id=0)],
        tokens_per_block=BLOCK,
        position=ParallelPosition(tp=2, tp_rank=1),
    )
    card = own.card(side=Side.CONTEXT, instance="c")
    spec = KVCacheLayerSpec(
        layer_id=LayerId(0),
        owner=LayerOwner.TARGET,
        num_kv_heads=2,
        head_dim=32,
        dtype=KVDtype.NVFP4,
        extra_buffers={"index_key": 24},
    )
    layout = build_layout([spec], tokens_per_block=BLOCK, max_seq_len=None, kv_layout=KVLayout.NHD)
    with pytest.raises(SpecError):
        describe_views(layout, tp=2, tp_rank=1)  # two whole copies of two heads: an engine may, an even split does not
    facts = [describe_views(layout, tp=1, tp_rank=0), card.views]
    ours, theirs = (
        {(e.role, v.head_dim, v.dtype, v.row_bytes, v.total_heads) for v in views for e in v.entries} for views in facts
    )
    assert ours == theirs
    assert {(v.replica, v.replicas) for v in card.views} == {(1, 2)}


def test_replicas_are_numbered_as_the_usual_split_does_or_as_told() -> None:
    def view(rank: int, **fields: Any) -> Any:
        one = layer({"key": zeros(5, BLOCK, 1, DIM)}, "slots tokens heads dim", total_heads=2, **fields)
        pools = OwnPools([one], tokens_per_block=BLOCK, position=ParallelPosition(tp=4, tp_rank=rank))
        return pools.card(side=Side.CONTEXT, instance="c").views[0]

    usual = [view(rank, first_head=rank // 2) for rank in range(4)]
    assert [(v.heads.lo, v.replica, v.replicas) for v in usual] == [(0, 0, 2), (0, 1, 2), (1, 0, 2), (1, 1, 2)]
    dealt = view(1, first_head=1, replica=0)
    assert (dealt.heads, dealt.replica, dealt.replicas) == (Span(1, 2), 0, 2)
    with pytest.raises(SpecError, match=r"replica is None, expected in \[0, 2\)"):
        view(1, first_head=1)


def test_pipeline_stages_say_how_many_layers_the_model_has() -> None:
    pools = OwnPools([layer()], tokens_per_block=BLOCK, position=ParallelPosition(pp=2))
    with pytest.raises(SpecError, match="num_target_layers is None, expected the target layers of all 2 pipeline"):
        pools.card(side=Side.CONTEXT, instance="c")
    assert pools.card(side=Side.CONTEXT, instance="c", num_target_layers=6, num_draft_layers=0).num_target_layers == 6


def test_the_generation_side_needs_writable_memory() -> None:
    frozen = zeros(*KV_SHAPE)
    frozen.flags.writeable = False
    pools = OwnPools([layer(frozen)], tokens_per_block=BLOCK)
    assert pools.card(side=Side.CONTEXT, instance="c")
    with pytest.raises(SpecError, match="layer 3 key: tensor is 'read-only', expected writable"):
        pools.card(side=Side.GENERATION, instance="g")


# --- memory that peers can map ---------------------------------------------------------------------------------------


def test_why_memory_cannot_be_mapped_is_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING), shared_array(4096) as memory:
        both = [
            layer(layer_id=0),
            layer(torch.frombuffer(memory.array[:1280], dtype=torch.float16).view(2, 5, 4, 2, 8)),
        ]
        pools = OwnPools(both, tokens_per_block=BLOCK, shared=[memory])
        pools.card(side=Side.CONTEXT, instance="c")
        pools.card(side=Side.GENERATION, instance="g", path=PathKind.ZMQ)
        assert not caplog.records
        card = pools.card(side=Side.GENERATION, instance="g")
    assert [storage.export is None for storage in card.storages].count(True) == len(card.storages) - 1
    (record,) = caplog.records
    text = record.getMessage()
    assert "layer 0 key" in text and "not memory of shared_array()" in text and "the staged path is taken" in text


def test_a_shared_array_is_zeroed_and_outlives_its_descriptor() -> None:
    memory = shared_array(100)
    assert memory.size_bytes == 100 and not memory.array.any() and memory.address % 4096 == 0
    assert memory.export().inode > 0
    memory.close()
    memory.close()
    memory.array[:] = 7
    with pytest.raises(LocalProtocolError, match="shared array: state is 'closed', expected open"):
        memory.export()
    with pytest.raises(SpecError, match="size_bytes is 0, expected >= 1"):
        shared_array(0)


def test_tensors_in_one_shared_array_are_one_storage_with_pools_inside() -> None:
    one, things = own_store("one-file", Side.GENERATION, tpb=BLOCK)
    try:
        assert {pool.storage for pool in one.card.pools} == {0} and len(one.card.storages) == 1
        assert len({pool.offset_bytes for pool in one.card.pools}) == 2 * len(LAYERS)
        assert one.card.storages[0].export is not None
    finally:
        for thing in things:
            thing.close()


def test_no_page_marks_what_is_not_wanted() -> None:
    sent, _ = own_store("kv-first", Side.CONTEXT, tpb=BLOCK)
    got, _ = own_store("tokens", Side.GENERATION, tpb=BLOCK)
    for one in (sent, got):
        give_tables(one, 1)
    fill(sent)
    wanted = got.tables
    got.tables = {group: np.where(np.arange(len(t)) < 2, NO_PAGE, t).astype(np.int32) for group, t in wanted.items()}
    copy_all([sent], [got])
    check_nothing_else(got)
    first = [got.kv[0][0][wanted[got.groups[0]][ordinal]] for ordinal in range(3)]
    assert [bool(page.view(np.uint16).any()) for page in first] == [False, False, True]


@pytest.mark.parametrize(
    ("offset", "plan_text"), [(-1, "offset_bytes is -1, expected >= 0"), (10**9, "end of the last")]
)
def test_a_card_whose_pool_begins_outside_its_storage_is_refused(offset: int, plan_text: str) -> None:
    sent, _ = own_store("kv-first", Side.CONTEXT, tpb=BLOCK)
    got, things = own_store("one-file", Side.GENERATION, tpb=BLOCK)
    try:
        wrong = replace(got.card, pools=tuple(replace(pool, offset_bytes=offset) for pool in got.card.pools))
        with pytest.raises(SpecError, match=plan_text):
            compile_program(sent.card, wrong, with_draft=True)
        with pytest.raises(RemoteProtocolError, match=f"slots of [0-9]+ bytes from byte {offset} on"):
            PeerMemory(wrong)
    finally:
        for thing in things:
            thing.close()


def test_device_memory_is_wrapped_by_whoever_knows_the_device(caplog: pytest.LogCaptureFixture) -> None:
    memory = zeros(*KV_SHAPE)
    at = int(memory.__array_interface__["data"][0])
    raw = RawTensor(pointer=at, shape=KV_SHAPE, strides_bytes=memory.strides, dtype="float16", device="cuda:0")
    asked: list[tuple[int, int]] = []

    def wrap(address: int, size_bytes: int) -> NDArray[np.uint8]:
        asked.append((address, size_bytes))
        return memory.reshape(-1).view(np.uint8)

    pools = OwnPools([layer(raw)], tokens_per_block=BLOCK, make_memory=wrap)
    card = pools.card(side=Side.GENERATION, instance="g")
    assert card.device == "cuda:0" and "which is on a device" in caplog.text
    regions = pools.regions(card)
    assert asked == [(at, memory.nbytes)]
    assert [region.num_slots for region in regions[pools.group_of(3)].values()] == [5, 5]


def test_regions_keep_the_tensors_of_the_engine_alive() -> None:
    memory = zeros(*KV_SHAPE)
    gone = weakref.ref(memory)
    pools = OwnPools([layer(memory)], tokens_per_block=BLOCK)
    regions = pools.regions(pools.card(side=Side.CONTEXT, instance="c"))
    del memory, pools
    gc.collect()
    assert gone() is not None
    del regions
    gc.collect()
    assert gone() is None
