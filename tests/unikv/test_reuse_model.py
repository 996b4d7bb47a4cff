"""The manager against a dictionary that knows the tokens of every request, and nothing of trees, tiers and queues.

Whoever writes a position writes a number made of its layer and of all tokens up to it. So a page that was evicted,
shared, copied or moved wrongly shows as soon as somebody may read it. Only public calls are made, on real pools and a
real host tier, which are so small that nearly every step has to push somebody out. Copies to and from the host fail
now and then.
"""

from collections import Counter

import numpy as np
import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from unikv.budget import PoolBudget
from unikv.cache_manager import UnifiedKVCacheManager
from unikv.errors import CapacityError, LocalProtocolError, SpecError
from unikv.host_tier_options import HostTierOptions
from unikv.ids import NO_PAGE, NULL_SLOT, LayerId, RequestId
from unikv.layer_spec import KVCacheLayerSpec, KVDtype, KVLayout, LayerOwner, ReusePolicy
from unikv.prefix_tree import EVERYBODY, ReuseScope
from unikv.request import RequestState, ResumeResult
from unikv.reuse_options import ReuseOptions

MAX_SEQ_LEN = 32
MAX_OPEN = 5
STEPS = 90
LEAST_CACHES = 300
"""About 21,000 steps in the ci profile; its 3,000 caches make it over 200,000 in the long one."""

SCOPES = (*[EVERYBODY] * 8, ReuseScope(lora_id=1), ReuseScope(salt="tenant"))
DTYPES = (KVDtype.FLOAT16, KVDtype.FLOAT16, KVDtype.FLOAT8_E4M3FN, KVDtype.FLOAT32)
POLICIES = (ReusePolicy.REQUIRED, ReusePolicy.OPTIONAL, ReusePolicy.REQUIRED, ReusePolicy.OPTIONAL, ReusePolicy.PRIVATE)
ACTIVE, SUSPENDED = RequestState.ACTIVE, RequestState.SUSPENDED
PRIME = 2**31 - 1
JUNK = -7

picks = st.integers(0, MAX_OPEN - 1)
seldom = st.sampled_from([False] * 5 + [True])
twists = st.sampled_from([(), (), (), (), (2,), (5,), (6,), (9,), (13,), (0,), (5, 9)])
lengths = st.one_of(st.integers(0, 26), st.integers(8, 26), st.sampled_from([12, 16, 24]))


@st.composite
def layer_specs(draw):
    """One to four layers of up to three kinds and both owners, with pages of equal and different sizes."""
    kinds = draw(st.lists(layer_kind(), min_size=1, max_size=3))
    count = draw(st.integers(len(kinds), 4))
    first_draft = draw(st.sampled_from([count, count - 1, count // 2]))
    return tuple(
        KVCacheLayerSpec(
            layer_id=LayerId(number),
            owner=LayerOwner.DRAFT if number >= first_draft else LayerOwner.TARGET,
            num_kv_heads=draw(st.integers(1, 2)),
            head_dim=16,
            dtype=draw(st.sampled_from(DTYPES)),
            kv_factor=draw(st.integers(1, 2)),
            extra_buffers={"index_key": 8} if draw(seldom) else {},
            **kinds[number % len(kinds)],
        )
        for number in range(count)
    )


@st.composite
def layer_kind(draw):
    window = draw(st.sampled_from([None, None, 1, 2, 3, 5, 8, 11]))
    return {
        "window": window,
        "sink_tokens": 0 if window is None else draw(st.sampled_from([0, 0, 1, 5])),
        "reuse_policy": draw(st.sampled_from(POLICIES)),
    }


def hashes(scope, tokens):
    """Return a number per position that stands for the scope and all tokens up to it."""
    value, found = 11 + SCOPES.index(scope), []
    for token in tokens:
        value = (value * 1_000_003 + token + 1) % PRIME
        found.append(value)
    return np.asarray(found, dtype=np.int64)


def continued(scope, tokens, end, twisted=()):
    """Return `tokens` and as many more as make `end`: who has the same goes on the same, but at `twisted` positions."""
    tokens = list(tokens[:end])
    value = int(hashes(scope, tokens)[-1]) if tokens else 7
    for position in range(len(tokens), end):
        tokens.append((value >> 9 & 1) ^ (position in twisted))
        value = (value * 1_000_003 + tokens[-1] + 1) % PRIME
    return tokens


class Model:
    """What one request should be.

    Attributes:
        tokens: its sequence, at least up to the capacity.
        known: by group, the positions whose KV is there, whether written or taken over.
        growths: (drafts, added tokens) of the steps that are not settled, oldest first.
        reuses: whether it takes part in prefix reuse.
        ran: whether it was resumed before.
    """

    def __init__(self, request, scope, tokens, groups, *, reuses):
        self.request, self.scope, self.tokens, self.reuses = request, scope, tokens, reuses
        self.state = SUSPENDED if reuses else ACTIVE
        self.capacity = self.history = self.committed = self.claimed = request.history_tokens
        self.committing, self.ran, self.growths = reuses, not reuses, []
        self.known = {group.group_id: np.zeros(2 * MAX_SEQ_LEN, dtype=bool) for group in groups}

    def settle(self, capacity, history):
        self.capacity, self.history = capacity, history
        for known in self.known.values():
            known[capacity:] = False


class HostError(RuntimeError):
    """What a device says that has no memory for a copy."""


class FailingTier:
    """A real host tier whose next copy of one kind may fail when half of it is done."""

    def __init__(self, tier):
        self.tier, self.fails = tier, ""

    def num_slots(self, pool_group):
        return self.tier.num_slots(pool_group)

    def store(self, moves):
        self.copy("store", moves)

    def load(self, moves):
        self.copy("load", moves)

    def copy(self, kind, moves):
        if self.fails == kind:
            self.fails = ""
            getattr(self.tier, kind)({group_id: copies[: len(copies) // 2] for group_id, copies in moves.items()})
            raise HostError
        getattr(self.tier, kind)(moves)


class ReuseMachine(RuleBasedStateMachine):
    steps = 0
    """What was done to any cache so far."""

    def __init__(self):
        super().__init__()
        self.models, self.pins, self.next_id = [], {}, 0
        self.published = []  # (scope, tokens) of everything that was ever committed since the last clear
        self.late = False  # whether somebody has left out the start of a chunk in a REQUIRED group since then
        self.manager = None

    @initialize(
        specs=layer_specs(),
        tokens_per_block=st.sampled_from([4, 2, 1, 3]),
        room_tokens=st.sampled_from([24, 12, 36, 52, 80]),
        host_pages=st.sampled_from([None, 3, 8, 30, 1]),
        kv_layout=st.sampled_from(KVLayout),
        isolate_draft=st.booleans(),
        partial_blocks=st.sampled_from([True, True, False]),
        backoff_tokens=st.sampled_from([0, 0, 0, 1, 2]),
        max_utilisation=st.sampled_from([1.0, 1.0, 1.0, 0.8]),
    )
    def build(
        self,
        *,
        specs,
        tokens_per_block,
        room_tokens,
        host_pages,
        kv_layout,
        isolate_draft,
        partial_blocks,
        backoff_tokens,
        max_utilisation,
    ):
        self.tpb = tokens_per_block
        self.reuse = ReuseOptions(
            partial_blocks=partial_blocks, backoff_tokens=backoff_tokens, max_utilisation=max_utilisation
        )
        self.manager = UnifiedKVCacheManager(
            specs,
            tokens_per_block=tokens_per_block,
            max_seq_len=MAX_SEQ_LEN,
            pool=PoolBudget(pages=3 + room_tokens // tokens_per_block),
            kv_layout=kv_layout,
            isolate_draft=isolate_draft,
            reuse=self.reuse,
            host_tier=None if host_pages is None else HostTierOptions(pages=host_pages),
        )
        self.tier = self.manager._cache._tier = None if host_pages is None else FailingTier(self.manager._tier)
        self.groups = self.manager.layout.groups
        self.required = [g for g in self.groups if g.reuse_policy is ReusePolicy.REQUIRED]
        self.optional = [g for g in self.groups if g.reuse_policy is ReusePolicy.OPTIONAL]
        self.limit = self.manager.max_blocks_per_sequence * tokens_per_block
        self.planes = {g.group_id: [p for i in g.layer_ids for p in self.planes_of(i)] for g in self.groups}

    def planes_of(self, layer_id):
        """Return what a layer keeps per token, each with a number of its own: ``[slots, tokens, ...]`` int32 views."""
        spec = self.manager.get_layer_spec(layer_id)
        buffers = self.manager.get_buffers(layer_id).view(torch.int32).numpy()
        token_axis = 3 if self.manager.layout.kv_layout is KVLayout.HND else 2
        by_token = np.moveaxis(buffers, token_axis, 1)
        planes = [by_token[:, :, lane] for lane in range(spec.kv_factor)]
        planes += [self.manager.get_extra(layer_id, role).view(torch.int32).numpy() for role in spec.extra_buffers]
        return [(8 * int(layer_id) + number, plane) for number, plane in enumerate(planes)]

    # ---- what should be

    def pick(self, number, *states):
        models = [model for model in self.models if model.state in states]
        return models[number % len(models)]

    def has(self, *states):
        return any(model.state in states for model in self.models)

    def blocks(self, capacity):
        return -(-capacity // self.tpb)

    def alive(self, group, block, history):
        """Whether a block is a sink, or has a position that the token behind `history` tokens attends to, or later."""
        return group.window is None or block < group.sink_blocks or (block + 1) * self.tpb > history + 1 - group.window

    def alive_blocks(self, group, capacity, history):
        return [block for block in range(self.blocks(capacity)) if self.alive(group, block, history)]

    def readable(self, model, group, history):
        """Return the final positions that the next token may attend to in a group, if their KV is there."""
        positions = np.arange(history)
        seen = np.ones(history, dtype=bool)
        if group.window is not None:
            seen = (positions > history - group.window) | (positions < group.sink_blocks * self.tpb)
        return positions[seen & model.known[group.group_id][:history]]

    def free(self):
        return {group.pool_group: self.manager.num_free_pages(group.group_id) for group in self.groups}

    def exist(self, group):
        return self.manager.num_slots(group.group_id) - 1

    def picture(self):
        """Everything a caller can see."""
        return [
            (
                {group_id: row.tolist() for group_id, row in model.request.page_tables().items()},
                [model.request.page_table(group.group_id).tolist() for group in self.groups],
                (model.request.capacity_tokens, model.request.history_tokens, model.request.committed_tokens),
                (model.request.state, model.request.committing, model.request.reuse_status()),
            )
            for model in self.models
        ]

    # ---- what a model's forward pass does

    def write(self, model, begin, end, groups=None):
        """Write the KV of positions into every page that is there."""
        numbers = hashes(model.scope, model.tokens[:end])
        for group in self.groups if groups is None else groups:
            row = model.request.page_table(group.group_id)
            positions = np.arange(begin, end)
            positions = positions[row[positions // self.tpb] != NO_PAGE]
            slots = row[positions // self.tpb]
            for salt, plane in self.planes[group.group_id]:
                stamps = ((numbers[positions] * 31 + salt) % PRIME).astype(np.int32)
                plane[slots, positions % self.tpb] = stamps.reshape(-1, *[1] * (plane.ndim - 2))
            model.known[group.group_id][positions] = True

    def spoil(self, model, group, begin, end):
        """Write what nobody may ever read into the pages of positions, so that none is right by chance."""
        row = model.request.page_table(group.group_id)
        positions = np.arange(begin, min(end, len(row) * self.tpb))
        positions = positions[row[positions // self.tpb] != NO_PAGE]
        for _, plane in self.planes[group.group_id]:
            plane[row[positions // self.tpb], positions % self.tpb] = JUNK

    def places(self, model, group, positions):
        """Return, per plane, the slots and offsets of positions and what must be there."""
        numbers = hashes(model.scope, model.tokens[: model.history])[positions]
        slots, offsets = model.request.page_table(group.group_id)[positions // self.tpb], positions % self.tpb
        return [
            (plane, slots.copy(), offsets, ((numbers * 31 + salt) % PRIME).astype(np.int32))
            for salt, plane in self.planes[group.group_id]
        ]

    def check(self, places, what):
        for plane, slots, offsets, stamps in places:
            assert (slots > NULL_SLOT).all(), f"{what}: no page in {slots}"
            got = plane[slots, offsets]
            right = (got == stamps.reshape(-1, *[1] * (plane.ndim - 2))).all(axis=tuple(range(1, got.ndim)))
            assert right.all(), f"{what}: wrong at offsets {offsets[~right]} of slots {slots[~right]}"

    # ---- steps that need pages

    def attempt(self, model, call, capacity, history):
        """Run a step that ends with these numbers or, where the pages are not there, changes nothing at all."""
        before, free, needed, given = self.picture(), self.free(), Counter(), Counter()
        for group in self.groups:
            row = model.request.page_table(group.group_id)
            keep = self.alive_blocks(group, capacity, history)
            needed[group.pool_group] += sum(block >= len(row) for block in keep)
            given[group.pool_group] += sum(int(slot) != NO_PAGE for i, slot in enumerate(row) if i not in set(keep))
        try:
            call()
        except CapacityError as error:
            assert any(needed[number] > free[number] for number in free), "the pages were there"
            assert self.picture() == before
            assert self.free() == free
            assert error.needed_pages > error.free_pages
            assert error.permanent == self.never_fits(capacity, history)
            return False
        except HostError:
            assert (self.picture(), self.free()) == (before, free)
            return False
        assert all(needed[number] <= free[number] + given[number] for number in free)
        assert all(self.free()[number] >= free[number] - needed[number] for number in free)
        old = model.capacity
        model.settle(capacity, history)
        for group in self.groups:
            self.spoil(model, group, min(old, capacity), 2 * MAX_SEQ_LEN)
        self.write(model, min(old, capacity), capacity)
        return True

    def never_fits(self, capacity, history):
        try:
            self.manager.check_fits(capacity, history)
        except CapacityError as error:
            assert error.permanent
            return True
        return False

    def lengthen(self, model, end, *, twist=False):
        """Decide on the tokens up to `end`; what is not computed yet may turn out another way."""
        old = model.capacity
        known = model.tokens[:old] if twist else model.tokens
        model.tokens = continued(model.scope, known, max(end, len(known)), {old} if twist else ())

    # ---- beginning, pausing, ending

    @precondition(lambda self: len(self.models) < MAX_OPEN)
    @rule(
        length=lengths,
        twisted=twists,
        scope=st.sampled_from(SCOPES),
        claim_limit=st.one_of(st.none(), st.none(), st.integers(0, 26)),
        whole_prompt=st.booleans(),
        reuses=st.integers(0, 5),
        priority=st.sampled_from([35, 35, 0, 70]),
        chosen=st.integers(-1, 15),
    )
    def create(self, length, twisted, scope, claim_limit, whole_prompt, reuses, priority, chosen):
        """A prompt, usually resumed at once."""
        tokens = continued(scope, [], length, twisted)
        if reuses == 5:
            request = self.manager.create_request(self.new_id())
            self.models.append(Model(request, scope, tokens, self.groups, reuses=False))
            return
        model = self.open(scope, tokens, priority, claim_limit=claim_limit, whole_prompt=whole_prompt)
        if chosen >= 0:
            self.resume_first(model, chosen)

    def new_id(self):
        self.next_id += 1
        return RequestId(self.next_id)

    def open(self, scope, tokens, priority=35, *, claim_limit=None, whole_prompt=False):
        """Create a request; it gets what a probe says it would get."""
        how = {"scope": scope, "claim_limit": claim_limit, "whole_prompt": whole_prompt}
        before, free = self.picture(), self.free()
        probe = self.manager.probe(tokens, **how)
        assert (self.picture(), self.free()) == (before, free)
        request = self.manager.create_request(self.new_id(), tokens, priority=lambda *_: priority, **how)
        assert request.reuse_status() == probe.status
        assert request.divergence_tokens == probe.divergence_tokens
        assert request.committed_tokens == request.history_tokens == request.capacity_tokens == probe.num_tokens
        self.check_probe(probe, tokens, scope, claim_limit, whole_prompt)
        self.models.append(Model(request, scope, tokens, self.groups, reuses=True))
        return self.models[-1]

    @precondition(lambda self: len(self.models) < MAX_OPEN)
    @rule(
        length=lengths,
        twisted=twists,
        scope=st.sampled_from(SCOPES),
        claim_limit=st.sampled_from([None, None, None, 0, 7]),
        chosen=st.sampled_from([15, 14, 1, 2, 0]),
        chunk=st.sampled_from([26, 5, 8]),
        skipped=st.sampled_from([0, 0, 0, 0, 2, 5]),
        which=picks,
        then=st.sampled_from(["close", "stay", "close", "suspend", "close"]),
        commits=st.sampled_from(["chunks", "end", "chunks", "end", "never"]),
    )
    def serve(self, *, length, twisted, scope, claim_limit, chosen, chunk, skipped, which, then, commits):
        """A whole prompt: created, computed in chunks, published."""
        model = self.open(scope, continued(scope, [], length, twisted), claim_limit=claim_limit)
        self.resume_first(model, chosen)
        if skipped and model.state is ACTIVE:
            self.skip_once(model, max(0, min(chunk, length - model.history)), skipped, which)
        self.compute(model, length, chunk, commits)
        if then == "suspend" and model.state is ACTIVE:
            model.request.suspend()
            model.state = SUSPENDED
        elif then == "close":
            self.finish(model)

    @precondition(lambda self: self.published and len(self.models) < MAX_OPEN)
    @rule(
        number=st.sampled_from([0, 0, 0, 1, 2, 3, 5, 9]), cuts=st.sampled_from([12, 26, 1]), fork=seldom, stays=seldom
    )
    def read_back(self, number, cuts, fork, stays):
        """Take over what was published lately, from all of it to less and less, with every group that offers itself."""
        scope, whole = self.published[-1 - number % len(self.published)]
        for end in range(len(whole), max(-1, len(whole) - cuts), -1):
            tokens = [*whole[:end], *([1 - whole[end]] * 2 if fork and end < len(whole) else ())]
            model = self.open(scope, tokens, whole_prompt=True)
            self.resume_first(model, 15)
            if model.state is ACTIVE:
                self.every_readable_position_reads_its_own_tokens()
                if stays and end == len(whole):
                    return
                # Suspended first: an active one publishes as it closes.
                model.request.suspend()
            self.finish(model)

    @precondition(lambda self: self.has(ACTIVE))
    @rule(number=picks, more=st.integers(1, 12), is_end=st.booleans())
    def receive(self, number, more, is_end):
        """What a transfer does: make room and move the window in one step, and fill only what is left of it."""
        model = self.pick(number, ACTIVE)
        history = min(model.history + more, self.limit)
        capacity = max(history, model.capacity)
        self.lengthen(model, capacity)
        call = lambda: model.request.resize(capacity, history)  # noqa: E731
        if self.attempt(model, call, capacity, history) and model.committing:
            self.commit_final(model, is_end=is_end)

    @precondition(lambda self: self.has(ACTIVE))
    @rule(
        number=picks,
        more=st.integers(1, 12),
        chunk=st.sampled_from([26, 3]),
        commits=st.sampled_from(["chunks", "end"]),
    )
    def decode(self, number, more, chunk, commits):
        """Go on for some tokens as everybody does who has the same ones, and publish them."""
        model = self.pick(number, ACTIVE)
        self.compute(model, min(model.history + more, self.limit), chunk, commits)

    def compute(self, model, length, chunk, commits):
        """Compute up to `length` as far as there are pages."""
        while model.state is ACTIVE and model.history < length:
            end = min(model.history + chunk, length)
            capacity = max(model.capacity, end)
            self.lengthen(model, capacity)
            if not self.attempt(model, lambda: model.request.resize(capacity), capacity, model.history):  # noqa: B023
                break
            assert self.attempt(model, lambda: model.request.resize(history_tokens=end), capacity, end)  # noqa: B023
            if commits == "chunks" and model.committing:
                self.commit_final(model, is_end=False)
        if commits == "end" and model.committing and model.state is ACTIVE:
            self.commit_final(model, is_end=True)

    def check_probe(self, probe, tokens, scope, claim_limit, whole_prompt):
        assert probe.num_tokens <= probe.divergence_tokens <= probe.lookup_tokens <= len(tokens)
        common = [0]
        for other_scope, other in self.published:
            if other_scope == scope:
                same = [a == b for a, b in zip(tokens, other, strict=False)]
                common.append(same.index(False) if False in same else len(same))
        assert probe.divergence_tokens <= max(common), "nobody has computed that much of it"
        assert claim_limit is None or probe.num_tokens <= claim_limit
        assert whole_prompt or probe.num_tokens <= max(0, len(tokens) - 1)
        assert self.reuse.partial_blocks or probe.num_tokens % self.tpb == 0
        for group, status in zip(self.groups, probe.status, strict=True):
            assert (status.group_id, status.policy) == (group.group_id, group.reuse_policy)
            assert status.endpoint_tokens == probe.num_tokens
            if status.policy is not ReusePolicy.OPTIONAL:
                assert status.complete == (status.policy is ReusePolicy.REQUIRED and probe.num_tokens > 0)

    @precondition(lambda self: self.has(SUSPENDED))
    @rule(number=picks, chosen=st.integers(0, 15))
    def resume(self, number, chosen):
        model = self.pick(number, SUSPENDED)
        if not model.ran:
            self.resume_first(model, chosen)
            return
        if chosen == 3:
            self.refused(SpecError, lambda: model.request.resume([self.groups[0].group_id]))
        self.resumed(model, None, {group.group_id: 0 for group in self.groups})

    def resume_first(self, model, chosen):
        """Take over what was claimed, and some of the OPTIONAL groups that offer themselves."""
        status = {status.group_id: status for status in model.request.reuse_status()}
        fit = [g.group_id for g in self.optional if status[g.group_id].complete]
        wrong = [g.group_id for g in self.groups if g.group_id not in fit] + [-1, len(self.groups)]
        if chosen == 3:
            self.refused(SpecError, lambda: model.request.resume(wrong[:1]))
        select = [group_id for i, group_id in enumerate(fit) if chosen >> i & 1]
        taken = {g.group_id for g in self.required} | set(select)
        tail = model.claimed % self.tpb > 0
        copies = {group.group_id: int(tail and group.group_id in taken) for group in self.groups}
        if self.resumed(model, select, copies):
            for group in self.groups:
                model.known[group.group_id][: model.claimed] = group.group_id in taken
                self.spoil(model, group, model.claimed if group.group_id in taken else 0, 2 * MAX_SEQ_LEN)
            model.ran = True
            taking = [status.group_id for status in model.request.reuse_status() if status.complete]
            assert taking == [g.group_id for g in self.groups if model.claimed and g.group_id in taken]

    def resumed(self, model, select, copies):
        """Resume; where it is refused nothing changes, and it is not refused without need."""
        before, free, needed = self.picture(), self.free(), Counter()
        for group in self.groups:
            live = self.alive_blocks(group, model.capacity, model.history)
            needed[group.pool_group] += len(live) + copies[group.group_id]
        try:
            result = model.request.resume(select)
        except HostError:
            assert [seen[:3] for seen in self.picture()] == [seen[:3] for seen in before]
            left_out = [g.group_id for g in self.optional if select is not None and g.group_id not in select]
            assert not any(status.complete for status in model.request.reuse_status() if status.group_id in left_out)
            assert all(self.free()[number] >= free[number] for number in free)
            return False
        if result is ResumeResult.OK:
            model.state = ACTIVE
            return True
        assert (self.picture(), self.free()) == (before, free)
        crowded = self.reuse.max_utilisation < 1.0 and self.has(ACTIVE)
        assert result is ResumeResult.OUT_OF_PAGES or crowded, "where nothing runs, nobody is told to wait for others"
        alone = len(self.models) == 1 and not self.pins
        fits = model.ran or all(needed[group.pool_group] <= self.exist(group) for group in self.groups)
        assert not (alone and fits and result is ResumeResult.OUT_OF_PAGES), "who is alone has the pages"
        return False

    def refused(self, error, call):
        before, free = self.picture(), self.free()
        with pytest.raises(error):
            call()
        assert (self.picture(), self.free()) == (before, free)

    @precondition(lambda self: self.has(ACTIVE))
    @rule(number=picks)
    def suspend(self, number):
        model = self.pick(number, ACTIVE)
        model.request.suspend()
        model.state = SUSPENDED

    @precondition(lambda self: self.models)
    @rule(number=picks)
    def close(self, number):
        self.finish(self.pick(number, ACTIVE, SUSPENDED))

    def finish(self, model):
        model.request.close()
        model.request.close()
        self.models.remove(model)
        if model.ran and model.committing and model.committed == model.history:
            self.check_published(model)

    @precondition(lambda self: self.tier is not None)
    @rule(kind=st.sampled_from(["", "", "store", "load"]))
    def break_the_host(self, kind):
        """Let the next copy of a kind fail; who asks for it must be left as he was."""
        self.tier.fails = kind

    @rule(really=seldom)
    def clear(self, really):
        """Forget every prefix, for which nobody may be open."""
        if not really:
            if self.models:
                self.refused(LocalProtocolError, self.manager.clear_reusable_blocks)
            return
        for model in list(self.models):
            self.finish(model)
        self.manager.clear_reusable_blocks()
        lost = [
            (scope, tokens) for scope, tokens in self.published if self.manager.probe(tokens, scope=scope).num_tokens
        ]
        assert not lost
        self.published, self.late = [], False

    # ---- computing

    @precondition(lambda self: self.has(ACTIVE))
    @rule(number=picks, more=st.integers(0, 9), lead=st.integers(0, 5), twist=seldom)
    def advance(self, number, more, lead, twist):
        """The usual step: make room, compute, and call it final."""
        model = self.pick(number, ACTIVE)
        history = min(model.history + more, self.limit)
        capacity = min(max(model.capacity, history) + lead, self.limit)
        self.lengthen(model, capacity, twist=twist)
        if self.attempt(model, lambda: model.request.resize(capacity), capacity, model.history):
            assert self.attempt(model, lambda: model.request.resize(history_tokens=history), capacity, history)

    @precondition(lambda self: self.has(ACTIVE))
    @rule(number=picks, capacity=st.integers(0, MAX_SEQ_LEN + 4), more=st.integers(-1, 12))
    def resize(self, number, capacity, more):
        """Any resize, also one that a transfer does: history and capacity at once, then fill the window."""
        model = self.pick(number, ACTIVE)
        history, capacity = model.history + more, min(capacity, self.limit)
        if not model.history <= history <= capacity:
            self.refused(SpecError, lambda: model.request.resize(capacity, history))
            return
        self.lengthen(model, capacity)
        self.attempt(model, lambda: model.request.resize(capacity, history), capacity, history)

    @precondition(lambda self: self.has(ACTIVE))
    @rule(number=picks, more=st.integers(1, 9), skipped=st.integers(0, 9), which=picks, is_end=st.booleans())
    def skip(self, number, more, skipped, which, is_end):
        """A step in which one group leaves out the beginning of the chunk, and says so: a drafter that saves time."""
        model = self.pick(number, ACTIVE)
        if self.skip_once(model, more, skipped, which) and model.committing:
            self.commit_final(model, is_end=is_end)

    def skip_once(self, model, more, skipped, which):
        end = min(model.history + more, self.limit)
        first, capacity = min(model.history + skipped, end), max(end, model.capacity)
        self.lengthen(model, capacity)
        if not self.attempt(model, lambda: model.request.resize(capacity), capacity, model.history):
            return False
        group = self.groups[which % len(self.groups)]
        self.late |= group.reuse_policy is ReusePolicy.REQUIRED
        self.spoil(model, group, model.history, first)
        model.request.mark_written(group.group_id, first, sinks=False)
        model.known[group.group_id][:first] = False
        assert self.attempt(model, lambda: model.request.resize(history_tokens=end), capacity, end)
        return True

    @precondition(lambda self: any(m.state is ACTIVE and m.reuses and m.committed == m.claimed for m in self.models))
    @rule(number=picks, which=picks, back=st.integers(0, 12), sinks=st.booleans())
    def fill(self, number, which, back, sinks):
        """A transfer fills the window of a group that was not taken over."""
        models = [m for m in self.models if m.state is ACTIVE and m.reuses and m.committed == m.claimed]
        model, group = models[number % len(models)], self.groups[which % len(self.groups)]
        if group.reuse_policy is ReusePolicy.REQUIRED or not model.claimed:
            return
        first = max(0, model.claimed - back)
        alive = self.alive_blocks(group, model.capacity, model.history)
        window = [block for block in alive if block >= group.sink_blocks]
        first = max(first, window[0] * self.tpb if window else model.history)
        self.write(model, first, model.capacity, [group])
        if sinks:
            self.write(model, 0, min(group.sink_blocks * self.tpb, model.capacity), [group])
        else:
            model.known[group.group_id][:first] = False
        model.request.mark_written(group.group_id, first, sinks=sinks)

    @precondition(lambda self: self.has(ACTIVE))
    @rule(number=picks, drafts=st.integers(0, 5), reserve=st.integers(0, 5), overlap=st.sampled_from([None, 0, 4]))
    def grow(self, number, drafts, reserve, overlap):
        """Make room for a generation step, and perhaps for the next before this one is settled."""
        model = self.pick(number, ACTIVE)
        self.grow_once(model, drafts, reserve)
        if overlap is not None:
            self.grow_once(model, overlap, 0)

    def grow_once(self, model, drafts, reserve):
        width = max(drafts, reserve)
        capacity = min(model.capacity + 1 + width, self.limit)
        added = capacity - model.capacity
        self.lengthen(model, capacity)
        if self.attempt(model, lambda: model.request.grow(drafts, reserve_tokens=reserve), capacity, model.history):
            model.growths.append((min(width, max(added - 1, 0)), added))

    @precondition(lambda self: self.has(ACTIVE))
    @rule(number=picks, accepted=st.integers(0, 5), twist=seldom)
    def rewind(self, number, accepted, twist):
        """Some drafts stay, and what comes behind them may be another token than was drafted."""
        model = self.pick(number, ACTIVE)
        drafts = model.growths[0][0] if model.growths else 0
        capacity, history = model.capacity - max(drafts - accepted, 0), model.history + 1 + accepted
        if history > capacity:
            self.refused(SpecError, lambda: model.request.rewind(accepted, history))
            return
        assert self.attempt(model, lambda: model.request.rewind(accepted, history), capacity, history)
        del model.growths[:1]
        if twist:
            model.tokens = continued(model.scope, model.tokens[:history], max(capacity, history + 1), {history})
            self.write(model, history, capacity)

    @precondition(lambda self: any(model.state is ACTIVE and model.growths for model in self.models))
    @rule(number=picks)
    def revert(self, number):
        models = [model for model in self.models if model.state is ACTIVE and model.growths]
        model = models[number % len(models)]
        capacity = model.capacity - model.growths[-1][1]
        if capacity < model.history:
            self.refused(SpecError, model.request.revert)
            return
        assert self.attempt(model, model.request.revert, capacity, model.history)
        del model.growths[-1:]

    # ---- publishing

    @precondition(lambda self: self.has(ACTIVE))
    @rule(number=picks, count=st.integers(0, 12), is_end=st.booleans())
    def commit(self, number, count, is_end):
        model = self.pick(number, ACTIVE)
        if not model.committing:
            self.refused(LocalProtocolError, lambda: model.request.commit([0]))
            return
        end = model.committed + count
        if end > model.capacity:
            chunk = continued(model.scope, model.tokens, end)[model.committed : end]
            self.refused(SpecError, lambda: model.request.commit(chunk))
            end = model.history
        model.request.commit(model.tokens[model.committed : end], is_end=is_end)
        model.committed, model.committing = end, not is_end
        model.settle(model.capacity, max(model.history, end))
        self.publish(model)

    @precondition(lambda self: any(m.state is ACTIVE and m.committing for m in self.models))
    @rule(number=picks, is_end=st.booleans())
    def commit_all(self, number, is_end):
        """Publish what is final."""
        models = [model for model in self.models if model.state is ACTIVE and model.committing]
        self.commit_final(models[number % len(models)], is_end=is_end)

    def commit_final(self, model, *, is_end):
        model.request.commit(model.tokens[model.committed : model.history], is_end=is_end)
        model.committed, model.committing = model.history, not is_end
        self.publish(model)
        if is_end:
            self.check_published(model)

    def publish(self, model):
        self.published.append((model.scope, model.tokens[: model.committed]))

    def check_published(self, model):
        """What was just published to its end is found to its end, where somebody has a page of every block.

        A shorter end may lack pages: the window has moved on, and what it left behind may have been evicted. And where
        somebody's page of a block begins late, one that begins in time but ends earlier does not take its place.
        """
        history = model.history
        if self.late:
            return
        end = history if self.reuse.partial_blocks else history - history % self.tpb
        full = [g for g in self.required if g.window is None]
        known = all(
            model.known[g.group_id][p] for g in self.required for p in range(history) if self.seen(g, p, history)
        )
        if full and known and not self.reuse.backoff_tokens and (end == history or full == self.required):
            tokens = model.tokens[:history]
            assert self.manager.probe(tokens, scope=model.scope, whole_prompt=True).num_tokens == end

    def seen(self, group, position, history):
        sink = position < group.sink_blocks * self.tpb
        return group.window is None or position > history - group.window or sink

    @precondition(lambda self: self.has(ACTIVE))
    @rule(number=picks)
    def stop_committing(self, number):
        model = self.pick(number, ACTIVE)
        model.request.stop_committing()
        model.committing = False

    # ---- pins

    @precondition(lambda self: self.has(ACTIVE) and len(self.pins) < 2)
    @rule(number=picks)
    def pin(self, number):
        model = self.pick(number, ACTIVE)
        places = [p for g in self.groups for p in self.places(model, g, self.readable(model, g, model.history))]
        self.pins[model.request.pin()] = places

    @precondition(lambda self: self.pins)
    @rule(number=picks)
    def unpin(self, number):
        pin = list(self.pins)[number % len(self.pins)]
        pin.release()
        del self.pins[pin]

    # ---- what must always hold

    @invariant()
    def the_laws_hold(self):
        if self.manager is None:
            return
        type(self).steps += 1
        self.manager.check_integrity()
        used = {
            (self.manager.layout.group(g).pool_group, slot)
            for pin in self.pins
            for g, s in pin.slots.items()
            for slot in s
        }
        for model in self.models:
            for group in self.groups:
                row = model.request.page_table(group.group_id).tolist()
                used |= {(group.pool_group, slot) for slot in row if slot != NO_PAGE}
        locked = Counter(pool_group for pool_group, _ in used)
        for group in self.groups:
            free = self.manager.num_free_pages(group.group_id)
            assert free + locked[group.pool_group] <= self.exist(group)
            assert self.models or free + locked[group.pool_group] == self.exist(group), "pages are lost"

    @invariant()
    def requests_are_what_the_model_says(self):
        for model in self.models:
            request = model.request
            assert request.state is model.state
            assert (request.capacity_tokens, request.history_tokens) == (model.capacity, model.history)
            assert (request.committed_tokens, request.committing) == (model.committed, model.committing)
            for group in self.groups:
                row = request.page_table(group.group_id)
                alive = self.alive_blocks(group, model.capacity, model.history) if model.state is ACTIVE else []
                assert len(row) == self.blocks(model.capacity)
                assert np.flatnonzero(row != NO_PAGE).tolist() == alive
                table = self.manager.block_table(group.group_id, [request.request_id])[0]
                assert np.array_equal(table[: len(row)], np.where(row == NO_PAGE, NULL_SLOT, row))
                assert not table[len(row) :].any()

    @invariant()
    def every_readable_position_reads_its_own_tokens(self):
        for model in self.models:
            if model.state is ACTIVE:
                for group in self.groups:
                    what = f"request {model.request.request_id}, group {group.group_id}"
                    self.check(self.places(model, group, self.readable(model, group, model.history)), what)

    @invariant()
    def pinned_pages_keep_their_tokens(self):
        for places in self.pins.values():
            self.check(places, "pin")

    @invariant()
    def the_null_slot_stays_zero(self):
        if self.manager is not None:
            assert not any(plane[NULL_SLOT].any() for planes in self.planes.values() for _, plane in planes)

    def teardown(self):
        if self.manager is None:
            return
        for model in list(self.models):
            self.finish(model)
        for pin in self.pins:
            pin.release()
        self.manager.check_integrity()
        for group in self.groups:
            assert self.manager.num_free_pages(group.group_id) == self.exist(group)
        self.manager.clear_reusable_blocks()
        self.planes.clear()
        self.manager.close()


@pytest.mark.timeout(1500)  # the long profile, and the search for a short way to a failure
def test_reuse_as_a_model_has_it():
    ReuseMachine.steps = 0
    caches = max(LEAST_CACHES, settings().max_examples)
    run_state_machine_as_test(ReuseMachine, settings=settings(max_examples=caches, stateful_step_count=STEPS))
    assert ReuseMachine.steps >= caches * STEPS // 2, "most caches were hardly used"
