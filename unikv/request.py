"""One request's pages: how many positions it may touch, which are final, and the page table of every layer group.

::

    positions   0 ........ committed ........ history ......... capacity
                | published  | final KV        | pages reserved  | none
    0 <= committed <= history <= capacity,  num_blocks == ceil(capacity / tokens_per_block)

A request runs while it is ACTIVE. SUSPENDED, it has no page table: its pages are held, and others may push them to the
host. One that claimed a prefix begins SUSPENDED.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from enum import Enum

import numpy as np

from unikv.block_rows import BlockRow
from unikv.cached_page import CachedPage
from unikv.errors import CapacityError, InternalError, LocalProtocolError, SpecError, explain
from unikv.ids import GroupId, RequestId
from unikv.page_source import PageSource
from unikv.planned_drop import PlannedDrop
from unikv.prefix_match import ReuseStatus
from unikv.prefix_tree import token_bytes
from unikv.ranges import Span
from unikv.request_checks import rows_match
from unikv.request_claim import PrefixClaim
from unikv.request_hold import HeldPages
from unikv.request_pages import RequestPages, RequestState
from unikv.request_publish import PrefixPublisher

__all__ = ["KVCacheRequest", "RequestState", "ResumeResult"]


class ResumeResult(Enum):
    """How a resume ended. Only OK changed anything; the others may be tried again.

    OVER_UTILISATION never lasts: where no request runs, none is refused for it. OUT_OF_PAGES ends when others give
    pages back; `UnifiedKVCacheManager.check_fits` says whether a request could ever have its own.
    """

    OK = "ok"
    OVER_UTILISATION = "over utilisation"
    OUT_OF_PAGES = "out of pages"


class KVCacheRequest(RequestPages):
    """The pages of one request, all layer groups together. Made by `UnifiedKVCacheManager.create_request`.

    Once it is closed, only its properties, `page_tables` and `close` may be used; the rest raises LocalProtocolError,
    as does whatever needs pages while it is suspended. One thread uses a manager and its requests at a time.

    Attributes:
        request_id: the manager's name for it.
    """

    def __init__(
        self,
        request_id: RequestId,
        source: PageSource,
        rows: dict[GroupId, BlockRow],
        on_close: Callable[[RequestId], None],
        *,
        publisher: PrefixPublisher | None = None,
        claim: PrefixClaim | None = None,
    ) -> None:
        """Start with what was claimed; `on_close` is called once, when the pages are back.

        Args:
            request_id: the manager's name for it.
            source: where pages come from.
            rows: one empty row per layer group.
            on_close: told when the request is closed.
            publisher: publishes what it computes, None if it takes no part in prefix reuse.
            claim: what it takes over from the prefix tree; it then begins suspended.
        """
        state = RequestState.ACTIVE if claim is None else RequestState.SUSPENDED
        super().__init__(request_id, source, rows, state, 0 if claim is None else claim.match.num_tokens)
        self._on_close = on_close
        self._publisher = publisher
        self._claim = claim
        self._held: HeldPages | None = None
        self._enter(state)

    @property
    def committed_tokens(self) -> int:
        """Tokens that were taken over from the prefix tree or given to it."""
        return 0 if self._publisher is None else self._publisher.committed_tokens

    @property
    def committing(self) -> bool:
        """Whether `commit` may be called: the request takes part in prefix reuse and has not stopped."""
        return self._publisher is not None and self._publisher.committing

    @property
    def divergence_tokens(self) -> int:
        """How far the prompt is the same as one computed before, which may be further than what could be claimed."""
        return 0 if self._claim is None else self._claim.match.divergence_tokens

    def reuse_status(self) -> tuple[ReuseStatus, ...]:
        """Return what each layer group can take over, by group id, and after the first resume what it did.

        Empty for a request that was created without tokens.
        """
        return () if self._claim is None else tuple(self._claim.status.values())

    # ---- running and not running

    def resume(self, optional_groups: Iterable[GroupId] | None = None) -> ResumeResult:
        """Bring the pages to the device and make the request ACTIVE, or change nothing.

        The first resume that succeeds fixes what is taken over from the prefix tree. OPTIONAL groups that are not
        selected let go of their pages before anything is allocated, and `reuse_status` calls them incomplete from then
        on. Another selection may follow a resume that found no room.

        Beside running requests, none is resumed where more than `ReuseOptions.max_utilisation` of a pool group's pages
        is in use; where none runs, nobody would ever free them, and that limit does not count.

        Where a copy inside the pools or from and to the host fails, its error passes through, and the request is
        suspended as before, with all its pages; only what was not selected is gone.

        Args:
            optional_groups: OPTIONAL groups that take over their pages, from those that `reuse_status` calls complete.
                Not once a resume has succeeded. None selects nothing.

        Returns:
            OK, or why nothing was changed.

        Raises:
            SpecError: a group cannot be selected; nothing was changed.
            LocalProtocolError: the request is not suspended.
        """
        self._require("resume")
        thing = f"request {self.request_id}"
        claim = self._claim if self._held is None else None
        if claim is not None:
            claim.select(optional_groups or (), thing)
        elif optional_groups is not None:
            cure = "select groups when the request is resumed for the first time"
            raise SpecError(explain(thing, "optional_groups", list(optional_groups), "None from then on", cure))
        if self._source.running and self._is_crowded([] if claim is None else claim.given_up()):
            return ResumeResult.OVER_UTILISATION
        try:
            self._bring_back(thing)
        except CapacityError:
            return ResumeResult.OUT_OF_PAGES
        self._enter(RequestState.ACTIVE)
        return ResumeResult.OK

    def suspend(self) -> None:
        """Give up the page tables and keep the pages: others may push them to the host, if there is one.

        Raises:
            LocalProtocolError: the request is not active.
        """
        self._enter(self._require("suspend"))
        self._held = HeldPages.of(self._source.cache, self._rows)
        for row in self._rows.values():
            row.fill(self._num_blocks, row.stale, ())

    def revert_context(self, capacity_tokens: int) -> bool:
        """Undo the scheduling of a prefill chunk: shrink to the capacity before it and suspend.

        Args:
            capacity_tokens: the capacity before the chunk.

        Returns:
            False where the history has passed that capacity: then the request was closed, and its prompt begins anew.

        Raises:
            LocalProtocolError: the request is not active.
        """
        self._require("suspend")
        if self._history_tokens > capacity_tokens:
            self.close()
            return False
        self.resize(capacity_tokens)
        self.suspend()
        return True

    def close(self) -> None:
        """Give all pages back; pinned ones follow when their pins go. Safe to call twice.

        What was published stays, and the partial block at the end of the committed tokens is published now, from a
        suspended request too. A claim that never ran leaves things as they were.
        """
        if self.closed:
            return
        ran = self._state is RequestState.ACTIVE or self._held is not None
        if ran and self._publisher is not None:
            self._publisher.stop(self._held if self._state is RequestState.SUSPENDED else None)
        if self._state is RequestState.ACTIVE:
            for row in self._rows.values():
                self._source.cache.release(row.group.pool_group, [slot for _, slot in row.pages()])
        else:
            for held in (self._claim if self._held is None else None, self._held):
                if held is not None:
                    held.drop()
        for row in self._rows.values():
            row.fill(0, row.stale, ())
        self._enter(self._require("close"))
        self._capacity_tokens = self._history_tokens = self._num_blocks = 0
        self._growths.clear()
        self._on_close(self.request_id)

    # ---- prefix reuse

    def commit(self, tokens: Sequence[int] | np.ndarray, *, is_end: bool = False) -> None:
        """Declare the next tokens final and publish every block they fill; the history follows where it is behind.

        The page tables may change: where another request has published the same block, its page takes over.

        Args:
            tokens: token ids behind those committed so far; their KV must be written.
            is_end: no more tokens will come, see `stop_committing`.

        Raises:
            SpecError: more tokens than capacity, or they are no tokens; nothing was changed.
            LocalProtocolError: the request is not active, takes no part in reuse, or has stopped committing.
        """
        self._require("use", "commit")
        publisher = self._require_publisher()
        keys = token_bytes(tokens)
        committed = publisher.committed_tokens + len(keys) // 8
        if committed > self._capacity_tokens:
            want = f"at most {self._capacity_tokens - publisher.committed_tokens}, up to the capacity"
            cure = "resize before tokens are computed, and commit what was computed"
            raise SpecError(explain(f"request {self.request_id}", "tokens to commit", len(keys) // 8, want, cure))
        if committed > self._history_tokens:
            self.resize(history_tokens=committed)
        publisher.append(keys)
        if is_end:
            publisher.stop()

    def stop_committing(self) -> None:
        """Publish the partial block at the end and commit no more. Idempotent; `close` does it too.

        Raises:
            LocalProtocolError: the request is not active.
        """
        self._require("use", "stop_committing")
        if self._publisher is not None:
            self._publisher.stop()

    def mark_written(self, group_id: GroupId, first_token: int, *, sinks: bool = True) -> None:
        """Say that a group's KV is there from position `first_token` on.

        A group that was not taken over at the match length counts as unwritten below it; a transfer that fills its
        window, or a drafter that skipped part of the prompt, knows better.

        Args:
            group_id: the layer group.
            first_token: nothing before it was written, but perhaps sinks.
            sinks: whether the group's sink blocks were written.

        Raises:
            SpecError: a negative position.
            UnknownLayerError: there is no such group.
            LocalProtocolError: the request is not active.
        """
        self._require("use", "mark_written")
        if first_token < 0:
            self._refuse_count("first_token", first_token)
        group = self._source.layout.group(group_id)
        sink_tokens = group.sink_blocks * self._source.layout.tokens_per_block if sinks else 0
        self._rows[group_id].unwritten = Span(min(sink_tokens, first_token), first_token)

    def written_from(self, group_id: GroupId) -> int:
        """Return the position before which a group's KV was never written, sinks aside; 0 where all of it was.

        Raises:
            UnknownLayerError: there is no such group.
        """
        unwritten = self._rows[self._source.layout.group(group_id).group_id].unwritten
        return unwritten.hi if len(unwritten) else 0

    def plan_drop(self) -> PlannedDrop:
        """Return a handle that drops the window pages at the end of the committed tokens.

        For conversations that will be continued elsewhere: full-attention pages stay useful to others, the window at
        this very end does not.

        Raises:
            LocalProtocolError: the request takes no part in reuse, or has not stopped committing.
        """
        if self._publisher is None or self._publisher.committing:
            got = "no part in reuse" if self._publisher is None else "committing"
            cure = "commit with is_end=True, or stop_committing() first"
            thing = f"request {self.request_id}"
            raise LocalProtocolError(explain(thing, "state of its prefix", got, "stopped committing", cure))
        return PlannedDrop(self._source.cache, self._publisher)

    # ---- integrity

    def check_integrity(self) -> None:
        """Check that every block has a page in a group exactly where the group's window still covers it.

        Raises:
            InternalError: it does not, or committed, history, capacity and rows disagree; the text prints the terms.
        """
        if self.closed:
            return
        committed, history, capacity = self.committed_tokens, self._history_tokens, self._capacity_tokens
        terms = f"0 <= committed {committed} <= history {history} <= capacity {capacity}, {self.num_blocks} blocks"
        story = [f"group {group_id}: {row.slots.tolist()}" for group_id, row in self._rows.items()]
        for row in self._rows.values():
            stale = self._source.stale(row.group, history)
            if not rows_match(row, self.num_blocks, stale, active=self._state is RequestState.ACTIVE):
                text = f"request {self.request_id}, group {row.group.group_id}: pages do not match {terms}, {stale}"
                raise InternalError(text, story=story)
        if not 0 <= committed <= history <= capacity:
            raise InternalError(f"request {self.request_id}: not {terms}", story=story)

    def holdings(self) -> HeldPages | PrefixClaim | None:
        """Return what a suspended request holds, for the manager's integrity check."""
        return self._claim if self._held is None else self._held

    # ---- inside

    def _enter(self, state: RequestState) -> None:
        self._state = state
        if state is RequestState.ACTIVE:
            self._source.running.add(self.request_id)
        else:
            self._source.running.discard(self.request_id)

    def _is_crowded(self, given_up: Sequence[CachedPage]) -> bool:
        """Return whether too much is in use to resume, in any pool group, were the request to let go of `given_up`."""
        cache, limit = self._source.cache, self._source.max_utilisation
        pool_groups = {row.group.pool_group for row in self._rows.values()}
        return any(cache.utilisation(pool_group, given_up) > limit for pool_group in pool_groups)

    def _bring_back(self, thing: str) -> None:
        cache = self._source.cache
        if self._held is not None:
            self._held.take(self._rows, thing)
        elif self._claim is not None:
            moves = self._claim.take(self._rows, thing)
            try:
                self._source.copy_pages(moves)
            except BaseException:
                self._claim.put_back(self._rows, moves)
                raise
            self._claim.finish(moves)
            self._held = HeldPages(cache, {}, {})

    def _held_back(self, row: BlockRow, ordinals: Iterable[int]) -> list[int]:
        publisher = self._publisher
        return [] if publisher is None else publisher.holds_back(row, ordinals, self._capacity_tokens)

    def _require_publisher(self) -> PrefixPublisher:
        publisher = self._publisher
        if publisher is None or not publisher.committing:
            got = "stopped committing" if publisher else "no part in prefix reuse"
            cure = "create it with tokens (an empty list looks nothing up), and commit before the end"
            raise LocalProtocolError(explain(f"request {self.request_id}", "commit()", got, "committing", cure))
        return publisher
