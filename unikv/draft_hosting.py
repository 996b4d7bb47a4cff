"""Where a drafter's KV lives: in the target's cache, or in one of its own.

In one cache, draft layers share a block table: that takes equal heads, head size, dtype, K/V factor and window in all
of them. A drafter that mixes windows keeps its own cache.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Final, Literal

from unikv.errors import SpecError, explain
from unikv.ids import LayerId
from unikv.layer_spec import KVCacheLayerSpec, LayerOwner

_log = logging.getLogger(__name__)

_EQUAL: Final = ("num_kv_heads", "head_dim", "dtype", "kv_factor", "window")
Share = Literal["auto", "1", "0"]
"""Whether the drafter shares the target's cache: if possible, in any case, or never."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftHosting:
    """What was decided.

    Attributes:
        unified: target and draft layers for one manager; the target's alone where the drafter has its own.
        separate: draft layers for a manager of their own; empty where they are unified.
        reason: why the drafter has its own cache, "" where it has not.
    """

    unified: tuple[KVCacheLayerSpec, ...]
    separate: tuple[KVCacheLayerSpec, ...]
    reason: str


def plan_draft_hosting(
    target: Sequence[KVCacheLayerSpec], draft: Sequence[KVCacheLayerSpec], *, share: Share = "auto"
) -> DraftHosting:
    """Decide where the KV of `draft` lives. Draft layers get the ids behind the target's.

    Args:
        target: layers of the target.
        draft: layers of the drafter, in their order.
        share: "1": in the target's cache or not at all; "0": in a cache of its own; "auto": in the target's cache if
            that is possible, else a log line says why not.

    Raises:
        SpecError: `share` is "1" and the layers cannot share a block table; the text names two layers and the field.
            Or it is none of the three.
    """
    if share not in ("auto", "1", "0"):
        raise SpecError(explain("draft hosting", "share", share, "auto, 1 or 0", "use one of them"))
    first = max((spec.layer_id for spec in target), default=-1) + 1
    own = tuple(replace(spec, layer_id=LayerId(first + i), owner=LayerOwner.DRAFT) for i, spec in enumerate(draft))
    difference = _difference(own)
    if share == "0" or (share == "auto" and difference):
        reason = difference or "asked for"
        if difference and share == "auto":
            _log.warning("the drafter keeps its KV in a cache of its own: %s", difference)
        return DraftHosting(unified=tuple(target), separate=own, reason=reason)
    if difference:
        cure = "give all draft layers the same, or let the drafter have its own cache (auto or 0)"
        raise SpecError(f"draft hosting: {difference}; {cure}")
    return DraftHosting(unified=(*target, *own), separate=(), reason="")


def _difference(draft: Sequence[KVCacheLayerSpec]) -> str:
    """Return how two draft layers differ in what a shared block table needs, "" where none do."""
    for spec in draft[1:]:
        for field in _EQUAL:
            here, there = getattr(spec, field), getattr(draft[0], field)
            if here != there:
                return f"draft layers {draft[0].layer_id} and {spec.layer_id} differ in {field} ({there} and {here})"
    return ""
