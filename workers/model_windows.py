"""How far each layer of a model looks back, from the keys of its config.json.

===========================  =========================================================================================
keys                         windows
===========================  =========================================================================================
layer_types                  full_attention or sliding_attention per layer; everything else keeps no K and V to size
use_sliding_window           false: no windows, whatever sliding_window says (Qwen2 and Qwen3: false unless given)
max_window_layers            with use_sliding_window: the layers before this one are full
sliding_window_pattern: n    every n-th layer is full; Gemma 2, Gemma 3 and Cohere 2 have a pattern unless given
sliding_window alone         every layer
===========================  =========================================================================================
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from workers.model_config import ConfigKeys

_KINDS: Final = ("full_attention", "sliding_attention")
_PATTERNS: Final = {"gemma2": 2, "gemma3": 6, "gemma3_text": 6, "cohere2": 4}
_OFF_UNLESS_GIVEN: Final = ("qwen2", "qwen3")
_UNSIZED: Final = (
    *("attention_chunk_size", "layers_block_type", "block_types", "block_configs", "hybrid_override_pattern"),
    *("attn_layer_period", "attn_type_list", "full_attention_interval", "linear_attn_config", "ssm_cfg", "state_size"),
    *("mamba_d_state", "attn_layer_indices"),
    *("global_head_dim", "num_global_key_value_heads"),
)
"""Keys of models whose layers are not all alike, or keep a state instead of K and V."""

_CURE: Final = "describe the layers in a pair file and name that instead"


def layer_windows(keys: ConfigKeys, layers: int) -> tuple[int | None, ...]:
    """Return the window in tokens of each of the `layers` layers, None for full attention.

    Raises:
        ConfigError: a key is wrong, or the model has layers of another kind.
    """
    if keys.raw("is_encoder_decoder") is True:
        raise keys.wrong("is_encoder_decoder", True, "a decoder", _CURE)
    kinds = keys.raw("layer_types")
    if kinds is not None:
        return tuple(_window(keys) if windowed else None for windowed in _kinds(keys, kinds, layers))
    for key in _UNSIZED:
        if keys.raw(key) is not None:
            raise keys.wrong(key, keys.raw(key), "a model of full and sliding-window attention alone", _CURE)
    if keys.raw("sliding_window") is None or not _uses_window(keys):
        return (None,) * layers
    return tuple(_window(keys) if _is_windowed(keys, layer) else None for layer in range(layers))


def _window(keys: ConfigKeys) -> int:
    return keys.count("sliding_window")


def _kinds(keys: ConfigKeys, kinds: object, layers: int) -> list[bool]:
    if not isinstance(kinds, list) or len(kinds) != layers:
        got = f"{len(kinds)} entries" if isinstance(kinds, list) else type(kinds).__name__
        raise keys.wrong("layer_types", got, f"a list of num_hidden_layers={layers} entries", "correct one of them")
    for number, kind in enumerate(kinds):
        if kind not in _KINDS:
            raise keys.wrong(f"layer_types[{number}]", kind, " or ".join(_KINDS), _CURE)
    return [kind == _KINDS[1] for kind in kinds]


def _uses_window(keys: ConfigKeys) -> bool:
    used = keys.raw("use_sliding_window")
    return not str(keys.raw("model_type")).startswith(_OFF_UNLESS_GIVEN) if used is None else used is True


def _is_windowed(keys: ConfigKeys, layer: int) -> bool:
    if keys.raw("use_sliding_window") is True and keys.raw("max_window_layers") is not None:
        return layer >= keys.count("max_window_layers", least=0)
    pattern = keys.count("sliding_window_pattern", _PATTERNS.get(str(keys.raw("model_type")), 0), least=0)
    return pattern == 0 or bool((layer + 1) % pattern)
