"""What one layer needs from the cache: the explicit, rank-local description everything else is derived from."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Final, Self

from unikv.errors import SpecError, explain
from unikv.ids import LayerId

KEY: Final = "key"
VALUE: Final = "value"
KEY_BLOCK_SCALE: Final = "key_block_scale"
VALUE_BLOCK_SCALE: Final = "value_block_scale"
STANDARD_ROLES: Final = (KEY, VALUE, KEY_BLOCK_SCALE, VALUE_BLOCK_SCALE)
"""The roles a layer's geometry implies; every other role is an extra with a declared size."""

NVFP4_SCALE_ELEMENTS: Final = 16
"""Elements that share one float8_e4m3fn scale in the NVFP4 format."""


class _ParsedEnum(StrEnum):
    """A string enum that names its legal values when asked for another one."""

    @classmethod
    def _missing_(cls, value: object) -> Self:
        legal = ", ".join(member.value for member in cls)
        raise SpecError(explain(cls.__name__, "value", value, f"one of {legal}", "use one of these names"))


class LayerOwner(_ParsedEnum):
    """Whose layer it is: the target model's or the drafter's."""

    TARGET = "target"
    DRAFT = "draft"


class ReusePolicy(_ParsedEnum):
    """What a layer group means to prefix reuse.

    REQUIRED groups constrain the match, OPTIONAL ones never shorten it, PRIVATE ones are never published.
    """

    REQUIRED = "required"
    OPTIONAL = "optional"
    PRIVATE = "private"


class KVLayout(_ParsedEnum):
    """Order inside one buffer of one page: ``[head, token, dim]`` or ``[token, head, dim]``."""

    HND = "HND"
    NHD = "NHD"


class KVDtype(_ParsedEnum):
    """Element types of K and V. NVFP4 packs two elements a byte and adds one float8_e4m3fn scale per 16."""

    FLOAT32 = "float32"
    FLOAT16 = "float16"
    BFLOAT16 = "bfloat16"
    FLOAT8_E4M3FN = "float8_e4m3fn"
    NVFP4 = "nvfp4"

    @property
    def bits(self) -> int:
        """Bits one element takes in the data buffer."""
        return {"float32": 32, "float16": 16, "bfloat16": 16, "float8_e4m3fn": 8, "nvfp4": 4}[self.value]


def _is_int(value: object) -> bool:
    """Return whether `value` is a true integer; ``True`` counts heads no better than ``"2"`` does."""
    return isinstance(value, int) and not isinstance(value, bool)


@dataclass(frozen=True, slots=True, kw_only=True)
class KVCacheLayerSpec:
    """One layer's KV storage on this rank.

    Attributes:
        layer_id: global layer number, unique in the manager; draft layers come after the target's.
        owner: target or draft; a name is parsed. There is no default: a wrong owner is a silent loss of draft KV.
        num_kv_heads: KV heads on THIS rank, after the tensor-parallel split; 0 only for a target layer that stores
            nothing but `extra_buffers`.
        total_num_kv_heads: KV heads of the whole model; None means the same as `num_kv_heads`.
        head_dim: elements per head (for MLA the latent width, e.g. 512 + 64).
        kv_factor: 2 for K and V, 1 for key-only layers (MLA, index keys).
        dtype: element type of this layer's K and V.
        window: sliding window in tokens, or None for full attention.
        sink_tokens: tokens at the start that never leave a window; rounded up to blocks.
        reuse_policy: what the layer means to prefix reuse.
        extra_buffers: further roles with their bytes per token, e.g. ``{"index_key": 256}``; replicated on every rank.

    Raises:
        SpecError: any field is out of its range; the text names the layer and the field.
        TypeError: `owner` is neither a `LayerOwner` nor the name of one.
    """

    layer_id: LayerId
    owner: LayerOwner
    num_kv_heads: int
    head_dim: int
    dtype: KVDtype
    kv_factor: int = 2
    total_num_kv_heads: int | None = None
    window: int | None = None
    sink_tokens: int = 0
    reuse_policy: ReusePolicy = ReusePolicy.REQUIRED
    extra_buffers: Mapping[str, int] = field(default_factory=dict, hash=False)

    def __post_init__(self) -> None:
        # Our own copy: the caller's mapping may change, the spec must not.
        object.__setattr__(self, "extra_buffers", dict(self.extra_buffers))
        self._check_identity()
        self._check_geometry()
        self._check_nvfp4()
        self._check_window()
        self._check_extras()

    @property
    def total_heads(self) -> int:
        """KV heads of the whole model."""
        return self.num_kv_heads if self.total_num_kv_heads is None else self.total_num_kv_heads

    @property
    def is_draft(self) -> bool:
        """Whether the drafter owns this layer."""
        return self.owner is LayerOwner.DRAFT

    @property
    def roles(self) -> tuple[str, ...]:
        """Every role this layer stores, data before scales before extras, K before V."""
        stored = self.kv_factor if self.num_kv_heads else 0
        scales = (KEY_BLOCK_SCALE, VALUE_BLOCK_SCALE) if self.dtype is KVDtype.NVFP4 else ()
        return (*(KEY, VALUE)[:stored], *scales[:stored], *self.extra_buffers)

    def _fail(self, name: str, got: object, want: str, cure: str) -> SpecError:
        return SpecError(explain(f"layer {self.layer_id}", name, got, want, cure))

    def _check_identity(self) -> None:
        if not _is_int(self.layer_id) or self.layer_id < 0:
            raise self._fail("layer_id", self.layer_id, "an integer >= 0", "number layers globally from 0")
        if not isinstance(self.owner, str):
            want = "LayerOwner.TARGET or LayerOwner.DRAFT"
            raise TypeError(explain(f"layer {self.layer_id}", "owner", self.owner, want, "pass the enum"))
        self._parse("owner", LayerOwner)
        self._parse("dtype", KVDtype)
        self._parse("reuse_policy", ReusePolicy)

    def _parse(self, name: str, kind: type[_ParsedEnum]) -> None:
        value = getattr(self, name)
        legal = {member.value: member for member in kind}
        if not isinstance(value, str) or value not in legal:
            raise self._fail(name, value, f"a {kind.__name__} ({', '.join(legal)})", "use one of these")
        object.__setattr__(self, name, legal[value])

    def _check_geometry(self) -> None:
        extras_only = self.num_kv_heads == 0 and bool(self.extra_buffers) and not self.is_draft
        if not _is_int(self.num_kv_heads) or (self.num_kv_heads < 1 and not extras_only):
            raise self._fail(
                "num_kv_heads", self.num_kv_heads, "an integer >= 1", "leave out layers that store nothing"
            )
        if not _is_int(self.head_dim) or self.head_dim < 1:
            raise self._fail("head_dim", self.head_dim, "an integer >= 1", "leave out layers that store nothing")
        if self.kv_factor not in (1, 2):
            raise self._fail("kv_factor", self.kv_factor, "1 (key-only) or 2 (K and V)", "set 1 or 2")
        total = self.total_num_kv_heads
        if total is not None and (not _is_int(total) or total < self.num_kv_heads):
            want = f"an integer >= num_kv_heads={self.num_kv_heads}"
            raise self._fail("total_num_kv_heads", total, want, "give the model's global head count")

    def _check_nvfp4(self) -> None:
        if self.dtype is not KVDtype.NVFP4:
            return
        if self.head_dim % 2:
            raise self._fail(
                "head_dim", self.head_dim, "even for nvfp4 (two elements a byte)", "pad the head dimension"
            )
        if self.head_dim % NVFP4_SCALE_ELEMENTS:
            want = f"a multiple of {NVFP4_SCALE_ELEMENTS} for nvfp4, so that every head owns whole scale bytes"
            raise self._fail("head_dim", self.head_dim, want, "pad the head dimension")

    def _check_window(self) -> None:
        if self.window is not None and (not _is_int(self.window) or self.window < 1):
            raise self._fail("window", self.window, "an integer >= 1 token, or None", "use None for full attention")
        if not _is_int(self.sink_tokens) or self.sink_tokens < 0:
            raise self._fail("sink_tokens", self.sink_tokens, "an integer >= 0 tokens", "use 0 for no sinks")
        if self.sink_tokens and self.window is None:
            raise self._fail("sink_tokens", self.sink_tokens, "0 without a window", "set a window or drop the sinks")

    def _check_extras(self) -> None:
        for role, size in self.extra_buffers.items():
            if role in STANDARD_ROLES:
                want = f"names other than {', '.join(STANDARD_ROLES)}"
                raise self._fail("extra_buffers", role, want, "rename the extra role")
            if not _is_int(size) or size < 1:
                want = "an integer >= 1 byte per token"
                raise self._fail(f"extra_buffers[{role!r}]", size, want, "leave out empty buffers")


def check_layer_specs(specs: Iterable[KVCacheLayerSpec]) -> tuple[KVCacheLayerSpec, ...]:
    """Return `specs` as a tuple after the checks that concern several layers.

    Raises:
        SpecError: no layers at all, a layer id twice, or a draft layer numbered before a target layer.
    """
    ordered = tuple(specs)
    if not ordered:
        raise SpecError(explain("cache", "layers", 0, "at least one layer that stores something", "add a layer spec"))
    seen: set[int] = set()
    for spec in ordered:
        if spec.layer_id in seen:
            raise SpecError(
                explain(f"layer {spec.layer_id}", "layer_id", spec.layer_id, "unique", "renumber the layers")
            )
        seen.add(spec.layer_id)
    last_target = max((spec.layer_id for spec in ordered if not spec.is_draft), default=-1)
    for spec in ordered:
        if spec.is_draft and spec.layer_id < last_target:
            want = f"> {last_target}, the last target layer"
            raise SpecError(explain(f"layer {spec.layer_id}", "layer_id", spec.layer_id, want, "number drafts last"))
    return ordered
