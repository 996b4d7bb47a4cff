"""The cache of one rank: target and drafter in one set of pools, with a page table per request and layer group.

The manager puts the parts together and decides little itself: `unikv.layout` says where bytes are, `unikv.buffers`
holds them, `unikv.slots` knows who owns which, and `unikv.request` what one request may touch.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Self

import numpy as np

from unikv.block_rows import BlockRow
from unikv.budget import PoolBudget
from unikv.buffers import PoolStorage
from unikv.cached_page import DEFAULT_PRIORITY, CachedPage
from unikv.cp_ledger import CpLedger
from unikv.errors import LocalProtocolError, SpecError, explain
from unikv.host_tier import HostTier
from unikv.host_tier_options import HostTierOptions
from unikv.ids import NULL_SLOT, GroupId, RequestId
from unikv.layer_spec import KVCacheLayerSpec, KVDtype, KVLayout, LayerOwner
from unikv.layer_views import LayerViews
from unikv.layout import build_layout
from unikv.legacy import check_against_scalars, specs_from_scalars
from unikv.page_cache import PageCacheManager
from unikv.page_copy import PageCopier, check_relocatable
from unikv.page_moves import TokenMove
from unikv.page_source import PageSource
from unikv.page_table import SlotRow, write_kernel_row
from unikv.page_tiers import CacheStatistics
from unikv.prefix_lookup import PrefixLookup
from unikv.prefix_tree import EVERYBODY, ReuseScope, token_bytes
from unikv.request import KVCacheRequest
from unikv.request_claim import PrefixClaim
from unikv.request_publish import PrefixPublisher, Priority
from unikv.reuse_options import DEFAULT_REUSE, PrefixProbe, ReuseOptions
from unikv.slots import check_slots
from unikv.speculation import NO_SPECULATION, SpeculationShape, max_blocks_per_sequence


class UnifiedKVCacheManager(LayerViews):
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
        host_tier: HostTierOptions | None = None,
        relocates_drafts: bool = False,
        cp_size: int = 1,
        cp_rank: int = 0,
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
            reuse: how prefixes are reused, and when requests are resumed.
            host_tier: host memory for pages that nobody runs with; None: they are dropped when others need room.
            relocates_drafts: `relocate_drafts` will be called: layers that cannot take part are refused here.
            cp_size: ranks that share every sequence, block by block; token numbers stay the sequence's, and page tables
                have this rank's blocks. More than one takes no part in prefix reuse.
            cp_rank: this rank's number among them.

        Raises:
            SpecError: any argument is wrong, or the memory cannot be had.
        """
        ledger = CpLedger(cp_size=cp_size, cp_rank=cp_rank, tokens_per_block=tokens_per_block)
        layout = build_layout(
            specs,
            tokens_per_block=tokens_per_block,
            max_seq_len=max_seq_len,
            kv_layout=kv_layout,
            isolate_draft=isolate_draft,
            lookahead_tokens=reuse.backoff_tokens,
        )
        if relocates_drafts:
            check_relocatable(layout)
        slots = pool.slots(layout)
        check_slots(slots)
        super().__init__(layout, PoolStorage(layout, slots, device=device), slots)
        try:
            self._tier = None if host_tier is None else HostTier(layout, self.pools, host_tier)
        except BaseException:
            self.pools.close()
            raise
        self.speculation, self.reuse = speculation, reuse
        shape = speculation or NO_SPECULATION
        hosts_draft = bool(self.draft_layer_ids)
        self.extra_tokens = shape.extra_tokens(hosts_draft)
        headroom_tokens = shape.generation_headroom(hosts_draft)
        self.max_blocks_per_sequence = max_blocks_per_sequence(
            max_seq_len, headroom_tokens, ledger.ledger_tokens_per_block
        )
        self._cache = PageCacheManager(self.layout, slots, self._tier)
        self._lookup = PrefixLookup(layout, self._cache.tree, reuse)
        self._copier = PageCopier(self.layout, self.pools)
        self._relocates = relocates_drafts
        self._source = PageSource(
            layout=self.layout,
            cache=self._cache,
            copy_pages=self._copier.copy,
            max_capacity_tokens=self.max_blocks_per_sequence * ledger.ledger_tokens_per_block,
            max_utilisation=reuse.max_utilisation,
            running=set(),
            pins=set(),
            ledger=ledger,
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

    def num_free_pages(self, group_id: GroupId) -> int:
        """Return the pages a layer group can still get, idle cached ones included; all but the null slot at first.

        Raises:
            UnknownLayerError: there is no such group.
        """
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
        rows, publisher, claim = self._empty_rows(), None, None
        if tokens is not None and self._source.ledger.cp_size > 1:
            cure = "leave tokens out"
            raise SpecError(explain("cache manager", "tokens with cp_size > 1", len(tokens), "None", cure))
        if tokens is not None:
            keys = token_bytes(tokens)
            match = self._lookup.match(keys, scope, claim_limit, whole_prompt=whole_prompt)
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
        also_required: Collection[GroupId] = (),
    ) -> PrefixProbe:
        """Return what `create_request` with the same arguments would take over, without taking it.

        Args:
            tokens: the prompt.
            scope: whose prefixes may match.
            claim_limit: most tokens that may be taken over.
            whole_prompt: also take over the last token.
            also_required: OPTIONAL groups that shall be complete: the answer is the longest match at which they are.

        Raises:
            SpecError: tokens are no integers, or a negative limit.
        """
        keys = token_bytes(tokens)
        return self._lookup.described(
            self._lookup.match(keys, scope, claim_limit, whole_prompt=whole_prompt, also_required=also_required)
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
        """Return the capacity in tokens for `draft_tokens` drafts behind a transferred prompt of `prompt_tokens`.

        Resize to it together with ``history_tokens=prompt_tokens``, so that windowed groups get live blocks only.
        """
        return prompt_tokens + draft_tokens + self.extra_tokens

    def relocate_drafts(self, accepted: Mapping[RequestId, tuple[Sequence[int], int]]) -> None:
        """Move the KV of accepted draft tokens to where they belong in their sequences, in every layer at once.

        A tree of drafts is verified in one pass; the accepted path's tokens lie somewhere among the drafts. All
        sources of the batch are read before a target is written.

        Args:
            accepted: by request: the positions the accepted tokens were drafted at, in order, and the position the
                first of them belongs to (the others follow).

        Raises:
            SpecError: a position has no page.
            LocalProtocolError: a request is not open, or the manager was not built with `relocates_drafts`.
        """
        if not self._relocates:
            cure = "build the manager with relocates_drafts=True"
            raise LocalProtocolError(explain("cache manager", "relocates_drafts", False, "True", cure))
        for group in self.layout.groups:
            moves: list[TokenMove] = []
            for request_id, (positions, target) in accepted.items():
                request = self._open_request(request_id)
                places = [request.place(group.group_id, position) for position in positions]
                targets = [request.place(group.group_id, target + i) for i in range(len(positions))]
                moves += [TokenMove(*of, *to) for of, to in zip(places, targets, strict=True) if of != to]
            self._copier.relocate(group.group_id, moves)

    def check_fits(self, capacity_tokens: int, history_tokens: int = 0) -> None:
        """Check that a request of this size could ever have its pages, in a cache that has nobody else. Reads only.

        Args:
            capacity_tokens: positions it shall have pages for.
            history_tokens: how many of them are final: what left a window by then takes no page.

        Raises:
            CapacityError: some pool group is too small; `permanent` is set.
            SpecError: it is longer than the longest sequence, or the history is longer than the capacity.
        """
        self._source.check_fits(capacity_tokens, history_tokens)

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
        if self._tier is not None:
            self._tier.close()
        self.pools.close()

    def _empty_rows(self) -> dict[GroupId, BlockRow]:
        return {group.group_id: BlockRow(group) for group in self.layout.groups}

    def _open_request(self, request_id: RequestId) -> KVCacheRequest:
        if request_id not in self._requests:
            cure = "leave it out of the batch, or use None for a dummy row"
            raise LocalProtocolError(explain("block table", "request_id", request_id, "an open request", cure))
        return self._requests[request_id]
