"""What the caller (launcher, benchmark) and the workers tell each other. Same codec as the transfer, other magic."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from transfer.hello import Side
from transfer.messages import StageTimes
from transfer.wire import Codec
from unikv.ids import RequestId


@dataclass(frozen=True, slots=True, kw_only=True)
class Attach:
    """The caller introduces itself: reports go to `reply_to` from now on.

    Attributes:
        owner: the worker was started by this caller, and ends when the caller goes.
    """

    reply_to: str
    owner: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class PathReport:
    """Which path a pair of workers took, and why. Workers of a side are numbered through all its instances."""

    context_rank: int
    generation_rank: int
    path: str
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Ready:
    """A worker is attached and serves. `paths` and `draft_kv` come from generation workers."""

    side: Side
    rank: int
    device: str
    paths: tuple[PathReport, ...] = ()
    draft_kv: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunPrompt:
    """To every context rank of one group: compute this prompt's KV and publish it.

    Attributes:
        prompt: token ids; empty where the runner needs a length only.
        verify: send evidence of the pages' bytes once the transfer is over.
    """

    request_id: RequestId
    prompt: tuple[int, ...]
    prompt_tokens: int
    verify: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class RunDecode:
    """To every generation rank of one group: fetch this request and decode up to `max_new_tokens`.

    Attributes:
        context_instance: number of the context instance that computes the prompt; None: we compute it ourselves.
        context_data_rank: the data-parallel rank of it that does; None where nobody knows.
        hold: do not look at what has arrived before a Proceed.
    """

    request_id: RequestId
    prompt: tuple[int, ...]
    prompt_tokens: int
    max_new_tokens: int
    verify: bool
    context_instance: int | None = 0
    context_data_rank: int | None = 0
    hold: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Proceed:
    """To every generation rank of a request that is held: nothing of it moves any more anywhere."""

    request_id: RequestId


@dataclass(frozen=True, slots=True, kw_only=True)
class GiveUp:
    """To every rank that takes part in a request: it cannot succeed any more, or nobody wants it."""

    request_id: RequestId
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class DigestReport:
    """Digests of the `units` of one (layer, role, global head), joined, and of how many bytes each was made."""

    layer: int
    role: str
    head: int
    units: tuple[int, ...]
    sizes_bytes: tuple[int, ...]
    digests: bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class EvidenceReport:
    """What a rank saw in its live pages; see `workers.runner.Evidence`."""

    checked_bytes: int
    mismatched_bytes: int
    first_mismatch: str
    digests: tuple[DigestReport, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class LegRecord:
    """One pair of ranks' share of one request."""

    peer: int
    path: str
    bytes: int
    draft_bytes: int
    times: StageTimes | None


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptReport:
    """A context rank is finished with a request.

    Attributes:
        reason: empty on success.
        cached_tokens: leading tokens of the prompt that were not computed again.
    """

    request_id: RequestId
    rank: int
    reason: str
    prefill_s: float
    evidence: EvidenceReport | None
    cached_tokens: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class DecodeReport:
    """A generation rank is finished with a request.

    Attributes:
        reason: empty on success.
        usable_s: when the pages became usable, on the monotonic clock of the host; 0 where they did not.
        settle_s: from the last context rank's last word to usable pages.
        cached_tokens: leading tokens of the prompt that every layer group had already, in whole blocks.
        decode_s: time spent decoding.
        accepted_lengths: accepted draft tokens of every speculative step.
    """

    request_id: RequestId
    rank: int
    reason: str
    usable_s: float = 0.0
    settle_s: float = 0.0
    cached_tokens: int = 0
    verify_s: float = 0.0
    decode_s: float = 0.0
    tokens: tuple[int, ...] = ()
    steps: int = 0
    proposed: int = 0
    accepted: int = 0
    accepted_lengths: tuple[int, ...] = ()
    legs: tuple[LegRecord, ...] = ()
    evidence: EvidenceReport | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Stop:
    """End: take nothing new, let what is being moved arrive within a short while, fail the rest."""

    reason: str


ControlMessage = Attach | Ready | RunPrompt | RunDecode | Proceed | GiveUp | PromptReport | DecodeReport | Stop

CODEC: Final[Codec[ControlMessage]] = Codec(
    (Attach, Ready, RunPrompt, RunDecode, Proceed, GiveUp, PromptReport, DecodeReport, Stop), magic="unikv-control"
)
"""Encodes and decodes control messages."""
