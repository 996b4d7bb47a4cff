"""From a pair that fails in the simulator to the smallest one that fails alike: what a red run prints."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from transfer.testing.case import InstanceShape, LayerKind, PairCase, RequestCase
from transfer.testing.simulator import simulate


def failure(case: PairCase) -> Exception | None:
    """Return what went wrong with one pair, or None."""
    try:
        simulate(case)
    except Exception as error:
        return error
    return None


def minimal(case: PairCase, most_runs: int = 400) -> tuple[PairCase, Exception | None]:
    """Return the smallest case found that fails with the same kind of error as `case`, and that error."""
    error, runs, progress = failure(case), 0, True
    while error is not None and progress:
        progress = False
        for candidate in smaller(case):
            runs += 1
            if runs > most_runs:
                return case, error
            other = failure(candidate)
            if type(other) is type(error):
                case, error, progress = candidate, other, True
                break
    return case, error


def report(case: PairCase) -> str:
    """Return the error of a failing case and the smallest case that fails alike, as text to repeat it from."""
    small, error = minimal(case)
    return f"seed {case.seed}: {error}\nsmallest pair that fails alike:\n{small.describe()}"


def smaller(case: PairCase) -> Iterator[PairCase]:
    """Yield cases with one thing less each, largest steps first. Some may be impossible."""
    for number in range(len(case.requests) if len(case.requests) > 1 else 0):
        yield replace(case, requests=case.requests[:number] + case.requests[number + 1 :])
    yield from _fewer_layers(case)
    for side in ("context", "generation"):
        shape = getattr(case, side)
        for change in _plainer(shape, InstanceShape(kinds=()), leave_out=("kinds", "stages", "speculation", "tpb")):
            yield replace(case, **{side: change})
        if shape.pp > 1:
            yield replace(case, **{side: replace(shape, stages=(sum(shape.stages),), draft_stage=0)})
    for number, request in enumerate(case.requests):
        for change in _plainer(request, RequestCase(prompt=1)):
            yield replace(case, requests=(*case.requests[:number], change, *case.requests[number + 1 :]))
    yield from _plainer(case, PairCase(context=case.context, generation=case.generation, requests=case.requests))


def _fewer_layers(case: PairCase) -> Iterator[PairCase]:
    """Take away or simplify a kind on both sides where both have the same."""
    if case.context.kinds != case.generation.kinds:
        return
    kinds = case.context.kinds
    for number, kind in enumerate(kinds):
        rest = (kinds[:number], kinds[number + 1 :])
        changes = [*_plainer(kind, LayerKind(heads=kind.heads, draft=kind.draft))]
        for changed in [rest[0] + rest[1], *(rest[0] + (change,) + rest[1] for change in changes)]:
            targets = sum(one.count for one in changed if not one.draft)
            if not targets:
                continue
            shapes = [
                shape if sum(shape.stages) == targets else replace(shape, stages=(targets,), draft_stage=0)
                for shape in (case.context, case.generation)
            ]
            yield replace(case, context=replace(shapes[0], kinds=changed), generation=replace(shapes[1], kinds=changed))


def _plainer(thing: Any, plain: Any, leave_out: tuple[str, ...] = ("seed", "kinds", "draft")) -> Iterator[Any]:
    for name in type(thing).__dataclass_fields__:
        if name not in leave_out and getattr(thing, name) != getattr(plain, name):
            yield replace(thing, **{name: getattr(plain, name)})
