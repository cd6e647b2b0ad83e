"""A target and its draft on one device, with the way between text and tokens; the pair whose tokens are bytes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import torch

from builders import AttentionSpec
from spec_decode.cli.output import UserError
from spec_decode.models import DraftModel, EagleDraft, LlamaTarget, TargetModel, load_pair
from spec_decode.models.byte_tokenizer import BOS, decode, encode

PAGE_SIZE = 16
_BYTES = 256


class Pair(Protocol):
    """A target and its draft on one device, and the way between text and their tokens."""

    @property
    def target(self) -> TargetModel: ...

    @property
    def draft(self) -> DraftModel: ...

    @property
    def stop_ids(self) -> frozenset[int]:
        """The tokens that end a text."""
        ...

    def encode(self, text: str) -> list[int]:
        """The tokens of a prompt. Raises UserError for text that has none."""
        ...

    def decode(self, token_ids: Sequence[int]) -> str:
        """The text of tokens."""
        ...


@dataclass(frozen=True, slots=True)
class BytePair:
    """A byte-level pair of one layer group each."""

    target: LlamaTarget
    draft: EagleDraft

    @property
    def target_spec(self) -> AttentionSpec:
        """The attention of the target's layers."""
        return self.target.layer_groups(PAGE_SIZE)[0].spec

    @property
    def draft_spec(self) -> AttentionSpec:
        """The attention of the draft's layer."""
        return self.draft.layer_groups(PAGE_SIZE)[0].spec

    @property
    def stop_ids(self) -> frozenset[int]:
        return frozenset({BOS})

    def encode(self, text: str) -> list[int]:
        """Raises UserError for text that is not utf-8."""
        try:
            return encode(text)
        except UnicodeEncodeError as error:
            raise UserError(f"a prompt must be utf-8, got {text!a}; nothing was run. Re-encode it.") from error

    def decode(self, token_ids: Sequence[int]) -> str:
        return decode(list(token_ids))


def device_of(pair: Pair) -> torch.device:
    """Where the pair's parameters are."""
    return next(pair.target.parameters()).device


def load_byte_pair(folder: Path, dtype: torch.dtype, device: torch.device, *, draft: str = "draft") -> BytePair:
    """A pair whose tokens are bytes. Raises CheckpointError or UserError for anything else."""
    target, model = load_pair(folder, draft=draft, dtype=dtype, device=device)
    if target.config.vocab_size != _BYTES:
        raise UserError(
            f"prompts are read as bytes, which needs a vocabulary of {_BYTES}, the pair in {folder} has "
            f"{target.config.vocab_size}; nothing was run. Use a byte-level pair, or the engine from Python."
        )
    return BytePair(target, model)
