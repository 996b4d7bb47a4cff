"""The machine form of a command's result: one JSON object, on stdout or in a file.

``--json`` takes an optional file, and the pair file may stand before or behind it, so one rule tells them apart:

=============================  =====================================================================
arguments                      where the object goes
=============================  =====================================================================
``--json``                     stdout, and nothing else goes there
``--json NAME``                the file
``--json pair.yaml``           stdout: the next word is the pair (by its ending, or a preset's name)
``--json --case NAME``         stdout: the next word is an option
``--json=NAME``                the file, whatever its name is
=============================  =====================================================================
"""

from __future__ import annotations

import json
import sys
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from unikv.errors import ConfigError, explain

STDOUT: Final = "-"
"""What ``--json`` without a file stands for."""

_OPTION: Final = "--json"
_PAIR_FILE_SUFFIXES: Final = (".yaml", ".yml")


def spell_out_json(arguments: Sequence[str], presets: Collection[str] = ()) -> list[str]:
    """Return `arguments` with ``--json`` made ``--json=-`` wherever no file follows: parsers want a value.

    Args:
        arguments: words of a command line. Those behind a ``--`` are taken as they are.
        presets: words that are pairs without looking like a pair file.
    """
    end = arguments.index("--") if "--" in arguments else len(arguments)
    words = list(arguments[:end])
    for number, word in enumerate(words):
        following = words[number + 1] if number + 1 < end else ""
        if word == _OPTION and not _is_target(following, presets):
            words[number] = f"{_OPTION}={STDOUT}"
    return [*words, *arguments[end:]]


def _is_target(word: str, presets: Collection[str]) -> bool:
    """Return whether the word behind ``--json`` is where the object goes, and not the pair or another option."""
    if word == STDOUT:
        return True
    return bool(word) and not word.startswith("-") and word not in presets and not _looks_like_pair(word)


def _looks_like_pair(word: str) -> bool:
    return Path(word).suffix.lower() in _PAIR_FILE_SUFFIXES


def check_target(target: str) -> None:
    """Check that a result can be written to `target`, before the work is done.

    Raises:
        ConfigError: a directory, a place where nothing can be written, or what looks like a pair file.
    """
    path = Path(target)
    if target == STDOUT:
        if sys.stdout is None:
            raise ConfigError(explain("result", _OPTION, "stdout, which is closed", "an open one", "name a file"))
        return
    reason = _refusal(path)
    if reason:
        want, cure = f"a file that can be written ({reason})", "create the directory, or name another file"
        raise ConfigError(explain("result", _OPTION, target, want, cure))
    if _looks_like_pair(target):
        want = "a name that is not a pair file's"
        raise ConfigError(explain("result", _OPTION, target, want, "end it in .json; a pair file follows a space"))


def _refusal(path: Path) -> str:
    """Return why no file can be written at `path`, "" where one can. A file that was not there is not there after."""
    try:
        if path.exists() and not path.is_dir() and not path.is_file():
            return ""  # a pipe or a device: opening it could wait for its reader
        is_new = not path.exists()
        with path.open("ab"):
            pass
        if is_new:
            path.unlink()
    except OSError as error:
        return error.strerror or str(error)
    return ""


def write_json(result: Mapping[str, Any], target: str) -> None:
    """Write `result` to `target`, a file or ``-`` for stdout.

    Raises:
        ConfigError: as `check_target`.
        OSError: the file cannot be written.
    """
    check_target(target)
    text = json.dumps(result, indent=2, allow_nan=False) + "\n"
    if target == STDOUT:
        _write_stdout(text.encode())
    else:
        Path(target).write_text(text, encoding="utf-8")


def _write_stdout(data: bytes) -> None:
    sys.stdout.flush()
    left = memoryview(data)
    while left:
        # Without buffering (PYTHONUNBUFFERED) a write may stop short when the disk is full or the reader has gone, and
        # only the next one says so; the text layer above would take the rest for written.
        left = left[sys.stdout.buffer.write(left) :]
    sys.stdout.buffer.flush()
