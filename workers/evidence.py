"""Digests of KV rows that two ranks can compare whatever their heads, layout, block length and slots."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from hashlib import blake2b
from typing import Final

import numpy as np

from transfer.hello import RankCard
from unikv.layer_spec import LayerOwner
from workers.page_bytes import BufferBytes, Bytes, LiveUnits, buffer_bytes, live_units, missing_tokens
from workers.runner import Digest, DigestKey, Evidence, PromptPages

DIGEST_BYTES: Final = 8


def digest_pages(card: RankCard, arrays: Sequence[Bytes], pages: PromptPages, *, with_draft: bool) -> Evidence:
    """Digest every live (layer, role, head, unit) of a prompt: its valid rows in token order.

    Args:
        card: the rank that holds the pages.
        arrays: the bytes of its storages.
        pages: which pages, and the unit.
        with_draft: whether draft layers count.
    """
    live = {group: live_units(card, group, pages) for group in pages.tables}
    digests: dict[DigestKey, Digest] = {}
    missing_bytes, first = 0, ""
    for buffer in buffer_bytes(card, arrays):
        if not with_draft and buffer.owner is LayerOwner.DRAFT:
            continue
        units = live[buffer.group_id]
        digests.update(_digest_buffer(buffer, units))
        missing_bytes += missing_tokens(units, pages.prompt_tokens) * len(buffer.heads) * buffer.row_bytes
        first = first or name_missing(buffer, units)
    checked = sum(digest.size_bytes for digest in digests.values()) + missing_bytes
    return Evidence(checked_bytes=checked, mismatched_bytes=missing_bytes, first_mismatch=first, digests=digests)


def name_missing(buffer: BufferBytes, live: LiveUnits) -> str:
    """Return the first place of `buffer` that has no page, "" where every one has."""
    if not len(live.missing):
        return ""
    token = int(live.missing[0]) * live.unit_tokens
    return f"layer {buffer.layer_id} {buffer.role} head {buffer.heads.lo} token {token} has no page"


def compare(context: Mapping[DigestKey, Digest], generation: Evidence) -> tuple[int, str]:
    """Return how many bytes of the generation side are not proven equal to the context side's, and the first place."""
    seen = generation.digests
    wrong = [key for key, digest in seen.items() if context.get(key) != digest]
    mismatched = generation.mismatched_bytes + sum(seen[key].size_bytes for key in wrong)
    if not wrong or generation.first_mismatch:
        return mismatched, generation.first_mismatch
    layer, role, head, unit = min(wrong)
    what = "differs from" if min(wrong) in context else "is not known to"
    return mismatched, f"layer {layer} {role} head {head} unit {unit} {what} the context side"


def _digest_buffer(buffer: BufferBytes, live: LiveUnits) -> dict[DigestKey, Digest]:
    rows = buffer.rows(live)
    digests: dict[DigestKey, Digest] = {}
    for index, (unit, tokens) in enumerate(zip(live.units.tolist(), live.tokens.tolist(), strict=True)):
        for head, number in enumerate(range(buffer.heads.lo, buffer.heads.hi)):
            piece = np.ascontiguousarray(rows[index, head, :tokens])
            digest = blake2b(piece.data, digest_size=DIGEST_BYTES).digest()
            digests[buffer.layer_id, buffer.role, number, unit] = Digest(digest, piece.size)
    return digests
