"""A drafter must find in the cache, or compute again, everything that it reads behind the prompt."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from unikv.claim_cap import ClaimPlan, claim_cap
from unikv.errors import SpecError
from unikv.ids import GroupId
from unikv.layer_spec import LayerOwner, ReusePolicy

DRAFT = GroupId(1)
WINDOW, BLOCK = 64, 32


def cap(prompt, window, match, branch, *, complete=False, block=BLOCK, partial=True):
    return claim_cap(prompt, window, match, branch, complete=complete, tokens_per_block=block, partial=partial)


@pytest.mark.parametrize(
    ("prompt", "window", "match", "branch", "claim"),
    [
        (300, 64, 288, None, 237),
        (300, 64, 288, 270, 206),
        (50, 64, 48, None, 0),
        (300, 64, 200, None, 200),
        (300, 64, 235, 235, 235),
        (300, 64, 236, 236, 172),
        (300, 64, 200, 270, 200),
        (40, 64, 39, 30, 0),
        (10, 1, 9, None, 9),
        (10, 1, 10, None, 9),
        (1, 8, 1, None, 0),
        (0, 8, 0, None, 0),
    ],
)
def test_what_the_drafter_reads_is_computed_again(prompt, window, match, branch, claim):
    assert cap(prompt, window, match, branch).claim_tokens == claim


def test_a_branch_near_the_end_is_published_with_its_window():
    assert cap(300, 64, 270, 270) == ClaimPlan(claim_tokens=206, publish_at=270)
    assert cap(300, 64, 235, 235).publish_at is None, "further than a window from the end: it would cost too much"
    assert cap(300, 64, 288, None).publish_at is None


def test_without_partial_blocks_claim_and_branch_end_where_blocks_do():
    assert cap(300, 64, 288, None, partial=False) == ClaimPlan(claim_tokens=224, publish_at=None)
    assert cap(300, 64, 256, 270, partial=False) == ClaimPlan(claim_tokens=192, publish_at=256)


def test_a_complete_window_needs_no_cap():
    assert cap(300, 64, 270, 270, complete=True) == ClaimPlan(claim_tokens=270, publish_at=None)
    assert cap(300, 64, 300, 300, complete=True) == ClaimPlan(claim_tokens=299, publish_at=None)
    assert cap(300, 64, 300, 300, complete=True, partial=False) == ClaimPlan(claim_tokens=288, publish_at=None)


@pytest.mark.parametrize(
    ("name", "arguments"),
    [
        ("prompt_tokens", (-1, 8, 0, None)),
        ("window", (8, 0, 0, None)),
        ("match_tokens", (8, 8, -1, None)),
    ],
)
def test_impossible_counts_are_refused(name, arguments):
    with pytest.raises(SpecError, match=f"claim cap: {name} is .*, expected >= . tokens"):
        cap(*arguments)
    with pytest.raises(SpecError, match="claim cap: tokens_per_block is 0"):
        cap(8, 8, 8, None, block=0)


@settings(max_examples=500)
@given(st.data(), st.integers(1, 80), st.integers(1, 24), st.sampled_from([1, 2, 4, 8]), st.booleans(), st.booleans())
def test_the_claim_is_the_longest_after_which_nothing_is_missing(data, prompt, window, block, partial, complete):
    unit = 1 if partial else block
    match = data.draw(st.integers(0, prompt - 1)) // unit * unit
    branch = data.draw(st.one_of(st.none(), st.integers(match, prompt - 1)))
    plan = cap(prompt, window, match, branch, complete=complete, block=block, partial=partial)

    def suffices(claim):
        """Whether the drafter has its KV where it needs it; that of the claim's end needs the token before."""
        written = set(range(claim + 1 if claim else 0, prompt))
        if complete and claim == match:
            written |= set(range(max(0, match + 1 - window), prompt))
        reads = set(range(max(0, prompt + 2 - window), prompt))
        if plan.publish_at is not None:
            reads |= set(range(max(0, plan.publish_at + 1 - window), plan.publish_at))
        return reads <= written

    longest = max(claim for claim in range(0, match + 1, unit) if claim == 0 or suffices(claim))
    assert plan.claim_tokens == longest
    assert suffices(plan.claim_tokens)
    if plan.publish_at is not None:
        assert not complete
        assert plan.claim_tokens <= plan.publish_at < prompt
        assert branch - plan.publish_at < unit
        assert plan.publish_at % unit == 0
        assert plan.publish_at >= prompt - window


# ---- with a manager


def words(count, salt=0):
    return [1000 * salt + i for i in range(count)]


def drafter_complete(bench, tokens, limit=None):
    probe = bench.manager.probe(tokens, claim_limit=limit)
    return probe.num_tokens, probe.status[DRAFT].complete


def plan_for(bench, tokens):
    """What an engine does: the match, then its last full block, then the cap."""
    probe = bench.manager.probe(tokens)
    match, complete = probe.num_tokens, probe.status[DRAFT].complete
    aligned = match // BLOCK * BLOCK
    if not complete and aligned and drafter_complete(bench, tokens, aligned) == (aligned, True):
        match, complete = aligned, True
    return claim_cap(
        len(tokens), WINDOW, match, probe.divergence_tokens, complete=complete, tokens_per_block=BLOCK, partial=True
    ), complete


@pytest.fixture
def bench(make_bench, make_layer):
    draft = make_layer(1, heads=2, owner=LayerOwner.DRAFT, window=WINDOW, reuse_policy=ReusePolicy.OPTIONAL)
    return make_bench(make_layer(0), draft, tokens_per_block=BLOCK)


def transferred(bench, request_id, tokens):
    """A request whose prompt came from elsewhere: the drafter has the window at its end and nothing before."""
    chat = bench.open(request_id, tokens)
    chat.request.resize(len(tokens), history_tokens=len(tokens))
    first = len(tokens) + 1 - WINDOW
    chat.write(0, 0, len(tokens))
    chat.write(1, first, len(tokens))
    chat.request.mark_written(DRAFT, first)
    chat.first = {0: 0, 1: first}
    chat.commit(len(tokens), is_end=True)
    chat.close()


def run(bench, request_id, tokens):
    """Prefill and publish a prompt as its plan says."""
    plan, complete = plan_for(bench, tokens)
    groups = (DRAFT,) if complete else ()
    chat = bench.open(request_id, tokens, *groups, claim_limit=plan.claim_tokens, whole_prompt=False)
    assert chat.request.committed_tokens == plan.claim_tokens
    for end in (plan.publish_at, len(tokens)):
        if end is not None:
            chat.compute(end)
    assert complete or chat.first[DRAFT] <= max(0, len(tokens) + 1 - WINDOW)
    chat.close()
    return plan


def test_the_second_branch_finds_the_window_that_the_first_published(bench):
    shared = words(270)
    transferred(bench, 1, [*shared, *words(130, salt=1)])
    first = [*shared, *words(30, salt=2)]
    assert drafter_complete(bench, first) == (270, False)
    assert run(bench, 2, first) == ClaimPlan(claim_tokens=206, publish_at=270)
    assert bench.page(first, 6, DRAFT).valid_from == 14
    assert drafter_complete(bench, [*shared, *words(30, salt=3)]) == (270, True)
    assert drafter_complete(bench, [*shared[:256], *words(30, salt=4)]) == (256, False)
    assert run(bench, 3, [*shared, *words(30, salt=3)]) == ClaimPlan(claim_tokens=270, publish_at=None)


def test_a_match_inside_a_block_falls_back_to_the_block_before(bench):
    """The drafter lacks the partial block alone: recomputing a few tokens is enough."""
    tokens = words(300)
    bench.publish(1, tokens[:270])
    bench.unlink(tokens[:270], 8, DRAFT)
    assert drafter_complete(bench, tokens) == (270, False)
    assert run(bench, 2, tokens) == ClaimPlan(claim_tokens=256, publish_at=None)
    assert drafter_complete(bench, [*tokens[:270], *words(9, salt=5)]) == (270, True)


def test_without_a_branch_near_the_end_a_window_is_computed_again(bench):
    tokens = words(300)
    transferred(bench, 1, [*tokens[:200], *words(200, salt=1)])
    assert run(bench, 2, tokens) == ClaimPlan(claim_tokens=200, publish_at=None)
    bench.unlink(tokens, 9, DRAFT)
    bench.unlink(tokens, 8, DRAFT)
    assert drafter_complete(bench, tokens) == (299, False)
    assert run(bench, 3, tokens) == ClaimPlan(claim_tokens=235, publish_at=299)
    assert drafter_complete(bench, tokens) == (299, True)


def test_a_short_prompt_is_computed_again_as_a_whole(bench):
    tokens = words(50)
    bench.publish(1, tokens)
    bench.unlink(tokens, 0, DRAFT)
    bench.unlink(tokens, 1, DRAFT)
    assert run(bench, 2, tokens) == ClaimPlan(claim_tokens=0, publish_at=49)
    assert drafter_complete(bench, tokens) == (49, True)
