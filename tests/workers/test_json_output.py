"""Where a result goes: stdout, or a file that is told from the pair by the pair's ending or name."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from unikv.errors import ConfigError
from workers.json_output import STDOUT, check_target, spell_out_json, write_json

WORDS = st.sampled_from(["check", "pair.yaml", "out.json", "-", "--json", "--", "--set", "a=1", "--json=x", "smollm2"])


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ("check pair.yaml --json", "check pair.yaml --json=-"),
        ("check --json pair.yaml", "check --json=- pair.yaml"),
        ("check --json smollm2", "check --json=- smollm2"),
        ("check pair.yaml --json out.json", "check pair.yaml --json out.json"),
        ("check --json out.json pair.yaml", "check --json out.json pair.yaml"),
        ("check --json OUT.JSON pair.yaml", "check --json OUT.JSON pair.yaml"),
        ("check pair.yaml --json out", "check pair.yaml --json out"),
        ("check pair.yaml --json out.txt", "check pair.yaml --json out.txt"),
        ("check --json /dev/stdout smollm2", "check --json /dev/stdout smollm2"),
        ("check --json PAIR.YML", "check --json=- PAIR.YML"),
        ("check --json smollm2 --case a", "check --json=- smollm2 --case a"),
        ("check --json --case a pair.yaml", "check --json=- --case a pair.yaml"),
        ("check pair.yaml --json -", "check pair.yaml --json -"),
        ("check pair.yaml --json=out.txt", "check pair.yaml --json=out.txt"),
        ("check --json -- out.json", "check --json=- -- out.json"),
        ("check -- --json", "check -- --json"),
        ("", ""),
    ],
)
def test_the_next_word_is_the_file_unless_it_is_a_pair_or_an_option(words: str, expected: str) -> None:
    assert spell_out_json(words.split(), ["smollm2"]) == expected.split()


@given(words=st.lists(WORDS, max_size=8))
def test_nothing_but_lonely_options_changes(words: list[str]) -> None:
    spelled = spell_out_json(words, ["smollm2"])
    assert [word.replace("--json=-", "--json") for word in spelled] == words
    assert spell_out_json(spelled, ["smollm2"]) == spelled


def test_a_file_holds_one_object_and_nothing_else(tmp_path: Path) -> None:
    write_json({"a": [1, None, "ä"]}, str(tmp_path / "out.json"))
    assert json.loads((tmp_path / "out.json").read_text(encoding="utf-8")) == {"a": [1, None, "ä"]}


def test_stdout_gets_one_object_and_nothing_else(capsys: pytest.CaptureFixture[str]) -> None:
    write_json({"a": 1}, STDOUT)
    assert json.loads(capsys.readouterr().out) == {"a": 1}


def test_numbers_that_json_lacks_are_our_bug(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="not JSON compliant"):
        write_json({"a": float("nan")}, str(tmp_path / "out.json"))
    assert not (tmp_path / "out.json").exists()


def test_places_nothing_can_be_written_to(tmp_path: Path) -> None:
    for target in (tmp_path, tmp_path / "missing" / "out.json", Path("/proc/out.json"), tmp_path / (300 * "x")):
        with pytest.raises(ConfigError, match=r"expected a file that can be written \([^)]+\); create the directory"):
            check_target(str(target))


def test_a_check_leaves_everything_as_it_was(tmp_path: Path) -> None:
    there, fifo = tmp_path / "there.json", tmp_path / "fifo"
    there.write_text("as it was", encoding="utf-8")
    os.mkfifo(fifo)  # opening it would wait for a reader
    for target in (there, tmp_path / "new.json", fifo, Path("/dev/full")):
        check_target(str(target))
    assert there.read_text(encoding="utf-8") == "as it was"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["fifo", "there.json"]


@pytest.mark.parametrize("name", ["pair.yaml", "pair.yml", "PAIR.YAML"])
def test_pair_files_are_never_overwritten(tmp_path: Path, name: str) -> None:
    pair = tmp_path / name
    pair.write_text("model: {}\n", encoding="utf-8")
    with pytest.raises(ConfigError, match="expected a name that is not a pair file's; end it in"):
        write_json({}, str(pair))
    assert pair.read_text(encoding="utf-8") == "model: {}\n"
