"""How a text is sampled and where it ends."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from builders.errors import require
from spec_decode import sampling


@dataclass(frozen=True, kw_only=True, slots=True)
class SamplingParams(sampling.SamplingParams):
    """How a text is sampled (temperature, top_k, top_p, seed) and where it ends.

    - max_tokens      the most tokens of the text, 1 or more
    - stop            strings that end the text and are not part of it: one, or several
    - stop_token_ids  tokens that do the same, besides those of the model
    - ignore_eos      whether the text goes on after the model's own end tokens

    Raises BatchError for a value outside its range.
    """

    max_tokens: int = 64
    stop: str | Sequence[str] = ()
    stop_token_ids: Sequence[int] = ()
    ignore_eos: bool = False

    def __post_init__(self) -> None:
        sampling.SamplingParams.__post_init__(self)
        require(
            type(self.max_tokens) is int and self.max_tokens >= 1,
            f"max_tokens is {self.max_tokens!r}. Pass an integer of 1 or more.",
        )
        require(
            isinstance(self.stop, Sequence) and all(isinstance(text, str) and text for text in self.stop_strings),
            f"stop is {self.stop!r:.200}. Pass a string, or a list of strings, none of them empty.",
        )
        require(
            isinstance(self.stop_token_ids, Sequence | frozenset | set)
            and all(type(token) is int for token in self.stop_token_ids),
            f"stop_token_ids is {self.stop_token_ids!r:.200}. Pass a list of integers.",
        )
        require(type(self.ignore_eos) is bool, f"ignore_eos is {self.ignore_eos!r}. Pass True or False.")

    @property
    def stop_strings(self) -> tuple[str, ...]:
        """`stop` as a tuple; an empty string names none."""
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop)
