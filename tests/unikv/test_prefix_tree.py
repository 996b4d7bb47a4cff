"""The tree of token blocks against a list of the sequences that were put in."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from unikv.cached_page import CachedPage
from unikv.errors import SpecError
from unikv.ids import GroupId
from unikv.prefix_tree import (
    EVERYBODY,
    MAX_SIBLINGS,
    TOKEN_BYTES,
    PrefixNode,
    PrefixTreeManager,
    ReuseScope,
    token_bytes,
)

TPB = 4


@pytest.fixture
def tree():
    return PrefixTreeManager(2, TPB)


def plant(tree, tokens, scope=EVERYBODY):
    """Insert a sequence block by block, its end in part; return its nodes."""
    node, found = tree.root(scope), []
    for start in range(0, len(tokens), TPB):
        key = token_bytes(tokens[start : start + TPB])
        if len(key) == TPB * TOKEN_BYTES:
            node, _ = tree.insert(node, key)
            found.append(node)
        else:
            found.append(tree.insert_partial(node, key)[0])
    return found


def counts(tree, tokens, *, partial=True, scope=EVERYBODY):
    """How many tokens of each block match, of the last one perhaps some."""
    keys = token_bytes(tokens)
    walked = tree.walk(scope, keys)
    branches = tree.branches(scope, walked, keys) if partial else []
    return [TPB] * len(walked) + sorted((common for _, common in branches), reverse=True)[:1]


def page(group_id=0):
    return CachedPage(group_id=GroupId(group_id), pool_group=0, slot=1, ordinal=99, span=TPB)


# ---- tokens


@pytest.mark.parametrize(
    "tokens", [[1, 2], (1, 2), np.array([1, 2]), np.array([1, 2], dtype=np.int32), np.array([1, 2], dtype=np.uint16)]
)
def test_tokens_of_any_integer_kind_have_the_same_bytes(tokens):
    assert token_bytes(tokens) == np.array([1, 2], dtype=np.int64).tobytes()


def test_no_tokens_are_no_bytes_and_negative_ones_are_tokens():
    assert token_bytes([]) == token_bytes(np.empty(0)) == b""
    assert len({token_bytes([i]) for i in (-1, 0, 1, 2**40, -(2**40))}) == 5


@pytest.mark.parametrize("tokens", [[1.0], ["1"], [None], [2**64], [[1, 2], [3]], [True, "x"]])
def test_what_is_no_token_is_refused(tokens):
    with pytest.raises(
        SpecError, match=r"prefix: tokens is .*, expected a sequence of integers of 64 bits; pass token"
    ):
        token_bytes(tokens)


# ---- growing


def test_a_node_knows_its_place(tree):
    first, second, end = plant(tree, range(10))
    assert [node.ordinal for node in (first.parent, first, second, end)] == [-1, 0, 1, 2]
    assert [node.num_tokens for node in (first.parent, first, second, end)] == [0, 4, 4, 2]
    assert (second.parent, end.parent, first.parent) == (first, second, tree.root(EVERYBODY))
    assert all(node.attached for node in (first, second, end))
    assert list(second.partials.values()) == [end]


def test_the_same_tokens_make_the_same_nodes(tree):
    assert plant(tree, range(8)) == plant(tree, range(8))
    assert len(list(tree.nodes())) == 2


def test_the_same_block_behind_another_prefix_is_another_node(tree):
    left, right = plant(tree, [1, 1, 1, 1, 9, 9, 9, 9])[1], plant(tree, [2, 2, 2, 2, 9, 9, 9, 9])[1]
    assert left is not right
    assert left.key == right.key


def test_scopes_have_trees_of_their_own(tree):
    names = [ReuseScope(lora_id=7), ReuseScope(salt="a"), ReuseScope(lora_id=7, salt="a"), EVERYBODY]
    for number, scope in enumerate(names):
        plant(tree, [number] * TPB, scope)
    for number, scope in enumerate(names):
        assert [counts(tree, [n] * TPB, scope=scope) for n in range(4)] == [
            [4] if n == number else [] for n in range(4)
        ]
    assert counts(tree, [0] * TPB, scope=ReuseScope(lora_id=8)) == []


def test_a_partial_block_that_is_covered_is_the_one_that_covers_it(tree):
    [whole], [partial] = plant(tree, [1, 2, 3, 4]), plant(tree, [5, 6, 7])
    root = tree.root(EVERYBODY)
    for tokens in ([1], [1, 2, 3], [5, 6], [5, 6, 7]):
        node = whole if tokens[0] == 1 else partial
        assert tree.insert_partial(root, token_bytes(tokens)) == (node, None)
    assert len(list(tree.nodes())) == 2


@pytest.mark.parametrize("longer", [[5, 6, 7], [5, 6, 7, 8]])
def test_a_longer_block_takes_the_place_of_the_one_it_covers(tree, longer):
    [short] = plant(tree, [5, 6])
    [other] = plant(tree, [5, 9])
    root, key = tree.root(EVERYBODY), token_bytes(longer)
    node, replaced = tree.insert(root, key) if len(longer) == TPB else tree.insert_partial(root, key)
    assert replaced is short
    assert (short.attached, other.attached, node.attached) == (False, True, True)
    assert set(tree.nodes()) == {node, other}


# ---- walking


def test_a_walk_ends_where_the_tokens_part(tree):
    plant(tree, range(12))
    for length, partial, want in [
        (0, True, []),
        (3, True, [3]),
        (4, True, [4]),
        (7, True, [4, 3]),
        (12, True, [4, 4, 4]),
        (7, False, [4]),
        (3, False, []),
    ]:
        assert counts(tree, range(length), partial=partial) == want
    assert counts(tree, [*range(6), 99, 7, 8]) == [4, 2]
    assert counts(tree, [*range(12), 99]) == [4, 4, 4]
    assert counts(tree, [99]) == []


def test_all_blocks_that_begin_alike_are_told_apart_by_how_far(tree):
    [whole], [partial], [other] = (plant(tree, tokens) for tokens in ([1, 2, 9, 9], [1, 2, 3], [5]))
    assert set(tree.branches(EVERYBODY, [], token_bytes([1, 2, 3, 4]))) == {(whole, 2), (partial, 3)}
    assert set(tree.branches(EVERYBODY, [], token_bytes([1, 5]))) == {(whole, 1), (partial, 1)}
    assert tree.branches(EVERYBODY, [], token_bytes([5, 5, 5, 5, 5])) == [(other, 1)]
    assert tree.branches(EVERYBODY, [whole], token_bytes([1, 2, 9, 9])) == []
    assert tree.branches(ReuseScope(salt="x"), [], token_bytes([1])) == []


def test_among_very_many_blocks_only_whole_ones_are_found(tree):
    for number in range(MAX_SIBLINGS):
        plant(tree, [7, number, 0, 0])
        assert counts(tree, [7, 0, 0]) == ([3] if number + 1 < MAX_SIBLINGS else [])
    assert counts(tree, [7, 5, 0, 0]) == [4]


@given(st.lists(st.lists(st.integers(0, 2), max_size=11), max_size=8), st.lists(st.integers(0, 2), max_size=11))
def test_a_walk_finds_the_longest_prefix_of_everything_put_in(sequences, tokens):
    tree = PrefixTreeManager(1, TPB)
    for sequence in sequences:
        plant(tree, sequence)

    def common(other):
        return next(
            (i for i, (a, b) in enumerate(zip(tokens, other, strict=False)) if a != b), min(map(len, (tokens, other)))
        )

    assert sum(counts(tree, tokens)) == max(map(common, sequences), default=0)
    assert sum(counts(tree, tokens, partial=False)) == max((common(s) // TPB * TPB for s in sequences), default=0)
    walked = tree.walk(EVERYBODY, token_bytes(tokens))
    assert b"".join(node.key for node in walked) == token_bytes(tokens[: len(walked) * TPB])
    blocks = {tuple(s[:end]) for s in sequences for end in range(TPB, len(s) + 1, TPB)}
    assert sum(node.num_tokens == TPB for node in tree.nodes()) == len(blocks)


# ---- shrinking


def test_a_detached_line_is_found_no_more_and_all_of_it_is_told(tree):
    first, second, third, end = plant(tree, range(14))
    gone = tree.detach(second)
    assert gone[0] is second
    assert set(gone) == {second, third, end}
    assert [node.attached for node in (first, second, third, end)] == [True, False, False, False]
    assert counts(tree, range(14)) == [4]
    assert plant(tree, range(8))[1] is not second


def test_a_root_without_children_is_forgotten(tree):
    [node] = plant(tree, range(4))
    root = tree.root(EVERYBODY)
    tree.detach(node)
    assert (root.attached, list(tree.nodes())) == (False, [])
    assert tree.root(EVERYBODY) is not root
    tree.root(ReuseScope(lora_id=3))
    assert list(tree.nodes()) == []


def test_a_very_long_line_is_detached_without_a_deep_stack(tree):
    nodes = plant(tree, range(TPB * 5000))
    assert len(list(tree.nodes())) == 5000
    assert len(tree.detach(nodes[0])) == 5000
    nodes = plant(tree, range(TPB * 5000))
    tree.prune(nodes[-1])
    assert list(tree.nodes()) == []


def test_pruning_stops_at_pages_children_and_the_root(tree):
    first, second, third = plant(tree, range(12))
    second.put(page())
    tree.prune(third)
    assert [node.attached for node in (first, second, third)] == [True, True, False]
    tree.prune(second)
    tree.prune(first)
    assert second.attached
    assert second.take(GroupId(0)) is not None
    tree.prune(first)
    assert first.attached, "it has a child"
    tree.prune(second)
    assert [node.attached for node in (first, second)] == [False, False]
    tree.prune(second)
    assert list(tree.nodes()) == []


def test_a_page_knows_its_node_as_long_as_it_is_there(tree):
    [node] = plant(tree, range(4))
    cached = page(1)
    node.put(cached)
    assert (cached.node, cached.ordinal) == (node, 0)
    assert [node.page(GroupId(group)) for group in (0, 1)] == [None, cached]
    assert (node.take(GroupId(1)), cached.node, node.take(GroupId(1))) == (cached, None, None)


def test_nodes_come_parents_first(tree):
    plant(tree, range(12))
    plant(tree, [0, 1, 2, 3, 9, 9])
    seen = set()
    for node in tree.nodes():
        assert node.parent.parent is None or node.parent in seen
        seen.add(node)
    assert len(seen) == 4
    assert all(isinstance(node, PrefixNode) for node in seen)
