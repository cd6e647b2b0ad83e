"""Continuous batching: requests join, are drafted for and verified together, and leave, while the host runs ahead.

One step of the engine, everything but the last line only enqueued:

    drafter.propose       from `drafter.inputs`, K tokens behind each row's last             graphs of the drafter
    target pass           over last token and drafts; verdict, lengths, `drafter.inputs`     one graph (engine/rows.py)
    readback              a copy of the verdicts, small, to pinned memory
    the step before's     is read now: streamed, stopped at stop ids and limits

So what a round decides goes to the next round on the device, and the host learns of it one round late. It plans with
bounds: a row may have grown by 1 to 1 + K tokens in a round unheard of, and gets pages for the most. A row whose end
the host has not heard of runs once more: the device keeps its length at the limit, token limits keep its writes within
its pages, and what it says is thrown away. Everything is enqueued to one stream, so pages and rows may go to others at
once: whatever still uses them runs before. The host waits for the device where it is short of pages, since who ended or
grew less than expected may leave enough, and a preempted text must be known; and where lengths, pages and sampling
parameters of requests that begin are copied to the device.

Noise is defined by seed and position, drafts end by a request's own limit and never for want of pages, and a preempted
request goes on with the text it had: a request's text does not depend on who runs beside it.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch

from builders import RequestTables
from builders.errors import require
from spec_decode.drafter import Drafter, DrafterConfig, GraphMode, Strategy
from spec_decode.drafter.autotune import Measurement, autotune_strategy
from spec_decode.drafter.kv_groups import BackendChoice, KVGroup, make_groups
from spec_decode.drafter.plan import DraftPlan
from spec_decode.engine.limits import Limits
from spec_decode.engine.pages import PagePool
from spec_decode.engine.prefill import Prefill, Prefilled
from spec_decode.engine.readback import AsyncOutput
from spec_decode.engine.request import Finish, Generation, Handle, Request
from spec_decode.engine.rows import Rows
from spec_decode.engine.scheduler import Job, Scheduler
from spec_decode.engine.stats import EngineStats
from spec_decode.engine.target_runner import TargetRunner
from spec_decode.models import DraftModel, TargetModel
from spec_decode.verification import verifier


@dataclass(frozen=True, slots=True)
class _News:
    """Tokens on their way to the host; row i is jobs[i]'s. first: each is a text's first, which no round decided."""

    jobs: list[Job]
    readback: AsyncOutput
    first: bool


class Engine:
    """A target, its draft and their paged caches on one device. num_speculative_tokens 0 decodes plainly."""

    def __init__(
        self,
        target: TargetModel,
        draft: DraftModel | None,
        backend: BackendChoice,
        *,
        num_speculative_tokens: int,
        max_reqs: int = 8,
        max_seq_len: int = 512,
        page_size: int = 16,
        num_pages: int | None = None,
        max_prefill_tokens: int = 512,
        graph_mode: GraphMode = GraphMode.FULL,
        strategy: Strategy | None = None,
        draft_backend: BackendChoice | None = None,
        verification: str = "rejection",
        min_confidence: float = 0.0,
        graph_memory_limit: int | None = None,
        extend_in_graph: bool = True,
    ) -> None:
        """max_seq_len bounds prompt and new tokens together; max_reqs the requests that run at once.

        backend: of every KV group, or, by group name or by a function, of each. draft_backend: the draft's, where it is
        another. num_pages: of every KV group; None takes as many as max_reqs of the longest requests need. A draft
        is needed only to speculate. max_prefill_tokens: tokens of prompts that one round prefills, at most.
        verification: a name that spec_decode.verification.verifier knows. graph_mode: of target and drafter.
        strategy: the drafter's; None takes the fastest of this machine, as measured here once (spec_decode.drafter.autotune).
        min_confidence, graph_memory_limit and extend_in_graph: the drafter's.
        """
        self._limits = Limits(
            max_seq_len=max_seq_len, num_speculative_tokens=num_speculative_tokens, vocab_size=target.vocab_size
        )
        self._limits.check(target, draft, max_prefill_tokens)
        judge = verifier(verification, num_speculative_tokens=num_speculative_tokens)
        self._device = next(target.parameters()).device
        self._max_reqs = max_reqs
        longest = max_reqs * -(-self._limits.capacity // page_size)
        self._pool = PagePool(longest if num_pages is None else num_pages, page_size)
        target_groups = self._groups("target", target, backend)
        self._tables, prefill_tables = [self._new_tables(target_groups)], [self._new_tables(target_groups)]
        self.measured: Measurement | None = None
        """What decided on the drafter's strategy, where nobody did."""
        self.drafter: Drafter | None = None
        if draft is not None and num_speculative_tokens:
            groups = self._groups("draft", draft, draft_backend or backend)
            self._tables.append(self._new_tables(groups))
            prefill_tables.append(self._new_tables(groups))
            config = DrafterConfig(
                num_speculative_tokens=num_speculative_tokens,
                graph_mode=graph_mode,
                strategy=strategy,
                min_confidence=min_confidence,
                graph_memory_limit=graph_memory_limit,
                extend_in_graph=extend_in_graph,
            )
            if strategy is None and self._device.type == "cuda":  # an emulated graph has no speed to measure
                self.measured = autotune_strategy(draft, groups, self._tables[1], config)
                config = replace(config, strategy=self.measured.strategy)
            self.drafter = Drafter(draft, groups, self._tables[1], config)
        self._rows = Rows(max_reqs, self._device, judge, self.drafter)
        self.target = TargetRunner(
            target,
            target_groups,
            self._tables[0],
            self._rows,
            query_len=1 + num_speculative_tokens,
            graph_mode=graph_mode,
        )
        self._prefill = Prefill(self.target, self.drafter, prefill_tables)
        self._scheduler = Scheduler(
            self._pool,
            max_reqs=max_reqs,
            num_speculative_tokens=num_speculative_tokens,
            max_prefill_tokens=max_prefill_tokens,
        )
        self.stats = EngineStats()
        self._seated: list[Job] = []
        self._pages_in_tables: list[int] = []
        self._news: deque[_News] = deque()
        self._undelivered: deque[tuple[Job, int | None, list[int]]] = deque()
        self._captured = False
        self._stepping = False

    def _groups(self, name: str, model: TargetModel | DraftModel, choice: BackendChoice) -> list[KVGroup]:
        return make_groups(name, model, choice, self._pool.page_size, self._pool.num_pages, self._device)

    def _new_tables(self, groups: Sequence[KVGroup]) -> RequestTables:
        return RequestTables(
            page_sizes=[self._pool.page_size] * len(groups),
            num_pages=[self._pool.num_pages] * len(groups),
            max_reqs=self._max_reqs,
            max_seq_len=self._limits.capacity,
            device=self._device,
        )

    @property
    def plan(self) -> DraftPlan | None:
        """The drafter's plan; None when decoding plainly."""
        if self.drafter is None or self.measured is None or not self.measured.wall_us:
            return self.drafter.plan if self.drafter else None
        return replace(self.drafter.plan, reason=self.measured.explain())

    @property
    def free_pages(self) -> int:
        """Pages that no request owns."""
        return self._pool.free

    def capture(self, *, progress: bool = False) -> None:
        """Capture the graphs of target and drafter, if that has not been done; the first step does it otherwise."""
        if not self._captured:
            self.target.capture(progress=progress)
            if self.drafter:
                self.drafter.capture(progress=progress)
            self._captured = True

    def submit(self, request: Request, *, on_token: Callable[[int], None] | None = None) -> Handle:
        """Let a request wait for its turn in the steps to come; at any time, from a callback too.

        Raises BatchError for a request that this engine can never serve.
        """
        self._limits.check_request("the request", request, self._pool)
        handle = Handle(request, on_token)
        self._scheduler.submit(handle)
        return handle

    def cancel(self, handle: Handle) -> None:
        """End a request where it stands; at any time, from a callback too. The next step returns its pages.

        One that is done stays as it is.
        """
        if not handle.done:
            handle.generation.finish = Finish.CANCELLED

    def generate(
        self, requests: Sequence[Request], *, on_token: Callable[[int, int], None] | None = None
    ) -> list[Generation]:
        """Continue every request; results in the order of the requests. on_token(request index, token) streams.

        Raises BatchError, with nothing run, for a request that this engine can never serve. What a callback raises ends
        all of them. `stats` start anew.
        """
        for index, request in enumerate(requests):
            self._limits.check_request(f"request {index}", request, self._pool)
        self.stats = EngineStats()
        handles = [self.submit(request, on_token=_telling(on_token, i)) for i, request in enumerate(requests)]
        try:
            while not all(handle.done for handle in handles):
                self.step()
        finally:
            for handle in handles:
                self.cancel(handle)
            self._scheduler.reap()
        return [handle.generation for handle in handles]

    @torch.no_grad()
    def step(self) -> bool:
        """One round of all that run, and a chunk of the prompts of those that do not yet; whether anything is left.

        What a callback raises comes through; the next step goes on with the token behind.
        """
        require(
            not self._stepping,
            "a step may not begin within another, this one was asked for by a callback; nothing was run. Submit or "
            "cancel requests there, and step outside.",
        )
        self._stepping = True
        try:
            self.capture()
            self._deliver()
            self._step()
            return self._scheduler.busy or bool(self._news)
        finally:
            self._stepping = False

    def _step(self) -> None:
        self._make_room()
        older = len(self._news)
        self._seat(self._run_chunks())
        if self._seated:
            self._round()
        for _ in range(older if self._seated else len(self._news)):
            self._hear()

    def _make_room(self) -> None:
        """Let go of who is complete, give the others pages for the round, and admit who fits beside them."""
        scheduler = self._scheduler
        scheduler.reap()
        if not self._covers(scheduler.growth()):
            while self._news:
                self._hear()
            scheduler.reap()
        preempted = 0
        while not self._covers(scheduler.growth()):
            scheduler.preempt()
            preempted += 1
        self.stats.preemptions += preempted
        scheduler.grow()
        if not preempted:
            scheduler.admit()

    def _covers(self, growth: dict[Job, int]) -> bool:
        return sum(growth.values()) <= self._pool.free

    def _run_chunks(self) -> Prefilled:
        chunks = self._scheduler.chunks()
        prefilled = self._prefill.run(chunks)
        new = [i for i, job in enumerate(prefilled.jobs) if not job.handle.generation.token_ids]
        if new:
            first = prefilled.tokens[torch.tensor(new, device=self._device)]
            self._news.append(_News([prefilled.jobs[i] for i in new], AsyncOutput(first[:, None]), first=True))
        self._scheduler.advance(chunks)
        self.stats.prefill_tokens += sum(chunk.end - chunk.start for chunk in chunks)
        # A text of one token is complete with the one that is decided: no round has anything to add.
        self._scheduler.reap()
        return prefilled

    def _seat(self, prefilled: Prefilled) -> None:
        """Make tables and rows those of the requests that run."""
        running = self._scheduler.running
        if running == self._seated:
            self._grow_tables()
            return
        row_of = {job: row for row, job in enumerate(self._seated)}
        joined = [job for job in running if job in prefilled.jobs]
        stay = [row_of[job] for job in running if job not in joined]
        pages = [job.pages for job in running]
        for tables in self._tables:
            tables.load([pages] * tables.num_groups, [self._token_limit(job) for job in running])
        self._rows.seat([job.handle.request for job in running], stay)
        if joined:
            new = prefilled.of(joined)
            self._rows.join(len(stay), [job.context for job in joined], new.tokens, new.target_hidden_states)
        self._seated, self._pages_in_tables = list(running), [len(job.pages) for job in running]

    def _grow_tables(self) -> None:
        new = {
            row: job.pages[known:]
            for row, (job, known) in enumerate(zip(self._seated, self._pages_in_tables, strict=True))
            if len(job.pages) > known
        }
        if new:
            limits = {row: self._token_limit(self._seated[row]) for row in new}
            for tables in self._tables:
                tables.grow({row: [pages] * tables.num_groups for row, pages in new.items()}, limits)
            self._pages_in_tables = [len(job.pages) for job in self._seated]

    def _token_limit(self, job: Job) -> int:
        return min(len(job.pages) * self._pool.page_size, self._limits.reach(job.max_len))

    def _round(self) -> None:
        self.stats.rounds += 1
        if self.drafter:
            start = time.perf_counter()
            self.drafter.propose(None)
            self.stats.propose_seconds += time.perf_counter() - start
        self.target.run()
        for job in self._seated:
            job.shortest += 1
            job.longest += 1 + self._limits.num_speculative_tokens
        news = self._rows.outputs[: len(self._seated)]
        self._news.append(_News(self._seated, AsyncOutput(news), first=False))

    def _hear(self) -> None:
        """Read the oldest news and hand on its tokens."""
        news = self._news.popleft()
        for job, row in zip(news.jobs, news.readback.read(), strict=True):
            if news.first:
                self._undelivered.append((job, None, row))
            else:
                kept = row[0]
                job.shortest += kept
                job.longest -= self._limits.num_speculative_tokens - kept
                self._undelivered.append((job, kept, row[1 : 2 + kept]))
        self._deliver()

    def _deliver(self) -> None:
        """Let texts grow by what was heard. A callback may raise: what it leaves behind comes first next time."""
        while self._undelivered:
            job, kept, tokens = self._undelivered.popleft()
            if job.handle.done:
                continue
            if kept is not None and self.drafter:
                job.handle.generation.accepted.append(kept)
                self.stats.accepted += kept
                self.stats.drafted_for += 1
            if rest := tokens[1:]:
                self._undelivered.appendleft((job, None, rest))
            self.stats.new_tokens += 1
            job.handle.take(tokens[0])


def _telling(on_token: Callable[[int, int], None] | None, index: int) -> Callable[[int], None] | None:
    if on_token is None:
        return None
    told = on_token
    return lambda token: told(index, token)
