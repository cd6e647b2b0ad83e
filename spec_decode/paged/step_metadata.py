"""Buffers for one batch shape: 1 + K tokens per row in a drafter's step 0 and in verification, one in later steps."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch

from builders import (
    AttentionBatch,
    BatchBuffers,
    CaptureConstants,
    HostLengths,
    MetadataBuilder,
    RequestTables,
    set_extend_state,
)
from spec_decode.graphs import GraphKey, GraphManager, SplitOp
from spec_decode.paged.attention import PagedAttention, SplitAttention
from spec_decode.paged.kv_groups import KVGroup, check_pools
from spec_decode.paged.metadata_plan import MetadataPlan, MetadataUpdate
from spec_decode.paged.state_group import StateGroup
from spec_decode.trees.kernels.ancestor_masks import ancestor_masks


class StepBuffers:
    """The buffers of one batch shape, and each group's builder and metadata over them.

    batch      BatchBuffers, uniform, query_len tokens per row
    metadata   one per group, as last built; None before the first build
    attention  PagedAttention over the metadata current at each call
    """

    def __init__(
        self,
        groups: Sequence[KVGroup | StateGroup],
        tables: RequestTables,
        plan: MetadataPlan,
        *,
        query_len: int,
        horizon: int = 0,
        trees: bool = False,
    ) -> None:
        """query_len: tokens of every row. horizon: number of advances that metadata must survive between two builds,
        and that are planned ahead for the plan's preplanned groups. trees: each row's tokens form a tree, given by the
        batch's tree_masks, and rows do not grow from step to step. Raises BatchError as `check_pools`."""
        check_pools(groups, tables)
        self.batch = BatchBuffers(tables, max_tokens=tables.max_reqs * query_len)
        self.batch.set_uniform(query_len)
        self.plan = plan
        self.query_len = query_len
        self.horizon = 0 if trees else horizon
        self._trees = trees
        self.metadata: list[Any] = [None] * len(groups)
        self.attention = PagedAttention(groups, self.metadata)
        self.built_groups = plan.built_groups
        """Indices of the groups that the host builds, from the state of a step, which must be set first."""
        self._groups = tuple(groups)
        self._states = [(index, group) for index, group in enumerate(groups) if isinstance(group, StateGroup)]
        self._rebuilt = plan.rebuild_groups
        self._in_graph = [i for i, group in enumerate(plan.groups) if group.update is MetadataUpdate.IN_GRAPH]
        self._built_per_round = [i for i, group in enumerate(plan.groups) if group.built_per_round]
        self._builders = [self.new_builder(index) for index in range(len(groups))]
        # One builder per step: its persistent buffers hold one step's plan.
        self._planners = {index: [self.new_builder(index) for _ in range(horizon)] for index in plan.preplanned_groups}
        self._planned: dict[int, list[Any]] = {}
        self._captured: dict[int, list[Any]] = {}

    def new_builder(self, index: int) -> MetadataBuilder[Any]:
        """Make another builder of a group for this shape, with its own persistent buffers."""
        return self._groups[index].make_builder(self.batch.tables, self.batch.max_tokens)

    def attention_batch(self, index: int, size: int, seq_lens: torch.Tensor | None = None) -> AttentionBatch:
        """Return a group's view of the first `size` rows, with the host lengths that its builder requests.

        seq_lens: int32 [size], lengths to use instead of the buffers' own. Syncs with the device if the builder
        requests exact lengths.
        """
        lengths: Sequence[int] | None = None
        kind = self._builders[index].host_lengths
        if kind is HostLengths.EXACT:
            lengths = (self.batch.seq_lens[:size] if seq_lens is None else seq_lens).tolist()
        elif kind is HostLengths.UPPER_BOUND:
            limits = self.batch.tables.limits_host
            lengths = [*limits, *(0,) * (size - len(limits))][:size]
        view = self.batch.view(
            index,
            num_reqs=size,
            num_tokens=size * self.query_len,
            max_query_len=self.query_len,
            host_seq_lens=lengths,
            host_seq_lens_exact=kind is HostLengths.EXACT,
        )
        view = self.batch.tree_view(view) if self._trees else view
        return view if seq_lens is None else replace(view, seq_lens=seq_lens)

    def split_attention(self, split_op: SplitOp) -> SplitAttention:
        """Return the attention for a step that is captured in pieces."""
        return SplitAttention(
            self._groups,
            self.metadata,
            uncaptured=self.plan.uncaptured_groups,
            built=self.built_groups,
            split_op=split_op,
        )

    def build_at(self, context_lens: torch.Tensor, size: int) -> None:
        """Set the state of a step after context_lens, int32 [size] tokens, and build what the host builds."""
        set_extend_state(self.batch, context_lens, size, self.query_len)
        self.build_round_metadata(size)
        self.build_step_metadata(size)

    def advance_to(self, context_lens: torch.Tensor, size: int) -> None:
        """The same in a graph: metadata is refreshed in place. If the host builds any group, it has set the state."""
        if not self.built_groups:
            set_extend_state(self.batch, context_lens, size, self.query_len)
        self.advance_metadata()

    def end_step(self) -> None:
        """Count the step's tokens in the recurrent states, after the model's forward; graph-safe."""
        for index, group in self._states:
            group.end_step(self.metadata[index])

    def keep_accepted(self, path: torch.Tensor) -> None:
        """Keep each tree's accepted path, int64 [size, K], in the recurrent states, after `end_step`; graph-safe."""
        for index, group in self._states:
            group.move_accepted(self.metadata[index], path)

    def set_trees(self, parents: torch.Tensor) -> None:
        """Turn the chain in each row into a root and its tree: set masks and positions.

        parents: int64 [size, query_len - 1], as in TreeBatch. Device work only.
        """
        (size, _), batch = parents.shape, self.batch
        masks, depths = ancestor_masks(parents)
        count, live = masks.numel(), batch.seq_lens[:size, None] > 0
        positions = batch.positions[:count].view(size, -1)
        positions.copy_((positions[:, :1] + depths).where(live, 0))
        batch.tree_masks[:count].view(size, -1).copy_(masks.where(live, 0))

    def build_round_metadata(self, size: int) -> None:
        """Build what is built once per round, before the first step, and plan ahead from the unadvanced state."""
        self._build(size, self._built_per_round)
        self._plan_ahead(size)

    def build_step_metadata(self, size: int) -> None:
        """Build the groups that the plan rebuilds at every step, from the current state."""
        self._build(size, self._rebuilt)

    def advance_metadata(self) -> None:
        """Refresh in place the metadata of the groups that advance in the graph; graph-safe."""
        for index in self._in_graph:
            self._builders[index].advance(self.metadata[index])

    def metadata_of_step(self, step: int) -> list[Any]:
        """Return each group's metadata after `step` advances."""
        return [
            self._planned[index][step - 1] if index in self._planned else metadata
            for index, metadata in enumerate(self.metadata)
        ]

    def metadata_in_use(self, size: int, step: int) -> tuple[Any, ...]:
        """Return each group's metadata as the kernels of that step read it: from the graph, or from the last build."""
        built = self.metadata_of_step(step) if step else self.metadata
        captured = self._captured.get(size, built)
        return tuple(built[i] if group.built else captured[i] for i, group in enumerate(self.plan.groups))

    def prepare_capture(self, size: int) -> CaptureConstants:
        """Build every group's metadata over padding rows; return the host constants that a capture with it bakes in."""
        self.batch.clear()
        self._build(size, range(len(self._groups)))
        self._plan_ahead(size)
        # A build for another size replaces `metadata`; a graph keeps using what it was captured with.
        self._captured[size] = list(self.metadata)
        return self._constants()

    def replay(self, graphs: GraphManager, kind: str, size: int) -> None:
        """Replay the graph of a kind for `size` rows. Raises BatchError, before any launch, if it cannot serve."""
        needed = CaptureConstants(max_reqs=size, max_query_len=self.query_len, max_seq_len=self.batch.tables.longest)
        graphs.replay(GraphKey(kind, size), needed)

    def _build(self, size: int, groups: Sequence[int]) -> None:
        for index in groups:
            self.metadata[index] = self._builders[index].build(self.attention_batch(index, size), horizon=self.horizon)

    def _plan_ahead(self, size: int) -> None:
        for index, builders in self._planners.items():
            if builders:
                now = self.attention_batch(index, size)
                steps = [0] * len(builders) if self._trees else range(1, 1 + len(builders))
                self._planned[index] = [
                    b.build(self._after(now, step)) for step, b in zip(steps, builders, strict=True)
                ]

    def _constants(self) -> CaptureConstants:
        """Return the tightest of the groups' constants."""
        each = [b.capture_constants(m) for b, m in zip(self._builders, self.metadata, strict=True)]
        for index, planned in self._planned.items():
            each += [b.capture_constants(m) for b, m in zip(self._planners[index], planned, strict=True)]
        return tightest(each)

    def _after(self, now: AttentionBatch, steps: int) -> AttentionBatch:
        """Predict the view on the host: live rows longer by `steps` tokens, up to their limits."""
        if now.host_seq_lens is None or not now.host_seq_lens_exact:
            return now
        limits = [*self.batch.tables.limits_host, *(0,) * now.num_reqs]
        lens = tuple(min(n + steps, limit) if n else 0 for n, limit in zip(now.host_seq_lens, limits, strict=False))
        return replace(now, host_seq_lens=lens)


def tightest(constants: Sequence[CaptureConstants]) -> CaptureConstants:
    """Return what a graph bakes in that was captured with all of these."""
    return CaptureConstants(
        max_reqs=min(each.max_reqs for each in constants),
        max_query_len=min(each.max_query_len for each in constants),
        max_seq_len=min(each.max_seq_len for each in constants),
    )
