"""A cache whose pages hold numbers that tell which tokens they were computed for, so that wrong sharing shows."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from unikv.budget import PoolBudget
from unikv.cache_manager import UnifiedKVCacheManager
from unikv.ids import NO_PAGE, GroupId, LayerId, RequestId
from unikv.layer_spec import KVCacheLayerSpec, KVDtype, LayerOwner, ReusePolicy
from unikv.page_cache import PageCacheManager
from unikv.page_moves import Moves
from unikv.prefix_tree import EVERYBODY, TOKEN_BYTES, PrefixNode
from unikv.request import ResumeResult

PRIME = 2**31 - 1


def stamps(tokens: Sequence[int], layer_id: int) -> np.ndarray[Any, Any]:
    """Return what the KV of every position is: a number made of all tokens up to it and of the layer."""
    found, value = [], 7 + layer_id
    for token in tokens:
        value = (value * 1_000_003 + int(token) + 1) % PRIME
        found.append(value)
    return np.asarray(found, dtype=np.int32)


class HostCopies:
    """A host tier that is only memory: really copies the bytes of pages, at once.

    Attributes:
        broken: "store" or "load": that copy fails half-way.
    """

    def __init__(self, manager: UnifiedKVCacheManager, pages: int | Mapping[int, int]) -> None:
        layout = manager.layout
        self._pages = [pages if isinstance(pages, int) else pages.get(i, 0) for i in range(layout.num_pool_groups)]
        self._device: dict[int, list[np.ndarray[Any, Any]]] = {}
        self._host: dict[int, list[np.ndarray[Any, Any]]] = {}
        for group in layout.groups:
            sizes = [pool.slot_bytes for pool in group.pools]
            storages = [manager.pools.storages[manager.pools.storage_of(group.group_id, i)] for i in range(len(sizes))]
            self._device[group.pool_group] = [s.numpy().reshape(-1, n) for s, n in zip(storages, sizes, strict=True)]
            host = [np.zeros((self._pages[group.pool_group], n), dtype=np.uint8) for n in sizes]
            self._host.setdefault(group.pool_group, host)
        self._pool_group = {group.group_id: group.pool_group for group in layout.groups}
        self.broken = ""

    def num_slots(self, pool_group: int) -> int:
        return self._pages[pool_group]

    def store(self, moves: Moves) -> None:
        for group_id, copies in moves.items():
            for device, host in self._pairs(group_id):
                for move in copies:
                    host[move.target] = device[move.source]
                    self._fail("store")

    def load(self, moves: Moves) -> None:
        for group_id, copies in moves.items():
            for device, host in self._pairs(group_id):
                for move in copies:
                    device[move.target] = host[move.source]
                    self._fail("load")

    def close(self) -> None:
        self._device.clear()

    def _fail(self, copy: str) -> None:
        if self.broken == copy:
            raise RuntimeError(f"{copy}: out of memory")

    def _pairs(self, group_id: GroupId) -> Iterator[tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]]:
        number = self._pool_group[group_id]
        return zip(self._device[number], self._host[number], strict=True)


class Bench:
    """A manager with a memory view per layer; `check` proves every published page to hold its own tokens."""

    def __init__(self, specs: Sequence[KVCacheLayerSpec], *, host: int | Mapping[int, int] | None = None, **kw: Any):
        kw.setdefault("tokens_per_block", 4)
        kw.setdefault("max_seq_len", 1024)
        pages = kw.pop("pages", 64)
        kw.setdefault("pool", PoolBudget(pages=pages) if isinstance(pages, int) else pages)
        self.manager = UnifiedKVCacheManager(specs, **kw)
        self.tier = None
        self.closed = False
        if host is not None:
            manager = self.manager
            self.tier = HostCopies(manager, host)
            slots = [allocator.num_slots for allocator in manager._cache.allocators]
            manager._cache = PageCacheManager(manager.layout, slots, tier=self.tier)
            manager._source = replace(manager._source, cache=manager._cache)
            manager._lookup = replace(manager._lookup, tree=manager._cache.tree)
        self.tpb = self.manager.layout.tokens_per_block
        self.groups = self.manager.layout.groups
        self.views: dict[LayerId, np.ndarray[Any, Any]] = {}
        for spec in specs:
            buffers = self.manager.get_buffers(spec.layer_id)
            assert buffers is not None
            self.views[spec.layer_id] = buffers.view(torch.int32).numpy()  # [slots, lanes, heads, tokens, 8]
        self.chats: list[Chat] = []

    @property
    def cache(self) -> PageCacheManager:
        return self.manager._cache

    def open(self, request_id: int, tokens: Sequence[int], *groups: int, **kw: Any) -> Chat:
        """Create a request and resume it on the OPTIONAL `groups`."""
        chat = self.create(request_id, tokens, **kw)
        assert chat.resume(*groups) is ResumeResult.OK
        return chat

    def create(self, request_id: int, tokens: Sequence[int], **kw: Any) -> Chat:
        """Create a request; it is SUSPENDED with what it claimed."""
        return Chat(self, request_id, tokens, **kw)

    def publish(self, request_id: int, tokens: Sequence[int], **kw: Any) -> None:
        """Compute and publish `tokens`, and close."""
        chat = self.open(request_id, tokens, **kw)
        chat.compute(len(tokens))
        chat.close()

    def probe(self, tokens: Sequence[int], **kw: Any) -> int:
        """Return how many of all `tokens` match."""
        kw.setdefault("whole_prompt", True)
        return self.manager.probe(tokens, **kw).num_tokens

    def nodes(self) -> list[PrefixNode]:
        return list(self.cache.tree.nodes())

    def free(self, group_id: int = 0) -> int:
        """Return the pages of a group that nobody has, idle ones left out."""
        return self.cache.allocators[self.groups[group_id].pool_group].num_free

    def page(self, tokens: Sequence[int], ordinal: int, group_id: int) -> Any:
        """Return the published page of a block of `tokens`."""
        probe = self.manager._lookup.match(
            np.asarray(tokens, dtype=np.int64).tobytes(), EVERYBODY, None, whole_prompt=True
        )
        assert ordinal < len(probe.nodes), "the block is not in the tree"
        return probe.nodes[ordinal].pages[group_id]

    def unlink(self, tokens: Sequence[int], ordinal: int, group_id: int) -> None:
        """Drop a published page, as eviction does."""
        self.cache.unlink(self.page(tokens, ordinal, group_id))
        self.check()

    def content(self, layer_id: int, slot: int, start: int = 0, end: int | None = None) -> np.ndarray[Any, Any]:
        """Return the numbers at some offsets of a page; all lanes, heads and elements must agree there.

        Elsewhere a page may still have what it had as a page of other layers, of another shape.
        """
        page = self.views[LayerId(layer_id)][slot][:, :, start:end]
        values = page[0, 0, :, 0]
        assert (page == values[None, None, :, None]).all()
        return values

    def check(self) -> None:
        """Check the laws, the shape of the tree, and the content of every published and every readable page."""
        self.manager.check_integrity()
        for node in self.nodes():
            assert node.children or node.partials or any(node.pages), f"block {node.ordinal} is of no use"
            keys = [*node.partials, *node.children]
            assert not any(a != b and a.startswith(b) for a in keys for b in node.partials)
            self._check_node(node)
        for chat in self.chats:
            chat.check()

    def _check_node(self, node: PrefixNode) -> None:
        tokens = line(node)
        for page in node.pages:
            if page is None:
                continue
            assert page.ordinal == node.ordinal
            assert page.valid_from < page.span <= node.num_tokens
            if page.slot != NO_PAGE:
                self.check_page(page.group_id, page.slot, tokens, page.ordinal, page.valid_from, page.span)

    def check_page(
        self, group_id: GroupId, slot: int, tokens: Sequence[int], ordinal: int, start: int, end: int
    ) -> None:
        for layer_id in self.groups[group_id].layer_ids:
            want = stamps(tokens, layer_id)[ordinal * self.tpb :][start:end]
            got = self.content(layer_id, slot, start, end)
            assert np.array_equal(got, want), f"group {group_id}, ordinal {ordinal}, slot {slot}: {got} != {want}"

    def finish(self) -> None:
        """Close everything: every page must be free or idle, and free when the tree is cleared."""
        if self.closed:
            return
        self.closed = True
        manager = self.manager
        for request in list(manager._requests.values()):
            request.close()
        self.check()
        for group in self.groups:
            assert manager.num_free_pages(group.group_id) == manager.num_slots(group.group_id) - 1
        manager.clear_reusable_blocks()
        assert self.nodes() == []
        for allocator in self.cache.allocators:
            assert allocator.num_free == allocator.num_slots - 1
        self.check()
        self.views.clear()
        if self.tier is not None:
            self.tier.close()
        manager.close()


class Chat:
    """One request and the tokens it is about; writes KV as a model would."""

    def __init__(self, bench: Bench, request_id: int, tokens: Sequence[int], **kw: Any) -> None:
        self.bench, self.tokens = bench, list(tokens)
        kw.setdefault("whole_prompt", True)
        self.request = bench.manager.create_request(RequestId(request_id), self.tokens, **kw)
        self.first: dict[int, int] = {}
        bench.chats.append(self)
        bench.check()

    def resume(self, *groups: int) -> ResumeResult:
        first = self.request._held is None
        result = self.request.resume([GroupId(g) for g in groups] if groups else None)
        if first and result is ResumeResult.OK:
            for group in self.bench.groups:
                takes = group.reuse_policy is ReusePolicy.REQUIRED or group.group_id in groups
                self.first[group.group_id] = 0 if takes else self.request.history_tokens
        self.bench.check()
        return result

    def suspend(self) -> None:
        self.request.suspend()
        self.bench.check()

    def compute(self, end: int, *, commit: bool = True, skip: Mapping[int, int] | None = None) -> None:
        """Compute tokens up to `end`. Groups in `skip` are written from a position on only."""
        request = self.request
        begin = request.history_tokens
        request.resize(max(end, request.capacity_tokens))
        for group in self.bench.groups:
            start = max(begin, (skip or {}).get(group.group_id, 0))
            if start > begin:
                self.first[group.group_id] = start
                request.mark_written(group.group_id, start, sinks=False)
            self.write(group.group_id, start, end)
        request.resize(history_tokens=end)
        self.bench.check()
        if commit:
            self.commit(end)

    def receive(self, end: int) -> None:
        """Get tokens up to `end` from elsewhere, as a transfer does: only into pages that are live in the end."""
        request, begin = self.request, self.request.history_tokens
        for group in self.bench.groups:
            self.write(group.group_id, begin, min(end, request.capacity_tokens))
        request.resize(max(end, request.capacity_tokens), history_tokens=end)
        for group in self.bench.groups:
            self.write(group.group_id, begin, end)
        self.bench.check()

    def write(self, group_id: int, start: int, end: int) -> None:
        group = self.bench.groups[group_id]
        row = self.row(group_id)
        for layer_id in group.layer_ids:
            values = stamps(self.tokens[:end], layer_id)
            for position in range(start, end):
                slot = row[position // self.bench.tpb]
                if slot != NO_PAGE:
                    self.bench.views[layer_id][slot, :, :, position % self.bench.tpb] = values[position]

    def commit(self, end: int, *, is_end: bool = False) -> None:
        self.request.commit(self.tokens[self.request.committed_tokens : end], is_end=is_end)
        self.bench.check()

    def stop(self) -> None:
        self.request.stop_committing()
        self.bench.check()

    def close(self) -> None:
        self.request.close()
        self.bench.check()

    def row(self, group_id: int) -> list[int]:
        row: list[int] = self.request.page_table(GroupId(group_id)).tolist()
        return row

    def live(self, group_id: int) -> list[int]:
        return [ordinal for ordinal, slot in enumerate(self.row(group_id)) if slot != NO_PAGE]

    def check(self) -> None:
        """Check that everything the next token may attend to is there, with the right content."""
        if self.request.state.value != "active" or not self.first:
            return
        history, tpb = self.request.history_tokens, self.bench.tpb
        for group in self.bench.groups:
            row = self.row(group.group_id)
            low = 0 if group.window is None else max(0, history + 1 - group.window)
            for ordinal in range(-(-history // tpb)):
                start = ordinal * tpb
                reads = 0 if ordinal < group.sink_blocks else max(0, low - start)
                reads, end = max(reads, self.first[group.group_id] - start), min(tpb, history - start)
                if reads < end:
                    self.bench.check_page(group.group_id, row[ordinal], self.tokens, ordinal, reads, end)


def line(node: PrefixNode) -> list[int]:
    """Return all tokens from the root to the end of a node."""
    keys: list[bytes] = []
    while node.parent is not None:
        keys.append(node.key)
        node = node.parent
    data = b"".join(reversed(keys))
    assert len(data) % TOKEN_BYTES == 0
    return [int(token) for token in np.frombuffer(data, dtype=np.int64)]


def layer(layer_id: int, *, heads: int = 1, **fields: Any) -> KVCacheLayerSpec:
    """Return a small layer: 64 bytes a token and head."""
    fields.setdefault("owner", LayerOwner.TARGET)
    return KVCacheLayerSpec(
        layer_id=LayerId(layer_id), num_kv_heads=heads, head_dim=16, dtype=KVDtype.FLOAT16, **fields
    )


@pytest.fixture
def make_layer() -> Callable[..., KVCacheLayerSpec]:
    return layer


@pytest.fixture
def make_bench() -> Iterator[Callable[..., Bench]]:
    """Return a function that builds benches; when all requests are closed, every page must be free or idle."""
    benches: list[Bench] = []

    def build(*specs: KVCacheLayerSpec, **kw: Any) -> Bench:
        benches.append(Bench(specs, **kw))
        return benches[-1]

    yield build
    for bench in benches:
        bench.finish()
