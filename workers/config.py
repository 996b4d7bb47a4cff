"""What a pair file says, resolved and frozen: both sides, how KV moves between them, and what runs.

`workers.config_load.load_pair` makes these from YAML. Keys of ``model`` and a top-level ``speculative`` have been
handed down to both sides already, so every reader finds one value for one fact.

Everything here is immutable; sizes are in bytes, lengths in tokens.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, Self

from pydantic import Field, model_validator

from transfer.hello import DraftKVMode, PathKind, Side
from transfer.options import TransferOptions
from workers.config_side import (
    HostTierConfig,
    LayerEntry,
    ParallelConfig,
    PoolConfig,
    Section,
    SideConfig,
    SpeculativeConfig,
)
from workers.config_values import (
    Amount,
    Count,
    DraftSource,
    Flag,
    Seconds,
    SizeBytes,
    Text,
    as_tuple,
    checked,
    named,
    one_of,
    printable,
    problem,
)

if TYPE_CHECKING:
    from transfer.link_curve import CurveKeys

__all__ = [
    "CancelConfig",
    "CurveConfig",
    "HFRunnerConfig",
    "HostTierConfig",
    "LayerEntry",
    "MatrixCase",
    "PairConfig",
    "ParallelConfig",
    "PatternRunnerConfig",
    "PoolConfig",
    "RunnerConfig",
    "SideConfig",
    "SpeculativeConfig",
    "TransferConfig",
    "WorkloadConfig",
]


class CurveConfig(Section):
    """Key files that authenticate and encrypt links; relative paths start at the pair file's directory."""

    public: Path
    secret: Path
    authorized: Path

    def load(self) -> CurveKeys:
        """Read the files.

        Raises:
            ConfigError: one is missing, no key file, or a secret that others may read.
        """
        from transfer.link_curve import load_keys  # noqa: PLC0415 - most commands need no sockets

        return load_keys(self.public, self.secret, self.authorized)


class TransferConfig(Section):
    """How pages move. Both sides use the same.

    Attributes:
        layer_bands: 0 moves a prompt's pages when all of it is computed; from 1 on they leave while it is computed, in
            so many bands of layers, and chunk by chunk.
        copy_threads: threads of one rank that share a copy between host pools; more than one helps where cores idle.
        watch_us: microseconds an engine looks for messages without a pause after it had something to do.
        listen: interface, address or name of a host where its links listen; None: loopback, or where the rendezvous is
            on a network the interface that leads there.
        advertise: name or address that peers are told instead.
        peer_silence_s: a peer that has been silent for so long is gone, as after a cut cable.
    """

    path: Annotated[PathKind, named(PathKind)] = PathKind.AUTO
    draft_kv: Annotated[DraftKVMode, named(DraftKVMode, spelled={0: "0", 1: "1"})] = DraftKVMode.AUTO
    # YAML reads an unquoted off as false.
    checksum: Annotated[str, one_of("off", "page", spelled={False: "off"})] = "off"
    chunk_bytes: Annotated[SizeBytes, Field(ge=1)] = 8 << 20
    timeout_s: Seconds = 60.0
    layer_bands: Annotated[int, Field(ge=0, le=1024)] = 0
    copy_threads: Annotated[int, Field(ge=1, le=64)] = 1
    watch_us: Annotated[int, Field(ge=0, le=1_000_000)] = 0
    curve: CurveConfig | None = None
    listen: Text | None = None
    advertise: Text | None = None
    peer_silence_s: Annotated[Seconds, Field(le=6000)] = 30.0

    def curve_keys(self) -> CurveKeys | None:
        """Return the keys of every link, None where links are open. Raises ConfigError as `CurveConfig.load`."""
        return None if self.curve is None else self.curve.load()

    def options(self) -> TransferOptions:
        """Return what an endpoint needs of this."""
        return TransferOptions(timeout_s=self.timeout_s, chunk_bytes=self.chunk_bytes, watch_s=self.watch_us / 1e6)


class PatternRunnerConfig(Section):
    """No model: pages are filled with bytes that name their place.

    Attributes:
        pad_rows: rows without a request behind every decode step's own, as batches of a fixed size have them.
    """

    kind: Literal["pattern"] = "pattern"
    pad_rows: Annotated[int, Field(strict=True, ge=0, le=1 << 16)] = 0


class HFRunnerConfig(Section):
    """A transformers model and its drafter.

    Attributes:
        model: ``smollm2``, or a directory.
        draft: None, a directory, ``{"quantize_bits": n}`` or ``{"drop_layers": n}``.
        dtype: of the computation; pages have the dtype of their layers.
        draft_window: attention window in tokens imposed on the drafter.
        chunk_tokens: tokens of one prefill pass; None runs a prompt in one.
        threads: threads of one tensor operation in each process; None leaves torch's choice.
    """

    kind: Literal["hf"]
    model: Text
    draft: DraftSource = None
    dtype: Annotated[str, one_of("float32", "float16", "bfloat16")] = "float32"
    draft_window: Count | None = None
    chunk_tokens: Count | None = None
    threads: Count | None = 1


def _turns(value: object) -> object:
    """Read prompts: each a text, or a list of texts that follow one another in a conversation."""
    want = "a list of texts (or of lists of texts, the turns of a conversation), or a YAML file with one"
    conversations = []
    for entry in value if isinstance(value, list | tuple) else [None]:
        turns = entry if isinstance(entry, list | tuple) else [entry]
        texts = [turn.strip() for turn in turns if isinstance(turn, str) and turn.strip()]
        if not texts or len(texts) != len(turns):
            raise problem(want, "start each text with -")
        conversations.append(tuple(texts))
    return tuple(conversations)


class CancelConfig(Section):
    """Requests that the caller cancels: every so many, each at a moment of its own within so many seconds."""

    every: Count
    within_s: Seconds


class WorkloadConfig(Section):
    """What the benchmark asks for.

    Attributes:
        shared_prefix_tokens: without a model: prompts are tokens, the first so many the same in all of them, and both
            sides reuse prefixes; 0: prompts are lengths only.
        cancel: None cancels nothing.
        local_below_tokens: without a model: shorter prompts are computed on the generation side, nothing moves.
        rival: without a model: what else moves the longest prompt's pages for comparison.
        prompts: conversations, read already where the file named another file.
        tell_data_rank: tell generation ranks which data-parallel rank of the context side has a request; else they ask
            all of them.
    """

    requests: Count = 8
    prompt_tokens: Annotated[tuple[Count, Count], as_tuple("[lowest, highest]", "write [100, 1000]", length=2)] = (
        100,
        1000,
    )
    output_tokens: Count = 32
    rival: Annotated[str, one_of("none", "nixl")] = "none"
    concurrency: Count = 4
    tell_data_rank: Flag = True
    shared_prefix_tokens: Amount = 0
    cancel: CancelConfig | None = None
    local_below_tokens: Amount = 0
    prompts: Annotated[tuple[tuple[str, ...], ...], checked(_turns)] | None = None

    @model_validator(mode="after")
    def _ordered(self) -> Self:
        if self.prompt_tokens[0] > self.prompt_tokens[1]:
            raise problem("[lowest, highest]", "write the smaller length first", field="prompt_tokens")
        return self

    def conversations(self) -> tuple[tuple[str, ...], ...]:
        """Return the prompts, each with the turns that follow it; none where lengths are all there is."""
        return self.prompts or ()


def _with_kind(value: object) -> object:
    """Refuse unknown kinds in our own words, and fill in the kind that needs no other key."""
    kinds = ("pattern", "hf")
    if not isinstance(value, dict):
        raise problem(f"a mapping with kind: {' or '.join(kinds)}", "write {kind: pattern}")
    if value.get("kind") not in kinds:
        raise problem(f"one of {', '.join(kinds)}", "say which runner fills the pages", field="kind")
    return value


class MatrixCase(Section):
    """A named variation of the pair: dotted keys and their values, applied before anything is inherited."""

    name: Annotated[str, Field(strict=True, pattern=r"^[A-Za-z0-9][A-Za-z0-9_.+-]*$")]
    set: dict[str, Any] = Field(default_factory=dict)


RunnerConfig = Annotated[PatternRunnerConfig | HFRunnerConfig, Field(discriminator="kind")]


class PairConfig(Section):
    """A whole pair file.

    Attributes:
        source: what it was loaded from: a path or the name of a preset.
        name: for titles; the file's own, or made from `source`.
        case: the matrix case that was applied, None for the file as it is.
        context, generation: the two sides; see `side`.
        matrix: named variations that the benchmark runs one after the other.
    """

    internal = frozenset({"source", "case"})

    source: str
    name: Annotated[Text, checked(printable)]
    case: str | None = None
    context: SideConfig
    generation: SideConfig
    transfer: TransferConfig = TransferConfig()
    runner: Annotated[RunnerConfig, checked(_with_kind)] = PatternRunnerConfig()
    workload: WorkloadConfig = WorkloadConfig()
    matrix: Annotated[tuple[MatrixCase, ...], as_tuple("a list of {name, set}", "start each case with -")] = ()

    def side(self, side: Side) -> SideConfig:
        """Return one side."""
        return self.context if side is Side.CONTEXT else self.generation

    def resolved(self) -> dict[str, Any]:
        """Return everything as plain JSON-able data, defaults included."""
        return self.model_dump(mode="json")
