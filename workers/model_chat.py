"""Prompts of a real model as token ids: first turns, and turns that continue what was generated, token by token."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

from transformers import AutoTokenizer

_ANSWER: Final = "\u241fanswer\u241f"
"""Stands for the assistant's answer while the chat template is asked what comes behind one."""


class ChatFormat:
    """How a model wants conversations: through its chat template where it has one, else as plain text."""

    def __init__(self, model: Path) -> None:
        """Read the tokenizer in directory `model`."""
        self._tokenizer: Any = AutoTokenizer.from_pretrained(model)

    def first(self, text: str) -> tuple[int, ...]:
        """Return the prompt of a conversation's first turn."""
        if not self._tokenizer.chat_template:
            return self._ids(text, special=True)
        chat = [{"role": "user", "content": text}]
        encoded = self._tokenizer.apply_chat_template(chat, add_generation_prompt=True, tokenize=True, return_dict=True)
        return tuple(int(token) for token in encoded["input_ids"])

    def following(self, prompt: Sequence[int], output: Sequence[int], text: str) -> tuple[int, ...]:
        """Return the prompt that asks `text` after `prompt` was answered with `output`, both kept as they are."""
        between = self._ids(self._between(text), special=False)
        if output and between and output[-1] == between[0]:
            between = between[1:]  # the model has ended its turn itself
        return (*prompt, *output, *between)

    def text(self, tokens: Sequence[int]) -> str:
        """Return the text of `tokens`."""
        return str(self._tokenizer.decode(list(tokens), skip_special_tokens=True))

    def _between(self, text: str) -> str:
        if not self._tokenizer.chat_template:
            return f"\n\n{text}"
        chat = [
            {"role": "user", "content": ""},
            {"role": "assistant", "content": _ANSWER},
            {"role": "user", "content": text},
        ]
        rendered = str(self._tokenizer.apply_chat_template(chat, add_generation_prompt=True, tokenize=False))
        return rendered.partition(_ANSWER)[2]

    def _ids(self, text: str, *, special: bool) -> tuple[int, ...]:
        return tuple(int(token) for token in self._tokenizer(text, add_special_tokens=special)["input_ids"])
