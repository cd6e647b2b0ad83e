"""Metadata for FlashAttention-3: views of the batch, and the lengths that the kernel reads.

See attn_backends/flash_attn3.py and flash_attn3_mla.py, which use it.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from builders.batch import AttentionBatch
from builders.contract import AdvanceLevel, AdvanceSupport, GraphSupport
from builders.devices import num_sms
from builders.kernels.prefix_lens import count_prefix
from builders.metadata import BatchMetadata, BatchMetadataBuilder
from builders.paged import splits_in_memory
from builders.spec import AttentionSpec


@dataclass(frozen=True, kw_only=True, slots=True)
class FlashAttn3Metadata(BatchMetadata):
    """Views of the batch; for trees, kv_lens is a buffer of the builder that holds the prefix lengths.

    kv_lens  int32 [num_reqs]   tokens that the kernel attends to: seq_lens, or for trees the cached prefix
    """

    num_splits: int
    """KV splits per request; a capture constant, since it sizes the launch."""
    kv_lens: torch.Tensor


class FlashAttn3Builder(BatchMetadataBuilder[FlashAttn3Metadata]):
    """Passes no scheduler metadata, so the kernel computes it on the device in every call.

    On an H200, computing it once per round would save about 1 us of GPU time per call, and cost 20 us of host time and
    22 us of GPU time per round. Refreshing it in the graph would cost 2 to 4 us more per step. Stale scheduler metadata
    would not change the results.
    """

    graph_support = GraphSupport.ALWAYS
    step_fields = ("seq_lens", "slot_mapping", "kv_lens")

    _MAX_SPLITS = 32
    """The limit passed to the kernel, which picks each request's splits by its length, on the device, to fill it."""
    _TILE_ROWS = 64
    """Query rows of the kernel's smallest tile. A row is one head of a group, for one token."""

    def allocate(self) -> None:
        self._prefix_lens = torch.zeros(self.max_reqs, dtype=torch.int32, device=self.device)

    @classmethod
    def advance_support(cls, spec: AttentionSpec, device: torch.device) -> AdvanceSupport:
        lengths = "prefixes of trees are counted on the device" if spec.tree else "step fields are views"
        return AdvanceSupport(AdvanceLevel.IN_GRAPH, f"{lengths}; the kernel schedules itself in each call")

    def build(self, batch: AttentionBatch, *, horizon: int = 0) -> FlashAttn3Metadata:
        self.check_horizon(batch, horizon)
        metadata = FlashAttn3Metadata(
            **self.batch_fields(batch),
            num_splits=self._splits_of(batch),
            kv_lens=batch.seq_lens if batch.tree_masks is None else self._prefix_lens[: batch.num_reqs],
        )
        self.advance(metadata)
        return metadata

    def advance(self, metadata: FlashAttn3Metadata) -> None:
        if metadata.tree_masks is not None:
            count_prefix(metadata.kv_lens, metadata.seq_lens, metadata.query_start_loc)

    def length_bound(self, batch: AttentionBatch) -> int:
        """Return the builder's own bound: with a small one the kernel would drop its sliding window."""
        return self.max_seq_len

    def _splits_of(self, batch: AttentionBatch) -> int:
        """Compute num_splits from the batch shape only. Never 0: the kernel's host code would use the lengths at
        capture.

        Splits fill a device that has few tiles, and balance requests of different lengths. If each request has several
        tiles and they fill the device, splits only add partial outputs to write: 6 to 17 % more time on an H100.
        """
        row_tiles = -(-batch.max_query_len * self.spec.group_size // self._TILE_ROWS)
        tiles = batch.num_reqs * self.spec.num_kv_heads * row_tiles
        if row_tiles > 1 and 4 * tiles >= 3 * num_sms(self.device):
            return 1
        return max(1, min(splits_in_memory(batch, self.spec), self._MAX_SPLITS))
