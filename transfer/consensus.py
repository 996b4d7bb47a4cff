"""How the ranks of one instance agree on what became of their requests, whatever each of them saw first.

Tensor- and pipeline-parallel ranks run the same requests in lockstep. Each has an endpoint of its own, and each learns
of an outcome at a time of its own. A rank that acted on its own view would schedule a request that its neighbours do
not have yet, or enter a collective alone. So every rank says what it sees, everybody merges the same views, and all act
on the same decisions:

===========  ============================================================  =====================================
decision     when                                                          why
===========  ============================================================  =====================================
exchange     any rank has news (OR)                                        else some would wait in a collective
failed       any rank has failed, or is lost (union)                       the others' bytes are of no use alone
completed    every rank has succeeded (intersection)                       the model needs the KV of all ranks
retired      it was decided, and every rank is quiet                       until then somebody's pages are in use
===========  ============================================================  =====================================

Nothing here sends anything: views are small and frozen, and travel however the engine's ranks talk (an all-gather of
its own group, for example). Decisions follow from views alone, so all ranks make the same ones.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from transfer.outcome import TransferHandle
from unikv.errors import LocalProtocolError, explain
from unikv.ids import RequestId


@dataclass(frozen=True, slots=True, kw_only=True)
class Standing:
    """Where one request stands on one rank.

    Attributes:
        done: whether the rank's transfer succeeded.
        reason: why it failed, "" where it has not.
        quiet: whether nobody can touch the rank's pages of it any more.
    """

    done: bool = False
    reason: str = ""
    quiet: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class RankView:
    """What one rank sees of its open requests."""

    requests: Mapping[RequestId, Standing]


@dataclass(frozen=True, slots=True, kw_only=True)
class Decisions:
    """What all ranks do now, in this order; ids ascend.

    Attributes:
        failed: requests to give up, with the reason of the first rank that had one.
        completed: requests whose KV every rank has.
        retired: decided requests that every rank is quiet on: their pages may be used again.
    """

    failed: Mapping[RequestId, str] = field(default_factory=dict)
    completed: tuple[RequestId, ...] = ()
    retired: tuple[RequestId, ...] = ()


def must_exchange(news: Iterable[bool]) -> bool:
    """Return whether the ranks exchange views now, from every rank's own `LedgerManager.has_news`."""
    return any(list(news))


def decide(views: Sequence[RankView | None]) -> Decisions:
    """Return what follows from the views of all ranks, in rank order; the same on every rank.

    A request some rank does not know of yet is open on it. A rank that is lost has no view (None): what is open
    fails, and it is quiet, since its process is gone and its pages with it.
    """
    lost = [rank for rank, view in enumerate(views) if view is None]
    known = sorted({request_id for view in views if view is not None for request_id in view.requests})
    failed: dict[RequestId, str] = {}
    completed: list[RequestId] = []
    retired: list[RequestId] = []
    for request_id in known:
        standings = [view.requests.get(request_id, Standing()) for view in views if view is not None]
        reason = next((standing.reason for standing in standings if standing.reason), "")
        if not reason and lost:
            reason = f"rank {lost[0]} of the instance is lost"
        if reason:
            failed[request_id] = reason
        elif all(standing.done for standing in standings):
            completed.append(request_id)
        if (reason or request_id in completed) and all(standing.quiet for standing in standings):
            retired.append(request_id)
    return Decisions(failed=failed, completed=tuple(completed), retired=tuple(retired))


@dataclass(slots=True)
class _Entry:
    handle: TransferHandle
    said: Standing = Standing()
    failed: bool = False
    completed: bool = False


class LedgerManager:
    """One rank's open requests: what to say of them, and what of the decisions is new to this rank.

    Every decision is returned once. A failure may come after a completion, when a rank is lost in between; then the
    request is to be given up like any other.
    """

    def __init__(self) -> None:
        self._entries: dict[RequestId, _Entry] = {}

    def __len__(self) -> int:
        return len(self._entries)

    def track(self, handle: TransferHandle) -> None:
        """Take a request in; every rank of the instance tracks the same ones, at any time before the others finish.

        Raises:
            LocalProtocolError: it is tracked already.
        """
        if handle.request_id in self._entries:
            thing = f"request {handle.request_id}"
            raise LocalProtocolError(explain(thing, "state", "tracked", "new", "use every request id once"))
        self._entries[handle.request_id] = _Entry(handle)

    def has_news(self) -> bool:
        """Return whether a handle has changed since this rank last said what it sees."""
        return any(_standing(entry.handle) != entry.said for entry in self._entries.values())

    def view(self) -> RankView:
        """Return what this rank sees now."""
        for entry in self._entries.values():
            entry.said = _standing(entry.handle)
        return RankView(requests={request_id: entry.said for request_id, entry in self._entries.items()})

    def take(self, decisions: Decisions) -> Decisions:
        """Return what of `decisions` this rank has not done yet, and forget what is retired.

        The caller gives up the failed ones at its endpoint (`cancel`, `fail`: harmless where they are over), schedules
        the completed ones, and frees the pages of the retired ones.
        """
        failed = {
            request_id: reason
            for request_id, reason in decisions.failed.items()
            if (entry := self._entries.get(request_id)) is not None and not entry.failed
        }
        completed = tuple(
            request_id
            for request_id in decisions.completed
            if (entry := self._entries.get(request_id)) is not None and not entry.completed
        )
        for request_id in failed:
            self._entries[request_id].failed = True
        for request_id in completed:
            self._entries[request_id].completed = True
        retired = tuple(request_id for request_id in decisions.retired if self._entries.pop(request_id, None))
        return Decisions(failed=failed, completed=completed, retired=retired)


def _standing(handle: TransferHandle) -> Standing:
    outcome = handle.outcome
    return Standing(
        done=outcome is not None and outcome.ok,
        reason="" if outcome is None else outcome.reason,
        quiet=outcome is not None and handle.quiet,
    )
