"""Which sliding window each layer of a draft has: what the config class and the attention of `transformers` make of
config.json. The families differ in the fields that they read and in the values of absent ones."""

from __future__ import annotations

from spec_decode.models.checkpoints.config_reader import ConfigReader
from spec_decode.models.checkpoints.files import CheckpointError

SLIDING, FULL = "sliding_attention", "full_attention"
ARCHITECTURES = {
    "LlamaForCausalLM": "llama",
    "MistralForCausalLM": "mistral",
    "Qwen2ForCausalLM": "qwen2",
    "Qwen3ForCausalLM": "qwen3",
    "Qwen3MoeForCausalLM": "qwen3_moe",
    "Glm4MoeForCausalLM": "glm4_moe",
    "GptOssForCausalLM": "gpt_oss",
    "Phi3ForCausalLM": "phi3",
    "Gemma3ForCausalLM": "gemma3_text",
    "Olmo2ForCausalLM": "olmo2",
    "Olmo3ForCausalLM": "olmo3",
    "GraniteForCausalLM": "granite",
    "Qwen3NextForCausalLM": "qwen3_next",
    "Qwen3_5ForCausalLM": "qwen3_5_text",
    "Qwen3_5MoeForCausalLM": "qwen3_5_moe_text",
}
"""The family of each class of language model that this library's layers compute."""
_SWITCHED = ("qwen2", "qwen3", "qwen3_moe")
"""Families with a window only if use_sliding_window is true."""
_BY_LAYER = ("qwen2", "qwen3")
"""Families in which layers differ: as layer_types lists them, or from max_window_layers on."""
_PATTERNS = {"gemma3_text": 6, "olmo3": 4, "gpt_oss": 2}
"""Families in which layer_types lists the windows, or else all layers but every so many have one."""
_WINDOW, _FIRST = 4096, 28
"""What an absent sliding_window and max_window_layers mean to the families that read them."""

RECURRENT = "linear_attention"
HYBRIDS = ("qwen3_next", "qwen3_5_text", "qwen3_5_moe_text")
"""Families in which layers without full attention are recurrent: as layer_types lists them, or all but every so
many."""

Windows = tuple[int | None, ...]


def read_windows(config: ConfigReader, num_layers: int, *, family: str, listed: bool = False) -> Windows:
    """Return the window of each layer, None for full attention.

    family: a model_type. Unknown ones have no window, as Llama. listed: layer_types counts in every family, as in
    drafts that read the target's states, whose authors build the layers themselves.

    Raises CheckpointError for a field of the wrong type, and for sliding layers without a window.
    """
    kinds, window = read_layer_kinds(config, num_layers), config.optional("sliding_window", int)
    enabled = config.get("use_sliding_window", bool, False)
    if family == "mistral" or family in _SWITCHED or family in _PATTERNS:
        window = window if "sliding_window" in config.values else _WINDOW
    if family in _SWITCHED and not enabled:
        window = None
    if family in _PATTERNS:
        kinds = kinds or _pattern_kinds(config, num_layers, _PATTERNS[family])
    if kinds and (listed or family in _BY_LAYER or family in _PATTERNS):
        if SLIDING in kinds and window is None:
            raise CheckpointError(
                f"layer_types in {config.place} names sliding layers, but there is no window: sliding_window is null "
                "or absent, or use_sliding_window is not true. Restore the file."
            )
        return tuple(window if kind == SLIDING else None for kind in kinds)
    if family in _BY_LAYER:
        return tuple(window if kind == SLIDING else None for kind in default_kinds(config, num_layers, window))
    return (window if family in ("mistral", "phi3", *_SWITCHED) else None,) * num_layers


def read_recurrent_layers(config: ConfigReader, num_layers: int) -> tuple[int, ...]:
    """Return the recurrent layers of a hybrid family. Raises CheckpointError."""
    every = config.get("full_attention_interval", int, 4)
    kinds = config.optional("layer_types", list)
    if kinds is None and every >= 1:
        kinds = [RECURRENT if (layer + 1) % every else FULL for layer in range(num_layers)]
    if kinds is None or len(kinds) != num_layers or not {FULL} <= {*kinds} <= {FULL, RECURRENT}:
        raise CheckpointError(
            f"layer_types in {config.place} must name {FULL} or {RECURRENT} for each of {num_layers} layers, {FULL} at "
            f"least once, got {kinds}{'' if kinds else f' and full_attention_interval {every}'}. Restore the file."
        )
    return tuple(layer for layer, kind in enumerate(kinds) if kind == RECURRENT)


def no_windows(config: ConfigReader, num_layers: int) -> Windows:
    """Return full attention for each layer, whatever config.json says."""
    return (None,) * num_layers


def default_kinds(config: ConfigReader, num_layers: int, window: int | None) -> list[str]:
    """Return the kind of each layer of a Qwen2 or Qwen3 whose config.json has no layer_types. window: None for none."""
    first = config.get("max_window_layers", int, _FIRST)
    return [SLIDING if window is not None and layer >= first else FULL for layer in range(num_layers)]


def _pattern_kinds(config: ConfigReader, num_layers: int, default: int) -> list[str]:
    pattern = config.get("sliding_window_pattern", int, default)
    if pattern < 1:
        raise CheckpointError(f"sliding_window_pattern in {config.place} must be 1 or more, got {pattern}.")
    return [SLIDING if (layer + 1) % pattern else FULL for layer in range(num_layers)]


def read_layer_kinds(config: ConfigReader, num_layers: int) -> list[str]:
    """Return SLIDING or FULL for each layer, or an empty list if config.json does not say. Raises CheckpointError."""
    kinds = config.get("layer_types", list, [])
    if kinds and (len(kinds) != num_layers or not all(kind in (SLIDING, FULL) for kind in kinds)):
        raise CheckpointError(
            f"layer_types in {config.place} must name {SLIDING} or {FULL} for each of {num_layers} layers, got "
            f"{kinds}. Restore the file."
        )
    return kinds
