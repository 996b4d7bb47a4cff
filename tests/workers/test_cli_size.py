"""`unikv size` for a model on disk: what it prints, and how it refuses."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from workers.cli import main

ROOT = Path(__file__).parents[2]
PAIR = str(Path(__file__).parent / "pairs" / "tp2-tp4.yaml")
MODEL = {
    "model_type": "llama",
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "hidden_size": 4096,
    "max_position_embeddings": 131072,
    "torch_dtype": "bfloat16",
}

Run = Callable[..., tuple[int, str, str]]


@pytest.fixture
def unikv(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Run:
    """Run the command line in this process, 80 columns wide."""
    monkeypatch.setenv("COLUMNS", "80")

    def run(*words: str) -> tuple[int, str, str]:
        code = main(["size", *words])
        captured = capsys.readouterr()
        assert "Traceback" not in captured.out + captured.err
        return code, captured.out, captured.err

    return run


@pytest.fixture
def models(tmp_path: Path) -> tuple[str, str]:
    for name, more in (("target", {}), ("draft", {"num_hidden_layers": 1, "sliding_window": 2048})):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text(json.dumps(MODEL | more), encoding="utf-8")
    return str(tmp_path / "target"), str(tmp_path / "draft")


def test_what_fits_with_the_drafter_and_without(unikv: Run, models: tuple[str, str]) -> None:
    words = ("--model", models[0], "--draft-model", models[1], "--tp", "4", "--tokens", "8192", "--memory", "40GiB")
    code, out, err = unikv(*words, "--iteration-tokens", "4096", "--draft-tokens", "4")
    assert (code, err) == (0, "")
    assert max(map(len, out.splitlines())) <= 80
    text = " ".join(out.split())
    assert "requests of 8,192 tokens in 40 GiB per rank, tp 4, 32 tokens per block, 4 drafts a step" in text
    assert "requests that fit 158 159" in text
    assert "longest request that fits, in tokens 131,072 131,072" in text
    assert "target 32 32 x full 2 of 8 128 K and V bfloat16" in text
    assert "draft 1 1 x 2,048 2 of 8 128 K and V bfloat16" in text
    assert "1 draft 2,049 32 KiB 66 2,162,688" in text
    assert "a context chunk in windows, once 4 MiB 0 B" in text
    code, out, err = unikv(*words, "--draft-tokens", "4", "--json")
    assert (code, err) == (0, "")
    assert json.loads(out)["with_draft"]["requests"] == 158


def test_one_model_and_what_is_left_out(unikv: Run, models: tuple[str, str]) -> None:
    code, out, _ = unikv("--model", models[0], "--requests", "3", "--dtype", "nvfp4")
    assert code == 0
    text = " ".join(out.split())
    assert "requests of 131,072 tokens in 16 GiB per rank" in text
    assert "pools for 3 request(s)" in text
    assert "with the drafter" not in text


def test_everything_the_interface_names_is_in_both_objects(unikv: Run, models: tuple[str, str]) -> None:
    for words in ((PAIR, "--tokens", "64"), ("--model", models[0], "--tokens", "64")):
        found = json.loads(unikv(*words, "--json")[1])
        named = {"bytes_per_token", "fixed_bytes_per_request", "quota_bytes", "tokens_for_quota", "groups"}
        assert named <= set(found)
        assert all({"id", "pages_per_request", "bytes"} <= set(group) for group in found["groups"])
        assert found["tokens_for_quota"] >= 64


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([], "size: PAIR and --model is 'neither', expected one of them; name a pair file, or a model"),
        ([PAIR, "--model", "{model}"], "PAIR and --model is 'both', expected one of them"),
        ([PAIR, "--tp", "2"], "--tp is 2, expected only with --model DIR; leave it out"),
        ([PAIR, "--draft-model", "{model}"], "--draft-model is "),
        (["--draft-model", "{model}"], "PAIR and --model is 'neither'"),
        (["--model", "{model}", "--side", "context"], "--side is 'context', expected only with PAIR; leave it out"),
        (["--model", "{model}", "--rank", "0"], "--rank is 0, expected only with PAIR"),
        (["--model", "{model}", "--case", "x"], "--case is 'x'"),
        (["--model", "{model}", "--set", "a=b"], "--set is ['a=b']"),
        (["--model", "{model}", "--memory", "40GB"], "--memory is '40GB', expected a size in B, KiB, MiB or GiB"),
        (["--model", "{model}", "--quota", "1GiB"], "--quota is '1GiB', expected only with PAIR"),
        ([PAIR, "--memory", "1GiB"], "--memory is '1GiB', expected only with --model DIR"),
        (["--model", "{model}", "--memory", "-1"], "--memory is '-1'"),
        (["--model", "{model}", "--dtype", "int3"], "Invalid value for '--dtype'"),
        (["--model", "{model}", "--tokens", "many"], "Invalid value for '--tokens'"),
        (["--model", "{model}", "--tp", "5"], "kv_heads is 8, expected a multiple of tp=5"),
        (["--model", "{model}", "--draft-model", "/nowhere"], "--draft-model is '/nowhere'"),
        (["--model", ""], "--model is ''"),
        (["--model", "{model}", "--json", "/nowhere/at/all.json"], "create the directory"),
    ],
)
def test_bad_usage(unikv: Run, models: tuple[str, str], words: list[str], message: str) -> None:
    code, out, err = unikv(*(word.format(model=models[0]) for word in words))
    assert (code, out) == (64, "")
    assert message in err


def test_no_torch_and_no_transformers(models: tuple[str, str]) -> None:
    code = (
        "import sys; from workers.cli import main; "
        f"code = main(['size', '--model', {models[0]!r}, '--json']); "
        "sys.exit(code or ('torch' in sys.modules or 'transformers' in sys.modules))"
    )
    found = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, timeout=60, check=False)
    assert found.returncode == 0, found.stderr.decode()
