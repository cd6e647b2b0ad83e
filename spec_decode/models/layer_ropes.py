"""Which rotary embedding the layers with a window have, and which the others: what `transformers` makes of
config.json in families where they differ."""

from __future__ import annotations

from spec_decode.models.checkpoints.config_reader import ConfigReader
from spec_decode.models.checkpoints.files import CheckpointError
from spec_decode.models.layer_windows import FULL, SLIDING

_THETAS = {"gemma3_text": (1e6, 1e4), "olmo3": (5e5, 5e5)}
"""rope_theta of full and of sliding layers, if config.json does not say. Older files of OLMo-3 never say the second."""


def has_layer_ropes(family: str) -> bool:
    """Whether the rotary embeddings of a family differ between layers."""
    return family in _THETAS


def read_layer_ropes(config: ConfigReader, family: str) -> tuple[ConfigReader, ConfigReader]:
    """Return the sections for full and for sliding layers, each with rope_theta and rope_type.

    rope_parameters has a section for each. Older files have the scaling of full layers in rope_scaling, and both thetas
    beside it. Raises CheckpointError for another layout.
    """
    given, (full_theta, sliding_theta) = config.section("rope_parameters"), _THETAS[family]
    if unknown := sorted(given.values.keys() - {FULL, SLIDING}):
        raise CheckpointError(
            f"{given.place} must have {FULL} and {SLIDING}, each with a rotary embedding, got {unknown[0]}. Restore "
            "the file."
        )
    scaling = config.section("rope_scaling") if not given.values else given.section(FULL)
    thetas = {
        FULL: config.get("rope_theta", float, full_theta),
        SLIDING: config.get("rope_local_base_freq", float, sliding_theta),
    }
    # In an older file, rope_scaling changes a section that has a rope_type: it has no effect by `type` alone.
    kind = {} if given.values else {"rope_type": "default"}
    full = {**kind, "rope_theta": thetas[FULL], **scaling.values}
    sliding = {**kind, "rope_theta": thetas[SLIDING], **given.section(SLIDING).values}
    return ConfigReader(full, scaling.place), ConfigReader(sliding, f"{SLIDING} in {given.place}")
