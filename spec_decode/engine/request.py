"""What is asked of the engine, and what becomes of it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from enum import Enum

from spec_decode.sampling import SamplingParams


@dataclass(frozen=True, kw_only=True, slots=True)
class Request:
    """A prompt and how to continue it; temperature, top_k, top_p and seed as SamplingParams has them.

    stop_ids end the text and are not part of it.
    """

    prompt: Sequence[int]
    max_new_tokens: int
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    seed: int = 0
    stop_ids: frozenset[int] = frozenset()

    @property
    def sampling(self) -> SamplingParams:
        """Raises BatchError for values that no token can be sampled with."""
        return SamplingParams(temperature=self.temperature, top_k=self.top_k, top_p=self.top_p, seed=self.seed)

    @property
    def max_len(self) -> int:
        """Tokens of prompt and text together, at most."""
        return len(self.prompt) + self.max_new_tokens


class Finish(str, Enum):
    """Why a request takes no more tokens."""

    STOP = "stop"
    LENGTH = "length"
    CANCELLED = "cancelled"


@dataclass(slots=True)
class Generation:
    """What became of a request. accepted: draft tokens kept, one entry a round; finish: None while it runs."""

    token_ids: list[int] = field(default_factory=list)
    accepted: list[int] = field(default_factory=list)
    finish: Finish | None = None


@dataclass(eq=False, slots=True)
class Handle:
    """A submitted request. on_token is called with each token of the text as the host learns of it."""

    request: Request
    on_token: Callable[[int], None] | None = None
    generation: Generation = field(default_factory=Generation)

    @property
    def done(self) -> bool:
        return self.generation.finish is not None

    def take(self, token: int) -> None:
        """Let the text grow by a token, or end it."""
        generation = self.generation
        if token in self.request.stop_ids:
            generation.finish = Finish.STOP
            return
        generation.token_ids.append(token)
        if len(generation.token_ids) == self.request.max_new_tokens:
            generation.finish = Finish.LENGTH
        if self.on_token:
            self.on_token(token)
