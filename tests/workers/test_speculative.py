"""The decoder against a toy language whose next token depends on every token before it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from unikv.budget import PoolBudget
from unikv.cache_manager import UnifiedKVCacheManager
from unikv.errors import CapacityError, LocalProtocolError, SpecError
from unikv.ids import LayerId, RequestId
from unikv.layer_spec import KVCacheLayerSpec, KVDtype, LayerOwner
from unikv.request import KVCacheRequest
from unikv.speculation import SpeculationShape
from workers.speculative import SpeculativeDecoder, accept

VOCABULARY = 7


def toy_choice(tokens: Sequence[int], salt: int = 0) -> int:
    state = salt
    for token in tokens:
        state = (state * 31 + token + 1) % 1_000_003
    return state % VOCABULARY


def greedy(prompt: Sequence[int], max_new_tokens: int, eos: set[int]) -> list[int]:
    tokens: list[int] = []
    while len(tokens) < max_new_tokens and not (tokens and tokens[-1] in eos):
        tokens.append(toy_choice([*prompt, *tokens]))
    return tokens


class ToySequence:
    """Target and drafter that know only the tokens written to their positions, as with a real KV cache."""

    def __init__(self, prompt: Sequence[int], draft_valid_from: int, wrong_every: int) -> None:
        self.target = dict(enumerate(prompt))
        self.draft = {position: token for position, token in enumerate(prompt) if position >= draft_valid_from}
        self.known = dict(enumerate(prompt))  # what the drafter cannot have seen, it answers from here
        self.wrong_every = wrong_every
        self.calls: list[tuple[int, int]] = []
        self.fail_once = False

    def verify(self, tokens: Sequence[int], position: int) -> list[int]:
        if self.fail_once:
            self.fail_once = False
            raise RuntimeError("out of luck")
        choices = []
        for offset, token in enumerate(tokens):
            self.target[position + offset] = token
            choices.append(toy_choice([self.target[at] for at in range(position + offset + 1)]))
        return choices

    def propose(self, unseen: Sequence[int], position: int, count: int) -> list[int]:
        self.calls.append((len(unseen), position))
        proposals: list[int] = []
        tokens = list(unseen)
        while len(proposals) < count:
            for token in tokens:
                self.draft[position] = token
                position += 1
            seen = [self.draft.get(at, self.known.get(at)) for at in range(position)]
            wrong = self.wrong_every and position % self.wrong_every == 0
            proposals.append((toy_choice([token for token in seen if token is not None]) + bool(wrong)) % VOCABULARY)
            tokens = proposals[-1:]
        return proposals


class ToyRunner:
    def __init__(self, manager: UnifiedKVCacheManager, sequence: ToySequence, width: int) -> None:
        self.manager = manager
        self.sequence = sequence
        self.max_draft_tokens = width
        self.draft_valid_from: int | None = None

    def open_sequence(self, request: KVCacheRequest, *, draft_valid_from: int) -> ToySequence:
        self.draft_valid_from = draft_valid_from
        return self.sequence


def toy_manager(width: int, *, pages: int = 40, max_seq_len: int = 64) -> UnifiedKVCacheManager:
    layers = [
        KVCacheLayerSpec(layer_id=LayerId(i), owner=owner, num_kv_heads=1, head_dim=8, dtype=KVDtype.FLOAT32)
        for i, owner in enumerate((LayerOwner.TARGET, LayerOwner.DRAFT))
    ]
    shape = SpeculationShape(max_draft_tokens=width, block_width=width, num_extra_kv_tokens=max(width - 1, 0))
    return UnifiedKVCacheManager(
        layers, tokens_per_block=4, max_seq_len=max_seq_len, pool=PoolBudget(pages=pages), speculation=shape
    )


def open_request(manager: UnifiedKVCacheManager, prompt_tokens: int) -> KVCacheRequest:
    request = manager.create_request(RequestId(1))
    request.resize(manager.context_capacity(0, prompt_tokens), prompt_tokens)
    return request


@pytest.fixture
def manager() -> Iterator[UnifiedKVCacheManager]:
    made = toy_manager(3)
    yield made
    made.close()


@pytest.mark.parametrize(
    ("proposals", "choices", "eos", "tokens", "accepted"),
    [
        ([], [5], set(), (5,), 0),
        ([1, 2, 3], [1, 2, 3, 4], set(), (1, 2, 3, 4), 3),
        ([1, 2, 3], [1, 9, 3, 4], set(), (1, 9), 1),
        ([1, 2, 3], [8, 2, 3, 4], set(), (8,), 0),
        ([1, 2, 3], [1, 2, 3, 4], {2}, (1, 2), 2),  # nothing counts after the end token
        ([1, 2, 3], [1, 9, 3, 4], {9}, (1, 9), 1),  # the end token was the target's own
        ([1, 2, 3], [1, 9, 3, 4], {3}, (1, 9), 1),  # an end token behind the first disagreement is nobody's choice
    ],
)
def test_accept_keeps_the_longest_agreement_and_one_token_more(proposals, choices, eos, tokens, accepted) -> None:
    outcome = accept(proposals, choices, eos)
    assert outcome.tokens == tokens
    assert outcome.accepted == accepted


def test_accept_wants_a_choice_after_every_proposal() -> None:
    with pytest.raises(SpecError, match=r"choices is 2, expected 3, one more than proposals"):
        accept([1, 2], [1, 2], ())


@given(
    prompt=st.lists(st.integers(0, VOCABULARY - 1), min_size=1, max_size=13),
    width=st.integers(0, 5),
    max_new_tokens=st.integers(1, 20),
    wrong_every=st.integers(0, 6),
    eos=st.sets(st.integers(0, VOCABULARY - 1), max_size=2),
    shared=st.booleans(),
)
@settings(max_examples=150, deadline=None)
def test_tokens_are_the_targets_own_whatever_the_drafter_does(prompt, width, max_new_tokens, wrong_every, eos, shared):
    manager = toy_manager(width)
    draft_valid_from = 0 if shared else len(prompt)
    sequence = ToySequence(prompt, draft_valid_from, wrong_every)
    request = open_request(manager, len(prompt))
    first = toy_choice(prompt)
    decoder = SpeculativeDecoder(
        ToyRunner(manager, sequence, width), request, prompt, first, draft_valid_from, max_new_tokens, eos
    )
    result = decoder.run()

    assert list(result.tokens) == greedy(prompt, max_new_tokens, eos)
    assert len(result.accepted_per_step) == result.steps
    assert sum(result.accepted_per_step) == result.accepted <= result.proposed <= width * result.steps
    ended_inside = result.tokens[-1] in eos
    # Every step adds its accepted drafts and one token of the target, unless an accepted draft ended the sequence.
    assert 1 + result.accepted + result.steps - len(result.tokens) in ((0, 1) if ended_inside else (0,))
    assert request.history_tokens == len(prompt) + len(result.tokens) - 1
    if wrong_every == 0 and not ended_inside:
        assert result.accepted == result.proposed
    manager.check_integrity()
    request.close()
    manager.close()


def test_a_drafter_that_is_always_right_fills_every_step_and_catches_up_with_two_tokens(manager) -> None:
    prompt = [1, 2, 3, 4, 5]
    sequence = ToySequence(prompt, 0, wrong_every=0)
    request = open_request(manager, len(prompt))
    result = SpeculativeDecoder(ToyRunner(manager, sequence, 3), request, prompt, toy_choice(prompt), 0, 13).run()
    request.close()

    assert result.accepted_per_step == (3, 3, 3)
    assert result.acceptance == 1.0
    assert result.mean_acceptance_length == 4.0
    # First the token after the prompt; then the last accepted draft, which it proposed but never read, and the newest.
    assert sequence.calls == [(1, 5), (2, 8), (2, 12)]


def test_the_last_step_proposes_no_more_than_can_be_used(manager) -> None:
    prompt = [1, 2, 3]
    request = open_request(manager, len(prompt))
    sequence = ToySequence(prompt, 0, wrong_every=0)
    result = SpeculativeDecoder(ToyRunner(manager, sequence, 3), request, prompt, toy_choice(prompt), 0, 6).run()
    request.close()
    assert result.accepted_per_step == (3, 0)  # 1 + 4, and one token is left for the target alone
    assert result.proposed == 3


def test_without_a_drafter_every_step_yields_one_token(manager) -> None:
    prompt = [4, 4]
    request = open_request(manager, len(prompt))
    sequence = ToySequence(prompt, 0, wrong_every=0)
    result = SpeculativeDecoder(ToyRunner(manager, sequence, 0), request, prompt, toy_choice(prompt), 0, 5).run()
    request.close()
    assert (result.steps, result.proposed, result.acceptance) == (4, 0, 0.0)
    assert result.mean_acceptance_length == 1.0
    assert sequence.calls == []


def test_capacity_leads_the_history_by_the_same_amount_after_every_step(manager) -> None:
    prompt = [1, 2, 3, 4, 5, 6]
    request = open_request(manager, len(prompt))
    decoder = SpeculativeDecoder(
        ToyRunner(manager, ToySequence(prompt, 0, 3), 3), request, prompt, toy_choice(prompt), 0, 20
    )
    lead = request.capacity_tokens - request.history_tokens
    assert request.capacity_tokens == manager.generation_capacity(len(prompt), 3)
    leads = set()
    for _ in range(3):
        decoder.step()
        leads.add(request.capacity_tokens - request.history_tokens)
    request.close()
    assert leads == {lead}


def test_a_step_that_fails_leaves_no_trace_and_can_be_repeated(manager) -> None:
    prompt = [1, 2, 3]
    request = open_request(manager, len(prompt))
    sequence = ToySequence(prompt, 0, wrong_every=0)
    decoder = SpeculativeDecoder(ToyRunner(manager, sequence, 3), request, prompt, toy_choice(prompt), 0, 9)
    before = (request.capacity_tokens, request.history_tokens, decoder.result())
    sequence.fail_once = True
    with pytest.raises(RuntimeError, match="out of luck"):
        decoder.step()
    assert (request.capacity_tokens, request.history_tokens, decoder.result()) == before
    assert list(decoder.run().tokens) == greedy(prompt, 9, set())
    request.close()


def test_a_step_without_pages_waits() -> None:
    manager = toy_manager(3, pages=5)  # four blocks of four tokens besides the null slot
    prompt = [1, 2, 3, 4, 5]
    request = open_request(manager, len(prompt))
    decoder = SpeculativeDecoder(
        ToyRunner(manager, ToySequence(prompt, 0, 0), 3), request, prompt, toy_choice(prompt), 0, 20
    )
    with pytest.raises(CapacityError):
        decoder.run()
    produced = decoder.result().tokens
    assert list(produced) == greedy(prompt, len(produced), set())
    with pytest.raises(CapacityError):
        decoder.step()
    assert decoder.result().tokens == produced
    manager.check_integrity()
    request.close()
    manager.close()


@pytest.mark.parametrize(
    ("change", "error", "text"),
    [
        ({"prompt_ids": []}, SpecError, "prompt_ids is 0, expected at least 1 token"),
        ({"max_new_tokens": 0}, SpecError, "max_new_tokens is 0, expected at least 1 token"),
        ({"max_new_tokens": 62}, SpecError, "max_new_tokens is 62, expected at most 61, max_seq_len less the prompt"),
        ({"draft_valid_from": 4}, SpecError, r"draft_valid_from is 4, expected 0 \(shared\) to 3 \(nothing shared\)"),
        ({"prompt_ids": [1, 2]}, LocalProtocolError, "history_tokens is 3, expected 2; prefill the prompt"),
    ],
)
def test_arguments_that_cannot_be_decoded_are_refused(manager, change, error, text) -> None:
    request = open_request(manager, 3)
    arguments = {"prompt_ids": [1, 2, 3], "first_token": 0, "draft_valid_from": 0, "max_new_tokens": 5} | change
    with pytest.raises(error, match=text):
        SpeculativeDecoder(ToyRunner(manager, ToySequence([1, 2, 3], 0, 0), 3), request, **arguments)
    request.close()


def test_the_runner_hears_how_much_draft_kv_there_is_and_the_end_is_final(manager) -> None:
    request = open_request(manager, 3)
    runner = ToyRunner(manager, ToySequence([1, 2, 3], 2, 0), 3)
    decoder = SpeculativeDecoder(runner, request, [1, 2, 3], 0, 2, 1)
    assert runner.draft_valid_from == 2
    assert decoder.done
    assert decoder.run().tokens == (0,)
    with pytest.raises(LocalProtocolError, match=r"step is 'after the end', expected a live sequence; check `done`"):
        decoder.step()
    request.close()
