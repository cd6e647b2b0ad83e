"""Completions of prompts, and the text chunks of a stream."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NoReturn

from spec_decode.engine import FinishReason, Handle, Request

_UNFINISHED = "\N{REPLACEMENT CHARACTER}"
"""A tokenizer's output for a character with bytes still missing."""


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
    """

    prompt: object
    text: str
    token_ids: list[int]
    finish_reason: FinishReason
    num_prompt_tokens: int
    accepted: list[int]
    logprobs: list[dict[int, float]]

    if not TYPE_CHECKING:  # a type checker would accept every name

        def __getattr__(self, name: str) -> NoReturn:
            """Raise AttributeError. For vLLM's `outputs[0].outputs[0].text` it tells you what to write instead."""
            hint = ". It is one text: leave .outputs[0] out, and read .text" if name == "outputs" else ""
            raise AttributeError(f"'Completion' object has no attribute {name!r}{hint}", name=name, obj=self)


@dataclass(frozen=True, kw_only=True, slots=True)
class TextChunk:
    """A piece of a streamed text.

    - index          index of its prompt
    - text           the piece
    - finish_reason  why the text ended, in its last piece; None in all others
    """

    index: int
    text: str
    finish_reason: FinishReason | None = None


class GrowingText:
    """Decodes tokens incrementally, returns only text that can no longer change, and ends at a stop string.

    A possible start of a stop string or of a character is held back until it is decided.
    """

    def __init__(self, decode: Callable[[Sequence[int]], str], stop: Sequence[str] = ()) -> None:
        self.text = ""
        """The text decoded so far, without the stop string that ended it."""
        self.stopped = False
        self._decode, self._stop = decode, tuple(stop)
        self._tokens: list[int] = []
        self._start = self._read = 0  # tokens before _start are final; those before _read are in `text`
        self._given = 0

    @property
    def may_stop(self) -> bool:
        """Whether a stop string can end it."""
        return bool(self._stop)

    @property
    def num_tokens(self) -> int:
        """Number of tokens added so far."""
        return len(self._tokens)

    def add(self, tokens: Sequence[int]) -> None:
        """Add tokens. After a stop string this does nothing."""
        if self.stopped:
            return
        self._tokens += tokens
        # Decode together with a few earlier tokens: how a tokenizer joins words can depend on them.
        before = self._decode(self._tokens[self._start : self._read])
        whole = self._decode(self._tokens[self._start :])
        piece = whole[len(before) :]
        if whole.endswith(_UNFINISHED):
            # Only a stop string before the incomplete character is final.
            piece = piece.rstrip(_UNFINISHED)
            piece = "" if self._stop_in(piece) is None else piece
        if piece:
            self._append(piece)
            self._start, self._read = self._read, len(self._tokens)

    def finish(self) -> None:
        """Append the text that was held back for a character that was never completed."""
        if not self.stopped:
            before = self._decode(self._tokens[self._start : self._read])
            self._append(self._decode(self._tokens[self._start :])[len(before) :])
            self._read = len(self._tokens)

    def take(self, *, last: bool = False) -> str:
        """Return the new text that can no longer change; with `last`, all new text."""
        settled = len(self.text) if last or self.stopped else len(self.text) - self._undecided()
        given, self._given = self._given, max(self._given, settled)
        return self.text[given : self._given]

    def _append(self, piece: str) -> None:
        end = self._stop_in(piece)
        self.text, self.stopped = (self.text + piece)[:end], end is not None

    def _stop_in(self, piece: str) -> int | None:
        """Return where the first stop string that this piece completes starts in the text; None if there is none."""
        seen = len(self.text)
        # Search only the end of a long text, where one can have started.
        start = max(0, seen - max(map(len, self._stop), default=1) + 1)
        recent = self.text[start:] + piece
        found = (recent.find(stop, max(0, seen - len(stop) + 1) - start) for stop in self._stop)
        return min((start + at for at in found if at >= 0), default=None)

    def _undecided(self) -> int:
        """Return the length of the longest suffix of the text that is a prefix of a stop string."""
        longest = 0
        for stop in self._stop:
            at = self.text.find(stop[0], max(0, len(self.text) - len(stop) + 1))
            while at >= 0 and not stop.startswith(self.text[at:]):
                at = self.text.find(stop[0], at + 1)
            longest = max(longest, len(self.text) - at if at >= 0 else 0)
        return longest


class Reply:
    """The state of one prompt: its request, its text so far, and the chunks not yielded yet."""

    def __init__(self, index: int, prompt: object, request: Request, text: GrowingText) -> None:
        self.index, self.prompt, self.request, self.growing = index, prompt, request, text
        self.handle: Handle | None = None
        """The handle of the request; None until it is submitted."""
        self.chunks: deque[TextChunk] = deque()
        self.ended = False

    @property
    def submitted(self) -> Handle:
        """The handle; the request must be submitted."""
        assert self.handle is not None
        return self.handle

    def take(self, tokens: Sequence[int]) -> bool:
        """Add tokens to the text; return whether a stop string has ended it."""
        self.growing.add(tokens)
        if piece := self.growing.take():
            self.chunks.append(TextChunk(index=self.index, text=piece))
        return self.growing.stopped

    def read(self, *, whole: bool) -> None:
        """Add the request's new tokens; at its end the rest, with the finish reason. whole: only at the end."""
        done = self.submitted.done
        new = self.submitted.generation.token_ids[self.growing.num_tokens :] if done or not whole else []
        if done:
            self.ended = True
            self.growing.add(new)
            self.growing.finish()
            rest = self.growing.take(last=True)
            self.chunks.append(TextChunk(index=self.index, text=rest, finish_reason=self._reason))
        elif new:
            self.take(new)

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
