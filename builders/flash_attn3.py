"""Metadata of FlashAttention-3: views of the shared state, and the host constants its kernel bakes in."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from builders.batch import AttentionBatch
from builders.contract import AdvanceLevel, AdvanceSupport, CaptureConstants, GraphSupport, MetadataBuilder
from builders.spec import AttentionSpec

_SPLITS = 32
"""A positive, constant count: with 0 the kernel's host code would choose by the lengths of the captured batch."""


@dataclass(frozen=True, kw_only=True, slots=True)
class FlashAttn3Metadata:
    """Views: query_start_loc int32 [num_reqs + 1], seq_lens int32 [num_reqs], block_table int32 [num_reqs, max_pages],
    slot_mapping int64 [num_tokens].
    """

    num_reqs: int
    num_tokens: int
    max_query_len: int
    max_seq_len: int
    """A bound, not a length: a small one would make the kernel drop its sliding window."""
    num_splits: int
    query_start_loc: torch.Tensor
    seq_lens: torch.Tensor
    block_table: torch.Tensor
    slot_mapping: torch.Tensor


class FlashAttn3Builder(MetadataBuilder[FlashAttn3Metadata]):
    """The scheduler's own metadata is left out: the kernel then prepares it on the device in every call."""

    graph_support = GraphSupport.ALWAYS
    step_fields = ("seq_lens", "slot_mapping")

    @classmethod
    def advance_support(cls, spec: AttentionSpec, device: torch.device) -> AdvanceSupport:
        return AdvanceSupport(AdvanceLevel.IN_GRAPH, "step fields are views; the kernel schedules itself in each call")

    def build(self, batch: AttentionBatch, *, horizon: int = 0) -> FlashAttn3Metadata:
        return FlashAttn3Metadata(
            num_reqs=batch.num_reqs,
            num_tokens=batch.num_tokens,
            max_query_len=batch.max_query_len,
            max_seq_len=self.max_seq_len,
            num_splits=_SPLITS if batch.max_query_len == 1 else 1,
            query_start_loc=batch.query_start_loc,
            seq_lens=batch.seq_lens,
            block_table=batch.block_table,
            slot_mapping=batch.slot_mapping,
        )

    def advance(self, metadata: FlashAttn3Metadata) -> None:
        """Nothing to do: see step_fields."""

    def capture_constants(self, metadata: FlashAttn3Metadata) -> CaptureConstants:
        return CaptureConstants(
            max_reqs=metadata.num_reqs, max_query_len=metadata.max_query_len, max_seq_len=metadata.max_seq_len
        )
