"""The cache of one rank: target and drafter in one set of pools, with a page table per request and layer group.

The manager puts the parts together and decides little itself: `unikv.layout` says where bytes are, `unikv.buffers`
holds them, `unikv.slots` knows who owns which, and `unikv.request` what one request may touch.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Self

import numpy as np

from unikv.block_rows import BlockRow
from unikv.budget import PoolBudget
from unikv.buffers import PoolStorage, Tensor
from unikv.cached_page import DEFAULT_PRIORITY, CachedPage
from unikv.errors import LocalProtocolError, SpecError, explain
from unikv.geometry import TensorGeometry, extra_geometry, flat_geometry, kv_geometry, scale_geometry
from unikv.ids import NULL_SLOT, GroupId, LayerId, RequestId
from unikv.layer_spec import KVCacheLayerSpec, KVDtype, KVLayout, LayerOwner
from unikv.layout import build_layout, bytes_per_token, role_bytes_per_token
from unikv.legacy import check_against_scalars, specs_from_scalars
from unikv.page_cache import CacheStatistics, PageCacheManager
from unikv.page_copy import PageCopier
from unikv.page_source import PageSource
from unikv.page_table import SlotRow, write_kernel_row
from unikv.prefix_match import PrefixMatch, match_prefix, reuse_status
from unikv.prefix_tree import EVERYBODY, TOKEN_BYTES, ReuseScope, token_bytes
from unikv.request import KVCacheRequest
from unikv.request_claim import PrefixClaim
from unikv.request_publish import PrefixPublisher, Priority
from unikv.reuse_options import DEFAULT_REUSE, PrefixProbe, ReuseOptions
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

    def __init__(  # noqa: PLR0913 - what an engine decides once
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
        reuse: ReuseOptions = DEFAULT_REUSE,
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
            reuse: how prefixes are reused, and what happens to pages that nobody runs with.

        Raises:
            SpecError: any argument is wrong, or the memory cannot be had.
        """
        self.layout = build_layout(
            specs,
            tokens_per_block=tokens_per_block,
            max_seq_len=max_seq_len,
            kv_layout=kv_layout,
            isolate_draft=isolate_draft,
            lookahead_tokens=reuse.backoff_tokens,
        )
        self.speculation = speculation
        shape = speculation or NO_SPECULATION
        hosts_draft = bool(self.draft_layer_ids)
        self.extra_tokens = shape.extra_tokens(hosts_draft)
        headroom_tokens = shape.generation_headroom(hosts_draft)
        self.max_blocks_per_sequence = max_blocks_per_sequence(max_seq_len, headroom_tokens, tokens_per_block)
        slots = pool.slots(self.layout)
        self.reuse = reuse
        self._cache = PageCacheManager(self.layout, slots)
        self.pools = PoolStorage(self.layout, slots, device=device)
        self._source = PageSource(
            layout=self.layout,
            cache=self._cache,
            copy_pages=PageCopier(self.layout, self.pools).copy,
            max_capacity_tokens=self.max_blocks_per_sequence * tokens_per_block,
            max_utilisation=reuse.max_utilisation,
            pins=set(),
        )
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
        """Return the pages a layer group can still get, idle cached ones included; all but the null slot at first."""
        return self._cache.available(self.layout.group(group_id).pool_group)

    # ---- requests

    def create_request(
        self,
        request_id: RequestId,
        tokens: Sequence[int] | np.ndarray | None = None,
        *,
        scope: ReuseScope = EVERYBODY,
        claim_limit: int | None = None,
        whole_prompt: bool = False,
        priority: Priority = lambda _ordinal, _group_id: DEFAULT_PRIORITY,
    ) -> KVCacheRequest:
        """Return a new request; it belongs to the manager until it is closed.

        Args:
            request_id: its name.
            tokens: the prompt, for prefix reuse. The request begins SUSPENDED with what matches, and may commit. With
                an empty prompt nothing matches. None: no part in reuse, and ACTIVE without pages.
            scope: whose prefixes may match, and where this one is published.
            claim_limit: most tokens that may be taken over.
            whole_prompt: also take over the last token, which otherwise is computed again for its logits.
            priority: eviction priority of what it publishes.

        Raises:
            SpecError: tokens are no integers, or a negative limit.
            LocalProtocolError: a request with this id is open, or the manager is closed.
        """
        if self._closed:
            want = "an open manager"
            raise LocalProtocolError(explain("cache manager", "state", "closed", want, "build a new one"))
        if request_id in self._requests:
            want = "an id that is not open"
            cure = "close the request before, or use another id"
            raise LocalProtocolError(explain("cache manager", "request_id", request_id, want, cure))
        rows = {group.group_id: BlockRow(group) for group in self.layout.groups}
        publisher, claim = None, None
        if tokens is not None:
            keys = token_bytes(tokens)
            match = self._match(keys, scope, claim_limit, whole_prompt=whole_prompt)
            partial = self.reuse.partial_blocks
            publisher = PrefixPublisher(self._cache, rows, scope, priority, partial=partial)
            publisher.take_over(match, keys)
            claim = PrefixClaim.of(self._cache, match)
        request = KVCacheRequest(
            request_id, self._source, rows, self._requests.__delitem__, publisher=publisher, claim=claim
        )
        self._requests[request_id] = request
        return request

    def probe(
        self,
        tokens: Sequence[int] | np.ndarray,
        *,
        scope: ReuseScope = EVERYBODY,
        claim_limit: int | None = None,
        whole_prompt: bool = False,
    ) -> PrefixProbe:
        """Return what `create_request` with the same arguments would take over, without taking it.

        Raises:
            SpecError: tokens are no integers, or a negative limit.
        """
        match = self._match(token_bytes(tokens), scope, claim_limit, whole_prompt=whole_prompt)
        tpb = self.layout.tokens_per_block
        return PrefixProbe(
            num_tokens=match.num_tokens,
            divergence_tokens=match.divergence_tokens,
            lookup_tokens=match.lookup_tokens,
            status=tuple(reuse_status(match, group, tpb) for group in self.layout.groups),
        )

    def clear_reusable_blocks(self) -> int:
        """Forget every published prefix; return how many blocks that were.

        Raises:
            LocalProtocolError: requests are open; nothing was changed.
        """
        if self._requests:
            got = f"{len(self._requests)} KV cache request(s) still open"
            raise LocalProtocolError(
                explain("cache manager", "clear_reusable_blocks()", got, "no request", "close them first")
            )
        return self._cache.clear()

    @property
    def statistics(self) -> CacheStatistics:
        """Counters of what happened to pages; live."""
        return self._cache.statistics

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
        referred: Counter[tuple[int, int]] = Counter()
        holders: Counter[CachedPage] = Counter()
        for request in self._requests.values():
            request.check_integrity()
            referred.update(request.references())
            held = request.holdings()
            holders.update(held.held_pages() if held is not None else ())
        for pin in self._source.pins:
            for group_id, slots in pin.slots.items():
                referred.update((self.layout.group(group_id).pool_group, slot) for slot in slots)
        self._cache.check_integrity(referred, holders)

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

    def _slots_of_layer(self, layer_id: LayerId) -> int:
        return self.num_slots(self.layer_group_id(layer_id))

    def _tensor(self, geometry: TensorGeometry | None) -> Tensor | None:
        return None if geometry is None else self.pools.tensor(geometry)

    def _open_request(self, request_id: RequestId) -> KVCacheRequest:
        if request_id not in self._requests:
            cure = "leave it out of the batch, or use None for a dummy row"
            raise LocalProtocolError(explain("block table", "request_id", request_id, "an open request", cure))
        return self._requests[request_id]

    def _match(self, keys: bytes, scope: ReuseScope, claim_limit: int | None, *, whole_prompt: bool) -> PrefixMatch:
        """Look up a prompt: its last token is left to compute, and tokens a drafter reads ahead serve as evidence."""
        backoff, total = self.reuse.backoff_tokens, len(keys) // TOKEN_BYTES
        lookup = total if whole_prompt else min(total, max(0, total - 1 + backoff))
        if claim_limit is not None:
            if claim_limit < 0:
                raise SpecError(explain("prefix", "claim_limit", claim_limit, ">= 0 tokens", "pass None for no limit"))
            lookup = min(lookup, claim_limit + backoff) if claim_limit else 0
        return match_prefix(
            self._cache.tree,
            scope,
            keys[: lookup * TOKEN_BYTES],
            self.layout.groups,
            tokens_per_block=self.layout.tokens_per_block,
            partial=self.reuse.partial_blocks,
            backoff_tokens=backoff,
        )
