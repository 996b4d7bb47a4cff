"""What a transfer must do, worked out byte by byte: knows tokens, heads and ranks, and no lane, plan or view.

Addresses are computed here once more, from how pages are arranged (one slot holds the buffers of one size of all
layers of a group, one behind the other) and not with the modules under test; nothing of ours is imported but the
cases.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from random import Random
from typing import Any

import numpy as np
from numpy.typing import NDArray

from transfer.testing.case import InstanceShape, LayerKind, RequestCase

Bytes = NDArray[np.uint8]
Numbers = NDArray[np.int64]

ELEMENT_BITS = {"float32": 32, "float16": 16, "bfloat16": 16, "float8_e4m3fn": 8, "nvfp4": 4}


def roles_of(kind: LayerKind) -> list[tuple[str, int, bool]]:
    """Return (role, bytes of one head of one token, whether heads are split) of every buffer of a layer, in order."""
    sides = ("key", "value")[: kind.kv_factor if kind.heads else 0]
    found = [(side, kind.head_dim * ELEMENT_BITS[kind.dtype] // 8, True) for side in sides]
    if kind.dtype == "nvfp4":
        found += [(f"{side}_block_scale", kind.head_dim // 16, True) for side in sides]
    return found + [(role, size, False) for role, size in kind.extras.items()]


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """Where one role of one layer is on one rank: its group, its storage, and its bytes inside a slot.

    Attributes:
        heads: global heads, in the order they are stored.
    """

    group: int
    storage: int
    offset: int
    slot_bytes: int
    row_bytes: int
    heads: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Group:
    """What the pages of one layer group have in common. `memory` numbers the allocator it shares with equal groups."""

    window: int | None
    sink_blocks: int
    policy: str
    draft: bool
    memory: int
    storages: tuple[int, ...]


@dataclass(slots=True)
class RankFacts:
    """One rank as the oracle sees it.

    Attributes:
        layers: kind by global layer number, in the order the rank lists them.
        slot_bytes: of every storage.
    """

    shape: InstanceShape
    pp_rank: int
    tp_rank: int
    cp_rank: int
    layers: dict[int, LayerKind] = field(default_factory=dict)
    places: dict[tuple[int, str], Place] = field(default_factory=dict)
    groups: list[Group] = field(default_factory=list)
    slot_bytes: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.layers = layers_on(self.shape, self.pp_rank)
        _arrange(self)

    @property
    def data_rank(self) -> int:
        """Which requests it serves, under attention data parallelism."""
        return self.tp_rank if self.shape.attention_dp else 0

    def local_heads(self, heads: int) -> tuple[int, ...]:
        """Return the global heads of this rank: a slice, or one of several copies of a head."""
        if self.shape.attention_dp:
            return tuple(range(heads))
        tp, rank = self.shape.tp, self.tp_rank
        return tuple(head for head in range(heads) if head * tp // heads <= rank and rank * heads // tp <= head)


def layers_on(shape: InstanceShape, stage: int) -> dict[int, LayerKind]:
    """Return the layers of a pipeline stage in the order its ranks list them."""
    first = sum(shape.stages[:stage])
    mine = set(range(first, first + shape.stages[stage]))
    kinds = shape.layers()
    if stage == shape.draft_stage:
        mine |= {number for number, kind in enumerate(kinds) if kind.draft}
    numbers = sorted(mine)
    if shape.order:
        Random(shape.order * 31 + stage).shuffle(numbers)  # noqa: S311 - the same order for a seed is wanted
    return {number: kinds[number] for number in numbers}


def all_ranks(shape: InstanceShape) -> list[RankFacts]:
    """Return every rank of an instance in rank order: stages, then heads, then context-parallel ranks innermost."""
    return [
        RankFacts(shape, pp_rank, tp_rank, cp_rank)
        for pp_rank in range(shape.pp)
        for tp_rank in range(shape.tp)
        for cp_rank in range(shape.cp)
    ]


def window_of(shape: InstanceShape, kind: LayerKind) -> int | None:
    """Return the window, None where no sequence can outgrow it."""
    if kind.window is None or (shape.max_seq_len is not None and kind.window >= shape.max_seq_len):
        return None
    return kind.window


def _arrange(rank: RankFacts) -> None:
    """Number groups as they first appear, put buffers of one size behind one another, and share equal memories."""
    members: dict[tuple[Any, ...], list[int]] = {}
    for layer, kind in rank.layers.items():
        sinks = -(-kind.sinks // rank.shape.tpb)
        members.setdefault((window_of(rank.shape, kind), sinks, kind.policy, kind.draft), []).append(layer)
    memories: dict[tuple[Any, ...], tuple[int, tuple[int, ...]]] = {}
    for number, (key, layers) in enumerate(members.items()):
        pools = _pools(rank, layers)
        sizes = tuple(size * len(buffers) for size, buffers in pools)
        same = (sizes, key[2], key[3])
        if same not in memories:
            first = len(rank.slot_bytes)
            memories[same] = (len(memories), tuple(range(first, first + len(sizes))))
            rank.slot_bytes += sizes
        memory, storages = memories[same]
        rank.groups.append(
            Group(window=key[0], sink_blocks=key[1], policy=key[2], draft=key[3], memory=memory, storages=storages)
        )
        for storage, (size, buffers) in zip(storages, pools, strict=True):
            for index, (layer, role, row_bytes, heads) in enumerate(buffers):
                rank.places[layer, role] = Place(
                    group=number,
                    storage=storage,
                    offset=index * size,
                    slot_bytes=size * len(buffers),
                    row_bytes=row_bytes,
                    heads=heads,
                )


def _pools(rank: RankFacts, layers: list[int]) -> list[tuple[int, list[tuple[int, str, int, tuple[int, ...]]]]]:
    """Return (bytes of a buffer, buffers) of every pool: equal sizes together, largest slots first."""
    found: dict[tuple[int, str], list[tuple[int, str, int, tuple[int, ...]]]] = {}
    for layer in layers:
        kind = rank.layers[layer]
        for role, row_bytes, split in roles_of(kind):
            heads = rank.local_heads(kind.heads) if split else (0,)
            size = rank.shape.tpb * row_bytes * len(heads)
            apart = "" if kind.dtype != "nvfp4" or not split else "scales" if role.endswith("scale") else "data"
            found.setdefault((size, apart), []).append((layer, role, row_bytes, heads))
    ranked = sorted(found.items(), key=lambda item: -item[0][0] * len(item[1]))
    return [(size, buffers) for (size, _), buffers in ranked]


def truth(request: int, layer: int, role: str, heads: tuple[int, ...], tokens: Numbers, row_bytes: int) -> Bytes:
    """Return what a request's KV holds: one pseudo-random byte per head, token and byte, ``[heads, tokens, bytes]``."""
    salt = (request * 7919 + layer) * 0x9E3779B1 + zlib.crc32(role.encode())
    rows = np.asarray(heads, dtype=np.uint64)[:, None] * np.uint64(0x85EBCA77C2B2AE63)
    rows = rows + tokens.astype(np.uint64)[None, :] * np.uint64(0x27D4EB2F165667C5) + np.uint64(salt)
    mixed = rows[:, :, None] + np.arange(row_bytes, dtype=np.uint64) * np.uint64(0xD6E8FEB86659FD93)
    mixed = (mixed ^ (mixed >> np.uint64(31))) * np.uint64(0xBF58476D1CE4E5B9)
    found: Bytes = ((mixed ^ (mixed >> np.uint64(29))) & np.uint64(0xFF)).astype(np.uint8)
    return found


@dataclass(frozen=True, slots=True, kw_only=True)
class Spread:
    """How slots of one rank lie in its storages: distance between slots, and what is in front of the first."""

    stride: Mapping[int, int]
    base_bytes: int


def addresses(rank: RankFacts, place: Place, spread: Spread, slots: Numbers, tokens: Numbers) -> Numbers:
    """Return the byte addresses of the rows of `tokens`, token i being in slot i: ``[heads, tokens, row_bytes]``."""
    tpb, heads, row = rank.shape.tpb, len(place.heads), place.row_bytes
    by_head, by_token = (tpb * row, row) if rank.shape.layout == "HND" else (row, heads * row)
    pages = spread.base_bytes + slots * spread.stride[place.storage] + place.offset
    rows = pages[None, :] + np.arange(heads)[:, None] * by_head + (tokens % tpb)[None, :] * by_token
    found: Numbers = rows[:, :, None] + np.arange(row)
    return found


def wanted_blocks(rank: RankFacts, group: Group, request: RequestCase) -> Numbers:
    """Return the block ordinals a generation rank asks for: its own ones, without those it has cached."""
    shape = rank.shape
    blocks = np.arange(-(-request.prompt // shape.tpb) + request.tail_blocks)
    reuses = group.policy == "required" or (group.policy == "optional" and request.optional_selected)
    cached = request.cached_tokens // shape.tpb if reuses else 0
    found: Numbers = blocks[(blocks % shape.cp == rank.cp_rank) & (blocks >= cached)]
    return found


def travelling_tokens(
    rank: RankFacts, kind: LayerKind, request: RequestCase, peer: InstanceShape, wanted: Numbers
) -> Numbers:
    """Return the tokens whose bytes change on a generation rank, in one layer.

    Whole units of the smaller page travel: those that hold a token of the prompt and, under a window, a token that the
    next query or a later one can see, or one of the sinks that both sides keep.
    """
    tpb, unit = rank.shape.tpb, min(rank.shape.tpb, peer.tpb)
    tokens = (wanted[:, None] * tpb + np.arange(tpb)).reshape(-1)
    first = tokens // unit * unit
    live = first < request.prompt
    window = window_of(rank.shape, kind)
    if window is not None:
        kept = min(-(-kind.sinks // side) * side for side in (tpb, peer.tpb))
        live &= (first + unit > request.prompt + 1 - window) | (first < kept)
    found: Numbers = tokens[live]
    return found


def expected_writes(
    rank: RankFacts, spread: Spread, number: int, request: RequestCase, peer: InstanceShape, tables: list[Numbers]
) -> Iterator[tuple[bool, int, Numbers, Bytes]]:
    """Yield (whether a draft layer's, storage, addresses, bytes) of everything one request puts on one rank.

    Args:
        tables: by group, the slot of every block of the sequence by ordinal; blocks of other ranks have any number.
    """
    for (layer, role), place in rank.places.items():
        kind, group = rank.layers[layer], rank.groups[place.group]
        tokens = travelling_tokens(rank, kind, request, peer, wanted_blocks(rank, group, request))
        slots = tables[place.group][tokens // rank.shape.tpb]
        if len(slots) and slots.min() < 1:
            raise AssertionError(f"layer {layer}: a token that travels has no page")
        values = truth(number, layer, role, place.heads, tokens, place.row_bytes)
        yield kind.draft, place.storage, addresses(rank, place, spread, slots, tokens), values
