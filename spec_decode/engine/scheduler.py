"""Who runs, who is prefilled and who waits, and which pages each owns. Host state only.

The policy, simplest that is correct:
- Requests are admitted in the order of submission, while a row is free and the pool holds their prompt, their first
  round, and a page more for everybody admitted before; the first that does not fit holds up the others.
- Every round, at most max_prefill_tokens of prompts are prefilled, of the earliest admitted first. A request runs once
  its whole prompt is in the caches.
- Running requests own pages for what the next round may write and no more. Where the pool cannot give these, the
  youngest request is preempted: it gives all its pages back, waits ahead of everybody else, and when it is admitted
  again its prompt and its text so far are prefilled like a prompt. Nobody is admitted in a round that preempted.
  The oldest request always gets on, since each alone fits the pool.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

from spec_decode.engine.pages import PagePool
from spec_decode.engine.request import Handle


@dataclass(eq=False, slots=True)
class Job:
    """A request on its way through the engine.

    pages: owned while it is admitted. prefilled: tokens of `text` in the caches, until it runs. shortest, longest: what
    the host knows of its length on the device, whose latest rounds it has not heard of yet; not cut at max_len.
    """

    handle: Handle
    pages: list[int] = field(default_factory=list)
    prefilled: int = 0
    shortest: int = 0
    longest: int = 0

    @property
    def max_len(self) -> int:
        return self.handle.request.max_len

    @property
    def text(self) -> list[int]:
        """Prompt and text so far."""
        return [*self.handle.request.prompt, *self.handle.generation.token_ids]

    @property
    def context(self) -> int:
        """Tokens to prefill: all but the last of the text, which a round begins with; of a new request, the prompt."""
        generated = len(self.handle.generation.token_ids)
        return len(self.handle.request.prompt) + max(0, generated - 1)

    @property
    def complete(self) -> bool:
        """Whether another round could add nothing."""
        return self.handle.done or self.shortest >= self.max_len


@dataclass(frozen=True, slots=True)
class Chunk:
    """Tokens start .. end - 1 of a job's context."""

    job: Job
    start: int
    end: int

    @property
    def last(self) -> bool:
        return self.end == self.job.context


class Scheduler:
    """See the module. running: in the order of their rows, which is that of admission."""

    def __init__(self, pool: PagePool, *, max_reqs: int, num_speculative_tokens: int, max_prefill_tokens: int) -> None:
        self.pool = pool
        self.running: list[Job] = []
        self._prefilling: list[Job] = []
        self._waiting: deque[Job] = deque()
        self._max_reqs = max_reqs
        self._ahead = num_speculative_tokens
        self._max_prefill_tokens = max_prefill_tokens

    @property
    def busy(self) -> bool:
        """Whether anybody is left to run."""
        return bool(self.running or self._prefilling or self._waiting)

    def submit(self, handle: Handle) -> None:
        self._waiting.append(Job(handle))

    def reap(self) -> None:
        """Let go of everybody to whom a round could add nothing."""
        for job in (*self.running, *self._prefilling):
            if job.complete:
                self._release(job)
        self.running = [job for job in self.running if not job.complete]
        self._prefilling = [job for job in self._prefilling if not job.complete]
        self._waiting = deque(job for job in self._waiting if not job.complete)

    def reach(self, job: Job) -> int:
        """Tokens of a running job that must have pages in the next round: a round writes K behind its last token."""
        return min(job.longest, job.max_len) + self._ahead

    def growth(self) -> dict[Job, int]:
        """Pages that running jobs lack for the next round."""
        lacking = ((job, self.pool.pages_for(self.reach(job)) - len(job.pages)) for job in self.running)
        return {job: count for job, count in lacking if count > 0}

    def grow(self) -> None:
        """Give running jobs the pages they lack; they must be free."""
        for job, count in self.growth().items():
            job.pages += self.pool.take(count)

    def preempt(self) -> None:
        """Send the youngest admitted job back to wait. The host must have heard of all its tokens."""
        job = (self._prefilling or self.running).pop()
        self._release(job)
        self._waiting.appendleft(job)

    def admit(self) -> None:
        """Let waiting jobs in while there is room."""
        while self._waiting and (admitted := len(self.running) + len(self._prefilling)) < self._max_reqs:
            job = self._waiting[0]
            needed = self.pool.pages_for(job.context + 1 + self._ahead)
            if needed + admitted > self.pool.free:
                return
            job.pages = self.pool.take(needed)
            self._prefilling.append(self._waiting.popleft())

    def chunks(self) -> list[Chunk]:
        """The prompts' tokens to prefill next."""
        room, chunks = self._max_prefill_tokens, []
        for job in self._prefilling:
            if room:
                chunk = Chunk(job, job.prefilled, min(job.context, job.prefilled + room))
                room -= chunk.end - chunk.start
                chunks.append(chunk)
        return chunks

    def advance(self, chunks: list[Chunk]) -> None:
        """These chunks are in the caches: whoever's context is complete runs, its next token being decided."""
        done = [chunk.job for chunk in chunks if chunk.last]
        for chunk in chunks:
            chunk.job.prefilled = chunk.end
        for job in done:
            job.shortest = job.longest = job.context + 1
        self._prefilling = [job for job in self._prefilling if job not in done]
        self.running = self.running + done

    def _release(self, job: Job) -> None:
        self.pool.give_back(job.pages)
        job.pages, job.prefilled = [], 0
