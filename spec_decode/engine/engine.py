"""Continuous batching: requests join, are drafted for and verified together, and leave, while the host runs ahead.

One step of the engine. Everything but the last line is only enqueued:

    prefill               a chunk of the prompts that are not in the caches yet              prompt_graphs
    draft                 from `drafter.inputs`, K tokens after each row's last              one graph of both, or
    target step           over last tokens and drafts: verify, update requests and inputs    one graph each: round_plan
    output                a small copy of the accepted tokens, to pinned memory
    previous output       is read now: streamed, stopped at stop ids and limits

The result of a round reaches the next round on the device, and the host reads it one round late. The host plans with
bounds: in a round that it has not read yet, a row can have grown by 1 to 1 + K tokens, and it gets pages for the upper
bound. A row whose end the host has not read runs once more: the device keeps its length at the limit, token limits keep
its writes within its pages, and its output is dropped. Everything is enqueued to one stream, so pages and rows can be
reused at once: earlier work on them runs first. The host syncs with the device if it is short of pages, because
requests that ended or grew less than their bound can free enough, and because the text of a preempted request must be
known; and when it copies prompts, lengths and sampling parameters of new requests to the device.

The host work of a step must not grow with state that does not change. Rows of running requests move on the device, and
their pages are neither checked nor sent again; tokens are appended to a text in slices of one list of all rows' tokens,
because allocating objects per request and step would trigger Python's garbage collection.

Noise is defined by seed and position, drafts end at a request's own limit and never for lack of pages, and a preempted
request continues from the text it had. So a request's text does not depend on the other requests of the batch: up to
rounding, because kernels can reduce in another order for another batch, and exactly with `batch_invariant`, at a cost.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import TypeVar

import torch

from builders import RequestTables
from builders.devices import on_own_device, staged
from builders.errors import require, require_type
from spec_decode.drafter import Drafter, DraftPlan, plan_draft
from spec_decode.engine.config import EngineConfig, check_models, checked_request, group_options, make_pool
from spec_decode.engine.input_batch import InputBatch
from spec_decode.engine.outputs import EngineStats, PendingOutputs
from spec_decode.engine.prefill import Prefill, PrefillOutput
from spec_decode.engine.prompt_graphs import prompt_sizes
from spec_decode.engine.request import Generation, Handle, Request, RequestState
from spec_decode.engine.round_plan import RoundPlan, plan_round
from spec_decode.engine.scheduler import Scheduler
from spec_decode.engine.target_runner import Step, TargetRunner
from spec_decode.engine.target_step import TargetStep, TreeTargetStep
from spec_decode.model_api import DraftModel, TargetModel
from spec_decode.paged import StateGroup
from spec_decode.paged.kv_groups import BackendChoice, KVGroup, make_groups, make_state_groups, state_groups_of
from spec_decode.sampling.target_sampler import TopLogprobs
from spec_decode.verification import Verifier, verifier

T = TypeVar("T")
_log = logging.getLogger(__name__)


class Engine:
    """A target, its draft and their paged caches on one device."""

    def __init__(
        self,
        target: TargetModel,
        draft: DraftModel | None,
        backend: BackendChoice,
        config: EngineConfig,
        *,
        draft_backend: BackendChoice | None = None,
    ) -> None:
        """Allocate caches and tables; graphs are captured by `capture`, or by the first step.

        draft: needed only to speculate. backend: one for every KV group, or a mapping by group name or a function that
        gives each its own. draft_backend: the draft's choice; None uses backend.

        Raises BatchError for models that do not fit the config or each other, an unknown verification or a group
        without a backend, NoBackend for a backend that does not support a group, and StrategyError for a strategy that
        a group cannot run.
        """
        check_models(config, target, draft)
        steps, verify = config.num_speculative_tokens, None
        if config.tree is None:
            rule = "rejection" if config.verification is None else config.verification
            verify = verifier(rule, num_speculative_tokens=steps)
        self.config = config
        self.pool = make_pool(config, draft)
        self.stats = EngineStats()
        self.drafter: Drafter | None = None
        self.device = next(target.parameters()).device
        self._vocab_size = target.vocab_size
        # Slots before pages: without them no request runs.
        states = state_groups_of(target, config.query_len, tree=config.tree is not None)
        slots = make_state_groups("target", states, backend, config.max_num_seqs, self.device)
        target_groups: list[KVGroup | StateGroup] = [*self._make_groups("target", target, backend), *slots]
        self._groups: list[Sequence[KVGroup | StateGroup]] = [target_groups]
        self._tables, prefill_tables = [self._make_tables(target_groups)], [self._make_tables(target_groups)]
        if draft is not None and steps:
            groups = self._make_groups("draft", draft, backend if draft_backend is None else draft_backend)
            self._groups.append(groups)
            self._tables.append(self._make_tables(groups))
            prefill_tables.append(self._make_tables(groups))
            self.drafter = self._make_drafter(draft, groups)
        self._scheduler = Scheduler(self.pool, config)
        self._batch = InputBatch(
            config.max_num_seqs, self.device, target.vocab_size, self.drafter, verify, config.max_logprobs
        )
        self.target = TargetRunner(
            target,
            target_groups,
            self._tables[0],
            query_len=config.query_len,
            trees=config.tree is not None,
            graph_mode=config.graph_mode,
            prompts=(prefill_tables[0], prompt_sizes(config, self.device)),
        )
        self._target_step: Step = self._make_target_step(verify)
        self.round_plan: RoundPlan | None = None
        """Whether one graph holds a round, and why; None without a draft."""
        if self.drafter:
            self.round_plan = plan_round(self.drafter, self.target, config.one_graph)
        self._prefill = Prefill(self.target, self.drafter, prefill_tables, config.max_logprobs)
        self._outputs = PendingOutputs(steps)
        self._batched: list[RequestState] = []  # by row: the requests in the batch, and their pages in the tables
        self._pages_in_tables: list[int] = []
        self._captured = False
        self._stepper: dict[str, object] = {}  # the call that is stepping
        self._broken = False  # whether a step was interrupted and not recovered from

    def _make_groups(self, name: str, model: TargetModel | DraftModel, choice: BackendChoice) -> list[KVGroup]:
        return make_groups(name, model, choice, group_options(self.config, model), self.pool.num_pages, self.device)

    def _make_target_step(self, verify: Verifier | None) -> Step:
        if verify is not None:
            return TargetStep(self._batch, self.drafter, verify)
        assert self.drafter is not None, "a tree has at least one step"
        return TreeTargetStep(self._batch, self.drafter, self.target)

    def _make_tables(self, groups: Sequence[KVGroup | StateGroup]) -> RequestTables:
        config, longest = self.config, self.pool.slots_for(self.config.max_model_len)
        return RequestTables(
            page_sizes=[longest if isinstance(group, StateGroup) else config.page_size for group in groups],
            num_pages=[group.num_pages for group in groups],
            max_reqs=config.max_num_seqs,
            max_seq_len=longest,
            device=self.device,
        )

    def _make_drafter(self, draft: DraftModel, groups: Sequence[KVGroup]) -> Drafter:
        config, tables = self.config.drafter, self._tables[1]
        assert config is not None
        plan = plan_draft(draft, groups, tables.device, config)
        sizes, most = config.capture_sizes, self.config.max_num_seqs
        require(
            not sizes or max(sizes) >= most or not plan.strategy.implementation.uses_graphs,
            f"capture_sizes end at {max(sizes or [0])}, but up to {most} requests run at once and would have no graph. "
            f"Add {most} to capture_sizes, or leave it out.",
        )
        return Drafter(draft, groups, tables, config, plan)

    @property
    def plan(self) -> DraftPlan | None:
        """The drafter's plan; None without a draft."""
        return self.drafter.plan if self.drafter else None

    @on_own_device
    def capture(self, *, progress: bool = False) -> None:
        """Capture the graphs of target and drafter, once; otherwise the first step does."""
        if not self._captured:
            drafter = self.drafter
            before = drafter.whole_round if drafter and self._one_graph else None
            self.target.capture(self._target_step, before=before, progress=progress)
            if drafter and not self._one_graph:
                drafter.capture(progress=progress)
            self._captured = True

    @property
    def _one_graph(self) -> bool:
        return self.round_plan is not None and self.round_plan.one_graph

    def checked(self, name: str, request: Request) -> Request:
        """Return a private copy of the request. Raises BatchError for one that can never be served; name: what the
        message calls it."""
        return checked_request(name, request, self.config, self.pool, self._vocab_size)

    def submit(self, request: Request, *, on_token: Callable[[int], None] | None = None) -> Handle:
        """Queue a request for the coming steps. You can call this at any time, also from a callback.

        The request is copied, so you can change your lists. Requests have no ids: one submitted twice is served twice.
        Raises BatchError for a request that this engine can never serve, and for an on_token that is not callable.
        """
        request = self.checked("the request", request)
        require(
            on_token is None or callable(on_token),
            f"on_token must be a function of a token, got {type(on_token).__name__}. Pass a function, or None.",
        )
        handle = Handle(request, on_token)
        self._scheduler.submit(handle)
        return handle

    def cancel(self, handle: Handle) -> None:
        """End a request with the text it has; a finished one does not change. The next step frees its pages.

        You can call this at any time, also from a callback. Raises BatchError for anything but a handle of `submit`.
        """
        require_type("handle", handle, Handle)
        if not handle.done:
            handle.generation.finish_reason = "abort"

    def generate(
        self, requests: Iterable[Request], *, on_token: Callable[[int, int], None] | None = None
    ) -> list[Generation]:
        """Continue every request; return results in their order. on_token(request index, token) streams.

        Resets `stats`. Raises BatchError, with nothing run, for a request that this engine can never serve and for a
        call from a callback. An exception in a callback ends all requests and propagates.
        """
        self._require_exclusive(not self._stepper)
        require(
            isinstance(requests, Iterable) and (on_token is None or callable(on_token)),
            f"generate needs a list of requests and an on_token of an index and a token, or None, got "
            f"{type(requests).__name__} and {type(on_token).__name__}. Pass [request] for one.",
        )
        checked = [self.checked(f"request {index}", request) for index, request in enumerate(requests)]
        self.stats = EngineStats()
        handles: list[Handle] = []
        try:
            for index, request in enumerate(checked):
                handles.append(Handle(request, partial(on_token, index) if on_token else None))
                self._scheduler.submit(handles[-1])
            for handle in handles:
                while not handle.done:
                    self.step()
        finally:
            try:
                self.cancel_all(handles)
            finally:  # again, in case an interrupt stopped the first call
                self.cancel_all(handles)
        return [handle.generation for handle in handles]

    @on_own_device
    @torch.no_grad()
    def step(self) -> bool:
        """Run one round of the running requests and prefill a chunk of waiting prompts; return whether work is left.

        An exception in a callback propagates, and the next step continues with the token after it. After any other
        exception within a round, including an interrupt, all pages are free and every request waits to be prefilled
        again with its text so far; an interrupt before or after the round changes nothing. Raises BatchError for a step
        inside a step, or while another thread steps.
        """
        return self._with_lock(self._guarded_step)

    def _with_lock(self, run: Callable[[bool], T]) -> T:
        """Return run(exclusive). exclusive: no other call is stepping, and none can start until `run` returns."""
        call = object()
        try:
            # One operation: of two threads one is rejected, and no interrupt leaves the engine locked.
            return run(self._stepper.setdefault("step", call) is call)
        finally:
            if self._stepper.get("step") is call:
                self._stepper.clear()

    def _guarded_step(self, exclusive: bool) -> bool:
        self._require_exclusive(exclusive)
        try:
            self._recover()
            self._broken = True
            self.capture()
            self._outputs.stream(self.stats)
            self._step()
            more = self._scheduler.has_unfinished or bool(self._outputs) or bool(self._outputs.lost)
            self._broken = False
            return more
        except BaseException:
            self._broken = not self._outputs.in_callback
            self._recover()
            raise
        finally:
            self._outputs.in_callback = False
            # Again, in case a second interrupt stopped the first call; after a third, the next step recovers.
            self._recover()

    def _recover(self) -> None:
        """After an interrupted step, take back every page and queue all requests again. Idempotent: if an interrupt
        stops it halfway, running it again completes it."""
        if self._broken:
            self._batched, self._pages_in_tables = [], []
            self._scheduler.restart(self._outputs.requests())
            self._outputs.clear()
            self._broken = False

    def cancel_all(self, handles: Sequence[Handle]) -> None:
        """End these requests and free their pages: now, or with the next step if one is running, in any thread."""
        for handle in handles:
            self.cancel(handle)
        self._with_lock(self._free_finished)

    def _free_finished(self, exclusive: bool) -> None:
        if exclusive:
            self._recover()
            self._broken = True
            self._scheduler.free_finished()
            self._broken = False

    def _require_exclusive(self, exclusive: bool) -> None:
        require(
            exclusive,
            "a step cannot start inside another: this one was requested by a callback or by another thread. Only "
            "submit or cancel requests in a callback, and step from one thread.",
        )

    def _step(self) -> None:
        if self._outputs.lost:
            self._recompute_lost()
        self.stats.preemptions += self._scheduler.make_room(self._read_all)
        older = len(self._outputs)
        self._update_batch(self._run_prefill())
        if self._batched:
            self._run_round()
        # Those of this step wait for the next one's launches: the device is busy meanwhile.
        for _ in range(older if self._scheduler.has_unfinished else len(self._outputs)):
            self._outputs.process_oldest(self.stats)

    def _recompute_lost(self) -> None:
        """Preempt the requests whose recurrent state is lost. Raises BatchError for one that loses it again at once."""
        self._read_all()
        lost = self._outputs.lost
        for request in lost:
            length = len(request.handle.generation.token_ids)
            require(
                request.lost_at < length,
                f"a request of {length} new tokens lost its recurrent state again, right after it was computed anew; "
                "it would never end. Use another backend of recurrent state.",
            )
            request.lost_at = length
        self._scheduler.recompute(lost)
        self.stats.lost_states += len(lost)
        self.stats.preemptions += len(lost)
        _log.warning(
            "the recurrent states of %d requests did not fit their lengths; they are computed again. Please report it.",
            len(lost),
        )
        lost.clear()

    def _read_all(self) -> None:
        while self._outputs:
            self._outputs.process_oldest(self.stats)

    def _run_prefill(self) -> PrefillOutput:
        chunks = self._scheduler.next_chunks()
        prefilled = self._prefill.run(chunks)
        if not chunks:
            return prefilled
        new = [i for i, request in enumerate(prefilled.requests) if not request.handle.generation.token_ids]
        if new:
            rows, found = staged(new, self.device), prefilled.logprobs
            logprobs = None if found is None else TopLogprobs(*(each[rows, None] for each in found))
            requests = [prefilled.requests[i] for i in new]
            self._outputs.add_first_tokens(requests, prefilled.tokens[rows], logprobs, self.target.lost_states())
        self._scheduler.chunks_prefilled(chunks)
        self.stats.prefill_tokens += sum(chunk.end - chunk.start for chunk in chunks)
        # A text of one token is complete with the sampled one: a round would add nothing.
        self._scheduler.free_finished()
        return prefilled

    def _update_batch(self, prefilled: PrefillOutput) -> None:
        """Update tables and batch to the running requests."""
        running = self._scheduler.running
        # A request whose state was lost can be back at its place, with other pages.
        if running == self._batched and not prefilled.requests:
            self._grow_tables()
            return
        row_of = {request: row for row, request in enumerate(self._batched)}
        place_of = {request: place for place, request in enumerate(prefilled.requests)}
        added = [request for request in running if request in place_of]
        kept_rows = [row_of[request] for request in running if request not in place_of]
        for tables in self._tables:
            tables.condense(kept_rows, len(added))
        self._batch.condense(kept_rows, added)
        if added:
            rows = staged([place_of[request] for request in added], self.device)
            lens = [request.prefill_len for request in added]
            self._batch.add(len(kept_rows), lens, prefilled.tokens[rows], prefilled.target_hidden_states[rows])
        self._batched = list(running)
        self._pages_in_tables = [*(self._pages_in_tables[row] for row in kept_rows), *(0 for _ in added)]
        self._grow_tables()

    def _grow_tables(self) -> None:
        new = {
            row: known
            for row, (request, known) in enumerate(zip(self._batched, self._pages_in_tables, strict=True))
            if len(request.pages) > known
        }
        if new:
            limits = {row: self._token_limit(self._batched[row]) for row in new}
            for tables, groups in zip(self._tables, self._groups, strict=True):
                pages = {row: self._batched[row].new_pages(groups, known) for row, known in new.items()}
                tables.grow(pages, limits)
            self._pages_in_tables = [len(request.pages) for request in self._batched]

    def _token_limit(self, request: RequestState) -> int:
        return min(len(request.pages) * self.pool.page_size, self.pool.slots_for(request.max_len))

    def _run_round(self) -> None:
        self.stats.rounds += 1
        start = time.perf_counter()
        if self.drafter and not self._one_graph:
            self.drafter.propose(None)
        self.target.run(self._target_step, lambda size: self._batch.prepare_inputs(size)[0])
        self.stats.launch_seconds += time.perf_counter() - start
        rows, found = slice(len(self._batched)), self._batch.logprobs
        logprobs = None if found is None else TopLogprobs(*(each[rows] for each in found))
        self._outputs.add_step(self._batched, self._batch.outputs[rows], logprobs, self.target.lost_states())
