"""Moves sampled tokens from the device to the host and to the callers, and counts the totals of a run."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass

import torch

from spec_decode.engine.request import RequestState
from spec_decode.sampling.target_sampler import TopLogprobs


@dataclass(slots=True)
class EngineStats:
    """Totals since the last generate() started, or since the engine was made."""

    rounds: int = 0
    launch_seconds: float = 0.0
    """Wall time to launch the rounds, draft and target, from call to return."""
    accepted: int = 0
    """Accepted draft tokens, summed over drafted_for rows of all rounds. A row's extra run after its end counts only in
    rounds."""
    drafted_for: int = 0
    had_room_for: int = 0
    """The part of drafted_for with room for a draft token: 2 or more of max_tokens were left."""
    new_tokens: int = 0
    """Tokens that the host has read, including stop ids."""
    prefill_tokens: int = 0
    """Prefilled tokens of prompts, and of texts that continue after a preemption."""
    preemptions: int = 0
    lost_states: int = 0
    """Requests whose recurrent state did not fit their lengths. Nothing was generated from it: they were preempted,
    which counts above too, and computed again."""

    @property
    def mean_accepted(self) -> float:
        """Accepted draft tokens per request and round, over the rounds with room for one: accepted / had_room_for.

        A round always adds one token from the target. If the text has room for only that one, no draft token can be
        accepted, and the round does not count. A round with room for fewer than K draft tokens counts in full.
        """
        return self.accepted / max(1, self.had_room_for)

    @property
    def host_us_a_round(self) -> float:
        """Mean wall time to launch a round, in microseconds."""
        return 1e6 * self.launch_seconds / max(1, self.rounds)


class AsyncOutput:
    """A copy of a small tensor, enqueued on the current stream. Only `read` waits for it."""

    def __init__(self, source: torch.Tensor) -> None:
        """source: [rows, ...], on any device."""
        self._event = torch.cuda.Event() if source.is_cuda else None
        # A non-blocking copy to the host goes to pinned memory.
        self._copy = source.to("cpu", non_blocking=True, copy=True)
        if self._event:
            self._event.record(torch.cuda.current_stream(source.device))

    def read(self) -> torch.Tensor:
        """Wait for the copy and return it."""
        if self._event:
            self._event.synchronize()
        return self._copy


@dataclass(frozen=True, slots=True)
class _PendingOutput:
    """Row i belongs to requests[i]. first: the only column is a request's first token, sampled by prefill. logprobs:
    ids and values of a `TopLogprobs`, or empty. lost: by slot, whether its state is lost; None without recurrent
    layers. slots: of the requests, which can have others by the time of the read."""

    requests: list[RequestState]
    output: AsyncOutput
    first: bool
    logprobs: tuple[AsyncOutput, ...]
    lost: AsyncOutput | None
    slots: list[int]

    def lost_requests(self) -> list[RequestState]:
        """Wait for the output and return the unfinished requests whose state is lost."""
        if self.lost is None:
            return []
        lost, owners = self.lost.read().tolist(), zip(self.requests, self.slots, strict=True)
        return [request for request, slot in owners if lost[slot] and not request.handle.done]

    def read(self) -> _ReadOutput:
        """Wait for the output and return it in the form that is streamed."""
        # Before the tokens: an output that was read is streamed at once.
        logprobs = list(self._read_logprobs())
        return _ReadOutput(self.requests, self.output.read().flatten().tolist(), self.first, logprobs)

    def _read_logprobs(self) -> Iterator[list[dict[int, float]]]:
        """Yield the logprobs of each request's tokens, as many as it requested; nothing if no request wants any."""
        found = [each.read().tolist() for each in self.logprobs]
        for request, ids, values in zip(self.requests, *found, strict=True) if found else ():
            count = request.handle.request.sampling.logprobs
            columns = zip(ids, values, strict=True) if count else ()
            yield [dict(zip(i[: 1 + (count or 0)], v, strict=False)) for i, v in columns]


@dataclass(slots=True)
class _ReadOutput:
    """An output on the host, and what is in the texts: the rows before `row`, and `streamed` tokens of that row.

    values: flat, all rows in sequence. A list per row would trigger garbage collection in every step of many requests,
    and from time to time a full collection over all objects of the process, which takes 100 ms or more.
    """

    requests: list[RequestState]
    values: list[int]
    first: bool
    logprobs: list[list[dict[int, float]]]
    row: int = 0
    streamed: int = 0

    @property
    def width(self) -> int:
        """Columns per row."""
        return len(self.values) // len(self.requests)


class PendingOutputs:
    """Outputs that are enqueued but not read, and tokens that are read but not streamed. lost: requests whose recurrent
    state is lost; what is read of them is dropped."""

    def __init__(self, num_speculative_tokens: int) -> None:
        self._num_drafts = num_speculative_tokens
        self._pending: deque[_PendingOutput] = deque()
        self._read: _ReadOutput | None = None
        self.lost: list[RequestState] = []
        self.in_callback = False
        """Whether a callback is running: an exception then comes from the callback."""

    def __len__(self) -> int:
        """Return how many outputs are not read."""
        return len(self._pending)

    def add_first_tokens(
        self,
        requests: list[RequestState],
        tokens: torch.Tensor,
        logprobs: TopLogprobs | None,
        lost: torch.Tensor | None = None,
    ) -> None:
        """tokens: int64 [n], the first token of each of n requests. logprobs: [n, 1, 1 + N]. lost: int32 [slots]."""
        self._add(requests, tokens[:, None], logprobs, lost, first=True)

    def add_step(
        self,
        requests: list[RequestState],
        outputs: torch.Tensor,
        logprobs: TopLogprobs | None,
        lost: torch.Tensor | None = None,
    ) -> None:
        """outputs: int64 [n, 2 + K] of a target step, see InputBatch. logprobs: [n, 1 + K, 1 + N]. lost: int32
        [slots]."""
        for request in requests:
            request.step_enqueued(self._num_drafts)
        self._add(requests, outputs, logprobs, lost, first=False)

    def _add(
        self,
        requests: list[RequestState],
        output: torch.Tensor,
        logprobs: TopLogprobs | None,
        lost: torch.Tensor | None,
        *,
        first: bool,
    ) -> None:
        wanted = logprobs is not None and any(request.handle.request.sampling.logprobs for request in requests)
        copies = tuple(map(AsyncOutput, logprobs)) if logprobs and wanted else ()
        flags = None if lost is None else AsyncOutput(lost)
        slots = [] if lost is None else [request.slot for request in requests]
        self._pending.append(_PendingOutput(requests, AsyncOutput(output), first, copies, flags, slots))

    def process_oldest(self, stats: EngineStats) -> None:
        """Wait for the oldest output and stream its tokens. Exceptions in callbacks propagate: see `stream`."""
        for request in self._pending[0].lost_requests():
            if not request.lost:
                request.lost = True
                self.lost.append(request)
        read = self._pending[0].read()
        if not read.first:
            for request, accepted in zip(read.requests, read.values[:: read.width], strict=True):
                request.step_read(self._num_drafts, accepted)
        self._read = read
        self._pending.popleft()
        self.stream(stats)

    def requests(self) -> list[RequestState]:
        """Return the requests with output that is not in the texts yet, once per pending output."""
        read = self._read.requests[self._read.row :] if self._read else []
        return [*self.lost, *read, *(request for output in self._pending for request in output.requests)]

    def clear(self) -> None:
        """Drop everything that is not in the texts yet."""
        self._read = None
        self._pending.clear()
        self.lost.clear()

    def stream(self, stats: EngineStats) -> None:
        """Append the read tokens to the texts. A callback's exception propagates; the next call resumes after it."""
        if (read := self._read) is None:
            return
        requests, values, width = read.requests, read.values, read.width
        while read.row < len(requests):
            row, streamed, handle = read.row, read.streamed, requests[read.row].handle
            generation, start = handle.generation, row * width
            if generation.finish_reason is not None or requests[row].lost:
                read.row, read.streamed = row + 1, 0
                continue
            if read.first:
                tokens = values[start : start + 1]
            else:
                accepted = values[start]
                tokens = values[start + 1 + streamed : start + 2 + accepted]
                if self._num_drafts and not streamed:
                    generation.accepted.append(accepted)
                    stats.accepted += accepted
                    stats.drafted_for += 1
                    stats.had_room_for += handle.room > 1
            # A callback can end any text, so with a callback tokens are appended one by one.
            left, tokens = len(tokens), tokens[:1] if handle.on_token else tokens
            logprobs = read.logprobs[row][streamed : streamed + len(tokens)] if read.logprobs else ()
            in_text = handle.append_tokens(tokens, logprobs)
            stats.new_tokens += in_text + (generation.finish_reason == "stop")
            read.row, read.streamed = (row, streamed + 1) if len(tokens) < left else (row + 1, 0)
            if in_text and handle.on_token:
                self.in_callback = True
                handle.on_token(tokens[0])
                self.in_callback = False
        self._read = None
