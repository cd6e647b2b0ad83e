"""Metadata of sparse sliding-window attention: for every query token, the cache slots it sees, as a list.

See attn_backends/sparse_swa_mla.py, which uses it; builders/flashmla_sparse.py adds a schedule to it.

Shape legend: T query tokens, W window width.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from builders.batch import NO_SLOT, AttentionBatch
from builders.contract import AdvanceLevel, AdvanceSupport, GraphSupport
from builders.errors import BatchError
from builders.kernels.list_window_slots import ListWindowSlots, list_window_slots
from builders.metadata import BatchMetadata, BatchMetadataBuilder
from builders.spec import AttentionSpec

_LIST_STEP = 128
"""List widths are multiples of this: the largest step that a kernel reading them requires (FlashMLA)."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SparseWindowMetadata(BatchMetadata):
    """Query token t sees the KV in the slots window_indices[t, : window_lens[t]], in position order.

    positions       int64 [T]      a view of the batch
    window_indices  int32 [T, W]   slots page * page_size + offset, then -1
    window_lens     int32 [T]      0 for a padding token, or if its request became inert

    The lists are persistent buffers of the builder.
    """

    positions: torch.Tensor
    window_indices: torch.Tensor
    window_lens: torch.Tensor


class SparseWindowBuilder(BatchMetadataBuilder[SparseWindowMetadata]):
    """Lists every token's window with one kernel; W is the window rounded up to a multiple of 128."""

    graph_support = GraphSupport.ALWAYS
    step_fields = ("seq_lens", "positions", "slot_mapping", "window_indices", "window_lens")

    def allocate(self) -> None:
        """Allocate the lists. Raises BatchError for a spec without a sliding window."""
        if self.spec.sliding_window is None:
            raise BatchError(
                "a list of slots needs a sliding window, got sliding_window=None; a list of all tokens has no bound, "
                "so no builder was made. Give the spec a window or choose a dense backend."
            )
        self.window = self.spec.sliding_window
        self.width = -(-self.window // _LIST_STEP) * _LIST_STEP
        self._indices = torch.full((self.max_tokens, self.width), NO_SLOT, dtype=torch.int32, device=self.device)
        self._lens = torch.zeros(self.max_tokens, dtype=torch.int32, device=self.device)

    @classmethod
    def advance_support(cls, spec: AttentionSpec, device: torch.device) -> AdvanceSupport:
        return AdvanceSupport(
            AdvanceLevel.IN_GRAPH, "window lists are recomputed from positions and block table by one kernel"
        )

    def build(self, batch: AttentionBatch, *, horizon: int = 0) -> SparseWindowMetadata:
        self.check_horizon(batch, horizon)
        metadata = self.metadata_of(batch)
        self.advance(metadata)
        return metadata

    def metadata_of(self, batch: AttentionBatch) -> SparseWindowMetadata:
        """Return the metadata of a batch before its lists are written."""
        return SparseWindowMetadata(**self.batch_fields(batch))

    def batch_fields(self, batch: AttentionBatch) -> dict[str, Any]:
        return {
            **super().batch_fields(batch),
            "positions": batch.positions,
            "window_indices": self._indices[: batch.num_tokens],
            "window_lens": self._lens[: batch.num_tokens],
        }

    def advance(self, metadata: SparseWindowMetadata) -> None:
        arguments = ListWindowSlots(
            window_indices=metadata.window_indices,
            window_lens=metadata.window_lens,
            positions=metadata.positions,
            seq_lens=metadata.seq_lens,
            query_start_loc=metadata.query_start_loc,
            block_table=metadata.block_table,
            window=self.window,
            page_size=self.spec.page_size,
        )
        list_window_slots(*arguments)
