"""Read the config.json of a published DFlash: its layers, the target states it reads, and its block."""

from __future__ import annotations

from spec_decode.model_api import TargetModel
from spec_decode.models.checkpoints.files import CheckpointError
from spec_decode.models.checkpoints.store import TensorStore
from spec_decode.models.decoder_config import DecoderConfig, read_decoder
from spec_decode.models.draft import decoder_fields, read_layers
from spec_decode.models.layer_windows import SLIDING, default_kinds, no_windows, read_layer_kinds

_OUTPUT_FIELDS, _INPUT_FIELD = ("target_layer_ids", "dspark_target_layer_ids"), "aux_hidden_state_layer_ids"
"""Fields with the list of target layers whose outputs are read, and speculators' field with those whose inputs are."""
_FACTORS = {
    "attention_value_scale": 1.0,
    "input_embedding_scale": 1.0,
    "output_multiplier": 1.0,
    "final_logit_softcapping": 0.0,
}
"""Scales and caps that no tensor reveals, each with the value that has no effect."""


def refuse_factors(store: TensorStore) -> None:
    """Raise CheckpointError for a scale or a cap that has an effect."""
    for name, neutral in _FACTORS.items():
        store.config.section("dflash_config").require(name, neutral)


def aux_hidden_state_layers(store: TensorStore, num_target_layers: int) -> tuple[int, ...]:
    """Return which states of the target the draft reads, as the layers that they enter. target_layer_ids lists layers
    by their output, speculators' list by their input. Raises CheckpointError for states that the target does not
    have."""
    config = store.config
    if config.values.get(_INPUT_FIELD) is not None:
        return read_layers(config, _INPUT_FIELD, num_target_layers, by_output=False)
    fields = [(config.section("dflash_config"), _OUTPUT_FIELDS[0]), *((config, name) for name in _OUTPUT_FIELDS)]
    for section, name in fields:
        if section.values.get(name) is not None:
            return read_layers(section, name, num_target_layers, by_output=True)
    names = ", ".join((f"dflash_config.{_OUTPUT_FIELDS[0]}", *_OUTPUT_FIELDS, _INPUT_FIELD))
    raise CheckpointError(
        f"{config.place} must list the target layers that the draft reads, and has none of {names}. Restore the file."
    )


def read_block_layers(store: TensorStore, target: TargetModel, *, windows_are_causal: bool) -> DecoderConfig:
    """Read the layers, each with its window and whether it is causal.

    A window is counted from each token, as in engines. `speculators` trains with one counted from the block's first.
    Raises CheckpointError.
    """
    fields = decoder_fields(store)
    config = read_decoder(fields, no_windows, max_positions=target.max_positions)
    section, count = store.config.section("dflash_config"), config.model.num_layers
    enabled, window = fields.optional("use_sliding_window", bool), fields.optional("sliding_window", int)
    # If nothing says so, a window is on only if layers are listed as sliding.
    kinds = read_layer_kinds(fields, count) or default_kinds(fields, count, window if enabled else None)
    everywhere = section.get("use_swa", bool, False) and SLIDING not in kinds
    sliding = [everywhere or kind == SLIDING for kind in kinds]
    own_window = section.optional("swa_window_size", int)
    window = own_window or (None if enabled is False else window)
    if window is not None and window < 1:
        name, place = ("swa_window_size", section.place) if own_window else ("sliding_window", fields.place)
        raise CheckpointError(f"{name} in {place} must be 1 or more, got {window}. Restore the file.")
    if any(sliding) and window is None:
        raise CheckpointError(
            f"{fields.place} has sliding-window layers, but neither sliding_window nor dflash_config.swa_window_size, "
            "or use_sliding_window is false. Restore the file."
        )
    is_causal = store.config.optional("is_causal", bool)
    is_causal = section.optional("causal", bool) if is_causal is None else is_causal
    non_causal = store.config.get("sliding_window_non_causal", bool, not windows_are_causal)  # speculators
    causal = [kind == SLIDING and not non_causal for kind in kinds]
    return DecoderConfig(
        model=config.model,
        scaling=config.scaling,
        windows=tuple(window if slides else None for slides in sliding),
        causal=tuple(causal if is_causal is None else [is_causal] * count),
    )


def read_block_size(store: TensorStore, first_place: int) -> int | None:
    """Return block_size, or None if config.json has none. Raises CheckpointError for a block that predicts nothing."""
    for section in (store.config, store.config.section("dflash_config")):
        if (size := section.optional("block_size", int)) is None:
            continue
        if size <= first_place:
            raise CheckpointError(
                f"block_size in {section.place} must be {first_place + 1} or more, got {size}. Restore the file."
            )
        return size
    return None


def samples_from_anchor(store: TensorStore) -> bool:
    """Whether the block's first token also predicts one."""
    nested = store.config.section("dflash_config").optional("sample_from_anchor", bool)
    return store.config.get("sample_from_anchor", bool, False) if nested is None else nested
