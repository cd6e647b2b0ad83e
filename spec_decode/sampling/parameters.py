"""Sampling parameters: on the host per request, on the device per row of a batch."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, NamedTuple

import torch
from typing_extensions import Self

from builders.devices import stage_into
from builders.errors import did_you_mean, require
from spec_decode.sampling import noise
from spec_decode.sampling.logit_edits import Bias, LogitEdits, Penalties, RowEdits

MIN_TEMPERATURE = 1e-3
"""At a lower temperature logits / temperature would overflow fp32; greedy decoding is temperature 0."""

_MAX_FLOAT32 = torch.finfo(torch.float32).max
_MAX_INT32 = torch.iinfo(torch.int32).max
_MAX_BIAS = 1e30
"""A larger logit could overflow fp32 when divided by the temperature."""
_MAX_REPETITION = 1e3
"""Likewise, also with the largest bias."""
_MAX_N = 16_384
"""Each completion is a request, made before the first one runs."""
_ALTERNATIVES = {
    "best_of": "Pass n, and choose among the completions",
    "do_sample": "Pass temperature: 0 is greedy",
}
"""How to replace parameters that other libraries have."""
_STREAM = 0x9B05688C
"""The noise stream of the seeds of a prompt's further completions."""


def _is_text(text: object) -> bool:
    """Return whether it is a text that a model can write: half of a surrogate pair is none."""
    return isinstance(text, str) and bool(text) and not any("\ud800" <= letter <= "\udfff" for letter in text)


@dataclass(frozen=True, kw_only=True, slots=True)
class SamplingParams:
    """How one request is sampled and where its text ends.

    Raises BatchError for a value outside the ranges below, and TypeError for a parameter that does not exist.

    - temperature  0 is greedy and ignores top_k, top_p and min_p; otherwise at least MIN_TEMPERATURE
    - top_k        keep the tokens with the k largest logits; 0 keeps the whole vocabulary
    - min_p        keep the tokens with at least this share of the likeliest token's probability, in [0, 1]; 0 keeps all
    - top_p        of what these two keep, keep the fewest most probable tokens that hold this share of the probability,
                   in (0, 1]; 1 keeps all
    - logit_bias   token id -> what is added to its logit before the temperature, -1e30 to 1e30; None: nothing

    These change the logits after logit_bias, by the tokens of the text so far:

    - repetition_penalty  divides a positive logit of a token in the prompt or the new text, and multiplies a negative
                          one; 1e-3 to 1e3, 1 does nothing
    - presence_penalty    is subtracted from the logit of a token in the new text; -2 to 2
    - frequency_penalty   likewise, for each time that the new text has the token; -2 to 2

    Which noise draws the tokens:

    - seed         64 bits, signed. The noise depends only on the seed, not on the rest of the batch; in fp32 the same
                   seed gives the same text
    - n            completions of the prompt, 1 to 16,384; at temperature 0 only 1. The first has the seed above, the
                   others have seeds made from it

    Where the text ends:

    - max_tokens      the most tokens of the text, 1 or more
    - stop            a string or a list of strings that end the text; the text leaves them out. The text of a special
                      token is one too, if it is the whole string
    - stop_token_ids  tokens of the model's vocabulary that end the text, in addition to the model's end tokens
    - ignore_eos      True: the model's end tokens do not end the text
    - min_tokens      the model draws none of its end tokens, ignored or not, and no other token that ends the text,
                      before the text has so many tokens, 0 to max_tokens; a stop string does not end it earlier

    What is returned with it:

    - logprobs  N, 1 or more: for each token its logprob and the N most likely tokens with theirs; None: nothing. The
                logprobs are the model's, before all that changes how tokens are drawn
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    logit_bias: Mapping[int, float] | None = None
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    seed: int = 0
    n: int = 1
    max_tokens: int = 64
    stop: str | Sequence[str] = ()
    stop_token_ids: Collection[int] = ()
    ignore_eos: bool = False
    min_tokens: int = 0
    logprobs: int | None = None

    def __new__(cls, *arguments: Any, **options: Any) -> Self:
        names = [field.name for field in fields(cls)]
        if unknown := [name for name in options if name not in names]:
            what = _ALTERNATIVES.get(unknown[0], f"Parameters are {', '.join(names)}")
            raise TypeError(f"SamplingParams does not support {unknown[0]!r}.{did_you_mean(unknown[0], names)} {what}.")
        return object.__new__(cls)

    def __post_init__(self) -> None:
        require(
            _is_number(self.temperature)
            and (self.temperature == 0 or MIN_TEMPERATURE <= self.temperature <= _MAX_FLOAT32),
            f"temperature must be 0 (greedy) or a finite number of at least {MIN_TEMPERATURE:g}, got "
            f"{self.temperature!r}; logits over it would overflow fp32. Use 0 for greedy decoding, or more.",
        )
        require(
            type(self.top_k) is int and 0 <= self.top_k <= _MAX_INT32,
            f"top_k must be an integer from 0 (the whole vocabulary) to {_MAX_INT32}, got {self.top_k!r}. Pass how "
            "many tokens to keep, or 0.",
        )
        require(
            _is_number(self.top_p) and 0 < self.top_p <= 1,
            f"top_p must be above 0 and at most 1 (everything), got {self.top_p!r}. Pass the share of the probability "
            "to keep, or 1.",
        )
        require(
            _is_number(self.min_p) and 0 <= self.min_p <= 1,
            f"min_p must be from 0 (everything) to 1, got {self.min_p!r}. Pass the least share of the likeliest "
            "token's probability to keep, or 0.",
        )
        bias = {} if self.logit_bias is None else self.logit_bias
        require(
            isinstance(bias, Mapping)
            and all(type(token) is int for token in bias)
            and all(_is_number(value) and abs(value) <= _MAX_BIAS for value in bias.values()),
            f"logit_bias must be a mapping of token ids to numbers from {-_MAX_BIAS:g} to {_MAX_BIAS:g}, got "
            f"{self.logit_bias!r:.200}. Pass one, or None.",
        )
        require(
            _is_number(self.repetition_penalty) and 1 / _MAX_REPETITION <= self.repetition_penalty <= _MAX_REPETITION,
            f"repetition_penalty must be from {1 / _MAX_REPETITION:g} to {_MAX_REPETITION:g}, got "
            f"{self.repetition_penalty!r}. Pass more than 1 against repetition, or 1.",
        )
        for name in ("presence_penalty", "frequency_penalty"):
            value = getattr(self, name)
            require(
                _is_number(value) and -2 <= value <= 2,
                f"{name} must be from -2 to 2, got {value!r}. Pass more than 0 against repetition, or 0.",
            )
        require(
            type(self.seed) is int and -(2**63) <= self.seed < 2**63,
            f"seed must be a signed 64-bit integer, got {self.seed!r}. Pass one, and different ones for texts that "
            "should differ.",
        )
        require(
            type(self.n) is int and 1 <= self.n <= _MAX_N,
            f"n must be an integer from 1 to {_MAX_N}, got {self.n!r}. Pass how many completions of the prompt you "
            "want; for more, pass the prompt several times, with other seeds.",
        )
        require(
            self.n == 1 or self.temperature > 0,
            f"n must be 1 at temperature 0: all completions would be equal, got {self.n}. Pass a temperature, or 1.",
        )
        require(
            type(self.max_tokens) is int and self.max_tokens >= 1,
            f"max_tokens is {self.max_tokens!r}. Pass an integer of 1 or more.",
        )
        require(
            isinstance(self.stop, Sequence) and all(map(_is_text, self.stop_strings)),
            f"stop is {self.stop!r:.200}. Pass a non-empty string that is utf-8, or a list of them.",
        )
        require(
            isinstance(self.stop_token_ids, Sequence | frozenset | set)
            and all(type(token) is int for token in self.stop_token_ids),
            f"stop_token_ids is {self.stop_token_ids!r:.200}. Pass a list of integers.",
        )
        require(
            type(self.min_tokens) is int and 0 <= self.min_tokens <= self.max_tokens,
            f"min_tokens must be an integer from 0 to max_tokens, {self.max_tokens}, got {self.min_tokens!r}. Pass "
            "fewer, or raise max_tokens.",
        )
        require(type(self.ignore_eos) is bool, f"ignore_eos is {self.ignore_eos!r}. Pass True or False.")
        require(
            self.logprobs is None or (type(self.logprobs) is int and self.logprobs >= 1),
            f"logprobs is {self.logprobs!r}. Pass an integer of 1 or more, or None.",
        )

    @property
    def stop_strings(self) -> tuple[str, ...]:
        """`stop` as a tuple."""
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop)

    def each(self) -> list[SamplingParams]:
        """Return the parameters of each of the n completions."""
        if self.n == 1:
            return [self]
        keys = noise.key(torch.tensor([self.seed]), torch.arange(1, self.n), _STREAM)
        return [replace(self, n=1, seed=seed) for seed in [self.seed, *keys.tolist()]]

    @property
    def edits_logits(self) -> bool:
        """Whether anything changes the logits before the temperature."""
        return self.min_tokens > 0 or bool(self.logit_bias) or self.penalties != Penalties()

    @property
    def penalties(self) -> Penalties:
        """The three penalties."""
        return Penalties(self.repetition_penalty, self.presence_penalty, self.frequency_penalty)

    def edits(self, prompt: Sequence[int], output: Sequence[int], end_token_ids: Collection[int]) -> RowEdits:
        """Return what changes the logits after a prompt and these new tokens. end_token_ids: the model's."""
        return RowEdits(self.biases(len(prompt), end_token_ids), self.penalties, prompt, output)

    def biases(self, prompt_len: int, end_token_ids: Collection[int]) -> list[Bias]:
        """Return the biases of single tokens' logits, for a prompt of this many tokens. end_token_ids: the model's."""
        end = prompt_len + self.min_tokens
        forbidden = {*self.stop_token_ids, *end_token_ids} if self.min_tokens else ()
        added = (self.logit_bias or {}).items()
        return [
            *(Bias(token, -torch.inf, end) for token in forbidden),
            *(Bias(token, value, _MAX_INT32) for token, value in added),
        ]


def _log(share: float) -> float:
    return math.log(share) if share else -math.inf


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


class Sampling(NamedTuple):
    """Sampling parameters of R rows on the device, at fixed addresses, since captured verification reads them.

    - temperature  fp32 [R]; 0 is greedy, also for padding rows
    - top_k        int32 [R]; 0 keeps the whole vocabulary
    - top_p        fp32 [R], in (0, 1]; 1 keeps everything
    - min_log_p    fp32 [R], log(min_p), at most 0; -inf keeps everything
    - seeds        int64 [R]
    - edits        R rows; None: no row's logits are changed before the temperature
    """

    temperature: torch.Tensor
    top_k: torch.Tensor
    top_p: torch.Tensor
    min_log_p: torch.Tensor
    seeds: torch.Tensor
    edits: LogitEdits | None = None

    @property
    def rows(self) -> tuple[torch.Tensor, ...]:
        """The tensors but the edits."""
        return self.temperature, self.top_k, self.top_p, self.min_log_p, self.seeds

    @classmethod
    def allocate(cls, max_reqs: int, device: torch.device | str) -> Sampling:
        """Allocate persistent rows without edits, all padding until load()."""
        return cls(
            temperature=torch.zeros(max_reqs, dtype=torch.float32, device=device),
            top_k=torch.zeros(max_reqs, dtype=torch.int32, device=device),
            top_p=torch.ones(max_reqs, dtype=torch.float32, device=device),
            min_log_p=torch.full((max_reqs,), -torch.inf, dtype=torch.float32, device=device),
            seeds=torch.zeros(max_reqs, dtype=torch.int64, device=device),
        )

    @classmethod
    def of(cls, params: Sequence[SamplingParams], device: torch.device | str) -> Sampling:
        """Make one row for each of `params`."""
        sampling = cls.allocate(len(params), device)
        sampling.load(params)
        return sampling

    def load(self, params: Sequence[SamplingParams]) -> None:
        """Write `params` but their edits to the first rows and make the others padding, in place; host work, not for a
        graph.

        Raises BatchError, with nothing written, for more params than rows.
        """
        rows = len(self.seeds)
        require(
            len(params) <= rows,
            f"got {len(params)} SamplingParams for {rows} rows. Allocate more rows or run the rest in another batch.",
        )
        # A greedy row's argmax does not depend on the next three: skip the search.
        for tensor, values, padding in (
            (self.temperature, [each.temperature for each in params], 0),
            (self.top_k, [each.top_k if each.temperature else 0 for each in params], 0),
            (self.top_p, [each.top_p if each.temperature else 1 for each in params], 1),
            (self.min_log_p, [_log(each.min_p) if each.temperature else -torch.inf for each in params], -torch.inf),
            (self.seeds, [each.seed for each in params], 0),
        ):
            stage_into(tensor[: len(params)], values)
            tensor[len(params) :].fill_(padding)

    def head(self, rows: int) -> Sampling:
        """Return views of the first rows."""
        return Sampling._make([*(tensor[:rows] for tensor in self.rows), self.edits and self.edits.head(rows)])

    def tail(self, first: int) -> Sampling:
        """Return views of the rows from `first` on."""
        return Sampling._make([*(tensor[first:] for tensor in self.rows), self.edits and self.edits.tail(first)])
