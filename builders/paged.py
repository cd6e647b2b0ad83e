"""Metadata for kernels that read the shared state themselves: views of it, and a launch that the batch shape fixes."""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass
from functools import cache

import torch

from builders.batch import AttentionBatch
from builders.contract import CaptureConstants, GraphSupport, MetadataBuilder


@dataclass(frozen=True, kw_only=True, slots=True)
class PagedMetadata:
    """Views: query_start_loc int32 [num_reqs + 1], seq_lens int32 [num_reqs], block_table int32 [num_reqs, max_pages],
    slot_mapping int64 [num_tokens]. The kernels derive positions and windows from seq_lens themselves.
    """

    num_reqs: int
    num_tokens: int
    max_query_len: int
    max_seq_len: int
    """A bound on seq_lens, not a length."""
    num_splits: int
    """Parts that a request's KV tokens are shared out to; a capture constant, since it sizes the launch."""
    query_start_loc: torch.Tensor
    seq_lens: torch.Tensor
    block_table: torch.Tensor
    slot_mapping: torch.Tensor


class PagedViewBuilder(MetadataBuilder[PagedMetadata]):
    """Everything that depends on the position is a view, so that an advance has nothing left to refresh."""

    graph_support = GraphSupport.ALWAYS
    step_fields = ("seq_lens", "slot_mapping")

    def build(self, batch: AttentionBatch, *, horizon: int = 0) -> PagedMetadata:
        self.check_horizon(batch, horizon)
        return PagedMetadata(
            num_reqs=batch.num_reqs,
            num_tokens=batch.num_tokens,
            max_query_len=batch.max_query_len,
            max_seq_len=self.length_bound(batch),
            num_splits=self.splits(batch),
            query_start_loc=batch.query_start_loc,
            seq_lens=batch.seq_lens,
            block_table=batch.block_table,
            slot_mapping=batch.slot_mapping,
        )

    def advance(self, metadata: PagedMetadata) -> None:
        """Nothing to do: see step_fields."""

    def capture_constants(self, metadata: PagedMetadata) -> CaptureConstants:
        return CaptureConstants(
            max_reqs=metadata.num_reqs, max_query_len=metadata.max_query_len, max_seq_len=metadata.max_seq_len
        )

    def length_bound(self, batch: AttentionBatch) -> int:
        """The bound on seq_lens that the kernels are told."""
        return batch.max_seq_len

    @abstractmethod
    def splits(self, batch: AttentionBatch) -> int:
        """num_splits, from host constants alone: never from the lengths of one batch."""


@cache
def num_sms(device: torch.device) -> int:
    """Multiprocessors of a device; of the CPU a few, so that its runs take the split path too."""
    if device.type == "cuda":
        return int(torch.cuda.get_device_properties(device).multi_processor_count)
    return 8
