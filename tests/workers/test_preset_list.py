"""Shipped pair files say themselves what they are for."""

from __future__ import annotations

import pytest

from workers.preset_list import description, presets_report


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("# One line.\nmodel:\n", "One line"),
        ("# Two lines that\n# are one sentence. And another.\nmodel:\n", "Two lines that are one sentence"),
        ("# No full stop\n", "No full stop"),
        ("# Version 1.2 of it. More.\n", "Version 1.2 of it"),
        ("model:\n# not about the file\n", ""),
        ("", ""),
    ],
)
def test_the_first_sentence_describes_the_file(text: str, expected: str) -> None:
    assert description(text) == expected


def test_every_preset_is_described() -> None:
    presets = presets_report()["presets"]
    assert {"pattern-small", "smollm2"} <= {preset["name"] for preset in presets}
    assert all(preset["description"] for preset in presets)
    small = next(preset for preset in presets if preset["name"] == "pattern-small")
    assert (small["runner"], small["target_layers"], small["draft_layers"]) == ("pattern", 8, 2)
    assert "tp2-tp4-zmq" in small["cases"]
