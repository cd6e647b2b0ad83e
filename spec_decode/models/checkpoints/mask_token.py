"""The token that stands for one that is not drafted yet, under every name that checkpoints have for it."""

from __future__ import annotations

from spec_decode.models.checkpoints.files import CheckpointError
from spec_decode.models.checkpoints.store import TensorStore

_KEYS = ("mask_token_id", "dspark_noise_token_id", "pard_token", "ptd_token_id")
"""At the top of config.json; `dflash_config` has a mask_token_id of its own, which goes before them."""


def read_mask_token(store: TensorStore, vocab_size: int) -> int | None:
    """Its id; None where config.json names none. Raises CheckpointError for one outside of the vocabulary."""
    sections = [store.config.section("dflash_config"), store.config]
    for section, names in zip(sections, (_KEYS[:1], _KEYS), strict=True):
        for name in names:
            found = section.optional(name, int)
            if found is None:
                continue
            if not 0 <= found < vocab_size:
                raise CheckpointError(
                    f"{name} in {section.place} must be a token of the vocabulary, 0 to {vocab_size - 1}, got {found}; "
                    "its embedding would be another's or none. Restore the file."
                )
            return found
    return None


def require_mask_token(store: TensorStore, vocab_size: int, because: str) -> int:
    """As `read_mask_token`; raises CheckpointError where there is none, which `because` explains the need of."""
    found = read_mask_token(store, vocab_size)
    if found is None:
        names = ", ".join(("dflash_config.mask_token_id", *_KEYS))
        raise CheckpointError(
            f"{store.config.place} must say which token masks one that is not drafted yet, since {because}; none of "
            f"{names} is there. Restore the file."
        )
    return found
