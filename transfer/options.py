"""Settings of an endpoint. Both sides of a pair use the same."""

from __future__ import annotations

from dataclasses import dataclass

from unikv.errors import ConfigError, explain


@dataclass(frozen=True, slots=True, kw_only=True)
class TransferOptions:
    """How an endpoint moves and when it gives up.

    Attributes:
        timeout_s: longest a request may be open on either side.
        chunk_bytes: most bytes copied or sent in one step; a page is never split.
        staging_chunks: chunks a context rank stages at one time, over all requests.
        max_blocks: longest page table accepted from a peer.
        hello_timeout_s: longest wait for a peer to answer a hello.
        watch_s: how long an engine goes on looking for messages without a pause after it had something to do. To fall
            asleep and to be woken costs more than a small transfer; watching costs a core, and other threads of the
            process wait a switch interval for their turn.
    """

    timeout_s: float = 60.0
    chunk_bytes: int = 8 * 1024**2
    staging_chunks: int = 8
    max_blocks: int = 1 << 20
    hello_timeout_s: float = 30.0
    watch_s: float = 0.0

    def __post_init__(self) -> None:
        for name in ("timeout_s", "chunk_bytes", "staging_chunks", "max_blocks", "hello_timeout_s"):
            value = getattr(self, name)
            if not value > 0:  # not a number is no setting either
                raise ConfigError(explain("transfer options", name, value, "> 0", "leave it out for the default"))
        if not self.watch_s >= 0:
            raise ConfigError(explain("transfer options", "watch_s", self.watch_s, ">= 0", "leave it out for none"))
