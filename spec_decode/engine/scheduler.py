"""Which requests run, are prefilled or wait, and which pages and slot each owns. Host state only.

The policy is the simplest that is correct:
- Requests are admitted in order of submission, while a row is free and the pool has room for their prompt, their first
  round, and one spare page for every request admitted before. The first that does not fit blocks the others.
- Every step prefills at most max_prefill_tokens prompt tokens, earliest admitted request first. A request runs once its
  whole prompt is in the caches.
- Running requests own exactly the pages that the next round can write. If the pool cannot provide them, the youngest
  request is preempted: it frees all its pages and waits ahead of the others. When it is admitted again, its prompt and
  its text so far are prefilled like a prompt. A step that preempts admits no request. The oldest request always
  advances, because every request fits an empty pool.
- A pool with room for max_num_seqs of the longest requests is never short. It reserves no spare pages, and gives
  running requests the pages of several rounds at once: no other request could use them.
- A request's recurrent state has a slot from admission on. There are max_num_seqs, so none ever waits for one.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from spec_decode.engine.config import EngineConfig
from spec_decode.engine.page_pool import PagePool
from spec_decode.engine.request import Handle, RequestState

_ROUNDS_AHEAD = 8
"""Rounds that a request gets pages for in advance if the pool is never short. Without this, a batch of 32 grows in
nearly every round, and the table writes make its rounds 1 % longer (measured on an H200)."""


@dataclass(frozen=True, slots=True)
class Chunk:
    """Tokens start .. end - 1 of a request's prefill."""

    request: RequestState
    start: int
    end: int

    @property
    def last(self) -> bool:
        return self.end == self.request.prefill_len


class Scheduler:
    """See the module. running: in order of their rows, which is the order of admission."""

    def __init__(self, pool: PagePool, config: EngineConfig) -> None:
        self.pool = pool
        self.running: list[RequestState] = []
        self._prefilling: list[RequestState] = []
        self._waiting: deque[RequestState] = deque()
        self._config = config
        self._free_slots = list(range(config.max_num_seqs))
        self._never_short = pool.num_pages >= config.max_num_seqs * pool.pages_for(config.max_model_len)

    @property
    def has_unfinished(self) -> bool:
        """Whether any request is unfinished."""
        return bool(self.running or self._prefilling or self._next_waiting())

    def submit(self, handle: Handle) -> None:
        """Queue a request for admission."""
        self._waiting.append(RequestState(handle))

    def make_room(self, read_outputs: Callable[[], None]) -> int:
        """Free the pages of finished requests, give the others pages for the next round, and admit requests that fit.

        read_outputs: reads all unread outputs, which can end requests; called only if pages are short. Returns how many
        requests were preempted.
        """
        self.free_finished()
        missing = self._missing_pages()
        if not self._has_room(missing):
            read_outputs()
            self.free_finished()
            missing = self._missing_pages()
        preempted = 0
        while not self._has_room(missing):
            self._preempt()
            preempted += 1
            missing = self._missing_pages()
        self._allocate(missing)
        # A preempted request is first in line and needs at least the pages that were short, so none is admitted now.
        self._admit()
        return preempted

    def restart(self, requests: Iterable[RequestState]) -> None:
        """Take back every page and queue all requests again, after a step or a restart that was interrupted anywhere.

        requests: those with lost output; they can have been dropped as complete.
        """
        everyone = dict.fromkeys([*self.running, *self._prefilling, *requests, *self._waiting])
        self.pool.reset()
        self._free_slots = list(range(self._config.max_num_seqs))
        for request in everyone:
            request.pages, request.num_prefilled, request.lost = [], 0, False
            request.len_lower_bound = request.len_upper_bound = 0
            request.handle.finish_if_full()
        self._waiting = deque(request for request in everyone if not request.handle.done)
        self.running, self._prefilling = [], []

    def recompute(self, requests: Sequence[RequestState]) -> None:
        """Preempt requests whose recurrent state is lost. The host must have read everything that was enqueued. They
        can have been dropped as complete, or been preempted already."""
        for request in reversed(requests):
            request.lost = False
            if request.handle.done:
                continue
            if request in self.running:
                self.running.remove(request)
                self._free(request)
            if request not in self._waiting:
                self._waiting.appendleft(request)
            request.len_lower_bound = request.len_upper_bound = 0

    def free_finished(self) -> None:
        """Drop the finished requests that were admitted, and free their pages."""
        finished = dict.fromkeys(request for request in (*self.running, *self._prefilling) if request.finished)
        for request in finished:
            self._free(request)
        if finished:
            self.running = [request for request in self.running if request not in finished]
            self._prefilling = [request for request in self._prefilling if request not in finished]

    def _allocate(self, missing: dict[RequestState, int]) -> None:
        """Give running requests their missing pages. If any are missing and the pool is never short, all requests get
        the pages of later rounds too, so one write to the tables serves several rounds."""
        if missing and self._never_short:
            missing = self._missing_pages(_ROUNDS_AHEAD)
        for request, count in missing.items():
            request.pages += self.pool.allocate(count)

    def _has_room(self, missing: dict[RequestState, int]) -> bool:
        return sum(missing.values()) <= self.pool.num_free

    def _missing_pages(self, rounds_ahead: int = 0) -> dict[RequestState, int]:
        """Return how many pages each running request lacks for the next round and `rounds_ahead` more."""
        missing, growth = {}, rounds_ahead * (1 + self._config.num_speculative_tokens)
        page_size, slots = self.pool.page_size, self.pool.draft_slots
        for request in self.running:
            length = min(request.len_upper_bound + growth, request.max_len)
            if length + slots > len(request.pages) * page_size:
                missing[request] = self.pool.pages_for(length) - len(request.pages)
        return missing

    def _preempt(self) -> None:
        """Preempt the youngest admitted request. The host must have read all its tokens."""
        admitted = self._prefilling or self.running
        self._waiting.appendleft(admitted[-1])
        self._free(admitted.pop())

    def _admit(self) -> None:
        """Admit waiting requests while there is room."""
        config = self._config
        while (request := self._next_waiting()) and (
            admitted := len(self.running) + len(self._prefilling)
        ) < config.max_num_seqs:
            needed = self.pool.pages_for(request.prefill_len + 1)
            kept_free = 0 if self._never_short else admitted
            if needed + kept_free > self.pool.num_free:
                return
            request.pages, request.slot = self.pool.allocate(needed), self._free_slots.pop()
            self._prefilling.append(request)
            self._waiting.popleft()

    def _next_waiting(self) -> RequestState | None:
        """Return the first waiting request. Cancelled ones are dropped only when they come first: a search in every
        step would take time proportional to the queue."""
        while self._waiting and self._waiting[0].finished:
            self._waiting.popleft()
        return self._waiting[0] if self._waiting else None

    def next_chunks(self) -> list[Chunk]:
        """Return the chunks to prefill in this step."""
        room, chunks = self._config.max_prefill_tokens, []
        for request in self._prefilling:
            if room:
                start = request.num_prefilled
                chunks.append(Chunk(request, start, min(request.prefill_len, start + room)))
                room -= chunks[-1].end - start
        return chunks

    def chunks_prefilled(self, chunks: list[Chunk]) -> None:
        """Mark these chunks as cached. A request runs if its last chunk is among them; its next token is sampled."""
        done = dict.fromkeys(chunk.request for chunk in chunks if chunk.last)
        for chunk in chunks:
            chunk.request.num_prefilled = chunk.end
        for request in done:
            request.len_lower_bound = request.len_upper_bound = request.prefill_len + 1
        left = [request for request in self._prefilling if request not in done]
        self.running, self._prefilling = [*self.running, *done], left

    def _free(self, request: RequestState) -> None:
        self.pool.free(request.pages)
        self._free_slots.append(request.slot)
        request.pages, request.num_prefilled = [], 0
