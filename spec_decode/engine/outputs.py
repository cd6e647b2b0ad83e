"""The way of sampled tokens from the device to the host and to whoever asked for them."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

import torch

from spec_decode.engine.request import RequestState
from spec_decode.engine.stats import EngineStats


class AsyncOutput:
    """A copy of a small tensor as it is in stream order now. Only `read` waits for it."""

    def __init__(self, source: torch.Tensor) -> None:
        """source: int64 [rows, columns], on any device."""
        self._event = torch.cuda.Event() if source.is_cuda else None
        # To the host without waiting means to pinned memory.
        self._copy = source.to("cpu", non_blocking=True, copy=True)
        if self._event:
            self._event.record(torch.cuda.current_stream(source.device))

    def read(self) -> list[list[int]]:
        """The values, row by row."""
        if self._event:
            self._event.synchronize()
        rows: list[list[int]] = self._copy.tolist()
        return rows


@dataclass(frozen=True, slots=True)
class _PendingOutput:
    """Row i is requests[i]'s. first: its one column is a request's first token, which prefill sampled."""

    requests: list[RequestState]
    output: AsyncOutput
    first: bool


class PendingOutputs:
    """Outputs that are enqueued and not read, and tokens that are read and not yet streamed."""

    def __init__(self, num_speculative_tokens: int) -> None:
        self._num_drafts = num_speculative_tokens
        self._pending: deque[_PendingOutput] = deque()
        # The request, a token, and with a step's first token the number of draft tokens that the step kept.
        self._read: deque[tuple[RequestState, int, int | None]] = deque()
        self.in_callback = False
        """Whether the last token was handed to a callback that has not returned: what raises then is the callback's."""

    def __len__(self) -> int:
        """How many outputs are not read."""
        return len(self._pending)

    def add_first_tokens(self, requests: list[RequestState], tokens: torch.Tensor) -> None:
        """tokens: int64 [n], the first of each of n requests."""
        self._pending.append(_PendingOutput(requests, AsyncOutput(tokens[:, None]), first=True))

    def add_step(self, requests: list[RequestState], outputs: torch.Tensor) -> None:
        """outputs: int64 [n, 2 + K] of a target step, as InputBatch has them."""
        for request in requests:
            request.step_enqueued(self._num_drafts)
        self._pending.append(_PendingOutput(requests, AsyncOutput(outputs), first=False))

    def process_oldest(self, stats: EngineStats) -> None:
        """Wait for the oldest output and stream its tokens. What a callback raises comes through: see `stream`."""
        pending = self._pending[0]
        for request, row in zip(pending.requests, pending.output.read(), strict=True):
            if pending.first:
                self._read.append((request, row[0], None))
                continue
            accepted = row[0]
            request.step_read(self._num_drafts, accepted)
            self._read.append((request, row[1], accepted))
            self._read.extend((request, token, None) for token in row[2 : 2 + accepted])
        self._pending.popleft()
        self.stream(stats)

    def requests(self) -> list[RequestState]:
        """The requests of everything that is not in the texts yet, each as often as it has something."""
        return [*(request for request, _, _ in self._read), *(r for out in self._pending for r in out.requests)]

    def clear(self) -> None:
        """Forget everything that is not in the texts yet."""
        self._read.clear()
        self._pending.clear()

    def stream(self, stats: EngineStats) -> None:
        """Append what was read to the texts. What a callback raises comes through; the next call goes on after it."""
        while self._read:
            request, token, accepted = self._read[0]
            if request.handle.done:
                self._read.popleft()
                continue
            if accepted is not None and self._num_drafts:
                request.handle.generation.accepted.append(accepted)
                stats.accepted += accepted
                stats.drafted_for += 1
                stats.had_room_for += request.handle.room > 1
            stats.new_tokens += 1
            in_text = request.handle.append_token(token)
            self._read.popleft()
            if in_text and request.handle.on_token:
                self.in_callback = True
                request.handle.on_token(token)
                self.in_callback = False
