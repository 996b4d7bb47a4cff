"""What two ranks tell each other before anything moves: the rank card.

A card is everything the peer needs to decide (gate), to plan (copy program) and to reach memory (paths). It is plain
frozen data: building it does no I/O.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Final

from unikv.ids import GroupId, Rank
from unikv.layer_spec import KVLayout, LayerOwner, ReusePolicy
from unikv.views import KVView

PROTOCOL_VERSION: Final = 1
CAPABILITY_PER_VIEW_HEADS: Final = "per_view_heads"
CAPABILITY_NIXL: Final = "nixl"
"""Chunks can be carried by NIXL: its package is installed here."""


class Side(StrEnum):
    """Which half of a pair a worker belongs to."""

    CONTEXT = "context"
    GENERATION = "generation"


class DraftKVMode(StrEnum):
    """What the operator asked for: decide, require, forbid, or allow unequal tensor parallelism."""

    AUTO = "auto"
    REQUIRE = "1"
    OFF = "0"
    PER_VIEW = "per_view"


class PathKind(StrEnum):
    """How bytes reach the peer. AUTO is a wish only; a pair of ranks always has one of the others."""

    AUTO = "auto"
    DIRECT = "direct"
    ZMQ = "zmq"
    NIXL = "nixl"


@dataclass(frozen=True, slots=True, kw_only=True)
class ParallelPosition:
    """A rank's place in its instance."""

    tp: int = 1
    tp_rank: int = 0
    pp: int = 1
    pp_rank: int = 0
    cp: int = 1
    cp_rank: int = 0
    attention_dp: bool = False

    @property
    def rank(self) -> Rank:
        """Flat rank, context parallelism innermost."""
        return Rank((self.pp_rank * self.tp + self.tp_rank) * self.cp + self.cp_rank)

    @property
    def world_size(self) -> int:
        """Ranks of the whole instance."""
        return self.tp * self.pp * self.cp

    @property
    def data_ranks(self) -> int:
        """How many groups of ranks serve whole requests, each on its own: one without attention data parallelism."""
        return self.tp if self.attention_dp else 1

    @property
    def data_rank(self) -> int:
        """The group this rank belongs to."""
        return self.tp_rank if self.attention_dp else 0

    @property
    def group_size(self) -> int:
        """Ranks that share a request."""
        return self.world_size // self.data_ranks

    @property
    def leads_group(self) -> bool:
        """Whether this is the first rank of its group."""
        return self.pp_rank == self.cp_rank == 0 and self.tp_rank in (0, self.data_rank)


@dataclass(frozen=True, slots=True, kw_only=True)
class HostIdentity:
    """Tells whether two processes can map each other's memory. Addresses cannot: containers and NAT share those."""

    hostname: str
    boot_id: str
    pid_namespace: str
    pid: int


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryExport:
    """How a peer on the same host maps one storage.

    Attributes:
        kind: "memfd" (``/proc/<pid>/fd/<fd>``), or "cuda" (an allocation that CUDA opens by its handle).
        pid, fd: the exporting process and its descriptor (memfd).
        inode: the file's inode, compared after opening so that a recycled pid or descriptor is noticed (memfd).
        handle, offset_bytes: what opens the allocation, and where in it the storage begins (cuda).
        device: identifies the device that holds the memory in every process (cuda).
    """

    kind: str
    pid: int
    fd: int = 0
    inode: int = 0
    handle: bytes = b""
    offset_bytes: int = 0
    device: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class StorageCard:
    """One allocation. `export` is None where no peer can map it."""

    size_bytes: int
    export: MemoryExport | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolCard:
    """One pool: slot ``s`` starts ``offset_bytes + s * slot_stride_bytes`` into storage `storage` of the card."""

    group_id: GroupId
    pool_index: int
    storage: int
    slot_stride_bytes: int
    num_slots: int
    offset_bytes: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupCard:
    """One layer group as the peer must know it to pair pages."""

    group_id: GroupId
    owner: LayerOwner
    window: int | None
    sink_blocks: int
    reuse_policy: ReusePolicy


@dataclass(frozen=True, slots=True, kw_only=True)
class SpeculativeCard:
    """The speculative configuration of a side, for the gate."""

    method: str
    max_draft_tokens: int
    block_width: int
    num_extra_kv_tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class RankCard:
    """Everything one rank says of itself.

    Attributes:
        incarnation: random per process start; the same address with another incarnation is another peer.
        address: link address the peer connects to; empty in a dry run.
        num_target_layers, num_draft_layers: of the whole instance, not of this stage.
        path: what the operator asked for.
        layer_bands: on a context rank, into how many bands of layers a group's pages are cut, so that a band can leave
            while later ones are computed; 1 moves whole pages.
        reach: devices (as `MemoryExport.device` names them) whose memory this rank's device can write.
    """

    protocol_version: int = PROTOCOL_VERSION
    incarnation: str
    instance: str
    side: Side
    position: ParallelPosition
    address: str
    device: str
    kv_layout: KVLayout
    tokens_per_block: int
    num_target_layers: int
    num_draft_layers: int
    groups: tuple[GroupCard, ...]
    storages: tuple[StorageCard, ...]
    pools: tuple[PoolCard, ...]
    views: tuple[KVView, ...]
    speculative: SpeculativeCard | None
    draft_kv: DraftKVMode
    path: PathKind
    checksum: str = "off"
    layer_bands: int = 1
    capabilities: tuple[str, ...] = (CAPABILITY_PER_VIEW_HEADS,)
    host: HostIdentity | None = None
    reach: tuple[str, ...] = ()

    @property
    def rank(self) -> Rank:
        """Flat rank inside the instance."""
        return self.position.rank

    def group(self, group_id: GroupId) -> GroupCard:
        """Return the card of layer group `group_id`; KeyError where the rank has no such group."""
        for card in self.groups:
            if card.group_id == group_id:
                return card
        raise KeyError(group_id)

    def pool(self, group_id: GroupId, pool_index: int) -> PoolCard:
        """Return the card of one pool; KeyError where the rank has no such pool."""
        for card in self.pools:
            if (card.group_id, card.pool_index) == (group_id, pool_index):
                return card
        raise KeyError((group_id, pool_index))
