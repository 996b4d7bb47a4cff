"""A transformers `Cache` that keeps nothing: K and V live in the pages of a request and nowhere else.

One forward pass over ``n`` tokens that start at absolute position ``p``:

==============  =====================  ====================================================================
range           positions              why
==============  =====================  ====================================================================
written         ``[p, p + n)``         the new K and V, through the page table
read            ``[start, p + n)``     what attention sees, gathered for one layer at a time and dropped again
``start``       ``max(valid_from, p + 1 - window)``; nothing before it is ever touched
==============  =====================  ====================================================================

``valid_from`` is 0 where the prompt's KV is in the pages, and the prompt's length for a drafter whose prompt KV never
came: it then sees only what it wrote itself, at the true positions. With `skips_unwritten` it is, layer group by layer
group, no less than where the request's KV begins: a drafter whose pages were gone does without them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch
from transformers.cache_utils import Cache, CacheLayerMixin

from unikv.cache_manager import UnifiedKVCacheManager
from unikv.errors import InternalError, LocalProtocolError, SpecError, explain
from unikv.ids import NO_PAGE, GroupId, LayerId
from unikv.layer_spec import KVDtype, KVLayout
from unikv.ranges import ceil_div
from unikv.request import KVCacheRequest
from workers.hf_specs import AttentionPlan
from workers.runner import OnLayer


@dataclass(frozen=True, slots=True)
class _Step:
    """Where one layer group reads and writes in one forward pass.

    Attributes:
        write_slots, write_offsets: slot and token offset of every written position, int64 ``[n]``.
        read_slots: slots of the blocks that hold ``[start, end)``, int64.
        skip: positions before `start` in the first of these blocks.
    """

    write_slots: torch.Tensor
    write_offsets: torch.Tensor
    read_slots: torch.Tensor
    start: int
    end: int
    skip: int


class PagedLayer(CacheLayerMixin):  # type: ignore[misc, no-untyped-call, unused-ignore]  # partly typed
    """One model layer's K and V in the pages of `PagedKVCache`; borrows the manager's memory, owns none.

    Args:
        buffers: ``[N, 2, heads, tpb, head_dim]`` (HND) or ``[N, 2, tpb, heads, head_dim]`` (NHD), indexed by slot.
    """

    supports_early_init = False

    def __init__(
        self,
        buffers: torch.Tensor,
        kv_layout: KVLayout,
        window: int | None,
        on_written: Callable[[int, torch.cuda.Event | None], None] | None = None,
    ) -> None:
        super().__init__()  # type: ignore[no-untyped-call, unused-ignore]
        order = (1, 2, 0, 3, 4) if kv_layout is KVLayout.HND else (1, 3, 0, 2, 4)
        self._pages = buffers.permute(order)  # [2, heads, N, tpb, head_dim] whichever way it is stored
        # Byte-sized floats have no indexing kernels; their bytes do.
        self._cells = self._pages.view(torch.uint8) if buffers.element_size() == 1 else self._pages
        self.window = window
        self.is_sliding = window is not None
        self._step: _Step | None = None
        self._on_written = on_written

    @property
    def step(self) -> _Step:
        """The pass under way."""
        if self._step is None:
            raise LocalProtocolError(
                explain("paged cache", "step", None, "a begun forward pass", "call begin(position, tokens) first")
            )
        return self._step

    def begin(self, step: _Step) -> None:
        """Take the places of the next forward pass."""
        self._step = step

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *_args: object, **_kwargs: object
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Write the new K and V, and return what attention sees.

        Args:
            key_states: ``[1, heads, n, head_dim]``, rotated already.
            value_states: the same shape.

        Returns:
            K and V ``[1, heads, end - start, head_dim]`` in the dtype that came in; transient copies.

        Raises:
            SpecError: the shape is not that of the pages.
        """
        step = self.step
        heads, head_dim = self._pages.shape[1], self._pages.shape[4]
        want = (1, heads, len(step.write_slots), head_dim)
        for lane, states in enumerate((key_states, value_states)):
            if tuple(states.shape) != want:
                cure = "one sequence a pass, and a cache whose layer specs are the model's"
                raise SpecError(explain("paged cache", "K/V shape", tuple(states.shape), f"{want}", cure))
            stored = states[0].to(self._pages.dtype).view(self._cells.dtype)
            self._cells[lane][:, step.write_slots, step.write_offsets] = stored
        if self._on_written is not None:
            self._on_written(step.end, _event_behind(self._cells))
        # [2, heads, blocks, tpb, head_dim] in one pass over the pages
        gathered = self._cells.index_select(2, step.read_slots).view(self._pages.dtype)
        lanes = gathered.flatten(2, 3)[:, :, step.skip : step.skip + step.end - step.start]
        keys, values = lanes.to(key_states.dtype).unsqueeze(1)
        return keys, values

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        """Do nothing: the pages are there already."""

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Return (length, first position) of what `update` returns in this pass."""
        return self.step.end - self.step.start, self.step.start

    def get_seq_length(self) -> int:
        """Return the absolute position of the first token of this pass."""
        return self.step.end - len(self.step.write_slots)

    def get_max_length(self) -> int:
        """Return -1: the request's capacity is the limit, and it grows."""
        return -1


class PagedKVCache(Cache):  # type: ignore[misc, unused-ignore]  # partly typed
    """The cache of one model over one request, for one sequence a pass.

    Args:
        manager: whose pages hold the layers of `plan`.
        request: an open request of `manager`.
        valid_from: first position whose KV exists; earlier positions are never read.
        skips_unwritten: whether to begin reading where the request's KV begins, for a model that may lack some.
        on_layer: called whenever a pass has written a layer, with the layer's id and how many tokens it has now.

    Raises:
        SpecError: a layer stores anything but plain K and V.
    """

    def __init__(
        self,
        manager: UnifiedKVCacheManager,
        request: KVCacheRequest,
        plan: AttentionPlan,
        *,
        valid_from: int = 0,
        skips_unwritten: bool = False,
        on_layer: OnLayer | None = None,
    ) -> None:
        self._request = request
        self._tokens_per_block = manager.layout.tokens_per_block
        self._groups = tuple(manager.layer_group_id(layer_id) for layer_id in plan.layer_ids)
        self._valid_from = valid_from
        self._skips_unwritten = skips_unwritten
        self._imposed_window = plan.imposed_window
        kv_layout = manager.layout.kv_layout
        buffers = [_plain_buffers(manager, layer_id) for layer_id in plan.layer_ids]
        self._device = buffers[0].device
        written = [None if on_layer is None else partial(on_layer, layer_id) for layer_id in plan.layer_ids]
        places = zip(buffers, plan.windows, written, strict=True)
        self._paged = tuple(PagedLayer(pages, kv_layout, window, told) for pages, window, told in places)
        super().__init__(layers=list(self._paged))

    def begin(self, position: int, tokens: int) -> None:
        """Prepare a forward pass over the tokens at ``[position, position + tokens)``.

        KV written at or after `position` before is overwritten or ignored, which is all that taking back rejected
        tokens needs here.

        Raises:
            LocalProtocolError: the request has no room for the tokens.
            InternalError: a block that must be read or written has no page.
        """
        end = position + tokens
        if end > self._request.capacity_tokens:
            cure = "resize the request before the pass"
            thing, want = f"request {self._request.request_id}", f">= {end}"
            raise LocalProtocolError(explain(thing, "capacity_tokens", self._request.capacity_tokens, want, cure))
        steps: dict[tuple[GroupId, int | None], _Step] = {}
        for group, layer in zip(self._groups, self._paged, strict=True):
            if (group, layer.window) not in steps:
                steps[group, layer.window] = self._places(group, layer.window, position, end)
            layer.begin(steps[group, layer.window])

    def imposed_mask(self) -> torch.Tensor | None:
        """Return the bool mask ``[1, 1, n, end - start]`` of a window the model does not know of, or None.

        None where no window was imposed, and for one token, which sees exactly what `update` returns.
        """
        step = self._paged[0].step
        tokens = len(step.write_slots)
        if self._imposed_window is None or tokens == 1:
            return None
        device = step.read_slots.device
        query = torch.arange(step.end - tokens, step.end, device=device).unsqueeze(1)
        key = torch.arange(step.start, step.end, device=device)
        return ((key <= query) & (key > query - self._imposed_window))[None, None]

    def _places(self, group: GroupId, window: int | None, position: int, end: int) -> _Step:
        valid_from = max(self._valid_from, self._request.written_from(group) if self._skips_unwritten else 0)
        start = valid_from if window is None else max(valid_from, position + 1 - window)
        if start > position:
            cure = "start at or after valid_from"
            raise LocalProtocolError(explain("paged cache", "position", position, f">= {start}", cure))
        size = self._tokens_per_block
        first, last = start // size, ceil_div(end, size)
        slots = np.asarray(self._request.page_table(group)[first:last], dtype=np.int64)
        if len(slots) != last - first or NO_PAGE in slots:
            missing = f"blocks [{first}, {last}) of group {group} have slots {slots.tolist()}"
            raise InternalError(f"request {self._request.request_id}: a block in use has no page: {missing}")
        written = np.arange(position, end)
        device = self._device
        return _Step(
            write_slots=torch.from_numpy(slots[written // size - first]).to(device),
            write_offsets=torch.from_numpy(written % size).to(device),
            read_slots=torch.from_numpy(slots).to(device),
            start=start,
            end=end,
            skip=start - first * size,
        )


def _event_behind(written: torch.Tensor) -> torch.cuda.Event | None:
    """Return an event behind what was queued for the tensor's device; None on a CPU, where it is done."""
    if not written.is_cuda:
        return None
    event = torch.cuda.Event()  # type: ignore[no-untyped-call]
    event.record(torch.cuda.current_stream(written.device))
    return event


def _plain_buffers(manager: UnifiedKVCacheManager, layer_id: LayerId) -> torch.Tensor:
    spec = manager.get_layer_spec(layer_id)
    buffers = manager.get_buffers(layer_id)
    if buffers is None or spec.kv_factor != 2 or spec.dtype is KVDtype.NVFP4:
        got = f"{spec.dtype.value} with kv_factor {spec.kv_factor}"
        want = "K and V in a plain float dtype, without block scales"
        raise SpecError(explain(f"layer {layer_id}", "storage", got, want, "give it kv_factor 2 and another dtype"))
    return buffers
