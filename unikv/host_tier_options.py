"""How large a host tier is, and how pages look there."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from unikv.errors import SpecError, explain
from unikv.layer_spec import KVCacheLayerSpec, KVDtype

CODECS: Final = ("identity", "fp8")
"""Names of the codecs, see `unikv.cold_codec`."""
_FP8_DTYPES: Final = (KVDtype.FLOAT16, KVDtype.BFLOAT16)


@dataclass(frozen=True, slots=True, kw_only=True)
class HostTierOptions:
    """How large the host tier is, and how pages look there.

    Attributes:
        pages: pages of every pool group.
        bytes: bytes of all host pools together; give one of the two.
        codec: "identity", or "fp8" for half the memory at a stated error (`unikv.cold_codec`).

    Raises:
        SpecError: neither or both are given, or one is not positive.
    """

    pages: int | None = None
    bytes: int | None = None
    codec: str = "identity"

    def __post_init__(self) -> None:
        if (self.pages is None) == (self.bytes is None):
            got = f"pages={self.pages} and bytes={self.bytes}"
            raise SpecError(explain("host tier", "size", got, "either pages or bytes", "give exactly one of them"))
        for name in ("pages", "bytes"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise SpecError(explain("host tier", name, value, ">= 1", "leave the host tier out"))


def check_codec(codec: str, specs: Sequence[KVCacheLayerSpec]) -> None:
    """Check that a codec can store the pages of one cache; it goes by the dtype of the layers, which must be one.

    Args:
        codec: its name, see `HostTierOptions`.
        specs: the layers of the cache.

    Raises:
        SpecError: there is none of that name; or the layers differ in dtype, or theirs has not 16 bits, under "fp8".
    """
    if codec not in CODECS:
        raise SpecError(explain("host tier", "codec", codec, f"one of {', '.join(CODECS)}", "choose one of them"))
    if codec == "identity":
        return
    for spec in specs:
        want = f"{specs[0].dtype.value} as in layer {specs[0].layer_id}"
        if spec.dtype not in _FP8_DTYPES:
            want = " or ".join(dtype.value for dtype in _FP8_DTYPES)
        elif spec.dtype is specs[0].dtype:
            continue
        cure = "use the identity codec"
        raise SpecError(explain(f"layer {spec.layer_id}", "dtype under the fp8 codec", spec.dtype.value, want, cure))


def auto_host_bytes(device_bytes: int, available_bytes: int, local_ranks: int, memlock_bytes: int | None) -> int:
    """Return how large a host tier to have where nobody said: no larger than the device's pools.

    Args:
        device_bytes: bytes of this rank's pools.
        available_bytes: memory the host can give.
        local_ranks: ranks that share it; together they take half of it.
        memlock_bytes: what this user may pin, of which a fifth is left to others; None for no limit.
    """
    share = available_bytes // (2 * max(1, local_ranks))
    limit = share if memlock_bytes is None else min(share, memlock_bytes * 4 // 5)
    return max(0, min(device_bytes, limit))
