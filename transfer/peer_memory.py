"""Memory of a peer on the same host as regions for a copier: what the direct path writes into."""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from transfer.copier import Region
from transfer.device_bytes import DeviceBytes
from transfer.hello import HostIdentity, PoolCard, RankCard, StorageCard
from transfer.ipc_memory import MappedDeviceStorage, device_number
from transfer.mapped_storage import MappedStorage
from unikv.errors import LocalProtocolError, RemoteProtocolError, SpecError, UnikvError, explain
from unikv.ids import GroupId

__all__ = ["MappedStorage", "PeerMemory", "can_map", "local_regions", "own_host_identity"]


def own_host_identity() -> HostIdentity:
    """Return what tells a peer whether it can map this process's memory."""
    return HostIdentity(
        hostname=socket.gethostname(),
        boot_id=Path("/proc/sys/kernel/random/boot_id").read_text().strip(),
        pid_namespace=str(Path("/proc/self/ns/pid").readlink()),
        pid=os.getpid(),
    )


def can_map(card_host: HostIdentity | None, own: HostIdentity) -> tuple[bool, str]:
    """Return whether the process `own` can map memory of the process `card_host`, and why or why not.

    Both must run on one kernel (boot id) and see one another's process ids (pid namespace). Host names do not count:
    two containers of one host have different ones, and two hosts may have the same.
    """
    if card_host is None:
        return False, "the peer does not say on which host it runs"
    if card_host.boot_id != own.boot_id:
        return False, f"another host: boot id {card_host.boot_id} of {card_host.hostname}, ours is {own.boot_id}"
    if card_host.pid_namespace != own.pid_namespace:
        return False, f"another container: pid namespace {card_host.pid_namespace}, ours is {own.pid_namespace}"
    return True, f"same host {card_host.hostname} and pid namespace {card_host.pid_namespace}"


class PeerMemory:
    """Every storage of one peer, mapped, and its pools as regions. Close it when the peer is gone; also a context."""

    def __init__(self, card: RankCard, *, device: str = "cpu") -> None:
        """Map all storages of `card`; on an error nothing stays mapped.

        Args:
            card: the peer's card.
            device: what copies into them: "cpu", or the device of ours whose kernels do.

        Raises:
            RemoteProtocolError, LinkBrokenError, IncompatiblePeerError: as `MappedStorage`; the first also where a
                pool of the card does not fit its storage.
        """
        self._storages: list[MappedStorage | MappedDeviceStorage] = []
        self._regions: dict[GroupId, dict[int, Region]] | None = None
        self._peer = f"{card.side} {card.instance} rank {card.rank}"
        try:
            for number, storage in enumerate(card.storages):
                self._storages.append(_map(card, storage, device, f"{self._peer} storage {number}"))
            arrays: list[Any] = [storage.array for storage in self._storages]
            self._regions = _regions_of(card, arrays, self._peer, RemoteProtocolError)
        except BaseException:
            self.close()
            raise

    def regions(self, group_id: GroupId) -> Mapping[int, Region]:
        """Return the region of every pool of layer group `group_id`, by pool index. The memory stays the peer's.

        Raises:
            KeyError: the peer has no such group with pools.
            LocalProtocolError: the memory is closed.
        """
        if self._regions is None:
            raise LocalProtocolError(explain(self._peer, "mapped memory", "closed", "open", "map the peer again"))
        return self._regions[group_id]

    def close(self) -> None:
        """Give all mappings up; each ends with the last region or array taken from it. Idempotent, never fails."""
        self._regions = None
        for storage in self._storages:
            storage.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _map(card: RankCard, storage: StorageCard, device: str, thing: str) -> MappedStorage | MappedDeviceStorage:
    if device == "cpu":
        return MappedStorage(storage, thing=thing)
    return MappedDeviceStorage(storage, incarnation=card.incarnation, device=device_number(device), thing=thing)


def local_regions(
    card: RankCard, arrays: Sequence[NDArray[np.uint8] | DeviceBytes]
) -> dict[GroupId, dict[int, Region]]:
    """Return the regions of our own pools: by group id, then by pool index.

    Args:
        card: our own card.
        arrays: one array per storage of the card, in its order; the regions borrow their memory.

    Raises:
        SpecError: storages and arrays differ in number, or a pool does not fit its array.
    """
    if len(arrays) != len(card.storages):
        want = f"{len(card.storages)}, one per storage of the card"
        raise SpecError(explain("own pools", "arrays", len(arrays), want, "pass the arrays that the card describes"))
    return _regions_of(card, arrays, "own pools", SpecError)


def _regions_of(
    card: RankCard, arrays: Sequence[NDArray[Any] | DeviceBytes], thing: str, refusal: type[UnikvError]
) -> dict[GroupId, dict[int, Region]]:
    regions: dict[GroupId, dict[int, Region]] = {}
    for pool in card.pools:
        _check_pool(pool, arrays, f"{thing} group {pool.group_id} pool {pool.pool_index}", refusal)
        regions.setdefault(pool.group_id, {})[pool.pool_index] = Region(
            memory=arrays[pool.storage][pool.offset_bytes :] if pool.offset_bytes else arrays[pool.storage],
            slot_stride_bytes=pool.slot_stride_bytes,
            num_slots=pool.num_slots,
        )
    return regions


def _check_pool(
    pool: PoolCard, arrays: Sequence[NDArray[Any] | DeviceBytes], thing: str, refusal: type[UnikvError]
) -> None:
    if not 0 <= pool.storage < len(arrays):
        raise refusal(explain(thing, "storage", pool.storage, f"in [0, {len(arrays)})", "correct the card"))
    end = pool.offset_bytes + pool.slot_stride_bytes * pool.num_slots
    if min(pool.slot_stride_bytes, pool.num_slots) < 1 or pool.offset_bytes < 0 or end > arrays[pool.storage].size:
        got = f"{pool.num_slots} slots of {pool.slot_stride_bytes} bytes"
        got += f" from byte {pool.offset_bytes} on" if pool.offset_bytes else ""
        want = f"at least one slot and at most {arrays[pool.storage].size} bytes in storage {pool.storage}"
        raise refusal(explain(thing, "size", got, want, "correct the card"))


def process_is_gone(host: HostIdentity | None) -> bool:
    """Return whether it is proven that the process `host` names no longer runs, so that its mappings are gone.

    Only a process of this host and pid namespace can be proven gone. A zombie counts: the kernel took its memory when
    it exited. A recycled process id looks alive, which errs on the safe side.
    """
    if host is None or not can_map(host, own_host_identity())[0]:
        return False
    try:
        stat = Path(f"/proc/{host.pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return True
    return stat.rpartition(")")[2].split()[0] in ("Z", "X")
