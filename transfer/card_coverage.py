"""Whether a card tells of everything its rank has: memory that no view describes would stay behind without a word."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable

from unikv.errors import SpecError, explain
from unikv.ids import LayerId
from unikv.layer_spec import STANDARD_ROLES
from unikv.views import KVView


def check_described(
    allocated: Iterable[tuple[LayerId, str]], views: Iterable[KVView], *, stays_home: Collection[str] = ()
) -> None:
    """Check that every role a rank has memory for is in one view, or stays home by name.

    Args:
        allocated: layer and role of every buffer of the rank.
        views: those of its card.
        stays_home: extra roles that are not to travel.

    Raises:
        SpecError: a role in no view or in several, a view of a role that has no memory, or a name in `stays_home` that
            is K, V or their scales, or that no layer has.
    """
    held = list(allocated)
    roles = {role for _, role in held}
    for role in sorted(stays_home):
        if role in STANDARD_ROLES or role not in roles:
            extras = ", ".join(sorted(roles - set(STANDARD_ROLES))) or "no extra role"
            want, cure = f"an extra role of this rank ({extras})", "leave it out; K, V and their scales always travel"
            raise SpecError(explain("rank card", "stays_home", role, want, cure))
    described = Counter((entry.layer_id, entry.role) for view in views for entry in view.entries)
    for layer, role in sorted({*held, *described}):
        times = int((layer, role) in held and role not in stays_home)
        if described[layer, role] != times:
            got = f"in {described[layer, role]} views of the card"
            cure = "describe every buffer once, or name an extra role in stays_home"
            raise SpecError(explain(f"layer {layer}", f"role {role}", got, f"in {times}", cure))
