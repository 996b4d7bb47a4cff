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


MAX_FILE_BYTES: Final = 16 * 1024**2
"""Longest file that is read; what is longer is no pair file and no list of prompts."""
MAX_VALUES: Final = 100_000
"""Most values of a file, those behind an alias counted wherever it stands: a few lines could mean billions."""


class _StrictLoader(yaml.SafeLoader):
    """SafeLoader that refuses a key twice (the last one would win silently), endless aliases and too many values."""

    def get_single_node(self) -> yaml.Node | None:
        """Return the file's only document, after counting what its aliases stand for."""
        node: yaml.Node | None = super().get_single_node()
        if node is not None:
            _count_values(node, {}, set())
        return node

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Hashable, Any]:
        """Return the mapping of `node`; ConstructorError for a key that is there already."""
        seen: set[str] = set()
        for key, _ in node.value:
            if isinstance(key, yaml.ScalarNode) and key.tag != "tag:yaml.org,2002:merge":
                if key.value in seen:
                    raise yaml.constructor.ConstructorError(None, None, f"key {key.value!r} twice", key.start_mark)
                seen.add(key.value)
        return super().construct_mapping(node, deep=deep)


def _count_values(node: yaml.Node, known: dict[yaml.Node, int], inside: set[yaml.Node]) -> int:
    """Return how many values `node` stands for; ConstructorError where they are too many, or contain themselves."""
    if node in inside:
        raise yaml.constructor.ConstructorError(None, None, "an alias inside what it names", node.start_mark)
    if node not in known:
        parts = node.value if isinstance(node, yaml.CollectionNode) else ()
        if isinstance(node, yaml.MappingNode):
            parts = [part for pair in node.value for part in pair]
        inside.add(node)
        known[node] = 1 + sum(_count_values(part, known, inside) for part in parts)
        inside.remove(node)
    if known[node] > MAX_VALUES:
        text = f"more than {MAX_VALUES} values, aliases written out"
        raise yaml.constructor.ConstructorError(None, None, text, node.start_mark)
    return known[node]


def parse_yaml(text: str | bytes) -> Any:
    """Return what `text` holds, None where it is empty: plain data, every key once, aliases of bounded size.

    Raises:
        YAMLError, ValueError, RecursionError: it is not such YAML.
    """
    # The loader is a SafeLoader: plain data only.
    return yaml.load(text, Loader=_StrictLoader)  # noqa: S506


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
        ConfigError: it cannot be read, is not UTF-8, not YAML, has a key twice or too many values; with line
            and column where known.
    """
    try:
        with file.open("rb") as stream:
            content = stream.read(MAX_FILE_BYTES + 1)
        if len(content) > MAX_FILE_BYTES:
            raise ValueError(f"more than {MAX_FILE_BYTES} bytes")
        return parse_yaml(content)
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
    try:
        if path.is_file():
            return
        got = "a directory" if path.is_dir() else "not a regular file" if path.exists() else "missing"
    except OSError as error:  # for example a name that is too long
        got = error.strerror or str(error)
    names = preset_names()
    close = nearest(source, names)
    cure = f"did you mean {close!r}?" if close else "check the path"
    want = f"a file, or one of the presets {', '.join(names)}"
    raise ConfigError(explain(f"pair file {source}", "file", got, want, cure))
