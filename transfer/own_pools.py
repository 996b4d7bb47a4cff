"""An engine's own KV tensors as a rank: layer groups, card and regions for the endpoints, without our cache manager.

The engine keeps allocating, writing and freeing its pages; what it passes to endpoints are its page tables, per layer
group. Slot 0 is nobody's page here as everywhere in this project: no page table may name it.
"""

from __future__ import annotations

import ctypes
import logging
import secrets
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from transfer.card_coverage import check_described
from transfer.hello import (
    DraftKVMode,
    GroupCard,
    HostIdentity,
    ParallelPosition,
    PathKind,
    PoolCard,
    RankCard,
    Side,
    SpeculativeCard,
    StorageCard,
)
from transfer.own_arrange import OwnPool, arrange, check_apart, merge_allocations
from transfer.own_cut import OwnBuffer
from transfer.own_layers import OwnLayer, ResolvedLayer, resolve_layer
from transfer.own_tensors import RawTensor
from transfer.own_views import describe_own_views, own_head_shard
from transfer.paths import Regions
from transfer.peer_memory import local_regions, own_host_identity
from transfer.shared_array import SharedArray, shared_array
from unikv.errors import SpecError, explain
from unikv.ids import GroupId, LayerId
from unikv.layer_spec import KVLayout
from unikv.layout import CacheLayout, build_layout
from unikv.ranges import Span

__all__ = ["OwnLayer", "OwnPools", "RawTensor", "SharedArray", "shared_array"]

_log = logging.getLogger(__name__)

MakeMemory = Callable[[int, int], Any]
"""Makes what a copier takes as `Region.memory` of an address and a size in bytes."""


class OwnPools:
    """Pools that an engine describes. Keeps its tensors alive, and so do its regions; the memory stays the engine's.

    Attributes:
        tokens_per_block: tokens of one page.
        position: the rank's place in its instance.
        kv_layout: order of heads and tokens inside a page.
    """

    def __init__(
        self,
        layers: Sequence[OwnLayer],
        *,
        tokens_per_block: int,
        position: ParallelPosition | None = None,
        shared: Sequence[SharedArray] = (),
        max_seq_len: int | None = None,
        groups_share_slots: bool = False,
        make_memory: MakeMemory | None = None,
    ) -> None:
        """Read the descriptions; nothing is copied.

        Args:
            layers: the layers of this rank, targets before drafts.
            tokens_per_block: tokens of one page, the same in all layers.
            position: the rank's place in its instance; None for a single rank.
            shared: memory of `shared_array` that tensors lie in: peers on this host can map it.
            max_seq_len: longest sequence in tokens; windows that reach it count as full attention. None: unknown.
            groups_share_slots: one allocator deals the slots of all layer groups, so that layers of different groups
                may lie in the same slots.
            make_memory: for tensors on a device, makes what the device's copier takes as memory of a region.

        Raises:
            SpecError: a description is wrong; the text names layer, field, value, expectation and cure.
        """
        self.tokens_per_block = tokens_per_block
        self.position = position or ParallelPosition()
        if tokens_per_block < 1:
            want = ">= 1 token"
            raise SpecError(explain("own pools", "tokens_per_block", tokens_per_block, want, "pass the page size"))
        resolved = [resolve_layer(layer, tokens_per_block) for layer in layers]
        self._shared = tuple(shared)
        self.kv_layout = _common_order([buffer for layer in resolved for buffer in layer.buffers])
        self._layout = build_layout(
            [layer.spec for layer in resolved],
            tokens_per_block=tokens_per_block,
            max_seq_len=max_seq_len,
            kv_layout=self.kv_layout,
        )
        self._resolved: dict[LayerId, ResolvedLayer] = {layer.spec.layer_id: layer for layer in resolved}
        for layer in resolved:
            own_head_shard(layer, self.position)
        self._device = _common_device(resolved)
        self._make_memory = make_memory
        if make_memory is None and self._device != "cpu":
            cure = "pass make_memory, which wraps an address for that device's copier"
            raise SpecError(explain("own pools", "device", self._device, "cpu", cure))
        self._pools = self._arrange(groups_share_slots)
        self._allocations = _used(self._pools)

    def group_of(self, layer_id: int) -> GroupId:
        """Return the layer group of a layer: page tables are per group.

        Raises:
            UnknownLayerError: no such layer was described.
        """
        return self._layout.group_of_layer(LayerId(layer_id)).group_id

    @property
    def group_ids(self) -> tuple[GroupId, ...]:
        """Return all layer groups, in the order in which the layers were described."""
        return tuple(group.group_id for group in self._layout.groups)

    def num_slots(self, group_id: GroupId) -> int:
        """Return the slots of a layer group, slot 0 included."""
        return self._pools[group_id][0].num_slots

    def card(  # noqa: PLR0913 - a card states many facts, and each has one source at the caller
        self,
        *,
        side: Side,
        instance: str,
        address: str = "",
        incarnation: str | None = None,
        num_target_layers: int | None = None,
        num_draft_layers: int | None = None,
        speculative: SpeculativeCard | None = None,
        draft_kv: DraftKVMode = DraftKVMode.AUTO,
        path: PathKind = PathKind.AUTO,
        host: HostIdentity | None = None,
        checksum: str = "off",
    ) -> RankCard:
        """Return the card of this rank, and log why peers cannot map its memory where they cannot.

        Args:
            side, instance, address, speculative, draft_kv, path, checksum: as in `RankCard`.
            incarnation: None for a random one.
            num_target_layers, num_draft_layers: of the whole instance; None: those described here, which is right
                without pipeline parallelism.
            host: where this process runs; None to find out.

        Raises:
            SpecError: layer counts left out under pipeline parallelism, or memory of the generation side that cannot
                be written.
        """
        self._check_writable(side)
        self._log_path(side, path)
        views = describe_own_views(self._pools, self._resolved, self.kv_layout, self.position)
        stored = [layer.spec for layer in self._resolved.values()]
        check_described([(spec.layer_id, role) for spec in stored for role in spec.roles], views)
        drafts = sum(spec.is_draft for spec in self._layout.specs)
        return RankCard(
            incarnation=incarnation or secrets.token_hex(16),
            instance=instance,
            side=side,
            position=self.position,
            address=address,
            device=self._device,
            kv_layout=self.kv_layout,
            tokens_per_block=self.tokens_per_block,
            num_target_layers=self._count("target", num_target_layers, len(self._layout.specs) - drafts),
            num_draft_layers=self._count("draft", num_draft_layers, drafts),
            groups=_group_cards(self._layout),
            storages=tuple(self._storage_card(span) for span in self._allocations),
            pools=tuple(self._pool_cards()),
            views=views,
            speculative=speculative,
            draft_kv=draft_kv,
            path=path,
            checksum=checksum,
            host=host or own_host_identity(),
        )

    def regions(self, card: RankCard) -> Regions:
        """Return the regions of the pools, for the endpoint that gets `card`.

        They lie in the engine's memory. On the host they keep its tensors alive; memory behind a `RawTensor` or made by
        `make_memory` must outlive the endpoint.
        """
        keep = ([b.facts.keep for layer in self._resolved.values() for b in layer.buffers], self._shared)
        make = self._make_memory or partial(_host_memory, keep=keep)
        memory = [make(span.lo, len(span)) for span in self._allocations]
        return local_regions(card, memory)

    def _arrange(self, groups_share_slots: bool) -> dict[GroupId, tuple[OwnPool, ...]]:
        grouped: dict[GroupId, list[OwnBuffer]] = {group: [] for group in self.group_ids}
        for layer in self._resolved.values():
            grouped[self.group_of(layer.spec.layer_id)] += layer.buffers
        everything = [(group, buffer) for group, buffers in grouped.items() for buffer in buffers]
        check_apart(everything, groups_share_slots=groups_share_slots)
        shared = [Span(memory.address, memory.address + memory.size_bytes) for memory in self._shared]
        spans = merge_allocations([*shared, *(buffer.facts.allocation for _, buffer in everything)])
        return {group: arrange(buffers, spans) for group, buffers in grouped.items()}

    def _pool_cards(self) -> list[PoolCard]:
        numbers = {span: number for number, span in enumerate(self._allocations)}
        return [
            PoolCard(
                group_id=group_id,
                pool_index=index,
                storage=numbers[pool.allocation],
                slot_stride_bytes=pool.stride,
                num_slots=pool.num_slots,
                offset_bytes=pool.address - pool.allocation.lo,
            )
            for group_id, pools in self._pools.items()
            for index, pool in enumerate(pools)
        ]

    def _storage_card(self, span: Span) -> StorageCard:
        memory = self._shared_memory(span)
        return StorageCard(size_bytes=len(span), export=None if memory is None else memory.export())

    def _shared_memory(self, span: Span) -> SharedArray | None:
        """Return the shared array that is exactly `span`, or None."""
        found = (memory for memory in self._shared if (memory.address, memory.size_bytes) == (span.lo, len(span)))
        return next(found, None)

    def _count(self, owner: str, given: int | None, described: int) -> int:
        if given is None and self.position.pp > 1:
            want = f"the {owner} layers of all {self.position.pp} pipeline stages"
            raise SpecError(explain("own pools", f"num_{owner}_layers", None, want, "pass the model's count"))
        return described if given is None else given

    def _check_writable(self, side: Side) -> None:
        for layer in self._resolved.values():
            for buffer in layer.buffers:
                if side is Side.GENERATION and not buffer.facts.writable:
                    want = "writable memory on the generation side"
                    raise SpecError(explain(buffer.thing, "tensor", "read-only", want, "pass a writable tensor"))

    def _log_path(self, side: Side, path: PathKind) -> None:
        lost = [pool for pools in self._pools.values() for pool in pools if not self._shared_memory(pool.allocation)]
        if side is not Side.GENERATION or path is PathKind.ZMQ or not lost:
            return
        why = "is on a device" if self._device != "cpu" else "is not memory of shared_array()"
        text = "own pools: peers cannot map %d of %d pools, among them that of %s, which %s: the staged path is taken"
        _log.warning(text, len(lost), sum(map(len, self._pools.values())), lost[0].buffers[0].thing, why)


def _group_cards(layout: CacheLayout) -> tuple[GroupCard, ...]:
    return tuple(
        GroupCard(
            group_id=group.group_id,
            owner=group.owner,
            window=group.window,
            sink_blocks=group.sink_blocks,
            reuse_policy=group.reuse_policy,
        )
        for group in layout.groups
    )


def _used(pools: dict[GroupId, tuple[OwnPool, ...]]) -> tuple[Span, ...]:
    return tuple(sorted({pool.allocation for own in pools.values() for pool in own}))


def _common_order(buffers: Sequence[OwnBuffer]) -> KVLayout:
    """Return the order all pages can be read in; HND where both can."""
    for order in (KVLayout.HND, KVLayout.NHD):
        if all(order in buffer.orders for buffer in buffers):
            return order
    settled = [buffer for buffer in buffers if len(buffer.orders) == 1]
    other = next(buffer for buffer in settled if buffer.orders != settled[0].orders)
    got, want = (next(iter(buffer.orders)).value for buffer in (other, settled[0]))
    text = f"{want}, as in {settled[0].thing}"
    raise SpecError(explain(other.thing, "order of heads and tokens", got, text, "store all layers in one order"))


def _common_device(layers: Sequence[ResolvedLayer]) -> str:
    buffers = [buffer for layer in layers for buffer in layer.buffers]
    for buffer in buffers:
        if buffer.facts.device != buffers[0].facts.device:
            want = f"{buffers[0].facts.device}, as {buffers[0].thing}"
            raise SpecError(explain(buffer.thing, "device", buffer.facts.device, want, "use one rank per device"))
    return buffers[0].facts.device


def _host_memory(address: int, size_bytes: int, *, keep: object) -> NDArray[np.uint8]:
    """Return host memory as an array that keeps `keep` alive."""
    bytes_there: Any = (ctypes.c_uint8 * size_bytes).from_address(address)
    bytes_there.keep = keep
    return np.ctypeslib.as_array(bytes_there)
