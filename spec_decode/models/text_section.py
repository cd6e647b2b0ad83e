"""Where the language model is in a checkpoint: models that also read pictures have it in a section of its own."""

from __future__ import annotations

from typing import NamedTuple

from spec_decode.models.checkpoints.config_reader import ConfigReader
from spec_decode.models.checkpoints.store import TensorStore
from spec_decode.models.layer_windows import ARCHITECTURES

WITH_PICTURES = {
    "Qwen3_5ForConditionalGeneration": "qwen3_5_text",
    "Qwen3_5MoeForConditionalGeneration": "qwen3_5_moe_text",
}
"""The family of the language model of each class that also reads pictures."""
TARGETS = ARCHITECTURES | WITH_PICTURES
"""The family of each class of target that this library's layers compute."""
_FIELD = "text_config"


class TextSection(NamedTuple):
    """The fields of the language model, and what its tensors' names begin with, but for the output projection's."""

    fields: ConfigReader
    prefix: str = "model."

    @classmethod
    def of(cls, store: TensorStore) -> TextSection:
        """Raises CheckpointError for a section that is no object."""
        if not any(name in WITH_PICTURES for name in store.architectures):
            return cls(store.config)
        return cls(store.config.section(_FIELD), "model.language_model.")
