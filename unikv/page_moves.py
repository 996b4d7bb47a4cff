"""What is copied where: values that those who decide hand to those who copy."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from unikv.ids import GroupId


@dataclass(frozen=True, slots=True)
class PageMove:
    """One page: where it is and where it goes, as slots of its pool group (or of the host tier)."""

    source: int
    target: int


class TokenMove(NamedTuple):
    """One token's KV in all layers of a group: slot and token offset in the slot, of the source and of the target."""

    source_slot: int
    source_offset: int
    target_slot: int
    target_offset: int


Moves = Mapping[GroupId, Sequence[PageMove]]
"""Pages to copy, by layer group."""
