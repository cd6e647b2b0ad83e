"""Metadata for kernels that read the shared state directly: views of it, and a launch fixed by the batch shape."""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass

import torch

from builders.batch import AttentionBatch
from builders.contract import AdvanceLevel, AdvanceSupport, GraphSupport
from builders.metadata import BatchMetadata, BatchMetadataBuilder
from builders.spec import AttentionSpec


@dataclass(frozen=True, kw_only=True, slots=True)
class PagedMetadata(BatchMetadata):
    """Views only: the kernels derive positions and windows from seq_lens."""

    num_splits: int
    """KV splits per request; a capture constant, since it sizes the launch."""


SPLIT_TOKENS = 256
"""KV tokens per split of batch-invariant attention. Without a window, splits begin at the same positions in every
batch."""
_PARTIAL_BYTES = 64 << 20
"""Memory budget for the fp32 partial outputs of all splits. Batch-invariant attention can exceed it."""


class PagedViewBuilder(BatchMetadataBuilder[PagedMetadata]):
    """Every position-dependent field is a view, so `advance` has nothing to refresh."""

    graph_support = GraphSupport.ALWAYS
    step_fields = ("seq_lens", "slot_mapping")

    @classmethod
    def advance_support(cls, spec: AttentionSpec, device: torch.device) -> AdvanceSupport:
        return AdvanceSupport(AdvanceLevel.IN_GRAPH, "all step fields are views of the shared device state")

    def build(self, batch: AttentionBatch, *, horizon: int = 0) -> PagedMetadata:
        self.check_horizon(batch, horizon)
        return PagedMetadata(**self.batch_fields(batch), num_splits=self._splits_of(batch))

    def advance(self, metadata: PagedMetadata) -> None:
        """Nothing to do: see step_fields."""

    def _splits_of(self, batch: AttentionBatch) -> int:
        if not self.spec.batch_invariant:
            return self.splits(batch)
        # Merging rounds once more than a single split does, so all lengths take the same form: merged, or with a window
        # one split, because splits begin at the first token a tile's first row sees, which differs between batches.
        return 1 if self.spec.sliding_window else max(2, -(-batch.max_seq_len // SPLIT_TOKENS))

    @abstractmethod
    def splits(self, batch: AttentionBatch) -> int:
        """Return num_splits from host constants only, never from the lengths of one batch."""


def splits_in_memory(batch: AttentionBatch, spec: AttentionSpec) -> int:
    """Return how many splits have room for their partial outputs; 0 if not even one has."""
    return _PARTIAL_BYTES // (4 * batch.num_tokens * spec.num_q_heads * spec.out_dim)
