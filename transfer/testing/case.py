"""Pairs of instances in words: what the simulator runs, the oracle judges and a red run prints. Numbers only.

Nothing here knows how pages are arranged, matched or moved; `random_case` draws a pair from a seed, and the same seed
always gives the same pair.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerKind:
    """Equal layers of one model.

    Attributes:
        count: how many there are.
        heads: KV heads of the whole model; 0 for layers with nothing but extras.
        kv_factor: 2 for K and V, 1 for keys alone.
        sinks: tokens that never leave the window.
        extras: bytes per token by role; every rank has all of them.
    """

    count: int = 1
    draft: bool = False
    heads: int = 1
    head_dim: int = 16
    dtype: str = "bfloat16"
    kv_factor: int = 2
    window: int | None = None
    sinks: int = 0
    policy: str = "required"
    extras: Mapping[str, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class InstanceShape:
    """One side of a pair.

    Attributes:
        stages: target layers of every pipeline stage; draft layers are all on `draft_stage`.
        order: seed of the order in which a rank lists its layers; 0 for ascending.
        pad_bytes: canaries between two slots of a pool.
        base_bytes: canaries in front of a pool.
        exported: whether peers can map the memory.
        speculation: method, draft tokens and block width; None without a drafter.
        bands: bands of layers the context side cuts pages into.
    """

    kinds: tuple[LayerKind, ...]
    tp: int = 1
    stages: tuple[int, ...] = (1,)
    draft_stage: int = 0
    cp: int = 1
    attention_dp: bool = False
    tpb: int = 4
    layout: str = "HND"
    max_seq_len: int | None = None
    order: int = 0
    pad_bytes: int = 0
    base_bytes: int = 0
    exported: bool = True
    path: str = "auto"
    checksum: str = "off"
    draft_kv: str = "auto"
    speculation: tuple[str, int, int] | None = None
    bands: int = 1

    @property
    def pp(self) -> int:
        """Pipeline stages."""
        return len(self.stages)

    @property
    def ranks(self) -> int:
        """Ranks in all."""
        return self.tp * self.pp * self.cp

    def layers(self) -> list[LayerKind]:
        """Return the kind of every layer by its global number, targets first."""
        ordered = sorted(self.kinds, key=lambda kind: kind.draft)
        return [kind for kind in ordered for _ in range(kind.count)]

    def counts(self) -> tuple[int, int]:
        """Return how many target and how many draft layers the model has."""
        drafts = sum(kind.count for kind in self.kinds if kind.draft)
        return len(self.layers()) - drafts, drafts


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestCase:
    """One request.

    Attributes:
        tail_blocks: blocks both sides have beyond the prompt, for draft tokens.
        cached_tokens: tokens at the start that the generation side has already.
        optional_selected: whether that holds in OPTIONAL groups, too; if not, they are requested in full.
        ask_first: whether the generation side asks before the context side publishes.
        early: whether pages may leave while the prompt is computed, layer by layer.
        source, target: data-parallel rank on each side, modulo their number.
        told: whether the generation side knows `source`.
        first_tokens, draft_tokens: how many tokens travel beside the KV.
    """

    prompt: int
    tail_blocks: int = 0
    cached_tokens: int = 0
    optional_selected: bool = False
    ask_first: bool = False
    early: bool = False
    source: int = 0
    target: int = 0
    told: bool = True
    first_tokens: int = 1
    draft_tokens: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class PairCase:
    """Two instances and the requests that pass between them; `seed` drives slots, canaries and the order of events."""

    context: InstanceShape
    generation: InstanceShape
    requests: tuple[RequestCase, ...]
    chunk_bytes: int = 4096
    staging_chunks: int = 4
    managed: bool = False
    seed: int = 0

    def describe(self) -> str:
        """Return the case as lines that leave out whatever has its default value."""
        lines = [f"seed {self.seed}, chunk_bytes {self.chunk_bytes}, staging_chunks {self.staging_chunks}"]
        lines[0] += ", caches of the manager" if self.managed else ""
        for side, shape in (("context", self.context), ("generation", self.generation)):
            lines.append(f"{side}: {_differing(shape, 'kinds') or 'plain'}")
            lines += [f"  layers: {_differing(kind) or 'plain'}" for kind in shape.kinds]
        lines += [f"request {number}: {_differing(request)}" for number, request in enumerate(self.requests)]
        return "\n".join(lines)


def _differing(thing: Any, *leave_out: str) -> str:
    found = []
    for item in fields(thing):
        value = getattr(thing, item.name)
        default = item.default_factory() if callable(item.default_factory) else item.default
        if item.name not in leave_out and value != default:
            found.append(f"{item.name}={value!r}")
    return ", ".join(found)
