"""The multi-step drafter: step 0 over the verified tokens, then K-1 single-token steps by the chosen strategy."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from builders import (
    CaptureConstants,
    GraphSupport,
    RequestTables,
    advance_shared_state,
    begin_decode,
    begin_extend,
)
from builders.errors import require, require_tensor
from spec_decode.graphs import CallOutside, Capturable, GraphKey, GraphManager, loop_obstacle
from spec_decode.kv_groups import KVGroup, attend_with, build_ragged
from spec_decode.models import DraftModel
from spec_decode.models.base import Attend
from spec_decode.ops.keep_last import keep_last
from spec_decode.ops.sample_draft import StopRule, sample_draft
from spec_decode.ops.shift_tokens import shift_tokens
from spec_decode.phase import Phase, attend_in_pieces
from spec_decode.strategy import DraftPlan, GraphMode, Strategy, choose

EXTEND, LOOP, STEP = "extend", "loop", "step"
"""Kinds of graphs: step 0 (query length 1 + K), all later steps at once, one later step (query length 1)."""


@dataclass(frozen=True, kw_only=True, slots=True)
class VerifiedTokens:
    """What a round starts from, for n live requests in the order of the tables; all on the drafter's device.

    token_ids      int64 [n, 1 + K]      the tokens the target just ran over
    features       [n, 1 + K, F]         what the draft reads of the target there
    context_lens   int32 [n]             draft KV tokens committed before them: the position of the first
    accepted       int32 [n]             how many of the K draft tokens were kept, 0 to K
    next_tokens    int64 [n]             the target's own token behind the last kept one
    temperature    fp32 [n]              0 is greedy
    seeds          int64 [n]
    draft_lens     int32 [n]             draft tokens wanted of each, 0 to K; None: K of each. With 0 a request takes
                                         part in step 0 alone, so that its verified tokens reach the draft's KV cache
    """

    token_ids: torch.Tensor
    features: torch.Tensor
    context_lens: torch.Tensor
    accepted: torch.Tensor
    next_tokens: torch.Tensor
    temperature: torch.Tensor
    seeds: torch.Tensor
    draft_lens: torch.Tensor | None = None


@dataclass(frozen=True, slots=True)
class Drafts:
    """Views of the drafter's buffers, good until the next round, of as many columns as the round had tokens: tokens
    int64 [n, K], -1 where a request proposes nothing, and the processed logits fp32 [n, K, V] each was drawn from; what
    stands behind a request's last token is undefined."""

    tokens: torch.Tensor
    logits: torch.Tensor


@dataclass(frozen=True, slots=True)
class InUse:
    """What the kernels of a phase read in the last round, for whoever looks on: nothing of it may be written to.

    size: rows, padding included. metadata: of each group, as the graphs hold it or as it was built for the round.
    """

    phase: Phase
    size: int
    metadata: tuple[Any, ...]


class Drafter:
    """Proposes K tokens a round for the requests in `tables`, in the strategy that the groups' builders allow."""

    def __init__(
        self,
        model: DraftModel,
        groups: Sequence[KVGroup],
        tables: RequestTables,
        *,
        num_speculative_tokens: int,
        graph_mode: GraphMode = GraphMode.FULL,
        strategy: Strategy | None = None,
        capture_sizes: Sequence[int] | None = None,
        min_confidence: float = 0.0,
        graph_memory_limit: int | None = None,
        extend_in_graph: bool = True,
    ) -> None:
        """min_confidence: a request stops behind a token that the draft gives a lower probability, at the request's
        temperature. graph_memory_limit: bytes for the graphs; sizes that would not fit are left out. extend_in_graph:
        False runs step 0 eagerly while later steps stay as the plan has them, to compare with; the tokens are the same.

        Raises StrategyError for a K below 1 or a forced strategy that a group cannot run, before any allocation.
        """
        device = tables.device
        self.plan: DraftPlan = choose(
            [group.facts(device) for group in groups],
            num_speculative_tokens,
            graph_mode,
            forced=strategy,
            loop_obstacle=loop_obstacle(device),
        )
        sizes = list(capture_sizes or default_capture_sizes(tables.max_reqs))
        _check_shapes(groups, tables, num_speculative_tokens, sizes)
        require(
            0.0 <= min_confidence < 1.0,
            f"a least confidence is a probability below 1, got {min_confidence}; every draft would end at its first "
            "token. Pass 0 to draft on whatever the confidence.",
        )
        self.model = model
        self.groups = tuple(groups)
        self.tables = tables
        self.num_speculative_tokens = num_speculative_tokens
        self._query_len = num_speculative_tokens + 1
        self._allocate(groups[0].spec.dtype, min_confidence)
        self._extend = Phase(groups, tables, query_len=self._query_len, horizon=0)
        self._decode = Phase(
            groups, tables, query_len=1, horizon=num_speculative_tokens - 1, planned=self.plan.planned_groups
        )
        self.graphs = GraphManager(device, sizes, memory_limit=graph_memory_limit)
        widest = min(group.backend.builder.graph_support for group in groups)
        capturable = self.plan.strategy is not Strategy.EAGER and widest >= GraphSupport.UNIFORM_BATCH
        self._extend_in_graph = extend_in_graph and capturable
        self._host_built = {*self.plan.weak_groups, *self.plan.planned_groups}
        self._strong_groups = [i for i in range(len(groups)) if i not in self._host_built]
        self._built_per_round = [i for i in self._strong_groups if self.plan.groups[i].build_per_round]
        rebuilt = sorted({*self._host_built, *self._built_per_round})
        self._captured: dict[tuple[int, int], list[Any]] = {}
        self._rebuilt_at_step_0 = rebuilt if self._extend_in_graph else list(range(len(groups)))

    def _allocate(self, hidden_dtype: torch.dtype, min_confidence: float) -> None:
        reqs, steps, model = self.tables.max_reqs, self.num_speculative_tokens, self.model

        def zeros(*shape: int, dtype: torch.dtype) -> torch.Tensor:
            return torch.zeros(*shape, dtype=dtype, device=self.tables.device)

        self._stop = StopRule.allocate(reqs, steps, self.tables.device, min_confidence=min_confidence)
        # What the device was last told: tokens a round, and whether the requests' own lengths may differ from K.
        self._asked = (steps, False)
        self.inputs = VerifiedTokens(
            token_ids=zeros(reqs, self._query_len, dtype=torch.int64),
            features=zeros(reqs, self._query_len, model.feature_size, dtype=hidden_dtype),
            context_lens=zeros(reqs, dtype=torch.int32),
            accepted=zeros(reqs, dtype=torch.int32),
            next_tokens=zeros(reqs, dtype=torch.int64),
            temperature=zeros(reqs, dtype=torch.float32),
            seeds=zeros(reqs, dtype=torch.int64),
            draft_lens=self._stop.draft_lens,
        )
        self._ids = zeros(reqs, dtype=torch.int64)
        self._hidden = zeros(reqs, model.hidden_size, dtype=hidden_dtype)
        self._draft_tokens = zeros(reqs, steps, dtype=torch.int64)
        self._draft_logits = zeros(reqs, steps, model.vocab_size, dtype=torch.float32)
        if model.token_map is not None:
            # The columns of tokens that the draft does not have are never written again.
            self._draft_logits.fill_(float("-inf"))

    @property
    def drafts(self) -> Drafts:
        """What the last round proposed, in the drafter's own buffers of all rows and K columns."""
        return Drafts(self._draft_tokens, self._draft_logits)

    def in_use(self) -> dict[int, InUse]:
        """What step 0 and the last step of the last round read, by the step; the tables must be as they were.

        Waits for the device. A round of one token has no step but 0.
        """
        found = {0: self._in_use(self._extend, self._extend.metadata, self._rebuilt_at_step_0)}
        if step := int(self._decode.batch.step):
            every = range(len(self.groups))
            built = every if self.plan.strategy is Strategy.EAGER else {*self._host_built, *self._built_per_round}
            found[step] = self._in_use(self._decode, self._decode.at_step(step), built)
        return found

    def _in_use(self, phase: Phase, built: Sequence[Any], by_the_host: Collection[int]) -> InUse:
        size = self._padded(self.tables.num_live)
        captured = self._captured.get((phase.query_len, size), built)
        metadata = (built[i] if i in by_the_host else captured[i] for i in range(len(self.groups)))
        return InUse(phase, size, tuple(metadata))

    @torch.no_grad()
    def propose(self, verified: VerifiedTokens | None = None, num_tokens: int | None = None) -> Drafts:
        """Draft K tokens behind each request's next_token. Nothing in it waits for the device unless the plan says so.

        verified: what the round starts from, copied to `inputs`; None: a verifier wrote it to the live rows there.
        num_tokens: how many this round, 1 to K; None is K. The same tokens in every strategy, and no new capture: the
        device loop, per-step and eager strategies run that many steps, the full loop all K, whose last ones find no
        request that drafts on.

        The requests are the live rows of the tables. One whose limit leaves no room for the 1 + K tokens of step 0
        proposes nothing and raises tables.overflow, as does one that reaches its limit on the way, from there on.
        Raises BatchError, with nothing run, for tensors of another shape, dtype or device, or too large a batch.
        """
        live = self.tables.num_live
        require(
            live > 0,
            "a round needs at least one live request, the tables hold none; nothing was run. Load the tables first.",
        )
        wanted = self.num_speculative_tokens if num_tokens is None else num_tokens
        require(
            1 <= wanted <= self.num_speculative_tokens,
            f"this drafter proposes 1 to {self.num_speculative_tokens} tokens a round, asked for {wanted}; nothing was "
            "run. Make a drafter for more, or leave the drafter out of a round without drafts.",
        )
        size = self._padded(live)
        if verified is not None:
            self._take(verified, live)
        self._ask(wanted, verified)
        if self.plan.strategy is not Strategy.EAGER and not self.graphs.complete:
            self.capture()
            size = self._padded(live)
        self.run_extend(size)
        if wanted > 1:
            self.run_steps(size, wanted)
        return Drafts(self._draft_tokens[:live, :wanted], self._draft_logits[:live, :wanted])

    def run_steps(self, size: int, num_tokens: int | None = None) -> None:
        """Run steps 1..num_tokens-1 (None: K-1) of `size` padded rows from the state that step 0 left."""
        steps = (num_tokens or self.num_speculative_tokens) - 1
        if self.plan.strategy in (Strategy.DEVICE_LOOP, Strategy.FULL_LOOP):
            self._loop(size)
        elif self.plan.strategy in (Strategy.PER_STEP, Strategy.PIECEWISE):
            self._step_by_step(size, steps)
        else:
            self._eagerly(size, steps)

    def _ask(self, num_tokens: int, verified: VerifiedTokens | None) -> None:
        """Tell the device how many tokens the round wants, where the last one wanted another number."""
        asked, each_its_own = self._asked
        if asked != num_tokens:
            self._stop.num_tokens.fill_(num_tokens)
        if verified is not None and verified.draft_lens is None and each_its_own:
            self._stop.draft_lens.fill_(self.num_speculative_tokens)
        self._asked = (num_tokens, verified is None or verified.draft_lens is not None)

    def _padded(self, live: int) -> int:
        """Every strategy pads alike, so that all run the same shapes; only graphs end at the largest captured one."""
        if self.plan.strategy is Strategy.EAGER and live > self.graphs.sizes[-1]:
            return live
        return self.graphs.padded(live)

    @torch.no_grad()
    def prefill(
        self,
        tables: RequestTables,
        query_lens: Sequence[int],
        seq_lens: Sequence[int],
        token_ids: torch.Tensor,
        features: torch.Tensor,
    ) -> None:
        """Write the draft KV of prompts or parts of them, without drafting; eager, for any lengths.

        tables: these requests alone, over the same caches. Request r has query_lens[r] flat tokens, the last of
        seq_lens[r] in its cache then; token_ids int64 [T] are the tokens one *behind* each position (at it, where the
        model's first_position is 1), features [T, F] the target's at the token before.
        """
        batch, metadata = build_ragged(self.groups, tables, query_lens, seq_lens)
        attend = attend_with(self.groups, metadata)
        self.model.forward(token_ids, self.model.combine(features.to(self._hidden.dtype)), batch.positions, attend)

    def _take(self, verified: VerifiedTokens, live: int) -> None:
        """Check every tensor, then copy them all."""
        given = [name for name in VerifiedTokens.__slots__ if getattr(verified, name) is not None]
        for name in given:
            found, buffer = getattr(verified, name), getattr(self.inputs, name)
            shape = (live, *buffer.shape[1:])
            # Compared here first: composing the message's parts for eight tensors would cost 10 us a round.
            if found.shape != shape or found.dtype != buffer.dtype or found.device != buffer.device:
                require_tensor(name, found, shape=shape, dtype=buffer.dtype, device=self.tables.device)

        buffers = [getattr(self.inputs, name)[:live] for name in given]
        torch._foreach_copy_(buffers, [getattr(verified, name) for name in given], non_blocking=True)

    def run_extend(self, size: int) -> None:
        """Run step 0 of `size` padded rows over the round's inputs."""
        if self._rebuilt_at_step_0:
            self._begin_extend(size)
            self._extend.rebuild(size, self._rebuilt_at_step_0)
        if self._extend_in_graph:
            self.graphs.replay(GraphKey(EXTEND, size), self._needed(size, self._query_len))
        else:
            self._extend_forward(size)

    def _loop(self, size: int) -> None:
        self._decode.rebuild(size, self._built_per_round)
        self._decode.plan_ahead(size)
        self.graphs.replay(GraphKey(LOOP, size), self._needed(size, 1))

    def _step_by_step(self, size: int, steps: int) -> None:
        self._decode.rebuild(size, self._built_per_round)
        for _ in range(steps):
            advance_shared_state(self._decode.batch, size)
            self._decode.rebuild(size, self.plan.weak_groups)
            self.graphs.replay(GraphKey(STEP, size), self._needed(size, 1))

    def _eagerly(self, size: int, steps: int) -> None:
        for _ in range(steps):
            advance_shared_state(self._decode.batch, size)
            self._decode.rebuild(size, range(len(self.groups)))
            attend = attend_with(self.groups, self._decode.metadata)
            self._hidden[:size].copy_(self._step_forward(size, self._hidden[:size], attend))

    def _needed(self, size: int, query_len: int) -> CaptureConstants:
        return CaptureConstants(max_reqs=size, max_query_len=query_len, max_seq_len=self.tables.longest)

    def _begin_extend(self, size: int) -> None:
        begin_extend(self._extend.batch, self.inputs.context_lens, size, self._query_len)

    def _extend_forward(self, size: int) -> None:
        """Step 0: the draft's tokens are the target's, shifted by one, with the next token behind the last kept."""
        inputs, tokens = self.inputs, size * self._query_len
        hidden = self.model.forward(
            shift_tokens(inputs.token_ids[:size], inputs.next_tokens, inputs.accepted),
            self.model.combine(inputs.features[:size].flatten(0, 1)),
            self._extend.batch.positions[:tokens],
            attend_with(self.groups, self._extend.metadata),
        )
        begin_decode(self._decode.batch, self._extend.batch.seq_lens, inputs.accepted, size, self._query_len)
        keep_last(hidden, inputs.accepted, self._query_len, self._hidden[:size])
        self._sample(size, self._hidden[:size])

    def _step_forward(self, size: int, hidden: torch.Tensor, attend: Attend) -> torch.Tensor:
        """A single-token step from the last one's hidden states; returns its own."""
        hidden = self.model.forward(self._ids[:size], hidden, self._decode.batch.positions[:size], attend)
        self._sample(size, hidden)
        return hidden

    def _sample(self, size: int, hidden: torch.Tensor) -> None:
        batch = self._decode.batch
        sample_draft(
            self.model.logits(hidden),
            temperature=self.inputs.temperature,
            seeds=self.inputs.seeds,
            positions=batch.positions,
            seq_lens=batch.seq_lens,
            step=batch.step,
            draft_tokens=self._draft_tokens,
            draft_logits=self._draft_logits,
            next_ids=self._ids,
            stop=self._stop,
            token_map=self.model.token_map,
        )

    def capture(self, *, progress: bool = False) -> None:
        """Capture the graphs that the plan needs, on padding rows alone: nothing of a live request is touched.

        Graphs that are there are kept. Raises CaptureError where the largest batch's do not fit into their memory.
        """
        if self.plan.strategy is Strategy.EAGER:
            return
        limits = self.tables.token_limits.clone()
        self.tables.token_limits.zero_()
        try:
            self.graphs.capture(self._factories(), progress=progress)
        finally:
            self.tables.token_limits.copy_(limits)

    def _factories(self) -> dict[str, Callable[[int], Capturable]]:
        factories: dict[str, Callable[[int], Capturable]] = {}
        if self._extend_in_graph:
            factories[EXTEND] = self._capturable_extend
        if self.num_speculative_tokens > 1:
            kind, factory = {
                Strategy.DEVICE_LOOP: (LOOP, self._capturable_device_loop),
                Strategy.FULL_LOOP: (LOOP, self._capturable_full_loop),
                Strategy.PER_STEP: (STEP, self._capturable_step),
                Strategy.PIECEWISE: (STEP, self._capturable_pieces),
            }[self.plan.strategy]
            factories[kind] = factory
        return factories

    def _prepare(self, phase: Phase, size: int) -> CaptureConstants:
        """Metadata over padding rows; the constants that a capture with it bakes in."""
        phase.batch.clear()
        phase.rebuild(size, range(len(self.groups)))
        phase.plan_ahead(size)
        # A later build for another size replaces the phase's own; a graph goes on with what it was captured with.
        self._captured[phase.query_len, size] = list(phase.metadata)
        return phase.constants()

    def _capturable_extend(self, size: int) -> Capturable:
        def run() -> None:
            self._begin_extend(size)
            self._extend.advance(self._strong_groups)
            self._extend_forward(size)

        return Capturable(run, self._prepare(self._extend, size))

    def _capturable_full_loop(self, size: int) -> Capturable:
        def run() -> None:
            hidden = self._hidden[:size]
            for step in range(1, self.num_speculative_tokens):
                advance_shared_state(self._decode.batch, size)
                self._decode.advance(self._strong_groups)
                hidden = self._step_forward(size, hidden, attend_with(self.groups, self._decode.at_step(step)))

        return Capturable(run, self._prepare(self._decode, size))

    def _capturable_device_loop(self, size: int) -> Capturable:
        def body() -> None:
            advance_shared_state(self._decode.batch, size)
            self._captured_step(size, attend_with(self.groups, self._decode.metadata))

        return Capturable(
            body,
            self._prepare(self._decode, size),
            lambda runtime, body: runtime.capture_loop(body, self._stop.going, self.num_speculative_tokens - 1),
        )

    def _capturable_step(self, size: int) -> Capturable:
        constants = self._prepare(self._decode, size)
        return Capturable(lambda: self._captured_step(size, attend_with(self.groups, self._decode.metadata)), constants)

    def _capturable_pieces(self, size: int) -> Capturable:
        def run(call_outside: CallOutside) -> None:
            plan = self.plan
            attend = attend_in_pieces(self.groups, self._decode, plan.outside_groups, plan.weak_groups, call_outside)
            self._captured_step(size, attend)

        return Capturable(
            lambda: run(lambda fn, /, *inputs: fn(*inputs)),
            self._prepare(self._decode, size),
            lambda runtime, _: runtime.capture_pieces(run),
        )

    def _captured_step(self, size: int, attend: Attend) -> None:
        self._decode.advance(self._strong_groups)
        self._hidden[:size].copy_(self._step_forward(size, self._hidden[:size], attend))


def default_capture_sizes(max_reqs: int) -> list[int]:
    """Powers of two up to max_reqs, and max_reqs itself."""
    sizes = [1]
    while sizes[-1] * 2 <= max_reqs:
        sizes.append(sizes[-1] * 2)
    return sorted({*sizes, max_reqs})


def _check_shapes(
    groups: Sequence[KVGroup], tables: RequestTables, num_speculative_tokens: int, sizes: Sequence[int]
) -> None:
    require(
        [group.spec.page_size for group in groups] == list(tables.page_sizes_host),
        f"group i of the drafter uses block table i, with page sizes {[g.spec.page_size for g in groups]} against "
        f"the tables' {list(tables.page_sizes_host)}; its slots would be wrong. Make one table per group.",
    )
    require(
        num_speculative_tokens < tables.max_seq_len,
        f"a round of {num_speculative_tokens} draft tokens takes {num_speculative_tokens + 1} places of a request, "
        f"these tables hold {tables.max_seq_len}; no request could draft. Lower K or enlarge the tables.",
    )
    require(
        max(sizes) <= tables.max_reqs,
        f"graphs are captured over the rows of the tables, {tables.max_reqs} here, got a capture size of "
        f"{max(sizes)}; its rows would not exist. Capture smaller sizes or enlarge the tables.",
    )
