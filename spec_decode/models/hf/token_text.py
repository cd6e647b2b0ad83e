"""The text of a `transformers` tokenizer's tokens."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import groupby
from typing import Any

_BYTE = re.compile("<0x[0-9A-Fa-f]{2}>")
_REPLACEMENT = "\N{REPLACEMENT CHARACTER}"


def token_text(tokenizer: Any) -> Callable[[Sequence[int]], str]:
    """Return the function from token ids to their text, without special tokens.

    Spaces around punctuation stay: cleaning them up would change text that a stream has already returned. Bytes that
    are no character become U+FFFD, one for each that has no continuation, and destroy no character beside them.
    """

    if not _has_its_backends_decode(type(tokenizer)):
        return lambda token_ids: str(
            tokenizer.decode(list(token_ids), skip_special_tokens=True, clean_up_tokenization_spaces=False)
        )
    backend = tokenizer.backend_tokenizer

    def decode(token_ids: Sequence[int]) -> str:
        return str(backend.decode(list(token_ids), skip_special_tokens=True))

    def decode_bytes(token_ids: Sequence[int]) -> str:
        text = decode(token_ids)
        if _REPLACEMENT not in text:
            return text
        added = backend.get_added_tokens_decoder()
        shown = [token for token in token_ids if token not in added or not added[token].special]
        tokens = (backend.id_to_token(token) for token in shown)
        return str(backend.decoder.decode(list(_valid_bytes(token for token in tokens if token is not None))))

    return decode_bytes if _falls_back_to_bytes(backend.decoder) else decode


def _has_its_backends_decode(tokenizer: type[Any]) -> bool:
    """Return whether a class decodes as the `tokenizers` library does, which is four times as fast to call."""
    from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

    return issubclass(tokenizer, PreTrainedTokenizerFast) and (tokenizer.decode, tokenizer._decode) == (
        PreTrainedTokenizerBase.decode,
        PreTrainedTokenizerFast._decode,
    )


def _falls_back_to_bytes(decoder: Any) -> bool:
    """Return whether tokens such as <0xE4> are bytes. Their decoder replaces all bytes of a run that is not utf-8 as a
    whole, even those of complete characters."""
    return decoder is not None and b'"type":"ByteFallback"' in decoder.__getstate__()


def _valid_bytes(tokens: Iterable[str]) -> Iterator[str]:
    """Replace the byte tokens that are no character, so that the others decode."""
    for is_byte, run in groupby(tokens, lambda token: _BYTE.fullmatch(token) is not None):
        if not is_byte:
            yield from run
            continue
        for character in bytes(int(token[3:5], 16) for token in run).decode(errors="replace"):
            if character == _REPLACEMENT:
                yield character
            else:
                yield from (f"<0x{byte:02X}>" for byte in character.encode())
