"""unikv: what a KV page is - layer specs, layout, pools, page tables and requests of target and drafter together.

The names below are the public ones. Those that need torch are imported on first use, so that the parts that only
decide (layout, ranges, plans) stay cheap to import.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Final

from unikv.errors import (
    CapacityError,
    ConfigError,
    CopyError,
    IncompatiblePeerError,
    InternalError,
    LinkBrokenError,
    LinkClosedError,
    LocalProtocolError,
    RemoteProtocolError,
    SpecError,
    UnikvError,
    UnknownLayerError,
)
from unikv.layer_spec import KVCacheLayerSpec, KVDtype, KVLayout, LayerOwner, ReusePolicy
from unikv.speculation import SpeculationShape

if TYPE_CHECKING:
    from unikv.budget import PoolBudget
    from unikv.cache_manager import UnifiedKVCacheManager
    from unikv.request import KVCacheRequest

__all__ = [
    "CapacityError",
    "ConfigError",
    "CopyError",
    "IncompatiblePeerError",
    "InternalError",
    "KVCacheLayerSpec",
    "KVCacheRequest",
    "KVDtype",
    "KVLayout",
    "LayerOwner",
    "LinkBrokenError",
    "LinkClosedError",
    "LocalProtocolError",
    "PoolBudget",
    "RemoteProtocolError",
    "ReusePolicy",
    "SpecError",
    "SpeculationShape",
    "UnifiedKVCacheManager",
    "UnikvError",
    "UnknownLayerError",
]

_IMPORTED_ON_USE: Final = {
    "KVCacheRequest": "unikv.request",
    "PoolBudget": "unikv.budget",
    "UnifiedKVCacheManager": "unikv.cache_manager",
}


def __getattr__(name: str) -> object:
    """Import the public names that are expensive to import."""
    if name not in _IMPORTED_ON_USE:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_IMPORTED_ON_USE[name]), name)


def __dir__() -> list[str]:
    """List the public names, imported yet or not."""
    return sorted({*globals(), *__all__})
