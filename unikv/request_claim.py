"""What a new request took from the prefix tree, from its creation to its first run.

Claimed pages are held: they stay, whatever becomes of the tree. At the first resume a REQUIRED group runs on them, an
OPTIONAL one does where it is complete and selected; everybody else gets fresh pages for the live blocks of the prefix.
A block that is used in part is copied: its new owner will write behind the part that it shares.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from unikv.block_rows import BlockRow
from unikv.cached_page import CachedPage
from unikv.errors import CapacityError, SpecError, explain
from unikv.ids import GroupId, SlotId
from unikv.layer_spec import ReusePolicy
from unikv.page_cache import PageCacheManager
from unikv.page_moves import Moves, PageMove
from unikv.prefix_match import PrefixMatch, ReuseStatus, live_ordinals, reuse_status
from unikv.ranges import Span
from unikv.slots import GroupChange


@dataclass(slots=True)
class PrefixClaim:
    """The pages one request may take over. Its owner moves it along: `select`, `take` and `finish`, or `drop`.

    A `take` that finds too few pages changes nothing, so that another selection may follow.

    Attributes:
        match: what the lookup found.
        status: what each layer group can take over; what a `take` left out is incomplete from then on.
        pages: held pages by group and ordinal.
        selected: groups that will run on them.
    """

    cache: PageCacheManager
    match: PrefixMatch
    status: dict[GroupId, ReuseStatus]
    pages: dict[GroupId, dict[int, CachedPage]]
    selected: set[GroupId] = field(default_factory=set)

    @classmethod
    def of(cls, cache: PageCacheManager, match: PrefixMatch) -> PrefixClaim:
        """Hold whatever the match offers."""
        tpb = cache.layout.tokens_per_block
        status = {group.group_id: reuse_status(match, group, tpb) for group in cache.layout.groups}
        pages: dict[GroupId, dict[int, CachedPage]] = {}
        for group in cache.layout.groups:
            if status[group.group_id].complete:
                ordinals = live_ordinals(group, match.num_tokens, tpb)
                there = {ordinal: match.nodes[ordinal].pages[group.group_id] for ordinal in ordinals}
                pages[group.group_id] = {ordinal: page for ordinal, page in there.items() if page is not None}
                for page in pages[group.group_id].values():
                    cache.hold(page)
        return cls(cache, match, status, pages)

    def select(self, optional_groups: Iterable[GroupId], thing: str) -> None:
        """Choose the OPTIONAL groups that run on what they claimed; the others let go of it when the claim is taken.

        Raises:
            SpecError: a group is not OPTIONAL or not complete; nothing was chosen.
        """
        chosen = set(optional_groups)
        for group_id in chosen:
            status = self.status.get(group_id)
            if status is None or status.policy is not ReusePolicy.OPTIONAL or group_id not in self.pages:
                got = "no such group" if status is None else f"{status.policy.value}, complete={status.complete}"
                want = "an OPTIONAL group that is complete in reuse_status()"
                raise SpecError(explain(thing, f"optional_groups entry {group_id}", got, want, "leave it out"))
        required = {g for g, status in self.status.items() if status.policy is ReusePolicy.REQUIRED}
        self.selected = required | chosen

    def given_up(self) -> list[CachedPage]:
        """Return the pages of groups that were not selected; the last block first: so it is evicted first."""
        declined = [pages for group_id, pages in self.pages.items() if group_id not in self.selected]
        return [page for pages in declined for _, page in sorted(pages.items(), reverse=True)]

    def take(self, rows: Mapping[GroupId, BlockRow], thing: str) -> Moves:
        """Fill `rows` with the claimed pages of the selected groups and fresh ones; return the copies that are due.

        `finish` or `put_back` must follow.

        Args:
            rows: the request's, empty so far.
            thing: whose step it is, for messages.

        Raises:
            CapacityError: not enough pages; the claim stands as it was.
        """
        tpb, length = self.cache.layout.tokens_per_block, self.match.num_tokens
        tail = length // tpb if length % tpb else -1
        chosen = {g: self.pages.get(g, {}) if g in self.selected else {} for g in rows}
        shared = {g: [(o, p) for o, p in chosen[g].items() if o != tail] for g in rows}
        fresh = {g: self._fresh(row, {o for o, _ in shared[g]}) for g, row in rows.items()}
        changes = [self._change(rows[g], len(shared[g]), len(ordinals)) for g, ordinals in fresh.items()]
        pages = [page for group_pages in chosen.values() for page in group_pages.values()]
        try:
            slots = self.cache.lock(pages, changes, thing=thing, given_up=self.given_up())
        except CapacityError:
            raise
        except BaseException:
            self._forget_declined()
            raise
        self._forget_declined()
        return self._fill(rows, shared, dict(zip(fresh, zip(fresh.values(), slots, strict=True), strict=True)), tail)

    def finish(self, moves: Moves) -> None:
        """Let go of what `take` used, the sources of its copies too, which must have been made (or queued)."""
        self.cache.statistics.reused_pages += len(self.held_pages()) - len(moves)
        self.cache.statistics.copied_pages += len(moves)
        for group_id, copies in moves.items():
            self.cache.release(self.cache.layout.groups[group_id].pool_group, [move.source for move in copies])
        self.drop()

    def put_back(self, rows: Mapping[GroupId, BlockRow], moves: Moves) -> None:
        """Undo `take`, whose copies `moves` failed: empty `rows`, and hold the pages as before."""
        for group_id, row in rows.items():
            sources = [move.source for move in moves.get(group_id, ())]
            self.cache.release(row.group.pool_group, [*(slot for _, slot in row.pages()), *sources])
            row.fill(row.slots.shape[0], row.stale, ())
            row.unwritten = Span(0, 0)

    def drop(self) -> None:
        """Let go of everything."""
        for group_id in list(self.pages):
            self._let_go(group_id)

    def held_pages(self) -> list[CachedPage]:
        """Return every held page."""
        return [page for pages in self.pages.values() for page in pages.values()]

    def _forget_declined(self) -> None:
        """Drop from the books what `given_up` named and the cache has let go of."""
        for group_id in [g for g in self.pages if g not in self.selected]:
            del self.pages[group_id]
            self.status[group_id] = replace(self.status[group_id], complete=False, coverage=())

    def _let_go(self, group_id: GroupId) -> None:
        # The last block first: so it is evicted first.
        for _, page in sorted(self.pages.pop(group_id).items(), reverse=True):
            self.cache.unhold(page)

    def _fresh(self, row: BlockRow, shared: set[int]) -> list[int]:
        live = live_ordinals(row.group, self.match.num_tokens, self.cache.layout.tokens_per_block)
        return [ordinal for ordinal in live if ordinal not in shared]

    def _change(self, row: BlockRow, kept: int, needed: int) -> GroupChange:
        group = row.group
        return GroupChange(
            group_id=group.group_id, pool_group=group.pool_group, kept_pages=kept, dropped=(), needed_pages=needed
        )

    def _fill(
        self,
        rows: Mapping[GroupId, BlockRow],
        shared: Mapping[GroupId, Sequence[tuple[int, CachedPage]]],
        fresh: Mapping[GroupId, tuple[Sequence[int], Sequence[SlotId]]],
        tail: int,
    ) -> dict[GroupId, list[PageMove]]:
        moves: dict[GroupId, list[PageMove]] = {}
        for group_id, row in rows.items():
            ordinals, slots = fresh[group_id]
            new = list(zip(ordinals, slots, strict=True))
            row.fill(row.slots.shape[0], row.stale, [*((o, page.slot) for o, page in shared[group_id]), *new])
            pages = self.pages.get(group_id, {})
            row.unwritten = Span(0, self._unwritten(group_id, pages, tail))
            if tail in pages:
                moves[group_id] = [PageMove(pages[tail].slot, slots[list(ordinals).index(tail)])]
        return moves

    def _unwritten(self, group_id: GroupId, pages: Mapping[int, CachedPage], tail: int) -> int:
        """Return the position before which a group has not all it would have, had it computed the prefix itself."""
        tpb, length = self.cache.layout.tokens_per_block, self.match.num_tokens
        # A window of one token reads nothing of the last block: its page may be missing, or too short.
        whole = tail < 0 or (tail in pages and pages[tail].span >= length - tail * tpb)
        if group_id not in self.selected or not whole:
            return length
        return max((ordinal * tpb + page.valid_from for ordinal, page in pages.items() if page.valid_from), default=0)
