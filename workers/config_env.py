"""What a launcher such as torchrun tells a worker through its environment."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from unikv.errors import ConfigError, explain

_CURE: Final = "start the worker with torchrun, or pass --side, --rank and --rendezvous"


@dataclass(frozen=True, slots=True, kw_only=True)
class LaunchEnvironment:
    """A launcher's word.

    Attributes:
        rank: of this process among all it started.
        world_size: how many it started, on all hosts.
        local_world_size: how many of them on this host; as many as `world_size` where it does not say.
        rendezvous: ``tcp://MASTER_ADDR:MASTER_PORT``.
        hosts_store: the launcher itself hosts a store there, as torchrun does; otherwise rank 0 has to.
    """

    rank: int
    world_size: int
    local_world_size: int
    rendezvous: str
    hosts_store: bool

    @property
    def several_hosts(self) -> bool:
        """Whether some of the processes run on another host."""
        return self.local_world_size < self.world_size


def read_launch(environ: Mapping[str, str] | None = None) -> LaunchEnvironment:
    """Return what the launcher said.

    Args:
        environ: environment to read; None for the process's own.

    Raises:
        ConfigError: a variable is missing or is no number in its range; the text names it.
    """
    env = os.environ if environ is None else environ
    world_size = _number(env, "WORLD_SIZE", low=1)
    address, port = _text(env, "MASTER_ADDR"), _number(env, "MASTER_PORT", low=1, end=65536)
    return LaunchEnvironment(
        rank=_number(env, "RANK", low=0, end=world_size),
        world_size=world_size,
        local_world_size=_number(env, "LOCAL_WORLD_SIZE", low=1, end=world_size + 1, default=world_size),
        rendezvous=f"tcp://[{address}]:{port}" if ":" in address else f"tcp://{address}:{port}",
        hosts_store=env.get("TORCHELASTIC_USE_AGENT_STORE", "") == "True",
    )


def _text(env: Mapping[str, str], name: str) -> str:
    value = env.get(name, "")
    if not value:
        raise ConfigError(explain("environment", name, env.get(name), "a value", _CURE))
    return value


def _number(env: Mapping[str, str], name: str, *, low: int, end: int | None = None, default: int | None = None) -> int:
    if default is not None and name not in env:
        return default
    text = _text(env, name)
    value = int(text) if text.isascii() and text.isdecimal() else -1
    if value < low or (end is not None and value >= end):
        want = f"a number from {low}" if end is None else f"a number in [{low}, {end})"
        raise ConfigError(explain("environment", name, text, want, _CURE))
    return value
