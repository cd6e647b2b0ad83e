"""Completions of prompts, and the text chunks of a stream."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, NoReturn

from spec_decode.engine import FinishReason, Handle, Request
from spec_decode.llm.stop_strings import GrowingText


@dataclass(frozen=True, kw_only=True, slots=True)
class Completion:
    """A prompt with its text.

    - prompt             the text, the conversation or the token ids that you passed
    - text               the new text, without the stop string or end token that ended it
    - token_ids          the tokens of the text; if a stop string ended it, up to the token that completed that string
    - finish_reason      "stop" (an end token or a stop string), "length" (max_tokens), "abort" (cancelled) or
                         "not_finite" (the model's logits became NaN or infinite; the text so far is sound)
    - num_prompt_tokens  tokens of the prompt
    - accepted           accepted draft tokens of each round
    - logprobs           for each token of token_ids, id -> logprob: the token itself, then the most likely ones; and {}
                         where "not_finite" ended the text. Empty unless SamplingParams requests logprobs
    - others             the prompt's n - 1 other completions, if SamplingParams requests n; these have no others
    """

    prompt: object
    text: str
    token_ids: list[int]
    finish_reason: FinishReason
    num_prompt_tokens: int
    accepted: list[int]
    logprobs: list[dict[int, float]]
    others: tuple[Completion, ...] = ()

    @property
    def completions(self) -> tuple[Completion, ...]:
        """The prompt's n completions: this one, then the others."""
        return (self, *self.others)

    if not TYPE_CHECKING:  # a type checker would accept every name

        def __getattr__(self, name: str) -> NoReturn:
            """Raise AttributeError. For vLLM's `outputs[0].outputs[0].text` it tells you what to write instead."""
            hint = (
                ". It is one text: leave .outputs[0] out, and read .text; with n, read .completions"
                if name == "outputs"
                else ""
            )
            raise AttributeError(f"'Completion' object has no attribute {name!r}{hint}", name=name, obj=self)


@dataclass(frozen=True, kw_only=True, slots=True)
class TextChunk:
    """A piece of a streamed text.

    - index          index of its prompt
    - choice         which of the prompt's n completions
    - text           the piece
    - token_ids      the tokens since the piece before. Joined, they are the completion's; a token whose text is held
                     back, or that has none, can come with an earlier or a later piece than its text
    - finish_reason  why the text ended, in its last piece; None in all others
    """

    index: int
    choice: int = 0
    text: str
    token_ids: list[int]
    finish_reason: FinishReason | None = None


class Reply:
    """The state of one completion of a prompt: its request, its text so far, and the chunks not yielded yet."""

    def __init__(self, index: int, choice: int, prompt: object, request: Request, text: GrowingText) -> None:
        self.index, self.choice, self.prompt, self.request, self.growing = index, choice, prompt, request, text
        self.handle: Handle | None = None
        """The handle of the request; None until it is submitted."""
        self.chunks: deque[TextChunk] = deque()
        self.ended = False
        self._tokens: list[int] = []  # those of no chunk yet

    @property
    def submitted(self) -> Handle:
        """The handle; the request must be submitted."""
        assert self.handle is not None
        return self.handle

    def take(self, tokens: Sequence[int]) -> bool:
        """Add tokens to the text; return whether a stop string has ended it."""
        self._tokens += tokens
        self.growing.add(tokens)
        if piece := self.growing.take():
            self._put(piece)
        return self.growing.stopped

    def read(self, *, whole: bool) -> None:
        """Add the request's new tokens; at its end the rest, with the finish reason. whole: only at the end."""
        done = self.submitted.done
        new = self.submitted.generation.token_ids[self.growing.num_tokens :] if done or not whole else []
        if done:
            self.ended = True
            self._tokens += new
            self.growing.add(new)
            self.growing.finish()
            self._put(self.growing.take(last=True), self._reason)
        elif new:
            self.take(new)

    def _put(self, piece: str, reason: FinishReason | None = None) -> None:
        self.chunks.append(
            TextChunk(index=self.index, choice=self.choice, text=piece, token_ids=self._tokens, finish_reason=reason)
        )
        self._tokens = []

    def completion(self) -> Completion:
        """Return the completion of an ended prompt."""
        generation = self.submitted.generation
        return Completion(
            prompt=self.prompt,
            text=self.growing.text,
            token_ids=list(generation.token_ids),
            finish_reason=self._reason,
            num_prompt_tokens=len(self.request.prompt),
            accepted=list(generation.accepted),
            logprobs=list(generation.logprobs),
        )

    @property
    def _reason(self) -> FinishReason:
        reason = self.submitted.generation.finish_reason
        assert reason is not None
        return "stop" if self.growing.stopped else reason


def together(replies: Iterable[Reply]) -> Completion:
    """Return the completions of a prompt's replies as one with the others."""
    first, *others = (reply.completion() for reply in replies)
    return replace(first, others=tuple(others))
