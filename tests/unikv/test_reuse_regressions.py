"""The shortest way to what random walks through the cache once found."""

import pytest

from unikv.errors import CapacityError


def test_a_step_that_never_fits_says_so_although_another_pool_group_is_short_for_now(make_bench, make_layer):
    """The windowed group's pages wait to be published, the other's would never fit: waiting is in vain."""
    bench = make_bench(make_layer(0, window=3), make_layer(1, heads=2), tokens_per_block=2, max_seq_len=32, pages=11)
    chat = bench.open(0, [])
    chat.request.resize(5, 5)
    with pytest.raises(CapacityError, match="can never fit") as refused:
        chat.request.resize(23, 6)
    assert refused.value.permanent
    with pytest.raises(CapacityError, match="can never fit"):
        bench.manager.check_fits(23, 6)
    assert (chat.request.capacity_tokens, chat.request.history_tokens) == (5, 5)
