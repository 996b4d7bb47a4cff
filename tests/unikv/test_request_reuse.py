"""What a request takes over from earlier ones, what it leaves for later ones, and what happens when it pauses."""

import numpy as np
import pytest

from unikv.errors import CapacityError, LocalProtocolError, SpecError, UnknownLayerError
from unikv.ids import NO_PAGE, GroupId, RequestId
from unikv.layer_spec import LayerOwner, ReusePolicy
from unikv.page_table import export_row
from unikv.prefix_tree import ReuseScope
from unikv.ranges import Span
from unikv.request import RequestState, ResumeResult
from unikv.reuse_options import ReuseOptions

FULL, WINDOW, SECOND = GroupId(0), GroupId(1), GroupId(2)
REQUIRED, OPTIONAL, PRIVATE = ReusePolicy.REQUIRED, ReusePolicy.OPTIONAL, ReusePolicy.PRIVATE
OK, FULL_POOL = ResumeResult.OK, ResumeResult.OUT_OF_PAGES


def words(count, salt=0):
    """Tokens of which no two are the same."""
    return [1000 * salt + i for i in range(count)]


@pytest.fixture
def make(make_bench, make_layer):
    """A full REQUIRED group 0 and windowed groups of the given (policy, window[, sinks])."""

    def build(*windowed, **kw):
        specs = [make_layer(0)]
        for number, (policy, window, *sinks) in enumerate(windowed, start=1):
            fields = {"window": window, "sink_tokens": sinks[0] if sinks else 0, "reuse_policy": policy}
            specs.append(make_layer(number, heads=1 + number, **fields))
        return make_bench(*specs, **kw)

    return build


def status(chat, group_id):
    found = chat.request.reuse_status()[group_id]
    return found.endpoint_tokens, found.complete, [(span.lo, span.hi) for span in found.coverage]


def published(bench):
    """All token lines in the tree with the groups that have a page there."""
    lines = {}
    for node in bench.nodes():
        keys, at = [], node
        while at.parent is not None:
            keys.append(at.key)
            at = at.parent
        tokens = np.frombuffer(b"".join(reversed(keys)), dtype=np.int64).tolist()
        lines[tuple(tokens)] = tuple(page.group_id for page in node.pages if page is not None)
    return lines


# ---- taking over


def test_a_prompt_is_taken_over_but_for_its_last_token(make):
    bench = make()
    bench.publish(1, words(12))
    assert bench.probe(words(12), whole_prompt=False) == 11
    chat = bench.open(2, words(12), whole_prompt=False)
    assert (chat.request.committed_tokens, chat.request.history_tokens, chat.request.capacity_tokens) == (11, 11, 11)
    chat.compute(12)
    assert bench.cache.statistics.copied_pages == 1


def test_an_empty_prompt_takes_nothing_and_may_commit(make):
    bench = make()
    bench.publish(1, words(8))
    chat = bench.create(2, [])
    request = chat.request
    assert (request.state, request.committed_tokens, request.divergence_tokens) == (RequestState.SUSPENDED, 0, 0)
    assert chat.resume() is OK
    chat.tokens = [9, 9, 9, 9]
    chat.compute(4)
    assert request.committed_tokens == 4
    assert bench.probe([9, 9, 9, 9]) == 4


def test_a_request_without_tokens_runs_at_once_and_cannot_commit(make):
    request = make().manager.create_request(RequestId(1))
    assert request.state is RequestState.ACTIVE
    request.resize(4)
    with pytest.raises(LocalProtocolError, match=r"request 1: commit\(\) is 'no part in prefix reuse'"):
        request.commit([1])
    assert request.reuse_status() == ()


@pytest.mark.parametrize("tokens", [[1.5], ["a"], [2**70], [[1], [2, 3]], [None]])
def test_tokens_that_are_no_integers_are_refused_and_nothing_is_open(make, tokens):
    bench = make()
    with pytest.raises(SpecError, match="prefix: tokens is"):
        bench.manager.create_request(RequestId(1), tokens)
    with pytest.raises(SpecError, match="prefix: tokens is"):
        bench.manager.probe(tokens)
    bench.manager.create_request(RequestId(1))


def test_a_negative_claim_limit_is_refused(make):
    with pytest.raises(SpecError, match="claim_limit is -1, expected >= 0 tokens"):
        make().manager.create_request(RequestId(1), words(4), claim_limit=-1)


@pytest.mark.parametrize("limit", [0, 1, 5, 8, 11, 12, 99])
def test_a_claim_limit_caps_what_is_taken_over(make, limit):
    bench = make()
    bench.publish(1, words(12))
    assert bench.probe(words(12), claim_limit=limit) == min(limit, 12)
    assert bench.open(2, words(12), claim_limit=limit).request.committed_tokens == min(limit, 12)


@pytest.mark.parametrize("partial", [True, False])
@pytest.mark.parametrize(("committed", "lookup", "on"), [(48, 64, 48), (48, 48, 48), (64, 48, 48), (48, 40, 40)])
def test_the_last_block_is_used_in_part_only_where_that_is_on(make, partial, committed, lookup, on):
    bench = make(tokens_per_block=32, reuse=ReuseOptions(partial_blocks=partial))
    bench.publish(1, words(committed))
    assert bench.probe(words(lookup)) == (on if partial else 32)
    assert bench.open(2, words(lookup)).request.committed_tokens == (on if partial else 32)


def test_a_long_prompt_is_taken_over_with_its_partial_block(make):
    bench = make(tokens_per_block=32)
    bench.publish(1, words(345))
    chat = bench.open(2, [*words(345), *words(7, salt=5)])
    assert chat.request.committed_tokens == 345
    assert (bench.cache.statistics.reused_pages, bench.cache.statistics.copied_pages) == (10, 1)


def test_scopes_never_match_each_other(make):
    bench = make()
    scopes = [ReuseScope(lora_id=a, salt=b) for a, b in ((7, "x"), (7, "y"), (8, "x"), (7, None), (None, "x"))]
    bench.publish(1, words(8), scope=scopes[0])
    assert bench.probe(words(8), scope=ReuseScope(lora_id=7, salt="x")) == 8
    assert [bench.probe(words(8), scope=scope) for scope in [*scopes[1:], ReuseScope()]] == [0] * 5
    bench.publish(2, words(8), scope=scopes[1])
    pages = {node.pages[0].slot for node in bench.nodes()}
    assert len(pages) == 4, "nothing is shared between scopes"


@pytest.mark.parametrize("length", [23, 24])
def test_a_private_group_gets_its_own_pages_and_the_others_are_taken_over(make, length):
    bench = make((PRIVATE, 8))
    first = bench.open(1, words(length))
    first.compute(length)
    first.stop()
    second = bench.open(2, words(length))
    assert second.request.committed_tokens == length
    assert second.live(1) == first.live(1) == [4, 5]
    assert not set(second.row(1)[4:]) & set(first.row(1)[4:])
    assert second.row(0)[:5] == first.row(0)[:5]
    assert (second.row(0)[5] == first.row(0)[5]) == (length % 4 == 0)
    assert status(second, 1) == (length, False, [])


def test_a_windowed_group_takes_over_its_live_blocks_only(make):
    bench = make((REQUIRED, 8))
    bench.publish(1, words(24))
    chat = bench.open(2, words(24))
    assert (chat.live(0), chat.live(1)) == (list(range(6)), [4, 5])
    assert status(chat, 1) == (24, True, [(16, 24)])


def test_the_window_includes_the_token_that_comes_next(make):
    """At history 7 a window of 4 reaches back to position 4: the first block is not needed."""
    bench = make((REQUIRED, 4))
    bench.publish(1, words(8))
    bench.unlink(words(8), 0, 1)
    assert [bench.probe(words(n)) for n in (6, 7, 8)] == [0, 7, 8]


@pytest.mark.parametrize(("tokens", "backoff", "taken"), [(32, 3, 29), (2, 3, 0), (3, 3, 0), (32, 0, 32)])
def test_tokens_a_drafter_reads_ahead_are_computed_again(make, tokens, backoff, taken):
    bench = make(reuse=ReuseOptions(backoff_tokens=backoff))
    bench.publish(1, words(tokens))
    assert bench.probe(words(tokens)) == taken
    chat = bench.open(2, words(tokens))
    assert chat.request.committed_tokens == taken
    chat.compute(tokens)


@pytest.mark.parametrize(("limit", "lookup"), [(None, 65), (64, 65), (63, 64), (0, 0), (99, 65)])
def test_tokens_a_drafter_reads_ahead_are_looked_up_as_evidence(make, limit, lookup):
    bench = make(reuse=ReuseOptions(backoff_tokens=1))
    assert bench.manager.probe(words(65), claim_limit=limit).lookup_tokens == lookup


@pytest.mark.parametrize(
    ("window", "kept"), [(None, None), (5, 6), (14, 15), (15, None), (16, None)], ids=lambda value: f"{value}"
)
def test_windows_grow_by_what_a_drafter_reads_ahead(make_bench, make_layer, window, kept):
    bench = make_bench(make_layer(0, window=window), max_seq_len=16, reuse=ReuseOptions(backoff_tokens=1))
    assert bench.groups[0].window == kept


def test_a_window_of_one_token_publishes_nothing_of_a_page_it_did_not_find(make):
    """It reads nothing of the block it goes on in, so that its page may be missing."""
    bench = make((REQUIRED, 1))
    bench.publish(1, words(6))
    bench.unlink(words(6), 1, 1)
    chat = bench.open(3, words(8))
    assert chat.request.committed_tokens == 6
    chat.compute(8)
    assert bench.page(words(8), 1, 1).valid_from == 2


def test_a_window_of_one_token_publishes_nothing_of_a_page_that_ended_before_it(make):
    bench = make((REQUIRED, 1))
    bench.publish(1, words(6))
    bench.open(2, words(8), claim_limit=0).compute(8, skip={1: 8})
    assert [bench.page(words(8), 1, group).span for group in (0, 1)] == [4, 2]
    chat = bench.open(3, [*words(7), 5])
    assert chat.request.committed_tokens == 7
    chat.compute(8)
    assert bench.page([*words(7), 5], 1, 1).valid_from == 3


def test_where_the_prompts_part_is_told_even_if_less_can_be_taken_over(make):
    bench = make((REQUIRED, 8))
    bench.publish(1, words(24))
    bench.unlink(words(24), 3, 1)
    chat = bench.open(2, [*words(18), 5555])
    assert (chat.request.divergence_tokens, chat.request.committed_tokens) == (18, 12)


def test_a_probe_takes_nothing(make):
    bench = make((OPTIONAL, 8))
    bench.publish(1, words(24))
    free, statistics = bench.free(), bench.cache.statistics
    before = (statistics.reused_pages, statistics.fresh_pages)
    probe = bench.manager.probe(words(24), whole_prompt=True)
    assert [found.complete for found in probe.status] == [True, True]
    assert (statistics.reused_pages, statistics.fresh_pages, bench.free()) == (*before, free)


# ---- publishing


@pytest.mark.parametrize("chunks", [[12], [4, 12], [4, 9, 12], [7, 12], [11, 12], list(range(1, 13))])
@pytest.mark.parametrize("policy", ReusePolicy)
def test_how_a_prompt_is_chunked_makes_no_difference(make, chunks, policy):
    bench = make((policy, 4))
    chat = bench.open(1, words(12))
    for end in chunks:
        chat.compute(end)
    chat.close()
    groups = (0,) if policy is PRIVATE else (0, 1)
    assert published(bench) == {tuple(words(n)): groups for n in (4, 8, 12)}
    assert bench.probe(words(12)) == 12


@pytest.mark.parametrize("policy", ReusePolicy)
def test_one_commit_at_the_end_publishes_what_left_the_window_too(make, policy):
    bench = make((policy, 4))
    chat = bench.open(1, words(12))
    for end in range(1, 13):
        chat.compute(end, commit=False)
    assert bench.nodes() == []
    chat.commit(12, is_end=True)
    assert published(bench) == {tuple(words(n)): (0,) if policy is PRIVATE else (0, 1) for n in (4, 8, 12)}


def test_pages_that_wait_for_their_commit_are_not_readable(make):
    bench = make((REQUIRED, 4))
    chat = bench.open(1, words(12))
    chat.compute(12, commit=False)
    assert chat.live(1) == [2]
    assert chat.request.page_tables()[1].tolist()[:2] == [NO_PAGE, NO_PAGE]
    assert bench.free(1) == 63 - 3
    chat.commit(4)
    assert sum(page is not None for page in bench.nodes()[0].pages) == 2
    chat.request.stop_committing()
    assert bench.manager.num_free_pages(WINDOW) == 63 - 1, "one live, one idle, one given back"
    bench.check()


@pytest.mark.parametrize("policy", ReusePolicy)
def test_two_requests_with_the_same_tokens_end_with_the_same_pages(make, policy):
    bench = make((policy, 8))
    chats = [bench.open(i, words(24)) for i in (1, 2)]
    for chat in chats:
        chat.compute(24, commit=False)
    for chat in chats:
        chat.commit(24)
    first, second = chats
    assert first.row(0) == second.row(0)
    assert first.live(1) == second.live(1) == [4, 5]
    assert (first.row(1)[5] == second.row(1)[5]) == (policy is not PRIVATE)
    assert bench.free(0) == 63 - 6


def test_a_commit_beyond_the_capacity_changes_nothing(make):
    bench = make()
    chat = bench.open(1, words(12))
    chat.compute(8)
    with pytest.raises(SpecError, match="request 1: tokens to commit is 4, expected at most 0, up to the capacity"):
        chat.commit(12)
    assert chat.request.committed_tokens == 8
    with pytest.raises(SpecError, match="prefix: tokens is"):
        chat.request.commit([0.5])
    assert chat.request.committed_tokens == 8
    chat.compute(12)


def test_a_commit_raises_the_history(make):
    bench = make()
    chat = bench.open(1, words(8))
    chat.request.resize(8)
    chat.write(0, 0, 8)
    chat.commit(8)
    assert chat.request.history_tokens == 8


def test_a_commit_may_follow_behind_the_history(make):
    bench = make((REQUIRED, 64), tokens_per_block=32)
    chat = bench.open(1, words(96))
    chat.compute(48, commit=False)
    chat.commit(32)
    assert (chat.request.committed_tokens, chat.request.history_tokens) == (32, 48)
    assert bench.probe(words(48)) == 32


def test_nothing_is_committed_after_the_end(make):
    bench = make()
    chat = bench.open(1, words(8))
    chat.compute(6)
    chat.stop()
    chat.stop()
    chat.request.resize(8)
    with pytest.raises(LocalProtocolError, match=r"request 1: commit\(\) is 'stopped committing'"):
        chat.commit(8)
    assert bench.probe(words(8)) == 6


def test_an_empty_commit_at_the_end_is_a_stop(make):
    bench = make()
    chat = bench.open(1, words(8))
    chat.compute(6)
    chat.commit(6, is_end=True)
    assert bench.probe(words(8)) == 6


def test_the_owner_of_a_partial_block_goes_on_writing_behind_what_it_published(make):
    bench = make(tokens_per_block=8)
    chat = bench.open(1, words(16))
    chat.compute(13)
    chat.stop()
    slot = chat.row(0)[1]
    chat.compute(16, commit=False)
    assert chat.row(0)[1] == slot
    assert bench.probe(words(16)) == 13


def test_a_branch_writes_into_a_copy(make):
    """Offsets 5 and 6 of the second block belong to the branch; the page it came from must not change."""
    bench = make(tokens_per_block=8)
    first = bench.open(1, words(13))
    first.compute(13)
    first.stop()
    branch = bench.open(2, [*words(12), 91, 92, 93, 94])
    assert branch.request.committed_tokens == 12
    assert branch.row(0)[0] == first.row(0)[0]
    assert branch.row(0)[1] != first.row(0)[1]
    branch.compute(15)
    first.tokens += words(3, salt=3)
    first.compute(16, commit=False)
    branch.compute(16)
    assert sorted(len(tokens) for tokens in published(bench)) == [8, 13, 16]


def test_a_partial_block_does_not_move_onto_a_longer_one(make):
    bench = make(tokens_per_block=8)
    bench.publish(1, words(16))
    own = bench.open(2, words(13), claim_limit=0)
    own.compute(13)
    slot = own.row(0)[1]
    own.stop()
    assert own.row(0)[1] == slot
    assert own.row(0)[0] == bench.page(words(8), 0, 0).slot
    own.tokens = [*words(13), 71, 72, 73]
    own.compute(16, commit=False)
    assert bench.probe(words(16)) == 16


@pytest.mark.parametrize("longer", [14, 16])
def test_a_longer_block_replaces_the_partial_one_it_covers(make, longer):
    bench = make((OPTIONAL, 8), tokens_per_block=8)
    bench.publish(1, words(13))
    assert len(bench.nodes()) == 2
    bench.publish(2, words(longer))
    assert published(bench) == {tuple(words(8)): (0, 1), tuple(words(longer)): (0, 1)}
    assert bench.page(words(longer), 1, 0).span == longer - 8


def test_a_longer_block_adopts_pages_it_lacks_with_their_spans(make):
    bench = make((OPTIONAL, 16), tokens_per_block=8)
    bench.publish(1, words(13))
    second = bench.open(2, words(16))
    second.compute(16, skip={1: 16})
    assert published(bench)[tuple(words(16))] == (0, 1)
    assert [bench.page(words(16), 1, group).span for group in (0, 1)] == [8, 5]
    assert status(bench.create(3, words(16)), 1) == (16, False, [])
    assert status(bench.create(4, words(13)), 1) == (13, True, [(0, 13)])


def test_a_partial_end_that_lost_a_page_gets_one_from_the_next_request(make):
    bench = make((OPTIONAL, 8))
    bench.publish(1, words(14))
    bench.unlink(words(14), 3, 1)
    again = bench.open(2, words(14), claim_limit=0)
    again.compute(14)
    slots = again.row(0), again.row(1)
    again.stop()
    assert (again.row(0), again.row(1)) == slots, "its last block stays its own: it goes on writing there"
    assert status(bench.create(3, words(14)), 1) == (14, True, [(4, 14)])


@pytest.mark.parametrize("end", [14, 16])
def test_the_start_of_a_longer_block_that_lost_a_page_gets_one_with_a_short_span(make, end):
    bench = make((OPTIONAL, 8))
    bench.publish(1, words(end))
    bench.unlink(words(end), 3, 1)
    again = bench.open(2, words(13), claim_limit=0)
    again.compute(13)
    again.close()
    assert bench.page(words(end), 3, 1).span == 1
    assert [status(bench.create(n, words(n)), 1)[1] for n in (13, 14)] == [True, False]


def test_of_blocks_that_begin_alike_the_one_with_the_most_pages_serves(make):
    bench = make((REQUIRED, 8), (OPTIONAL, 8))
    for number, lost in enumerate([1, 2, None]):
        tokens = [*words(10), number, number]
        bench.publish(number, tokens, claim_limit=0)
        if lost is not None:
            bench.unlink(tokens, 2, lost)
    chat = bench.open(9, [*words(10), 77], 2)
    assert chat.request.committed_tokens == 10


def test_blocks_that_left_the_tree_are_published_again(make):
    bench = make()
    chat = bench.open(1, words(16))
    chat.compute(8)
    bench.unlink(words(8), 0, 0)
    assert bench.nodes() == []
    chat.compute(12)
    assert bench.probe(words(16)) == 12
    bench.unlink(words(12), 1, 0)
    chat.close()
    assert bench.probe(words(16)) == 12


def test_a_page_that_was_dropped_is_published_again_in_its_slot(make):
    bench = make((OPTIONAL, 64))
    bench.publish(1, words(8))
    bench.unlink(words(8), 1, 1)
    second = bench.open(2, words(8), claim_limit=0)
    second.compute(8, commit=False)
    slots = second.row(1)
    second.commit(8)
    assert second.row(1)[1] == slots[1], "its own page: the tree had none"
    assert second.row(1)[0] != slots[0], "the page of the tree"
    assert bench.page(words(8), 1, 1).slot == slots[1]


def test_a_closed_request_cannot_publish_for_its_successor(make):
    """A new request under the old id is another request: what comes late for the old one is refused."""
    bench = make()
    old = bench.open(1, words(8))
    old.compute(4)
    old.close()
    new = bench.open(1, words(8, salt=2))
    with pytest.raises(LocalProtocolError, match="request 1: state is 'closed'"):
        old.request.commit(words(8)[4:])
    with pytest.raises(LocalProtocolError, match="request 1: state is 'closed'"):
        old.request.mark_written(FULL, 0)
    assert new.request.committed_tokens == 0
    old.close()
    assert not new.request.closed


def test_private_pages_leave_nothing_in_the_tree(make_bench, make_layer):
    bench = make_bench(make_layer(0, reuse_policy=PRIVATE))
    for end in (8, 10):
        chat = bench.open(end, words(end))
        chat.compute(end)
        chat.stop()
        assert bench.nodes() == []
        chat.close()


# ---- optional groups


def test_status_of_optional_groups_and_what_can_be_selected(make):
    bench = make((OPTIONAL, 4), (OPTIONAL, 2))
    source = bench.open(1, words(8))
    source.compute(8)
    reader = bench.create(2, words(8))
    assert [status(reader, group) for group in range(3)] == [
        (8, True, [(0, 8)]),
        (8, True, [(4, 8)]),
        (8, True, [(4, 8)]),
    ]
    for wrong, got in ((0, "required, complete=True"), (-1, "no such group"), (3, "no such group")):
        with pytest.raises(SpecError, match=f"request 2: optional_groups entry {wrong} is '{got}', expected an OPT"):
            reader.request.resume([GroupId(wrong)])
        assert reader.request.state is RequestState.SUSPENDED
        bench.check()
    assert reader.resume(1) is OK
    assert reader.row(1)[1] == source.row(1)[1]
    assert reader.row(2)[1] != source.row(2)[1]
    reader.suspend()
    with pytest.raises(SpecError, match=r"request 2: optional_groups is \[2\], expected None from then on"):
        reader.request.resume([SECOND])
    assert reader.resume() is OK
    assert reader.row(1)[1] == source.row(1)[1]


CASES = [(8, 1, 2, 0, [1]), (8, 0, 4, 0, [1]), (20, 3, 10, 0, [2, 3, 4]), (20, 3, 6, 4, [0, 3, 4])]


@pytest.fixture
def twin_bench(make_bench, make_layer):
    """A full group, and two OPTIONAL groups with the same window, one of them the drafter's."""

    def build(window, sinks):
        fields = {"window": window, "sink_tokens": sinks, "reuse_policy": OPTIONAL}
        return make_bench(make_layer(0), make_layer(1, **fields), make_layer(2, owner=LayerOwner.DRAFT, **fields))

    return build


@pytest.mark.parametrize(("prefix", "tail", "window", "sinks", "ordinals"), CASES)
def test_an_optional_group_takes_over_exactly_its_live_blocks(twin_bench, prefix, tail, window, sinks, ordinals):
    bench = twin_bench(window, sinks)
    bench.publish(1, words(prefix + tail))
    reader = bench.create(2, words(prefix))
    assert reader.request.state is RequestState.SUSPENDED
    before = bench.cache.statistics.reused_pages
    assert reader.resume(1, 2) is OK
    assert reader.live(1) == reader.live(2) == ordinals
    taken = {ordinal: bench.page(words(prefix), ordinal, 1).slot for ordinal in ordinals}
    assert {ordinal: reader.row(1)[ordinal] for ordinal in ordinals} == taken
    assert bench.cache.statistics.reused_pages - before == prefix // 4 + 2 * len(ordinals)
    assert bench.cache.statistics.copied_pages == 0
    reader.suspend()
    counted = bench.cache.statistics.reused_pages
    assert reader.resume() is OK
    assert bench.cache.statistics.reused_pages == counted


@pytest.mark.parametrize(("prefix", "tail", "window", "sinks", "ordinals"), CASES)
def test_one_missing_page_makes_its_group_incomplete_and_no_other(twin_bench, prefix, tail, window, sinks, ordinals):
    for victim in ordinals:
        bench = twin_bench(window, sinks)
        bench.publish(1, words(prefix + tail))
        earlier = bench.create(2, words(prefix))
        bench.unlink(words(prefix), victim, 1)
        later = bench.create(3, words(prefix))
        assert status(later, 1) == (prefix, False, [])
        assert status(later, 2)[:2] == (prefix, True)
        with pytest.raises(SpecError, match="optional_groups entry 1 is 'optional, complete=False'"):
            later.request.resume([WINDOW])
        assert later.resume(2) is OK
        assert earlier.resume(1, 2) is OK, "claimed pages stay, whatever becomes of the tree"
        assert earlier.live(1) == ordinals


def test_declining_leaves_the_pages_for_others(twin_bench):
    bench = twin_bench(4, 0)
    bench.publish(1, words(8))
    declining = bench.create(2, words(8))
    assert declining.resume() is OK
    assert declining.row(1)[1] != bench.page(words(8), 1, 1).slot
    assert status(bench.create(3, words(8)), 1) == (8, True, [(4, 8)])


def test_what_is_declined_makes_room_for_the_same_resume(make):
    """All pages of group 1 are candidates; without it the request needs as many fresh ones."""
    bench = make((OPTIONAL, 9), pages=3)
    bench.publish(1, words(8))
    assert bench.free(1) == 0
    chat = bench.create(2, words(8))
    assert bench.manager.num_free_pages(WINDOW) == 0
    assert chat.resume() is OK
    assert chat.live(1) == [0, 1]
    assert status(bench.create(3, words(8)), 1) == (8, False, [])


def test_a_candidate_survives_its_source_and_pressure(make):
    bench = make((OPTIONAL, 9), pages=5)
    source = bench.open(1, words(8))
    source.compute(8)
    reader = bench.create(2, words(8))
    source.close()
    rival = bench.open(3, words(8, salt=3))
    rival.request.resize(8)
    with pytest.raises(CapacityError):
        rival.request.resize(12)
    bench.check()
    assert reader.resume(1) is OK
    assert reader.live(1) == [0, 1]


@pytest.mark.parametrize(("length", "partial"), [(80, True), (96, False)])
def test_an_optional_group_at_the_end_of_a_partial_block(make, length, partial):
    """A window of 64 reaches from 80 back to position 17: blocks 0 to 2, of which the last is a copy."""
    bench = make((OPTIONAL, 64), tokens_per_block=32)
    bench.publish(1, words(length))
    reader = bench.create(2, [*words(length), *words(30, salt=4)])
    assert status(reader, 1) == (length, True, [(0, 80)] if partial else [(32, 96)])
    assert reader.resume(1) is OK
    assert reader.request.committed_tokens == length
    assert reader.live(1) == ([0, 1, 2] if partial else [1, 2])
    assert bench.cache.statistics.copied_pages == 2 * partial
    assert (reader.row(1)[2] != bench.page(words(length), 2, 1).slot) == partial
    reader.compute(length + 30)


def test_an_optional_group_may_have_full_attention(make_bench, make_layer):
    bench = make_bench(make_layer(0), make_layer(1, heads=2, reuse_policy=OPTIONAL))
    bench.publish(1, words(10))
    bench.unlink(words(10), 1, 1)
    assert bench.probe(words(10)) == 10
    reader = bench.create(2, words(10))
    assert [status(reader, group) for group in (0, 1)] == [(10, True, [(0, 10)]), (10, False, [])]
    assert status(bench.create(3, words(4)), 1) == (4, True, [(0, 4)])


def test_an_unselected_group_needs_every_live_page_from_elsewhere(make):
    """A receiver asks the sender for the whole window, not only for what follows the match."""
    bench = make((OPTIONAL, 8))
    bench.publish(1, words(16))
    chat = bench.open(2, words(24))
    assert chat.request.committed_tokens == 16
    assert chat.live(1) == [2, 3]
    chat.request.resize(24)
    tables = chat.request.page_tables()
    assert [ordinal for ordinal, slot in enumerate(tables[1]) if slot != NO_PAGE] == [2, 3, 4, 5]
    chat.write(0, 16, 24)
    chat.write(1, 9, 24)  # as the transfer does
    chat.request.mark_written(WINDOW, 9)
    chat.first[1] = 9
    chat.commit(24)
    assert bench.page(words(24), 2, 1).valid_from == 0, "the page published first has all of it"
    assert status(bench.create(3, words(24)), 1) == (24, True, [(16, 24)])


def test_a_block_that_leaves_the_window_before_it_is_written_is_not_published(make):
    """The match ended inside block 1; a transfer of the rest of the prompt fills the window at its end only."""
    bench = make((REQUIRED, 4))
    bench.publish(1, words(6))
    chat = bench.open(2, words(20))
    assert chat.request.committed_tokens == 6
    chat.receive(20)
    chat.commit(20)
    assert [bench.page(words(20), ordinal, 1) is None for ordinal in range(5)] == [False, False, True, True, False]
    assert bench.page(words(20), 1, 1).span == 2, "the page of the first request"
    assert bench.probe(words(20)) == 20


def test_what_an_unselected_group_did_not_compute_is_not_published(make):
    bench = make((OPTIONAL, 8))
    bench.publish(1, words(16))
    for ordinal in range(4):
        bench.unlink(words(16), ordinal, 1)
    chat = bench.open(2, words(24))
    chat.compute(20)
    assert [bench.page(words(20), ordinal, 1) is None for ordinal in range(5)] == [True] * 4 + [False]
    assert status(bench.create(3, words(20)), 1) == (20, False, [])
    chat.compute(22)
    chat.compute(24)
    assert [status(bench.create(n, words(n)), 1)[1] for n in (21, 22, 23, 24)] == [False, False, True, True]


def test_a_drafter_that_skipped_the_start_says_so(make):
    bench = make((OPTIONAL, 8))
    chat = bench.open(1, words(16))
    chat.compute(16, skip={1: 6})
    pages = [bench.page(words(16), ordinal, 1) for ordinal in range(4)]
    assert [page and page.valid_from for page in pages] == [None, 2, 0, 0]
    with pytest.raises(SpecError, match="request 1: first_token is -1, expected >= 0 tokens"):
        chat.request.mark_written(WINDOW, -1)
    with pytest.raises(UnknownLayerError, match="group_id is 4"):
        chat.request.mark_written(GroupId(4), 0)
    reads = {n: status(bench.create(100 + n, words(n)), 1)[1] for n in (11, 12, 13, 14, 16)}
    assert reads == {11: False, 12: False, 13: True, 14: True, 16: True}


def test_a_page_that_ends_earlier_does_not_replace_one_that_begins_late(make):
    bench = make((OPTIONAL, 16))
    late = bench.open(1, words(8))
    late.compute(8, skip={1: 2})
    page = bench.page(words(8), 0, 1)
    bench.publish(2, words(3), claim_limit=0)
    assert bench.page(words(8), 0, 1) is page
    assert (page.valid_from, page.span) == (2, 4)


def test_requests_that_share_a_page_publish_anew_what_each_of_them_knows_of_it(make):
    """The first one did not write the start of the block. It shares a page that has it, and does not know."""
    bench = make((OPTIONAL, 16))
    bench.publish(1, words(8))
    shared = bench.page(words(8), 0, 1).slot
    unknowing, knowing = (bench.open(n, words(12), claim_limit=0) for n in (2, 3))
    unknowing.compute(8, skip={1: 2})
    knowing.compute(8)
    assert unknowing.row(1)[0] == knowing.row(1)[0] == shared
    bench.unlink(words(8), 0, 0)
    assert bench.nodes() == []
    unknowing.compute(12)
    assert (bench.page(words(8), 0, 1).slot, bench.page(words(8), 0, 1).valid_from) == (shared, 2)
    knowing.compute(12)
    assert (bench.page(words(8), 0, 1).slot, bench.page(words(8), 0, 1).valid_from) == (shared, 0)


def test_a_page_with_more_replaces_one_that_begins_late(make):
    bench = make((OPTIONAL, 16))
    late = bench.open(1, words(8))
    late.compute(8, skip={1: 2})
    assert bench.page(words(8), 0, 1).valid_from == 2
    bench.open(2, words(8), claim_limit=0).compute(8)
    assert bench.page(words(8), 0, 1).valid_from == 0
    assert late.row(1)[0] != bench.page(words(8), 0, 1).slot


def test_a_branch_off_a_transferred_prefix_matches_only_where_the_window_is_optional(make):
    """The receiver of a transfer has the window at the end and no other."""
    for policy, match in ((REQUIRED, 0), (OPTIONAL, 20)):
        bench = make((policy, 8))
        first = bench.open(1, words(40))
        first.request.resize(40, history_tokens=40)
        first.write(0, 0, 40)
        first.write(1, 33, 40)
        first.request.mark_written(WINDOW, 33)
        first.first = {0: 0, 1: 33}
        first.commit(40)
        assert bench.probe(words(40)) == 40
        branch = [*words(20), *words(9, salt=7)]
        assert bench.probe(branch) == match
        assert bench.manager.probe(branch).divergence_tokens == 20


def test_policies_have_groups_and_pools_of_their_own(make_bench, make_layer):
    fields = {"window": 8, "reuse_policy": REQUIRED}
    bench = make_bench(*(make_layer(i, **{**fields, "reuse_policy": policy}) for i, policy in enumerate(ReusePolicy)))
    assert [group.pool_group for group in bench.groups] == [0, 1, 2]


@pytest.mark.parametrize("fields", [{"sink_tokens": 5}, {"reuse_policy": OPTIONAL}, {"window": 9}])
def test_layers_that_differ_in_what_they_keep_are_kept_apart(make_bench, make_layer, fields):
    bench = make_bench(make_layer(0, window=8), make_layer(1, **{"window": 8, **fields}), make_layer(2, window=8))
    assert [group.layer_ids for group in bench.groups] == [(0, 2), (1,)]
    assert bench.groups[1].sink_blocks == (2 if "sink_tokens" in fields else 0)


# ---- dropping


def test_a_lost_full_attention_page_ends_the_match_and_takes_what_is_behind(make):
    bench = make((REQUIRED, 8))
    bench.publish(1, words(24))
    bench.unlink(words(24), 1, 0)
    assert bench.probe(words(24)) == 4
    assert list(published(bench)) == [tuple(words(4))]
    assert bench.free(1) == 63 - 1


def test_a_lost_window_page_is_missed_only_where_the_window_reaches_it(make):
    bench = make((REQUIRED, 8))
    bench.publish(1, words(24))
    bench.unlink(words(24), 2, 1)
    assert {n: bench.probe(words(n)) for n in (8, 10, 12, 16, 18, 19, 20, 24)} == {
        **{8: 8, 10: 8, 12: 8, 16: 8, 18: 8},
        **{19: 19, 20: 20, 24: 24},
    }


def test_a_lost_sink_takes_everything_behind_it(make):
    bench = make((REQUIRED, 4, 3))
    bench.publish(1, words(16))
    assert bench.probe(words(16)) == 16
    bench.unlink(words(16), 0, 1)
    assert bench.nodes() == []


def test_clearing_needs_all_requests_closed_and_ends_with_childless_roots(make):
    bench = make()
    chats = [bench.open(i, words(8, salt=i), scope=ReuseScope(lora_id=i)) for i in range(3)]
    for chat, still in zip(chats, (3, 2, 1), strict=True):
        with pytest.raises(LocalProtocolError, match=rf"{still} KV cache request\(s\) still open"):
            bench.manager.clear_reusable_blocks()
        chat.compute(8)
        chat.close()
    bench.publish(9, words(8))
    bench.unlink(words(8), 0, 0)
    bench.cache.tree.root(ReuseScope(lora_id=99))
    assert bench.manager.clear_reusable_blocks() == 6
    assert bench.manager.clear_reusable_blocks() == 0
    assert [bench.probe(words(8, salt=i), scope=ReuseScope(lora_id=i)) for i in range(3)] == [0, 0, 0]


def test_the_manager_does_not_close_before_its_requests(make):
    bench = make()
    chats = [bench.create(i, words(4)) for i in range(3)]
    for still in (3, 2, 1):
        with pytest.raises(LocalProtocolError, match=rf"{still} KV cache request\(s\) still open"):
            bench.manager.close()
        chats.pop().close()


# ---- suspending


def test_a_suspended_request_shows_no_page_anywhere(make):
    bench = make((OPTIONAL, 8))
    chat = bench.open(1, words(16))
    chat.compute(16)
    outside = np.full(6, 123, dtype=np.int32)
    chat.suspend()
    for group in (FULL, WINDOW):
        assert chat.request.page_table(group).tolist() == [NO_PAGE] * 4
        assert chat.request.page_tables()[group].tolist() == [NO_PAGE] * 4
        assert not bench.manager.block_table(group, [RequestId(1)]).any()
        export_row(chat.request.page_table(group), outside)
        assert outside.tolist() == [NO_PAGE] * 6
    assert (chat.request.history_tokens, chat.request.capacity_tokens, chat.request.num_blocks) == (16, 16, 4)
    assert chat.resume() is OK
    chat.tokens += [5, 6]
    chat.compute(18)


@pytest.mark.parametrize(
    ("name", "call"),
    [
        ("resize", lambda r: r.resize(1)),
        ("grow", lambda r: r.grow(1)),
        ("rewind", lambda r: r.rewind(0, 0)),
        ("extend", lambda r: r.extend(1)),
        ("revert", lambda r: r.revert()),
        ("commit", lambda r: r.commit([1])),
        ("stop_committing", lambda r: r.stop_committing()),
        ("mark_written", lambda r: r.mark_written(FULL, 0)),
        ("pin", lambda r: r.pin()),
        ("suspend", lambda r: r.suspend()),
        ("suspend", lambda r: r.revert_context(4)),
    ],
)
def test_a_suspended_request_refuses_work(make, name, call):
    bench = make()
    chat = bench.create(1, words(8))
    with pytest.raises(LocalProtocolError, match=rf"state is 'suspended', expected a state that allows {name}\(\)"):
        call(chat.request)
    bench.check()


def test_a_running_request_is_not_resumed(make):
    chat = make().open(1, words(8))
    with pytest.raises(LocalProtocolError, match=r"state is 'active', expected a state that allows resume\(\)"):
        chat.request.resume()


def test_without_a_host_tier_suspended_pages_stay_and_free_nothing(make):
    bench = make(pages=5)
    chat = bench.open(1, words(16))
    chat.compute(16, commit=False)
    chat.suspend()
    assert bench.manager.num_free_pages(FULL) == 0
    rival = bench.open(2, words(4, salt=2))
    with pytest.raises(CapacityError, match="needs 1 pages of pool group 0, where 0 of 4 are free"):
        rival.compute(4)
    assert chat.resume() is OK


def test_a_suspended_request_closes_without_a_trace(make):
    bench = make((PRIVATE, 8), pages=9)
    chat = bench.open(1, words(16))
    chat.compute(16, commit=False)
    chat.suspend()
    chat.close()
    assert [bench.free(group) for group in (0, 1)] == [8, 8]


def test_a_claim_that_never_runs_lets_its_pages_go(make):
    bench = make((OPTIONAL, 8), pages=9)
    bench.publish(1, words(16))
    claim = bench.create(2, words(16))
    assert [bench.manager.num_free_pages(group) for group in (FULL, WINDOW)] == [4, 6]
    claim.close()
    assert [bench.manager.num_free_pages(group) for group in (FULL, WINDOW)] == [8, 8]
    assert bench.probe(words(16)) == 16


def test_pages_waiting_for_their_commit_survive_a_suspension(make):
    bench = make((REQUIRED, 4))
    chat = bench.open(1, words(12))
    chat.compute(12, commit=False)
    chat.suspend()
    assert bench.manager.num_free_pages(WINDOW) == 63 - 3
    assert chat.resume() is OK
    chat.commit(12)
    assert published(bench) == {tuple(words(n)): (0, 1) for n in (4, 8, 12)}


def test_one_crowded_group_is_enough_to_refuse_a_resume(make):
    bench = make((OPTIONAL, 8), pages=11, reuse=ReuseOptions(max_utilisation=0.5))
    hog = bench.open(1, words(24))
    hog.compute(24, commit=False)
    hog.stop()
    assert [bench.cache.utilisation(group) for group in (0, 1)] == pytest.approx([0.6, 0.2])
    other = bench.create(2, words(4, salt=2))
    assert other.resume() is ResumeResult.OVER_UTILISATION
    assert other.request.state is RequestState.SUSPENDED
    hog.request.resize(24, 24)
    hog.close()
    assert other.resume() is OK


@pytest.mark.parametrize("limit", [0.0, -0.1, 1.1, float("nan")])
def test_a_limit_of_utilisation_is_a_share(limit):
    with pytest.raises(SpecError, match=r"max_utilisation is .*, expected in \(0, 1\]"):
        ReuseOptions(max_utilisation=limit)


def test_a_negative_back_off_is_refused():
    with pytest.raises(SpecError, match="backoff_tokens is -1"):
        ReuseOptions(backoff_tokens=-1)


def test_a_resume_waits_for_pages_and_loses_nothing(make):
    bench = make((PRIVATE, 64), pages=6)
    bench.publish(1, words(10))
    hog = bench.open(2, words(8, salt=2))
    hog.request.resize(8)
    chat = bench.create(3, words(10))
    before = bench.cache.statistics.reused_pages, bench.cache.statistics.copied_pages
    for _ in range(3):
        assert chat.resume() is FULL_POOL
        assert (chat.request.state, chat.request.committed_tokens) == (RequestState.SUSPENDED, 10)
        assert chat.request.reuse_status()[0].endpoint_tokens == 10
        assert (bench.cache.statistics.reused_pages, bench.cache.statistics.copied_pages) == before
    hog.close()
    assert chat.resume() is OK
    assert (chat.request.committed_tokens, chat.live(1)) == (10, [0, 1, 2])


# ---- with a host tier


def test_suspended_pages_give_way_and_come_back_with_their_content(make):
    bench = make((REQUIRED, 16), pages=25, host=64)
    chat = bench.open(1, words(88))
    chat.compute(88, commit=False)
    assert chat.request.num_blocks == 22
    shape = [chat.live(group) for group in (0, 1)]
    slots = chat.row(0)
    chat.suspend()
    other = bench.open(2, words(88, salt=2))
    other.compute(88, commit=False)
    assert bench.cache.statistics.stored_pages >= 20
    assert chat.resume() is FULL_POOL
    other.suspend()
    assert chat.resume() is OK
    assert [chat.live(group) for group in (0, 1)] == shape, "ordinals stay, whatever the slots"
    assert chat.row(0) != slots
    assert bench.cache.statistics.loaded_pages >= 20
    chat.commit(88)
    chat.suspend()
    assert other.resume() is OK
    other.commit(88)


def test_published_pages_go_to_the_host_before_they_are_dropped(make):
    bench = make(pages=5, host=4)
    bench.publish(1, words(16))
    bench.publish(2, words(16, salt=2))
    assert bench.cache.statistics.stored_pages == 4
    assert (bench.probe(words(16)), bench.probe(words(16, salt=2))) == (16, 16)
    chat = bench.open(3, words(16))
    assert bench.cache.statistics.loaded_pages == 4
    chat.close()
    bench.publish(4, words(16, salt=4))
    assert bench.cache.statistics.dropped_pages == 4


def test_a_request_publishes_onto_a_page_that_is_on_the_host(make):
    """The tree's page lives on in the slot of the request, which has the same content."""
    bench = make(pages=9, host=8)
    bench.publish(1, words(16))
    own = bench.open(2, words(16), claim_limit=0)
    own.compute(16, commit=False)
    rival = bench.open(3, words(16, salt=3))
    rival.compute(16, commit=False)
    page = bench.page(words(16), 0, 0)
    assert page.slot == NO_PAGE
    slots = own.row(0)
    own.commit(16)
    assert (page.slot, own.row(0)) == (slots[0], slots)
    assert bench.cache._cold[0].num_used == 0


def test_a_page_on_the_host_does_not_move_into_a_slot_with_less(make):
    """The drafter skipped the start of the block; what others would find there is anything."""
    bench = make((OPTIONAL, 16), pages=9, host=8)
    bench.publish(1, words(8))
    own = bench.open(2, words(8), claim_limit=0)
    own.compute(8, commit=False, skip={1: 6})
    rival = bench.open(3, words(20, salt=3))
    rival.compute(20, commit=False)
    page = bench.page(words(8), 1, 1)
    assert page.slot == NO_PAGE
    own.commit(8)
    assert (page.slot, page.valid_from) == (NO_PAGE, 0)
    rival.close()
    reader = bench.open(4, words(8), 1)
    assert reader.live(1) == [0, 1]


def test_pinned_pages_stay_while_their_request_is_suspended(make):
    bench = make(pages=9, host=8)
    chat = bench.open(1, words(16))
    chat.compute(16, commit=False)
    pin = chat.request.pin()
    chat.suspend()
    assert bench.manager.num_free_pages(FULL) == 4
    rival = bench.open(2, words(20, salt=2))
    with pytest.raises(CapacityError, match="needs 5 pages of pool group 0, where 4 of 8 are free"):
        rival.compute(20)
    assert [bench.cache.page_at(0, slot).slot for slot in pin.slots[FULL]] == list(pin.slots[FULL])
    pin.release()
    bench.check()
    rival.compute(20)
    rival.close()
    assert chat.resume() is OK


# ---- scheduling undone


def test_a_chunk_is_unscheduled_and_its_request_suspended(make):
    bench = make((OPTIONAL, 8), tokens_per_block=32)
    chat = bench.open(1, words(300))
    chat.compute(32)
    chat.request.resize(64)
    chat.request.resize(256)
    assert chat.request.revert_context(64) is True
    assert (chat.request.capacity_tokens, chat.request.history_tokens) == (64, 32)
    assert chat.request.state is RequestState.SUSPENDED
    bench.check()
    assert chat.resume() is OK
    assert bench.free(0) == 63 - 2


def test_a_prompt_that_has_passed_the_capacity_begins_anew(make):
    bench = make(tokens_per_block=32)
    chat = bench.open(1, words(300))
    chat.compute(256)
    assert chat.request.revert_context(64) is False
    assert chat.request.closed
    bench.check()
    assert bench.open(1, words(300)).request.committed_tokens == 256


def test_a_failed_step_leaves_pages_tables_and_numbers(make):
    bench = make((REQUIRED, 8), pages=9)
    chat = bench.open(1, words(16))
    chat.compute(16, commit=False)
    hog = bench.open(2, words(16, salt=2))
    hog.request.resize(16)
    before = [chat.row(group) for group in (0, 1)], chat.request.capacity_tokens, chat.request.history_tokens
    with pytest.raises(CapacityError):
        chat.request.resize(24, 16)
    assert ([chat.row(g) for g in (0, 1)], chat.request.capacity_tokens, chat.request.history_tokens) == before
    bench.check()
    hog.close()
    chat.tokens = words(24)
    chat.compute(24)
    assert published(bench)[tuple(words(4))] == (0, 1), "what waited for its commit was not lost"


def test_coverage_is_made_of_sinks_and_window(make):
    bench = make((REQUIRED, 6, 4), (OPTIONAL, 64))
    bench.publish(1, words(20))
    chat = bench.create(2, words(20))
    assert [found.coverage for found in chat.request.reuse_status()] == [
        (Span(0, 20),),
        (Span(0, 4), Span(12, 20)),
        (Span(0, 20),),
    ]
