"""The batch fields in every backend's metadata, and the base class of the builders that make it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, TypeVar

import torch

from builders.batch import AttentionBatch
from builders.contract import CaptureConstants, MetadataBuilder


@dataclass(frozen=True, kw_only=True, slots=True)
class BatchMetadata:
    """Host constants of a batch, and views of its shared state.

    query_start_loc  int32 [num_reqs + 1]
    seq_lens         int32 [num_reqs]
    block_table      int32 [num_reqs, max_pages]
    slot_mapping     int64 [num_tokens]
    """

    num_reqs: int
    num_tokens: int
    max_query_len: int
    max_seq_len: int
    """An upper bound on seq_lens."""
    query_start_loc: torch.Tensor
    seq_lens: torch.Tensor
    block_table: torch.Tensor
    slot_mapping: torch.Tensor
    tree_masks: torch.Tensor | None = None
    """int64 [num_tokens], a view of the batch's masks; None if its queries are chains."""


B = TypeVar("B", bound=BatchMetadata)


class BatchMetadataBuilder(MetadataBuilder[B]):
    """A builder whose graphs hold no host values other than those of `BatchMetadata`."""

    def capture_constants(self, metadata: B) -> CaptureConstants:
        return CaptureConstants(
            max_reqs=metadata.num_reqs, max_query_len=metadata.max_query_len, max_seq_len=metadata.max_seq_len
        )

    def batch_fields(self, batch: AttentionBatch) -> dict[str, Any]:
        """Return the fields of `BatchMetadata` by name."""
        return {
            "num_reqs": batch.num_reqs,
            "num_tokens": batch.num_tokens,
            "max_query_len": batch.max_query_len,
            "max_seq_len": self.length_bound(batch),
            "query_start_loc": batch.query_start_loc,
            "seq_lens": batch.seq_lens,
            "block_table": batch.block_table,
            "slot_mapping": batch.slot_mapping,
            "tree_masks": batch.tree_masks,
        }

    def length_bound(self, batch: AttentionBatch) -> int:
        """Return the bound on seq_lens that the kernels are given."""
        return batch.max_seq_len
