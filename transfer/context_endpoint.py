"""The context side as an engine uses it: publish a request's pages when its KV is computed."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from types import TracebackType
from typing import Self

import numpy as np

from transfer.context_engine import ContextEngine
from transfer.copier import Copier
from transfer.device_bytes import DeviceEvent
from transfer.driver import TransferDriver
from transfer.hello import RankCard
from transfer.link import Link
from transfer.messages import AuxData
from transfer.options import TransferOptions
from transfer.outcome import TransferHandle
from transfer.pages import SlotArray
from transfer.paths import Regions
from transfer.readiness import ReadinessManager
from unikv.ids import GroupId, RequestId


class ContextEndpoint:
    """Serves one context rank's pages to generation ranks, from a thread of its own. All methods are thread-safe.

    The caller owns the pages. From `publish` until the handle is `quiet` it must neither change nor free them.
    """

    def __init__(
        self,
        card: RankCard,
        *,
        link: Link,
        regions: Regions,
        copier: Copier,
        options: TransferOptions | None = None,
        on_change: Callable[[], None] | None = None,
    ) -> None:
        """Start serving.

        Args:
            card: this rank's card; its address must be the link's.
            link: owned by the endpoint from now on; used by its thread only.
            regions: our pools, by group id and pool index (`transfer.peer_memory.local_regions`).
            copier: owned by the endpoint from now on.
            options: None for the defaults.
            on_change: called from the endpoint's thread whenever a handle changes; must be quick and thread-safe.
        """
        self.card = card
        self._on_change = on_change
        options = options or TransferOptions()
        self._engine = ContextEngine(link, card, regions, copier, options, time.monotonic)
        self._driver = TransferDriver(self._engine, name=f"unikv-context-{card.rank}", watch_s=options.watch_s)

    def publish(
        self,
        request_id: RequestId,
        tables: Mapping[GroupId, SlotArray],
        prompt_tokens: int,
        aux: AuxData | None = None,
        *,
        written: Sequence[DeviceEvent] | None = None,
    ) -> TransferHandle:
        """Offer a request whose prompt KV is complete in our pages; it is moved to every generation rank that asks.

        Args:
            request_id: the id both sides know the request by.
            tables: int32 slots by ordinal per layer group, ``[>= ceil(prompt_tokens / tokens_per_block)]``; copied.
            prompt_tokens: tokens whose KV is in the pages.
            aux: what travels beside the KV.
            written: on a device, events behind which the KV is; copies wait for them there. None: it is behind
                whatever is queued on the device's default stream by now.

        Returns:
            The handle. A request that was cancelled before it was published comes back failed and quiet.

        Raises:
            LocalProtocolError: the request is published already.
            LinkClosedError: the endpoint is closed.
        """
        handle = TransferHandle(request_id, self._on_change)
        own = {group: np.array(slots, dtype=np.int32) for group, slots in tables.items()}
        self._driver.call(lambda: self._engine.publish(handle, own, prompt_tokens, aux, written=written))
        return handle

    def begin(
        self, request_id: RequestId, tables: Mapping[GroupId, SlotArray], prompt_tokens: int
    ) -> tuple[TransferHandle, ReadinessManager]:
        """Offer a request whose KV is being computed: pages leave as their layers are marked ready.

        `finish` must follow, or `fail`. In between the caller may write the pages that are not marked.

        Args:
            request_id: the id both sides know the request by.
            tables: as in `publish`: every page of the prompt has its slot already, and keeps it.
            prompt_tokens: tokens the prompt will have.

        Returns:
            The handle, and what to mark progress on; `poke` makes the endpoint look at it.

        Raises:
            LocalProtocolError: the request is published already.
            LinkClosedError: the endpoint is closed.
        """
        handle, readiness = TransferHandle(request_id, self._on_change), ReadinessManager(prompt_tokens, complete=False)
        own = {group: np.array(slots, dtype=np.int32) for group, slots in tables.items()}
        self._driver.call(lambda: self._engine.publish(handle, own, prompt_tokens, None, readiness))
        return handle, readiness

    def poke(self) -> None:
        """Let the endpoint's thread look at marks. Cheap; safe from any thread."""
        self._engine.link.wake()

    def finish(self, request_id: RequestId, aux: AuxData | None = None) -> None:
        """Say that all KV of a request that `begin` offered is there.

        Raises:
            LocalProtocolError: `aux` cannot travel; the request has failed.
            LinkClosedError: the endpoint is closed.
        """
        self._driver.call(lambda: self._engine.finish(request_id, aux))

    def fail(self, request_id: RequestId, reason: str) -> None:
        """Give a request up, whether or not it is published: generation ranks that want it hear `reason` at once."""
        self._driver.call(lambda: self._engine.fail(request_id, reason))

    def close(self, reason: str = "the context worker is closing", *, drain_s: float = 5.0) -> bool:
        """Fail what is open, let running copies end, free everything; True when all did end. Idempotent."""
        return self._driver.close(reason, drain_s=drain_s)

    @property
    def ended(self) -> bool:
        """Whether our thread is gone: only then may the link's and the pools' memory go."""
        return self._driver.ended

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
