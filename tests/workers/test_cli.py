"""The command line as its callers meet it: exit codes, what goes to stdout, and messages instead of tracebacks."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
from collections.abc import Callable
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest

from workers.cli import main
from workers.config_load import DRAFT_KV_VARIABLE

ROOT = Path(__file__).parents[2]
PAIRS = Path(__file__).parent / "pairs"
GOOD = str(PAIRS / "tp2-tp4.yaml")
DRY = {
    "layout": (["layout", GOOD], "bytes_per_token"),
    "size": (["size", GOOD, "--tokens", "4096", "--requests", "2"], "quota_bytes"),
    "check": (["check", GOOD], "compatible"),
    "plan": (["plan", GOOD], "pairs"),
    "pages": (["pages", GOOD, "--prompt-tokens", "2080"], "groups"),
    "presets": (["presets"], "presets"),
}
"""Each dry command with a key of its object."""

Run = Callable[..., tuple[int, str, str]]


@pytest.fixture(autouse=True)
def _plain_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(DRAFT_KV_VARIABLE, raising=False)
    monkeypatch.setenv("COLUMNS", "80")


@pytest.fixture
def unikv(capsys: pytest.CaptureFixture[str]) -> Run:
    """Run the command line in this process and return its exit code, stdout and stderr."""

    def run(*words: str) -> tuple[int, str, str]:
        code = main(words)
        captured = capsys.readouterr()
        assert "Traceback" not in captured.out + captured.err
        return code, captured.out, captured.err

    return run


def process(*words: str, **more: Any) -> subprocess.CompletedProcess[str]:
    """Run the command line as a process of its own."""
    command = [sys.executable, "-m", "workers", *words]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60, check=False, **more)


def parsed(out: str) -> dict[str, Any]:
    found = json.loads(out)
    assert isinstance(found, dict)
    return found


@pytest.mark.parametrize("command", sorted(DRY))
def test_every_command_prints_a_table_of_80_columns_or_one_object(unikv: Run, command: str, tmp_path: Path) -> None:
    words, key = DRY[command]
    code, out, err = unikv(*words)
    assert (code, err) == (0, "")
    assert "─" in out
    assert max(map(len, out.splitlines())) <= 80
    code, out, err = unikv(*words, "--json")
    assert (code, err) == (0, "")
    assert key in parsed(out)
    file = tmp_path / "out.json"
    assert unikv(*words, "--json", str(file)) == (0, "", "")
    assert parsed(file.read_text(encoding="utf-8")) == parsed(out)


@pytest.mark.parametrize(
    "words", ["check {pair} --json", "check --json {pair}", "check --json=- {pair}", "check {pair} --json -"]
)
def test_the_pair_may_stand_on_either_side_of_json(unikv: Run, words: str) -> None:
    code, out, _ = unikv(*words.format(pair=GOOD).split())
    assert (code, parsed(out)["draft_kv"]) == (0, "per_view")


@pytest.mark.parametrize(
    "words", ["check {pair} --json {file}", "check --json {file} {pair}", "check --json={file} {pair}"]
)
@pytest.mark.parametrize("name", ["out.json", "out"])
def test_the_file_may_stand_on_either_side_of_the_pair(unikv: Run, words: str, name: str, tmp_path: Path) -> None:
    file = tmp_path / name
    assert unikv(*words.format(pair=GOOD, file=file).split()) == (0, "", "")
    assert parsed(file.read_text(encoding="utf-8"))["compatible"] is True


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("unknown-key", r"layers\[0\]\.head_dims is an unknown key, expected one of .*did you mean 'head_dim'\?"),
        ("wrong-type", "tokens_per_block is 'thirty-two', expected an integer"),
        ("odd-draft-heads", r"layers\[1\] \(draft, tp=2\): kv_heads is 3, expected a multiple of tp=2"),
        ("not-there", "file is 'missing', expected a file, or one of the presets gpu-direct, "),
    ],
)
@pytest.mark.parametrize("command", ["layout", "size", "check", "plan", "pages"])
def test_a_wrong_pair_file_is_bad_usage_everywhere(unikv: Run, command: str, name: str, message: str) -> None:
    words = [str(PAIRS / f"{name}.yaml") if word == GOOD else word for word in DRY[command][0]]
    code, out, err = unikv(*words, "--json")
    assert (code, out) == (64, "")
    assert err.startswith(f"unikv: pair file {PAIRS / name}.yaml: ")
    assert re.search(message, err)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("windows-differ", "window is 1024 tokens on context and 512 tokens on generation; set the same"),
        ("dtypes-differ", "dtype is bfloat16 on context and float16 on generation; set the same layers[].dtype"),
        ("pages-differ", "tokens_per_block is 32 tokens on context and 48 tokens on generation; set tokens_per_block"),
    ],
)
def test_sides_that_may_not_talk_are_refused(unikv: Run, name: str, message: str) -> None:
    pair = str(PAIRS / f"{name}.yaml")
    code, out, err = unikv("check", pair)
    assert (code, err) == (2, "")
    assert message in " ".join(out.split())
    code, out, err = unikv("check", pair, "--json")
    assert (code, parsed(out)["compatible"]) == (2, False)
    assert message in err
    for words in (["plan", pair], ["plan", pair, "--json"], ["pages", pair, "--prompt-tokens", "9"]):
        code, out, err = unikv(*words)
        assert (code, out) == (2, "")
        assert message in err


@pytest.mark.parametrize("command", ["check", "layout", "size", "plan", "bench", "launch"])
@pytest.mark.parametrize("side", ["context", "generation"])
def test_a_codec_that_cannot_store_the_layers_is_bad_usage_before_anything_runs(
    unikv: Run, command: str, side: str
) -> None:
    tier = ("--set", f"{side}.host_tier={{bytes: 1GiB, codec: fp8}}")
    of_side = ["--side", side] if command in {"layout", "size"} else []
    code, out, err = unikv(command, "smollm2", *of_side, *tier)
    assert (code, out) == (64, "")
    text = f"{side}.host_tier.codec: layer 0: dtype under the fp8 codec is 'float32', expected float16 or bfloat16; use"
    assert text in " ".join(err.split())


def test_a_codec_is_judged_by_the_layers_of_one_rank(unikv: Run) -> None:
    """The pair has bfloat16 target and float16 draft layers; only a rank that has both cannot store them."""
    tier = ("--set", "context.host_tier={bytes: 1GiB, codec: fp8}", "--set", "context.parallel={tp: 1, pp: 9}")
    assert unikv("layout", "pattern-small", *tier, "--rank", "7")[0] == 0
    code, _, err = unikv("layout", "pattern-small", *tier[:2])
    assert (code, "is 'float16', expected bfloat16 as in layer 0; use" in " ".join(err.split())) == (64, True), err


@pytest.mark.parametrize("tier", ["bytes: 0, codec: fp8", "bytes: 1GiB, codec: identity", "bytes: 1GiB"])
def test_a_host_tier_without_the_codec_takes_any_layers(unikv: Run, tier: str) -> None:
    assert unikv("check", "smollm2", "--set", f"context.host_tier={{{tier}}}", "--json")[0] == 0


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([], "Usage: unikv"),
        (["chek", GOOD], "No such command 'chek'"),
        (["check"], "Missing argument 'PAIR'"),
        (["check", GOOD, "more"], "unexpected extra argument"),
        (["check", GOOD, "--jsn"], "No such option: --jsn"),
        (["check", "--json", GOOD, "out.txt"], "unexpected extra argument"),
        (["check", "--json", "out.json"], "Missing argument 'PAIR'"),
        (["check", GOOD, f"--json={GOOD}"], "expected a name that is not a pair file's"),
        (["check", GOOD, "--json", "/nowhere/at/all.json"], "create the directory"),
        (["check", GOOD, "--case", "nope"], "case is 'nope', expected one of draft-stays, draft-must"),
        (["check", GOOD, "--set", "model"], "expected KEY=VALUE"),
        (["check", GOOD, "--set", "model.layers.0.kv_heads=none"], "kv_heads is 'none'"),
        (["bench", GOOD, "--json", "/nowhere/at/all.json"], "create the directory"),
        (["bench", "not-there", "--json=/proc/out.json"], "expected a file that can be written (No such file"),
        (
            ["worker", GOOD, "--side=context", "--rank=99", "--rendezvous=tcp://127.0.0.1:1"],
            "rank is 99, expected in [0, ",
        ),
        (["worker", GOOD, "--side=context", "--rank=0", "--rendezvous=tcp://127.0.0.1:0"], "expected a port from 1"),
        (["layout", GOOD, "--side", "left"], "Invalid value for '--side'"),
        (["layout", GOOD, "--rank", "2"], "--rank is 2, expected in [0, 2)"),
        (["layout", GOOD, "--rank", "-1"], "--rank is -1"),
        (["layout", GOOD, "--rank", "one"], "Invalid value for '--rank'"),
        (["size", GOOD, "--tokens", "-5"], "--tokens is -5, expected in [0, "),
        (["size", GOOD, "--tokens", "1" + 30 * "0"], "expected in [0, "),
        (["size", GOOD, "--requests", "0"], "--requests is 0, expected in [1, "),
        (["size", GOOD, "--quota", "3TB"], "--quota is '3TB', expected a size in B, KiB, MiB or GiB"),
        (["plan", GOOD, "--context-dp", "1"], "--context-dp is 1, expected in [0, 1)"),
        (["pages", GOOD], "Missing option '--prompt-tokens'"),
        (["pages", GOOD, "--prompt-tokens", "8193"], "--prompt-tokens is 8193, expected in [0, 8192]"),
        (["pages", GOOD, "--prompt-tokens", "5", "--cached-tokens", "6"], "--cached-tokens is 6"),
    ],
)
def test_bad_usage_is_64_with_one_message(unikv: Run, words: list[str], message: str) -> None:
    code, out, err = unikv(*words)
    assert (code, out) == (64, "")
    assert message in err


def test_cases_and_overrides_change_the_pair(unikv: Run) -> None:
    assert parsed(unikv("check", GOOD, "--json")[1])["draft_kv"] == "per_view"
    assert parsed(unikv("check", GOOD, "--json", "--case", "draft-stays")[1])["draft_kv"] == "off"
    equal = ("--set", "context.parallel.tp=4", "--set", "transfer.draft_kv=1")
    assert parsed(unikv("check", GOOD, "--case", "draft-stays", *equal, "--json")[1])["draft_kv"] == "shared"
    _, out, _ = unikv(
        "layout", GOOD, "--side", "generation", "--rank", "3", "--set", "model.layers.0.count=1", "--json"
    )
    assert [layer["layer"] for layer in parsed(out)["layers"]] == [0, 1, 2]


def test_the_environment_overrides_draft_kv(unikv: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(DRAFT_KV_VARIABLE, "0")
    assert parsed(unikv("check", GOOD, "--json")[1])["draft_kv"] == "off"
    monkeypatch.setenv(DRAFT_KV_VARIABLE, "yes")
    code, _, err = unikv("check", GOOD)
    assert code == 64
    assert f"{DRAFT_KV_VARIABLE} is 'yes', expected one of 0, 1, auto" in err


def test_a_result_that_cannot_be_written_failed(unikv: Run) -> None:
    assert unikv("check", GOOD, "--json=/dev/full") == (1, "", "unikv: [Errno 28] No space left on device\n")


def test_the_object_has_the_numbers_of_the_pair(unikv: Run) -> None:
    plan = parsed(unikv("plan", GOOD, "--json")[1])
    piece = plan["pairs"][1]["slices"][0]
    assert piece == {
        "layer": 0, "owner": "target", "role": "key", "heads": [2, 4],
        "src_offset": 16384, "dst_offset": 0, "bytes_per_page": 16384,
    }  # fmt: skip
    pages = parsed(unikv("pages", GOOD, "--prompt-tokens", "2080", "--json")[1])
    assert [group["ordinals"] for group in pages["groups"]] == [list(range(65)), list(range(1, 65))]


@pytest.mark.parametrize("words", [["--help"], *([command, "--help"] for command in DRY), ["bench", "--help"]])
def test_help_has_an_example(unikv: Run, words: list[str]) -> None:
    code, out, err = unikv(*words)
    assert (code, err) == (0, "")
    assert f"Example: unikv {words[0] if len(words) > 1 else ''}" in out


def test_help_lists_every_command(unikv: Run) -> None:
    listed = re.findall(r"^  ([a-z]+) +[A-Z]", unikv("--help")[1], flags=re.MULTILINE)
    assert set(listed) >= {*DRY, "worker", "launch", "bench"}


def test_size_says_whose_tokens_it_means(unikv: Run) -> None:
    text = " ".join(unikv("size", "--help")[1].split())
    assert "Token positions of ALL requests of a PAIR together; with --model the length of EACH" in text


def test_size_takes_a_pair_or_a_model(unikv: Run, tmp_path: Path) -> None:
    for words, got in ((["size"], "neither"), (["size", GOOD, "--model", "."], "both")):
        code, _, err = unikv(*words)
        assert (code, f"PAIR and --model is '{got}', expected one of them" in err) == (64, True), err
    (tmp_path / "config.json").write_text(
        '{"num_hidden_layers": 2, "num_attention_heads": 4, "hidden_size": 64, "max_position_embeddings": 512}'
    )
    code, out, err = unikv("size", "--model", str(tmp_path), "--tokens", "100", "--memory", "1MiB", "--json")
    assert (code, err) == (0, "")
    assert parsed(out)["without_draft"]["requests"] == (2**20 - 8192 * 2) // (4 * 8192 * 2)
    code, out, err = unikv("size", "--model", str(tmp_path), "--tokens", "100", "--memory", "1MiB")
    assert (code, err) == (0, "") and "target alone" in out
    for option in ("--tp", "--draft-tokens", "--tokens-per-block"):
        code, _, err = unikv("size", "--model", str(tmp_path), "--tokens", "100", option, "0")
        assert (code, f"{option} is 0, expected an integer >= 1" in err) == (64, True), err


def test_the_version_is_that_of_the_installed_package(unikv: Run) -> None:
    code, out, _ = unikv("--version")
    try:
        expected = metadata.version("unikv")
    except metadata.PackageNotFoundError:
        expected = "(not installed)"
    assert (code, out) == (0, f"unikv {expected}\n")


def test_processes_answer_alike() -> None:
    done = process("check", GOOD, "--json")
    assert (done.returncode, parsed(done.stdout)["compatible"], done.stderr) == (0, True, "")
    done = process("plan", str(PAIRS / "dtypes-differ.yaml"))
    assert (done.returncode, done.stdout) == (2, "")
    assert "dtype is bfloat16 on context and float16 on generation" in done.stderr
    done = process("check", str(PAIRS / "wrong-type.yaml"))
    assert (done.returncode, done.stdout) == (64, "")
    assert done.stderr.count("\n") == 1
    assert "Traceback" not in done.stderr


def test_a_terminal_without_unicode_gets_plain_lines(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONIOENCODING", "ascii")
    done = process("check", GOOD)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.isascii()


def test_dry_commands_do_not_import_torch() -> None:
    code = "import sys; from workers.cli import main; main(['check', sys.argv[1]]); sys.exit('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code, GOOD], cwd=ROOT, capture_output=True, timeout=60, check=False)
    assert (done.returncode, done.stderr) == (0, b"")


def test_an_interrupt_ends_without_a_traceback() -> None:
    # More than a pipe holds: once its first byte is here, the process waits for us to read on.
    words = ["layout", GOOD, "--json", "--set", "model.layers.0.count=3000"]
    with subprocess.Popen(
        [sys.executable, "-m", "workers", *words], cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    ) as running:
        assert running.stdout is not None
        running.stdout.read(1)
        running.send_signal(signal.SIGINT)
        _, err = running.communicate(timeout=60)
    assert running.returncode == 130
    assert b"Traceback" not in err


def test_an_interrupt_during_the_imports_ends_without_a_traceback() -> None:
    code = """
import sys
class Interrupting:
    def find_spec(self, name, path=None, target=None):
        if name == "workers.cli_run":
            raise KeyboardInterrupt
sys.meta_path.insert(0, Interrupting())
from workers.__main__ import main
sys.exit(main())
"""
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, timeout=60, check=False)
    assert (done.returncode, done.stderr) == (130, b"")


@pytest.mark.parametrize(
    ("words", "closed", "code"),
    [
        (["check", GOOD], ">&-", 0),
        (["check", GOOD], ">&- 2>&-", 0),
        (["check", GOOD, "--json"], ">&-", 64),
        (["bench", GOOD, "--json"], ">&-", 64),
        (["check", "not-there"], "2>&-", 64),
    ],
)
def test_closed_outputs_are_no_traceback(words: list[str], closed: str, code: int) -> None:
    command = ["sh", "-c", f'exec "$@" {closed}', "sh", sys.executable, "-m", "workers", *words]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stdout) == (code, "")
    assert "Traceback" not in done.stderr
    assert ("stdout, which is closed" in done.stderr) == ("--json" in words)


@pytest.mark.parametrize("unbuffered", ["", "1"])
def test_a_reader_that_leaves_early_is_no_traceback(monkeypatch: pytest.MonkeyPatch, unbuffered: str) -> None:
    monkeypatch.setenv("PYTHONUNBUFFERED", unbuffered)
    words = ["layout", GOOD, "--json", "--set", "model.layers.0.count=3000"]
    with subprocess.Popen(
        [sys.executable, "-m", "workers", *words], cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    ) as running:
        assert running.stdout is not None
        assert running.stderr is not None
        running.stdout.read(1)
        running.stdout.close()
        err = running.stderr.read()
    assert running.returncode == 1
    assert b"Traceback" not in err


def test_keygen_makes_a_pair_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["keygen", str(tmp_path / "keys"), "--name", "context"]
    assert main([*words, "--json"]) == 0
    made = json.loads(capsys.readouterr().out)
    assert set(made) == {"public", "secret"} and all(Path(path).is_file() for path in made.values())
    secret = Path(made["secret"]).read_text().split('secret-key = "')[1][:40]
    assert main(words) == 64
    told = capsys.readouterr()
    assert "expected a new file" in told.err and secret not in told.err + told.out
