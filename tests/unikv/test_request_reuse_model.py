"""Everything that may happen to prefixes, in random order: whoever reads a position finds the KV of its own tokens.

Many more steps have to be taken than a shrinking search can afford, so the steps come from seeds: a failure names its
seed, and the last step is the one that went wrong.
"""

from random import Random

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule, run_state_machine_as_test

from unikv.errors import CapacityError
from unikv.ids import NO_PAGE
from unikv.layer_spec import LayerOwner, ReusePolicy
from unikv.request import RequestState, ResumeResult
from unikv.reuse_options import ReuseOptions

MAX_TOKENS = 40
STEPS = 150
JUNK = -5


class Walk:
    """A cache of random shape, and what may happen to it."""

    def __init__(self, seed, make_bench, make_layer):
        self.rng = Random(seed)
        rng = self.rng
        count = rng.randint(1, 3)
        self.bench = make_bench(
            *(make_layer(i, **self.fields(drafts=i == count - 1)) for i in range(count)),
            tokens_per_block=rng.choice([1, 2, 4]),
            max_seq_len=64,
            pages=rng.choice([12, 20, 30, 45]),
            host=rng.choice([None, 0, 3, 10, 60]),
            reuse=ReuseOptions(partial_blocks=rng.random() < 0.8, backoff_tokens=rng.choice([0, 0, 0, 2])),
        )
        self.chats, self.next_id, self.pins, self.plans = [], 0, {}, []
        self.lines = [self.tokens(MAX_TOKENS) for _ in range(2)]

    def fields(self, *, drafts):
        rng = self.rng
        window = rng.choice([None, 1, 2, 4, 7, 9])
        return {
            "heads": rng.randint(1, 2),
            "owner": LayerOwner.DRAFT if drafts and rng.random() < 0.5 else LayerOwner.TARGET,
            "window": window,
            "sink_tokens": rng.choice([0, 0, 1, 5]) if window else 0,
            "reuse_policy": rng.choice([ReusePolicy.REQUIRED, *ReusePolicy]),
        }

    def tokens(self, count):
        return [self.rng.randint(0, 1) for _ in range(count)]

    def pick(self, *states):
        chats = [chat for chat in self.chats if chat.request.state in (states or (RequestState.ACTIVE,))]
        return self.rng.choice(chats) if chats else None

    def forget(self, chat):
        self.chats.remove(chat)
        self.bench.chats.remove(chat)

    def step(self):
        steps = {
            self.create: 4,
            self.resume: 3,
            self.suspend: 2,
            self.close: 2,
            self.compute: 10,
            self.receive: 2,
            self.commit: 3,
            self.speculate: 3,
            self.unschedule: 1,
            self.lose_a_page: 1,
            self.pin: 1,
            self.unpin: 1,
            self.plan_a_drop: 1,
            self.drop: 1,
        }
        [step] = self.rng.choices(list(steps), weights=list(steps.values()))
        step()
        self.bench.check()
        self.check_pins()

    # ---- beginning, pausing, ending

    def create(self):
        """A prompt that begins like an earlier one, for a while."""
        if len(self.chats) >= 4:
            return
        rng = self.rng
        tokens = [*rng.choice(self.lines)[: rng.randint(0, MAX_TOKENS)], *self.tokens(rng.choice([0, 1, 6]))]
        tokens = tokens[:MAX_TOKENS]
        limit = rng.choice([None, None, None, 0, rng.randint(0, MAX_TOKENS)])
        whole = rng.random() < 0.5
        priority = rng.choice([35, 35, 0, 70])
        probe = self.bench.manager.probe(tokens, claim_limit=limit, whole_prompt=whole)
        chat = self.bench.create(
            self.next_id, tokens, claim_limit=limit, whole_prompt=whole, priority=lambda *_: priority
        )
        assert chat.request.committed_tokens == probe.num_tokens <= probe.divergence_tokens <= probe.lookup_tokens
        assert chat.request.reuse_status() == probe.status
        assert limit is None or probe.num_tokens <= limit
        assert whole or probe.num_tokens <= max(0, len(tokens) - 1)
        self.next_id += 1
        self.chats.append(chat)
        self.lines = [*self.lines, tokens][-6:]
        if rng.random() < 0.8:
            self.resume_one(chat)

    def resume(self):
        chat = self.pick(RequestState.SUSPENDED)
        if chat is not None:
            self.resume_one(chat)

    def resume_one(self, chat):
        request = chat.request
        first = request._held is None
        complete = [
            status.group_id
            for status in request.reuse_status()
            if first and status.policy is ReusePolicy.OPTIONAL and status.group_id in request._claim.pages
        ]
        chosen = [group_id for group_id in complete if self.rng.random() < 0.7]
        numbers = request.capacity_tokens, request.history_tokens, request.committed_tokens
        result = chat.resume(*chosen)
        assert (result is ResumeResult.OK) == (request.state is RequestState.ACTIVE)
        assert (request.capacity_tokens, request.history_tokens, request.committed_tokens) == numbers

    def suspend(self):
        chat = self.pick()
        if chat is not None:
            chat.suspend()

    def close(self):
        chat = self.pick(RequestState.ACTIVE, RequestState.SUSPENDED)
        if chat is not None:
            chat.close()
            self.forget(chat)

    # ---- computing

    def compute(self):
        chat, rng = self.pick(), self.rng
        if chat is None:
            return
        begin = chat.request.history_tokens
        end = min(begin + rng.randint(1, 9), MAX_TOKENS)
        if end <= begin:
            return
        chat.tokens += self.tokens(max(0, end - len(chat.tokens)))
        self.lines = [*self.lines, list(chat.tokens)][-6:]
        optional = [g.group_id for g in self.bench.groups if g.reuse_policy is ReusePolicy.OPTIONAL]
        skip = {g: rng.randint(begin, end) for g in optional if rng.random() < 0.15}
        commit = rng.random() < 0.7 and chat.request._publisher.committing
        self.attempt(chat, end, lambda: chat.compute(end, commit=commit, skip=skip))

    def receive(self):
        """Tokens that come from elsewhere: the window moves before anything is written."""
        chat = self.pick()
        if chat is None or chat.request.history_tokens >= MAX_TOKENS:
            return
        end = self.rng.randint(chat.request.history_tokens, MAX_TOKENS)
        chat.tokens += self.tokens(max(0, end - len(chat.tokens)))
        self.attempt(chat, end, lambda: chat.receive(end), history=end)

    def attempt(self, chat, capacity, call, history=0):
        """Run a step that grows; where it is refused, nothing changed, and the pages were really not there."""
        request = chat.request
        before = self.picture(chat)
        needed = [0] * len(self.bench.cache.allocators)
        for group in self.bench.groups:
            stale = self.bench.manager._source.stale(group, max(history, request.history_tokens))
            new = range(request.num_blocks, -(-capacity // self.bench.tpb))
            needed[group.pool_group] += sum(ordinal not in stale for ordinal in new)
        fits = all(count <= self.bench.cache.available(number) for number, count in enumerate(needed))
        try:
            call()
        except CapacityError:
            assert not fits
            assert self.picture(chat) == before
            return False
        assert fits or history, "only a window that moves along can give back what is needed"
        return True

    def picture(self, chat):
        request = chat.request
        rows = [chat.row(group.group_id) for group in self.bench.groups]
        return rows, request.capacity_tokens, request.history_tokens, len(self.bench.nodes())

    def commit(self):
        chat = self.pick()
        if chat is not None and chat.request._publisher.committing:
            request = chat.request
            end = self.rng.randint(request.committed_tokens, max(request.committed_tokens, request.history_tokens))
            chat.commit(end, is_end=self.rng.random() < 0.4)

    def speculate(self):
        """One generation step: drafts are written behind the history, and some of them stay."""
        chat, rng = self.pick(), self.rng
        drafts = rng.randint(0, 4)
        if chat is None or chat.request.history_tokens + drafts + 1 >= MAX_TOKENS:
            return
        request = chat.request
        if not self.attempt(chat, request.capacity_tokens + 1 + drafts, lambda: request.grow(drafts)):
            return
        self.scribble(chat)
        if rng.random() < 0.2:
            request.revert()
            return
        accepted = rng.randint(0, drafts)
        end = request.history_tokens + 1 + accepted
        chat.tokens += self.tokens(max(0, end - len(chat.tokens)))
        for group in self.bench.groups:
            chat.write(group.group_id, request.history_tokens, end)
        request.rewind(accepted, end)

    def scribble(self, chat):
        """Write what nobody may ever read into every position that is not final."""
        tpb = self.bench.tpb
        for group in self.bench.groups:
            row = chat.row(group.group_id)
            for position in range(chat.request.history_tokens, len(row) * tpb):
                slot = row[position // tpb]
                if slot != NO_PAGE:
                    for layer_id in group.layer_ids:
                        self.bench.views[layer_id][slot, :, :, position % tpb] = JUNK
        self.bench.check()
        self.check_pins()

    def unschedule(self):
        chat = self.pick()
        if chat is not None:
            chat.request._growths.clear()
            if not chat.request.revert_context(max(0, chat.request.capacity_tokens - self.rng.randint(0, 9))):
                self.forget(chat)

    # ---- others

    def lose_a_page(self):
        pages = [page for node in self.bench.nodes() for page in node.pages if page and self.bench.cache.is_idle(page)]
        if pages:
            self.bench.cache.unlink(self.rng.choice(pages))

    def pin(self):
        chat = self.pick()
        if chat is None or len(self.pins) > 1:
            return
        history, tpb = chat.request.history_tokens, self.bench.tpb
        tables = chat.request.page_tables()
        held = []
        for group in self.bench.groups:
            for ordinal, slot in enumerate(tables[group.group_id].tolist()):
                end = max(0, min(tpb, history - ordinal * tpb))
                if slot != NO_PAGE:
                    views = [self.bench.views[layer_id] for layer_id in group.layer_ids]
                    held += [(view, slot, view[slot, 0, 0, :end, 0].copy()) for view in views]
        self.pins[chat.request.pin(tables)] = held

    def unpin(self):
        if self.pins:
            pin = self.rng.choice(list(self.pins))
            del self.pins[pin]
            pin.release()

    def check_pins(self):
        for held in self.pins.values():
            for view, slot, values in held:
                assert np.array_equal(view[slot, 0, 0, : len(values), 0], values)

    def plan_a_drop(self):
        chat = self.pick(RequestState.ACTIVE, RequestState.SUSPENDED)
        if chat is not None and not chat.request._publisher.committing:
            self.plans.append(chat.request.plan_drop())

    def drop(self):
        if self.plans:
            self.plans.pop(self.rng.randrange(len(self.plans))).drop()

    def end(self):
        for pin in self.pins:
            pin.release()
        self.pins = {}
        for chat in list(self.chats):
            chat.close()
            self.forget(chat)
        self.bench.finish()


@pytest.mark.parametrize("part", range(4))
def test_prefixes_in_any_order(part, make_bench, make_layer):
    for seed in range(part, settings().max_examples * 2 // 3, 4):
        walk = Walk(seed, make_bench, make_layer)
        for number in range(STEPS):
            try:
                walk.step()
            except BaseException as error:
                error.add_note(f"seed {seed}, step {number}")
                raise
        walk.end()


STEP_NAMES = (
    "create", "resume", "suspend", "close", "compute", "receive", "commit", "speculate", "unschedule", "lose_a_page",
    "pin", "unpin", "plan_a_drop", "drop",
)  # fmt: skip
LIKELY = ("create", "resume", "compute", "compute", "commit", "speculate")


def machine_of(make_bench, make_layer):
    """Return the same as a machine of rules, which can be shrunk: hypothesis chooses the steps and what is in them."""

    class Machine(RuleBasedStateMachine):
        @initialize(seed=st.integers(0, 2**16))
        def build(self, seed):
            self.walk = Walk(seed, make_bench, make_layer)

        @rule(name=st.sampled_from((*STEP_NAMES, *LIKELY)), random=st.randoms(use_true_random=False))
        def step(self, name, random):
            self.walk.rng = random
            getattr(self.walk, name)()
            self.walk.bench.check()
            self.walk.check_pins()

        @invariant()
        def conserved(self):
            if hasattr(self, "walk"):
                self.walk.bench.manager.check_integrity()

        def teardown(self):
            if hasattr(self, "walk"):
                self.walk.end()

    return Machine


def test_prefixes_as_a_machine_of_rules(make_bench, make_layer):
    """2,400 steps as a rule; the long profile takes as many more as it has examples more."""
    examples = settings().max_examples
    run_state_machine_as_test(
        machine_of(make_bench, make_layer), settings=settings(max_examples=examples, stateful_step_count=40)
    )
