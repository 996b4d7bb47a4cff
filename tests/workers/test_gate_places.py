"""Draft KV and its switch, seed rule by seed rule, in the three places that look: launcher, worker, peers."""

from __future__ import annotations

import copy
import logging
from pathlib import Path
from typing import Any

import pytest
import yaml

from transfer.gate import check
from transfer.gate_report import DraftKV
from transfer.hello import Side
from unikv.errors import ConfigError, IncompatiblePeerError
from workers import worker_main
from workers.cli import main
from workers.config import PairConfig
from workers.config_load import load_pair
from workers.dry import all_cards
from workers.pair_run import judge

TARGET = {"count": 2, "owner": "target", "kv_heads": 4, "head_dim": 16, "dtype": "bfloat16"}
DRAFT = {"count": 2, "owner": "draft", "kv_heads": 4, "head_dim": 8, "dtype": "float16", "window": 64}
SPECULATIVE = {"method": "draft_model", "max_draft_tokens": 3, "block_width": 3, "num_extra_kv_tokens": 2}
SIDE: dict[str, Any] = {
    "max_seq_len": 256,
    "tokens_per_block": 16,
    "layers": [TARGET, DRAFT],
    "speculative": SPECULATIVE,
    "parallel": {"tp": 1},
    "pool": {"pages": 24},
}

BROKEN: dict[str, dict[str, Any]] = {
    "speculation on one side": {"speculative": None, "layers": [TARGET]},
    "unequal tp": {"parallel": {"tp": 2}},
    "unequal attention dp": {"parallel": {"tp": 2, "attention_dp": True}},
    "fewer draft layers": {"layers": [TARGET, {**DRAFT, "count": 1}]},
    "another draft geometry": {"layers": [TARGET, {**DRAFT, "head_dim": 16}]},
    "another draft dtype": {"layers": [TARGET, {**DRAFT, "dtype": "bfloat16"}]},
    "another draft window": {"layers": [TARGET, {**DRAFT, "window": 32}]},
    "another speculative method": {"speculative": {**SPECULATIVE, "method": "eagle"}},
}
"""What the generation side changes; each breaks one rule."""

LIFTED = {"unequal tp", "unequal attention dp"}
"""Obstacles that cutting heads per view overcomes."""


def pair_of(folder: Path, change: dict[str, Any], mode: object, environ: dict[str, str] | None = None) -> PairConfig:
    content = {
        "context": copy.deepcopy(SIDE),
        "generation": {**copy.deepcopy(SIDE), **change},
        "transfer": {"draft_kv": mode},
    }
    path = folder / "pair.yaml"
    path.write_text(yaml.safe_dump(content))
    return load_pair(str(path), environ=environ or {})


def want(broken: str, mode: str) -> DraftKV | None:
    """What becomes of draft KV; None where the pair is refused."""
    if mode == "0":
        return DraftKV.OFF
    if mode == "per_view" and broken in LIFTED:
        return DraftKV.PER_VIEW
    return None if mode == "1" else DraftKV.OFF


def at_launcher(pair: PairConfig) -> DraftKV:
    return judge(pair).draft_kv


def at_worker(pair: PairConfig) -> DraftKV:
    worker_main._judge(pair, Side.CONTEXT)
    return at_launcher(pair)


def at_peers(pair: PairConfig) -> DraftKV:
    """Every pair of ranks that may meet, as each of the two judges it; draft KV is off as soon as one says so."""
    contexts, generations = all_cards(pair, Side.CONTEXT), all_cards(pair, Side.GENERATION)
    reports = [check(ours, theirs) for ours in contexts for theirs in generations]
    refused = [row.reason for report in reports for row in report.checks if not report.compatible]
    if refused:
        raise IncompatiblePeerError("; ".join(refused), mismatches=refused)
    verdicts = {report.draft_kv for report in reports}
    return DraftKV.OFF if DraftKV.OFF in verdicts else verdicts.pop()


PLACES = {"launcher": at_launcher, "worker": at_worker, "peers": at_peers}


@pytest.mark.parametrize("mode", ["auto", "0", "1", "per_view"])
@pytest.mark.parametrize("broken", BROKEN)
@pytest.mark.parametrize("place", PLACES)
def test_a_broken_rule_has_one_outcome_everywhere(tmp_path: Path, place: str, broken: str, mode: str) -> None:
    pair = pair_of(tmp_path, BROKEN[broken], mode)
    if (outcome := want(broken, mode)) is None:
        with pytest.raises(IncompatiblePeerError) as caught:
            PLACES[place](pair)
        assert "draft" in str(caught.value)
    else:
        assert PLACES[place](pair) is outcome


@pytest.mark.parametrize("mode", ["auto", "1", "per_view"])
@pytest.mark.parametrize("place", PLACES)
def test_sides_that_agree_share(tmp_path: Path, place: str, mode: str) -> None:
    assert PLACES[place](pair_of(tmp_path, {}, mode)) is DraftKV.SHARED


@pytest.mark.parametrize("written", ["auto", "0", "1", "per_view"])
@pytest.mark.parametrize(("value", "mode"), [("0", "0"), ("1", "1"), ("auto", "auto")])
def test_the_variable_wins_over_the_file_in_every_place(tmp_path: Path, written: str, value: str, mode: str) -> None:
    pair = pair_of(tmp_path, BROKEN["unequal tp"], written, {"UNIKV_SHARED_DRAFT_KV": value})
    assert pair.transfer.draft_kv == mode
    for place in PLACES.values():
        if want("unequal tp", mode) is None:
            with pytest.raises(IncompatiblePeerError, match="unequal"):
                place(pair)
        else:
            assert place(pair) is DraftKV.OFF


def test_an_illegal_value_lists_the_legal_ones(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="UNIKV_SHARED_DRAFT_KV is 'yes', expected one of 0, 1, auto"):
        pair_of(tmp_path, {}, "auto", {"UNIKV_SHARED_DRAFT_KV": "yes"})


def test_a_fallback_is_told_in_one_line(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO):
        at_worker(pair_of(tmp_path, BROKEN["another draft window"], "auto"))
    [record] = caplog.records
    assert "draft KV does not travel: " in record.getMessage() and "window" in record.getMessage()


@pytest.mark.parametrize("mode", ["0", "1"])
def test_who_asked_for_it_hears_nothing(tmp_path: Path, caplog: pytest.LogCaptureFixture, mode: str) -> None:
    at_worker(pair_of(tmp_path, BROKEN["unequal tp"] if mode == "0" else {}, mode))
    assert caplog.records == []


def test_page_sizes_that_do_not_divide_are_refused_for_the_target_too(tmp_path: Path) -> None:
    for place in PLACES.values():
        with pytest.raises(IncompatiblePeerError, match="tokens_per_block"):
            place(pair_of(tmp_path, {"tokens_per_block": 24}, "auto"))


@pytest.mark.parametrize("side", ["context", "generation"])
def test_a_worker_that_cannot_honour_1_ends_at_start_with_the_reason(
    tmp_path: Path, side: str, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    pair_of(tmp_path, BROKEN["another draft window"], "auto")
    monkeypatch.setenv("UNIKV_SHARED_DRAFT_KV", "1")
    words = ["worker", str(tmp_path / "pair.yaml"), "--side", side, "--rank", "0"]
    assert main([*words, "--rendezvous", "tcp://127.0.0.1:9"]) == 2
    assert "draft KV cannot travel" in capfd.readouterr().err
