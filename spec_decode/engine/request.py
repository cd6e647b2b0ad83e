"""What is asked of the engine, and what becomes of it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import takewhile
from typing import Literal

from spec_decode.sampling import SamplingParams


@dataclass(frozen=True, kw_only=True, slots=True)
class Request:
    """A prompt and how to continue it.

    prompt: a list, tuple or range of token ids, copied when it is submitted; of an array or a tensor, pass tolist().
    sampling: how tokens are drawn and where the text ends. An engine knows tokens alone: it refuses stop strings, and
    has no end tokens of its own.
    """

    prompt: Sequence[int]
    sampling: SamplingParams = field(default_factory=SamplingParams)

    @property
    def max_len(self) -> int:
        """Tokens of prompt and text together, at most."""
        return len(self.prompt) + self.sampling.max_tokens


FinishReason = Literal["stop", "length", "abort"]
"""Why a request takes no more tokens: a stop token, as many tokens as it may have, or a call of `cancel`."""


@dataclass(slots=True)
class Generation:
    """What became of a request. accepted: draft tokens kept, one entry a round; finish_reason: None while it runs.
    logprobs: for each token, id -> logprob of the token itself and of those that `SamplingParams.logprobs` asks for."""

    token_ids: list[int] = field(default_factory=list)
    accepted: list[int] = field(default_factory=list)
    logprobs: list[dict[int, float]] = field(default_factory=list)
    finish_reason: FinishReason | None = None


@dataclass(eq=False, slots=True)
class Handle:
    """A submitted request, as it was then. on_token is called with each token of the text as the host reads it."""

    request: Request
    on_token: Callable[[int], None] | None = None
    generation: Generation = field(default_factory=Generation)

    @property
    def done(self) -> bool:
        return self.generation.finish_reason is not None

    @property
    def room(self) -> int:
        """Tokens that the text may still take."""
        return self.request.sampling.max_tokens - len(self.generation.token_ids)

    def append_tokens(self, tokens: Sequence[int], logprobs: Sequence[dict[int, float]] = ()) -> int:
        """Let the text grow by tokens up to its end; how many of them are in the text. A stop token is not.

        logprobs: of each token, or of none.
        """
        stop_ids, room = frozenset(self.request.sampling.stop_token_ids), self.room
        if room < len(tokens):
            tokens = tokens[:room]
        stopped = not stop_ids.isdisjoint(tokens)
        if stopped:
            tokens = list(takewhile(lambda token: token not in stop_ids, tokens))
        self.generation.token_ids += tokens
        if logprobs:
            self.generation.logprobs += logprobs[: len(tokens)]
        if stopped:
            self.generation.finish_reason = "stop"
        elif len(tokens) == room:
            self.finish_if_full()
        return len(tokens)

    def finish_if_full(self) -> None:
        """End the text where it has all the tokens that were asked for."""
        if not self.room:
            self.generation.finish_reason = "length"


@dataclass(eq=False, slots=True)
class RequestState:
    """A request on its way through the engine, on the host.

    max_len               tokens of prompt and text together, at most
    pages                 owned while it is admitted
    num_prefilled         tokens of `token_ids` in the caches, until it runs
    len_lower_bound,      what the host knows of its length on the device, whose latest steps it has not read yet;
    len_upper_bound       not cut at max_len
    """

    handle: Handle
    max_len: int = field(init=False)
    pages: list[int] = field(default_factory=list)
    num_prefilled: int = 0
    len_lower_bound: int = 0
    len_upper_bound: int = 0

    def __post_init__(self) -> None:
        self.max_len = self.handle.request.max_len

    @property
    def token_ids(self) -> list[int]:
        """Prompt and text so far."""
        return [*self.handle.request.prompt, *self.handle.generation.token_ids]

    @property
    def prefill_len(self) -> int:
        """Tokens to prefill: all but the last of the text, which a step begins with; of a new request, the prompt."""
        generated = len(self.handle.generation.token_ids)
        return len(self.handle.request.prompt) + max(0, generated - 1)

    @property
    def finished(self) -> bool:
        """Whether another step could add nothing."""
        return self.len_lower_bound >= self.max_len or self.handle.generation.finish_reason is not None

    def step_enqueued(self, num_drafts: int) -> None:
        """The device lengthens it by 1 to 1 + num_drafts tokens."""
        self.len_lower_bound += 1
        self.len_upper_bound += 1 + num_drafts

    def step_read(self, num_drafts: int, accepted: int) -> None:
        """Of a step's num_drafts draft tokens, `accepted` were kept."""
        self.len_lower_bound += accepted
        self.len_upper_bound -= num_drafts - accepted
