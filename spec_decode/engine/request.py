"""Requests to the engine, their state, and their results."""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from itertools import takewhile
from typing import Literal

from spec_decode.paged import KVGroup, StateGroup
from spec_decode.sampling import SamplingParams
from spec_decode.sampling.kernels.draw_tokens import NO_TOKEN
from spec_decode.sampling.logit_edits import RowEdits


@dataclass(frozen=True, kw_only=True, slots=True)
class Request:
    """A prompt and how to continue it.

    prompt: a list, tuple or range of token ids, copied on submission; for an array or a tensor, pass tolist().
    sampling: how tokens are drawn and where the text ends. The engine knows only tokens: it rejects stop strings.
    end_token_ids: the model's end tokens.
    """

    prompt: Sequence[int]
    sampling: SamplingParams = field(default_factory=SamplingParams)
    end_token_ids: Collection[int] = ()

    @property
    def max_len(self) -> int:
        """The most tokens of prompt and text together."""
        return len(self.prompt) + self.sampling.max_tokens


_log = logging.getLogger(__name__)

FinishReason = Literal["stop", "length", "abort", "not_finite"]
"""Why a request ended: a stop token, its maximum number of tokens, a call of `cancel`, or logits of the target that are
NaN or infinite, so that no next token exists. The tokens before it are sound."""


@dataclass(slots=True)
class Generation:
    """The result of a request. accepted: accepted draft tokens, one entry per round. finish_reason: None while it runs.
    logprobs: for each token, id -> logprob of the token and of the likeliest ones, see `SamplingParams.logprobs`; one
    more, empty, where "not_finite" ended the text."""

    token_ids: list[int] = field(default_factory=list)
    accepted: list[int] = field(default_factory=list)
    logprobs: list[dict[int, float]] = field(default_factory=list)
    finish_reason: FinishReason | None = None


@dataclass(eq=False, slots=True)
class Handle:
    """A submitted request, as copied then. on_token is called with each token of the text when the host reads it."""

    request: Request
    on_token: Callable[[int], None] | None = None
    generation: Generation = field(default_factory=Generation)

    @property
    def done(self) -> bool:
        return self.generation.finish_reason is not None

    @property
    def room(self) -> int:
        """Tokens left of max_tokens."""
        return self.request.sampling.max_tokens - len(self.generation.token_ids)

    def append_tokens(self, tokens: Sequence[int], logprobs: Sequence[dict[int, float]] = ()) -> int:
        """Append tokens up to the end of the text; return how many were appended. A stop token is not.

        tokens: of one step; the last can be NO_TOKEN, which ends the text. logprobs: one entry per token, or none.
        """
        stop_ids, room = frozenset(self.request.sampling.stop_token_ids), self.room
        if room < len(tokens):
            tokens = tokens[:room]
        stopped = not stop_ids.isdisjoint(tokens)
        if stopped:
            tokens = list(takewhile(lambda token: token not in stop_ids, tokens))
        not_finite = tokens[-1:] == [NO_TOKEN]
        if not_finite:
            tokens = tokens[:-1]
        self.generation.token_ids += tokens
        if logprobs:
            self.generation.logprobs += [*logprobs[: len(tokens)], *([{}] if not_finite else [])]
        if stopped:
            self.generation.finish_reason = "stop"
        elif not_finite:
            self.generation.finish_reason = "not_finite"
            _log.warning(
                "a request ended after %d tokens: the model's logits are NaN or infinite there. If it is in "
                "float16, which overflows above 65504, load it in bfloat16 or float32.",
                len(self.generation.token_ids),
            )
        elif len(tokens) == room:
            self.finish_if_full()
        return len(tokens)

    def finish_if_full(self) -> None:
        """End the text if it has max_tokens."""
        if not self.room:
            self.generation.finish_reason = "length"


@dataclass(eq=False, slots=True)
class RequestState:
    """The host state of a request in the engine.

    max_len               the most tokens of prompt and text together
    pages, slot           owned while it is admitted
    num_prefilled         tokens of `token_ids` in the caches, until it runs
    lost                  its recurrent state did not fit its lengths: what comes from it is dropped until it is
                          computed again
    lost_at               tokens of its text when that happened last
    len_lower_bound,      bounds of its length on the device, since the host has not read the latest steps;
    len_upper_bound       not cut at max_len
    """

    handle: Handle
    max_len: int = field(init=False)
    pages: list[int] = field(default_factory=list)
    slot: int = -1
    num_prefilled: int = 0
    lost: bool = False
    lost_at: int = -1
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
        """Tokens to prefill: all but the last of the text, which the next step runs; the prompt for a new request."""
        generated = len(self.handle.generation.token_ids)
        return len(self.handle.request.prompt) + max(0, generated - 1)

    def new_pages(self, groups: Sequence[KVGroup | StateGroup], known: int) -> list[list[int]]:
        """Return for each group the pages that tables with its first `known` pages lack: of a state group, the slot."""
        slot = [] if known else [self.slot]
        return [slot if isinstance(group, StateGroup) else self.pages[known:] for group in groups]

    @property
    def edits(self) -> RowEdits:
        """What changes its logits after the tokens to prefill."""
        request, output = self.handle.request, self.handle.generation.token_ids[:-1]
        return request.sampling.edits(request.prompt, output, request.end_token_ids)

    @property
    def finished(self) -> bool:
        """Whether another step would add nothing."""
        return self.len_lower_bound >= self.max_len or self.handle.generation.finish_reason is not None

    def step_enqueued(self, num_drafts: int) -> None:
        """Update the bounds for a step in flight, which adds 1 to 1 + num_drafts tokens."""
        self.len_lower_bound += 1
        self.len_upper_bound += 1 + num_drafts

    def step_read(self, num_drafts: int, accepted: int) -> None:
        """Tighten the bounds once a step's number of accepted draft tokens is known."""
        self.len_lower_bound += accepted
        self.len_upper_bound -= num_drafts - accepted
