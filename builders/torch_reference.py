"""Metadata of the reference backend: for every query token, the explicit range of KV tokens it sees."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from builders.batch import AttentionBatch
from builders.contract import AdvanceLevel, AdvanceSupport, GraphSupport
from builders.metadata import BatchMetadata, BatchMetadataBuilder
from builders.spec import AttentionSpec


@dataclass(frozen=True, kw_only=True, slots=True)
class ReferenceMetadata(BatchMetadata):
    """Query token t belongs to request token_to_req[t] and sees its KV tokens kv_start[t] .. kv_end[t] - 1.

    positions     int64 [num_tokens]   a view of the batch
    token_to_req  int64 [num_tokens]
    kv_start      int32 [num_tokens]
    kv_end        int32 [num_tokens]   a padding token sees the empty range 0 .. -1

    The last three are persistent buffers of the builder.
    """

    positions: torch.Tensor
    token_to_req: torch.Tensor
    kv_start: torch.Tensor
    kv_end: torch.Tensor


class ReferenceBuilder(BatchMetadataBuilder[ReferenceMetadata]):
    """Computes every token's visible range in plain torch."""

    graph_support = GraphSupport.ALWAYS
    step_fields = ("seq_lens", "positions", "slot_mapping", "kv_start", "kv_end")

    def allocate(self) -> None:
        self._token_to_req = torch.zeros(self.max_tokens, dtype=torch.int64, device=self.device)
        self._kv_start = torch.zeros(self.max_tokens, dtype=torch.int32, device=self.device)
        self._kv_end = torch.zeros(self.max_tokens, dtype=torch.int32, device=self.device)

    @classmethod
    def advance_support(cls, spec: AttentionSpec, device: torch.device) -> AdvanceSupport:
        return AdvanceSupport(AdvanceLevel.IN_GRAPH, "visible ranges are recomputed from positions on the device")

    def build(self, batch: AttentionBatch, *, horizon: int = 0) -> ReferenceMetadata:
        self.check_horizon(batch, horizon)
        metadata = ReferenceMetadata(
            **self.batch_fields(batch),
            positions=batch.positions,
            token_to_req=self._token_to_req[: batch.num_tokens],
            kv_start=self._kv_start[: batch.num_tokens],
            kv_end=self._kv_end[: batch.num_tokens],
        )
        self.advance(metadata)
        return metadata

    def advance(self, metadata: ReferenceMetadata) -> None:
        starts = metadata.query_start_loc
        token = torch.arange(metadata.num_tokens, dtype=starts.dtype, device=starts.device)
        row = torch.searchsorted(starts[1:], token, right=True).clamp_(max=metadata.num_reqs - 1)
        # A length beyond the bound may lack pages, so it makes the row inert, like length 0.
        length = metadata.seq_lens[row]
        live = (length > 0) & (length <= metadata.max_seq_len) & (token < starts[-1])
        end = torch.where(live, metadata.positions + 1, 0)
        metadata.token_to_req.copy_(row)
        # In trees and non-causal blocks the range does not end at the token itself.
        ends_at_own = self.spec.causal and metadata.tree_masks is None
        metadata.kv_end.copy_(end if ends_at_own else torch.where(live, length, 0))
        window = self.spec.sliding_window
        metadata.kv_start.copy_(torch.zeros_like(end) if window is None else (end - window).clamp_(min=0))
