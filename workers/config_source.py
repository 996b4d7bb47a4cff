"""Finds and reads pair files: paths, shipped presets, and the prompt files they name. Strict YAML, nothing else."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass
from importlib.resources import files
from importlib.resources.abc import Traversable
from pathlib import Path
from typing import Any, Final

import yaml

from unikv.errors import ConfigError, explain
from workers.config_values import nearest

_PRESETS: Final = "presets"
_NOT_A_PRESET: Final = "_prompts"
"""How names of prompt files beside the presets end."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Document:
    """A pair file as read.

    Attributes:
        thing: how messages name it.
        name: for titles.
        folder: where relative paths start.
        content: its top-level mapping.
    """

    thing: str
    name: str
    folder: Traversable
    content: dict[Any, Any]


class _StrictLoader(yaml.SafeLoader):
    """SafeLoader that refuses a key twice: the last one would win silently."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Hashable, Any]:
        """Return the mapping of `node`; ConstructorError for a key that is there already."""
        seen: set[str] = set()
        for key, _ in node.value:
            if isinstance(key, yaml.ScalarNode) and key.tag != "tag:yaml.org,2002:merge":
                if key.value in seen:
                    raise yaml.constructor.ConstructorError(None, None, f"key {key.value!r} twice", key.start_mark)
                seen.add(key.value)
        return super().construct_mapping(node, deep=deep)


def preset_names() -> tuple[str, ...]:
    """Return the names of the shipped presets."""
    found = (item.name for item in (files("workers") / _PRESETS).iterdir())
    stems = (name.removesuffix(".yaml") for name in found if name.endswith(".yaml"))
    return tuple(sorted(stem for stem in stems if not stem.endswith(_NOT_A_PRESET)))


def read_document(source: str) -> Document:
    """Return the pair file or preset `source` names; a file wins over a preset of the same name.

    Raises:
        ConfigError: there is none, or it is not a YAML mapping.
    """
    path = Path(source)
    if source in preset_names() and not path.is_file():
        folder: Traversable = files("workers") / _PRESETS
        thing, name, file = f"preset {source}", source, folder / f"{source}.yaml"
    else:
        thing, name, file, folder = f"pair file {source}", path.stem, path, path.parent
        _check_there(source, path)
    content = read_yaml(file, thing)
    if content is None:
        want, cure = "keys", "see `unikv presets` for files to start from"
        raise ConfigError(explain(thing, "content", content, want, cure))
    if not isinstance(content, dict):
        want = "a mapping with context, generation and model"
        raise ConfigError(explain(thing, "content", type(content).__name__, want, "write key: value lines"))
    return Document(thing=thing, name=name, folder=folder, content=content)


def read_yaml(file: Traversable, thing: str) -> Any:
    """Return what a YAML file holds, None where it is empty.

    Raises:
        ConfigError: it cannot be read, is not UTF-8, not YAML, or has a key twice; with line and column where known.
    """
    try:
        # The loader is a SafeLoader: plain data only.
        return yaml.load(file.read_bytes(), Loader=_StrictLoader)  # noqa: S506
    except OSError as error:
        reason = error.strerror or str(error)
        raise ConfigError(explain(thing, "file", reason, "a readable file", "check its name and rights")) from None
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        place = f" in line {mark.line + 1}, column {mark.column + 1}" if mark else ""
        got = f"{error.problem or error.context}{place}"
        raise ConfigError(explain(thing, "YAML", got, "valid YAML with every key once", "correct that line")) from None
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        got = str(error).splitlines()[0]
        raise ConfigError(explain(thing, "YAML", got, "UTF-8 text in valid YAML", "correct the file")) from None


def read_prompts(folder: Traversable, name: str, thing: str) -> list[Any]:
    """Return the list of texts in file `name`, relative to the pair file's `folder`.

    Raises:
        ConfigError: no such file, or not a list.
    """
    content = read_yaml(folder / name, f"{thing}: workload.prompts {name}")
    if not isinstance(content, list):
        got, want = type(content).__name__, "a YAML list of texts"
        raise ConfigError(explain(f"{thing}: workload.prompts {name}", "content", got, want, "start each text with -"))
    return content


def _check_there(source: str, path: Path) -> None:
    if path.is_file():
        return
    names = preset_names()
    close = nearest(source, names)
    cure = f"did you mean {close!r}?" if close else "check the path"
    got = "a directory" if path.is_dir() else "missing"
    want = f"a file, or one of the presets {', '.join(names)}"
    raise ConfigError(explain(f"pair file {source}", "file", got, want, cure))
