"""The messages two ranks exchange, as frozen data. Their wire form is `transfer.wire`'s business alone.

==============  =======================  ==========================================================================
message         direction                says
==============  =======================  ==========================================================================
Hello           generation -> context    who I am
HelloAck        context -> generation    who I am, the gate's report, the program's digest and the path taken
HelloNack       context -> generation    the gate's report, complete
Ask             generation -> context    I reserved these pages; move request R into them
Chunk           context -> generation    staged bytes of R (packed pages)
Credit          generation -> context    one chunk of R is scattered, send another
Vacate          generation -> context    these berths were read and may be written again
Done            context -> generation    everything of R has landed (or been sent); the account; aux data
Failed          context -> generation    R will not be completed by me, I touch its pages no more
Cancel          generation -> context    stop R
Withdraw        generation -> context    R came from other ranks: forget my ask, everybody else's stands
CancelAck       context -> generation    I touch R's pages no more
Reregister      context -> generation    I do not know this incarnation of you; say Hello again
Goodbye         either                   orderly end
==============  =======================  ==========================================================================
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from transfer.gate import GateReport
from transfer.hello import PathKind, RankCard
from unikv.ids import RequestId


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupTable:
    """One request's page table of one layer group: int32 slots by ordinal, NO_PAGE where nothing is wanted."""

    group_id: int
    slots: NDArray[np.int32]


@dataclass(frozen=True, slots=True, kw_only=True)
class AuxData:
    """What travels beside the KV.

    Attributes:
        first_tokens: tokens the context side already sampled.
        draft_tokens: tokens the drafter already proposed after them.
        prompt_tokens, cached_tokens: counts for the client's usage report.
    """

    first_tokens: tuple[int, ...] = ()
    draft_tokens: tuple[int, ...] = ()
    prompt_tokens: int = 0
    cached_tokens: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class PairAccount:
    """What one context rank moved of one group pair: the receiver compares it with its own plan."""

    pair: int
    pages: int
    bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class StageTimes:
    """Seconds the context rank spent on one request for one generation rank.

    Attributes:
        queue_s: from when the KV was ready and asked for until the move began.
        plan_s: pairing the pages.
        move_s: time spent copying (staged: and sending chunks), between the first copy and the last.
        exposed_s: from when all KV was there until the last copy: what a reader waits for the move.
    """

    queue_s: float
    plan_s: float
    move_s: float
    exposed_s: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Hello:
    """A generation rank introduces itself."""

    card: RankCard


@dataclass(frozen=True, slots=True, kw_only=True)
class HelloAck:
    """A context rank accepts; `digest` is its copy program's, `path` how it will move bytes to this peer."""

    card: RankCard
    report: GateReport
    digest: str
    path: PathKind
    path_reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class HelloNack:
    """`reason` says in one line what stands between the two; the report has every check."""

    card: RankCard
    report: GateReport
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Ask:
    """`reply_to` is our link's address: a context rank that does not know us (any more) answers there.

    `landing` says where the berths for its chunks are, on a path that has any; only carriers read it.
    """

    request_id: RequestId
    epoch: int
    reply_to: str
    prompt_tokens: int
    tables: tuple[GroupTable, ...]
    landing: bytes = b""


@dataclass(frozen=True, slots=True, kw_only=True)
class Berth:
    """Where a chunk was written on the generation rank.

    Attributes:
        index: number of the berth.
        serial: number of this use of it, by which it is vacated; the context rank gives each once.
        bytes: how many bytes are in it.
    """

    index: int
    serial: int
    bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Chunk:
    """`pages` packed pages of group pair `pair`, the first of them being page pair number `first_page`.

    Their bytes are the payload, or, with an empty payload, in `berth` already.
    """

    request_id: RequestId
    epoch: int
    pair: int
    first_page: int
    pages: int
    payload: memoryview
    berth: Berth | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Credit:
    """`chunks` chunks of a request were taken off the link: as many more may be sent."""

    request_id: RequestId
    epoch: int
    chunks: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Vacate:
    """The generation rank has read these berths, or will not. It says so of every chunk that was announced to it."""

    serials: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Done:
    """The context rank's last word on a request that went well, with what it moved."""

    request_id: RequestId
    epoch: int
    account: tuple[PairAccount, ...]
    aux: AuxData | None
    times: StageTimes


@dataclass(frozen=True, slots=True, kw_only=True)
class Failed:
    """The context rank's last word on a request that did not: it touches the pages no more."""

    request_id: RequestId
    epoch: int
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Cancel:
    """The generation rank wants to reuse the request's pages; it waits for a CancelAck or another last word.

    It is said again and again until that comes. `reply_to` is as in an Ask.
    """

    request_id: RequestId
    epoch: int
    reason: str
    reply_to: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Withdraw:
    """Who did not know which data-parallel rank has a request asked all of them, and another one has sent it.

    Unlike a Cancel it says nothing about the request, which others may still wait for. It is answered by a CancelAck,
    and said again until that comes. `reply_to` is as in an Ask.
    """

    request_id: RequestId
    epoch: int
    reply_to: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class CancelAck:
    """The context rank touches the pages of this attempt no more."""

    request_id: RequestId
    epoch: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Reregister:
    """The context rank does not know this incarnation of the sender; say hello again."""

    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Goodbye:
    """Orderly end: the sender touches no page of the receiver any more."""

    reason: str


Message = (
    Hello
    | HelloAck
    | HelloNack
    | Ask
    | Chunk
    | Credit
    | Vacate
    | Done
    | Failed
    | Cancel
    | Withdraw
    | CancelAck
    | Reregister
    | Goodbye
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Envelope:
    """A message with its sender: every message carries the sender's incarnation and rank from the first one on."""

    incarnation: str
    rank: int
    message: Message
