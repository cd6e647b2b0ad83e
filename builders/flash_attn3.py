"""Metadata of FlashAttention-3: views, and the lengths that its kernel is given."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from builders.batch import AttentionBatch
from builders.contract import AdvanceLevel, AdvanceSupport, GraphSupport
from builders.kernels.prefix_lens import count_prefix
from builders.metadata import BatchMetadata, BatchMetadataBuilder
from builders.spec import AttentionSpec


@dataclass(frozen=True, kw_only=True, slots=True)
class FlashAttn3Metadata(BatchMetadata):
    """Views, and for trees a buffer of the builder with the lengths of their prefixes.

    kv_lens  int32 [num_reqs]   tokens that the kernel attends to: seq_lens, or for trees the tokens cached before them
    """

    num_splits: int
    """Parts that a request's KV tokens are divided into; a capture constant, since it sizes the launch."""
    kv_lens: torch.Tensor


class FlashAttn3Builder(BatchMetadataBuilder[FlashAttn3Metadata]):
    """Leaves out the scheduler's metadata, so the kernel prepares it on the device in every call.

    On an H200, making it once a round saves about 1 us of GPU time a call and costs 20 us of host and 22 us of GPU time
    a round; refreshing it in the graph costs 2 to 4 us more a step. Results are right even if it is stale.
    """

    graph_support = GraphSupport.ALWAYS
    step_fields = ("seq_lens", "slot_mapping", "kv_lens")

    _SPLITS = 32
    """A positive, constant count: with 0 the kernel's host code would choose by the lengths of the captured batch."""

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
            num_splits=self._SPLITS if batch.max_query_len == 1 else 1,
            kv_lens=batch.seq_lens if batch.tree_masks is None else self._prefix_lens[: batch.num_reqs],
        )
        self.advance(metadata)
        return metadata

    def advance(self, metadata: FlashAttn3Metadata) -> None:
        if metadata.tree_masks is not None:
            count_prefix(metadata.kv_lens, metadata.seq_lens, metadata.query_start_loc)

    def length_bound(self, batch: AttentionBatch) -> int:
        """The builder's own bound: given a small one, the kernel would drop its sliding window."""
        return self.max_seq_len
