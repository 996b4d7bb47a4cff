"""What one request costs."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from unikv.errors import SpecError
from unikv.ids import LayerId
from unikv.layer_spec import KVCacheLayerSpec, KVDtype, LayerOwner
from unikv.sizing import CacheCost
from unikv.sizing_requests import CONTEXT, GENERATION, RequestCost
from unikv.testing import mixed_specs, spec_lists


def four_layers(**more: Any) -> RequestCost:
    """Return the cost of two windowed and two full layers of 100 bytes a token."""
    specs = [
        KVCacheLayerSpec(
            layer_id=LayerId(number),
            owner=LayerOwner.TARGET,
            num_kv_heads=1,
            head_dim=100,
            dtype=KVDtype.FLOAT8_E4M3FN,
            kv_factor=1,
            window=window,
        )
        for number, window in enumerate((64, 64, None, None))
    ]
    return RequestCost.from_specs(specs, tokens_per_block=16, max_seq_len=4096, **more)


def test_prefill_keeps_every_layer() -> None:
    assert four_layers().bytes(CONTEXT, 1000) == 400_000


def test_prefill_with_shared_scratch_keeps_one_windowed_layer_and_the_window_of_the_other() -> None:
    shared = four_layers(share_window_scratch=True)
    assert shared.bytes(CONTEXT, 1000) == 306_400 == 1000 * 300 + 64 * 100
    # A prompt of one page fills a part of the window only.
    assert shared.bytes(CONTEXT, 10) == 10 * 300 + 16 * 100


def test_prefill_pays_for_the_positions_drafts_need() -> None:
    assert four_layers(extra_tokens=7).bytes(CONTEXT, 1000) == 1007 * 400


def test_generation_pays_for_full_layers_and_windows() -> None:
    found = four_layers()
    assert found.bytes(GENERATION, 1000, 5) == 1005 * 200 + 2 * 5 * 16 * 100
    assert found.bytes(GENERATION, 1000, 6) - found.bytes(GENERATION, 1000, 5) == 200


def test_a_token_in_all_layers() -> None:
    assert four_layers(share_window_scratch=True).bytes_per_token == 400
    assert RequestCost.from_specs(mixed_specs(), tokens_per_block=32, max_seq_len=8192).bytes_per_token == 1824


@pytest.mark.parametrize("state", ["", "done", "CONTEXT"])
def test_other_states_hold_no_pages(state: str) -> None:
    with pytest.raises(SpecError, match=rf"request: state is '{state}', expected one of context, generation"):
        four_layers().bytes(state, 10)


@pytest.mark.parametrize(("prompt", "new", "name"), [(-1, 0, "prompt_tokens"), (1, -2, "new_tokens")])
def test_lengths_are_counts(prompt: int, new: int, name: str) -> None:
    with pytest.raises(SpecError, match=f"request: {name} is -"):
        four_layers().bytes(GENERATION, prompt, new)


@given(spec_lists(), st.integers(0, 500), st.integers(1, 20))
def test_requests_add_up_to_the_cost_of_the_cache(
    specs: tuple[KVCacheLayerSpec, ...], tokens: int, headroom: int
) -> None:
    shape: dict[str, Any] = {"tokens_per_block": 4, "max_seq_len": None, "generation_headroom_tokens": headroom}
    one = RequestCost.from_specs(specs, **shape)
    three = CacheCost.from_specs(specs, max_requests=3, max_num_tokens=0, **shape)
    assert three.quota_bytes(3 * tokens) == 3 * one.bytes(GENERATION, tokens)
