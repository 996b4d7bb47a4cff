"""Where a standalone drafter comes from: its own directory, or made out of the target in memory.

==================  ========================================================================================
``{quantize_bits}``  the target with its decoder weights rounded; embedding and head are shared, not copied
``{drop_layers}``    the target without some inner decoder layers; every weight is shared, not copied
a path               another model with the same vocabulary
==================  ========================================================================================

The first two need no second model and still behave like one: they disagree with the target now and then, and they
have KV of their own that is worth transferring.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Self

import torch
from torch import nn

from unikv.errors import ConfigError, explain

WEIGHT_GROUP: Final = 16
"""Neighbouring weights of one output row that share a scale and an offset when rounded."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftOption:
    """The ``runner.draft`` choice: exactly one field is set.

    Attributes:
        path: directory of a model with the target's vocabulary.
        quantize_bits: bits per weight, 2 to 8.
        drop_layers: how many inner decoder layers to leave out, at least 1.
    """

    path: Path | None = None
    quantize_bits: int | None = None
    drop_layers: int | None = None

    def __post_init__(self) -> None:
        given = {name: getattr(self, name) for name in self.__slots__ if getattr(self, name) is not None}
        if len(given) != 1:
            raise _draft_error(given, "exactly one of path, quantize_bits, drop_layers", "leave one of them")
        bits, dropped = self.quantize_bits, self.drop_layers
        if bits is not None and not 2 <= bits <= 8:
            raise _draft_error({"quantize_bits": bits}, "2 to 8 bits", "3 makes a drafter that is right half the time")
        if dropped is not None and dropped < 1:
            raise _draft_error({"drop_layers": dropped}, "at least 1 layer", "leave `draft` out for no drafter")

    @classmethod
    def parse(cls, value: object) -> Self | None:
        """Return the option a pair file's ``runner.draft`` stands for (None: no drafter).

        Raises:
            ConfigError: neither null, nor a path, nor a mapping with one known key and an integer.
        """
        if value is None or isinstance(value, cls):
            return value
        if isinstance(value, str | Path):
            return cls(path=Path(value))
        integers = isinstance(value, Mapping) and all(type(number) is int for number in value.values())
        if not integers or not set(value) <= {"quantize_bits", "drop_layers"}:  # type: ignore[call-overload]
            raise _draft_error(value, "a path, {quantize_bits: N} or {drop_layers: N}", "choose one of the three")
        return cls(**value)  # type: ignore[arg-type]


def derive_drafter(target: nn.Module, option: DraftOption) -> nn.Module:
    """Return the drafter that `option` makes out of `target` (which stays as it was).

    Raises:
        ConfigError: `option` names a path (loading is the runner's), or the target has too few layers to drop.
    """
    if option.quantize_bits is not None:
        return quantized_copy(target, option.quantize_bits)
    if option.drop_layers is not None:
        return shortened_copy(target, option.drop_layers)
    raise _draft_error(option.path, "quantize_bits or drop_layers", "load a drafter with a path by itself")


def quantized_copy(model: nn.Module, bits: int) -> nn.Module:
    """Return a copy whose decoder weights are rounded to ``2**bits`` levels; it shares everything else with `model`."""
    draft = _copy_sharing_weights(model)
    for module in decoder_layers(draft).modules():
        if isinstance(module, nn.Linear):
            rounded = round_weights(module.weight.detach(), bits)
            module.weight = nn.Parameter(rounded, requires_grad=False)
    return draft


def round_weights(weight: torch.Tensor, bits: int) -> torch.Tensor:
    """Round a ``[out, in]`` matrix to ``2**bits`` evenly spaced levels per group of neighbouring inputs.

    Each group keeps its own smallest and largest value, which is what makes 3 bits usable.
    """
    group = math.gcd(weight.shape[1], WEIGHT_GROUP)
    rows = weight.reshape(-1, group).float()
    low, high = rows.amin(dim=1, keepdim=True), rows.amax(dim=1, keepdim=True)
    step = ((high - low) / (2**bits - 1)).clamp_min(torch.finfo(torch.float32).tiny)
    rounded: torch.Tensor = ((rows - low) / step).round() * step + low
    return rounded.reshape(weight.shape).to(weight.dtype)


def shortened_copy(model: nn.Module, drop: int) -> nn.Module:
    """Return a copy without `drop` decoder layers, taken evenly from the middle; it shares all weights with `model`.

    The first and the last layer stay: they carry the embedding in and the prediction out.
    """
    draft = _copy_sharing_weights(model)
    layers = decoder_layers(draft)
    dropped = evenly_spread(len(layers), drop)
    kept = [index for index in range(len(layers)) if index not in dropped]
    config: Any = draft.config
    config.num_hidden_layers = len(kept)
    if getattr(config, "layer_types", None):
        config.layer_types = [config.layer_types[index] for index in kept]
    base: Any = draft.base_model
    base.layers = nn.ModuleList(layers[index] for index in kept)
    for position, layer in enumerate(base.layers):
        for module in layer.modules():
            if hasattr(module, "layer_idx"):
                module.layer_idx = position
    return draft


def evenly_spread(layers: int, drop: int) -> frozenset[int]:
    """Return `drop` indices spread evenly over the inner layers ``[1, layers - 1)``.

    Raises:
        ConfigError: fewer than `drop` inner layers.
    """
    inner = layers - 2
    if drop > inner:
        cure = "drop fewer layers or use quantize_bits"
        raise _draft_error({"drop_layers": drop}, f"at most {max(inner, 0)} of the target's {layers} layers", cure)
    return frozenset(1 + (2 * i + 1) * inner // (2 * drop) for i in range(drop))


def decoder_layers(model: nn.Module) -> nn.ModuleList:
    """Return the list of decoder layers of a causal language model.

    Raises:
        ConfigError: the model does not keep them in ``base_model.layers``.
    """
    layers = getattr(getattr(model, "base_model", None), "layers", None)
    if not isinstance(layers, nn.ModuleList):
        cure = "use a model family with base_model.layers (Llama, Qwen, Mistral, ...) or a drafter with its own path"
        raise ConfigError(explain("runner.draft", "model", type(model).__name__, "a plain decoder stack", cure))
    return layers


def _copy_sharing_weights(model: nn.Module) -> nn.Module:
    # Telling deepcopy that every parameter is already copied makes it rebuild the modules around the same weights.
    shared = {id(parameter): parameter for parameter in model.parameters()}
    return copy.deepcopy(model, shared)


def _draft_error(got: object, want: str, cure: str) -> ConfigError:
    return ConfigError(explain("runner", "draft", got, want, cure))
