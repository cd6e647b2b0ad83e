"""A target with an optional draft and their tokenizer, and loading of byte-level pairs."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Protocol

import torch

from builders import BatchError
from spec_decode.llm import byte_tokenizer
from spec_decode.llm.byte_tokenizer import BOS
from spec_decode.llm.prompts import Message
from spec_decode.model_api import DraftModel, TargetModel
from spec_decode.models import CheckpointError, load_pair, load_target

_BYTES = 256


class Tokenizer(Protocol):
    """What every tokenizer has. Its other options are its own."""

    def encode(self, text: str, /) -> list[int]:
        """Return the tokens of a text."""

    def decode(self, ids: list[int], /) -> str:
        """Return the text of tokens."""


@dataclass(frozen=True, slots=True)
class Pair:
    """A target and its draft on one device, with their tokenizer."""

    target: TargetModel
    draft: DraftModel | None
    """None decodes without a draft."""
    stop_ids: frozenset[int]
    """The tokens that end a text."""
    tokenizer: Tokenizer
    """As loaded: for a published model, the `transformers` tokenizer."""
    encode: Callable[[str], list[int]]
    """Returns the tokens of a prompt. Raises CheckpointError for a text without tokens."""
    decode: Callable[[Sequence[int]], str]
    """Returns the text of tokens."""
    encode_chat: Callable[[Sequence[Message]], list[int]] | None = None
    """Returns the tokens of a conversation by the model's chat template; None without a template."""
    added_tokens: Mapping[str, int] = field(default_factory=dict)
    """The tokens that were added to the tokenizer, by their text. Special ones among them are left out of texts."""
    target_runs: str = "on this library's layers"
    """Where the target runs, and why, if that is elsewhere."""
    target_weights: str = ""
    """What the target's matrix products do with 8-bit weights; empty if there are none."""

    @property
    def device(self) -> torch.device:
        return next(self.target.parameters()).device

    def stop_tokens(self, name: str, stop: Sequence[str]) -> frozenset[int]:
        """Return the added tokens whose text is one of these stop strings.

        Raises BatchError for a stop string that contains a special token's text beside other text: texts leave special
        tokens out, so it would never be found.
        """
        for string in (string for string in stop if string not in self.added_tokens):
            inside = [text for text in self.added_tokens if text and text in string]
            if special := [text for text in inside if not self.decode([self.added_tokens[text]] * 2)]:
                text = max(special, key=len)
                raise BatchError(
                    f"{name} has the stop string {string!r:.200}, which contains the special token {text!r}. Texts "
                    f"leave special tokens out, so it would never be found. Pass stop={text!r}, or "
                    f"stop_token_ids=[{self.added_tokens[text]}]."
                )
        found = {self.added_tokens[string] for string in stop if string in self.added_tokens}
        return frozenset(token for token in found if token < self.target.vocab_size)


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
        target,
        model,
        frozenset({BOS}),
        byte_tokenizer,
        partial(encode_utf8, byte_tokenizer.encode),
        lambda token_ids: byte_tokenizer.decode(list(token_ids)),
    )


def encode_utf8(encode: Callable[[str], list[int]], text: str) -> list[int]:
    """Encode a prompt. Raises BatchError for one that is not utf-8."""
    try:
        return encode(text)
    except (TypeError, UnicodeEncodeError) as error:  # tokenizers raise TypeError for half a surrogate pair
        raise BatchError(f"the prompt {text!a:.200} is not utf-8. Re-encode it.") from error
