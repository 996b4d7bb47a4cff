"""What a worker process asks of whatever fills pages and decodes from them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

from transfer.device_bytes import DeviceEvent
from transfer.hello import RankCard
from transfer.messages import AuxData
from transfer.pages import SlotArray
from unikv.cache_manager import UnifiedKVCacheManager
from unikv.ids import GroupId, LayerId, RequestId
from unikv.request import KVCacheRequest

Tables = Mapping[GroupId, SlotArray]


class OnLayer(Protocol):
    """Told that the KV of the first so many tokens is in the pages of a layer."""

    def __call__(self, layer_id: LayerId, tokens: int, written: DeviceEvent | None = None) -> None:
        """Hear of one layer; on a device its KV is there when `written` has happened."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Decoded:
    """What the generation side produced from one request's pages."""

    tokens: tuple[int, ...] = ()
    steps: int = 0
    proposed: int = 0
    accepted: int = 0
    accepted_lengths: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptPages:
    """The pages of one prompt on one rank, as something to look at.

    Attributes:
        tables: int32 slots by ordinal per layer group.
        prompt_tokens: tokens whose KV is in the pages.
        unit_tokens: tokens that are looked at as one piece. It divides the blocks of both sides, so that ranks with
            blocks of different lengths speak of the same pieces.
        prompt: token ids; empty where requests are told apart by their ids.
        cached_tokens: leading tokens by layer group, whole blocks, that were there before and did not travel.
    """

    request_id: RequestId
    tables: Tables
    prompt_tokens: int
    unit_tokens: int
    prompt: tuple[int, ...] = ()
    cached_tokens: Mapping[GroupId, int] = field(default_factory=dict)


class Digest(NamedTuple):
    """What one piece of KV hashes to, and how many bytes that were."""

    value: bytes
    size_bytes: int


DigestKey = tuple[int, str, int, int]
"""(layer, role, global head, number of the unit: its first token divided by `PromptPages.unit_tokens`)"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Evidence:
    """What a rank can say about the bytes of one request's live pages.

    Attributes:
        checked_bytes: bytes looked at.
        mismatched_bytes: bytes this rank itself found wrong, those of missing pages included.
        first_mismatch: where the first wrong byte is and what it looks like; empty where none is.
        digests: for runners whose bytes only the context side knows.
    """

    checked_bytes: int = 0
    mismatched_bytes: int = 0
    first_mismatch: str = ""
    digests: Mapping[DigestKey, Digest] = field(default_factory=dict)


class Runner(Protocol):
    """One model (or what stands in for it) on one rank. One thread uses it at a time.

    Attributes:
        background: the runner's work only serves the benchmark (filling, checking), so that it should give way to
            the transfer where cores are few.
    """

    background: bool

    def bind(self, manager: UnifiedKVCacheManager, card: RankCard) -> None:
        """Use the pages of `manager`, which `card` describes, from now on."""
        ...

    def prefill(
        self,
        request: KVCacheRequest,
        prompt: tuple[int, ...],
        prompt_tokens: int,
        publish_at: int | None = None,
        on_layer: OnLayer | None = None,
    ) -> AuxData:
        """Compute the KV of a prompt into the request's pages; history is its length afterwards.

        A runner that takes part in prefix reuse ends a chunk at `publish_at` and commits what it has. It calls
        `on_layer` as layers are written.
        """
        ...

    def discard(self, tables: Tables) -> None:
        """Called on the generation side when a request is over: make what it leaves behind recognisable as stale.

        Not called for requests whose pages others may go on using.
        """
        ...

    def examine(self, pages: PromptPages, *, with_draft: bool) -> Evidence:
        """Look at every live byte of a prompt in our pages, those of draft layers only if `with_draft`."""
        ...

    def decode(
        self, request: KVCacheRequest, prompt: tuple[int, ...], first_token: int, draft_valid_from: int, max_new: int
    ) -> Decoded:
        """Decode from the pages of `request` until the end token or `max_new` tokens, `first_token` included."""
        ...
