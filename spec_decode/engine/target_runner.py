"""The target over paged caches: prompts in ragged chunks, and a uniform pass over the running requests, in a graph."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch

from builders import RequestTables, begin_extend
from spec_decode.drafter import GraphMode, default_capture_sizes
from spec_decode.drafter.attention import PagedAttention, SplitAttention
from spec_decode.drafter.kv_groups import KVGroup, build_ragged
from spec_decode.drafter.metadata_plan import plan_uniform_step
from spec_decode.drafter.step_buffers import StepBuffers
from spec_decode.graphs import Capturable, GraphManager, SplitOp
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
        the others that of the groups alone which no graph can hold.
        """
        self.model = model
        self.groups = tuple(groups)
        self.tables = tables
        self._state = state
        self._query_len = query_len
        self.plan = plan_uniform_step([group.facts(tables.device) for group in groups], query_len, graph_mode)
        self._phase = StepBuffers(groups, tables, self.plan, query_len=query_len)
        self.graphs = GraphManager(tables.device, list(capture_sizes or default_capture_sizes(tables.max_reqs)))
        self._eager = graph_mode is GraphMode.NONE

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
        if self._phase.built_groups:
            token_ids = self._begin(size)
            self._phase.build_round(size)
            self._phase.rebuild(size)
        if self._eager:
            self._forward(token_ids, self._phase.attention)
        else:
            self._phase.replay(self.graphs, PASS, size)

    def capture(self, *, progress: bool = False) -> None:
        """Capture the pass at every size, on padding rows; no request may be live in the tables."""
        if not self._eager:
            self.graphs.capture({PASS: self._capturable}, progress=progress)

    def _capturable(self, size: int) -> Capturable:
        constants, uncaptured = self._phase.prepare_capture(size), self.plan.uncaptured_groups

        def begin() -> torch.Tensor:
            context_lens, token_ids = self._state.inputs(size)
            # Where the host builds from the state of the pass, it has set that state before the replay.
            if not self._phase.built_groups:
                begin_extend(self._phase.batch, context_lens, size, self._query_len)
            self._phase.advance()
            return token_ids

        def run() -> None:
            self._forward(begin(), self._phase.attention)

        def run_in_pieces(split_op: SplitOp) -> None:
            token_ids, built = begin(), self._phase.built_groups
            attention = SplitAttention(
                self.groups, self._phase.metadata, uncaptured=uncaptured, rebuilt=built, split_op=split_op
            )
            self._forward(token_ids, attention)

        return Capturable.pieces(run_in_pieces, constants) if uncaptured else Capturable(run, constants)

    def _begin(self, size: int) -> torch.Tensor:
        context_lens, token_ids = self._state.inputs(size)
        begin_extend(self._phase.batch, context_lens, size, self._query_len)
        return token_ids

    def _forward(self, token_ids: torch.Tensor, attention: Attention) -> None:
        states = self.model(token_ids.flatten(), self._phase.batch.positions[: token_ids.numel()], attention)
        logits, shape = self.model.logits(states.hidden), token_ids.shape
        self._state.settle(token_ids, logits.unflatten(0, shape), states.target_hidden_states.unflatten(0, shape))
