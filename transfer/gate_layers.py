"""The checks on layers: geometry and life cycle of what both ranks hold, and coverage over whole instances.

=============  ================================  =========================================
check          compared per                      a difference
=============  ================================  =========================================
dtype ...      layer and role both sides hold    refused; for draft layers a draft obstacle
owner ...      layer both sides hold             the same; a wrong owner is always refused
coverage       layer and role, whole instances   refused unless draft KV stays home
=============  ================================  =========================================
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from typing import Final

from transfer.gate_facts import LayerFacts, RoleFacts, role_order
from transfer.gate_findings import Finding, Rule
from transfer.gate_text import spans_text, union
from transfer.hello import RankCard
from unikv.ids import LayerId
from unikv.layer_spec import KEY, VALUE, LayerOwner
from unikv.ranges import Span

Heads = dict[tuple[LayerId, str], set[Span]]


def _other_roles(facts: LayerFacts) -> str:
    return ", ".join(r.role for r in facts.roles if r.role not in (KEY, VALUE)) or "none"


_ROLE_CHECKS: Final[tuple[tuple[str, Callable[[RoleFacts], str], str], ...]] = (
    ("dtype", lambda f: f.dtype, "layers[].dtype"),
    ("head_dim", lambda f: str(f.head_dim), "layers[].head_dim"),
    ("row_bytes", lambda f: f"{f.row_bytes} B", "layers[].head_dim and layers[].dtype"),
    ("total_heads", lambda f: str(f.total_heads), "layers[].kv_heads"),
)
_LAYER_CHECKS: Final[tuple[tuple[str, Callable[[LayerFacts], str], str], ...]] = (
    ("owner", lambda f: f.owner.value, "layers[].owner"),
    ("kv_factor", lambda f: str(sum(r.role in (KEY, VALUE) for r in f.roles)), "layers[].kv_factor"),
    ("roles", _other_roles, "dtype and extra buffers"),
    ("window", lambda f: "full" if f.window is None else f"{f.window} tokens", "layers[].window and max_seq_len"),
    ("sink_tokens", lambda f: f"{f.sink_tokens} tokens", "layers[].sink_tokens, a multiple of both tokens_per_block"),
    ("reuse_policy", lambda f: "unknown" if f.reuse_policy is None else f.reuse_policy.value, "layers[].reuse"),
)
_RULES: Final = {"owner": Rule.TARGET, "reuse_policy": Rule.NOTE}
"""Checks whose weight does not depend on who owns the layer. Reuse decides what is looked up, not what travels."""


def check_layers(context: tuple[LayerFacts, ...], generation: tuple[LayerFacts, ...]) -> list[Finding]:
    """Return the findings on every layer both ranks hold; layers of other pipeline stages are not their business."""
    theirs = {layer.layer_id: layer for layer in generation}
    findings: list[Finding] = []
    for layer in context:
        if (other := theirs.get(layer.layer_id)) is not None:
            findings += _compare_layer(layer, other)
    return findings


def check_coverage(context: Sequence[RankCard], generation: Sequence[RankCard]) -> list[Finding]:
    """Return, per layer and role, whether the context instance holds every head that the generation instance holds."""
    ours, theirs = _held(context), _held(generation)
    drafts = {layer for card in generation for layer in _draft_layers(card)}
    return [
        _coverage(key, union(ours.get(key, ())), union(theirs[key]), draft=key[0] in drafts)
        for key in sorted(theirs, key=lambda key: (key[0], role_order(key[1])))
    ]


def _coverage(key: tuple[LayerId, str], have: tuple[Span, ...], need: tuple[Span, ...], *, draft: bool) -> Finding:
    return Finding(
        name="coverage",
        context=spans_text("head", have),
        generation=spans_text("head", need),
        agrees=all(any(ours.lo <= span.lo and span.hi <= ours.hi for ours in have) for span in need),
        rule=Rule.DRAFT_COVERAGE if draft else Rule.TARGET,
        cure="give the context side every layer and head that the generation side holds",
        layer=key[0],
        role=key[1],
        draft=draft,
    )


def _compare_layer(context: LayerFacts, generation: LayerFacts) -> list[Finding]:
    draft = context.owner is LayerOwner.DRAFT and generation.owner is LayerOwner.DRAFT
    weight = Rule.DRAFT if draft else Rule.TARGET

    def finding(name: str, ours: str, theirs: str, key: str, role: str) -> Finding:
        return Finding(
            name=name,
            context=ours,
            generation=theirs,
            agrees=ours == theirs,
            rule=_RULES.get(name, weight),
            cure=f"set the same {key} on both sides",
            layer=context.layer_id,
            role=role,
            draft=draft,
        )

    findings = [finding(name, text(context), text(generation), key, "") for name, text, key in _LAYER_CHECKS]
    theirs = {facts.role: facts for facts in generation.roles}
    for facts in context.roles:
        if (other := theirs.get(facts.role)) is not None:
            findings += [finding(name, text(facts), text(other), key, facts.role) for name, text, key in _ROLE_CHECKS]
    return findings


def _held(cards: Iterable[RankCard]) -> Heads:
    held: Heads = defaultdict(set)
    for card in cards:
        for view in card.views:
            for entry in view.entries:
                held[entry.layer_id, entry.role].add(view.heads)
    return held


def _draft_layers(card: RankCard) -> set[LayerId]:
    views = (view for view in card.views if view.owner is LayerOwner.DRAFT)
    return {entry.layer_id for view in views for entry in view.entries}
