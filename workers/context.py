"""The context worker: computes prompts into its pages and publishes them."""

from __future__ import annotations

import logging
from collections import deque
from dataclasses import dataclass

from transfer.outcome import TransferHandle
from unikv.errors import CapacityError, UnikvError
from unikv.ids import RequestId
from unikv.request import KVCacheRequest
from workers.control import EvidenceReport, PromptReport, Ready, RunDecode, RunPrompt
from workers.rank_runtime import RankRuntime
from workers.rendezvous import Rendezvous
from workers.runner import Runner, Tables
from workers.worker_loop import DRAIN_S, Worker, evidence_report, now_s

_log = logging.getLogger(__name__)


@dataclass(slots=True)
class _Published:
    work: RunPrompt
    request: KVCacheRequest
    tables: Tables
    handle: TransferHandle
    prefill_s: float


class ContextWorker(Worker):
    """Runs prompts one after the other; keeps their pages until every generation rank has them."""

    def __init__(self, runtime: RankRuntime, runner: Runner, rendezvous: Rendezvous) -> None:
        super().__init__(runtime, runner, rendezvous)
        self._waiting: deque[RunPrompt] = deque()
        self._published: dict[RequestId, _Published] = {}
        self._endpoint = runtime.context_endpoint(self.wake)
        rendezvous.announce("transfer", runtime.side, runtime.rank, runtime.card.address)

    def ready(self) -> Ready:
        """Generation ranks come to us; there is nobody to connect to."""
        return Ready(side=self.runtime.side, rank=self.runtime.rank, device=self.runtime.card.device)

    def handle(self, message: RunPrompt | RunDecode) -> None:
        """Queue a prompt."""
        if isinstance(message, RunPrompt):
            self._waiting.append(message)

    def advance(self) -> None:
        """Free what was sent, then compute the next prompt if there is room for it."""
        for published in [item for item in self._published.values() if item.handle.quiet]:
            self._finish(published)
        if self._waiting:
            self._compute(self._waiting[0])

    def runnable(self) -> bool:
        """Whether a prompt waits and nothing keeps it from being tried."""
        return bool(self._waiting) and not self._published

    def busy(self) -> bool:
        """Whether published pages are not quiet yet."""
        return bool(self._published)

    def give_up(self, reason: str) -> None:
        """Fail what is published or waiting; generation ranks hear the reason."""
        self._waiting.clear()
        for request_id in self._published:
            self._endpoint.fail(request_id, reason)

    def close(self) -> None:
        """Drain and free everything."""
        self._endpoint.close("the context worker is closing", drain_s=DRAIN_S)
        for published in self._published.values():
            published.request.close()

    def _compute(self, work: RunPrompt) -> None:
        """Compute one prompt and publish it; without room it keeps waiting while others hold pages."""
        manager, started_s = self.runtime.manager, now_s()
        request = manager.create_request(work.request_id)
        try:
            aux = self.runner.prefill(request, work.prompt, work.prompt_tokens)
        except UnikvError as error:
            request.close()
            if isinstance(error, CapacityError) and self._published:
                return
            self._waiting.popleft()
            self._refuse(work, str(error))
            return
        self._waiting.popleft()
        tables, prefill_s = request.page_tables(), now_s() - started_s
        handle = self._endpoint.publish(work.request_id, tables, work.prompt_tokens, aux)
        self._published[work.request_id] = _Published(work, request, tables, handle, prefill_s)

    def _refuse(self, work: RunPrompt, reason: str) -> None:
        _log.warning("request %d: prompt failed: %s", work.request_id, reason)
        self._endpoint.fail(work.request_id, reason)
        self._report(work, reason, 0.0, None)

    def _finish(self, published: _Published) -> None:
        """Every copy is over: say what is in the pages if asked to, then free them."""
        work, outcome = published.work, published.handle.outcome
        reason = outcome.reason if outcome else "the transfer ended without an outcome"
        evidence = None
        if work.verify and not reason:
            seen = self.runner.examine(published.tables, work.prompt_tokens, with_draft=True)
            evidence = evidence_report(seen)
        published.request.close()
        del self._published[work.request_id]
        self._report(work, reason, published.prefill_s, evidence)

    def _report(self, work: RunPrompt, reason: str, prefill_s: float, evidence: EvidenceReport | None) -> None:
        self.report(
            PromptReport(
                request_id=work.request_id,
                rank=self.runtime.rank,
                reason=reason,
                prefill_s=prefill_s,
                evidence=evidence,
            )
        )
