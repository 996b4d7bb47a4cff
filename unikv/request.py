"""One request's pages: how many positions it may touch, which are final, and the page table of every layer group.

::

    positions   0 ........... history ......... capacity
                | final KV   | pages reserved  | none
    0 <= history <= capacity,  num_blocks == ceil(capacity / tokens_per_block)
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Final

import numpy as np

from unikv.errors import InternalError, LocalProtocolError, SpecError, explain
from unikv.ids import NO_PAGE, GroupId, RequestId
from unikv.page_source import PagePin, PageSource
from unikv.page_table import RowPlan, SlotRow, empty_row, masked_row, num_valid, plan_row, valid_slots
from unikv.ranges import ceil_div
from unikv.slots import GroupChange, exchange_slots


class RequestState(Enum):
    """Where a request stands."""

    ACTIVE = "active"
    CLOSED = "closed"


_TRANSITIONS: Final = {
    (RequestState.ACTIVE, "use"): RequestState.ACTIVE,
    (RequestState.ACTIVE, "close"): RequestState.CLOSED,
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

    Once it is closed, only its properties, `page_tables` and `close` may be used; the rest raises LocalProtocolError.
    One thread uses a manager and its requests at a time.

    Attributes:
        request_id: the manager's name for it.
    """

    def __init__(self, request_id: RequestId, source: PageSource, on_close: Callable[[RequestId], None]) -> None:
        """Start with no capacity; `on_close` is called once, when the pages are back."""
        self.request_id: Final = request_id
        self._source = source
        self._on_close = on_close
        self._state = RequestState.ACTIVE
        self._capacity_tokens = 0
        self._history_tokens = 0
        self._rows = {group.group_id: empty_row() for group in source.layout.groups}
        self._growths: deque[_Growth] = deque()

    @property
    def capacity_tokens(self) -> int:
        """Positions that have a page, or had one before they left a window."""
        return self._capacity_tokens

    @property
    def history_tokens(self) -> int:
        """Tokens whose KV is final; it never decreases."""
        return self._history_tokens

    @property
    def num_blocks(self) -> int:
        """Entries of every page table, ``ceil(capacity_tokens / tokens_per_block)``."""
        return ceil_div(self._capacity_tokens, self._source.layout.tokens_per_block)

    @property
    def closed(self) -> bool:
        """Whether the pages were given back."""
        return self._state is RequestState.CLOSED

    def resize(self, capacity_tokens: int | None = None, history_tokens: int | None = None) -> None:
        """Set capacity and history together: drop what left a window or was cut off, reserve what is new.

        New blocks get a page unless they are outside the window of the NEW history already. Pages dropped by this
        call may serve it. Either everything happens or nothing.

        Args:
            capacity_tokens: positions that shall have pages; None keeps them.
            history_tokens: tokens that are final; None keeps them.

        Raises:
            SpecError: the history would shrink or pass the capacity, or the capacity passes the longest sequence.
            CapacityError: not enough free pages in some group.
            LocalProtocolError: the request is closed.
        """
        self._advance("use", "resize")
        capacity = self._capacity_tokens if capacity_tokens is None else capacity_tokens
        history = self._history_tokens if history_tokens is None else history_tokens
        self._check_sizes(capacity, history)
        num_blocks = ceil_div(capacity, self._source.layout.tokens_per_block)
        plans = {
            group.group_id: plan_row(self._rows[group.group_id], num_blocks, self._source.stale(group, history))
            for group in self._source.layout.groups
        }
        new_slots = exchange_slots(
            self._source.allocators,
            [self._change(group_id, plan) for group_id, plan in plans.items()],
            thing=f"request {self.request_id}",
        )
        for (group_id, plan), slots in zip(plans.items(), new_slots, strict=True):
            self._rows[group_id] = plan.filled(slots)
        self._capacity_tokens = capacity
        self._history_tokens = history

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
            LocalProtocolError: the request is closed.
        """
        self._advance("use", "grow")
        self._check_count("draft_tokens", draft_tokens)
        width = max(draft_tokens, reserve_tokens)
        capacity = min(self._capacity_tokens + 1 + width, self._source.max_capacity_tokens)
        added = capacity - self._capacity_tokens
        self.resize(capacity_tokens=capacity)
        self._growths.append(_Growth(min(width, max(added - 1, 0)), added))

    def rewind(self, accepted_draft_tokens: int, history_tokens: int) -> None:
        """Settle the oldest step that has grown: give back the room of refused drafts and advance the history.

        Without a remembered step the capacity stays and only the history advances.

        Args:
            accepted_draft_tokens: drafts that became part of the sequence.
            history_tokens: tokens that are final now (all tokens but the newest).

        Raises:
            SpecError: a negative count, or a history that shrinks or passes the new capacity; nothing was changed.
            LocalProtocolError: the request is closed.
        """
        self._advance("use", "rewind")
        self._check_count("accepted_draft_tokens", accepted_draft_tokens)
        recorded = self._growths[0].draft_tokens if self._growths else 0
        refused = max(recorded - accepted_draft_tokens, 0)
        self.resize(self._capacity_tokens - refused, history_tokens)
        if self._growths:
            self._growths.popleft()

    def revert(self) -> None:
        """Undo the newest `grow` that was not settled, as if its step had never been scheduled; else do nothing.

        Raises:
            LocalProtocolError: the request is closed.
        """
        self._advance("use", "revert")
        if self._growths:
            self.resize(capacity_tokens=self._capacity_tokens - self._growths[-1].added_tokens)
            self._growths.pop()

    def page_table(self, group_id: GroupId) -> SlotRow:
        """Return the row of a layer group: ``[num_blocks]`` int32, read-only, `NO_PAGE` for holes.

        The row is what it was at the time of the call; ask again after `resize`, `grow`, `rewind` or `revert`.

        Raises:
            UnknownLayerError: there is no such group.
            LocalProtocolError: the request is closed.
        """
        self._advance("use", "page_table")
        view = self._rows[self._source.layout.group(group_id).group_id].view()
        view.flags.writeable = False
        return view

    def page_tables(self) -> dict[GroupId, SlotRow]:
        """Return a copy of every row for a transfer; ordinals outside the window of the history show no page.

        Always one row per layer group: a closed request has empty ones.
        """
        return {
            group.group_id: masked_row(self._rows[group.group_id], self._source.stale(group, self._history_tokens))
            for group in self._source.layout.groups
        }

    def pin(self, tables: Mapping[GroupId, SlotRow] | None = None) -> PagePin:
        """Keep pages from being reused until the returned pin is released, even if the request closes before.

        Args:
            tables: which pages: rows taken from this request, with entries masked that nobody touches. None pins
                everything in `page_tables`.

        Raises:
            SpecError: a row names a page that this request does not have at that ordinal (any more).
            LocalProtocolError: the request is closed.
        """
        self._advance("use", "pin")
        wanted = self.page_tables() if tables is None else tables
        for group_id, row in wanted.items():
            self._check_own_pages(group_id, row)
        return PagePin(self._source, wanted)

    def close(self) -> None:
        """Give all pages back; pinned ones follow when their pins go. Safe to call twice."""
        was_open = not self.closed
        self._advance("close", "close")
        if was_open:
            # In the order of the ordinals: the run of slots comes back as a run.
            for group_id, row in self._rows.items():
                self._source.allocator(group_id).release(valid_slots(row))
                self._rows[group_id] = empty_row()
            self._capacity_tokens = self._history_tokens = 0
            self._growths.clear()
            self._on_close(self.request_id)

    def check_integrity(self) -> None:
        """Check that every block has a page in a group exactly where the group's window still covers it.

        Raises:
            InternalError: it does not, or history, capacity and rows disagree; the text prints the terms.
        """
        terms = f"0 <= history {self._history_tokens} <= capacity {self._capacity_tokens}, {self.num_blocks} blocks"
        story = [f"group {group_id}: {row.tolist()}" for group_id, row in self._rows.items()]
        for group in self._source.layout.groups:
            expected = np.ones(self.num_blocks, dtype=np.bool_)
            stale = self._source.stale(group, self._history_tokens)
            expected[stale.lo : stale.hi] = False
            if not np.array_equal(self._rows[group.group_id] != NO_PAGE, expected):
                text = f"request {self.request_id}, group {group.group_id}: pages do not match {terms}, stale {stale}"
                raise InternalError(text, story=story)
        if not 0 <= self._history_tokens <= self._capacity_tokens and not self.closed:
            raise InternalError(f"request {self.request_id}: not {terms}", story=story)

    def _advance(self, event: str, call: str) -> None:
        after = _TRANSITIONS.get((self._state, event))
        if after is None:
            thing, want = f"request {self.request_id}", f"a state that allows {call}()"
            raise LocalProtocolError(explain(thing, "state", self._state.value, want, "create a new request"))
        self._state = after

    def _change(self, group_id: GroupId, plan: RowPlan) -> GroupChange:
        return GroupChange(
            group_id=group_id,
            pool_group=self._source.layout.group(group_id).pool_group,
            dropped=plan.dropped,
            kept_pages=num_valid(plan.row),
            needed_pages=len(plan.added),
        )

    def _check_sizes(self, capacity: int, history: int) -> None:
        thing = f"request {self.request_id}"
        if history < self._history_tokens:
            want = f">= {self._history_tokens}, the history so far"
            cure = "final tokens stay final: close the request and begin anew"
            raise SpecError(explain(thing, "history_tokens", history, want, cure))
        if capacity < history:
            want = f">= history_tokens={history}"
            raise SpecError(explain(thing, "capacity_tokens", capacity, want, "keep pages for every final token"))
        if capacity > self._source.max_capacity_tokens:
            want = f"<= {self._source.max_capacity_tokens}, a block-table row of the longest sequence"
            cure = "end the sequence at max_seq_len, or build the manager with a larger one"
            raise SpecError(explain(thing, "capacity_tokens", capacity, want, cure))

    def _check_count(self, name: str, value: int) -> None:
        if value < 0:
            raise SpecError(explain(f"request {self.request_id}", name, value, ">= 0 tokens", "pass a count"))

    def _check_own_pages(self, group_id: GroupId, row: SlotRow) -> None:
        own = self._rows[self._source.layout.group(group_id).group_id]
        wrong = [i for i, slot in enumerate(row.tolist()) if slot != NO_PAGE and (i >= len(own) or own[i] != slot)]
        if wrong:
            thing = f"request {self.request_id}, layer group {group_id}"
            want = "the page the request has there now"
            cure = "pin before pages can leave, with rows from page_tables()"
            raise SpecError(explain(thing, f"pinned page at ordinal {wrong[0]}", int(row[wrong[0]]), want, cure))
