"""A resume happens whole or not at all: where pages are short, where too much is in use, and where a copy fails."""

from dataclasses import replace

import pytest

from unikv.errors import SpecError
from unikv.ids import GroupId
from unikv.layer_spec import ReusePolicy
from unikv.page_copy import PageCopier
from unikv.request import RequestState, ResumeResult
from unikv.reuse_options import ReuseOptions

FULL, WINDOW = GroupId(0), GroupId(1)
REQUIRED, OPTIONAL, PRIVATE = ReusePolicy.REQUIRED, ReusePolicy.OPTIONAL, ReusePolicy.PRIVATE
OK, NO_ROOM, CROWDED = ResumeResult.OK, ResumeResult.OUT_OF_PAGES, ResumeResult.OVER_UTILISATION


def words(count, salt=0):
    return [1000 * salt + i for i in range(count)]


@pytest.fixture
def make(make_bench, make_layer):
    """A full REQUIRED group 0, and a windowed group 1 of its own pool group."""

    def build(policy=REQUIRED, window=20, **kw):
        return make_bench(make_layer(0), make_layer(1, heads=2, window=window, reuse_policy=policy), **kw)

    return build


def picture(bench, chat):
    """Everything that a resume may change."""
    request, groups = chat.request, range(len(bench.groups))
    return (
        request.state,
        (request.capacity_tokens, request.history_tokens, request.committed_tokens),
        [chat.row(group) for group in groups],
        [request.written_from(GroupId(group)) for group in groups],
        request.reuse_status(),
        [bench.manager.num_free_pages(GroupId(group)) for group in groups],
        bench.cache.statistics.reused_pages,
        bench.cache.statistics.copied_pages,
    )


def complete(chat):
    return [status.complete for status in chat.request.reuse_status()]


# ---- what is selected


@pytest.mark.parametrize("second", [(), (1,)])
def test_another_selection_may_follow_a_resume_that_found_no_room(make, second):
    bench = make(OPTIONAL, pages=6)
    bench.publish(1, words(10))
    hog = bench.open(2, words(8, salt=2))
    hog.request.resize(8)
    for first in ((), (1,)):
        reader = bench.create(3, words(10))
        before = picture(bench, reader)
        assert reader.resume(*first) is NO_ROOM
        assert picture(bench, reader) == before
        if first:
            hog.close()
        else:
            reader.close()
    taken = bench.page(words(10), 0, 1).slot
    assert reader.resume(*second) is OK
    assert (reader.row(1)[0] == taken) == bool(second)


def test_what_was_left_out_is_incomplete_from_then_on(make):
    bench = make(OPTIONAL, window=8)
    bench.publish(1, words(24))
    chat = bench.create(2, words(24))
    assert complete(chat) == [True, True]
    with pytest.raises(SpecError, match="optional_groups entry 0 is 'required, complete=True'"):
        chat.request.resume([FULL])
    assert complete(chat) == [True, True]
    assert chat.resume() is OK
    assert (complete(chat), chat.request.reuse_status()[1].coverage) == ([True, False], ())
    taking = bench.open(3, words(24), 1)
    assert complete(taking) == [True, True]


# ---- the watermark


def test_where_nothing_runs_the_watermark_stops_nobody(make):
    """Without a host tier nobody can free the pages of suspended requests: they would wait for each other for ever."""
    bench = make(pages=11, reuse=ReuseOptions(max_utilisation=0.5))
    first, second = (bench.open(n, words(16, salt=n)) for n in (1, 2))
    first.compute(16, commit=False)
    second.compute(16, commit=False)
    first.suspend()
    assert first.resume() is CROWDED
    second.suspend()
    assert first.resume() is OK
    assert second.resume() is CROWDED
    first.suspend()
    assert second.resume() is OK
    second.close()
    assert first.resume() is OK, "it is alone"


def test_requests_that_were_closed_do_not_count_as_running(make):
    bench = make(pages=11, reuse=ReuseOptions(max_utilisation=0.5))
    waiting = bench.open(1, words(24))
    waiting.compute(24, commit=False)
    waiting.suspend()
    idle = bench.manager.create_request(2)
    assert waiting.resume() is CROWDED
    idle.close()
    assert waiting.resume() is OK


def test_the_watermark_does_not_count_what_the_request_itself_leaves_out(make_bench, make_layer):
    layers = make_layer(0, window=4), make_layer(1, heads=2, reuse_policy=OPTIONAL)
    bench = make_bench(*layers, pages=11, reuse=ReuseOptions(max_utilisation=0.6))
    bench.publish(1, words(20))
    runs = bench.open(2, words(8, salt=2))
    runs.request.resize(8)
    chat = bench.create(3, words(20))
    assert bench.cache.utilisation(1) == pytest.approx(0.7)
    before = picture(bench, chat)
    assert chat.resume(1) is CROWDED
    assert picture(bench, chat) == before
    assert chat.resume() is OK


# ---- copies that fail


class OutOfMemoryCopier(PageCopier):
    """Copies some pages, and fails."""

    def copy(self, moves):
        super().copy(dict(list(moves.items())[:1]))
        raise RuntimeError("copy: out of memory")


@pytest.mark.parametrize("policy", ReusePolicy)
def test_a_failed_copy_of_a_partial_block_leaves_the_claim_as_it_was(make, policy):
    bench = make(policy, pages=24)
    bench.publish(1, words(18))
    manager = bench.manager
    right, wrong = manager._source.copy_pages, OutOfMemoryCopier(manager.layout, manager.pools).copy
    manager._source = replace(manager._source, copy_pages=wrong)
    chat = bench.create(2, words(18))
    manager._source = replace(manager._source, copy_pages=right)
    groups = [1] if policy is OPTIONAL else []
    before = picture(bench, chat)
    with pytest.raises(RuntimeError, match="copy: out of memory"):
        chat.resume(*groups)
    bench.check()
    assert picture(bench, chat) == before
    chat.request._source = manager._source
    assert chat.resume(*groups) is OK
    assert bench.cache.statistics.copied_pages == (1 if policy is PRIVATE else 2)
    chat.tokens = words(22)
    chat.compute(22)


@pytest.mark.parametrize("copy", ["store", "load"])
def test_a_failed_copy_to_or_from_the_host_leaves_a_suspended_request_as_it_was(make, copy):
    bench = make(pages=7, host=12)
    chat = bench.open(1, words(20))
    chat.compute(20, commit=False)
    chat.suspend()
    rival = bench.open(2, words(16, salt=2))
    rival.compute(16, commit=False)
    rival.suspend()
    assert bench.cache.statistics.stored_pages
    before = picture(bench, chat), picture(bench, rival), bench.cache.statistics.loaded_pages
    bench.tier.broken = copy
    with pytest.raises(RuntimeError, match=f"{copy}: out of memory"):
        chat.resume()
    bench.check()
    assert (picture(bench, chat), picture(bench, rival), bench.cache.statistics.loaded_pages) == before
    bench.tier.broken = ""
    assert chat.resume() is OK
    chat.commit(20)
    chat.suspend()
    assert rival.resume() is OK
    rival.commit(16)


@pytest.mark.parametrize("copy", ["store", "load"])
def test_a_failed_copy_to_or_from_the_host_leaves_a_claim_with_what_it_had_selected(make, copy):
    bench = make(OPTIONAL, pages=7, host=12)
    bench.publish(1, words(18))
    rival = bench.open(2, words(24, salt=2))
    rival.compute(24, commit=False)
    rival.suspend()
    chat, other = bench.create(3, words(18)), bench.create(4, words(18))
    bench.tier.broken = copy
    for each, groups in ((chat, [1]), (other, [])):
        with pytest.raises(RuntimeError, match=f"{copy}: out of memory"):
            each.resume(*groups)
        bench.check()
        assert each.request.state is RequestState.SUSPENDED
        assert complete(each) == [True, bool(groups)], "what was left out is gone, and said to be"
    bench.tier.broken = ""
    assert chat.resume(1) is OK
    chat.suspend()
    with pytest.raises(SpecError, match="optional_groups entry 1 is 'optional, complete=False'"):
        other.resume(1)
    assert other.resume() is OK


def test_a_step_whose_copy_to_the_host_fails_changes_nothing(make):
    """Slots it gave back first are its own again, wherever they had gone."""
    bench = make(window=8, pages=9, host=20)
    chat = bench.open(1, words(24))
    chat.stop()
    chat.compute(16, commit=False)
    rival = bench.open(2, words(12, salt=2))
    rival.compute(12, commit=False)
    rival.suspend()
    before = picture(bench, chat)
    bench.tier.broken = "store"
    with pytest.raises(RuntimeError, match="store: out of memory"):
        chat.request.resize(24, history_tokens=24)
    bench.check()
    assert picture(bench, chat) == before
    bench.tier.broken = ""
    chat.compute(24, commit=False)
    chat.suspend()
    assert rival.resume() is OK
    rival.commit(12)


# ---- the end of a suspended request


@pytest.mark.parametrize("policy", ReusePolicy)
def test_a_suspended_request_publishes_its_partial_end_when_it_is_closed(make, policy):
    bench = make(policy)
    chat = bench.open(1, words(14))
    chat.compute(14)
    chat.suspend()
    assert bench.probe(words(14)) == 12
    chat.close()
    assert bench.probe(words(14)) == 14
    reader = bench.create(2, words(14))
    assert complete(reader) == [True, policy is not PRIVATE]
    assert reader.resume(*([1] if policy is OPTIONAL else [])) is OK


def test_a_suspended_request_publishes_its_end_from_the_host(make):
    bench = make(pages=6, host=12)
    chat = bench.open(1, words(14))
    chat.compute(14)
    chat.suspend()
    rival = bench.open(2, words(20, salt=2))
    rival.compute(20, commit=False)
    rival.close()
    chat.close()
    assert bench.page(words(14), 3, 0).slot == -1, "on the host"
    assert bench.open(3, words(14)).request.committed_tokens == 14


def test_a_suspended_request_publishes_nothing_that_is_there_already(make):
    bench = make()
    chats = [bench.open(n, words(14), claim_limit=0) for n in (1, 2)]
    for chat in chats:
        chat.compute(14)
        chat.suspend()
    chats[0].close()
    page, free = bench.page(words(14), 3, 0), bench.free(0)
    chats[1].close()
    assert (bench.page(words(14), 3, 0), bench.free(0)) == (page, free + 1)


def test_a_suspended_request_publishes_blocks_again_that_left_the_tree(make):
    bench = make()
    chat = bench.open(1, words(14))
    chat.compute(14)
    chat.suspend()
    bench.unlink(words(14), 1, 0)
    assert bench.probe(words(14)) == 4
    chat.close()
    assert bench.probe(words(14)) == 14


def test_tokens_that_were_not_committed_are_not_published_at_the_end(make):
    bench = make()
    chat = bench.open(1, words(14))
    chat.compute(9)
    chat.compute(14, commit=False)
    chat.suspend()
    chat.close()
    assert bench.probe(words(14)) == 9
