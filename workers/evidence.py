"""Digests of KV rows that two ranks can compare whatever their heads, layout and slots."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from hashlib import blake2b
from typing import Final

import numpy as np

from transfer.hello import RankCard
from unikv.layer_spec import LayerOwner
from workers.page_bytes import Bytes, buffer_bytes, live_pages
from workers.runner import Evidence, Tables

DIGEST_BYTES: Final = 8

DigestKey = tuple[int, str, int, int]
"""(layer, role, global head, block ordinal)"""


def digest_pages(
    card: RankCard, arrays: Sequence[Bytes], tables: Tables, prompt_tokens: int, *, with_draft: bool
) -> Evidence:
    """Digest every live (layer, role, head, block) of a prompt: its valid rows in token order, so that ranks with
    other heads, layouts and slots come to the same digest.
    """
    digests: dict[DigestKey, bytes] = {}
    checked = 0
    live = {group: live_pages(card, group, tables, prompt_tokens) for group in tables}
    for buffer in buffer_bytes(card, arrays):
        if not with_draft and buffer.owner is LayerOwner.DRAFT:
            continue
        pages = live[buffer.group_id]
        for ordinal, slot, tokens in zip(pages.ordinals, pages.slots, pages.tokens, strict=True):
            for index, head in enumerate(range(buffer.heads.lo, buffer.heads.hi)):
                rows = np.ascontiguousarray(buffer.pages[slot, index, :tokens])
                key = (buffer.layer_id, buffer.role, head, int(ordinal))
                digests[key] = blake2b(rows.data, digest_size=DIGEST_BYTES).digest()
                checked += rows.size
    return Evidence(checked_bytes=checked, digests=digests)


def compare(context: Mapping[DigestKey, bytes], generation: Evidence) -> tuple[int, str]:
    """Return how many bytes of the generation side are not proven equal to the context side's, and the first place."""
    wrong = [key for key, digest in generation.digests.items() if context.get(key) != digest]
    if not wrong:
        return generation.mismatched_bytes, generation.first_mismatch
    each = generation.checked_bytes // max(1, len(generation.digests))
    layer, role, head, ordinal = min(wrong)
    what = "differs from" if min(wrong) in context else "is not known to"
    place = f"layer {layer} {role} head {head} block {ordinal} {what} the context side"
    return generation.mismatched_bytes + len(wrong) * each, generation.first_mismatch or place
