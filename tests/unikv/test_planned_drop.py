"""Dropping the windows at the ends of conversations, and nothing that somebody still counts on."""

import pytest

from unikv.errors import LocalProtocolError
from unikv.layer_spec import ReusePolicy
from unikv.request import ResumeResult


def words(count, salt=0):
    return [1000 * salt + i for i in range(count)]


@pytest.fixture
def bench(make_bench, make_layer):
    return make_bench(make_layer(0), make_layer(1, heads=2, window=8), tokens_per_block=8)


def conversation(bench, request_id, tokens):
    """Compute and publish tokens; return the request and a plan for the window at their end."""
    chat = bench.open(request_id, tokens)
    chat.compute(len(tokens))
    chat.stop()
    return chat, chat.request.plan_drop()


def drop(bench, plan):
    count = plan.drop()
    bench.check()
    return count


@pytest.mark.parametrize("long_first", [True, False])
def test_a_drop_takes_the_window_at_its_own_end_only(bench, long_first):
    chats, plans = {}, {}
    for length in (24, 8) if long_first else (8, 24):
        chats[length], plans[length] = conversation(bench, length, words(length))
    for chat in chats.values():
        chat.close()
    assert drop(bench, plans[8]) == 1
    assert (bench.probe(words(8)), bench.probe(words(24))) == (0, 24)
    assert drop(bench, plans[24]) == 1
    assert bench.probe(words(24)) == 16


def test_full_attention_pages_stay(bench):
    chat, plan = conversation(bench, 1, words(24))
    chat.close()
    assert drop(bench, plan) == 1
    assert [bench.page(words(16), ordinal, 0) is not None for ordinal in (0, 1)] == [True, True]
    assert len(bench.nodes()) == 3


def test_two_conversations_with_one_end_drop_it_with_the_second(bench):
    plans = []
    for request_id in (1, 2):
        chat, plan = conversation(bench, request_id, words(24))
        plans.append(plan)
        chat.close()
    assert drop(bench, plans[0]) == 0
    assert bench.probe(words(24)) == 24
    assert drop(bench, plans[1]) == 1
    assert bench.probe(words(24)) == 16


def test_a_plan_is_kept_once(bench):
    chat, plan = conversation(bench, 1, words(24))
    chat.close()
    plan.drop()
    with pytest.raises(LocalProtocolError, match=r"planned drop: drop\(\) is 'a second call', expected one call"):
        plan.drop()
    bench.check()


def test_there_is_no_plan_before_the_end(bench):
    chat = bench.open(1, words(24))
    chat.compute(16)
    with pytest.raises(LocalProtocolError, match="request 1: state of its prefix is 'committing', expected stopped"):
        chat.request.plan_drop()
    request = bench.manager.create_request(2)
    with pytest.raises(LocalProtocolError, match="request 2: state of its prefix is 'no part in reuse'"):
        request.plan_drop()
    request.close()


def test_pages_in_use_are_not_dropped(bench):
    """By the conversation itself, by another that runs with them, by one that claimed them."""
    chat, plan = conversation(bench, 1, words(24))
    assert drop(bench, plan) == 0
    chat.close()
    for suspended in (False, True):
        chat, plan = conversation(bench, 2, words(24))
        chat.close()
        reader = bench.create(3, words(24))
        if not suspended:
            assert reader.resume() is ResumeResult.OK
        assert drop(bench, plan) == 0
        reader.close()
        assert bench.probe(words(24)) == 24


def test_what_left_the_tree_already_is_not_dropped_again(bench):
    chat, plan = conversation(bench, 1, words(24))
    chat.close()
    bench.unlink(words(24), 2, 1)
    assert drop(bench, plan) == 0
    chat, plan = conversation(bench, 2, words(24))
    chat.close()
    bench.unlink(words(24), 0, 0)
    assert drop(bench, plan) == 0
    assert bench.nodes() == []


@pytest.mark.parametrize("length", [20, 24])
def test_the_end_may_be_inside_a_block(bench, length):
    chat, plan = conversation(bench, 1, words(length))
    chat.close()
    assert drop(bench, plan) == (2 if length == 20 else 1)
    assert bench.probe(words(length)) == (8 if length == 20 else 16)


def test_two_conversations_with_one_end_inside_a_block(bench):
    plans = []
    for request_id in (1, 2):
        chat = bench.open(request_id, words(20), claim_limit=0)
        chat.compute(20)
        chat.stop()
        plans.append(chat.request.plan_drop())
        chat.close()
    assert drop(bench, plans[0]) == 0
    assert bench.probe(words(20)) == 20
    assert drop(bench, plans[1]) == 2


@pytest.mark.parametrize("policy", [ReusePolicy.OPTIONAL, ReusePolicy.PRIVATE])
def test_windows_that_decide_nothing_are_planned_where_they_are_published(make_bench, make_layer, policy):
    bench = make_bench(make_layer(0), make_layer(1, heads=2, window=8, reuse_policy=policy), tokens_per_block=8)
    chat, plan = conversation(bench, 1, words(24))
    chat.close()
    assert drop(bench, plan) == (policy is ReusePolicy.OPTIONAL)
    assert bench.probe(words(24)) == 24


def test_sinks_stay(make_bench, make_layer):
    """Others that begin alike need them, whether or not they have plans."""
    bench = make_bench(make_layer(0, window=8, sink_tokens=1), tokens_per_block=8)
    bench.publish(1, [*words(8), *words(24, salt=1)])
    chat, plan = conversation(bench, 2, words(24))
    chat.close()
    assert drop(bench, plan) == 1
    assert bench.probe(words(24)) == 16
    assert bench.probe([*words(8), *words(24, salt=1)]) == 32


def test_a_page_on_the_host_is_dropped_there(make_bench, make_layer):
    bench = make_bench(make_layer(0), make_layer(1, heads=2, window=8), tokens_per_block=8, pages=4, host=6)
    chat, plan = conversation(bench, 1, words(24))
    chat.close()
    rival = bench.open(2, words(24, salt=2))
    rival.compute(24, commit=False)
    assert bench.cache.statistics.stored_pages == 6
    assert drop(bench, plan) == 1
    assert bench.cache._cold[bench.groups[1].pool_group].num_used == 2
    assert bench.probe(words(24)) == 16
