"""One rank's cache, card and links, brought up in order and taken down in reverse."""

from __future__ import annotations

import logging
import secrets
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace

from transfer.context_endpoint import ContextEndpoint
from transfer.copier import Copier
from transfer.generation_endpoint import GenerationEndpoint
from transfer.hello import CAPABILITY_NIXL, RankCard, Side
from transfer.link_curve import CurveKeys
from transfer.link_zmq import ZmqLink
from transfer.nixl_agent import why_no_nixl
from transfer.peer_memory import own_host_identity
from unikv.cache_manager import UnifiedKVCacheManager
from unikv.errors import ConfigError, explain
from workers.addresses import ON_LOOPBACK, LinkAddress
from workers.config import PairConfig, SideConfig
from workers.rank_device import make_copier, memory_export, pool_regions, rank_device, rank_reach
from workers.routing import num_workers, place_of
from workers.runner import Runner
from workers.topology import (
    check_carrier,
    check_device,
    host_tier_options,
    pool_budget,
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
    if not 0 <= rank < num_workers(config):
        want = f"in [0, {num_workers(config)})"
        raise ConfigError(explain(f"{side} worker", "rank", rank, want, "match instances and parallel of the side"))
    check_device(config)
    check_carrier(pair)


class RankRuntime:
    """What a worker process of either side owns. A context manager: leaving it frees everything.

    Attributes:
        rank: number of the worker on its side: the flat rank inside its instance, behind those of earlier instances.
        manager: the rank's cache.
        card: what peers learn of it; its address is that of `transfer_link`.
        control: link to the caller; used by the worker's main thread only.
        transfer_link: handed over to the endpoint, which closes it.
    """

    def __init__(
        self, pair: PairConfig, side: Side, rank: int, *, instance: str, address: LinkAddress = ON_LOOPBACK
    ) -> None:
        """Bring up the rank; on failure at any step what exists is taken down and the error goes on.

        Raises:
            ConfigError: no such rank, or a device this release cannot serve.
        """
        check_rank(pair, side, rank)
        config = pair.side(side)
        self.pair, self.side, self.rank = pair, side, rank
        _, self.position = place_of(config, rank)
        self._address = address
        self._stack = ExitStack()
        self._endpoint: ContextEndpoint | GenerationEndpoint | None = None
        try:
            self._bring_up(config, instance)
        except BaseException:
            self._stack.close()
            raise

    def bind(self, runner: Runner) -> None:
        """Give `runner` the pages."""
        runner.bind(self.manager, self.card)

    def context_endpoint(self, on_change: Callable[[], None], copier: Copier | None = None) -> ContextEndpoint:
        """Start our endpoint of the context side; it owns the transfer link, and `copier`, from now on."""
        self._endpoint = endpoint = ContextEndpoint(
            self.card,
            link=self.transfer_link,
            regions=pool_regions(self.card, self.manager.pools),
            copier=copier or make_copier(self.card.device, threads=self.pair.transfer.copy_threads),
            options=self.pair.transfer.options(),
            on_change=on_change,
        )
        return endpoint

    def generation_endpoint(self, on_change: Callable[[], None]) -> GenerationEndpoint:
        """Start our endpoint of the generation side; it owns the transfer link from now on."""
        self._endpoint = endpoint = GenerationEndpoint(
            self.card,
            link=self.transfer_link,
            regions=pool_regions(self.card, self.manager.pools),
            copier=make_copier(self.card.device, threads=self.pair.transfer.copy_threads),
            options=self.pair.transfer.options(),
            on_change=on_change,
        )
        return endpoint

    def close(self) -> None:
        """Free links and memory, the links first. The cache's requests must be closed. Idempotent.

        Where the endpoint's thread does not end, link and memory are its own until the process ends.
        """
        endpoint, self._endpoint = self._endpoint, None
        if endpoint is not None and not endpoint.ended:
            _log.error("%s rank %d: the transfer's thread does not end; its memory stays", self.side, self.rank)
            self._stack.pop_all()
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
            cp_size=self.position.cp,
            cp_rank=self.position.cp_rank,
        )
        self._stack.callback(self.manager.close)
        _log.info("%s rank %d: cache of %d bytes", self.side, self.rank, self._pool_bytes())
        keys = self.pair.transfer.curve_keys()
        self.control = self._listen(keys)
        self._stack.callback(self.control.close)
        self.transfer_link = self._listen(keys)
        self._stack.callback(self.transfer_link.close)
        self.card = self._describe(instance)

    def _listen(self, keys: CurveKeys | None) -> ZmqLink:
        silence_s = self.pair.transfer.peer_silence_s
        return ZmqLink(self._address.bind, advertise=self._address.advertise, curve=keys, silence_s=silence_s)

    def _describe(self, instance: str) -> RankCard:
        device = str(self.manager.pools.device)
        card = rank_card(
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
        return card if why_no_nixl() else replace(card, capabilities=(*card.capabilities, CAPABILITY_NIXL))

    def _pool_bytes(self) -> int:
        return sum(storage.numel() for storage in self.manager.pools.storages)
