import numpy as np
import pytest

from unikv.budget import PoolBudget
from unikv.cache_manager import UnifiedKVCacheManager
from unikv.errors import CapacityError, InternalError, LocalProtocolError, SpecError, UnknownLayerError
from unikv.ids import NO_PAGE, GroupId, LayerId, RequestId
from unikv.layer_spec import KVCacheLayerSpec, KVDtype, LayerOwner, ReusePolicy
from unikv.page_table import extent, num_valid
from unikv.ranges import max_live_blocks

FULL, WINDOWED = GroupId(0), GroupId(1)


def spec(layer_id, *, owner=LayerOwner.TARGET, heads=1, **fields):
    return KVCacheLayerSpec(
        layer_id=LayerId(layer_id), owner=owner, num_kv_heads=heads, head_dim=16, dtype=KVDtype.FLOAT16, **fields
    )


@pytest.fixture
def build():
    """Return a function that builds managers; they must all end with every page free and every law kept."""
    managers = []

    def make(*specs, tokens_per_block=32, max_seq_len=8192, pages=64, **kwargs):
        manager = UnifiedKVCacheManager(
            specs, tokens_per_block=tokens_per_block, max_seq_len=max_seq_len, pool=PoolBudget(pages=pages), **kwargs
        )
        managers.append(manager)
        return manager

    yield make
    for manager in managers:
        for request in list(manager._requests.values()):
            request.close()
        manager.check_integrity()
        for group in manager.layout.groups:
            assert manager.num_free_pages(group.group_id) == manager.num_slots(group.group_id) - 1
        manager.close()


def full_and_windowed(build, window, **kwargs):
    """A full group 0 and a windowed draft group 1 (twice as large, so that they do not share slots)."""
    draft = spec(1, owner=LayerOwner.DRAFT, heads=2, window=window, reuse_policy=ReusePolicy.OPTIONAL)
    return build(spec(0), draft, **kwargs)


def open_request(manager, request_id=7):
    return manager.create_request(RequestId(request_id))


def picture(request):
    """Everything a failed call must leave as it was."""
    tables = {group_id: row.tolist() for group_id, row in request.page_tables().items()}
    return request.capacity_tokens, request.history_tokens, request.num_blocks, tables


def holes(request, group_id=WINDOWED):
    return [slot == NO_PAGE for slot in request.page_table(group_id)]


def test_capacity_is_rounded_up_to_blocks_and_shrinks(build):
    request = open_request(build(spec(0), tokens_per_block=4))
    request.resize(8, 0)
    assert (request.num_blocks, len(request.page_table(FULL))) == (2, 2)
    request.resize(4, 0)
    assert (request.num_blocks, request.page_table(FULL).tolist()) == (1, [1])


def test_a_generation_behind_a_transferred_prompt_allocates_only_live_blocks(build):
    manager = full_and_windowed(build, 64)
    request = open_request(manager)
    request.resize(128 + 8, history_tokens=128)
    assert request.page_table(FULL).tolist() == [1, 2, 3, 4, 5]
    assert request.page_table(WINDOWED).tolist() == [NO_PAGE, NO_PAGE, 1, 2, 3]
    row = request.page_table(WINDOWED)
    assert (extent(row), num_valid(row)) == (5, 3)


def test_extent_of_a_long_windowed_context(build):
    manager = full_and_windowed(build, 2048, pages=400, max_seq_len=16384)
    request = open_request(manager)
    request.resize(8200, history_tokens=8192)
    row = request.page_table(WINDOWED)
    assert (len(row), num_valid(row), extent(row)) == (257, 65, 257)


@pytest.mark.parametrize(
    ("history", "window", "sinks", "tokens_per_block", "live"),
    [
        (3, 4, 0, 4, [0]),
        (7, 4, 0, 4, [1]),
        (8, 2, 0, 4, [1]),
        (8, 1, 0, 4, []),
        (20, 10, 0, 4, [2, 3, 4]),
        (23, 10, 0, 4, [3, 4, 5]),
        (20, 6, 4, 4, [0, 3, 4]),
        (94, 64, 0, 32, [0, 1, 2]),
        (95, 64, 0, 32, [1, 2]),
        (128, 64, 0, 32, [2, 3]),
        (704, 128, 1, 32, [0, 18, 19, 20, 21]),
    ],
)
@pytest.mark.parametrize("stepwise", [False, True])
def test_a_windowed_group_holds_sinks_and_window(build, history, window, sinks, tokens_per_block, live, stepwise):
    manager = build(spec(0, window=window, sink_tokens=sinks), tokens_per_block=tokens_per_block)
    request = open_request(manager)
    for tokens in range(history) if stepwise else ():
        request.resize(tokens + 1, tokens)
    request.resize(history, history)
    assert [i for i, slot in enumerate(request.page_table(FULL)) if slot != NO_PAGE] == live
    assert manager.num_free_pages(FULL) == 63 - len(live)


def test_shrinking_token_by_token_never_shifts_an_ordinal(build):
    manager = full_and_windowed(build, 128)
    request = open_request(manager)
    request.resize(320)
    full, windowed = (request.page_table(group).tolist() for group in (FULL, WINDOWED))
    for capacity in range(319, 31, -1):
        request.resize(capacity)
        assert request.page_table(FULL).tolist() == full[: request.num_blocks]
        assert request.page_table(WINDOWED).tolist() == windowed[: request.num_blocks]
        manager.check_integrity()
    assert (request.num_blocks, manager.num_free_pages(FULL)) == (1, 62)


@pytest.mark.parametrize("policy", [ReusePolicy.PRIVATE, ReusePolicy.REQUIRED])
def test_shrinking_to_one_token_and_growing_back(build, policy):
    manager = build(spec(0), spec(1, window=8, reuse_policy=policy, heads=2), tokens_per_block=4)
    request = open_request(manager)
    request.resize(40)
    for capacity in (*range(39, 0, -1), 40):
        request.resize(capacity)
        manager.check_integrity()
    assert num_valid(request.page_table(WINDOWED)) == 10


def test_a_hole_stays_a_hole_when_the_capacity_comes_back(build):
    request = open_request(full_and_windowed(build, 64))
    request.resize(200, history_tokens=128)
    request.resize(128)
    assert holes(request) == [True, True, False, False]
    request.resize(200)
    assert holes(request) == [True, True, False, False, False, False, False]


def test_pages_that_leave_the_window_serve_the_same_step(build):
    """Three pages are all this window ever needs, because the step that needs a new one also frees one."""
    manager = build(spec(0, window=8), tokens_per_block=4, pages=4)
    request = open_request(manager)
    free = set()
    for history in range(100):
        request.resize(history + 1, history)
        free.add(manager.num_free_pages(FULL))
    assert free == {0, 1, 2}


@pytest.mark.parametrize("history", [32, 33, 64])
def test_neither_capacity_nor_history_alone_changes_the_other(build, history):
    request = open_request(full_and_windowed(build, 64))
    request.resize(capacity_tokens=100)
    request.resize(history_tokens=history)
    assert (request.capacity_tokens, request.history_tokens) == (100, history)
    request.resize(capacity_tokens=101)
    assert (request.capacity_tokens, request.history_tokens) == (101, history)


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ({"history_tokens": 99}, "history_tokens is 99, expected >= 100, the history so far"),
        ({"history_tokens": -1}, "history_tokens is -1, expected >= 100"),
        ({"capacity_tokens": 99}, "capacity_tokens is 99, expected >= history_tokens=100"),
        ({"history_tokens": 201}, "capacity_tokens is 200, expected >= history_tokens=201"),
        ({"capacity_tokens": 8321}, "capacity_tokens is 8321, expected <= 8320, a block-table row"),
    ],
)
def test_wrong_sizes_are_refused_and_nothing_changes(build, arguments, text):
    request = open_request(full_and_windowed(build, 64, pages=500))
    request.resize(200, history_tokens=100)
    before = picture(request)
    with pytest.raises(SpecError, match=f"request 7: {text}"):
        request.resize(**arguments)
    assert picture(request) == before


def test_the_capacity_may_reach_the_end_of_a_block_table_row(build):
    request = open_request(build(spec(0), max_seq_len=100, pages=9))
    request.resize(128)
    with pytest.raises(SpecError, match="expected <= 128"):
        request.resize(129)


def test_a_shortage_leaves_everything_and_the_retry_works(build):
    manager = full_and_windowed(build, 64, pages=9)
    first, second = open_request(manager, 1), open_request(manager, 2)
    first.resize(160, history_tokens=96)
    second.resize(90)
    before = picture(first)
    with pytest.raises(CapacityError, match="request 1, layer group 0: needs 3 pages of pool group 0") as caught:
        first.resize(250, history_tokens=160)
    assert (caught.value.needed_pages, caught.value.free_pages) == (3, 0)
    assert picture(first) == before
    manager.check_integrity()
    second.close()
    first.resize(250, history_tokens=160)
    assert holes(first) == [True, True, True, False, False, False, False, False]


def test_a_shortage_in_the_last_group_takes_nothing_from_the_first(build):
    """Group 1 has the same pages as group 0, but a larger window to fill."""
    manager = full_and_windowed(build, 64, pages=9)
    hoarder = open_request(manager, 1)
    hoarder.resize(160, history_tokens=0)
    with manager._requests[RequestId(1)].pin():
        hoarder.close()
        request = open_request(manager, 2)
        with pytest.raises(CapacityError, match="needs 4 pages of pool group 0, where 3 of 8 are free"):
            request.resize(128)
        assert picture(request) == (0, 0, 0, {FULL: [], WINDOWED: []})
        assert [manager.num_free_pages(group) for group in (FULL, WINDOWED)] == [3, 3]


def test_only_the_short_group_is_named(build):
    manager = full_and_windowed(build, 64, pages=9)
    windowed_only = open_request(manager, 1)
    windowed_only.resize(256, history_tokens=200)
    assert [manager.num_free_pages(group) for group in (FULL, WINDOWED)] == [0, 4]
    with pytest.raises(CapacityError, match="request 2, layer group 0: needs 1 pages"):
        open_request(manager, 2).resize(1)


def test_a_request_that_can_never_fit_hears_it_at_once(build):
    request = open_request(full_and_windowed(build, 64, pages=9))
    with pytest.raises(CapacityError, match="request 7, layer group 0: needs 9 of 8 pages of pool group 0") as caught:
        request.resize(9 * 32)
    assert (caught.value.needed_pages, caught.value.free_pages) == (9, 8)
    request.resize(8 * 32)
    with pytest.raises(CapacityError, match="needs 9 of 8 pages of pool group 0, so it can never fit"):
        request.resize(9 * 32)


def test_groups_of_one_pool_group_are_counted_together(build):
    manager = build(spec(0), spec(1, window=64), pages=9)
    assert len({group.pool_group for group in manager.layout.groups}) == 1
    request = open_request(manager)
    request.resize(4 * 32)
    assert manager.num_free_pages(FULL) == manager.num_free_pages(WINDOWED) == 0
    with pytest.raises(CapacityError, match="layer group 0, 1: needs 10 of 8 pages"):
        request.resize(5 * 32)
    request.resize(5 * 32, history_tokens=128)
    both = [*request.page_table(FULL).tolist(), *request.page_table(WINDOWED).tolist()]
    assert sorted(both) == [NO_PAGE, NO_PAGE, *range(1, 9)]


# ---- generation steps


def test_a_step_with_a_reserve_takes_back_what_was_refused(build):
    request = open_request(build(spec(0)))
    request.resize(100, history_tokens=99)
    request.grow(2, reserve_tokens=4)
    assert request.capacity_tokens == 105
    request.rewind(2, 102)
    assert (request.capacity_tokens, request.history_tokens) == (103, 102)
    request.rewind(0, 102)
    assert request.capacity_tokens == 103


def test_revert_undoes_exactly_one_step(build):
    request = open_request(build(spec(0)))
    request.resize(100, history_tokens=99)
    request.grow(2, reserve_tokens=4)
    request.revert()
    assert (request.capacity_tokens, request.history_tokens) == (100, 99)
    request.revert()
    assert request.capacity_tokens == 100


@pytest.mark.parametrize(("accepted", "capacity"), [(0, 101), (1, 102), (3, 104), (4, 104), (9, 104)])
def test_accepted_drafts_keep_their_room(build, accepted, capacity):
    request = open_request(build(spec(0)))
    request.resize(100, history_tokens=90)
    request.grow(3)
    request.rewind(accepted, 91)
    assert request.capacity_tokens == capacity


def test_overlapping_steps_are_settled_in_their_order(build):
    request = open_request(build(spec(0)))
    request.resize(100, history_tokens=90)
    request.grow(5)
    request.grow(2)
    assert request.capacity_tokens == 109
    request.rewind(1, 92)
    assert request.capacity_tokens == 105
    request.revert()
    assert request.capacity_tokens == 102


def test_a_step_that_does_not_fit_is_not_remembered(build):
    request = open_request(build(spec(0), pages=4))
    request.resize(96, history_tokens=90)
    before = picture(request)
    with pytest.raises(CapacityError, match="needs 4 of 3 pages"):
        request.grow(3)
    assert picture(request) == before
    request.revert()
    assert picture(request) == before


def test_a_refused_settlement_keeps_the_step(build):
    request = open_request(build(spec(0)))
    request.resize(100, history_tokens=99)
    request.grow(4)
    with pytest.raises(SpecError, match="capacity_tokens is 101, expected >= history_tokens=102"):
        request.rewind(0, 102)
    request.rewind(1, 102)
    assert (request.capacity_tokens, request.history_tokens) == (102, 102)


@pytest.mark.parametrize("call", [lambda r: r.grow(-1), lambda r: r.rewind(-1, 0)])
def test_negative_drafts_are_refused(build, call):
    request = open_request(build(spec(0)))
    with pytest.raises(SpecError, match="draft_tokens is -1, expected >= 0 tokens"):
        call(request)


def test_the_last_steps_stop_at_the_end_of_the_row_and_undo_what_they_did(build):
    request = open_request(build(spec(0), max_seq_len=100, pages=9))
    request.resize(126, history_tokens=98)
    request.grow(4)
    assert request.capacity_tokens == 128
    request.revert()
    assert request.capacity_tokens == 126
    request.grow(4)
    request.rewind(0, 99)
    assert request.capacity_tokens == 127
    request.grow(0)
    request.grow(4)
    assert request.capacity_tokens == 128
    request.revert()
    assert request.capacity_tokens == 128


def test_a_windowed_drafter_slides_along_with_every_step(build):
    manager = full_and_windowed(build, 64, pages=40)
    request = open_request(manager)
    request.resize(40, history_tokens=32)
    history = 32
    while history < 900:
        request.grow(4)
        accepted = history % 5
        history += 1 + accepted
        request.rewind(accepted, history)
        assert request.capacity_tokens == history + 8
        assert num_valid(request.page_table(WINDOWED)) <= max_live_blocks(64, 8, 32) == 4
        manager.check_integrity()


# ---- reading tables


def test_tables_are_read_only_and_change_in_place(build):
    request = open_request(full_and_windowed(build, 64))
    request.resize(96)
    row = request.page_table(WINDOWED)
    with pytest.raises(ValueError, match="read-only"):
        row[0] = 5
    request.resize(160, history_tokens=150)
    assert row.tolist() == [NO_PAGE, NO_PAGE, 3]
    assert request.page_table(WINDOWED).tolist() == [NO_PAGE, NO_PAGE, 3, 1, 2]


def test_tables_for_a_transfer_are_copies(build):
    request = open_request(full_and_windowed(build, 64))
    request.resize(160, history_tokens=130)
    tables = request.page_tables()
    assert {group: row.tolist() for group, row in tables.items()} == {
        FULL: [1, 2, 3, 4, 5],
        WINDOWED: [NO_PAGE, NO_PAGE, 1, 2, 3],
    }
    tables[FULL][:] = 0
    assert request.page_table(FULL).tolist() == [1, 2, 3, 4, 5]
    assert all(row.dtype == np.int32 for row in tables.values())


def test_an_unknown_group_is_named(build):
    request = open_request(build(spec(0)))
    for group in (-1, 1):
        with pytest.raises(UnknownLayerError, match=f"group_id is {group}"):
            request.page_table(GroupId(group))


# ---- the end, and pins


def test_closing_gives_every_page_back_and_can_be_repeated(build):
    manager = full_and_windowed(build, 64)
    request = open_request(manager)
    request.resize(160, history_tokens=130)
    request.close()
    request.close()
    assert request.closed
    assert picture(request) == (0, 0, 0, {FULL: [], WINDOWED: []})
    assert [manager.num_free_pages(group) for group in (FULL, WINDOWED)] == [63, 63]


@pytest.mark.parametrize(
    ("name", "call"),
    [
        ("resize", lambda r: r.resize(1)),
        ("grow", lambda r: r.grow(1)),
        ("rewind", lambda r: r.rewind(0, 0)),
        ("revert", lambda r: r.revert()),
        ("page_table", lambda r: r.page_table(FULL)),
        ("pin", lambda r: r.pin()),
    ],
)
def test_a_closed_request_refuses_work(build, name, call):
    request = open_request(build(spec(0)))
    request.close()
    with pytest.raises(LocalProtocolError, match=rf"request 7: state is 'closed', expected a state that allows {name}"):
        call(request)


def test_pinned_pages_outlive_the_request(build):
    manager = full_and_windowed(build, 64, pages=9)
    request = open_request(manager)
    request.resize(256, history_tokens=200)
    pin = request.pin()
    assert pin.slots == {FULL: tuple(range(1, 9)), WINDOWED: (1, 2, 3, 4)}
    request.close()
    manager.check_integrity()
    assert [manager.num_free_pages(group) for group in (FULL, WINDOWED)] == [0, 4]
    pin.release()
    pin.release()
    assert [manager.num_free_pages(group) for group in (FULL, WINDOWED)] == [8, 8]


def test_pinned_pages_are_not_reused_when_they_leave_the_window(build):
    manager = build(spec(0, window=64), pages=6)
    request = open_request(manager)
    request.resize(96, history_tokens=64)
    with request.pin():
        before = picture(request)
        with pytest.raises(CapacityError, match="needs 3 pages of pool group 0, where 2 of 5 are free"):
            request.resize(192, history_tokens=160)
        assert picture(request) == before
    request.resize(192, history_tokens=160)
    assert holes(request, FULL) == [True, True, True, False, False, False]


def test_a_pin_covers_only_the_pages_it_is_given(build):
    manager = full_and_windowed(build, 64, pages=9)
    request = open_request(manager)
    request.resize(128)
    tables = request.page_tables()
    tables[FULL][1:] = NO_PAGE
    with request.pin({FULL: tables[FULL]}) as pin:
        request.close()
        assert pin.slots == {FULL: (1,)}
        assert [manager.num_free_pages(group) for group in (FULL, WINDOWED)] == [7, 8]


def test_two_pins_hold_a_page_until_the_second_goes(build):
    manager = build(spec(0), pages=4)
    request = open_request(manager)
    request.resize(96)
    first, second = request.pin(), request.pin()
    request.close()
    first.release()
    assert manager.num_free_pages(FULL) == 0
    second.release()
    assert manager.num_free_pages(FULL) == 3


def test_a_stale_table_cannot_be_pinned(build):
    manager = full_and_windowed(build, 64)
    request = open_request(manager)
    request.resize(96)
    tables = request.page_tables()
    request.resize(160, history_tokens=150)
    with pytest.raises(SpecError, match="request 7, layer group 1: pinned page at ordinal 0 is 1, expected the page"):
        request.pin(tables)
    request.resize(160)
    assert manager._source.pins == set()


def test_a_table_longer_than_the_request_cannot_be_pinned(build):
    request = open_request(build(spec(0)))
    request.resize(96)
    tables = request.page_tables()
    request.resize(32)
    with pytest.raises(SpecError, match="pinned page at ordinal 1 is 2"):
        request.pin(tables)


def test_integrity_finds_a_page_where_none_belongs(build):
    request = open_request(full_and_windowed(build, 64))
    request.resize(160, history_tokens=130)
    row = request._rows[WINDOWED].slots
    row[0] = 9
    with pytest.raises(
        InternalError, match="request 7, group 1: pages do not match 0 <= committed 0 <= history 130 <= capacity 160"
    ):
        request.check_integrity()
    row[0] = NO_PAGE
