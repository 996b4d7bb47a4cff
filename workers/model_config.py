"""What a Hugging Face ``config.json`` says about a model's KV cache, read as plain JSON: no torch, no transformers."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from unikv.errors import ConfigError, explain
from unikv.ids import LayerId
from unikv.layer_spec import KVCacheLayerSpec, KVDtype, LayerOwner
from unikv.ranges import head_shard

_DTYPES: Final = {"bfloat16", "float16", "float32"}
_FULL: Final = ("full_attention", "global_attention", "attention")
_SLIDING: Final = ("sliding_attention", "local_attention", "chunked_attention")


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    """The part of a model that its cache sees.

    Attributes:
        source: the file it was read from.
        kv_heads, head_dim: of the whole model; latent attention has one head of the latent's size.
        kv_factor: 2 for K and V, 1 for latent attention.
        windows: sliding window in tokens per layer, None for full attention.
        max_seq_len: longest sequence.
        dtype: of the weights, and so of the cache where nobody says otherwise.
    """

    source: str
    kv_heads: int
    head_dim: int
    kv_factor: int
    windows: tuple[int | None, ...]
    max_seq_len: int
    dtype: KVDtype

    def specs(self, *, tp: int, dtype: KVDtype | None, owner: LayerOwner, first: int) -> list[KVCacheLayerSpec]:
        """Return the layers of rank 0 of `tp`; the others hold as much.

        Raises:
            ConfigError: heads and tp do not divide one another.
            SpecError: the layers cannot be stored as `dtype`.
        """
        local = 1
        if self.kv_factor == 2:
            try:
                local = len(head_shard(self.kv_heads, tp, 0).heads)
            except ValueError as error:
                raise ConfigError(f"{self.source}: {error}") from None
        return [
            KVCacheLayerSpec(
                layer_id=LayerId(first + number),
                owner=owner,
                num_kv_heads=local,
                total_num_kv_heads=self.kv_heads,
                head_dim=self.head_dim,
                kv_factor=self.kv_factor,
                dtype=dtype or self.dtype,
                window=window,
            )
            for number, window in enumerate(self.windows)
        ]


def read_model_config(path: str) -> ModelConfig:
    """Read the ``config.json`` in directory `path`, or the file `path` itself.

    Raises:
        ConfigError: there is none, it is no JSON object, or a key is missing or wrong; the text names file and key.
    """
    file = Path(path) / "config.json" if Path(path).is_dir() else Path(path)
    content = _Config(_read(file), str(file))
    layers = content.count("num_hidden_layers")
    heads = content.count("num_attention_heads")
    latent = content.optional_count("kv_lora_rank")
    if latent is not None:
        kv_heads, head_dim, kv_factor = 1, latent + content.count("qk_rope_head_dim"), 1
    else:
        kv_heads, kv_factor = content.optional_count("num_key_value_heads") or heads, 2
        head_dim = content.optional_count("head_dim") or content.count("hidden_size") // heads
    return ModelConfig(
        source=str(file),
        kv_heads=kv_heads,
        head_dim=head_dim,
        kv_factor=kv_factor,
        windows=_windows(content, layers),
        max_seq_len=content.count("max_position_embeddings"),
        dtype=content.dtype(),
    )


@dataclass(frozen=True, slots=True)
class _Config:
    values: dict[str, Any]
    source: str

    def count(self, key: str) -> int:
        value = self.optional_count(key)
        if value is None:
            raise self.wrong(key, None, "an integer >= 1", "add the key, or point to the model's own config.json")
        return value

    def optional_count(self, key: str) -> int | None:
        value = self.values.get(key)
        if value is None:
            return None
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise self.wrong(key, value, "an integer >= 1", "correct the file")
        return value

    def dtype(self) -> KVDtype:
        name = str(self.values.get("dtype") or self.values.get("torch_dtype") or "bfloat16").removeprefix("torch.")
        if name not in _DTYPES:
            raise self.wrong("dtype", name, ", ".join(sorted(_DTYPES)), "pass --dtype")
        return KVDtype(name)

    def wrong(self, key: str, got: object, want: str, cure: str) -> ConfigError:
        return ConfigError(explain(f"model config {self.source}", key, got, want, cure))


def _read(file: Path) -> dict[str, Any]:
    thing, cure = f"model config {file}", "point to a model directory as Hugging Face stores it"
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except OSError as error:
        got = error.strerror or str(error)
        raise ConfigError(explain(thing, "file", got, "a readable config.json", cure)) from None
    except ValueError as error:
        raise ConfigError(explain(thing, "content", str(error), "a JSON object", cure)) from None
    if not isinstance(content, dict):
        raise ConfigError(explain(thing, "content", type(content).__name__, "a JSON object", cure))
    text = content.get("text_config")  # models that also see and hear keep their decoder there
    return {**content, **text} if isinstance(text, dict) else content


def _windows(content: _Config, layers: int) -> tuple[int | None, ...]:
    window = content.optional_count("sliding_window")
    kinds = content.values.get("layer_types")
    if kinds is None:
        if content.values.get("use_sliding_window") is False:
            window = None
        return (window,) * layers
    if not isinstance(kinds, list) or len(kinds) != layers:
        got = f"{len(kinds)} entries" if isinstance(kinds, list) else kinds
        raise content.wrong("layer_types", got, f"{layers} entries, one per layer", "correct the file")
    return tuple(_window(content, number, kind, window) for number, kind in enumerate(kinds))


def _window(content: _Config, number: int, kind: object, window: int | None) -> int | None:
    if kind in _FULL:
        return None
    if kind not in _SLIDING:
        want, cure = " or ".join((*_FULL, *_SLIDING)), "layers without a KV cache are not counted yet"
        raise content.wrong(f"layer_types[{number}]", kind, want, cure)
    if window is None:
        raise content.wrong("sliding_window", None, "a window, since layer_types has sliding layers", "add the key")
    return window
