"""The pages of a running request: how many positions it may touch, which are final, and a page table per layer group.

::

    positions   0 ........... history ......... capacity
                | final KV   | pages reserved  | none
    0 <= history <= capacity,  num_blocks == ceil(capacity / tokens_per_block)

Nothing here knows about prefixes, or about requests that do not run: see `unikv.request`.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Final

from unikv.block_rows import BlockRow, RowStep
from unikv.errors import LocalProtocolError, SpecError, explain
from unikv.ids import NO_PAGE, GroupId, RequestId
from unikv.page_source import PagePin, PageSource
from unikv.page_table import SlotRow, masked_row
from unikv.request_checks import check_own_pages, wrong_sizes
from unikv.slots import GroupChange


class RequestState(Enum):
    """Where a request stands."""

    SUSPENDED = "suspended"
    ACTIVE = "active"
    CLOSED = "closed"


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


class RequestPages:
    """Capacity, history and page tables of one request. `KVCacheRequest` adds its life around them.

    Attributes:
        request_id: the manager's name for it.
    """

    def __init__(
        self,
        request_id: RequestId,
        source: PageSource,
        rows: dict[GroupId, BlockRow],
        state: RequestState,
        num_tokens: int,
    ) -> None:
        """Start with `num_tokens` final tokens and rows that show no page yet.

        Args:
            request_id: the manager's name for it.
            source: where pages come from.
            rows: one empty row per layer group.
            state: ACTIVE, or SUSPENDED where pages come later.
            num_tokens: history and capacity.
        """
        self.request_id: Final = request_id
        self._source = source
        self._state = state
        self._rows = rows
        self._windowed = [row.group for row in rows.values() if row.group.window is not None]
        self._num_blocks = 0
        self._next_stale = 0
        self._growths: deque[_Growth] = deque()
        self._settle_numbers(num_tokens, num_tokens)
        for row in rows.values():
            row.fill(self._num_blocks, source.stale(row.group, num_tokens), ())

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
    def num_blocks(self) -> int:
        """Entries of every page table, ``ceil(capacity_tokens / tokens_per_block)``."""
        return self._num_blocks

    @property
    def closed(self) -> bool:
        """Whether the pages were given back."""
        return self._state is RequestState.CLOSED

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

    def place(self, group_id: GroupId, position: int) -> tuple[int, int]:
        """Return the slot of a token position in a layer group, and the token's offset in it.

        Raises:
            SpecError: the position has no page.
            UnknownLayerError: there is no such group.
        """
        ordinal, offset = divmod(position, self._source.layout.tokens_per_block)
        row, local = self._rows[self._source.layout.group(group_id).group_id], self._source.ledger.local(ordinal)
        if local is None or not 0 <= local < self._num_blocks or row.slots[local] == NO_PAGE:
            thing = f"request {self.request_id}, layer group {group_id}"
            want = f"in [0, {self._capacity_tokens}) and inside the window"
            raise SpecError(explain(thing, "position", position, want, "name a position that has a page"))
        return int(row.slots[local]), offset

    def page_tables(self) -> dict[GroupId, SlotRow]:
        """Return a copy of every row, ``[num_blocks]`` int32, for a transfer; ordinals out of the window show no page.

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
            own = self._rows[self._source.layout.group(group_id).group_id]
            check_own_pages(f"request {self.request_id}, layer group {group_id}", own, row)
        return PagePin(self._source, wanted)

    def references(self) -> list[tuple[int, int]]:
        """Return (pool group, slot) of every reference to a slot, for the manager's integrity check."""
        rows = self._rows.values()
        return [
            (row.group.pool_group, slot)
            for row in rows
            for slot in [*(slot for _, slot in row.pages()), *row.pending.values()]
        ]

    # ---- inside

    def _change_pages(self, num_blocks: int, history: int) -> None:
        steps = {g: row.plan(num_blocks, self._source.stale(row.group, history)) for g, row in self._rows.items()}
        waiting = {g: self._held_back(self._rows[g], step.leaving) for g, step in steps.items()}
        changes = [self._change(self._rows[g], step, waiting[g]) for g, step in steps.items()]
        new_slots = self._source.cache.exchange(changes, thing=f"request {self.request_id}")
        for (group_id, step), slots in zip(steps.items(), new_slots, strict=True):
            row = self._rows[group_id]
            kept = {ordinal: row.at(ordinal) for ordinal in waiting[group_id]}
            row.apply(step, slots)
            row.pending.update(kept)

    def _held_back(self, row: BlockRow, ordinals: Iterable[int]) -> list[int]:
        """Return which of `ordinals`, about to leave the window, keep their page for now."""
        return []

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

    def _refuse_sizes(self, capacity: int, history: int) -> None:
        raise wrong_sizes(
            f"request {self.request_id}", capacity, history, self._history_tokens, self._source.max_capacity_tokens
        )

    def _refuse_count(self, name: str, value: int) -> None:
        raise SpecError(explain(f"request {self.request_id}", name, value, ">= 0 tokens", "pass a count"))
