"""The manager against a dictionary that knows which token was written where, for every request, layer and position."""

import numpy as np
import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, initialize, invariant, multiple, rule

from unikv.budget import PoolBudget
from unikv.cache_manager import UnifiedKVCacheManager
from unikv.errors import CapacityError, SpecError
from unikv.ids import NO_PAGE, NULL_SLOT, LayerId, RequestId
from unikv.layer_spec import KVCacheLayerSpec, KVDtype, KVLayout, LayerOwner, ReusePolicy

MAX_SEQ_LEN = 40


@st.composite
def layer_specs(draw):
    """Full and windowed, key-only and K/V layers of both owners and all policies; equal and different page sizes."""
    count = draw(st.integers(1, 4))
    drafts = draw(st.integers(0, count))
    specs = []
    for layer_id in range(count):
        window = draw(st.one_of(st.none(), st.integers(1, 12)))
        specs.append(
            KVCacheLayerSpec(
                layer_id=LayerId(layer_id),
                owner=LayerOwner.DRAFT if layer_id >= count - drafts else LayerOwner.TARGET,
                num_kv_heads=draw(st.integers(1, 2)),
                head_dim=16,
                dtype=KVDtype.FLOAT16,
                kv_factor=draw(st.integers(1, 2)),
                window=window,
                sink_tokens=0 if window is None else draw(st.integers(0, 5)),
                reuse_policy=draw(st.sampled_from(ReusePolicy)),
            )
        )
    return tuple(specs)


class Model:
    """What one request should be: its numbers, the tokens in its pages, and the steps not settled yet."""

    def __init__(self, request):
        self.request = request
        self.capacity = 0
        self.history = 0
        self.stamps = {}  # (layer, lane, position) -> value
        self.growths = []  # (drafts, added tokens), oldest first

    def settle(self, capacity, history):
        self.capacity, self.history = capacity, history
        self.stamps = {key: stamp for key, stamp in self.stamps.items() if key[2] < capacity}


class CacheMachine(RuleBasedStateMachine):
    models = Bundle("models")
    pins = Bundle("pins")

    @initialize(
        target=models,
        specs=layer_specs(),
        tokens_per_block=st.sampled_from([1, 2, 4]),
        pages=st.integers(4, 18),
        kv_layout=st.sampled_from(KVLayout),
        isolate_draft=st.booleans(),
    )
    def build(self, specs, tokens_per_block, pages, kv_layout, isolate_draft):
        self.tpb = tokens_per_block
        self.manager = UnifiedKVCacheManager(
            specs,
            tokens_per_block=tokens_per_block,
            max_seq_len=MAX_SEQ_LEN,
            pool=PoolBudget(pages=pages),
            kv_layout=kv_layout,
            isolate_draft=isolate_draft,
        )
        self.limit = self.manager.max_blocks_per_sequence * tokens_per_block
        # Tokens as 8 int32 of one head; a stamp goes into all of them.
        self.views = {spec.layer_id: self.manager.get_buffers(spec.layer_id).view(torch.int32) for spec in specs}
        self.open = {}
        self.held = {}  # pin -> {(layer, lane, slot, offset): stamp}
        self.clock = 0
        # Two requests with pages, so that most of the steps have something to act on.
        models = [self.create(0), self.create(1)]
        for model in models:
            self.resize(model, 2 * tokens_per_block, more=0)
        return multiple(*models)

    # ---- what should be

    def dead(self, group, block, history):
        """Whether a block has left the window: every position below the first one that the next token attends to."""
        if group.window is None or block < group.sink_blocks:
            return False
        return (block + 1) * self.tpb <= history + 1 - group.window

    def blocks(self, capacity):
        return -(-capacity // self.tpb)

    def fits(self, model, capacity, history):
        """Whether the pools have the pages for a step, counting what the step itself frees."""
        balance = {group.pool_group: self.manager.num_free_pages(group.group_id) for group in self.groups}
        pinned = {(pin_group, slot) for pin in self.held for pin_group, slots in pin.slots.items() for slot in slots}
        for group in self.groups:
            row = model.request.page_table(group.group_id).tolist()
            for block, slot in enumerate(row):
                gone = block >= self.blocks(capacity) or self.dead(group, block, history)
                balance[group.pool_group] += slot != NO_PAGE and gone and (group.group_id, slot) not in pinned
            new = range(len(row), self.blocks(capacity))
            balance[group.pool_group] -= sum(not self.dead(group, block, history) for block in new)
        return all(pages >= 0 for pages in balance.values())

    @property
    def groups(self):
        return self.manager.layout.groups

    def places(self, model, positions):
        """Yield (layer, lane, position, slot, offset) of every page entry that holds one of `positions`."""
        for group in self.groups:
            row = model.request.page_table(group.group_id).tolist()
            for layer_id in group.layer_ids:
                for lane in range(self.manager.layer_kv_factor(layer_id)):
                    for position in positions:
                        if row[position // self.tpb] != NO_PAGE:
                            yield layer_id, lane, position, row[position // self.tpb], position % self.tpb

    def token(self, layer_id, lane, slot, offset):
        """The ``[heads, 8]`` int32 view of one token."""
        page = self.views[layer_id][slot, lane]
        return page[:, offset] if self.manager.layout.kv_layout is KVLayout.HND else page[offset]

    def attempt(self, model, call, capacity, history):
        """Run a step that should end with these numbers, or change nothing where the pages are not there."""
        before = model.request.page_tables()
        if self.fits(model, capacity, history):
            call()
            model.settle(capacity, history)
            self.write(model)
            return True
        with pytest.raises(CapacityError, match=f"request {model.request.request_id}, layer group"):
            call()
        after = model.request.page_tables()
        assert all(np.array_equal(before[group], after[group]) for group in before)
        return False

    # ---- what can happen

    @rule(target=models, request_id=st.integers(0, 5))
    def open_another(self, request_id):
        return multiple() if request_id in self.open else self.create(request_id)

    def create(self, request_id):
        model = Model(self.manager.create_request(RequestId(request_id)))
        self.open[request_id] = model
        return model

    @rule(model=models, capacity=st.integers(0, MAX_SEQ_LEN), more=st.integers(-1, 12))
    def resize(self, model, capacity, more):
        history = model.history + more
        if history < model.history or capacity < history:
            with pytest.raises(SpecError):
                model.request.resize(capacity, history)
            return
        self.attempt(model, lambda: model.request.resize(capacity, history), capacity, history)

    @rule(model=models, more=st.integers(0, 9), lead=st.integers(0, 6))
    def advance(self, model, more, lead):
        """The usual step: some tokens become final, and the reserve moves along."""
        history = min(model.history + more, model.capacity)
        capacity = min(history + lead, self.limit)
        self.attempt(model, lambda: model.request.resize(capacity, history), capacity, history)

    def write(self, model):
        """Write a new token at every position that is not final."""
        for layer_id, lane, position, slot, offset in self.places(model, range(model.history, model.capacity)):
            self.clock += 1
            self.token(layer_id, lane, slot, offset)[:] = self.clock
            model.stamps[layer_id, lane, position] = self.clock

    @rule(model=models, drafts=st.integers(0, 5), reserve=st.integers(0, 5))
    def grow(self, model, drafts, reserve):
        width = max(drafts, reserve)
        capacity = min(model.capacity + 1 + width, self.limit)
        added = capacity - model.capacity
        call = lambda: model.request.grow(drafts, reserve_tokens=reserve)  # noqa: E731
        if self.attempt(model, call, capacity, model.history):
            model.growths.append((min(width, max(added - 1, 0)), added))

    @rule(model=models, accepted=st.integers(0, 5))
    def rewind(self, model, accepted):
        drafts = model.growths[0][0] if model.growths else 0
        capacity = model.capacity - max(drafts - accepted, 0)
        history = model.history + 1 + accepted
        if history > capacity:
            with pytest.raises(SpecError):
                model.request.rewind(accepted, history)
            return
        # Giving back and sliding on never needs a page.
        assert self.attempt(model, lambda: model.request.rewind(accepted, history), capacity, history)
        del model.growths[:1]

    @rule(model=models)
    def revert(self, model):
        added = model.growths[-1][1] if model.growths else 0
        if model.capacity - added < model.history:
            with pytest.raises(SpecError):
                model.request.revert()
            return
        assert self.attempt(model, model.request.revert, model.capacity - added, model.history)
        del model.growths[-1:]

    @rule(target=pins, model=models)
    def pin(self, model):
        pin = model.request.pin()
        self.held[pin] = {
            (layer_id, lane, slot, offset): model.stamps[layer_id, lane, position]
            for layer_id, lane, position, slot, offset in self.places(model, range(model.history))
            if (layer_id, lane, position) in model.stamps
        }
        return pin

    @rule(pin=consumes(pins))
    def unpin(self, pin):
        pin.release()
        del self.held[pin]

    @rule(model=consumes(models))
    def close(self, model):
        model.request.close()
        del self.open[model.request.request_id]

    # ---- what must always hold

    @invariant()
    def the_laws_hold(self):
        self.manager.check_integrity()
        for pool_group in range(self.manager.layout.num_pool_groups):
            groups = [group for group in self.groups if group.pool_group == pool_group]
            used = {slot for pin in self.held for group in groups for slot in pin.slots.get(group.group_id, ())}
            for model in self.open.values():
                for group in groups:
                    used |= set(model.request.page_table(group.group_id).tolist()) - {NO_PAGE}
            free = self.manager.num_slots(groups[0].group_id) - 1 - len(used)
            assert self.manager.num_free_pages(groups[0].group_id) == free

    @invariant()
    def requests_are_what_the_model_says(self):
        for model in self.open.values():
            assert (model.request.capacity_tokens, model.request.history_tokens) == (model.capacity, model.history)
            for group in self.groups:
                row = model.request.page_table(group.group_id)
                assert len(row) == self.blocks(model.capacity)
                holes = [self.dead(group, block, model.history) for block in range(len(row))]
                assert (row == NO_PAGE).tolist() == holes

    @invariant()
    def every_readable_position_reads_its_own_token(self):
        for model in self.open.values():
            for layer_id, lane, position, slot, offset in self.places(model, range(model.capacity)):
                if (layer_id, lane, position) in model.stamps:
                    token = self.token(layer_id, lane, slot, offset)
                    assert bool((token == model.stamps[layer_id, lane, position]).all())

    @invariant()
    def pinned_pages_keep_their_tokens(self):
        for stamps in self.held.values():
            for place, stamp in stamps.items():
                assert bool((self.token(*place) == stamp).all())

    @invariant()
    def the_null_slot_stays_zero_and_fills_every_gap(self):
        assert not any(view[NULL_SLOT].any() for view in self.views.values())
        for group in self.groups:
            table = self.manager.block_table(group.group_id, [*self.open, None])
            for out, model in zip(table, self.open.values(), strict=False):
                row = model.request.page_table(group.group_id)
                assert np.array_equal(out[: len(row)], np.where(row == NO_PAGE, NULL_SLOT, row))
                assert not out[len(row) :].any()
            assert not table[-1].any()

    def teardown(self):
        if not hasattr(self, "manager"):
            return
        for model in self.open.values():
            model.request.close()
        for pin in self.held:
            pin.release()
        self.manager.check_integrity()
        for group in self.groups:
            assert self.manager.num_free_pages(group.group_id) == self.manager.num_slots(group.group_id) - 1
        self.manager.close()


TestCache = CacheMachine.TestCase
TestCache.settings = settings(stateful_step_count=40)
