"""A target and its draft on one device, with the way between text and tokens; the pair whose tokens are bytes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from spec_decode.cli.output import UserError
from spec_decode.models import DraftModel, TargetModel, load_pair
from spec_decode.models.byte_tokenizer import BOS, decode, encode

PAGE_SIZE = 16
_BYTES = 256


@dataclass(frozen=True, slots=True)
class Pair:
    """A target and its draft on one device, and the way between text and their tokens."""

    target: TargetModel
    draft: DraftModel
    stop_ids: frozenset[int]
    """The tokens that end a text."""
    encode: Callable[[str], list[int]]
    """The tokens of a prompt. Raises UserError for a text that has none."""
    decode: Callable[[Sequence[int]], str]
    """The text of tokens."""

    @property
    def device(self) -> torch.device:
        return next(self.target.parameters()).device


def load_byte_pair(folder: Path, dtype: torch.dtype, device: torch.device, *, draft: str = "draft") -> Pair:
    """A pair whose tokens are bytes. Raises CheckpointError or UserError for anything else."""
    target, model = load_pair(folder, draft=draft, dtype=dtype, device=device)
    if target.config.vocab_size != _BYTES:
        raise UserError(
            f"prompts are read as bytes, which needs a vocabulary of {_BYTES}, the pair in {folder} has "
            f"{target.config.vocab_size}; nothing was run. Use a byte-level pair, or the engine from Python."
        )
    return Pair(target, model, frozenset({BOS}), _encode, lambda token_ids: decode(list(token_ids)))


def _encode(text: str) -> list[int]:
    try:
        return encode(text)
    except UnicodeEncodeError as error:
        raise UserError(f"a prompt must be utf-8, got {text!a}; nothing was run. Re-encode it.") from error
