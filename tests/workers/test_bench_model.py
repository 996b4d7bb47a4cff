"""The example model in two processes: the answers of one, drafts accepted alike, and only missing pages moved."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from workers.cli import main
from workers.model_store import is_complete, smollm2_directory

PROMPTS = """
- - Say hello.
  - Now say it in French.
- List three colours.
"""


@pytest.mark.model
@pytest.mark.timeout(600)
@pytest.mark.usefixtures("store_library")
def test_a_conversation_in_two_processes(tmp_path: Path) -> None:
    if not is_complete(smollm2_directory()):
        pytest.skip("SmolLM2 is not on this machine: run scripts/fetch_model.py once")
    (tmp_path / "prompts.yaml").write_text(PROMPTS)
    words = ["bench", "smollm2", "--json", str(tmp_path / "result.json")]
    for override in (
        f"workload.prompts={tmp_path / 'prompts.yaml'}",
        "workload.output_tokens=10",
        "context.pool.pages=40",
    ):
        words += ["--set", override]
    assert main(words) == 0
    result = json.loads((tmp_path / "result.json").read_text())
    generation, requests = result["generation"], result["requests"]
    assert generation["tokens_identical_to_aggregated"] and generation["tokens_identical_to_generate"]
    assert generation["acceptance"]["shared"] == generation["acceptance"]["aggregated"]
    assert [request["verified"] for request in requests] == [True] * 3
    first, second, other = requests
    assert first["cached_tokens"] == {"context": 0, "generation": 0}
    # The context side has the first prompt; the generation side also has its answer, in whole blocks of 32.
    assert second["cached_tokens"]["context"] == first["prompt_tokens"]
    assert second["cached_tokens"]["generation"] == (first["prompt_tokens"] + 10) // 32 * 32 > 0
    pages = -(-second["prompt_tokens"] // 32) - second["cached_tokens"]["generation"] // 32
    assert second["bytes"] == pages * 32 * 2 * 30 * 2 * 3 * 64 * 4
    assert other["cached_tokens"]["generation"] == 0
