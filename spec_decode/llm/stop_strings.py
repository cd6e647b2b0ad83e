"""The text of new tokens, up to a stop string."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from spec_decode.llm.incremental_decoder import IncrementalDecoder


class GrowingText:
    """The text of new tokens, which ends at a stop string. It returns only text that can no longer change.

    A possible start of a stop string or of a character is held back until it is decided. A stop string must be in the
    new text as a whole: one that begins in the prompt does not end it. Nor does one that the first min_tokens complete.
    """

    def __init__(
        self,
        decode: Callable[[Sequence[int]], str],
        stop: Sequence[str] = (),
        *,
        prompt: Sequence[int] = (),
        min_tokens: int = 0,
    ) -> None:
        self.stopped = False
        self.num_tokens = 0
        """Number of tokens added so far."""
        self._decoder, self._stop, self._min_tokens = IncrementalDecoder(decode, prompt), tuple(stop), min_tokens
        self._taken: list[str] = []
        self._rest = ""
        """The text that was not taken yet. Every stop string that can still come begins in it."""

    @property
    def text(self) -> str:
        """The text decoded so far, without the stop string that ended it."""
        return "".join(self._taken) + self._rest

    @property
    def may_stop(self) -> bool:
        """Whether a stop string can end it."""
        return bool(self._stop)

    def add(self, tokens: Sequence[int]) -> None:
        """Add tokens. After a stop string this does nothing."""
        early = tokens[: max(0, self._min_tokens - self.num_tokens)]
        for some in (early, tokens[len(early) :]):
            if not self.stopped and some:
                self.num_tokens += len(some)
                self._append(self._decoder.add(some))

    def finish(self) -> None:
        """Append U+FFFD for a character that was never completed."""
        if not self.stopped:
            self._append(self._decoder.finish())

    def take(self, *, last: bool = False) -> str:
        """Return the new text that can no longer change; with `last`, all new text."""
        decided = len(self._rest) if last or self.stopped else len(self._rest) - self._undecided()
        piece, self._rest = self._rest[:decided], self._rest[decided:]
        self._taken.append(piece)
        return piece

    def _append(self, piece: str) -> None:
        seen, self._rest = len(self._rest), self._rest + piece
        if self.num_tokens <= self._min_tokens:
            return
        found = (self._rest.find(stop, max(0, seen - len(stop) + 1)) for stop in self._stop)
        if (end := min((at for at in found if at >= 0), default=None)) is not None:
            self._rest, self.stopped = self._rest[:end], True

    def _undecided(self) -> int:
        """Return the length of the longest suffix of the text that is a prefix of a stop string."""
        longest = 0
        for stop in self._stop:
            at = self._rest.find(stop[0], max(0, len(self._rest) - len(stop) + 1))
            while at >= 0 and not stop.startswith(self._rest[at:]):
                at = self._rest.find(stop[0], at + 1)
            longest = max(longest, len(self._rest) - at if at >= 0 else 0)
        return longest
