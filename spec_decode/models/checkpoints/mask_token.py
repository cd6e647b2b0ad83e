"""Read the mask token, the placeholder for a token to be drafted, under any of its names in checkpoints."""

from __future__ import annotations

from spec_decode.models.checkpoints.files import CheckpointError
from spec_decode.models.checkpoints.store import TensorStore

_KEYS = ("mask_token_id", "dspark_noise_token_id", "pard_token", "ptd_token_id")
"""Names at the top level of config.json; mask_token_id in `dflash_config` takes precedence."""


def read_mask_token(store: TensorStore, vocab_size: int) -> int | None:
    """Return the mask token's id, or None. Raises CheckpointError for an id outside the vocabulary."""
    sections = [store.config.section("dflash_config"), store.config]
    for section, names in zip(sections, (_KEYS[:1], _KEYS), strict=True):
        for name in names:
            token = section.optional(name, int)
            if token is None:
                continue
            if not 0 <= token < vocab_size:
                raise CheckpointError(
                    f"{name} in {section.place} must be a token of the vocabulary, 0 to {vocab_size - 1}, got {token}. "
                    "Restore the file."
                )
            return token
    return None


def require_mask_token(store: TensorStore, vocab_size: int, because: str) -> int:
    """As `read_mask_token`, but raises CheckpointError if there is none; `because` says why it is needed."""
    token = read_mask_token(store, vocab_size)
    if token is None:
        names = ", ".join(("dflash_config.mask_token_id", *_KEYS))
        raise CheckpointError(
            f"{store.config.place} must name the mask token, since {because}, and has none of {names}. "
            "Restore the file."
        )
    return token
