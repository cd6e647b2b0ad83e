"""The graphs of a drafter: what its strategy captures of step 0 and of the later steps, and over which metadata."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from builders import CaptureConstants, GraphSupport, advance_shared_state
from spec_decode.drafter.attention import PagedAttention, SplitAttention
from spec_decode.drafter.plan import DraftPlan, MetadataUpdate, Strategy
from spec_decode.drafter.step_buffers import StepBuffers
from spec_decode.drafter.steps import DraftSteps
from spec_decode.graphs import Capturable, GraphKey, GraphManager, SplitOp
from spec_decode.models.attention import Attention

EXTEND, LOOP, STEP = "extend", "loop", "step"
"""Kinds of graphs: step 0 (query length 1 + K), all later steps at once, one later step (query length 1)."""


class DraftCaptures:
    """Captures a drafter's steps as its plan says, and replays them over the batch as it stands."""

    def __init__(
        self,
        steps: DraftSteps,
        plan: DraftPlan,
        sizes: Sequence[int],
        *,
        memory_limit: int | None,
        extend_in_graph: bool,
    ) -> None:
        """extend_in_graph: False leaves step 0 out, whatever the groups could do."""
        self._steps = steps
        self._plan = plan
        self.graphs = GraphManager(steps.tables.device, sizes, memory_limit=memory_limit)
        least = min(group.backend.builder.graph_support for group in steps.groups)
        capturable = plan.strategy is not Strategy.EAGER and least >= GraphSupport.UNIFORM_BATCH
        self.holds_extend = extend_in_graph and capturable
        """Whether step 0 is run by a graph."""
        self._advanced = [i for i, group in enumerate(plan.groups) if group.upkeep is MetadataUpdate.IN_GRAPH]
        self._metadata: dict[tuple[StepBuffers, int], list[Any]] = {}

    def capture(self, *, progress: bool = False) -> None:
        """Capture what is missing, on padding rows alone; see Drafter.capture."""
        if self._plan.strategy is Strategy.EAGER:
            return
        tables = self._steps.tables
        limits = tables.token_limits.clone()
        tables.token_limits.zero_()
        try:
            self.graphs.capture(self._factories(), progress=progress)
        finally:
            tables.token_limits.copy_(limits)

    def replay(self, kind: str, size: int) -> None:
        """Replay the graph of a kind for `size` padded rows; BatchError, with nothing run, where it cannot serve."""
        steps = self._steps
        phase = steps.extend if kind == EXTEND else steps.decode
        needed = CaptureConstants(max_reqs=size, max_query_len=phase.query_len, max_seq_len=steps.tables.longest)
        self.graphs.replay(GraphKey(kind, size), needed)

    def metadata(self, phase: StepBuffers, size: int) -> list[Any] | None:
        """Each group's metadata that the graphs of a phase and size hold; None where nothing was captured."""
        return self._metadata.get((phase, size))

    def _factories(self) -> dict[str, Callable[[int], Capturable]]:
        factories: dict[str, Callable[[int], Capturable]] = {}
        if self.holds_extend:
            factories[EXTEND] = self._extend
        if self._steps.num_speculative_tokens > 1:
            kind, factory = {
                Strategy.DEVICE_LOOP: (LOOP, self._device_loop),
                Strategy.FULL_LOOP: (LOOP, self._full_loop),
                Strategy.PER_STEP: (STEP, self._step),
                Strategy.PIECEWISE: (STEP, self._pieces),
            }[self._plan.strategy]
            factories[kind] = factory
        return factories

    def _prepare(self, phase: StepBuffers, size: int) -> CaptureConstants:
        """Metadata over padding rows; the constants that a capture with it bakes in."""
        phase.batch.clear()
        phase.rebuild(size, range(len(self._steps.groups)))
        phase.plan_ahead(size)
        # A later build for another size replaces the phase's own; a graph goes on with what it was captured with.
        self._metadata[phase, size] = list(phase.metadata)
        return phase.constants()

    def _extend(self, size: int) -> Capturable:
        steps = self._steps

        def run() -> None:
            steps.begin_extend(size)
            steps.extend.advance(self._advanced)
            steps.extend_forward(size)

        return Capturable(run, self._prepare(steps.extend, size))

    def _full_loop(self, size: int) -> Capturable:
        steps, decode = self._steps, self._steps.decode

        def run() -> None:
            hidden = steps.hidden[:size]
            for step in range(1, steps.num_speculative_tokens):
                advance_shared_state(decode.batch, size)
                decode.advance(self._advanced)
                hidden = steps.step_forward(size, hidden, PagedAttention(steps.groups, decode.at_step(step)))

        return Capturable(run, self._prepare(decode, size))

    def _device_loop(self, size: int) -> Capturable:
        steps, decode = self._steps, self._steps.decode

        def body() -> None:
            advance_shared_state(decode.batch, size)
            self._one_step(size, PagedAttention(steps.groups, decode.metadata))

        return Capturable(
            body,
            self._prepare(decode, size),
            lambda runtime, body: runtime.capture_loop(
                body, steps.sampler.continue_flag, steps.num_speculative_tokens - 1
            ),
        )

    def _step(self, size: int) -> Capturable:
        steps, decode = self._steps, self._steps.decode
        constants = self._prepare(decode, size)
        return Capturable(lambda: self._one_step(size, PagedAttention(steps.groups, decode.metadata)), constants)

    def _pieces(self, size: int) -> Capturable:
        steps, plan = self._steps, self._plan

        def run(split_op: SplitOp) -> None:
            attention = SplitAttention(
                steps.groups,
                steps.decode.metadata,
                uncaptured=plan.uncaptured_groups,
                rebuilt=plan.rebuild_groups,
                split_op=split_op,
            )
            self._one_step(size, attention)

        return Capturable(
            lambda: run(lambda fn, /, *inputs: fn(*inputs)),
            self._prepare(steps.decode, size),
            lambda runtime, _: runtime.capture_pieces(run),
        )

    def _one_step(self, size: int, attention: Attention) -> None:
        self._steps.decode.advance(self._advanced)
        self._steps.step_in_place(size, attention)
