"""The generation worker: reserves pages, fetches prompts into them, decodes."""

from __future__ import annotations

import logging
from dataclasses import dataclass, replace

from transfer.gate_report import DraftKV
from transfer.generation_endpoint import ContextInstance
from transfer.hello import Side
from transfer.outcome import Outcome, TransferHandle
from unikv.errors import CapacityError, InternalError, LocalProtocolError, RemoteProtocolError, explain
from unikv.ids import GroupId, RequestId
from unikv.layer_spec import LayerOwner
from unikv.request import KVCacheRequest
from workers.control import DecodeReport, LegRecord, PathReport, Ready, RunDecode
from workers.evidence_report import evidence_report
from workers.prefix_reuse import open_for_decode, open_for_prefill, taken_over_tokens, without
from workers.rank_runtime import RankRuntime
from workers.rendezvous import Rendezvous
from workers.routing import num_workers
from workers.runner import Decoded, Evidence, Runner, Tables
from workers.worker_loop import CLOSE_S, Worker, describe, now_s

_log = logging.getLogger(__name__)


@dataclass(slots=True)
class _Receiving:
    work: RunDecode
    request: KVCacheRequest
    tables: Tables
    handle: TransferHandle
    asked_s: float
    cached_tokens: dict[GroupId, int]
    reported: bool = False
    held: bool = False


class GenerationWorker(Worker[RunDecode]):
    """Fetches several prompts at a time, decodes one after the other."""

    work_type = RunDecode
    takes_all = True

    def __init__(self, runtime: RankRuntime, runner: Runner, rendezvous: Rendezvous) -> None:
        super().__init__(runtime, runner, rendezvous)
        self._receiving: dict[RequestId, _Receiving] = {}
        self._instances: tuple[ContextInstance, ...] = ()
        self._endpoint = runtime.generation_endpoint(self.wake)

    @property
    def instances(self) -> tuple[ContextInstance, ...]:
        """The context instances we are connected to, in the order of their numbers.

        Raises:
            LocalProtocolError: not connected.
        """
        if not self._instances:
            raise LocalProtocolError(explain("generation worker", "state", "new", "connected", "connect it first"))
        return self._instances

    @property
    def draft_kv(self) -> DraftKV:
        """Whether draft KV comes with the target's: all context instances are alike."""
        return self.instances[0].draft_kv

    @property
    def draft_travels(self) -> bool:
        """Whether draft KV comes with the target's."""
        return self.draft_kv is not DraftKV.OFF

    def connect(self) -> None:
        """Say hello to every rank of every context instance.

        Raises:
            IncompatiblePeerError: the gate refused; the text has every failed check.
            LinkBrokenError: a context rank did not announce itself, or does not answer.
        """
        config = self.runtime.pair.side(Side.CONTEXT)
        addresses = self.rendezvous.find("transfer", Side.CONTEXT, num_workers(config))
        size = config.parallel.world_size
        shares = (addresses[first : first + size] for first in range(0, len(addresses), size))
        self._instances = tuple(self._endpoint.connect(share) for share in shares)
        if not self.draft_travels and self.runtime.manager.draft_layer_ids:
            _log.warning("generation rank %d: draft KV does not travel; drafts start cold", self.runtime.rank)

    def ready(self) -> Ready:
        """Say which path every pair of ranks took."""
        return Ready(
            side=self.runtime.side,
            rank=self.runtime.rank,
            device=self.runtime.card.device,
            draft_kv=self.draft_kv,
            paths=tuple(
                PathReport(
                    context_rank=number * len(instance.ranks) + peer.rank,
                    generation_rank=self.runtime.rank,
                    path=peer.path,
                    reason=peer.path_reason,
                )
                for number, instance in enumerate(self.instances)
                for peer in instance.ranks
                if peer.moves_bytes
            ),
        )

    def capacity_tokens(self, work: RunDecode) -> int:
        """Return the prompt, all of the output, and what a step writes behind it.

        Requests that wait to be decoded hold their pages until then: none would come free for the one that is decoded.
        """
        room = self.runtime.pair.side(self.runtime.side).max_seq_len - work.prompt_tokens
        output_tokens = max(0, min(work.max_new_tokens - 1, room))
        return self._step_capacity(work.prompt_tokens + output_tokens)

    def take(self, work: RunDecode) -> bool:
        """Reserve pages for prompt and output, and ask for the request, or compute it here."""
        manager, request = self.runtime.manager, None
        prompt = self._shared_prompt(work)
        try:
            if work.context_instance is None:
                request, publish_at = open_for_prefill(manager, work.request_id, prompt)
                self._receiving[work.request_id] = self._compute(work, request, publish_at)
                return True
            request = open_for_decode(manager, work.request_id, prompt)
            cached = taken_over_tokens(manager, request)
            request.resize(self.capacity_tokens(work), work.prompt_tokens)
            tables, asked_s = without(request.page_tables(), cached, manager.layout.tokens_per_block), now_s()
            handle = self._endpoint.receive(
                work.request_id,
                tables,
                work.prompt_tokens,
                instance=self._instance_of(work),
                data_rank=work.context_data_rank,
            )
        except InternalError:
            raise  # ours is broken, not the request
        except CapacityError as error:
            _close(request)
            if self._receiving and not error.permanent:
                return False
            self.refuse(work, describe(error, self._name("request")))
            return True
        except Exception as error:
            _close(request)
            self.refuse(work, describe(error, self._name("request")))
            return True
        receiving = _Receiving(work, request, tables, handle, asked_s, cached, held=work.hold)
        self._receiving[work.request_id] = receiving
        return True

    def _shared_prompt(self, work: RunDecode) -> tuple[int, ...]:
        """Return the tokens whose KV is reused; none under context parallelism: no rank has whole sequences."""
        return work.prompt if self.runtime.position.cp == 1 else ()

    def _compute(self, work: RunDecode, request: KVCacheRequest, publish_at: int | None) -> _Receiving:
        """Compute a prompt here, as the context side would; nothing travels."""
        asked_s = now_s()
        aux = self.runner.prefill(request, work.prompt, work.prompt_tokens, publish_at)
        request.resize(max(self.capacity_tokens(work), request.capacity_tokens))
        handle = TransferHandle(work.request_id, self.wake)
        handle.decide(Outcome(request_id=work.request_id, aux=aux, total_s=now_s() - asked_s))
        handle.settle_quiet()
        return _Receiving(work, request, request.page_tables(), handle, asked_s, {})

    def _instance_of(self, work: RunDecode) -> ContextInstance:
        number = work.context_instance
        if number is None or not 0 <= number < len(self.instances):
            want, thing = f"in [0, {len(self.instances)})", f"request {work.request_id}"
            cure = "route requests to instances of the pair file"
            raise LocalProtocolError(explain(thing, "context_instance", number, want, cure))
        return self.instances[number]

    def refuse(self, work: RunDecode, reason: str) -> None:
        """Tell the caller; no context rank has heard of the request from us."""
        _log.warning("request %d: %s", work.request_id, reason)
        self.report(DecodeReport(request_id=work.request_id, rank=self.runtime.rank, reason=reason))

    def settle(self) -> bool:
        """Report every failure, free what is quiet, then check and decode one request."""
        for receiving in list(self._receiving.values()):
            outcome = receiving.handle.outcome
            if outcome is not None and not outcome.ok and not receiving.reported:
                receiving.reported = True
                self.report(self._failure(receiving, outcome.reason, outcome))
            if receiving.reported and receiving.handle.quiet:
                self._free(receiving)
        open_items = [item for item in self._receiving.values() if not item.reported and not item.held]
        arrived = [item for item in open_items if item.handle.outcome is not None]
        if arrived:
            self._finish(arrived[0])
        return bool(arrived)

    def proceed(self, request_id: RequestId) -> None:
        """Nothing of the request moves any more: what has arrived may be looked at."""
        if request_id in self._receiving:
            self._receiving[request_id].held = False

    def stop_transfer(self, request_id: RequestId, reason: str) -> None:
        """The request fails at once; its pages stay ours until the peers have let go."""
        self.proceed(request_id)
        self._endpoint.cancel(request_id, reason)

    def in_use(self) -> tuple[RequestId, ...]:
        """Return the requests that are being received, decoded or drained."""
        return tuple(self._receiving)

    def close(self) -> None:
        """End the endpoint and free everything."""
        self._endpoint.close(f"{self._name('worker')} is closing", drain_s=CLOSE_S)
        for receiving in self._receiving.values():
            receiving.request.close()

    def _finish(self, receiving: _Receiving) -> None:
        """Check, decode and report one request that has arrived."""
        work, outcome = receiving.work, receiving.handle.outcome
        assert outcome is not None
        receiving.reported = True
        started_s = now_s()
        try:
            evidence = self._examine(receiving) if work.verify else None
            verified_s = now_s()
            decoded = self._decode(receiving, outcome)
        except Exception as error:
            self.report(self._failure(receiving, describe(error, self._name("decoding")), outcome))
            return
        self.report(
            DecodeReport(
                request_id=work.request_id,
                rank=self.runtime.rank,
                reason="",
                usable_s=receiving.asked_s + outcome.total_s,
                settle_s=outcome.settle_s,
                cached_tokens=self._target_tokens(receiving.cached_tokens),
                verify_s=verified_s - started_s,
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

    def _target_tokens(self, tokens: dict[GroupId, int]) -> int:
        """Return how many leading tokens every target group had; drafts may lack some of them."""
        groups = self.runtime.manager.layout.groups
        return min((tokens.get(group.group_id, 0) for group in groups if group.owner is LayerOwner.TARGET), default=0)

    def _examine(self, receiving: _Receiving) -> Evidence:
        pages = replace(self.prompt_pages(receiving.work, receiving.tables), cached_tokens=receiving.cached_tokens)
        return self.runner.examine(pages, with_draft=self._has_draft(receiving.work))

    def _has_draft(self, work: RunDecode) -> bool:
        """Whether the prompt's draft KV is in our pages."""
        return work.context_instance is None or self.draft_travels

    def _decode(self, receiving: _Receiving, outcome: Outcome) -> Decoded:
        """Decode from the first token the context side sent; a rank nobody sent anything has nothing to decode.

        Raises:
            RemoteProtocolError: the prompt came without its first token.
        """
        work, aux = receiving.work, outcome.aux
        if aux is None and not outcome.legs:
            return Decoded()
        if aux is None or not aux.first_tokens:
            cure = "let the context side send what it sampled with the prompt's KV"
            text = explain(f"request {work.request_id}", "first_tokens", "empty", "at least one token", cure)
            raise RemoteProtocolError(text)
        draft_valid_from = 0 if self._has_draft(work) else work.prompt_tokens
        if work.context_instance is not None:
            self._mark_written(receiving)
        receiving.request.resize(self._step_capacity(work.prompt_tokens))  # from here on steps take what was reserved
        return self.runner.decode(
            receiving.request, work.prompt, aux.first_tokens[0], draft_valid_from, work.max_new_tokens
        )

    def _step_capacity(self, tokens: int) -> int:
        manager = self.runtime.manager
        draft = manager.speculation.max_draft_tokens if manager.speculation else 0
        return manager.generation_capacity(tokens, draft)

    def _mark_written(self, receiving: _Receiving) -> None:
        """Say which KV is in the pages, so that what is published of them is true."""
        request, prompt_tokens = receiving.request, receiving.work.prompt_tokens
        taken = {s.group_id: s.endpoint_tokens for s in request.reuse_status() if s.complete}
        for group in self.runtime.manager.layout.groups:
            had = taken.get(group.group_id, 0)
            first = 0 if group.window is None else max(0, prompt_tokens + 1 - group.window)
            if group.owner is LayerOwner.DRAFT and not self.draft_travels:
                request.mark_written(group.group_id, prompt_tokens, sinks=False)
            elif first > had or not had:
                request.mark_written(group.group_id, first)

    def _free(self, receiving: _Receiving) -> None:
        """Give the pages back; nobody touches them any more."""
        if not self._shared_prompt(receiving.work):
            self.runner.discard(receiving.tables)
        receiving.request.close()
        del self._receiving[receiving.work.request_id]
        self.pages_freed()

    def _name(self, what: str) -> str:
        return f"{what} on generation rank {self.runtime.rank}"

    def _failure(self, receiving: _Receiving, reason: str, outcome: Outcome) -> DecodeReport:
        work = receiving.work
        return DecodeReport(request_id=work.request_id, rank=self.runtime.rank, reason=reason, legs=_legs(outcome))


def _legs(outcome: Outcome) -> tuple[LegRecord, ...]:
    return tuple(
        LegRecord(peer=leg.peer, path=leg.path, bytes=leg.bytes, draft_bytes=leg.draft_bytes, times=leg.times)
        for leg in outcome.legs
    )


def _close(request: KVCacheRequest | None) -> None:
    if request is not None:
        request.close()
