"""A target with an optional draft and their tokenizer, and loading of byte-level pairs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch

from builders import BatchError
from spec_decode.llm.byte_tokenizer import BOS, decode, encode
from spec_decode.llm.prompts import Message
from spec_decode.models import CheckpointError, DraftModel, TargetModel, load_pair, load_target

_BYTES = 256


@dataclass(frozen=True, slots=True)
class Pair:
    """A target and its draft on one device, with their tokenizer."""

    target: TargetModel
    draft: DraftModel | None
    """None decodes without a draft."""
    stop_ids: frozenset[int]
    """The tokens that end a text."""
    encode: Callable[[str], list[int]]
    """Returns the tokens of a prompt. Raises CheckpointError for a text without tokens."""
    decode: Callable[[Sequence[int]], str]
    """Returns the text of tokens."""
    encode_chat: Callable[[Sequence[Message]], list[int]] | None = None
    """Returns the tokens of a conversation by the model's chat template; None without a template."""

    @property
    def device(self) -> torch.device:
        return next(self.target.parameters()).device


def load_byte_pair(folder: Path, dtype: torch.dtype, device: torch.device, *, draft: str | None = "draft") -> Pair:
    """Load a byte-level pair with the draft of this name, or None. Raises CheckpointError."""
    if draft is None:
        target, model = load_target(folder, dtype=dtype, device=device), None
    else:
        target, model = load_pair(folder, draft=draft, dtype=dtype, device=device)
    if target.config.vocab_size != _BYTES:
        raise CheckpointError(
            f"the pair in {folder} has {target.config.vocab_size} tokens, not the {_BYTES} of a byte-level pair. Use a "
            "byte-level pair, or the Engine, which takes token ids."
        )
    return Pair(
        target, model, frozenset({BOS}), partial(encode_utf8, encode), lambda token_ids: decode(list(token_ids))
    )


def encode_utf8(encode: Callable[[str], list[int]], text: str) -> list[int]:
    """Encode a prompt. Raises BatchError for one that is not utf-8."""
    try:
        return encode(text)
    except (TypeError, UnicodeEncodeError) as error:  # tokenizers raise TypeError for half a surrogate pair
        raise BatchError(f"the prompt {text!a:.200} is not utf-8. Re-encode it.") from error
