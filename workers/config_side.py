"""One side of a pair, resolved: its layers, its ranks, its memory. See `workers.config` for the whole pair."""

from __future__ import annotations

from typing import Annotated, ClassVar, Final, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator

from transfer.hello import Side
from unikv.ids import LayerId
from unikv.layer_spec import KVCacheLayerSpec, KVDtype, KVLayout, LayerOwner, ReusePolicy
from workers.config_values import (
    Amount,
    Count,
    Flag,
    SizeBytes,
    as_tuple,
    checked,
    named,
    one_of,
    problem,
    unknown_key,
)

MIN_POOL_PAGES: Final = 2
"""The null page and one that can be handed out."""


class Section(BaseModel):
    """A mapping of the pair file. Unknown keys are errors that name the nearest known one."""

    model_config = ConfigDict(frozen=True, extra="forbid")
    internal: ClassVar[frozenset[str]] = frozenset()
    """Fields the loader fills in; no keys of the file."""

    @classmethod
    def keys(cls) -> tuple[str, ...]:
        """Return the keys a file may have here."""
        return tuple(name for name in cls.model_fields if name not in cls.internal)

    @model_validator(mode="before")
    @classmethod
    def _know_every_key(cls, value: object) -> object:
        if isinstance(value, cls):
            return value
        if not isinstance(value, dict):
            raise problem(f"a mapping with the keys {', '.join(cls.keys())}", "indent its keys below it")
        for key in value:
            if key not in cls.model_fields:
                raise unknown_key(key, cls.keys())
        return value


class ParallelConfig(Section):
    """How an instance is split over its ranks. Under `attention_dp` every rank holds all heads of its own requests."""

    tp: Count = 1
    pp: Count = 1
    cp: Count = 1
    attention_dp: Flag = False

    @property
    def world_size(self) -> int:
        """Ranks of the instance."""
        return self.tp * self.pp * self.cp


class LayerEntry(Section):
    """`count` consecutive layers that are alike. `kv_heads` is the whole model's."""

    count: Count = 1
    owner: Annotated[LayerOwner, named(LayerOwner)]
    kv_heads: Count
    head_dim: Count
    kv_factor: Annotated[int, Field(strict=True, ge=1, le=2)] = 2
    dtype: Annotated[KVDtype, named(KVDtype)]
    window: Count | None = None
    sink_tokens: Amount = 0
    reuse: Annotated[ReusePolicy, named(ReusePolicy)] = ReusePolicy.REQUIRED
    extra_buffers: dict[str, Count] = Field(default_factory=dict)

    @classmethod
    def of(cls, spec: KVCacheLayerSpec) -> Self:
        """Return the entry that stands for the one layer `spec`."""
        return cls(
            owner=spec.owner,
            kv_heads=spec.total_heads,
            head_dim=spec.head_dim,
            kv_factor=spec.kv_factor,
            dtype=spec.dtype,
            window=spec.window,
            sink_tokens=spec.sink_tokens,
            reuse=spec.reuse_policy,
            extra_buffers=dict(spec.extra_buffers),
        )

    def spec(self, layer_id: LayerId, *, heads: int) -> KVCacheLayerSpec:
        """Return one layer of this entry with `heads` of its heads on a rank.

        Raises:
            SpecError: the entry contradicts itself (sinks without a window, an nvfp4 head dimension, ...).
        """
        return KVCacheLayerSpec(
            layer_id=layer_id,
            owner=self.owner,
            num_kv_heads=heads,
            total_num_kv_heads=self.kv_heads,
            head_dim=self.head_dim,
            kv_factor=self.kv_factor,
            dtype=self.dtype,
            window=self.window,
            sink_tokens=self.sink_tokens,
            reuse_policy=self.reuse,
            extra_buffers=self.extra_buffers,
        )


class SpeculativeConfig(Section):
    """The speculative mode: see `unikv.speculation.SpeculationShape` for what the numbers reserve."""

    method: Annotated[str, Field(strict=True, pattern=r"^[A-Za-z][A-Za-z0-9_-]*$")]
    max_draft_tokens: Count
    block_width: Amount
    num_extra_kv_tokens: Amount


class PoolConfig(Section):
    """Size of one rank's pools: pages of every pool group (the null page included), or bytes of all together."""

    pages: Annotated[int, Field(strict=True, ge=MIN_POOL_PAGES, le=1 << 48)] | None = None
    bytes: Annotated[SizeBytes, Field(ge=1)] | None = None

    @model_validator(mode="after")
    def _exactly_one(self) -> Self:
        if (self.pages is None) == (self.bytes is None):
            raise problem("exactly one of pages and bytes", "write {pages: 1024} or {bytes: 8GiB}")
        return self


class HostTierConfig(Section):
    """Host memory for pages that nobody runs with, and how they are stored there.

    Attributes:
        bytes: of all host pools of a rank together; 0 for no host tier.
        codec: "none" or "identity" keep every bit; "fp8" halves 16-bit K and V and rounds them: tokens may change.
    """

    bytes: SizeBytes = 0
    codec: Annotated[str, one_of("none", "identity", "fp8")] = "none"


def _layers(value: object) -> object:
    if value is None or value == "auto":
        return None
    if not isinstance(value, list | tuple) or not value:
        raise problem(
            "a list of layer entries", "start each entry with -, for example - {count: 32, owner: target, ...}"
        )
    return tuple(value)


class SideConfig(Section):
    """One side after `model` and `speculative` were handed down.

    Attributes:
        side, source: which half of which pair file this is, for messages.
        layers: the whole model's, in order; None where the runner's model decides (``auto``).
        instances: independent instances of the same shape; requests go to one of them.
        devices: device number of every rank; None: rank r takes device ``r % device_count``.
    """

    internal = frozenset({"side", "source"})

    side: Side
    source: str
    max_seq_len: Count
    tokens_per_block: Count
    kv_layout: Annotated[KVLayout, named(KVLayout)] = KVLayout.HND
    layers: Annotated[tuple[LayerEntry, ...] | None, checked(_layers)] = None
    speculative: SpeculativeConfig | None = None
    parallel: ParallelConfig = ParallelConfig()
    instances: Count = 1
    device: Annotated[str, one_of("cpu", "cuda")] = "cpu"
    devices: Annotated[tuple[Amount, ...], as_tuple("a list of device numbers", "write [0, 1]")] | None = None
    pool: PoolConfig
    host_tier: HostTierConfig = HostTierConfig()

    @model_validator(mode="after")
    def _devices_match_ranks(self) -> Self:
        if self.devices is None:
            return self
        if self.device != "cuda":
            raise problem("left out without device: cuda", "set device: cuda, or drop devices", field="devices")
        ranks = self.instances * self.parallel.world_size
        if len(self.devices) != ranks:
            want = f"{ranks} numbers, one per rank (instances x tp x pp x cp)"
            raise problem(want, "list a device for every rank", field="devices")
        return self

    @property
    def num_target_layers(self) -> int:
        """Target layers of the whole model."""
        return sum(entry.count for entry in self.layers or () if entry.owner is LayerOwner.TARGET)

    @property
    def num_draft_layers(self) -> int:
        """Draft layers of the whole model."""
        return sum(entry.count for entry in self.layers or () if entry.owner is LayerOwner.DRAFT)

    def device_of(self, rank: int, device_count: int) -> str:
        """Return the device of a rank: its entry of `devices`, else ``rank % device_count``."""
        if self.device == "cpu":
            return "cpu"
        return f"cuda:{self.devices[rank] if self.devices else rank % max(1, device_count)}"
