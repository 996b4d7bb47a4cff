"""No bytes break a decoder, no forged message an engine. `scripts/fuzz.py` does the same for hours, guided."""

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from transfer import context_engine
from transfer.testing.fuzz import ForgeryDriver, check_frames, seed_messages
from unikv.errors import InternalError

SEEDS = seed_messages()


def drive(seed: int, steps: int = 60) -> ForgeryDriver:
    choices = random.Random(seed)
    driver = ForgeryDriver(choices.randint, choices.randbytes)
    try:
        for _ in range(steps):
            driver.step()
        driver.check()
    finally:
        driver.close()
    return driver


def test_the_seeds_are_messages() -> None:
    assert len(SEEDS) == 11 and all(check_frames(frames) for frames in SEEDS)


@given(st.lists(st.binary(max_size=80), min_size=1, max_size=4))
def test_any_bytes_are_a_message_or_refused(frames: list[bytes]) -> None:
    assert check_frames(frames) in (True, False)


@given(st.sampled_from(SEEDS), st.data())
def test_a_message_with_any_bytes_changed_is_a_message_or_refused(frames: list[bytes], data: st.DataObject) -> None:
    number = data.draw(st.integers(0, len(frames) - 1))
    frame = bytearray(frames[number])
    for _ in range(data.draw(st.integers(1, 4))):
        at = data.draw(st.integers(0, max(0, len(frame) - 1)))
        frame[at : at + data.draw(st.integers(0, 4))] = data.draw(st.binary(max_size=4))
    changed = [*frames[:number], bytes(frame), *frames[number + 1 :]]
    assert check_frames(changed) in (True, False)


@pytest.mark.parametrize("first", range(0, 120, 20))
def test_forged_messages_break_no_engine_and_touch_no_foreign_page(first: int) -> None:
    decided = sum(len(drive(seed).handles) for seed in range(first, first + 20))
    assert decided > 100  # there was something to disturb


def test_a_handler_that_fails_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise ValueError("planted")

    monkeypatch.setattr(context_engine.ContextEngine, "_on_cancel", fail)
    with pytest.raises(InternalError, match=r"handlers failed: .*CONTEXT"):
        for seed in range(20):
            drive(seed)


def test_a_foreign_page_that_changes_is_noticed() -> None:
    choices = random.Random(1)
    driver = ForgeryDriver(choices.randint, choices.randbytes)
    driver.generation.rank.arrays[0][-1] = 1
    with pytest.raises(InternalError, match="foreign bytes: True"):
        driver.check()
    driver.close()
