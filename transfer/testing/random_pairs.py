"""Random pairs of instances for the simulator, and what they have in them, in words to count by."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from random import Random
from typing import Any, Final

from transfer.testing.case import InstanceShape, LayerKind, PairCase, RequestCase

DTYPES: Final = ("float32", "float16", "bfloat16", "bfloat16", "float8_e4m3fn", "nvfp4")
MANAGED: Final = 0.12
"""How many pairs take pages and page tables from caches of the manager, instead of dealing them out at random."""
SIXTHS: Final = 6
"""Heads that two and three ranks can share: such models meet at TP 2 and 3."""
TWISTED: Final = 0.22
"""How many pairs get a difference that may keep them apart."""
MOST_PAIRS: Final = (2, 4, 4, 6, 6, 8, 8, 12, 24)
"""Pairs of ranks in one case, at most: hellos take most of the time of a case."""


def random_case(seed: int) -> PairCase:
    """Return the pair of instances that belongs to `seed`."""
    draw = Random(seed)  # noqa: S311 - the same pair for a seed is what is wanted
    unit, ratio = draw.choice((1, 2, 4, 8)), draw.choice((1, 1, 2, 2, 4))
    kinds = _model(draw, unit * ratio)
    speculation = ("draft_model", draw.randint(1, 4), draw.randint(1, 5)) if any(k.draft for k in kinds) else None
    path = draw.choice(("auto", "auto", "direct", "zmq"))
    sizes = [unit, unit * ratio]
    draw.shuffle(sizes)
    common: dict[str, Any] = {
        "kinds": kinds,
        "speculation": speculation,
        "path": path,
        "draft_kv": draw.choice(("auto", "per_view", "per_view", "per_view", "1", "0")),
        "max_seq_len": draw.choice((None, None, 24, 96)),
    }
    most = draw.choice(MOST_PAIRS)
    context = _shape(draw, common, sizes[0], max(1, most // draw.choice((1, 2, 3))))
    generation = _shape(draw, common, sizes[1], max(1, most // context.ranks), context)
    generation = replace(generation, exported=path == "direct" or draw.random() < 0.8)
    if common["draft_kv"] == "1" and draw.random() < 0.8:
        generation = _follow(generation, context)
    if draw.random() < TWISTED:
        context, generation = draw.choice(TWISTS)(draw, context, generation)
    longest = (context.max_seq_len or 64) - 8
    managed = draw.random() < MANAGED
    if managed:
        bare: dict[str, Any] = {"pad_bytes": 0, "base_bytes": 0, "exported": True}
        context, generation = (
            replace(shape, **bare, max_seq_len=shape.max_seq_len or 96) for shape in (context, generation)
        )
    return PairCase(
        managed=managed,
        context=context,
        generation=generation,
        requests=tuple(_request(draw, longest) for _ in range(draw.choice((1, 1, 2, 3)))),
        chunk_bytes=draw.choice((64, 512, 4096, 1 << 20)),
        staging_chunks=draw.choice((1, 2, 8)),
        seed=seed,
    )


def _model(draw: Random, block: int) -> tuple[LayerKind, ...]:
    mla, sixths = draw.random() < 0.25, draw.random() < 0.15
    kinds = [_kind(draw, block, mla=mla) for _ in range(draw.choice((1, 1, 2, 3)))]
    if draw.random() < 0.1:
        kinds.append(LayerKind(heads=0, extras={"state": draw.choice((4, 24))}))
    if draw.random() < 0.6:
        drafts = [_kind(draw, block, mla=mla and draw.random() < 0.3) for _ in range(draw.choice((1, 1, 2)))]
        kinds += [
            replace(kind, draft=True, policy=draw.choice(("required", "optional", "optional", "private")))
            for kind in drafts
        ]
    if sixths:
        kinds = [replace(kind, heads=kind.heads and draw.choice((6, 12))) for kind in kinds]
    return tuple(kinds)


def _kind(draw: Random, block: int, *, mla: bool) -> LayerKind:
    dtype = draw.choice(DTYPES)
    window = draw.choice((None, None, draw.randint(1, 12), draw.randint(8, 40)))
    return LayerKind(
        count=draw.choice((1, 1, 2, 3)),
        heads=1 if mla else draw.choice((1, 2, 2, 3, 4, 4, 6, 8, 12)),
        head_dim=draw.choice((16, 32)) if dtype == "nvfp4" else draw.choice((2, 6, 16)),
        dtype=dtype,
        kv_factor=1 if mla else draw.choice((2, 2, 2, 1)),
        window=window,
        sinks=0 if window is None else draw.choice((0, 0, 0, block, 2 * block, 3 if block < 3 else block)),
        policy=draw.choice(("required", "required", "required", "optional")),
        extras=draw.choice(({}, {}, {}, {"index_key": 16}, {"index_key": 5, "state": 32})),
    )


def _shape(
    draw: Random, common: dict[str, Any], tpb: int, room: int, context: InstanceShape | None = None
) -> InstanceShape:
    """Return a shape of about `room` ranks; the generation side may split sequences, where blocks are equal."""
    heads = [kind.heads for kind in common["kinds"] if kind.heads]
    legal = [tp for tp in (1, 2, 3, 4, 6, 8, 12) if tp <= min(12, room) and all(_fit(tp, own) for own in heads)]
    tp = draw.choice((2, 3) if all(own % SIXTHS == 0 for own in heads) else legal)
    targets = sum(kind.count for kind in common["kinds"] if not kind.draft)
    pp = draw.randint(1, max(1, min(3, targets, room // tp)))
    cuts = sorted(draw.sample(range(1, targets), pp - 1))
    cp = 1
    if context is not None and context.tpb == tpb and draw.random() < 0.6:
        cp = draw.choice([cp for cp in (2, 2, 3, 4) if tp * pp * cp <= max(2 * room, 2 * tp * pp)])
    return InstanceShape(
        **common,
        tp=tp,
        stages=tuple(b - a for a, b in zip([0, *cuts], [*cuts, targets], strict=True)),
        draft_stage=draw.choice((pp - 1, draw.randrange(pp))),
        cp=cp,
        attention_dp=draw.random() < 0.25,
        tpb=tpb,
        layout=draw.choice(("HND", "NHD")),
        order=draw.choice((0, draw.randint(1, 99))),
        pad_bytes=draw.choice((0, 0, 16, 24)),
        base_bytes=draw.choice((0, 0, 64)),
        bands=draw.choice((1, 1, 2, 3)) if context is None else 1,
    )


def _fit(tp: int, heads: int) -> bool:
    return tp % heads == 0 or heads % tp == 0


def _follow(generation: InstanceShape, context: InstanceShape) -> InstanceShape:
    """Return `generation` as draft KV that must travel wants it: split like the context side."""
    return replace(generation, tp=context.tp, attention_dp=context.attention_dp, tpb=context.tpb)


def _request(draw: Random, longest: int) -> RequestCase:
    prompt = draw.randint(1, min(longest, draw.choice((9, 24, 56))))
    return RequestCase(
        prompt=prompt,
        tail_blocks=draw.choice((0, 0, 1, 2)),
        cached_tokens=draw.choice((0, 0, draw.randint(0, prompt), prompt)),
        optional_selected=draw.random() < 0.4,
        ask_first=draw.random() < 0.5,
        early=draw.random() < 0.5,
        source=draw.randrange(12),
        target=draw.randrange(12),
        told=draw.random() < 0.6,
        first_tokens=draw.choice((0, 1, 1, 2)),
        draft_tokens=draw.randint(0, 5),
    )


# --- differences between the two sides -------------------------------------------------------------------------------

Pair = tuple[InstanceShape, InstanceShape]
Twist = Callable[[Random, InstanceShape, InstanceShape], Pair]


def _kind_twist(**changes: Callable[[Random, LayerKind], Any]) -> Twist:
    """Return a twist that changes one kind of layer of the generation side."""

    def twist(draw: Random, context: InstanceShape, generation: InstanceShape) -> Pair:
        number = draw.randrange(len(generation.kinds))
        kind = generation.kinds[number]
        if not kind.heads:
            return context, generation
        changed = replace(kind, **{name: change(draw, kind) for name, change in changes.items()})
        kinds = (*generation.kinds[:number], changed, *generation.kinds[number + 1 :])
        return context, replace(generation, kinds=kinds)

    return twist


def _shape_twist(**changes: Callable[[Random, InstanceShape], Any]) -> Twist:
    """Return a twist that changes what the generation side says of itself."""

    def twist(draw: Random, context: InstanceShape, generation: InstanceShape) -> Pair:
        return context, replace(generation, **{name: change(draw, context) for name, change in changes.items()})

    return twist


def _splitting_context(draw: Random, context: InstanceShape, generation: InstanceShape) -> Pair:
    return replace(context, cp=2), replace(generation, cp=1)


def _more_layers(draw: Random, context: InstanceShape, generation: InstanceShape) -> Pair:
    """One more layer on the generation side, of the target or of the drafter."""
    number = draw.randrange(len(generation.kinds))
    kind = generation.kinds[number]
    kinds = (*generation.kinds[:number], replace(kind, count=kind.count + 1), *generation.kinds[number + 1 :])
    grown = generation.stages[-1] + (not kind.draft)
    return context, replace(generation, kinds=kinds, stages=(*generation.stages[:-1], grown))


def _no_drafter(draw: Random, context: InstanceShape, generation: InstanceShape) -> Pair:
    """Only one side has a drafter."""
    bare: dict[str, Any] = {"kinds": tuple(kind for kind in context.kinds if not kind.draft), "speculation": None}
    if draw.random() < 0.5:
        return replace(context, **bare), generation
    return context, replace(generation, **bare)


def _other_dtype(draw: Random, kind: LayerKind) -> str:
    return draw.choice([dtype for dtype in DTYPES if dtype != kind.dtype and (dtype != "nvfp4" or kind.head_dim > 6)])


def _other_speculation(draw: Random, shape: InstanceShape) -> tuple[str, int, int] | None:
    method, tokens, width = shape.speculation or ("draft_model", 1, 1)
    return draw.choice(((method, tokens + 1, width), (method, tokens, width + 1), ("other", tokens, width)))


TWISTS: Final[tuple[Twist, ...]] = (
    _kind_twist(dtype=_other_dtype),
    _kind_twist(head_dim=lambda draw, kind: kind.head_dim + 16),
    _kind_twist(kv_factor=lambda draw, kind: 3 - kind.kv_factor),
    _kind_twist(window=lambda draw, kind: (kind.window or 9) + draw.randint(1, 30)),
    _kind_twist(policy=lambda draw, kind: draw.choice(("required", "optional", "private"))),
    _kind_twist(sinks=lambda draw, kind: kind.sinks + draw.randint(1, 9) if kind.window else 0),
    _kind_twist(extras=lambda draw, kind: {**kind.extras, "index_key": draw.choice((5, 16, 17))}),
    _shape_twist(tpb=lambda draw, shape: draw.choice((3, 5, 6, 12))),
    _shape_twist(checksum=lambda draw, shape: "crc32"),
    _shape_twist(path=lambda draw, shape: draw.choice(("auto", "direct", "zmq"))),
    _shape_twist(exported=lambda draw, shape: False),
    _shape_twist(draft_kv=lambda draw, shape: draw.choice(("auto", "per_view", "1", "0"))),
    _shape_twist(max_seq_len=lambda draw, shape: draw.choice((64, 128))),
    _shape_twist(speculation=_other_speculation),
    _splitting_context,
    _more_layers,
    _no_drafter,
    _no_drafter,
)


# --- what a case has in it -------------------------------------------------------------------------------------------


def features(case: PairCase) -> frozenset[str]:
    """Return what is particular about a case, in words to count by."""
    context, generation = case.context, case.generation
    kinds = (*context.kinds, *generation.kinds)
    asked = case.requests
    facts = {
        "unequal TP": context.tp != generation.tp,
        "TP ratio not whole": max(context.tp, generation.tp) % min(context.tp, generation.tp) != 0,
        "unequal PP": context.stages != generation.stages,
        "context attention DP": context.attention_dp and context.tp > 1,
        "generation attention DP": generation.attention_dp and generation.tp > 1,
        "CP": generation.cp > 1,
        "unequal page sizes": context.tpb != generation.tpb,
        "HND to NHD or back": context.layout != generation.layout,
        "replicated heads": any(0 < kind.heads < shape.tp for shape in (context, generation) for kind in kinds),
        "nvfp4": any(kind.dtype == "nvfp4" for kind in kinds),
        "fp8 target, bf16 draft": _has(kinds, dtype="float8_e4m3fn") and _has(kinds, draft=True, dtype="bfloat16"),
        "key only": any(kind.kv_factor == 1 for kind in kinds),
        "MLA target, K/V drafter": any(k.heads == k.kv_factor == 1 and not k.draft for k in kinds)
        and any(kind.draft and kind.kv_factor == 2 for kind in kinds),
        "extra roles": any(kind.extras for kind in kinds),
        "layers without heads": any(not kind.heads for kind in kinds),
        "drafter": any(kind.draft for kind in kinds),
        "window": any(kind.window for kind in kinds),
        "sinks": any(kind.sinks for kind in kinds),
        "cached on the generation side": any(request.cached_tokens >= generation.tpb for request in asked),
        "optional group in full": _has(kinds, policy="optional")
        and any(request.cached_tokens >= generation.tpb and not request.optional_selected for request in asked),
        "early layers": any(request.early for request in asked) and context.bands > 1,
        "partial last page": any(request.prompt % generation.tpb for request in asked),
        "draft tail": any(request.tail_blocks for request in asked),
        "several requests": len(asked) > 1,
        "holder not told": context.attention_dp and context.tp > 1 and not all(request.told for request in asked),
        "canaries between slots": bool(generation.pad_bytes),
        "layers in another order": context.order != generation.order,
        "caches of the manager": case.managed,
    }
    return frozenset(name for name, there in facts.items() if there)


def _has(kinds: tuple[LayerKind, ...], **wanted: Any) -> bool:
    return any(all(getattr(kind, name) == value for name, value in wanted.items()) for kind in kinds)
