"""What a check of the gate finds, before anybody knows what it is worth."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from unikv.ids import LayerId


class Rule(Enum):
    """What a difference means; `transfer.gate_draft` turns it into a verdict once all findings are known."""

    NOTE = "shown, never held against the pair"
    TARGET = "refused"
    SLOWER = "the pair works, with less than was asked for"
    DRAFT = "draft KV cannot travel"
    DRAFT_SPLIT = "draft KV cannot travel unless its heads are cut per view"
    DRAFT_COVERAGE = "refused where draft KV is to travel"


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """One compared fact before its verdict.

    Attributes:
        scope: "instance" or "draft"; not shown where `layer` is set.
        layer, role: the layer and role compared; role is empty where the fact belongs to the whole layer.
        draft: whether the drafter owns that layer on both sides.
        agrees: whether the two values go together; they need not be equal for that.
        cure: what to change where they do not.
    """

    name: str
    context: str
    generation: str
    agrees: bool
    rule: Rule
    cure: str
    scope: str = "instance"
    layer: LayerId | None = None
    role: str = ""
    draft: bool = False
