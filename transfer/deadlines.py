"""When to look at requests again: a heap of deadlines, so that a turn costs what is due and not what is open."""

from __future__ import annotations

import heapq

from unikv.ids import RequestId


class DeadlineManager:
    """Deadlines of requests. A deadline that was put off is noticed when the old one passes; see `due`."""

    def __init__(self) -> None:
        self._heap: list[tuple[float, RequestId]] = []

    def __len__(self) -> int:
        return len(self._heap)

    def add(self, request_id: RequestId, deadline_s: float) -> None:
        """Have `due` return `request_id` once, from `deadline_s` on."""
        heapq.heappush(self._heap, (deadline_s, request_id))

    def due(self, now_s: float) -> list[RequestId]:
        """Return the requests whose deadlines have passed, and forget them; who still is not late is added again."""
        found = []
        while self._heap and self._heap[0][0] <= now_s:
            found.append(heapq.heappop(self._heap)[1])
        return found


class Pace:
    """Says when something that happens again and again is due: every `every_s`, counted from the first look."""

    def __init__(self, every_s: float) -> None:
        self._every_s, self._next_s = every_s, float("inf")

    def due(self, now_s: float) -> bool:
        """Return whether it is time; if so, the next time counts from now."""
        due = now_s >= self._next_s
        if due or self._next_s == float("inf"):
            self._next_s = now_s + self._every_s
        return due
