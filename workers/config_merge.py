"""From the text of a pair file to one mapping per side: cases, overrides, and what both sides inherit.

=====================  ==============================================  =================================
written in             goes to                                         where a side sets it too
=====================  ==============================================  =================================
``model.KEY``          both sides                                      equal values, or an error
``speculative``        both sides                                      equal values, or an error
``context.KEY``        context                                         (the sides may differ)
``generation.KEY``     generation                                      (the sides may differ)
=====================  ==============================================  =================================
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import yaml

from unikv.errors import ConfigError, explain, show
from workers.config_source import parse_yaml
from workers.config_values import nearest

SIDES: Final = ("context", "generation")


@dataclass(frozen=True, slots=True, kw_only=True)
class Merged:
    """A pair file after inheritance.

    Attributes:
        content: the file without ``model`` and ``speculative``; both sides are whole.
        origins: the section each (side, key) was inherited from; "" is the top level.
    """

    content: dict[str, Any]
    origins: Mapping[tuple[str, str], str]


def parse_override(text: str) -> tuple[str, Any]:
    """Return key and value of ``context.parallel.tp=2``; the value is read as YAML.

    Raises:
        ConfigError: no ``=``, an empty key, or a value that is not strict YAML.
    """
    key, equals, value = text.partition("=")
    if not equals or not key.strip():
        cure = "write for example --set context.parallel.tp=2"
        raise ConfigError(explain("override", "text", text, "KEY=VALUE", cure))
    try:
        return key.strip(), parse_yaml(value)
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        got = f"{value} ({str(error).splitlines()[0]})"
        raise ConfigError(explain(f"override {key}", "value", got, "a YAML value", "quote it")) from None


def apply_changes(content: dict[Any, Any], changes: Iterable[tuple[str, Any]], thing: str) -> dict[Any, Any]:
    """Return a copy of `content` with every (dotted key, value) set; missing mappings on the way are made.

    Raises:
        ConfigError: a key leads through something that has no keys.
    """
    changed = copy.deepcopy(content)
    for key, value in changes:
        _set(changed, key, value, thing)
    return changed


def _set(content: dict[Any, Any], key: str, value: Any, thing: str) -> None:
    *way, last = key.split(".")
    here: Any = content
    for number, part in enumerate(way):
        if isinstance(here, list):
            here = here[_index(here, part, key, thing)]
        else:
            if here.get(part) is None:
                here[part] = {}
            here = here[part]
        if not isinstance(here, dict | list):
            got, want = ".".join(way[: number + 1]), "a mapping or a list"
            raise ConfigError(
                explain(f"{thing}: override {key}", got, here, want, "override that key as a whole instead")
            )
    here[_index(here, last, key, thing) if isinstance(here, list) else last] = copy.deepcopy(value)


def _index(items: list[Any], part: str, key: str, thing: str) -> int:
    if part.isdecimal() and int(part) < len(items):
        return int(part)
    want = f"a number in [0, {len(items)})"
    raise ConfigError(explain(f"{thing}: override {key}", "list index", part, want, "count entries from 0"))


def case_changes(content: Mapping[Any, Any], case: str, thing: str) -> Sequence[tuple[str, Any]]:
    """Return the changes of matrix case `case`.

    Raises:
        ConfigError: there is no such case; the nearest name is in the text.
    """
    matrix = content.get("matrix")
    entries = [entry for entry in matrix if isinstance(entry, dict)] if isinstance(matrix, list) else []
    cases = {str(entry.get("name")): entry for entry in entries}
    if case not in cases:
        names = list(cases)
        close = nearest(case, names)
        want = f"one of {', '.join(names)}" if names else "no case: the file has no matrix"
        raise ConfigError(explain(thing, "case", case, want, f"did you mean {close!r}?" if close else "correct --case"))
    changes = cases[case].get("set")
    if not isinstance(changes, dict | None):
        cure = "write for example set: {context.parallel.tp: 2}"
        raise ConfigError(explain(f"{thing}: case {case}", "set", changes, "a mapping of dotted keys", cure))
    return [(str(key), value) for key, value in (changes or {}).items()]


def hand_down(content: Mapping[Any, Any], thing: str) -> Merged:
    """Return `content` with what both sides inherit handed down.

    Raises:
        ConfigError: a section is not a mapping, a side is missing, or a key is inherited and set differently.
    """
    merged = {key: value for key, value in content.items() if key not in ("model", "speculative")}
    inherited = {key: ("model", value) for key, value in _section(content, "model", thing, required=False).items()}
    if "speculative" in content:
        if "speculative" in inherited:
            want, cure = "absent", "keep the one at the top level"
            raise ConfigError(explain(thing, "model.speculative", inherited["speculative"][1], want, cure))
        inherited["speculative"] = ("", content["speculative"])
    origins: dict[tuple[str, str], str] = {}
    for side in SIDES:
        own = _section(content, side, thing, required=True)
        for key, (section, value) in inherited.items():
            if key in own and not _same(own[key], value):
                raise _contradiction(thing, f"{section}.{key}".lstrip("."), value, f"{side}.{key}", own[key])
            if key not in own:
                origins[side, key] = section
        merged[side] = {**{key: value for key, (_, value) in inherited.items()}, **own}
    return Merged(content=merged, origins=origins)


def _section(content: Mapping[Any, Any], name: str, thing: str, *, required: bool) -> dict[Any, Any]:
    section = content.get(name)
    if section is None and name not in content and required:
        want = "a mapping with parallel and pool"
        raise ConfigError(explain(thing, name, "missing", want, f"add the section {name}"))
    if section is None and not required:
        return {}
    if not isinstance(section, dict):
        raise ConfigError(explain(thing, name, section, "a mapping", "indent its keys below it"))
    return section


def _same(ours: Any, theirs: Any) -> bool:
    if type(ours) is not type(theirs):  # 1 and true are equal in Python, and here they are not
        return False
    if isinstance(ours, dict):
        return ours.keys() == theirs.keys() and all(_same(value, theirs[key]) for key, value in ours.items())
    if isinstance(ours, list):
        return len(ours) == len(theirs) and all(map(_same, ours, theirs))
    return bool(ours == theirs)


def _contradiction(thing: str, key: str, value: Any, other: str, other_value: Any) -> ConfigError:
    want = f"{show(value)} as {key} says"
    cure = f"set it once: in {key} for both sides, or in each side"
    return ConfigError(explain(thing, other, other_value, want, cure))
