"""One request's pages: how many positions it may touch, which are final, and the page table of every layer group.

::

    positions   0 ........ committed ........ history ......... capacity
                | published  | final KV        | pages reserved  | none
    0 <= committed <= history <= capacity,  num_blocks == ceil(capacity / tokens_per_block)

A request runs while it is ACTIVE. SUSPENDED, it has no page table: its pages are held, and others may push them to the
host. One that claimed a prefix begins SUSPENDED.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Final

import numpy as np

from unikv.block_rows import BlockRow, RowStep
from unikv.errors import CapacityError, InternalError, LocalProtocolError, SpecError, explain
from unikv.ids import NO_PAGE, GroupId, RequestId
from unikv.page_source import PagePin, PageSource
from unikv.page_table import SlotRow, masked_row
from unikv.planned_drop import PlannedDrop
from unikv.prefix_match import ReuseStatus
from unikv.prefix_tree import token_bytes
from unikv.request_claim import PrefixClaim
from unikv.request_hold import HeldPages
from unikv.request_publish import PrefixPublisher
from unikv.slots import GroupChange


class RequestState(Enum):
    """Where a request stands."""

    SUSPENDED = "suspended"
    ACTIVE = "active"
    CLOSED = "closed"


class ResumeResult(Enum):
    """How a resume ended. Only OK changed anything; the others may be tried again."""

    OK = "ok"
    OVER_UTILISATION = "over utilisation"
    OUT_OF_PAGES = "out of pages"


_TRANSITIONS: Final = {
    (RequestState.ACTIVE, "use"): RequestState.ACTIVE,
    (RequestState.ACTIVE, "suspend"): RequestState.SUSPENDED,
    (RequestState.SUSPENDED, "resume"): RequestState.ACTIVE,
    (RequestState.ACTIVE, "close"): RequestState.CLOSED,
    (RequestState.SUSPENDED, "close"): RequestState.CLOSED,
    (RequestState.CLOSED, "close"): RequestState.CLOSED,
}
"""What may be done in which state, and the state afterwards. A pair that is missing is the caller's mistake."""


@dataclass(frozen=True, slots=True)
class _Growth:
    """What one `grow` did: drafts it made room for, and tokens it really added."""

    draft_tokens: int
    added_tokens: int


class KVCacheRequest:
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
        self.request_id: Final = request_id
        self._source = source
        self._on_close = on_close
        self._publisher = publisher
        self._claim = claim
        self._held: HeldPages | None = None
        self._state = RequestState.ACTIVE if claim is None else RequestState.SUSPENDED
        self._capacity_tokens = self._history_tokens = 0 if claim is None else claim.match.num_tokens
        self._rows = rows
        self._windowed = [row.group for row in rows.values() if row.group.window is not None]
        self._num_blocks = 0
        self._next_stale = 0
        self._growths: deque[_Growth] = deque()
        self._settle_numbers(self._capacity_tokens, self._history_tokens)
        for row in rows.values():
            row.fill(self._num_blocks, source.stale(row.group, self._history_tokens), ())

    @property
    def state(self) -> RequestState:
        """Where the request stands."""
        return self._state

    @property
    def capacity_tokens(self) -> int:
        """Positions that have a page, or had one before they left a window."""
        return self._capacity_tokens

    @property
    def history_tokens(self) -> int:
        """Tokens whose KV is final; it never decreases."""
        return self._history_tokens

    @property
    def committed_tokens(self) -> int:
        """Tokens that were taken over from the prefix tree or given to it."""
        return 0 if self._publisher is None else self._publisher.committed_tokens

    @property
    def num_blocks(self) -> int:
        """Entries of every page table, ``ceil(capacity_tokens / tokens_per_block)``."""
        return self._num_blocks

    @property
    def closed(self) -> bool:
        """Whether the pages were given back."""
        return self._state is RequestState.CLOSED

    @property
    def divergence_tokens(self) -> int:
        """How far the prompt is the same as one computed before, which may be further than what could be claimed."""
        return 0 if self._claim is None else self._claim.match.divergence_tokens

    def reuse_status(self) -> tuple[ReuseStatus, ...]:
        """Return what each layer group can take over, by group id; empty without a claim."""
        return () if self._claim is None else tuple(self._claim.status.values())

    # ---- running and not running

    def resume(self, optional_groups: Iterable[GroupId] | None = None) -> ResumeResult:
        """Bring the pages to the device and make the request ACTIVE, or change nothing.

        The first resume fixes what is taken over from the prefix tree. OPTIONAL groups that are not selected let go
        of their pages before anything is allocated, even if the resume then fails.

        Args:
            optional_groups: OPTIONAL groups that take over their pages, from those that `reuse_status` calls complete.
                Only for the first resume. None selects nothing.

        Raises:
            SpecError: a group cannot be selected; nothing was changed.
            LocalProtocolError: the request is not suspended.
        """
        self._require("resume")
        thing = f"request {self.request_id}"
        first = self._held is None
        if first and self._claim is not None:
            self._claim.select(optional_groups or (), thing)
        elif optional_groups is not None:
            cure = "select groups when the request is resumed for the first time"
            raise SpecError(explain(thing, "optional_groups", list(optional_groups), "None from then on", cure))
        pool_groups = {row.group.pool_group for row in self._rows.values()}
        if any(self._source.cache.utilisation(p) > self._source.max_utilisation for p in pool_groups):
            return ResumeResult.OVER_UTILISATION
        try:
            self._bring_back(thing)
        except CapacityError:
            return ResumeResult.OUT_OF_PAGES
        self._state = RequestState.ACTIVE
        return ResumeResult.OK

    def suspend(self) -> None:
        """Give up the page tables and keep the pages: others may push them to the host, if there is one.

        Raises:
            LocalProtocolError: the request is not active.
        """
        self._state = self._require("suspend")
        self._held = HeldPages.of(self._source.cache, self._rows)
        for row in self._rows.values():
            row.fill(self._num_blocks, row.stale, ())

    def revert_context(self, capacity_tokens: int) -> bool:
        """Undo the scheduling of a prefill chunk: shrink to the capacity before it and suspend.

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

    # ---- sizes

    def resize(self, capacity_tokens: int | None = None, history_tokens: int | None = None) -> None:
        """Set capacity and history together: drop what left a window or was cut off, reserve what is new.

        New blocks get a page unless they are outside the window of the NEW history already. Pages dropped by this
        call may serve it. Either everything happens or nothing. The page tables change in place.

        Args:
            capacity_tokens: positions that shall have pages; None keeps them.
            history_tokens: tokens that are final; None keeps them.

        Raises:
            SpecError: the history would shrink or pass the capacity, or the capacity passes the longest sequence.
            CapacityError: not enough free pages in some group.
            LocalProtocolError: the request is not active.
        """
        if self._state is not RequestState.ACTIVE:
            self._require("use", "resize")
        capacity = self._capacity_tokens if capacity_tokens is None else capacity_tokens
        history = self._history_tokens if history_tokens is None else history_tokens
        if not self._history_tokens <= history <= capacity <= self._source.max_capacity_tokens:
            self._refuse_sizes(capacity, history)
        num_blocks = self._source.num_blocks(capacity)
        if num_blocks != self._num_blocks or history >= self._next_stale:
            self._change_pages(num_blocks, history)
        self._settle_numbers(capacity, history)

    def grow(self, draft_tokens: int, *, reserve_tokens: int = 0) -> None:
        """Make room for one generation step: the next token and its drafts.

        The width is remembered for `rewind` or `revert`. Steps that overlap may each grow before the first is
        settled. At the end of the longest sequence the capacity stops where a block-table row ends; the headroom of
        the row covers every position such a step can touch.

        Args:
            draft_tokens: drafts of this step.
            reserve_tokens: least number of drafts to make room for, where a drafter needs a fixed width.

        Raises:
            SpecError: a negative count.
            CapacityError: not enough free pages; nothing was changed or remembered.
            LocalProtocolError: the request is not active.
        """
        if draft_tokens < 0:
            self._refuse_count("draft_tokens", draft_tokens)
        width = max(draft_tokens, reserve_tokens)
        capacity = min(self._capacity_tokens + 1 + width, self._source.max_capacity_tokens)
        added = capacity - self._capacity_tokens
        self._require("use", "grow")
        self.resize(capacity)
        self._growths.append(_Growth(min(width, max(added - 1, 0)), added))

    def extend(self, draft_tokens: int) -> None:
        """Widen the newest unsettled step to `draft_tokens` drafts, as a padded batch needs; a wider one stays.

        Raises:
            CapacityError: not enough free pages; nothing was changed or remembered.
            LocalProtocolError: the request is not active, or no step has grown.
        """
        self._require("use", "extend")
        if not self._growths:
            thing, cure = f"request {self.request_id}", "grow first"
            raise LocalProtocolError(explain(thing, "unsettled steps", 0, "one to extend", cure))
        more = draft_tokens - self._growths[-1].draft_tokens
        capacity = min(self._capacity_tokens + more, self._source.max_capacity_tokens)
        added = capacity - self._capacity_tokens
        if added > 0:
            self.resize(capacity)
            last = self._growths.pop()
            self._growths.append(_Growth(last.draft_tokens + added, last.added_tokens + added))

    def rewind(self, accepted_draft_tokens: int, history_tokens: int) -> None:
        """Settle the oldest step that has grown: give back the room of refused drafts and advance the history.

        Without a remembered step the capacity stays and only the history advances.

        Args:
            accepted_draft_tokens: drafts that became part of the sequence.
            history_tokens: tokens that are final now (all tokens but the newest).

        Raises:
            SpecError: a negative count, or a history that shrinks or passes the new capacity; nothing was changed.
            LocalProtocolError: the request is not active.
        """
        if accepted_draft_tokens < 0:
            self._refuse_count("accepted_draft_tokens", accepted_draft_tokens)
        self._require("use", "rewind")
        recorded = self._growths[0].draft_tokens if self._growths else 0
        refused = max(recorded - accepted_draft_tokens, 0)
        self.resize(self._capacity_tokens - refused, history_tokens)
        if self._growths:
            self._growths.popleft()

    def revert(self) -> None:
        """Undo the newest `grow` that was not settled, as if its step had never been scheduled; else do nothing.

        Raises:
            LocalProtocolError: the request is not active.
        """
        self._require("use", "revert")
        if self._growths:
            self.resize(capacity_tokens=self._capacity_tokens - self._growths[-1].added_tokens)
            self._growths.pop()

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

    def mark_written(self, group_id: GroupId, first_token: int) -> None:
        """Say that a group's KV is there from position `first_token` on, and nothing before it.

        A group that was not taken over at the match length counts as unwritten below it; a transfer that fills its
        window, or a drafter that skipped part of the prompt, knows better.

        Raises:
            SpecError: a negative position.
            UnknownLayerError: there is no such group.
            LocalProtocolError: the request is not active.
        """
        self._require("use", "mark_written")
        if first_token < 0:
            self._refuse_count("first_token", first_token)
        self._rows[self._source.layout.group(group_id).group_id].unwritten_tokens = first_token

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

    # ---- page tables

    def page_table(self, group_id: GroupId) -> SlotRow:
        """Return the row of a layer group: ``[num_blocks]`` int32, read-only, `NO_PAGE` for holes.

        It shares memory with the request's own: ask again after anything that changes pages.

        Raises:
            UnknownLayerError: there is no such group.
            LocalProtocolError: the request is closed.
        """
        if self.closed:
            self._require("use", "page_table")
        view = self._rows[self._source.layout.group(group_id).group_id].slots.view()
        view.flags.writeable = False
        return view

    def page_tables(self) -> dict[GroupId, SlotRow]:
        """Return a copy of every row for a transfer; ordinals outside the window of the history show no page.

        Always one row per layer group: a closed request has empty ones, a suspended one shows no page.
        """
        return {
            group_id: masked_row(row.slots, self._source.stale(row.group, self._history_tokens))
            for group_id, row in self._rows.items()
        }

    def pin(self, tables: Mapping[GroupId, SlotRow] | None = None) -> PagePin:
        """Keep pages from being reused until the returned pin is released, even if the request closes before.

        Args:
            tables: which pages: rows taken from this request, with entries masked that nobody touches. None pins
                everything in `page_tables`.

        Raises:
            SpecError: a row names a page that this request does not have at that ordinal (any more).
            LocalProtocolError: the request is not active.
        """
        self._require("use", "pin")
        wanted = self.page_tables() if tables is None else tables
        for group_id, row in wanted.items():
            self._check_own_pages(group_id, row)
        return PagePin(self._source, wanted)

    def close(self) -> None:
        """Give all pages back; pinned ones follow when their pins go. What was published stays. Safe to call twice."""
        if self.closed:
            return
        if self._state is RequestState.ACTIVE:
            if self._publisher is not None:
                self._publisher.stop()
            for row in self._rows.values():
                self._source.cache.release(row.group.pool_group, [slot for _, slot in row.pages()])
        else:
            for held in (self._claim if self._held is None else None, self._held):
                if held is not None:
                    held.drop()
        for row in self._rows.values():
            row.fill(0, row.stale, ())
        self._state = self._require("close")
        self._capacity_tokens = self._history_tokens = self._num_blocks = 0
        self._growths.clear()
        self._on_close(self.request_id)

    def check_integrity(self) -> None:
        """Check that every block has a page in a group exactly where the group's window still covers it.

        Raises:
            InternalError: it does not, or committed, history, capacity and rows disagree; the text prints the terms.
        """
        committed, history, capacity = self.committed_tokens, self._history_tokens, self._capacity_tokens
        terms = f"0 <= committed {committed} <= history {history} <= capacity {capacity}, {self.num_blocks} blocks"
        story = [f"group {group_id}: {row.slots.tolist()}" for group_id, row in self._rows.items()]
        for row in self._rows.values():
            expected = np.full(self.num_blocks, self._state is RequestState.ACTIVE, dtype=np.bool_)
            stale = self._source.stale(row.group, history)
            expected[stale.lo : stale.hi] = False
            wrong = not np.array_equal(row.slots != NO_PAGE, expected) or row.num_pages != np.count_nonzero(expected)
            if not self.closed and (wrong or any(ordinal not in stale for ordinal in row.pending)):
                text = f"request {self.request_id}, group {row.group.group_id}: pages do not match {terms}, {stale}"
                raise InternalError(text, story=story)
        if not 0 <= committed <= history <= capacity and not self.closed:
            raise InternalError(f"request {self.request_id}: not {terms}", story=story)

    def references(self) -> list[tuple[int, int]]:
        """Return (pool group, slot) of every reference to a slot, for the manager's integrity check."""
        rows = self._rows.values()
        return [
            (row.group.pool_group, slot)
            for row in rows
            for slot in [*(slot for _, slot in row.pages()), *row.pending.values()]
        ]

    def holdings(self) -> HeldPages | PrefixClaim | None:
        """Return what a suspended request holds, for the manager's integrity check."""
        return self._claim if self._held is None else self._held

    # ---- inside

    def _bring_back(self, thing: str) -> None:
        cache = self._source.cache
        if self._held is not None:
            self._held.take(self._rows, thing)
        elif self._claim is not None:
            moves = self._claim.take(self._rows, thing)
            self._source.copy_pages(moves)
            self._claim.finish(moves)
            self._held = HeldPages(cache, {}, {})

    def _change_pages(self, num_blocks: int, history: int) -> None:
        steps = {g: row.plan(num_blocks, self._source.stale(row.group, history)) for g, row in self._rows.items()}
        waiting = {g: self._held_back(self._rows[g], step) for g, step in steps.items()}
        changes = [self._change(self._rows[g], step, waiting[g]) for g, step in steps.items()]
        new_slots = self._source.cache.exchange(changes, thing=f"request {self.request_id}")
        for (group_id, step), slots in zip(steps.items(), new_slots, strict=True):
            row = self._rows[group_id]
            kept = {ordinal: row.at(ordinal) for ordinal in waiting[group_id]}
            row.apply(step, slots)
            row.pending.update(kept)

    def _held_back(self, row: BlockRow, step: RowStep) -> list[int]:
        publisher = self._publisher
        return [] if publisher is None else publisher.holds_back(row, step.leaving, self._capacity_tokens)

    def _change(self, row: BlockRow, step: RowStep, waiting: Sequence[int]) -> GroupChange:
        stay = set(waiting)
        gone = [row.at(ordinal) for ordinal in (*step.leaving, *step.cut) if ordinal not in stay]
        return GroupChange(
            group_id=row.group.group_id,
            pool_group=row.group.pool_group,
            dropped=tuple(gone),
            kept_pages=row.num_pages - len(step.leaving) - len(step.cut),
            needed_pages=len(step.added),
        )

    def _settle_numbers(self, capacity: int, history: int) -> None:
        if history >= self._next_stale or not self._next_stale:
            limits = [self._source.next_stale(group, history) for group in self._windowed]
            self._next_stale = min(limits, default=self._source.max_capacity_tokens + 1)
        self._capacity_tokens, self._history_tokens = capacity, history
        self._num_blocks = self._source.num_blocks(capacity)

    def _require(self, event: str, call: str = "") -> RequestState:
        after = _TRANSITIONS.get((self._state, event))
        if after is None:
            thing, want = f"request {self.request_id}", f"a state that allows {call or event}()"
            cure = "create a new request" if self.closed else "resume() a suspended request, suspend() an active one"
            raise LocalProtocolError(explain(thing, "state", self._state.value, want, cure))
        return after

    def _require_publisher(self) -> PrefixPublisher:
        publisher = self._publisher
        if publisher is None or not publisher.committing:
            got = "stopped committing" if publisher else "no part in prefix reuse"
            cure = "create it with tokens (an empty list looks nothing up), and commit before the end"
            raise LocalProtocolError(explain(f"request {self.request_id}", "commit()", got, "committing", cure))
        return publisher

    def _refuse_sizes(self, capacity: int, history: int) -> None:
        thing = f"request {self.request_id}"
        if history < self._history_tokens:
            want = f">= {self._history_tokens}, the history so far"
            cure = "final tokens stay final: close the request and begin anew"
            raise SpecError(explain(thing, "history_tokens", history, want, cure))
        if capacity < history:
            want = f">= history_tokens={history}"
            raise SpecError(explain(thing, "capacity_tokens", capacity, want, "keep pages for every final token"))
        want = f"<= {self._source.max_capacity_tokens}, a block-table row of the longest sequence"
        cure = "end the sequence at max_seq_len, or build the manager with a larger one"
        raise SpecError(explain(thing, "capacity_tokens", capacity, want, cure))

    def _refuse_count(self, name: str, value: int) -> None:
        raise SpecError(explain(f"request {self.request_id}", name, value, ">= 0 tokens", "pass a count"))

    def _check_own_pages(self, group_id: GroupId, row: SlotRow) -> None:
        own = self._rows[self._source.layout.group(group_id).group_id].slots
        wrong = [i for i, slot in enumerate(row.tolist()) if slot != NO_PAGE and (i >= len(own) or own[i] != slot)]
        if wrong:
            thing = f"request {self.request_id}, layer group {group_id}"
            want = "the page the request has there now"
            cure = "pin before pages can leave, with rows from page_tables()"
            raise SpecError(explain(thing, f"pinned page at ordinal {wrong[0]}", int(row[wrong[0]]), want, cure))
