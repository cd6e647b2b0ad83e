"""Metadata of recurrent layers: views of the shared state, from which kernels derive what each slot must replay."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from builders.batch import AttentionBatch
from builders.contract import AdvanceLevel, AdvanceSupport, CaptureConstants, GraphSupport, MetadataBuilder
from builders.errors import require, require_counts
from builders.spec import MAX_TREE_TOKENS
from builders.state_spec import StateSpec


@dataclass(frozen=True, kw_only=True, slots=True)
class StateMetadata:
    """Host constants of a batch, and views of its shared state.

    query_start_loc  int32 [num_reqs + 1]
    seq_lens         int32 [num_reqs]     tokens of the request, query tokens included; 0 in padding rows
    slots            int32 [num_reqs]     the request's slot, any stride: the first page of its row in the block table
    tree_masks       int64 [num_tokens]   None if the query tokens are chains
    """

    num_reqs: int
    num_tokens: int
    max_query_len: int
    max_seq_len: int
    """An upper bound on seq_lens; a row beyond it is inert."""
    query_start_loc: torch.Tensor
    seq_lens: torch.Tensor
    slots: torch.Tensor
    tree_masks: torch.Tensor | None
    absorb: bool
    """Whether every query token is certain, as in a prompt, so that it joins the checkpoint and leaves no journal."""
    may_fold: bool
    """Whether a step may write the replayed journal into the checkpoint. The tokens before its query are then certain
    for ever: not so in the later steps of a recurrent draft."""
    reserve: int
    """Journal entries that steps without a fold will add after this one."""
    num_slots: int | None = None
    """A bound on slots: the cache must have as many. None if the batch has no num_pages."""


class StateBuilder(MetadataBuilder[StateMetadata]):
    """Takes a StateSpec. Every field that depends on the position is a view, so `advance` has nothing to refresh."""

    spec: StateSpec  # type: ignore[assignment]

    def __init__(
        self, spec: StateSpec, device: torch.device, *, max_reqs: int, max_tokens: int, max_seq_len: int
    ) -> None:
        super().__init__(spec, device, max_reqs=max_reqs, max_tokens=max_tokens, max_seq_len=max_seq_len)  # type: ignore[arg-type]

    graph_support = GraphSupport.ALWAYS
    step_fields = ("seq_lens",)

    @classmethod
    def advance_support(cls, spec: StateSpec, device: torch.device) -> AdvanceSupport:  # type: ignore[override]
        return AdvanceSupport(AdvanceLevel.IN_GRAPH, "what a step replays follows from the lengths on the device")

    def build(
        self,
        batch: AttentionBatch,
        *,
        horizon: int = 0,
        absorb: bool = False,
        may_fold: bool = True,
        reserve: int = 0,
    ) -> StateMetadata:
        """Build the metadata; see `StateMetadata` for the options, which a captured graph keeps.

        Raises BatchError as `MetadataBuilder.build` does, for a journal that is too short for the step and its reserve,
        and for trees that the spec does not announce, that are wider than a mask, or that are all certain.
        """
        self.check_horizon(batch, horizon)
        require_counts("reserves", (reserve,))
        needed = batch.max_query_len + reserve
        require(
            reserve >= 0 and (absorb or needed <= self.spec.journal),
            f"a journal must hold the {batch.max_query_len} query tokens of a step and a reserve of {reserve}, got "
            f"{self.spec.journal} entries; a state would be lost. Make the spec's journal longer, or draft fewer "
            "tokens.",
        )
        require(
            batch.tree_masks is None or (self.spec.tree and not absorb and batch.max_query_len <= MAX_TREE_TOKENS),
            f"trees need a spec with tree=True, absorb=False and at most {MAX_TREE_TOKENS} query tokens, got "
            f"tree={self.spec.tree}, absorb={absorb} and {batch.max_query_len}; a state would take in every branch. "
            "Correct the spec, or pass chains.",
        )
        return StateMetadata(
            num_reqs=batch.num_reqs,
            num_tokens=batch.num_tokens,
            max_query_len=batch.max_query_len,
            max_seq_len=batch.max_seq_len,
            query_start_loc=batch.query_start_loc,
            seq_lens=batch.seq_lens,
            slots=batch.block_table[:, 0],
            tree_masks=batch.tree_masks,
            absorb=absorb,
            may_fold=may_fold,
            reserve=reserve,
            num_slots=batch.num_pages,
        )

    def row_capacity(self, batch: AttentionBatch) -> int:
        """A slot has no end, so only the bound on lengths counts."""
        return self.max_seq_len

    def advance(self, metadata: StateMetadata) -> None:
        """Nothing to do: see step_fields."""

    def capture_constants(self, metadata: StateMetadata) -> CaptureConstants:
        return CaptureConstants(
            max_reqs=metadata.num_reqs, max_query_len=metadata.max_query_len, max_seq_len=metadata.max_seq_len
        )
