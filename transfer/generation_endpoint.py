"""The generation side as an engine uses it: connect to a context instance, receive requests into reserved pages."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from types import TracebackType
from typing import Final, Self

import numpy as np

from transfer.copier import Copier
from transfer.driver import TransferDriver
from transfer.gate import require_compatible
from transfer.gate_report import DraftKV, GateReport
from transfer.generation_engine import GenerationEngine
from transfer.generation_peers import Registration
from transfer.hello import PathKind, RankCard
from transfer.link import Link
from transfer.options import TransferOptions
from transfer.outcome import TransferHandle
from transfer.pages import SlotArray
from transfer.paths import Regions
from unikv.errors import IncompatiblePeerError, LinkBrokenError, LocalProtocolError, explain
from unikv.ids import GroupId, Rank, RequestId

_POLL_S: Final = 0.005


@dataclass(frozen=True, slots=True, kw_only=True)
class ContextRank:
    """One context rank of a connected instance.

    Attributes:
        data_rank: the group of ranks it serves requests with, under attention data parallelism; else 0.
        moves_bytes: whether this pair of ranks has anything to move.
    """

    rank: Rank
    data_rank: int
    address: str
    path: PathKind
    path_reason: str
    report: GateReport
    moves_bytes: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class ContextInstance:
    """A context instance that accepted us, rank by rank."""

    name: str
    ranks: tuple[ContextRank, ...]

    @property
    def addresses(self) -> tuple[str, ...]:
        """Link addresses of all its ranks."""
        return tuple(rank.address for rank in self.ranks)

    def addresses_of(self, data_rank: int) -> tuple[str, ...]:
        """Return the link addresses of the ranks that serve requests as data-parallel rank `data_rank`.

        Raises:
            LocalProtocolError: the instance has no such data-parallel rank.
        """
        found = tuple(rank.address for rank in self.ranks if rank.data_rank == data_rank)
        if not found:
            count = 1 + max((rank.data_rank for rank in self.ranks), default=-1)
            want, cure = f"in [0, {count})", "route requests to ranks that are there"
            raise LocalProtocolError(explain(f"context instance {self.name}", "data_rank", data_rank, want, cure))
        return found

    @property
    def draft_kv(self) -> DraftKV:
        """Whether draft KV travels; OFF as soon as one rank says so."""
        verdicts = {rank.report.draft_kv for rank in self.ranks}
        if DraftKV.OFF in verdicts:
            return DraftKV.OFF
        return DraftKV.PER_VIEW if DraftKV.PER_VIEW in verdicts else DraftKV.SHARED


class GenerationEndpoint:
    """Fetches requests into one generation rank's pages, from a thread of its own. All methods are thread-safe.

    The caller owns the pages. From `receive` until the handle is `quiet` peers may write them: they must not be freed
    or read, whatever the outcome says.
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
        """Start. The arguments are those of `ContextEndpoint`, for our side."""
        self.card = card
        self._options = options or TransferOptions()
        self._on_change = on_change
        self._engine = GenerationEngine(link, card, regions, copier, self._options, time.monotonic)
        self._driver = TransferDriver(self._engine, name=f"unikv-generation-{card.rank}", watch_s=self._options.watch_s)
        self._waiting = threading.Event()

    def connect(self, addresses: Sequence[str]) -> ContextInstance:
        """Say hello to every rank of a context instance and wait for all answers. Connecting again is cheap.

        Raises:
            IncompatiblePeerError: a rank refused us; the text has every failed check of the gate, with both values.
            LinkBrokenError: a rank did not answer within the options' ``hello_timeout_s``, or went away.
        """
        pending = [self._driver.call(partial(self._engine.register, address)) for address in addresses]
        deadline_s = time.monotonic() + self._options.hello_timeout_s
        while not all(registration.decided for registration in pending) and time.monotonic() < deadline_s:
            self._waiting.wait(_POLL_S)
        return _instance([_accepted(registration, self._options) for registration in pending])

    def receive(
        self,
        request_id: RequestId,
        tables: Mapping[GroupId, SlotArray],
        prompt_tokens: int,
        *,
        instance: ContextInstance,
        data_rank: int | None = None,
    ) -> TransferHandle:
        """Ask `instance` for a request; its bytes land in the pages of `tables`.

        Args:
            request_id: the id both sides know the request by.
            tables: int32 slots by ordinal per layer group, ``[>= ceil(prompt_tokens / tokens_per_block)]``; NO_PAGE
                marks what is not wanted (held already, out of window). Copied. Under context parallelism a table has
                this rank's blocks only.
            prompt_tokens: tokens of the prompt.
            instance: where the prompt is (being) computed.
            data_rank: which of its data-parallel ranks computes it; None where that is not known: all are asked, the
                first that sends holds the request, and success waits until the others have forgotten it.

        Raises:
            LocalProtocolError: the request is being received already, a table ends before the prompt does, or the
                instance has no such data-parallel rank.
            LinkBrokenError: a rank of the instance has gone away since; the text says how.
            LinkClosedError: the endpoint is closed.
        """
        addresses = instance.addresses if data_rank is None else instance.addresses_of(data_rank)
        work = self._request(request_id, tables, prompt_tokens)
        self._driver.call(lambda: self._engine.receive(*work, addresses))
        return work[0]

    def receive_all(
        self,
        requests: Sequence[tuple[RequestId, Mapping[GroupId, SlotArray], int]],
        *,
        instance: ContextInstance,
        data_rank: int | None = None,
    ) -> list[TransferHandle]:
        """Ask `instance` for several requests at once: what `receive` does for each, with one thread change for all.

        Args:
            requests: request id, page tables and prompt tokens of each, as for `receive`.
            instance: where the prompts are (being) computed.
            data_rank: as for `receive`, for all of them.

        Raises:
            LocalProtocolError, LinkClosedError: as `receive`. The requests before the one that is wrong were asked for;
                they are given up.
        """
        addresses = instance.addresses if data_rank is None else instance.addresses_of(data_rank)
        work = [self._request(*request) for request in requests]

        def ask() -> None:
            begun: list[RequestId] = []
            try:
                for one in work:
                    self._engine.receive(*one, addresses)
                    begun.append(one[0].request_id)
            except BaseException:
                for request_id in begun:
                    self._engine.cancel(request_id, "another request of the same call was refused")
                raise

        self._driver.call(ask)
        return [one[0] for one in work]

    def _request(
        self, request_id: RequestId, tables: Mapping[GroupId, SlotArray], prompt_tokens: int
    ) -> tuple[TransferHandle, dict[GroupId, SlotArray], int]:
        own = {group: np.array(slots, dtype=np.int32) for group, slots in tables.items()}
        return TransferHandle(request_id, self._on_change), own, prompt_tokens

    def cancel(self, request_id: RequestId, reason: str) -> None:
        """Give a request up: it fails at once, its pages are quiet once every peer has acknowledged."""
        self._driver.call(lambda: self._engine.cancel(request_id, reason))

    def close(self, reason: str = "the generation worker is closing", *, drain_s: float = 5.0) -> bool:
        """Cancel what is open, wait for peers to let go, free everything; True when all did. Idempotent."""
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


def _accepted(registration: Registration, options: TransferOptions) -> Registration:
    if registration.answer is not None:
        require_compatible(registration.answer.report)
        raise IncompatiblePeerError(registration.refusal, mismatches=())
    if registration.peer is None:
        reason = registration.refusal or f"no answer within {options.hello_timeout_s} s"
        raise LinkBrokenError(f"context rank at {registration.address}: {reason}; check that its worker runs")
    return registration


def _instance(registrations: Sequence[Registration]) -> ContextInstance:
    peers = [registration.peer for registration in registrations if registration.peer is not None]
    ranks = tuple(
        ContextRank(
            rank=peer.card.rank,
            data_rank=peer.card.position.data_rank,
            address=peer.address,
            path=peer.path,
            path_reason=peer.path_reason,
            report=peer.report,
            moves_bytes=bool(peer.program.lanes),
        )
        for peer in peers
    )
    return ContextInstance(name=peers[0].card.instance if peers else "", ranks=ranks)
