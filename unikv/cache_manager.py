"""The cache of one rank: target and drafter in one set of pools, with a page table per request and layer group.

The manager puts the parts together and decides little itself: `unikv.layout` says where bytes are, `unikv.buffers`
holds them, `unikv.slots` knows who owns which, and `unikv.request` what one request may touch.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Self

import numpy as np

from unikv.budget import PoolBudget
from unikv.buffers import PoolStorage, Tensor
from unikv.errors import InternalError, LocalProtocolError, explain
from unikv.geometry import TensorGeometry, extra_geometry, flat_geometry, kv_geometry, scale_geometry
from unikv.ids import NULL_SLOT, GroupId, LayerId, RequestId
from unikv.layer_spec import KVCacheLayerSpec, KVDtype, KVLayout, LayerOwner
from unikv.layout import build_layout, bytes_per_token, role_bytes_per_token
from unikv.legacy import check_against_scalars, specs_from_scalars
from unikv.page_source import PageSource
from unikv.page_table import SlotRow, valid_slots, write_kernel_row
from unikv.request import KVCacheRequest
from unikv.slots import SlotAllocator
from unikv.speculation import NO_SPECULATION, SpeculationShape, max_blocks_per_sequence


class UnifiedKVCacheManager:
    """Owns the pools of one rank and the requests in them. One thread uses it at a time.

    Tensors from `get_buffers`, `get_scales`, `get_extra` and `get_flat_pages` share the memory of the pools, are
    indexed by the raw slots of the page tables and stay valid until `close`.

    Attributes:
        layout: layer groups, pools and buffers.
        pools: their memory.
        speculation: what the speculative mode reserves, None without one.
        extra_tokens: positions every allocation adds beyond the tokens it is asked for.
        max_blocks_per_sequence: length of a block-table row.
    """

    def __init__(
        self,
        specs: Iterable[KVCacheLayerSpec],
        *,
        tokens_per_block: int,
        max_seq_len: int,
        pool: PoolBudget,
        kv_layout: KVLayout = KVLayout.HND,
        device: str = "cpu",
        speculation: SpeculationShape | None = None,
        isolate_draft: bool = True,
    ) -> None:
        """Lay out the cache and allocate its memory.

        Args:
            specs: the layers of this rank, targets before drafts.
            tokens_per_block: token positions per block.
            max_seq_len: longest sequence in tokens; windows that reach it count as full attention.
            pool: size of the pools.
            kv_layout: order of heads and tokens inside a page.
            device: "cpu", "cuda" or "cuda:<index>".
            speculation: the speculative mode, None without one.
            isolate_draft: give draft layers groups of their own even where a target group has the same key.

        Raises:
            SpecError: any argument is wrong, or the memory cannot be had.
        """
        self.layout = build_layout(
            specs,
            tokens_per_block=tokens_per_block,
            max_seq_len=max_seq_len,
            kv_layout=kv_layout,
            isolate_draft=isolate_draft,
        )
        self.speculation = speculation
        shape = speculation or NO_SPECULATION
        hosts_draft = bool(self.draft_layer_ids)
        self.extra_tokens = shape.extra_tokens(hosts_draft)
        headroom_tokens = shape.generation_headroom(hosts_draft)
        self.max_blocks_per_sequence = max_blocks_per_sequence(max_seq_len, headroom_tokens, tokens_per_block)
        slots = pool.slots(self.layout)
        self._source = PageSource(
            layout=self.layout,
            allocators=tuple(SlotAllocator(n, name=f"pool group {i}") for i, n in enumerate(slots)),
            max_capacity_tokens=self.max_blocks_per_sequence * tokens_per_block,
            pins=set(),
        )
        self.pools = PoolStorage(self.layout, slots, device=device)
        self._requests: dict[RequestId, KVCacheRequest] = {}
        self._closed = False

    @classmethod
    def from_scalars(  # noqa: PLR0913 - the scalars such callers hold, one by one
        cls,
        num_layers: int,
        num_kv_heads: int | Sequence[int],
        head_dim: int,
        dtype: KVDtype,
        *,
        tokens_per_block: int,
        max_seq_len: int,
        pool: PoolBudget,
        kv_factor: int = 2,
        total_num_kv_heads: int | Sequence[int] | None = None,
        windows: Sequence[int | None] | None = None,
        layer_mask: Sequence[bool] | None = None,
        extra_buffers: Mapping[int, Mapping[str, int]] | None = None,
        owner: LayerOwner = LayerOwner.TARGET,
        specs: Sequence[KVCacheLayerSpec] | None = None,
        kv_layout: KVLayout = KVLayout.HND,
        device: str = "cpu",
        speculation: SpeculationShape | None = None,
    ) -> Self:
        """Build a manager from the scalars of a model; the same pools and tables as from the equivalent specs.

        Args:
            num_layers: layers of the model. See `unikv.legacy.specs_from_scalars` for this and the other scalars.
            num_kv_heads: heads on this rank, for all layers or per layer.
            head_dim: elements per head.
            dtype: element type of K and V.
            tokens_per_block: token positions per block.
            max_seq_len: longest sequence in tokens.
            pool: size of the pools.
            kv_factor: 2 for K and V, 1 for key-only layers.
            total_num_kv_heads: heads of the whole model, for all layers or per layer.
            windows: pattern of sliding windows in tokens.
            layer_mask: which layers this rank holds.
            extra_buffers: further roles with their bytes per token, by layer number.
            owner: whose layers these are.
            specs: layer specs where the caller has them too. They count, and the scalars only have to agree.
            kv_layout: order of heads and tokens inside a page.
            device: "cpu", "cuda" or "cuda:<index>".
            speculation: the speculative mode, None without one.

        Raises:
            SpecError: any argument is wrong, a spec differs from a scalar, or the memory cannot be had.
        """
        if specs is not None:
            check_against_scalars(specs, num_kv_heads=num_kv_heads, head_dim=head_dim, kv_factor=kv_factor, dtype=dtype)
        else:
            specs = specs_from_scalars(
                num_layers,
                num_kv_heads,
                head_dim,
                dtype,
                kv_factor=kv_factor,
                total_num_kv_heads=total_num_kv_heads,
                windows=windows,
                layer_mask=layer_mask,
                extra_buffers=extra_buffers,
                owner=owner,
                max_seq_len=max_seq_len,
            )
        return cls(
            specs,
            tokens_per_block=tokens_per_block,
            max_seq_len=max_seq_len,
            pool=pool,
            kv_layout=kv_layout,
            device=device,
            speculation=speculation,
        )

    # ---- what the layers are

    @property
    def draft_layer_ids(self) -> tuple[LayerId, ...]:
        """Layers the drafter owns, in the order of the specs."""
        return tuple(spec.layer_id for spec in self.layout.specs if spec.is_draft)

    @property
    def layer_grouping(self) -> tuple[tuple[LayerId, ...], ...]:
        """Layers of each layer group, by group id."""
        return tuple(group.layer_ids for group in self.layout.groups)

    @property
    def bytes_per_token(self) -> int:
        """Bytes of one token in all layers and roles of this rank."""
        return sum(bytes_per_token(spec) for spec in self.layout.specs)

    def get_layer_spec(self, layer_id: LayerId) -> KVCacheLayerSpec:
        """Return the spec of a layer.

        Raises:
            UnknownLayerError: this rank holds no such layer. So do all the functions that take a layer id.
        """
        return self.layout.spec(layer_id)

    def get_layer_owner(self, layer_id: LayerId) -> LayerOwner:
        """Return whose layer it is."""
        return self.layout.spec(layer_id).owner

    def is_draft_layer(self, layer_id: LayerId) -> bool:
        """Return whether the drafter owns the layer."""
        return self.layout.spec(layer_id).is_draft

    def layer_kv_factor(self, layer_id: LayerId) -> int:
        """Return 2 for a layer with K and V, 1 for a key-only one."""
        return self.layout.spec(layer_id).kv_factor

    def layer_group_id(self, layer_id: LayerId) -> GroupId:
        """Return the layer group whose page table covers the layer."""
        return self.layout.group_of_layer(layer_id).group_id

    def get_layer_bytes_per_token(self, layer_id: LayerId, role: str | None = None) -> int:
        """Return the bytes one token takes in a layer: in one role, or in all of them.

        Raises:
            SpecError: the layer stores no such role.
        """
        spec = self.layout.spec(layer_id)
        return bytes_per_token(spec) if role is None else role_bytes_per_token(spec, role)

    # ---- memory

    def get_buffers(self, layer_id: LayerId) -> Tensor | None:
        """Return K and V of a layer, or None where it stores neither.

        Returns:
            ``[slots, kv_factor, heads, tokens_per_block, head_dim]`` (HND) or
            ``[slots, kv_factor, tokens_per_block, heads, head_dim]`` (NHD), zero-copy, with the stride of the physical
            slot. NVFP4 is packed: uint8 with ``head_dim / 2`` in the last dimension.
        """
        return self._tensor(kv_geometry(self.layout, layer_id, self._slots_of_layer(layer_id)))

    def get_scales(self, layer_id: LayerId) -> Tensor | None:
        """Return the block scales of an NVFP4 layer, None for every other layer.

        Returns:
            The leading dimensions of `get_buffers` and ``head_dim / 16``, float8_e4m3fn.
        """
        return self._tensor(scale_geometry(self.layout, layer_id, self._slots_of_layer(layer_id)))

    def get_extra(self, layer_id: LayerId, role: str) -> Tensor:
        """Return an extra buffer of a layer: ``[slots, tokens_per_block, bytes_per_token]`` uint8.

        Raises:
            SpecError: the layer declares no such extra.
        """
        return self.pools.tensor(extra_geometry(self.layout, layer_id, role, self._slots_of_layer(layer_id)))

    def get_flat_pages(self, layer_id: LayerId, *, sub_page_tokens: int | None = None) -> Tensor:
        """Return K and V of a layer as one list of pages, for kernels that take separate page ids for K and V.

        Args:
            layer_id: the layer.
            sub_page_tokens: read every page as smaller ones of this many tokens; must divide the block.

        Returns:
            ``[pages, heads, tokens, head_dim]`` (HND) or ``[pages, tokens, heads, head_dim]`` (NHD), starting at the
            layer's K in slot 0. `unikv.kernel_index.flat_page_index` turns slots into its page ids.

        Raises:
            SpecError: the layer stores no K, or the sub-page does not divide the block.
        """
        slots = self._slots_of_layer(layer_id)
        return self.pools.tensor(flat_geometry(self.layout, layer_id, slots, sub_page_tokens=sub_page_tokens))

    def num_slots(self, group_id: GroupId) -> int:
        """Return the slots of a layer group's pools, the null slot included. Pool mates share them."""
        return self._source.allocator(group_id).num_slots

    def num_free_pages(self, group_id: GroupId) -> int:
        """Return the pages a layer group can still get; ``num_slots - 1`` when nothing is used."""
        return self._source.allocator(group_id).num_free

    # ---- requests

    def create_request(self, request_id: RequestId) -> KVCacheRequest:
        """Return a new request without pages; it belongs to the manager until it is closed.

        Raises:
            LocalProtocolError: a request with this id is open, or the manager is closed.
        """
        if self._closed:
            want = "an open manager"
            raise LocalProtocolError(explain("cache manager", "state", "closed", want, "build a new one"))
        if request_id in self._requests:
            want = "an id that is not open"
            cure = "close the request before, or use another id"
            raise LocalProtocolError(explain("cache manager", "request_id", request_id, want, cure))
        request = KVCacheRequest(request_id, self._source, on_close=self._requests.__delitem__)
        self._requests[request_id] = request
        return request

    def block_table(
        self, group_id: GroupId, request_ids: Sequence[RequestId | None], *, pad_slot: int = NULL_SLOT
    ) -> SlotRow:
        """Return the block table of a batch for kernels.

        Args:
            group_id: the layer group.
            request_ids: one per row; None makes a dummy row (padding, warm-up) that reaches nobody's pages.
            pad_slot: what holes, tails and dummy rows hold.

        Returns:
            A new ``[rows, max_blocks_per_sequence]`` int32 array of raw slots. The caller owns it, and may copy it to
            a device while the next one is made.

        Raises:
            UnknownLayerError: there is no such group.
            LocalProtocolError: a request is not open.
        """
        self.layout.group(group_id)
        table = np.full((len(request_ids), self.max_blocks_per_sequence), pad_slot, dtype=np.int32)
        for out, request_id in zip(table, request_ids, strict=True):
            if request_id is not None:
                write_kernel_row(self._open_request(request_id).page_table(group_id), out, pad_slot)
        return table

    def context_capacity(self, position: int, chunk_tokens: int) -> int:
        """Return the capacity in tokens for a prefill chunk of `chunk_tokens` that starts at `position`."""
        return position + chunk_tokens + self.extra_tokens

    def generation_capacity(self, prompt_tokens: int, draft_tokens: int) -> int:
        """Return the capacity in tokens for a generation that starts behind a transferred prompt with some drafts.

        Resize to it together with ``history_tokens=prompt_tokens``, so that windowed groups get live blocks only.
        """
        return prompt_tokens + draft_tokens + self.extra_tokens

    def check_integrity(self) -> None:
        """Check every conservation law: slots, windows, and that tables and pins are what refers to the slots.

        Raises:
            InternalError: one is broken; the text prints the terms.
        """
        for allocator in self._source.allocators:
            allocator.check_integrity()
        referred: Counter[tuple[int, int]] = Counter()
        for request in self._requests.values():
            request.check_integrity()
            self._count(referred, {g: valid_slots(request.page_table(g)) for g in self._group_ids})
        for pin in self._source.pins:
            self._count(referred, pin.slots)
        for pool_group, allocator in enumerate(self._source.allocators):
            for slot in range(allocator.num_slots):
                got, want = allocator.references(slot), referred[pool_group, slot]
                if got != want:
                    thing = f"{allocator.name}, slot {slot}"
                    wanted = f"{want}, the page tables and pins that name it"
                    raise InternalError(explain(thing, "references", got, wanted, "report this"))

    def close(self) -> None:
        """Give the memory of the pools back. Safe to call twice.

        Raises:
            LocalProtocolError: requests are open or pages are pinned; nothing was changed.
        """
        if self._requests or self._source.pins:
            got = (
                f"{len(self._requests)} KV cache request(s) still open, {len(self._source.pins)} page pin(s) still held"
            )
            cure = "close them and prove their transfers over first"
            raise LocalProtocolError(explain("cache manager", "close()", got, "no request and no pin", cure))
        self._closed = True
        self.pools.close()

    @property
    def _group_ids(self) -> tuple[GroupId, ...]:
        return tuple(group.group_id for group in self.layout.groups)

    def _slots_of_layer(self, layer_id: LayerId) -> int:
        return self.num_slots(self.layer_group_id(layer_id))

    def _tensor(self, geometry: TensorGeometry | None) -> Tensor | None:
        return None if geometry is None else self.pools.tensor(geometry)

    def _open_request(self, request_id: RequestId) -> KVCacheRequest:
        if request_id not in self._requests:
            cure = "leave it out of the batch, or use None for a dummy row"
            raise LocalProtocolError(explain("block table", "request_id", request_id, "an open request", cure))
        return self._requests[request_id]

    def _count(self, referred: Counter[tuple[int, int]], slots: Mapping[GroupId, Sequence[int]]) -> None:
        for group_id, members in slots.items():
            pool_group = self.layout.group(group_id).pool_group
            referred.update((pool_group, slot) for slot in members)
