"""Runs the target over paged caches: prompts in ragged chunks, and uniform steps, eagerly or in a graph per size."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Protocol, TypeAlias

import torch

from builders import RequestTables
from builders.devices import staged
from spec_decode.engine.prompt_graphs import PromptGraphs
from spec_decode.graphs import Capturable, Factory, GraphManager, SplitOp, default_capture_sizes
from spec_decode.model_api import Attention, TargetModel, TargetStates
from spec_decode.paged import GraphMode, StateGroup
from spec_decode.paged.attention import PagedAttention
from spec_decode.paged.kv_groups import KVGroup, build_ragged, products_of
from spec_decode.paged.metadata_plan import plan_uniform_step
from spec_decode.paged.step_metadata import StepBuffers
from spec_decode.verification import move_accepted_kv

TARGET = "target"
"""The graph kind of the target's graphs."""


class TargetForward(Protocol):
    """The target's forward in a step of `size` rows."""

    def __call__(
        self, context_lens: torch.Tensor, token_ids: torch.Tensor, parents: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return logits [size, query_len, V] and target_hidden_states [size, query_len, F]; padding rows are finite.

        context_lens   int32 [size], the tokens in the cache
        token_ids      int64 [size, query_len], the tokens after them
        parents        int64 [size, query_len - 1], for trees, in the format of TreeBatch
        """
        ...


Step: TypeAlias = Callable[[int, TargetForward], None]
"""Device work over `size` rows that calls the forward once; shapes are fixed, since a graph captures it."""


class TargetRunner:
    """Runs a target over the requests in `tables`."""

    def __init__(
        self,
        model: TargetModel,
        groups: Sequence[KVGroup | StateGroup],
        tables: RequestTables,
        *,
        query_len: int,
        trees: bool = False,
        graph_mode: GraphMode = GraphMode.FULL,
        capture_sizes: Sequence[int] | None = None,
        prompts: tuple[RequestTables, Sequence[int]] | None = None,
    ) -> None:
        """query_len: tokens per row of a step, 1 to decode, 1 + K to verify. trees: they are a root and its tree.
        prompts: the tables of `prefill`, and the numbers of prompt tokens that have graphs; None: all run eagerly.

        graph_mode: NONE runs everything eagerly. PIECEWISE runs every group's attention in a step between captured
        pieces; FULL only that of groups that cannot be captured. `plan` has the reasons.
        """
        self.model = model
        self._products = products_of(model, groups)
        self.groups = tuple(groups)
        self.tables = tables
        self.plan = plan_uniform_step([group.facts(tables.device) for group in groups], query_len, graph_mode)
        self._buffers = StepBuffers(groups, tables, self.plan, query_len=query_len, trees=trees)
        self.graphs = GraphManager(tables.device, list(capture_sizes or default_capture_sizes(tables.max_reqs)))
        self._eager = graph_mode is GraphMode.NONE
        prompt_tables, sizes = prompts or (tables, ())
        sizes = () if self._eager else sizes
        self.prompts = PromptGraphs(model, groups, prompt_tables, self._products, sizes, self.plan)
        self._states = [(index, group) for index, group in enumerate(groups) if isinstance(group, StateGroup)]

    @torch.no_grad()
    def prefill(
        self, tables: RequestTables, query_lens: Sequence[int], seq_lens: Sequence[int], token_ids: torch.Tensor
    ) -> TargetStates:
        """Return states [T, ...] of flat token_ids int64 [T]: request r's last query_lens[r] of seq_lens[r] tokens.

        The next call can overwrite them. tables: for these requests, separate from those of the steps, over the same
        caches.
        """
        if len(query_lens) == 1 and (states := self.prompts.run_one(tables, token_ids, seq_lens[0])) is not None:
            return states
        batch, metadata = build_ragged(self.groups, tables, query_lens, seq_lens)
        begin = [row for row, (new, length) in enumerate(zip(query_lens, seq_lens, strict=True)) if new == length]
        for index, group in self._states:
            group.begin(metadata[index].slots[staged(begin, tables.device)])
        states = self.prompts.run(token_ids, batch.positions, PagedAttention(self.groups, metadata))
        for index, group in self._states:
            group.end_step(metadata[index])
        return states

    def lost_states(self) -> torch.Tensor | None:
        """Return which slots hold a state that did not fit its request's lengths, int32 [num_slots], above 0; None
        without recurrent layers."""
        lost = [group.lengths.lost for _, group in self._states]
        return torch.stack(lost).amax(0) if len(lost) > 1 else next(iter(lost), None)

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return the target's logits [T, V] of hidden [T, H]."""
        with self._products():
            return self.model.logits(hidden)

    @torch.no_grad()
    def run(self, step: Step, context_lens: Callable[[int], torch.Tensor]) -> None:
        """Enqueue the step over the live requests of the tables, eagerly or as a replay of its graph, with the work
        captured before it.

        context_lens: returns the step's context lengths, int32 [size]; called if a group's metadata is built before a
        replay. Does not sync, unless a group's builder needs exact lengths. Raises BatchError, with nothing run, if no
        graph is large enough.
        """
        size = self.graphs.padded(self.tables.num_live, eager=self._eager)
        if self._eager:
            step(size, self._forward_eager)
            return
        if self._buffers.built_groups:
            self._buffers.build_at(context_lens(size), size)
        self._buffers.replay(self.graphs, TARGET, size)

    @property
    def separate_graph_reason(self) -> str | None:
        """Why the steps cannot follow other work in one graph; None if they can."""
        return "the target runs without graphs: its graph mode is none" if self._eager else self.plan.host_reason

    def capture(self, step: Step, *, before: Factory | None = None, progress: bool = False) -> None:
        """Capture prompts, and the step at every size, on padding rows; the tables must have no live request.

        before: work that each graph starts with; only if `separate_graph_reason` is None.
        """
        if self._eager:
            return

        def capturable(size: int) -> Capturable:
            first = before and before(size)
            work = self._capturable(step, size)
            return work.after(first) if first else work

        self.prompts.capture(progress=progress)
        self.graphs.capture({TARGET: capturable}, progress=progress)

    def _capturable(self, step: Step, size: int) -> Capturable:
        constants = self._buffers.prepare_capture(size)

        def run() -> None:
            step(size, partial(self._forward_captured, self._buffers.attention))

        def run_in_pieces(split_op: SplitOp) -> None:
            step(size, partial(self._forward_captured, self._buffers.split_attention(split_op)))

        in_pieces = self.plan.uncaptured_groups
        return Capturable.pieces(run_in_pieces, constants) if in_pieces else Capturable(run, constants)

    def move_accepted(self, path: torch.Tensor) -> None:
        """Compact the KV and the states of each row's accepted path, int64 [size, K] of a TreeVerifyOutput, so that the
        caches look as if no tree had been drafted. Call after a step's forward."""
        slots = self._buffers.batch.slot_mappings[:, : len(path) * self._buffers.query_len].unflatten(
            1, (len(path), -1)
        )
        for own, group in zip(slots, self.groups, strict=True):
            for cache in group.caches.values() if isinstance(group, KVGroup) else ():
                move_accepted_kv(cache.key, cache.value, own, path)
        self._buffers.keep_accepted(path)

    def _forward_eager(
        self, context_lens: torch.Tensor, token_ids: torch.Tensor, parents: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        self._buffers.build_at(context_lens, len(token_ids))
        return self._forward(self._buffers.attention, token_ids, parents)

    def _forward_captured(
        self,
        attention: Attention,
        context_lens: torch.Tensor,
        token_ids: torch.Tensor,
        parents: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        self._buffers.advance_to(context_lens, len(token_ids))
        return self._forward(attention, token_ids, parents)

    def _forward(
        self, attention: Attention, token_ids: torch.Tensor, parents: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        if parents is not None:
            self._buffers.set_trees(parents)
        with self._products():
            states = self.model(token_ids.flatten(), self._buffers.batch.positions[: token_ids.numel()], attention)
        self._buffers.end_step()
        logits, shape = self.logits(states.hidden), token_ids.shape
        return logits.unflatten(0, shape), states.target_hidden_states.unflatten(0, shape)
