"""The match against an oracle that tries every length from the lookup downwards, position by position."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from unikv.cached_page import CachedPage
from unikv.ids import GroupId
from unikv.layer_spec import LayerOwner, ReusePolicy
from unikv.layout import GroupLayout
from unikv.prefix_match import live_needs, live_ordinals, match_prefix, reuse_status
from unikv.prefix_tree import EVERYBODY, TOKEN_BYTES, PrefixTreeManager, ReuseScope, token_bytes


def group(number, window=None, sinks=0, policy=ReusePolicy.REQUIRED):
    return GroupLayout(
        group_id=GroupId(number),
        pool_group=number,
        owner=LayerOwner.TARGET,
        window=window,
        sink_blocks=sinks,
        reuse_policy=policy,
        layer_ids=(),
        pools=(),
    )


def put(node, group_id, span=None, valid_from=0):
    span = node.num_tokens if span is None else span
    page = CachedPage(group_id=GroupId(group_id), pool_group=group_id, slot=1, ordinal=node.ordinal, span=span)
    page.valid_from = valid_from
    node.take(page.group_id)
    node.put(page)


def plant(tree, tokens, tpb, scope=EVERYBODY):
    """Insert the blocks of a sequence, the last one in part; return the new nodes."""
    keys, node, new = token_bytes(tokens), tree.root(scope), []
    step = tpb * TOKEN_BYTES
    for start in range(0, len(keys), step):
        key = keys[start : start + step]
        before = set(node.children)
        if len(key) == step:
            node, _ = tree.insert(node, key)
            if key not in before:
                new.append(node)
        else:
            new.append(tree.insert_partial(node, key)[0])
    return new


def needed(group, n, tpb):
    """Positions of a group that a request with `n` final tokens reads: its sinks and its window."""
    low = 0 if group.window is None else max(0, n + 1 - group.window)
    return [p for p in range(n) if p >= low or p < group.sink_blocks * tpb]


def has(nodes, group, positions, tpb):
    for p in positions:
        page = nodes[p // tpb].pages[group.group_id]
        if page is None or not page.valid_from <= p % tpb < page.span:
            return False
    return True


@st.composite
def groups(draw):
    found = []
    for number in range(draw(st.integers(1, 4))):
        window = draw(st.one_of(st.none(), st.integers(1, 12)))
        sinks = 0 if window is None else draw(st.integers(0, 2))
        found.append(group(number, window, sinks, draw(st.sampled_from(ReusePolicy))))
    return found


@st.composite
def forests(draw):
    """A tree, its groups, and pages that are whole, short, late or missing."""
    tpb, layer_groups = draw(st.sampled_from([1, 2, 4])), draw(groups())
    tree = PrefixTreeManager(len(layer_groups), tpb)
    for tokens in draw(st.lists(st.lists(st.integers(0, 1), min_size=1, max_size=18), min_size=1, max_size=4)):
        plant(tree, tokens, tpb)
    for node in list(tree.nodes()):
        for each in layer_groups:
            kind = draw(st.sampled_from(["whole", "whole", "whole", "short", "late", "none"]))
            if kind == "none":
                continue
            span = node.num_tokens if kind != "short" else draw(st.integers(1, node.num_tokens))
            put(node, each.group_id, span, draw(st.integers(0, span - 1)) if kind == "late" else 0)
    return tree, layer_groups, tpb


@settings(max_examples=300)
@given(forests(), st.lists(st.integers(0, 1), max_size=18), st.booleans(), st.integers(0, 3))
def test_the_match_is_the_longest_that_every_required_group_serves(forest, tokens, partial, backoff):
    tree, layer_groups, tpb = forest
    keys = token_bytes(tokens)
    walked = tree.walk(EVERYBODY, keys)
    branches = tree.branches(EVERYBODY, walked, keys) if partial else []
    lines = [(walked, len(walked) * tpb), *(([*walked, node], len(walked) * tpb + common) for node, common in branches)]
    required = [each for each in layer_groups if each.reuse_policy is ReusePolicy.REQUIRED]
    optional = [each for each in layer_groups if each.reuse_policy is ReusePolicy.OPTIONAL]

    def longest(nodes, same):
        for n in range(max(0, same - backoff), 0, -1):
            if (partial or n % tpb == 0) and all(has(nodes, each, needed(each, n, tpb), tpb) for each in required):
                return n
        return 0

    lengths = [longest(nodes, same) for nodes, same in lines]
    best = max(lengths)
    match = match_prefix(
        tree, EVERYBODY, keys, layer_groups, tokens_per_block=tpb, partial=partial, backoff_tokens=backoff
    )
    assert match.num_tokens == best
    assert (match.divergence_tokens, match.lookup_tokens) == (max(same for _, same in lines), len(tokens))
    nodes = list(match.nodes)
    candidates = [line[: len(nodes)] for (line, _), length in zip(lines, lengths, strict=True) if length == best]
    assert nodes in candidates
    assert len(nodes) == -(-best // tpb)

    def complete_groups(line):
        return sum(has(line, each, needed(each, best, tpb), tpb) for each in optional)

    assert complete_groups(nodes) == max(map(complete_groups, candidates))
    for each in layer_groups:
        found = reuse_status(match, each, tpb)
        complete = best > 0 and each.reuse_policy is not ReusePolicy.PRIVATE
        assert found.complete == (complete and has(nodes, each, needed(each, best, tpb), tpb))
        covered = {p for span in found.coverage for p in range(span.lo, span.hi)}
        blocks = {p // tpb for p in needed(each, best, tpb)}
        if found.complete:
            assert {p for p in range(best) if p // tpb in blocks} <= covered <= set(range(best))
            assert all(a.hi < b.lo for a, b in zip(found.coverage, found.coverage[1:], strict=False))
        else:
            assert found.coverage == ()


@given(groups(), st.integers(0, 30), st.sampled_from([1, 2, 4]))
def test_live_blocks_are_those_with_a_position_that_is_read(layer_groups, length, tpb):
    for each in layer_groups:
        reads = needed(each, length, tpb)
        got = {o * tpb + i for o, span in live_needs(each, length, tpb) for i in range(span.lo, span.hi)}
        assert got >= set(reads)
        assert {p for p in got if p not in reads} == set(), "nothing is asked for that nobody reads"
        assert set(live_ordinals(each, length, tpb)) >= {p // tpb for p in reads}


@pytest.fixture
def tree():
    return PrefixTreeManager(2, 4)


def match(tree, tokens, *layer_groups, partial=True):
    return match_prefix(tree, EVERYBODY, token_bytes(tokens), layer_groups, tokens_per_block=4, partial=partial)


def test_nothing_matches_in_an_empty_tree(tree):
    assert match(tree, range(8), group(0)).num_tokens == 0
    assert match(tree, [], group(0)).nodes == ()


def test_a_short_page_cuts_inside_its_block(tree):
    for node in plant(tree, range(12), 4):
        put(node, 0, 3 if node.ordinal == 1 else 4)
    assert match(tree, range(12), group(0)).num_tokens == 7
    assert match(tree, range(12), group(0), partial=False).num_tokens == 4


def test_a_page_that_begins_late_serves_a_window_that_does_too(tree):
    for node in plant(tree, range(12), 4):
        put(node, 0, valid_from=2 if node.ordinal == 1 else 0)
    lengths = {n: match(tree, range(n), group(0, window=4)).num_tokens for n in range(4, 13)}
    assert lengths == {4: 4, 5: 4, 6: 4, 7: 4, 8: 4, 9: 9, 10: 10, 11: 11, 12: 12}


def test_a_cut_of_one_group_moves_the_windows_of_the_others(tree):
    """Group 0 ends the match at 8; there, group 1 needs block 1, which it does not at 12."""
    for node in plant(tree, range(12), 4):
        if node.ordinal != 2:
            put(node, 0)
        if node.ordinal != 1:
            put(node, 1)
    assert match(tree, range(12), group(0), group(1, window=4)).num_tokens == 4
    assert match(tree, range(12), group(1, window=4)).num_tokens == 12


@pytest.mark.parametrize("policy", [ReusePolicy.OPTIONAL, ReusePolicy.PRIVATE])
def test_only_required_groups_limit_the_match(tree, policy):
    for node in plant(tree, range(8), 4):
        put(node, 0)
    found = match(tree, range(8), group(0), group(1, policy=policy))
    assert found.num_tokens == 8
    assert not reuse_status(found, group(1, policy=policy), 4).complete


def test_a_window_of_one_token_needs_nothing_behind_it(tree):
    plant(tree, range(8), 4)
    assert match(tree, range(8), group(0, window=1)).num_tokens == 8
    assert match(tree, range(6), group(0, window=1)).num_tokens == 6


def test_other_scopes_are_not_looked_at(tree):
    for node in plant(tree, range(8), 4, scope=ReuseScope(salt="a")):
        put(node, 0)
    assert match(tree, range(8), group(0)).divergence_tokens == 0


def test_the_window_at_a_branch_decides_whether_a_drafter_can_go_on(tree):
    """At 270 a window of 64 begins at offset 15 of block 6, at 256 at offset 1; the page is there from 14 on."""
    drafter = group(0, window=64, policy=ReusePolicy.OPTIONAL)
    big = PrefixTreeManager(1, 32)
    for node in plant(big, range(288), 32):
        if node.ordinal >= 6:
            put(node, 0, valid_from=14 if node.ordinal == 6 else 0)
    ends = {}
    for end in (256, 269, 270, 288):
        found = match_prefix(big, EVERYBODY, token_bytes(range(end)), [drafter], tokens_per_block=32, partial=True)
        ends[end] = reuse_status(found, drafter, 32).complete
    assert ends == {256: False, 269: True, 270: True, 288: True}
