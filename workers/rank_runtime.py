"""One rank's cache, card and links, brought up in order and taken down in reverse."""

from __future__ import annotations

import logging
import secrets
from collections.abc import Callable
from contextlib import ExitStack

from transfer.context_endpoint import ContextEndpoint
from transfer.copier import Copier
from transfer.generation_endpoint import GenerationEndpoint
from transfer.hello import RankCard, Side
from transfer.link_zmq import ZmqLink
from transfer.peer_memory import own_host_identity
from unikv.cache_manager import UnifiedKVCacheManager
from unikv.errors import ConfigError, explain
from workers.config import PairConfig, SideConfig
from workers.rank_device import make_copier, memory_export, pool_regions, rank_device, rank_reach
from workers.runner import Runner
from workers.topology import (
    check_device,
    host_tier_options,
    pool_budget,
    positions,
    rank_card,
    rank_specs,
    speculation_shape,
)

_log = logging.getLogger(__name__)


def check_rank(pair: PairConfig, side: Side, rank: int) -> None:
    """Refuse a rank that cannot be served, which nobody should have to wait for a rendezvous to hear.

    Raises:
        ConfigError: no such rank, or a device this release cannot serve.
    """
    config = pair.side(side)
    if not 0 <= rank < config.parallel.world_size:
        want = f"in [0, {config.parallel.world_size})"
        raise ConfigError(explain(f"{side} worker", "rank", rank, want, "match parallel in the pair file"))
    check_device(config)


class RankRuntime:
    """What a worker process of either side owns. A context manager: leaving it frees everything.

    Attributes:
        manager: the rank's cache.
        card: what peers learn of it; its address is that of `transfer_link`.
        control: link to the caller; used by the worker's main thread only.
        transfer_link: handed over to the endpoint, which closes it.
    """

    def __init__(self, pair: PairConfig, side: Side, rank: int, *, instance: str) -> None:
        """Bring up the rank; on failure at any step what exists is taken down and the error goes on.

        Raises:
            ConfigError: no such rank, or a device this release cannot serve.
        """
        check_rank(pair, side, rank)
        config = pair.side(side)
        self.pair, self.side, self.position = pair, side, positions(config)[rank]
        self._stack = ExitStack()
        try:
            self._bring_up(config, instance)
        except BaseException:
            self._stack.close()
            raise

    @property
    def rank(self) -> int:
        """Flat rank inside the instance."""
        return self.position.rank

    def bind(self, runner: Runner) -> None:
        """Give `runner` the pages."""
        runner.bind(self.manager, self.card)

    def context_endpoint(self, on_change: Callable[[], None], copier: Copier | None = None) -> ContextEndpoint:
        """Start our endpoint of the context side; it owns the transfer link, and `copier`, from now on."""
        return ContextEndpoint(
            self.card,
            link=self.transfer_link,
            regions=pool_regions(self.card, self.manager.pools),
            copier=copier or make_copier(self.card.device),
            options=self.pair.transfer.options(),
            on_change=on_change,
        )

    def generation_endpoint(self, on_change: Callable[[], None]) -> GenerationEndpoint:
        """Start our endpoint of the generation side; it owns the transfer link from now on."""
        return GenerationEndpoint(
            self.card,
            link=self.transfer_link,
            regions=pool_regions(self.card, self.manager.pools),
            copier=make_copier(self.card.device),
            options=self.pair.transfer.options(),
            on_change=on_change,
        )

    def close(self) -> None:
        """Free links and memory, the links first. The cache's requests must be closed. Idempotent."""
        self._stack.close()

    def __enter__(self) -> RankRuntime:
        return self

    def __exit__(self, *_exc: object) -> None:
        self.close()

    def _bring_up(self, config: SideConfig, instance: str) -> None:
        self.manager = UnifiedKVCacheManager(
            rank_specs(config, self.position),
            tokens_per_block=config.tokens_per_block,
            max_seq_len=config.max_seq_len,
            pool=pool_budget(config),
            kv_layout=config.kv_layout,
            device=rank_device(config, self.rank),
            speculation=speculation_shape(config),
            host_tier=host_tier_options(config),
        )
        self._stack.callback(self.manager.close)
        _log.info("%s rank %d: cache of %d bytes", self.side, self.rank, self._pool_bytes())
        keys = self.pair.transfer.curve_keys()
        self.control = ZmqLink(curve=keys)
        self._stack.callback(self.control.close)
        self.transfer_link = ZmqLink(curve=keys)
        self._stack.callback(self.transfer_link.close)
        self.card = self._describe(instance)

    def _describe(self, instance: str) -> RankCard:
        device = str(self.manager.pools.device)
        return rank_card(
            self.pair,
            self.side,
            self.position,
            layout=self.manager.layout,
            num_slots={group.group_id: self.manager.num_slots(group.group_id) for group in self.manager.layout.groups},
            incarnation=secrets.token_hex(16),
            instance=instance,
            address=self.transfer_link.address,
            device=device,
            exports=[memory_export(export) for export in self.manager.pools.exports()],
            host=own_host_identity(),
            reach=rank_reach(device),
        )

    def _pool_bytes(self) -> int:
        return sum(storage.numel() for storage in self.manager.pools.storages)
