"""Metadata of the Triton paged backend: views of the shared state, and a launch shape fixed by the batch shape."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import torch

from builders.batch import AttentionBatch
from builders.contract import (
    AdvanceLevel,
    AdvanceSupport,
    CaptureConstants,
    GraphSupport,
    MetadataBuilder,
)
from builders.spec import AttentionSpec

_TOKENS_PER_SPLIT = 64
"""A split shorter than this costs more in the merge than it gains (measured on an H200, see reports)."""
_WAVES = 4
"""Programs per multiprocessor that a decode launch aims at."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TritonPagedMetadata:
    """Views: query_start_loc int32 [num_reqs + 1], seq_lens int32 [num_reqs], block_table int32 [num_reqs, max_pages],
    slot_mapping int64 [num_tokens]. The kernels derive positions and windows from seq_lens themselves.
    """

    num_reqs: int
    num_tokens: int
    max_query_len: int
    max_seq_len: int
    num_splits: int
    """Parts that a request's KV tokens are shared out to; a capture constant, since it sizes the grid."""
    query_start_loc: torch.Tensor
    seq_lens: torch.Tensor
    block_table: torch.Tensor
    slot_mapping: torch.Tensor


class TritonPagedBuilder(MetadataBuilder[TritonPagedMetadata]):
    """Everything that depends on the position is a view, so that an advance has nothing left to refresh."""

    graph_support = GraphSupport.ALWAYS
    step_fields = ("seq_lens", "slot_mapping")

    @classmethod
    def advance_support(cls, spec: AttentionSpec, device: torch.device) -> AdvanceSupport:
        return AdvanceSupport(AdvanceLevel.IN_GRAPH, "all step fields are views of the shared device state")

    def build(self, batch: AttentionBatch, *, horizon: int = 0) -> TritonPagedMetadata:
        return TritonPagedMetadata(
            num_reqs=batch.num_reqs,
            num_tokens=batch.num_tokens,
            max_query_len=batch.max_query_len,
            max_seq_len=batch.max_seq_len,
            num_splits=self._splits(batch),
            query_start_loc=batch.query_start_loc,
            seq_lens=batch.seq_lens,
            block_table=batch.block_table,
            slot_mapping=batch.slot_mapping,
        )

    def advance(self, metadata: TritonPagedMetadata) -> None:
        """Nothing to do: see step_fields."""

    def capture_constants(self, metadata: TritonPagedMetadata) -> CaptureConstants:
        return CaptureConstants(
            max_reqs=metadata.num_reqs,
            max_query_len=metadata.max_query_len,
            max_seq_len=metadata.max_seq_len,
        )

    def _splits(self, batch: AttentionBatch) -> int:
        """Fill the device a few times over, from host constants alone: never from the lengths of one batch."""
        visible = min(batch.max_seq_len, self.spec.sliding_window or batch.max_seq_len)
        wanted = _WAVES * _multiprocessors(self.device) // (batch.num_reqs * self.spec.num_kv_heads)
        return max(1, min(wanted, -(-visible // _TOKENS_PER_SPLIT), 64))


@cache
def _multiprocessors(device: torch.device) -> int:
    if device.type == "cuda":
        return int(torch.cuda.get_device_properties(device).multi_processor_count)
    return 8  # enough for the CPU's runs to take the split path
