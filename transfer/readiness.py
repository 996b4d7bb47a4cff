"""How far the KV of one request is computed: layer by layer, token by token. What is ready may leave early.

The model's thread marks progress, the engine's thread reads it. Numbers only grow, so a reader that sees an old one is
late by a turn and never wrong.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

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

    @property
    def complete(self) -> bool:
        """Whether everything is there, what travels beside the KV included."""
        return self._complete

    def mark(self, layer_id: LayerId, tokens: int) -> None:
        """Say that the KV of the first `tokens` tokens is in the pages of a layer; fewer than before says nothing."""
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
