import pytest

from unikv.errors import SpecError
from unikv.ranges import ceil_div
from unikv.speculation import NO_SPECULATION, SpeculationShape, max_blocks_per_sequence


def shape(k, width, reserve):
    return SpeculationShape(max_draft_tokens=k, block_width=width, num_extra_kv_tokens=reserve)


@pytest.mark.parametrize(
    ("prompt", "capacities", "blocks"),
    [
        (24, (30, 31, 32), (1, 1, 1)),
        (25, (31, 32, 33), (1, 1, 2)),
        (26, (32, 33, 34), (1, 2, 2)),
        (57, (63, 64, 65), (2, 2, 3)),
        (58, (64, 65, 66), (2, 3, 3)),
    ],
)
def test_drafter_block_at_a_page_boundary(prompt, capacities, blocks):
    reserves = [
        shape(7, 0, 6).extra_tokens(hosts_draft=False),
        shape(7, 7, 6).extra_tokens(hosts_draft=True),
        shape(7, 8, 6).extra_tokens(hosts_draft=True),
    ]
    assert tuple(prompt + extra for extra in reserves) == capacities
    assert tuple(ceil_div(prompt + extra, 32) for extra in reserves) == blocks


def test_without_hosted_draft_layers_the_block_width_does_not_count():
    assert shape(7, 8, 6).extra_tokens(hosts_draft=False) == 6


def test_a_position_reserve_above_the_block_width_wins():
    assert shape(3, 4, 9).extra_tokens(hosts_draft=True) == 9


def test_headroom_of_a_generation_step():
    assert shape(7, 7, 6).tokens_per_generation_step == 8
    assert shape(7, 7, 6).generation_headroom(hosts_draft=True) == 15
    assert shape(7, 7, 6).generation_headroom(hosts_draft=False) == 14


def test_no_speculation_is_one_token_per_step():
    assert NO_SPECULATION.extra_tokens(hosts_draft=True) == 0
    assert NO_SPECULATION.generation_headroom(hosts_draft=True) == 1


@pytest.mark.parametrize("name", ["max_draft_tokens", "block_width", "num_extra_kv_tokens"])
def test_negative_widths_are_refused(name):
    fields = {"max_draft_tokens": 1, "block_width": 1, "num_extra_kv_tokens": 1, name: -1}
    with pytest.raises(SpecError, match=f"speculation: {name} is -1, expected an integer >= 0 tokens"):
        SpeculationShape(**fields)


@pytest.mark.parametrize(
    ("max_seq_len", "headroom", "tokens_per_block", "blocks"),
    [(128, 0, 32, 4), (128, 1, 32, 8), (1, 0, 32, 4), (8192, 15, 32, 260), (4096, 16, 128, 36)],
)
def test_rows_fit_the_longest_sequence_and_are_multiples_of_four(max_seq_len, headroom, tokens_per_block, blocks):
    assert max_blocks_per_sequence(max_seq_len, headroom, tokens_per_block) == blocks
