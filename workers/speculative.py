"""Greedy decoding with a drafter that never changes the outcome: every token is the target's own choice.

One step of a sequence that has `n` tokens (prompt and generated), the last of which has no KV yet::

    drafter  reads the tokens it has not seen (one, or two after a step that accepted everything), proposes k more
    target   reads the last token and the k proposals in one pass, names its own choice after each of them
    accept   the longest run of proposals equal to the target's choices, plus the target's next choice
    rewind   KV of the rejected proposals stays in the pages, unread, and is overwritten by the next step

This module decides; whatever runs a model is behind `DraftingRunner` and `DraftingSequence`.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Protocol

from unikv.cache_manager import UnifiedKVCacheManager
from unikv.errors import LocalProtocolError, SpecError, explain
from unikv.request import KVCacheRequest


class DraftingSequence(Protocol):
    """One request's target and drafter. Positions are absolute; KV before `position` must be there already."""

    def verify(self, tokens: Sequence[int], position: int) -> list[int]:
        """Run the target over `tokens` and return its greedy choice after each of them."""

    def propose(self, unseen: Sequence[int], position: int, count: int) -> list[int]:
        """Run the drafter over `unseen` and return its `count` greedy continuations, one pass each."""


class DraftingRunner(Protocol):
    """What the decoder needs of a model runner."""

    @property
    def manager(self) -> UnifiedKVCacheManager:
        """The manager whose pages hold the KV of target and drafter."""

    @property
    def max_draft_tokens(self) -> int:
        """Most tokens proposed a step; 0 without a drafter or where speculation is off."""

    def open_sequence(self, request: KVCacheRequest, *, draft_valid_from: int) -> DraftingSequence:
        """Return the sequence over the pages of `request`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationResult:
    """What one sequence produced.

    Attributes:
        tokens: generated tokens, the first one (from the prompt's pass) and the end token included.
        steps: passes of the target after the prompt.
        proposed: draft tokens the target looked at.
        accepted: those of them that became output.
        accepted_per_step: `accepted`, step by step.
    """

    tokens: tuple[int, ...]
    steps: int
    proposed: int
    accepted: int
    accepted_per_step: tuple[int, ...]

    @property
    def acceptance(self) -> float:
        """Share of the proposals that became output; 0.0 where nothing was proposed."""
        return self.accepted / self.proposed if self.proposed else 0.0

    @property
    def mean_acceptance_length(self) -> float:
        """Tokens per target pass after the prompt, the target's own token included; 0.0 without a pass."""
        return (len(self.tokens) - 1) / self.steps if self.steps else 0.0


@dataclass(frozen=True, slots=True)
class StepOutcome:
    """What one verification yields: the new tokens in order, and how many of them the drafter had right."""

    tokens: tuple[int, ...]
    accepted: int


def accept(proposals: Sequence[int], choices: Sequence[int], eos: Collection[int]) -> StepOutcome:
    """Return the tokens a step adds.

    Args:
        proposals: the drafter's `k` tokens.
        choices: the target's ``k + 1`` tokens; ``choices[i]`` follows ``proposals[:i]``.
        eos: tokens that end the sequence; nothing after the first of them counts.
    """
    if len(choices) != len(proposals) + 1:
        want = f"{len(proposals) + 1}, one more than proposals"
        raise SpecError(explain("speculative step", "choices", len(choices), want, "verify every proposal"))
    matched = 0
    while matched < len(proposals) and proposals[matched] == choices[matched]:
        matched += 1
    tokens = tuple(choices[: matched + 1])
    end = next((index + 1 for index, token in enumerate(tokens) if token in eos), len(tokens))
    return StepOutcome(tokens[:end], min(matched, end))


class SpeculativeDecoder:
    """Decodes one request to its end, lossless against plain greedy decoding.

    The request must hold exactly the prompt: history is the prompt's length, and target KV is there for all of it.
    The decoder takes what more capacity it needs, grows and rewinds it every step, and leaves the request open.

    Args:
        prompt_ids: the prompt's tokens.
        first_token: the target's choice after the prompt.
        draft_valid_from: first prompt position with draft KV: 0 where it was shared, the prompt's length where not.
        max_new_tokens: tokens to produce at most, `first_token` included; at least 1.
        eos: tokens that end the sequence; the end token is part of the result.

    Raises:
        SpecError: empty prompt, `max_new_tokens` below 1 or past the longest sequence, or `draft_valid_from` outside
            the prompt.
        LocalProtocolError: the request's history is not the prompt.
        CapacityError: no pages for the first step; nothing was changed.
    """

    def __init__(
        self,
        runner: DraftingRunner,
        request: KVCacheRequest,
        prompt_ids: Sequence[int],
        first_token: int,
        draft_valid_from: int,
        max_new_tokens: int,
        eos: Collection[int] = (),
    ) -> None:
        _check_arguments(request, len(prompt_ids), draft_valid_from)
        _check_length(request, len(prompt_ids), max_new_tokens, runner.manager.layout.max_seq_len)
        self._request = request
        self._eos = frozenset(eos)
        self._max_new_tokens = max_new_tokens
        self._width = runner.max_draft_tokens
        self._prompt_tokens = len(prompt_ids)
        needed = runner.manager.generation_capacity(self._prompt_tokens, self._width)
        if request.capacity_tokens < needed:
            request.resize(capacity_tokens=needed)
        self._sequence = runner.open_sequence(request, draft_valid_from=draft_valid_from)
        self._tokens = [first_token]
        self._drafted_to = self._prompt_tokens
        self._proposed = 0
        self._accepted: list[int] = []

    @property
    def done(self) -> bool:
        """Whether the end token or the last allowed token is there."""
        return len(self._tokens) >= self._max_new_tokens or self._tokens[-1] in self._eos

    def run(self) -> GenerationResult:
        """Take steps until `done` and return everything."""
        while not self.done:
            self.step()
        return self.result()

    def step(self) -> tuple[int, ...]:
        """Run one step and return the tokens it added.

        Raises:
            CapacityError: no pages for this step; nothing was changed, and the step may be tried again.
            LocalProtocolError: the sequence has ended.
        """
        if self.done:
            raise LocalProtocolError(
                explain(
                    f"request {self._request.request_id}", "step", "after the end", "a live sequence", "check `done`"
                )
            )
        # One token always comes from the target itself, so more proposals than this could never be used.
        count = min(self._width, self._max_new_tokens - len(self._tokens) - 1)
        self._request.grow(count)
        try:
            outcome = self._propose_and_verify(count)
        except BaseException:
            self._request.revert()
            raise
        self._settle(count, outcome)
        return outcome.tokens

    @property
    def final_tokens(self) -> int:
        """Leading tokens of prompt and output whose KV is in the pages of target and drafter both."""
        return min(self._position, self._drafted_to) if self._width else self._position

    def result(self) -> GenerationResult:
        """Return what has been produced so far."""
        return GenerationResult(
            tokens=tuple(self._tokens),
            steps=len(self._accepted),
            proposed=self._proposed,
            accepted=sum(self._accepted),
            accepted_per_step=tuple(self._accepted),
        )

    @property
    def _position(self) -> int:
        """Position of the newest token, the first one without target KV."""
        return self._prompt_tokens + len(self._tokens) - 1

    def _propose_and_verify(self, count: int) -> StepOutcome:
        proposals: list[int] = []
        if count:
            unseen = self._tokens[self._drafted_to - self._prompt_tokens :]
            proposals = self._sequence.propose(unseen, self._drafted_to, count)
        choices = self._sequence.verify([self._tokens[-1], *proposals], self._position)
        return accept(proposals, choices, self._eos)

    def _settle(self, count: int, outcome: StepOutcome) -> None:
        position = self._position
        self._tokens.extend(outcome.tokens)
        self._accepted.append(outcome.accepted)
        self._proposed += count
        if count:
            # The drafter read every proposal but its last one, and only the accepted ones count.
            self._drafted_to = position + 1 + min(outcome.accepted, count - 1)
        self._request.rewind(outcome.accepted, self._position)


def commit_output(request: KVCacheRequest, prompt_ids: Sequence[int], tokens: Sequence[int], final_tokens: int) -> None:
    """Publish what a decoded request has in its pages, prompt and output, for requests that continue it.

    Args:
        request: one that is over; it commits no more afterwards. Left alone if it takes no part in prefix reuse.
        prompt_ids: the prompt.
        tokens: the output.
        final_tokens: see `SpeculativeDecoder.final_tokens`.
    """
    if request.committing:
        sequence = [*prompt_ids, *tokens][:final_tokens]
        request.commit(sequence[request.committed_tokens :], is_end=True)


def _check_arguments(request: KVCacheRequest, prompt_tokens: int, draft_valid_from: int) -> None:
    thing = f"request {request.request_id}"
    if prompt_tokens < 1:
        raise SpecError(explain(thing, "prompt_ids", prompt_tokens, "at least 1 token", "give the prompt"))
    if not 0 <= draft_valid_from <= prompt_tokens:
        want = f"0 (shared) to {prompt_tokens} (nothing shared)"
        raise SpecError(explain(thing, "draft_valid_from", draft_valid_from, want, "count in prompt tokens"))
    if request.history_tokens != prompt_tokens:
        cure = "prefill the prompt, or receive its KV, before decoding"
        raise LocalProtocolError(explain(thing, "history_tokens", request.history_tokens, f"{prompt_tokens}", cure))


def _check_length(request: KVCacheRequest, prompt_tokens: int, max_new_tokens: int, longest: int | None) -> None:
    room = max_new_tokens if longest is None else longest - prompt_tokens
    if not 1 <= max_new_tokens <= room:
        want = "at least 1 token" if max_new_tokens < 1 else f"at most {room}, max_seq_len less the prompt"
        thing, cure = f"request {request.request_id}", "change the number of output tokens"
        raise SpecError(explain(thing, "max_new_tokens", max_new_tokens, want, cure))
