"""Decode new tokens after a prompt, however they arrive, at a cost that is linear in their number."""

from __future__ import annotations

from collections.abc import Callable, Sequence

REPLACEMENT = "\N{REPLACEMENT CHARACTER}"
"""What a tokenizer returns for bytes that are no character: one for a character whose last bytes are missing."""

_CONTEXT = 16
"""Tokens of the prompt that new ones are first decoded after; more if these have less text than _OVERLAP."""
_WINDOW = 32
"""Tokens after which the window is shortened."""
_OVERLAP = 8
"""Characters that two windows must share at their ends. They take 8 bytes or more, and so include every byte of a
character that is still incomplete, which has 3 at most; and a tokenizer that treats the first token of a text unlike
the others has done so before them."""
_MOST_MISSING = 3
"""An incomplete character is 1 to 3 bytes, for which a tokenizer returns 1 to 3 replacement characters."""


class IncrementalDecoder:
    """Returns the text that tokens add to a prompt: decode(prompt + tokens) without decode(prompt). Joined, the pieces
    are the same text for any division of the tokens.

    A tokenizer can decode a token differently at the start of a text, as Llama-2's drops a space there, so the new
    tokens are decoded after the last ones before them. If the prompt ends inside a character that the new tokens
    complete, the text begins with it. A character that is never completed is returned by `finish`, as U+FFFD.

    decode must return the same text for tokens wherever they are after the first characters of a text, and replace
    only bytes that are no character.
    """

    def __init__(self, decode: Callable[[Sequence[int]], str], prompt: Sequence[int] = ()) -> None:
        self._decode, self._limit = decode, _WINDOW
        self._window = list(prompt[-_CONTEXT:])
        """The last tokens. The next ones are decoded together with them."""
        self._text = decode(self._window)
        if len(self._text) < _OVERLAP and len(prompt) > _CONTEXT:
            self._window = list(prompt)
            self._text = decode(self._window)
        self._returned = self._text
        """The part of the window's text that the prompt has or that was returned."""

    def add(self, tokens: Sequence[int]) -> str:
        """Return the new text that later tokens cannot change."""
        if len(self._window) > self._limit:
            self._shorten()
        self._window += tokens
        self._text = self._decode(self._window)
        whole = self._text.rstrip(REPLACEMENT)
        # Only the last few can stand for a character that is still incomplete.
        return self._take(self._text[: max(len(whole), len(self._text) - _MOST_MISSING)])

    def finish(self) -> str:
        """Return the text of a character that was never completed."""
        return self._take(self._text)

    def _take(self, text: str) -> str:
        if self._returned.startswith(text):
            return ""
        known, self._returned = self._returned, text
        if text.startswith(known):
            return text[len(known) :]
        # The two differ where a character has been completed.
        return text[next(i for i, (old, new) in enumerate(zip(known, text, strict=False)) if old != new) :]

    def _shorten(self) -> None:
        """Forget all tokens but the last, if these have the same text without the others."""
        start = len(self._window) - self._limit // 2
        text = self._decode(self._window[start:])
        alike = len(text) >= _OVERLAP and text[-_OVERLAP:] == self._text[-_OVERLAP:]
        if alike and self._text.startswith(self._returned):
            waiting = len(self._text) - len(self._returned)
            self._window, self._text = self._window[start:], text
            self._returned = text[: len(text) - waiting]
        else:  # special tokens, which have no text, would keep the window long
            without_text = {token for token in {*self._window} if not self._decode([token] * _OVERLAP)}
            self._window = [token for token in self._window if token not in without_text]
        self._limit = max(_WINDOW, 2 * len(self._window))
