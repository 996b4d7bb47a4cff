"""Staging chunks: never more than allowed, never used by two, never lost."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from transfer.options import TransferOptions
from transfer.staging import HostChunkPool
from unikv.errors import ConfigError, InternalError


class Ticket:
    def __init__(self) -> None:
        self.sent = False

    def done(self) -> bool:
        return self.sent


@given(
    chunks=st.integers(1, 4),
    steps=st.lists(st.tuples(st.sampled_from(["take", "give", "send", "sent"]), st.integers(1, 40)), max_size=60),
)
def test_chunks_are_conserved_whatever_happens(chunks: int, steps: list[tuple[str, int]]) -> None:
    pool = HostChunkPool(chunks=chunks, chunk_bytes=16)
    held: list[np.ndarray] = []
    flying: list[tuple[np.ndarray, Ticket]] = []
    for what, number in steps:
        if what == "take":
            chunk = pool.take(number)
            assert (chunk is None) == (len(held) + len(flying) == chunks)
            if chunk is not None:
                assert chunk.size >= number and chunk.dtype == np.uint8
                busy = [*held, *(sending for sending, _ in flying)]
                assert not any(np.shares_memory(chunk, other) for other in busy)
                held.append(chunk)
        elif what == "give" and held:
            pool.give_back(held.pop(number % len(held)))
        elif what == "send" and held:
            flying.append((held.pop(number % len(held)), Ticket()))
            pool.give_back_after(*flying[-1])
        elif what == "sent" and flying:
            flying.pop(number % len(flying))[1].sent = True
        pool.check_integrity()
        assert pool.in_use == len(held) + len(flying)


def test_chunks_are_used_again_and_a_larger_page_trades_one_in() -> None:
    pool = HostChunkPool(chunks=1, chunk_bytes=16)
    first = pool.take(16)
    assert first is not None and pool.take(1) is None
    pool.give_back(first)
    assert pool.take(3) is first
    pool.give_back(first)
    large = pool.take(100)
    assert large is not None and large.size == 100 and pool.take(1) is None
    pool.give_back(large)
    assert pool.take(5) is large and pool.in_use == 1


def test_a_chunk_given_back_twice_is_noticed() -> None:
    pool = HostChunkPool(chunks=2, chunk_bytes=16)
    chunk = pool.take(1)
    assert chunk is not None
    pool.give_back(chunk)
    pool.give_back(chunk)
    with pytest.raises(InternalError, match="staging chunks do not add up: made 1, free 2, flying 0"):
        pool.check_integrity()


@pytest.mark.parametrize(("chunks", "chunk_bytes"), [(0, 16), (2, 0)])
def test_an_empty_pool_is_refused(chunks: int, chunk_bytes: int) -> None:
    with pytest.raises(ConfigError, match=f"{chunks} chunks of {chunk_bytes} bytes"):
        HostChunkPool(chunks=chunks, chunk_bytes=chunk_bytes)


@pytest.mark.parametrize("name", ["timeout_s", "chunk_bytes", "staging_chunks", "max_blocks", "hello_timeout_s"])
@pytest.mark.parametrize("value", [0, -1, float("nan")])
def test_options_without_meaning_are_refused(name: str, value: float) -> None:
    with pytest.raises(ConfigError, match=rf"{name} is .*expected > 0"):
        TransferOptions(**{name: value})  # type: ignore[arg-type]
