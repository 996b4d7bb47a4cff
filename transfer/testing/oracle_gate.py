"""Whether two instances may talk and whether draft KV travels, worked out from the cases alone.

The names are those of the gate's checks, so that a refusal can be compared reason by reason; how the gate finds them
is not looked at.
"""

from __future__ import annotations

from collections.abc import Iterator

from transfer.testing.case import InstanceShape, LayerKind, PairCase
from transfer.testing.oracle import roles_of, window_of


def refusals(case: PairCase) -> frozenset[str]:
    """Return the names of all checks that must refuse the pair; empty where it must be accepted."""
    context, generation = case.context, case.generation
    found = {name for name, wrong in _header(context, generation) if wrong}
    found |= {name for name, draft in _layers(context, generation) if not draft}
    if context.counts()[1] or generation.counts()[1]:
        if context.draft_kv != generation.draft_kv:
            found.add("draft_kv")
        elif context.draft_kv == "1" and (obstacles := _hard(case) | _split(case)):
            found |= obstacles | {"draft_kv"}
    return frozenset(found)


def draft_travels(case: PairCase) -> bool:
    """Return whether draft KV travels between two sides that may talk."""
    context, generation = case.context, case.generation
    if not (context.counts()[1] or generation.counts()[1]) or context.draft_kv == "0" or _hard(case):
        return False
    return context.draft_kv == "per_view" or not _split(case)


def _header(context: InstanceShape, generation: InstanceShape) -> Iterator[tuple[str, bool]]:
    small, large = sorted((context.tpb, generation.tpb))
    yield "tokens_per_block", large % small != 0
    yield "cp", context.cp > 1 or (generation.cp > 1 and small != large)
    yield "target_layers", context.counts()[0] != generation.counts()[0]
    yield "checksum", context.checksum != generation.checksum
    yield "path", context.path != generation.path
    yield "path_direct", "direct" in (context.path, generation.path) and not generation.exported


def _hard(case: PairCase) -> set[str]:
    """Return draft obstacles that no way of cutting heads overcomes."""
    context, generation = case.context, case.generation
    found = {name for name, draft in _layers(context, generation) if draft}
    if context.counts()[1] != generation.counts()[1]:
        found.add("draft_layers")
    ours, theirs = context.speculation, generation.speculation
    if ours is None or theirs is None:
        found.add("speculative")
    for index, name in enumerate(("speculative_method", "max_draft_tokens", "block_width")):
        if (ours and ours[index]) != (theirs and theirs[index]):
            found.add(name)
    if max(context.tpb, generation.tpb) % min(context.tpb, generation.tpb):
        found.add("tokens_per_block")
    return found


def _split(case: PairCase) -> set[str]:
    """Return draft obstacles that cutting heads per view overcomes."""
    context, generation = case.context, case.generation
    names = (("tp", "tp"), ("attention_dp", "attention_dp"), ("tokens_per_block", "tpb"))
    return {name for name, key in names if getattr(context, key) != getattr(generation, key)}


def _layers(context: InstanceShape, generation: InstanceShape) -> Iterator[tuple[str, bool]]:
    """Yield (check, whether it is the drafter's affair) of everything layers of one number differ in."""
    for ours, theirs in zip(context.layers(), generation.layers(), strict=False):
        draft = ours.draft and theirs.draft
        facts, others = _facts(context, ours), _facts(generation, theirs)
        for key in facts.keys() & others.keys():
            if facts[key] != others[key]:
                yield key.partition("/")[0], draft and not key.startswith("owner")


def _facts(shape: InstanceShape, kind: LayerKind) -> dict[str, object]:
    roles = roles_of(kind)
    names = [role for role, _, _ in roles]
    facts: dict[str, object] = {
        "owner": kind.draft,
        "kv_factor": len({"key", "value"} & set(names)),
        "roles": frozenset(names) - {"key", "value"},
        "window": window_of(shape, kind),
        "sink_tokens": -(-kind.sinks // shape.tpb) * shape.tpb,
    }
    for role, row_bytes, split in roles:
        scale = role.endswith("_block_scale")
        facts[f"dtype/{role}"] = ("float8_e4m3fn" if scale else kind.dtype) if split else "bytes"
        facts[f"head_dim/{role}"] = kind.head_dim if split else 0
        facts[f"row_bytes/{role}"] = row_bytes
        facts[f"total_heads/{role}"] = kind.heads if split else 1
    return facts
