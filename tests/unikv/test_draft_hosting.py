"""Where a drafter's KV lives."""

import logging

import pytest

from unikv.draft_hosting import plan_draft_hosting
from unikv.errors import SpecError
from unikv.layer_spec import KVCacheLayerSpec, KVDtype, LayerOwner


def layer(number, **changes):
    fields = {
        "layer_id": number,
        "owner": LayerOwner.TARGET,
        "num_kv_heads": 2,
        "head_dim": 16,
        "dtype": KVDtype.BFLOAT16,
    }
    return KVCacheLayerSpec(**{**fields, **changes})


TARGET = [layer(0), layer(3, num_kv_heads=4, dtype=KVDtype.FLOAT8_E4M3FN)]


@pytest.mark.parametrize("share", ["auto", "1"])
def test_equal_draft_layers_join_the_target_behind_its_last_id(share):
    hosting = plan_draft_hosting(TARGET, [layer(0, window=64), layer(1, window=64)], share=share)
    assert [(spec.layer_id, spec.owner) for spec in hosting.unified] == [
        (0, LayerOwner.TARGET),
        (3, LayerOwner.TARGET),
        (4, LayerOwner.DRAFT),
        (5, LayerOwner.DRAFT),
    ]
    assert (hosting.separate, hosting.reason) == ((), "")


@pytest.mark.parametrize(
    ("field", "value", "text"),
    [
        ("window", 128, r"window \(64 and 128\)"),
        ("window", None, r"window \(64 and None\)"),
        ("num_kv_heads", 1, r"num_kv_heads \(2 and 1\)"),
        ("head_dim", 32, "head_dim"),
        ("dtype", KVDtype.FLOAT16, "dtype"),
        ("kv_factor", 1, "kv_factor"),
    ],
)
def test_mixed_draft_layers_keep_their_own_cache_or_are_refused(caplog, field, value, text):
    draft = [layer(0, window=64), layer(1, window=64, **{} if field == "window" else {field: value})]
    if field == "window":
        draft[1] = layer(1, window=value)
    with caplog.at_level(logging.WARNING):
        hosting = plan_draft_hosting(TARGET, draft)
    assert [spec.layer_id for spec in hosting.unified] == [0, 3]
    assert [spec.layer_id for spec in hosting.separate] == [4, 5]
    [line] = caplog.messages
    assert "draft layers 4 and 5 differ in " + field in line and hosting.reason in line
    with pytest.raises(SpecError, match=f"draft hosting: draft layers 4 and 5 differ in .*{text}"):
        plan_draft_hosting(TARGET, draft, share="1")


def test_apart_when_asked_for(caplog):
    hosting = plan_draft_hosting(TARGET, [layer(0)], share="0")
    assert (len(hosting.unified), len(hosting.separate), hosting.reason, caplog.messages) == (2, 1, "asked for", [])


def test_other_words_are_refused():
    with pytest.raises(SpecError, match="share is 'yes', expected auto, 1 or 0"):
        plan_draft_hosting(TARGET, [], share="yes")
