"""The pair file as typed, frozen data; reading, merging and complaining are `workers.config_load`'s business."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Final, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, PositiveInt, model_validator

from transfer.hello import DraftKVMode, PathKind, Side
from transfer.options import TransferOptions
from unikv.layer_spec import KVDtype, KVLayout, LayerOwner, ReusePolicy

_UNITS: Final = {"B": 1, "KiB": 1024, "MiB": 1024**2, "GiB": 1024**3}
_SIZE = re.compile(r"\s*(\d+(?:\.\d+)?)\s*(B|KiB|MiB|GiB)\s*")


def parse_size(value: object) -> object:
    """Return bytes for "8GiB" and the like; integers are bytes already.

    Raises:
        ValueError: a text that is no size.
    """
    if not isinstance(value, str):
        return value
    found = _SIZE.fullmatch(value)
    if found is None:
        raise ValueError(f"a size such as 8GiB, 512MiB or 4096B (units {', '.join(_UNITS)})")
    return int(float(found[1]) * _UNITS[found[2]])


Size = Annotated[int, BeforeValidator(parse_size), Field(ge=0)]
NonNegative = Annotated[int, Field(ge=0)]


class Settings(BaseModel):
    """Base of all sections: frozen, and no key it does not know."""

    model_config = ConfigDict(frozen=True, extra="forbid", arbitrary_types_allowed=True)


class LayerRunConfig(Settings):
    """`count` equal layers in a row. `kv_heads` is the model's global number."""

    count: PositiveInt = 1
    owner: LayerOwner
    kv_heads: PositiveInt
    head_dim: PositiveInt
    kv_factor: Literal[1, 2] = 2
    dtype: KVDtype
    window: PositiveInt | None = None
    sink_tokens: NonNegative = 0
    reuse: ReusePolicy = ReusePolicy.REQUIRED
    extra_buffers: dict[str, PositiveInt] = Field(default_factory=dict)


class SpeculativeConfig(Settings):
    """The speculative mode; see `unikv.speculation`."""

    method: str
    max_draft_tokens: PositiveInt
    block_width: NonNegative
    num_extra_kv_tokens: NonNegative


class ParallelConfig(Settings):
    """Ranks of one instance: ``rank = (pp_rank * tp + tp_rank) * cp + cp_rank``."""

    tp: PositiveInt = 1
    pp: PositiveInt = 1
    cp: PositiveInt = 1
    attention_dp: bool = False


class PoolConfig(Settings):
    """Size of the pools: pages of every pool group (null page included) or bytes in all."""

    pages: Annotated[int, Field(ge=2)] | None = None
    bytes: Size | None = None

    @model_validator(mode="after")
    def _one_of(self) -> PoolConfig:
        if (self.pages is None) == (self.bytes is None):
            raise ValueError("exactly one of pages and bytes")
        return self


class HostTierConfig(Settings):
    """The host tier of the cache; not served by this release, so only its defaults are accepted."""

    bytes: Size = 0
    codec: Literal["none", "identity", "fp8"] = "none"

    @model_validator(mode="after")
    def _not_yet(self) -> HostTierConfig:
        if self.bytes or self.codec != "none":
            raise ValueError("bytes 0 and codec none: this release has no host tier")
        return self


class SideConfig(Settings):
    """One side after merging: everything its workers need to know of themselves."""

    max_seq_len: PositiveInt
    tokens_per_block: PositiveInt
    kv_layout: KVLayout = KVLayout.HND
    layers: Annotated[tuple[LayerRunConfig, ...], Field(min_length=1)]
    speculative: SpeculativeConfig | None = None
    parallel: ParallelConfig = ParallelConfig()
    device: Literal["cpu", "cuda"] = "cpu"
    devices: tuple[NonNegative, ...] | None = None
    pool: PoolConfig
    host_tier: HostTierConfig = HostTierConfig()

    @model_validator(mode="after")
    def _drafts_last(self) -> SideConfig:
        owners = [run.owner for run in self.layers]
        if LayerOwner.TARGET in owners[owners.index(LayerOwner.DRAFT) :] if LayerOwner.DRAFT in owners else False:
            raise ValueError("layers with every target layer before the first draft layer")
        return self

    def device_of(self, rank: int, device_count: int) -> str:
        """Return the device of a rank: its entry of `devices`, else rank modulo the number of devices."""
        if self.device == "cpu":
            return "cpu"
        if self.devices:
            return f"cuda:{self.devices[rank % len(self.devices)]}"
        return f"cuda:{rank % max(1, device_count)}"


class TransferConfig(Settings):
    """How bytes move between the sides."""

    path: PathKind = PathKind.AUTO
    draft_kv: DraftKVMode = DraftKVMode.AUTO
    checksum: Literal["off", "page"] = "off"
    chunk_bytes: Annotated[int, BeforeValidator(parse_size), Field(ge=1)] = 8 * 1024**2
    timeout_s: Annotated[float, Field(gt=0, allow_inf_nan=False)] = 60.0
    curve: Mapping[str, Any] | None = None

    @model_validator(mode="after")
    def _not_yet(self) -> TransferConfig:
        if self.path is PathKind.NIXL:
            raise ValueError("path auto, direct or zmq: this release carries no nixl path")
        if self.checksum != "off":
            raise ValueError("checksum off: this release computes no checksums")
        if self.curve is not None:
            raise ValueError("curve null: this release does not encrypt its links")
        return self

    def options(self) -> TransferOptions:
        """Return the endpoints' options."""
        return TransferOptions(timeout_s=self.timeout_s, chunk_bytes=self.chunk_bytes)


class PatternRunnerConfig(Settings):
    """No model: pages hold a pattern that names layer, role, head and token."""

    kind: Literal["pattern"]


class HFRunnerConfig(Settings):
    """A causal LM that transformers loads, with a drafter.

    Attributes:
        draft: a model directory, ``{quantize_bits: N}`` or ``{drop_layers: N}`` of the target, or null.
        threads: threads of one tensor operation in each process; null leaves torch's choice.
    """

    kind: Literal["hf"]
    model: str
    draft: str | dict[Literal["quantize_bits", "drop_layers"], PositiveInt] | None = None
    draft_window: PositiveInt | None = None
    dtype: Literal["float32", "float16", "bfloat16"] = "float32"
    threads: PositiveInt | None = 1


RunnerConfig = Annotated[PatternRunnerConfig | HFRunnerConfig, Field(discriminator="kind")]


class WorkloadConfig(Settings):
    """What the benchmark sends.

    Attributes:
        requests, prompt_tokens: how many prompts of which lengths (runners without a model).
        prompts: texts, or a YAML file with a list of them (runners with a model).
        base_dir: where relative paths start; filled in when the file is read.
    """

    requests: PositiveInt = 8
    prompt_tokens: tuple[PositiveInt, PositiveInt] = (100, 1000)
    output_tokens: PositiveInt = 32
    concurrency: PositiveInt = 1
    prompts: str | tuple[str, ...] | None = None
    base_dir: Path = Field(default=Path(), exclude=True)

    @model_validator(mode="after")
    def _ordered(self) -> WorkloadConfig:
        if self.prompt_tokens[0] > self.prompt_tokens[1]:
            raise ValueError("prompt_tokens as [lowest, highest]")
        return self

    def texts(self) -> tuple[str, ...]:
        """Return the prompts; a file of them is read now.

        Raises:
            ConfigError: the file cannot be read, or is no list of texts.
        """
        from workers.config_load import read_prompts  # noqa: PLC0415 - that module imports this one

        if isinstance(self.prompts, str):
            return read_prompts(self.base_dir / self.prompts)
        return self.prompts or ()


class CaseConfig(Settings):
    """A named variation of the pair file: dotted keys and their values."""

    name: str
    set: dict[str, Any]


class PairConfig(Settings):
    """Both sides of a pair, resolved.

    Attributes:
        name: the preset's or file's name.
        source: where it was read from.
        matrix: named variations that the benchmark runs one after the other.
    """

    name: str
    source: str
    context: SideConfig
    generation: SideConfig
    transfer: TransferConfig = TransferConfig()
    runner: RunnerConfig
    workload: WorkloadConfig = WorkloadConfig()
    matrix: tuple[CaseConfig, ...] = ()

    @model_validator(mode="after")
    def _served(self) -> PairConfig:
        if isinstance(self.runner, HFRunnerConfig):
            for side in Side:
                parallel = self.side(side).parallel
                if (parallel.tp, parallel.pp, parallel.cp) != (1, 1, 1):
                    raise ValueError(f"{side}.parallel with tp, pp and cp 1: runner hf runs a model on one rank")
        return self

    def side(self, side: Side) -> SideConfig:
        """Return one side's settings."""
        return self.context if side is Side.CONTEXT else self.generation

    def resolved(self) -> dict[str, Any]:
        """Return everything as plain data, for reports."""
        return self.model_dump(mode="json")
