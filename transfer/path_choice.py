"""Which path a pair of ranks takes: what was asked for, what is possible, and why."""

from __future__ import annotations

from typing import Final

from transfer.gate_checks import why_not_direct
from transfer.gate_facts import header_facts
from transfer.hello import CAPABILITY_NIXL, PathKind, RankCard
from unikv.errors import IncompatiblePeerError

_MAPPED: Final = "the peer's pools can be mapped"


def choose_path(context: RankCard, generation: RankCard) -> tuple[PathKind, str]:
    """Return the path this pair of ranks takes, and the reason for the log.

    Raises:
        IncompatiblePeerError: the path that was asked for cannot be taken; a slower one is never taken silently.
    """
    asked = context.path
    hindrance = why_not_direct(header_facts(context), header_facts(generation))
    if asked is PathKind.ZMQ:
        return PathKind.ZMQ, "asked for"
    if asked is PathKind.AUTO:
        return _staged_path(context, generation, hindrance) if hindrance else (PathKind.DIRECT, _MAPPED)
    if asked is PathKind.NIXL:
        hindrance = why_not_nixl(context, generation)
    if not hindrance:
        return asked, "asked for"
    raise IncompatiblePeerError(f"path {asked} is not possible", mismatches=(f"{hindrance}; set transfer.path: auto",))


def why_not_nixl(context: RankCard, generation: RankCard) -> str:
    """Return why NIXL cannot carry this pair's chunks, or "" where it can."""
    lacking = [card for card in (context, generation) if CAPABILITY_NIXL not in card.capabilities]
    return f"the {lacking[0].side} rank {lacking[0].rank} has no NIXL (pip install 'unikv[nixl]')" if lacking else ""


def _staged_path(context: RankCard, generation: RankCard, hindrance: str) -> tuple[PathKind, str]:
    """Return the staged path that is taken by itself: NIXL between hosts where both have it, else the link."""
    ours, theirs = context.host, generation.host
    if ours is None or theirs is None or ours.boot_id == theirs.boot_id:
        return PathKind.ZMQ, hindrance
    if missing := why_not_nixl(context, generation):
        return PathKind.ZMQ, f"{hindrance}; {missing}"
    return PathKind.NIXL, hindrance
