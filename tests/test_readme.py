"""The README's examples are run, not believed."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from transfer import ContextEndpoint, GenerationEndpoint, Outcome
from transfer.gate import check_instances
from transfer.gate_report import DraftKV
from transfer.hello import PathKind, Side
from unikv import KVCacheRequest, UnifiedKVCacheManager
from unikv.ids import GroupId, LayerId
from workers.config_load import load_pair
from workers.topology import dry_cards

README = Path(__file__).parents[1] / "README.md"


def blocks(language: str) -> list[str]:
    """Return the README's code blocks in one language."""
    return re.findall(rf"^```{language}\n(.*?)^```$", README.read_text(encoding="utf-8"), re.DOTALL | re.MULTILINE)


def test_the_engine_example_moves_target_and_draft_kv() -> None:
    names: dict[str, Any] = {}
    for block in blocks("python"):
        exec(compile(block, "README.md", "exec"), names)
    outcome, endpoints = names["outcome"], (names["generation"], names["context"])
    own, memory = (names["decode"], names["prefill"]), names["memory"]
    requests, managers = (names["request"], names["reserved"]), (names["manager"], names["other"])
    try:
        assert isinstance(outcome, Outcome) and outcome.ok, outcome
        assert outcome.legs[0].draft_bytes > 0
        assert names["sent"].quiet and names["received"].quiet
        _check_pages(requests[1], managers[1])
        assert names["arrived"].outcome.ok and names["arrived"].outcome.legs[0].path is PathKind.DIRECT
    finally:
        for thing in (*requests, *endpoints, *managers, *own, memory):
            thing.close()
    assert isinstance(endpoints[0], GenerationEndpoint) and isinstance(endpoints[1], ContextEndpoint)


def _check_pages(request: KVCacheRequest, manager: UnifiedKVCacheManager) -> None:
    kv = manager.get_buffers(LayerId(0))
    assert kv is not None
    slots = request.page_table(GroupId(0)).tolist()
    whole_blocks = 1000 // 32
    assert bool((kv[slots[:whole_blocks]] == 0.5).all())


def test_the_pair_file_example_is_a_pair_whose_draft_kv_travels(tmp_path: Path) -> None:
    path = tmp_path / "pair.yaml"
    (text,) = blocks("yaml")
    path.write_text(text, encoding="utf-8")
    pair = load_pair(str(path), environ={})
    report = check_instances(dry_cards(pair, Side.CONTEXT), dry_cards(pair, Side.GENERATION))
    assert report.compatible, report
    assert report.draft_kv is DraftKV.PER_VIEW

    auto = load_pair(str(path), overrides=["transfer.draft_kv=auto"], environ={})
    report = check_instances(dry_cards(auto, Side.CONTEXT), dry_cards(auto, Side.GENERATION))
    assert report.compatible and report.draft_kv is DraftKV.OFF


def test_the_refusal_quoted_is_the_refusal_given(tmp_path: Path) -> None:
    path = tmp_path / "pair.yaml"
    path.write_text(blocks("yaml")[0].replace("  tokens_per_block: 32\n", ""), encoding="utf-8")
    sizes = ["context.tokens_per_block=32", "generation.tokens_per_block=48"]
    pair = load_pair(str(path), overrides=sizes, environ={})
    report = check_instances(dry_cards(pair, Side.CONTEXT), dry_cards(pair, Side.GENERATION))
    quoted = next(" ".join(block.split()) for block in blocks("text") if block.startswith("refuse"))
    given = [
        " ".join(f"{check.verdict.value} {check.name} [{check.scope}]: {check.reason}".split())
        for check in report.checks
    ]
    assert quoted in given
