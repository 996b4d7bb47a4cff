"""The generation worker: reserves pages, fetches prompts into them, decodes."""

from __future__ import annotations

import logging
from collections import deque
from dataclasses import dataclass

from transfer.gate_report import DraftKV
from transfer.generation_endpoint import ContextInstance
from transfer.hello import Side
from transfer.outcome import Outcome, TransferHandle
from unikv.errors import CapacityError, UnikvError
from unikv.ids import RequestId
from unikv.request import KVCacheRequest
from workers.control import DecodeReport, LegRecord, PathReport, Ready, RunDecode, RunPrompt
from workers.rank_runtime import RankRuntime
from workers.rendezvous import Rendezvous
from workers.runner import Decoded, Evidence, Runner, Tables
from workers.topology import positions
from workers.worker_loop import DRAIN_S, Worker, evidence_report, now_s

_log = logging.getLogger(__name__)


@dataclass(slots=True)
class _Receiving:
    work: RunDecode
    request: KVCacheRequest
    tables: Tables
    handle: TransferHandle
    reported: bool = False


class GenerationWorker(Worker):
    """Fetches several prompts at a time, decodes one after the other."""

    def __init__(self, runtime: RankRuntime, runner: Runner, rendezvous: Rendezvous) -> None:
        super().__init__(runtime, runner, rendezvous)
        self._waiting: deque[RunDecode] = deque()
        self._receiving: dict[RequestId, _Receiving] = {}
        self._endpoint = runtime.generation_endpoint(self.wake)
        self._instance: ContextInstance | None = None

    @property
    def draft_travels(self) -> bool:
        """Whether draft KV comes with the target's."""
        return self._instance is not None and self._instance.draft_kv is not DraftKV.OFF

    def connect(self) -> None:
        """Say hello to every context rank.

        Raises:
            IncompatiblePeerError: the gate refused; the text has every failed check.
            LinkBrokenError: a context rank did not announce itself, or does not answer.
        """
        ranks = len(positions(self.runtime.pair.side(Side.CONTEXT)))
        self._instance = self._endpoint.connect(self.rendezvous.find("transfer", Side.CONTEXT, ranks))
        if self._instance.draft_kv is DraftKV.OFF and self.runtime.manager.draft_layer_ids:
            _log.warning("generation rank %d: draft KV does not travel; drafts start cold", self.runtime.rank)

    def ready(self) -> Ready:
        """Say which path every pair of ranks took."""
        ranks = self._instance.ranks if self._instance else ()
        return Ready(
            side=self.runtime.side,
            rank=self.runtime.rank,
            device=self.runtime.card.device,
            draft_kv=self._instance.draft_kv if self._instance else "",
            paths=tuple(
                PathReport(
                    context_rank=peer.rank,
                    generation_rank=self.runtime.rank,
                    path=peer.path,
                    reason=peer.path_reason,
                )
                for peer in ranks
                if peer.moves_bytes
            ),
        )

    def handle(self, message: RunPrompt | RunDecode) -> None:
        """Queue a request."""
        if isinstance(message, RunDecode):
            self._waiting.append(message)

    def advance(self) -> None:
        """Ask for what there is room for, then finish one request whose outcome is known."""
        while self._waiting and self._ask(self._waiting[0]):
            self._waiting.popleft()
        for receiving in list(self._receiving.values()):
            if receiving.handle.outcome is not None and not receiving.reported:
                self._finish(receiving, receiving.handle.outcome)
                break
        for receiving in [item for item in self._receiving.values() if item.reported and item.handle.quiet]:
            self._free(receiving)

    def runnable(self) -> bool:
        """Whether a request waits for nothing but us."""
        settled = any(r.handle.outcome is not None and not r.reported for r in self._receiving.values())
        return settled or (bool(self._waiting) and not self._receiving)

    def busy(self) -> bool:
        """Whether peers may still write our pages."""
        return bool(self._receiving)

    def give_up(self, reason: str) -> None:
        """Cancel what is open; pages stay ours until the peers have let go."""
        self._waiting.clear()
        for request_id, receiving in self._receiving.items():
            if receiving.handle.outcome is None:
                self._endpoint.cancel(request_id, reason)

    def close(self) -> None:
        """Drain and free everything."""
        self._endpoint.close("the generation worker is closing", drain_s=DRAIN_S)
        for receiving in self._receiving.values():
            receiving.request.close()

    def _ask(self, work: RunDecode) -> bool:
        """Reserve pages and ask for the request; False while pages are short and others will give some back."""
        manager = self.runtime.manager
        request = manager.create_request(work.request_id)
        try:
            draft = manager.speculation.max_draft_tokens if manager.speculation else 0
            capacity = manager.generation_capacity(work.prompt_tokens, draft)
            request.resize(capacity, work.prompt_tokens)
            tables = request.page_tables()
            assert self._instance is not None
            handle = self._endpoint.receive(work.request_id, tables, work.prompt_tokens, instance=self._instance)
        except UnikvError as error:
            request.close()
            if isinstance(error, CapacityError) and self._receiving:
                return False
            _log.warning("request %d: %s", work.request_id, error)
            self.report(DecodeReport(request_id=work.request_id, rank=self.runtime.rank, reason=str(error)))
            return True
        self._receiving[work.request_id] = _Receiving(work, request, tables, handle)
        return True

    def _finish(self, receiving: _Receiving, outcome: Outcome) -> None:
        """Check, decode and report one request."""
        receiving.reported = True
        work, usable_s = receiving.work, now_s()
        if not outcome.ok:
            self.report(self._failure(work, outcome.reason, outcome))
            return
        try:
            evidence = self._examine(receiving) if work.verify else None
            verified_s = now_s()
            decoded = self._decode(receiving, outcome)
        except UnikvError as error:
            _log.warning("request %d: decoding failed: %s", work.request_id, error)
            self.report(self._failure(work, f"decoding failed: {error}", outcome))
            return
        self.report(
            DecodeReport(
                request_id=work.request_id,
                rank=self.runtime.rank,
                reason="",
                usable_s=usable_s,
                settle_s=outcome.settle_s,
                verify_s=verified_s - usable_s,
                decode_s=now_s() - verified_s,
                tokens=decoded.tokens,
                steps=decoded.steps,
                proposed=decoded.proposed,
                accepted=decoded.accepted,
                accepted_lengths=decoded.accepted_lengths,
                legs=_legs(outcome),
                evidence=evidence_report(evidence) if evidence else None,
            )
        )

    def _examine(self, receiving: _Receiving) -> Evidence:
        work = receiving.work
        return self.runner.examine(receiving.tables, work.prompt_tokens, with_draft=self.draft_travels)

    def _decode(self, receiving: _Receiving, outcome: Outcome) -> Decoded:
        """Decode from the first token the context side sent; a pipeline stage without one has nothing to decode."""
        work, aux = receiving.work, outcome.aux
        if aux is None or not aux.first_tokens:
            return Decoded()
        draft_valid_from = 0 if self.draft_travels else work.prompt_tokens
        return self.runner.decode(
            receiving.request, work.prompt, aux.first_tokens[0], draft_valid_from, work.max_new_tokens
        )

    def _free(self, receiving: _Receiving) -> None:
        """Give the pages back; nobody touches them any more."""
        self.runner.discard(receiving.tables)
        receiving.request.close()
        del self._receiving[receiving.work.request_id]

    def _failure(self, work: RunDecode, reason: str, outcome: Outcome) -> DecodeReport:
        return DecodeReport(request_id=work.request_id, rank=self.runtime.rank, reason=reason, legs=_legs(outcome))


def _legs(outcome: Outcome) -> tuple[LegRecord, ...]:
    return tuple(
        LegRecord(peer=leg.peer, path=leg.path, bytes=leg.bytes, draft_bytes=leg.draft_bytes, times=leg.times)
        for leg in outcome.legs
    )
