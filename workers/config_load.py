"""Reads a pair file: YAML, variations, inheritance between the sections, and errors a person can act on."""

from __future__ import annotations

import difflib
import os
from collections.abc import Iterator, Mapping, Sequence
from importlib import resources
from pathlib import Path
from typing import Any, Final

import yaml
from pydantic import BaseModel, ValidationError

from unikv.errors import ConfigError, explain
from workers.config import (
    HFRunnerConfig,
    HostTierConfig,
    LayerRunConfig,
    PairConfig,
    ParallelConfig,
    PatternRunnerConfig,
    PoolConfig,
    SideConfig,
    SpeculativeConfig,
    TransferConfig,
    WorkloadConfig,
)

DRAFT_KV_VARIABLE: Final = "UNIKV_SHARED_DRAFT_KV"
"""Overrides transfer.draft_kv where it is set."""
_DRAFT_KV_VALUES: Final = ("0", "1", "auto")
_SIDES: Final = ("context", "generation")
_TOP_KEYS: Final = ("name", "model", "speculative", *_SIDES, "transfer", "runner", "workload", "matrix")
_SECTIONS: Final = (
    PairConfig, SideConfig, LayerRunConfig, SpeculativeConfig, ParallelConfig, PoolConfig, HostTierConfig,
    TransferConfig, PatternRunnerConfig, HFRunnerConfig, WorkloadConfig,
)  # fmt: skip
Raw = dict[str, Any]


def load_pair(
    source: str,
    *,
    overrides: Sequence[str] = (),
    case: str | None = None,
    environ: Mapping[str, str] | None = None,
) -> PairConfig:
    """Read the pair file or preset `source`.

    Args:
        source: a path, or the name of a shipped preset.
        overrides: ``dotted.key=value`` with YAML values, applied after `case`.
        case: a named variation of the file's matrix.
        environ: the environment; None takes the process's.

    Raises:
        ConfigError: anything is wrong; the text names the file, the key, the value and what would be right.
    """
    path = _locate(source)
    raw = _read_mapping(path, source)
    if case is not None:
        for key, value in _case(raw, source, case).items():
            _set(raw, key, value, f"{source} case {case}")
    for override in overrides:
        key, separator, text = override.partition("=")
        if not separator or not key:
            raise ConfigError(explain("--set", "override", override, "KEY=VALUE", "e.g. --set transfer.path=zmq"))
        _set(raw, key, _parse_yaml(text, f"--set {key}"), "--set")
    _apply_environment(raw, os.environ if environ is None else environ)
    return _validate(_merged(raw, source), source, path)


def pair_cases(pair: PairConfig) -> tuple[str, ...]:
    """Return the names of the variations in the file's matrix."""
    return tuple(case.name for case in pair.matrix)


def preset_names() -> tuple[str, ...]:
    """Return the names of the shipped presets."""
    names = (Path(entry.name) for entry in _preset_dir().iterdir())
    return tuple(sorted(name.stem for name in names if name.suffix == ".yaml" and not name.stem.endswith("_prompts")))


def read_prompts(path: Path) -> tuple[str, ...]:
    """Return the texts of a prompt file, a YAML list.

    Raises:
        ConfigError: the file cannot be read, or is not a list of texts.
    """
    data = _parse_yaml(_read_text(path, str(path)), str(path))
    if not isinstance(data, list) or not data or not all(isinstance(text, str) and text.strip() for text in data):
        raise ConfigError(explain(str(path), "content", type(data).__name__, "a list of texts", "write one per item"))
    return tuple(text.strip() for text in data)


class _StrictLoader(yaml.SafeLoader):
    """Refuses a mapping that has a key twice: the second would silently win."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        """Return the mapping of `node`."""
        keys = [self.construct_object(key, deep=True) for key, _ in node.value]
        for index, key in enumerate(keys):
            if key in keys[:index]:
                raise yaml.constructor.ConstructorError(None, None, f"key {key!r} twice", node.start_mark)
        return super().construct_mapping(node, deep)


def _preset_dir() -> Path:
    return Path(str(resources.files("workers") / "presets"))


def _locate(source: str) -> Path:
    if source in preset_names():
        return _preset_dir() / f"{source}.yaml"
    path = Path(source)
    if not path.exists() and not path.suffix:
        known = ", ".join(preset_names())
        raise ConfigError(explain("pair", "name", source, f"a file, or one of the presets {known}", "check the name"))
    return path


def _read_text(path: Path, thing: str) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        why = error.strerror if isinstance(error, OSError) else "not UTF-8 text"
        raise ConfigError(
            explain(thing, "file", str(path), "a readable YAML file", f"check the path ({why})")
        ) from None


def _parse_yaml(text: str, thing: str) -> Any:
    try:
        return yaml.load(text, _StrictLoader)  # noqa: S506 - a SafeLoader
    except (yaml.YAMLError, ValueError, TypeError, RecursionError) as error:
        where = " ".join(str(error).split())[:200]
        raise ConfigError(explain(thing, "content", where, "valid YAML", "correct the file")) from None


def _read_mapping(path: Path, source: str) -> Raw:
    data = _parse_yaml(_read_text(path, source), source)
    if not isinstance(data, dict) or not all(isinstance(key, str) for key in data):
        got = "nothing" if data is None else type(data).__name__
        raise ConfigError(explain(source, "content", got, "a mapping of sections", "see the shipped presets"))
    return data


def _case(raw: Raw, source: str, case: str) -> Mapping[str, Any]:
    matrix = raw.get("matrix")
    entries = [entry for entry in matrix if isinstance(entry, dict)] if isinstance(matrix, list) else []
    for entry in entries:
        changes = entry.get("set")
        if entry.get("name") == case and isinstance(changes, dict):
            return changes
    names = ", ".join(str(entry.get("name")) for entry in entries) or "none"
    raise ConfigError(explain(source, "case", case, f"one of: {names}", "check matrix in the pair file"))


def _set(raw: Raw, key: str, value: object, thing: str) -> None:
    """Put `value` at a dotted key, making sections on the way."""
    *sections, last = key.split(".")
    place: Any = raw
    for number, section in enumerate(sections, start=1):
        if place.get(section) is None:
            place[section] = {}
        place = place[section]
        if not isinstance(place, dict):
            where = ".".join(sections[:number])
            raise ConfigError(
                explain(thing, key, type(place).__name__, f"{where} to be a section", "set it as a whole")
            )
    place[last] = value


def _apply_environment(raw: Raw, environ: Mapping[str, str]) -> None:
    value = environ.get(DRAFT_KV_VARIABLE)
    if value is None:
        return
    if value not in _DRAFT_KV_VALUES:
        legal = ", ".join(_DRAFT_KV_VALUES)
        raise ConfigError(explain("environment", DRAFT_KV_VARIABLE, value, f"one of {legal}", "unset or correct it"))
    _set(raw, "transfer.draft_kv", value, DRAFT_KV_VARIABLE)


def _merged(raw: Raw, source: str) -> Raw:
    """Give both sides what `model` and `speculative` say; the same key with two values is an error."""
    for key in raw:
        if key not in _TOP_KEYS:
            raise ConfigError(_unknown(source, key, key, _TOP_KEYS))
    common = _section(raw, "model", source)
    if "speculative" in raw:
        common["speculative"] = raw["speculative"]
    merged = {key: value for key, value in raw.items() if key not in ("model", "speculative")}
    for side in _SIDES:
        merged[side] = _inherit(common, _section(raw, side, source), side, source)
    return merged


def _section(raw: Raw, key: str, source: str) -> Raw:
    section = raw.get(key)
    if section is None:
        section = {}
    if not isinstance(section, dict):
        raise ConfigError(explain(source, key, type(section).__name__, "a section", "write keys below it"))
    return dict(section)


def _inherit(common: Raw, own: Raw, side: str, source: str) -> Raw:
    for key, value in common.items():
        if key in own and own[key] != value:
            home = key if key == "speculative" else f"model.{key}"
            got = f"{value!r} in {home} and {own[key]!r} in {side}.{key}"
            cure = "set it in one place; what may differ between the sides belongs into the sides alone"
            raise ConfigError(f"{source}: {key} is {got}, expected one value; {cure}")
    return common | own


def _validate(merged: Raw, source: str, path: Path) -> PairConfig:
    workload = merged.get("workload")
    if isinstance(workload, dict):
        merged["workload"] = workload | {"base_dir": path.parent}
    for key in ("transfer", "workload"):
        if merged.get(key) is None:
            merged.pop(key, None)
    transfer = merged.get("transfer")
    if isinstance(transfer, dict) and isinstance(transfer.get("draft_kv"), int):
        transfer["draft_kv"] = str(int(transfer["draft_kv"]))
    if isinstance(transfer, dict) and transfer.get("checksum") is False:
        transfer["checksum"] = "off"  # YAML reads a bare off as False
    try:
        return PairConfig.model_validate({"name": path.stem, **merged, "source": source})
    except ValidationError as error:
        raise ConfigError("\n".join(_explain_all(error, source))) from None


def _explain_all(error: ValidationError, source: str) -> Iterator[str]:
    for item in error.errors(include_url=False, include_context=True):
        where = [
            str(part) for part in item["loc"] if part not in ("pattern", "hf", "function-before[parse_size(), int]")
        ]
        key = ".".join(where) or "pair"
        if item["type"] == "extra_forbidden":
            yield _unknown(source, key, where[-1], _known_beside(where))
        elif item["type"] == "missing":
            yield explain(source, key, "missing", "a value", "add the key (or put it under model for both sides)")
        else:
            want = item["msg"].removeprefix("Value error, ").removeprefix("Input should be ")
            got = item["input"] if not isinstance(item["input"], dict | BaseModel) else "what is written there"
            yield explain(source, key, got, want, "correct the value")


def _unknown(source: str, key: str, name: str, known: Sequence[str]) -> str:
    nearest = difflib.get_close_matches(name, known, n=1, cutoff=0.5)
    hint = f"did you mean {nearest[0]!r}?" if nearest else f"known here: {', '.join(known)}"
    return explain(source, "key", key, "a known key", hint)


def _known_beside(where: Sequence[str]) -> tuple[str, ...]:
    """Return the keys of the section in which an unknown key was found."""
    section = next((part for part in reversed(where[:-1]) if not part.isdigit()), "")
    by_section: dict[str, type[BaseModel]] = {
        "context": SideConfig, "generation": SideConfig, "layers": LayerRunConfig, "speculative": SpeculativeConfig,
        "parallel": ParallelConfig, "pool": PoolConfig, "host_tier": HostTierConfig, "transfer": TransferConfig,
        "workload": WorkloadConfig,
    }  # fmt: skip
    if section == "runner":
        return tuple({**HFRunnerConfig.model_fields, **PatternRunnerConfig.model_fields})
    model = by_section.get(section)
    return tuple(model.model_fields) if model else _TOP_KEYS
