"""Metadata for kernels that read the shared state directly: views of it, and a launch fixed by the batch shape."""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass
from functools import cache

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


class TritonPagedBuilder(PagedViewBuilder):
    """Splits each request's KV tokens so that a decode launch fills the device a few times over."""

    _TOKENS_PER_SPLIT = 64
    """Shorter splits cost more in the merge than they gain (measured on an H200, see reports)."""
    _TOKENS_PER_SHORT_SPLIT = 32
    """Used instead if splits of 64 would leave half of the device idle and a KV head's query rows fit one tile."""
    _ROWS_PER_TILE = 16
    _WAVES = 4
    """Programs per SM that a decode launch aims for."""

    def splits(self, batch: AttentionBatch) -> int:
        visible = min(batch.max_seq_len, self.spec.sliding_window or batch.max_seq_len)
        heads, sms = batch.num_reqs * self.spec.num_kv_heads, num_sms(self.device)
        splits = -(-visible // self._TOKENS_PER_SPLIT)
        rows = batch.max_query_len * self.spec.group_size
        if rows <= self._ROWS_PER_TILE and 2 * heads * splits <= sms:
            splits = -(-visible // self._TOKENS_PER_SHORT_SPLIT)
        return max(1, min(self._WAVES * sms // heads, splits, 64, splits_in_memory(batch, self.spec)))


class TritonMlaBuilder(PagedViewBuilder):
    """Splits each request's KV tokens so that a launch has one program per SM, which measured fastest."""

    _TOKENS_PER_SPLIT = 32
    _MAX_SPLITS = 128
    _ROWS_PER_PROGRAM = 64
    """Maximum query tokens times heads per program."""

    def splits(self, batch: AttentionBatch) -> int:
        tiles = batch.num_reqs * -(-batch.max_query_len * self.spec.num_q_heads // self._ROWS_PER_PROGRAM)
        wanted = num_sms(self.device) // tiles
        return max(1, min(wanted, -(-batch.max_seq_len // self._TOKENS_PER_SPLIT), self._MAX_SPLITS))


def splits_in_memory(batch: AttentionBatch, spec: AttentionSpec) -> int:
    """Return how many splits have room for their partial outputs; 0 if not even one has."""
    return _PARTIAL_BYTES // (4 * batch.num_tokens * spec.num_q_heads * spec.out_dim)


@cache
def num_sms(device: torch.device) -> int:
    """Return the SMs of a device; a few on the CPU, so that runs there take the split path too."""
    if device.type == "cuda":
        return int(torch.cuda.get_device_properties(device).multi_processor_count)
    return 8
