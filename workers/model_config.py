"""What a model's config.json says about its KV cache, read as plain JSON: no torch, no transformers, no weights.

==========================================  ==========================================================================
key (in `text_config` first, then on top)   decides
==========================================  ==========================================================================
num_hidden_layers, num_kv_shared_layers     layers; the last ones may use the pages of earlier ones and keep none
num_key_value_heads                         KV heads, else num_attention_heads
head_dim                                    elements per head, else hidden_size / num_attention_heads
kv_lora_rank, qk_rope_head_dim              latent attention: one key-only head of their sum
index_head_dim                              an index key per token beside it: FP8, with a float32 scale
sliding_window, layer_types, ...            windows, see `workers.model_windows`
max_position_embeddings                     the longest sequence
torch_dtype, dtype                          element type of K and V, unless the command line says another
==========================================  ==========================================================================
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from unikv.errors import ConfigError, SpecError, explain
from unikv.ids import LayerId
from unikv.layer_spec import KVCacheLayerSpec, KVDtype, LayerOwner, ReusePolicy
from unikv.ranges import head_shard
from workers.dry import MAX_LAYERS
from workers.hf_specs import DRAFT_LAG_TOKENS
from workers.model_windows import layer_windows

CONFIG_FILE: Final = "config.json"
MAX_FILE_BYTES: Final = 16 << 20
MAX_VALUE: Final = 1 << 30
"""Largest number in a config that is taken seriously."""

_TEXT_PARTS: Final = ("text_config", "language_config", "llm_config")
_ALIASES: Final = {
    "num_hidden_layers": ("n_layer", "n_layers", "num_layers"),
    "num_attention_heads": ("n_head", "n_heads"),
    "num_key_value_heads": ("num_kv_heads", "n_head_kv", "multi_query_group_num"),
    "hidden_size": ("n_embd", "d_model"),
    "head_dim": ("kv_channels",),
    "max_position_embeddings": ("n_positions", "max_seq_len", "seq_length"),
}
"""Other names of the same things in older models."""

_DTYPES: Final = {
    **{dtype.value: dtype for dtype in KVDtype},
    **{"float": KVDtype.FLOAT32, "half": KVDtype.FLOAT16},
}
_INDEX_SCALE_BYTES: Final = 4
_THING: Final = "model config "


class ConfigKeys:
    """The keys of one config.json, with its path for messages."""

    def __init__(self, thing: str, scopes: Sequence[Mapping[str, Any]]) -> None:
        self.thing = thing
        self._scopes = scopes

    def raw(self, key: str) -> Any:
        """Return the value of `key` or of another name for it; None where there is none."""
        for scope in self._scopes:
            for name in (key, *_ALIASES.get(key, ())):
                if scope.get(name) is not None:
                    return scope[name]
        return None

    def count(self, key: str, default: int | None = None, *, least: int = 1, most: int = MAX_VALUE) -> int:
        """Return an integer.

        Raises:
            ConfigError: it is missing and there is no default, or it is none, or it is out of range.
        """
        value = self.raw(key)
        if value is None and default is not None:
            return default
        if value is None:
            raise self.wrong(
                key, None, "an integer >= 1", f"add {key} to a copy of the file; configs may leave out defaults"
            )
        if type(value) is not int or not least <= value <= most:
            huge = type(value) is int and value > most
            raise self.wrong(key, value, f"an integer <= {most}" if huge else f"an integer >= {least}", "correct it")
        return value

    def wrong(self, key: str, got: object, want: str, cure: str) -> ConfigError:
        """Return the error for `key`."""
        shown = got if got is None or (isinstance(got, int) and abs(got) <= 10**30) else str(got)[:80]
        return ConfigError(explain(self.thing, key, shown, want, cure))


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    """What a model keeps per token.

    Attributes:
        source: how messages name the file.
        model_type: family, "unknown" where the file does not say.
        kv_heads, head_dim, kv_factor: of every layer, global.
        windows: per layer in tokens, None for full attention; layers that keep nothing are left out.
        dtype: element type in the file, None where it names none a cache can hold.
        dtype_name: as the file spells it, bfloat16 where it does not.
        max_seq_len: longest sequence in tokens, None where the file does not say.
        extra_buffers: bytes per token of what lies beside K and V.
    """

    source: str
    model_type: str
    kv_heads: int
    head_dim: int
    kv_factor: int
    windows: tuple[int | None, ...]
    dtype: KVDtype | None
    dtype_name: str
    max_seq_len: int | None
    extra_buffers: Mapping[str, int] = field(default_factory=dict)

    @property
    def path(self) -> str:
        """Path of the file."""
        return self.source.removeprefix(_THING)

    def local_heads(self, tp: int) -> int:
        """Return the KV heads of one of `tp` ranks: a part of them, or a copy of one.

        Raises:
            ConfigError: heads and `tp` do not divide one another.
        """
        try:
            return len(head_shard(self.kv_heads, tp, 0, thing=f"{self.source} (--tp {tp})").heads)
        except SpecError as error:
            raise ConfigError(str(error)) from None

    def specs(
        self, *, tp: int, dtype: KVDtype | None, draft: bool = False, first_id: int = 0
    ) -> list[KVCacheLayerSpec]:
        """Return the layers of one rank.

        Args:
            tp: ranks the heads are split over.
            dtype: element type of K and V; None takes the file's.
            draft: whether it is the drafter, whose pages stay one token longer than it looks back.
            first_id: id of the first layer.

        Raises:
            ConfigError: there is no dtype, heads and `tp` do not fit, or no cache holds such layers.
        """
        option = "--draft-dtype" if draft else "--dtype"
        kind = dtype or self.dtype
        if kind is None:
            want = f"one of {', '.join(KVDtype)}"
            raise ConfigError(explain(self.source, "dtype", self.dtype_name, want, f"pass {option}"))
        lag = DRAFT_LAG_TOKENS if draft else 0
        try:
            return [
                KVCacheLayerSpec(
                    layer_id=LayerId(first_id + number),
                    owner=LayerOwner.DRAFT if draft else LayerOwner.TARGET,
                    num_kv_heads=self.local_heads(tp),
                    total_num_kv_heads=self.kv_heads,
                    head_dim=self.head_dim,
                    kv_factor=self.kv_factor,
                    dtype=kind,
                    window=None if window is None else window + lag,
                    reuse_policy=ReusePolicy.OPTIONAL if draft else ReusePolicy.REQUIRED,
                    extra_buffers=self.extra_buffers,
                )
                for number, window in enumerate(self.windows)
            ]
        except SpecError as error:
            raise ConfigError(f"{self.source}: {error}, or pass another {option}") from None


def read_model_config(folder: str, option: str = "--model") -> ModelConfig:
    """Return what the config.json in `folder` describes.

    Args:
        folder: a model's directory, or the file itself.
        option: which option named it, for messages.

    Raises:
        ConfigError: it cannot be read, or describes a cache this project does not size; names file, key and cure.
    """
    keys = ConfigKeys(*_load(folder, option))
    layers = keys.count("num_hidden_layers", most=MAX_LAYERS)
    windows = layer_windows(keys, layers)
    kept = layers - keys.count("num_kv_shared_layers", 0, least=0)
    if kept < 1:
        raise keys.wrong("num_kv_shared_layers", layers - kept, f"< num_hidden_layers={layers}", "correct one of them")
    name = str(keys.raw("torch_dtype") or keys.raw("dtype") or KVDtype.BFLOAT16)[:80]
    latent = keys.raw("kv_lora_rank") is not None
    return ModelConfig(
        source=keys.thing,
        model_type=str(keys.raw("model_type") or "unknown")[:40],
        kv_heads=1 if latent else _kv_heads(keys),
        head_dim=keys.count("kv_lora_rank") + keys.count("qk_rope_head_dim") if latent else _head_dim(keys),
        kv_factor=1 if latent else 2,
        windows=windows[:kept],
        # Quantised checkpoints may name other types: what the cache holds is then for the caller to say.
        dtype=_DTYPES.get(name.removeprefix("torch.")),
        dtype_name=name,
        max_seq_len=None if keys.raw("max_position_embeddings") is None else keys.count("max_position_embeddings"),
        extra_buffers=_index_keys(keys) if latent else {},
    )


def _load(folder: str, option: str) -> tuple[str, list[Mapping[str, Any]]]:
    try:
        path = Path(folder)
        path = path / CONFIG_FILE if path.is_dir() else path
        with path.open("rb") as file:
            data = file.read(MAX_FILE_BYTES + 1)
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        want = f"a model's directory with a {CONFIG_FILE} ({reason})"
        raise ConfigError(explain("size", option, folder, want, "name the directory the model lies in")) from None
    thing = f"{_THING}{path}"
    if len(data) > MAX_FILE_BYTES:
        raise ConfigError(explain(thing, "size in bytes", len(data), f"<= {MAX_FILE_BYTES}", "name a config.json"))
    try:
        content = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise ConfigError(explain(thing, "content", str(error)[:80], "JSON", "name a model's config.json")) from None
    if not isinstance(content, dict):
        got = type(content).__name__
        raise ConfigError(explain(thing, "content", got, "a JSON object", "name a model's config.json"))
    texts = [content[name] for name in _TEXT_PARTS if isinstance(content.get(name), dict)]
    return thing, [*texts[:1], content]


def _kv_heads(keys: ConfigKeys) -> int:
    if keys.raw("multi_query") is True and keys.raw("new_decoder_architecture") is not True:
        return 1  # whatever num_kv_heads says, as in Falcon
    if keys.raw("num_key_value_heads") is not None:
        return keys.count("num_key_value_heads")
    return keys.count("num_attention_heads")


def _head_dim(keys: ConfigKeys) -> int:
    if keys.raw("head_dim") is not None:
        return keys.count("head_dim")
    hidden, heads = keys.count("hidden_size"), keys.count("num_attention_heads")
    if hidden % heads:
        raise keys.wrong("hidden_size", hidden, f"a multiple of num_attention_heads={heads}", "add head_dim to a copy")
    return hidden // heads


def _index_keys(keys: ConfigKeys) -> dict[str, int]:
    if keys.raw("index_head_dim") is None:
        return {}
    return {"index_key": keys.count("index_head_dim") + _INDEX_SCALE_BYTES}
