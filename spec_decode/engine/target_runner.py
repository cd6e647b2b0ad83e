"""The target over paged caches: prompts in ragged chunks, and a uniform pass over the running requests, in a graph."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

import torch

from builders import AdvanceLevel, CaptureConstants, GraphSupport, RequestTables, begin_extend
from spec_decode.drafter import default_capture_sizes
from spec_decode.drafter.attention import PagedAttention, SplitAttention
from spec_decode.drafter.kv_groups import KVGroup, build_ragged
from spec_decode.drafter.plan import GraphMode
from spec_decode.drafter.step_buffers import StepBuffers
from spec_decode.graphs import Capturable, GraphKey, GraphManager, SplitOp
from spec_decode.models import Attention, TargetModel, TargetStates

PASS = "target"
"""The kind of the target's graphs."""


class PassState(Protocol):
    """What a uniform pass reads before the forward and does behind it; device work of fixed shape, in the graph."""

    def inputs(self, size: int) -> tuple[torch.Tensor, torch.Tensor]:
        """int32 [size]: tokens in the cache before the pass; and its token ids, int64 [size, query_len]."""
        ...

    def settle(self, token_ids: torch.Tensor, logits: torch.Tensor, target_hidden_states: torch.Tensor) -> None:
        """token_ids int64 [size, query_len], logits [..., V], states [..., F]; padding rows hold anything finite."""
        ...


class TargetRunner:
    """Runs a target over the requests of some tables; its groups' caches outlive any one call."""

    def __init__(
        self,
        model: TargetModel,
        groups: Sequence[KVGroup],
        tables: RequestTables,
        state: PassState,
        *,
        query_len: int,
        graph_mode: GraphMode = GraphMode.FULL,
        capture_sizes: Sequence[int] | None = None,
    ) -> None:
        """query_len: tokens of a row in the uniform pass, 1 to decode, 1 + K to verify.

        graph_mode NONE runs the pass eagerly, PIECEWISE calls the attention of every group between captured pieces, and
        the others that of the groups alone which no graph can hold (`outside`).
        """
        self.model = model
        self.groups = tuple(groups)
        self.tables = tables
        self._state = state
        self._query_len = query_len
        self._phase = StepBuffers(groups, tables, query_len=query_len, horizon=0)
        self.graphs = GraphManager(tables.device, list(capture_sizes or default_capture_sizes(tables.max_reqs)))
        self._eager = graph_mode is GraphMode.NONE
        self.outside = [] if self._eager else _outside(groups, query_len, graph_mode)
        """Indices of the groups whose attention runs eagerly, between captured pieces."""
        facts = [group.facts(tables.device) for group in groups]
        self._strong = [i for i, fact in enumerate(facts) if fact.advance.level is AdvanceLevel.IN_GRAPH]
        built = [i for i, fact in enumerate(facts) if i not in self._strong or fact.build_per_round]
        self._built = list(range(len(groups))) if self._eager else built

    @torch.no_grad()
    def prefill(
        self,
        tables: RequestTables,
        query_lens: Sequence[int],
        seq_lens: Sequence[int],
        token_ids: torch.Tensor,
    ) -> TargetStates:
        """States [T, ...] of flat token_ids int64 [T]: request r's last query_lens[r] of seq_lens[r] tokens; eager.

        tables: other requests than those of the uniform pass, over the same caches.
        """
        batch, metadata = build_ragged(self.groups, tables, query_lens, seq_lens)
        states: TargetStates = self.model(token_ids, batch.positions, PagedAttention(self.groups, metadata))
        return states

    @torch.no_grad()
    def run(self) -> None:
        """Enqueue the uniform pass over the live rows of the tables. Waits for nothing, unless a group's builder must
        know the exact lengths."""
        size = self.graphs.padded(self.tables.num_live)
        if self._built:
            token_ids = self._begin(size)
            self._phase.rebuild(size, self._built)
        if self._eager:
            self._forward(token_ids, PagedAttention(self.groups, self._phase.metadata))
        else:
            needed = CaptureConstants(max_reqs=size, max_query_len=self._query_len, max_seq_len=self.tables.longest)
            self.graphs.replay(GraphKey(PASS, size), needed)

    def capture(self, *, progress: bool = False) -> None:
        """Capture the pass at every size, on padding rows; no request may be live in the tables."""
        if not self._eager:
            self.graphs.capture({PASS: self._capturable}, progress=progress)

    def _capturable(self, size: int) -> Capturable:
        self._phase.batch.clear()
        self._phase.rebuild(size, range(len(self.groups)))

        def run(split_op: SplitOp = _call) -> None:
            token_ids = self._begin(size)
            self._phase.advance(self._strong)
            attention = SplitAttention(
                self.groups, self._phase.metadata, uncaptured=self.outside, rebuilt=self._built, split_op=split_op
            )
            self._forward(token_ids, attention)

        if not self.outside:
            return Capturable(run, self._phase.constants())
        return Capturable(run, self._phase.constants(), lambda runtime, _: runtime.capture_pieces(run))

    def _begin(self, size: int) -> torch.Tensor:
        context_lens, token_ids = self._state.inputs(size)
        begin_extend(self._phase.batch, context_lens, size, self._query_len)
        return token_ids

    def _forward(self, token_ids: torch.Tensor, attention: Attention) -> None:
        states = self.model(token_ids.flatten(), self._phase.batch.positions[: token_ids.numel()], attention)
        logits, shape = self.model.logits(states.hidden), token_ids.shape
        self._state.settle(token_ids, logits.unflatten(0, shape), states.target_hidden_states.unflatten(0, shape))


def _outside(groups: Sequence[KVGroup], query_len: int, graph_mode: GraphMode) -> list[int]:
    needed = GraphSupport.UNIFORM_BATCH if query_len > 1 else GraphSupport.SINGLE_TOKEN_DECODE
    cannot = [group.backend.builder.graph_support < needed for group in groups]
    return [i for i, outside in enumerate(cannot) if outside or graph_mode is GraphMode.PIECEWISE]


def _call(fn: Callable[..., torch.Tensor], /, *inputs: torch.Tensor) -> torch.Tensor:
    return fn(*inputs)
