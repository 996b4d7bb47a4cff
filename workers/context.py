"""The context worker: computes prompts into its pages and publishes them."""

from __future__ import annotations

import logging
from dataclasses import dataclass

from transfer.device_bytes import DeviceEvent
from transfer.outcome import TransferHandle
from unikv.errors import CapacityError, InternalError
from unikv.ids import LayerId, RequestId
from unikv.page_source import PagePin
from unikv.request import KVCacheRequest
from workers.control import EvidenceReport, PromptReport, Ready, RunPrompt
from workers.evidence_report import evidence_report
from workers.prefix_reuse import open_for_prefill
from workers.rank_runtime import RankRuntime
from workers.rendezvous import Rendezvous
from workers.runner import Runner, Tables
from workers.worker_loop import CLOSE_S, Worker, describe, now_s

_log = logging.getLogger(__name__)


@dataclass(slots=True)
class _Published:
    work: RunPrompt
    request: KVCacheRequest
    tables: Tables
    handle: TransferHandle
    prefill_s: float
    cached_tokens: int
    pin: PagePin | None = None
    reported: bool = False

    def free(self) -> None:
        """Give the pages back; nobody reads them any more."""
        self.request.close()
        if self.pin is not None:
            self.pin.release()


class ContextWorker(Worker[RunPrompt]):
    """Runs prompts one after the other; keeps their pages until every generation rank has them."""

    work_type = RunPrompt
    takes_all = False

    def __init__(self, runtime: RankRuntime, runner: Runner, rendezvous: Rendezvous) -> None:
        super().__init__(runtime, runner, rendezvous)
        self._published: dict[RequestId, _Published] = {}
        # First the address, whose messages wait in the link, so that nothing can fail once the endpoint runs.
        rendezvous.announce("transfer", runtime.side, runtime.rank, runtime.card.address)
        self._endpoint = runtime.context_endpoint(self.wake)

    def ready(self) -> Ready:
        """Generation ranks come to us; there is nobody to connect to."""
        return Ready(side=self.runtime.side, rank=self.runtime.rank, device=self.runtime.card.device)

    def capacity_tokens(self, work: RunPrompt) -> int:
        """Return the prompt and what a drafter writes behind it."""
        return self.runtime.manager.context_capacity(0, work.prompt_tokens)

    def take(self, work: RunPrompt) -> bool:
        """Compute one prompt and publish it: when it is there, or as it comes."""
        started_s = now_s()
        request: KVCacheRequest | None = None
        try:
            request, publish_at = open_for_prefill(self.runtime.manager, work.request_id, work.prompt)
            if self.runtime.pair.transfer.layer_bands:
                self._take_early(work, request, publish_at, started_s)
                return True
            cached = request.history_tokens
            aux = self.runner.prefill(request, work.prompt, work.prompt_tokens, publish_at)
            tables, prefill_s = request.page_tables(), now_s() - started_s
            handle = self._endpoint.publish(work.request_id, tables, work.prompt_tokens, aux)
        except InternalError:
            raise  # ours is broken, not the request
        except CapacityError as error:
            _close(request)
            if self._published and not error.permanent:
                return False
            self.refuse(work, describe(error, self._name("prompt")))
            return True
        except Exception as error:
            _close(request)
            self.refuse(work, describe(error, self._name("prompt")))
            return True
        self._published[work.request_id] = _Published(work, request, tables, handle, prefill_s, cached)
        return True

    def _take_early(self, work: RunPrompt, request: KVCacheRequest, publish_at: int | None, started_s: float) -> None:
        """Publish a prompt's pages first, and compute it then: every layer leaves as soon as it may.

        Pages stay where they are until nobody reads them, whatever commits and windows do meanwhile.
        """
        cached = request.history_tokens
        request.resize(max(self.capacity_tokens(work), request.capacity_tokens))
        tables = request.page_tables()
        handle, readiness = self._endpoint.begin(work.request_id, tables, work.prompt_tokens)
        published = _Published(work, request, tables, handle, 0.0, cached, request.pin(tables))
        self._published[work.request_id] = published
        for spec in self.runtime.manager.layout.specs:
            readiness.mark(spec.layer_id, cached)

        def on_layer(layer_id: LayerId, tokens: int, written: DeviceEvent | None = None) -> None:
            readiness.mark(layer_id, tokens, written)
            self._endpoint.poke()

        try:
            aux = self.runner.prefill(request, work.prompt, work.prompt_tokens, publish_at, on_layer)
            published.prefill_s = now_s() - started_s
            self._endpoint.finish(work.request_id, aux)
        except InternalError:
            raise
        except Exception as error:  # what moves is drained first; then it is reported and freed like every failure
            self._endpoint.fail(work.request_id, describe(error, self._name("prompt")))

    def refuse(self, work: RunPrompt, reason: str) -> None:
        """Tell the generation ranks, which may wait for it, and the caller."""
        _log.warning("request %d: %s", work.request_id, reason)
        self._endpoint.fail(work.request_id, reason)
        self._report(work, reason)

    def settle(self) -> bool:
        """Report what has an outcome, free what is quiet."""
        for published in list(self._published.values()):
            if published.handle.outcome is not None and not published.reported:
                self._conclude(published)
            if published.reported and published.handle.quiet:
                published.free()
                del self._published[published.work.request_id]
                self.pages_freed()
        return False

    def stop_transfer(self, request_id: RequestId, reason: str) -> None:
        """Generation ranks hear the reason; what moves is drained."""
        self._endpoint.fail(request_id, reason)

    def in_use(self) -> tuple[RequestId, ...]:
        """Return the published requests."""
        return tuple(self._published)

    def close(self) -> None:
        """End the endpoint and free everything."""
        self._endpoint.close(f"{self._name('worker')} is closing", drain_s=CLOSE_S)
        for published in self._published.values():
            published.free()

    def _conclude(self, published: _Published) -> None:
        """Say how the transfer ended and, if asked to, what is in the pages."""
        work, outcome = published.work, published.handle.outcome
        assert outcome is not None
        reason, evidence = outcome.reason, None
        if work.verify and outcome.ok:
            try:
                seen = self.runner.examine(self.prompt_pages(work, published.tables), with_draft=True)
                evidence = evidence_report(seen)
            except Exception as error:
                reason = describe(error, self._name("verification"))
        published.reported = True
        self._report(work, reason, published, evidence)

    def _name(self, what: str) -> str:
        return f"{what} on context rank {self.runtime.rank}"

    def _report(
        self, work: RunPrompt, reason: str, published: _Published | None = None, evidence: EvidenceReport | None = None
    ) -> None:
        self.report(
            PromptReport(
                request_id=work.request_id,
                rank=self.runtime.rank,
                reason=reason,
                prefill_s=0.0 if published is None else published.prefill_s,
                cached_tokens=0 if published is None else published.cached_tokens,
                evidence=evidence,
            )
        )


def _close(request: KVCacheRequest | None) -> None:
    if request is not None:
        request.close()
