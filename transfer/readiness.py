"""How far the KV of one request is computed: layer by layer, token by token. What is ready may leave early.

The model's thread marks progress, the engine's thread reads it. Numbers only grow, so a reader that sees an old one is
late by a turn and never wrong. On a device a layer may be marked when its kernels are queued, with an event behind
them: the copy waits for the event there, and nobody waits on the host.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

from transfer.device_bytes import DeviceEvent
from unikv.ids import LayerId


class ReadinessManager:
    """Progress of one request on one context rank.

    Attributes:
        prompt_tokens: tokens of the whole prompt.
    """

    def __init__(self, prompt_tokens: int, *, complete: bool) -> None:
        """Start with nothing computed, or with everything."""
        self.prompt_tokens: Final = prompt_tokens
        self._complete = complete
        self._tokens: dict[LayerId, int] = {}
        self._written: dict[LayerId, DeviceEvent] = {}

    @property
    def complete(self) -> bool:
        """Whether everything is there, what travels beside the KV included."""
        return self._complete

    def mark(self, layer_id: LayerId, tokens: int, written: DeviceEvent | None = None) -> None:
        """Say that the KV of the first `tokens` tokens is in the pages of a layer; fewer than before says nothing.

        With `written` it is there when that event has happened. A later event of a layer must be behind its earlier
        ones, as events of one stream are.
        """
        if written is not None:
            self._written[layer_id] = written  # first: whoever sees the tokens sees the event, or a later one
        if tokens > self._tokens.get(layer_id, 0):
            self._tokens[layer_id] = tokens

    def finish(self) -> None:
        """Say that everything is there."""
        self._complete = True

    def tokens(self, layers: Iterable[LayerId]) -> int:
        """Return how many leading tokens every one of `layers` has."""
        if self._complete:
            return self.prompt_tokens
        return min((self._tokens.get(layer_id, 0) for layer_id in layers), default=0)

    def after(self, layers: Iterable[LayerId]) -> tuple[DeviceEvent, ...] | None:
        """Return the events behind which all marked KV of `layers` is; None where some layer was marked without one."""
        found = [self._written.get(layer_id) for layer_id in layers]
        events = {id(event): event for event in found if event is not None}
        return tuple(events.values()) if found and None not in found else None
