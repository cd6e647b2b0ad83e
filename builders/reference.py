"""Metadata of the reference backend: for every query token, the range of KV tokens it sees, spelled out."""

from __future__ import annotations

from dataclasses import dataclass

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


@dataclass(frozen=True, kw_only=True, slots=True)
class ReferenceMetadata:
    """Query token t belongs to request token_to_req[t] and sees its KV tokens kv_start[t] .. kv_end[t] - 1.

    query_start_loc int32 [num_reqs + 1], seq_lens int32 [num_reqs], positions int64 [num_tokens],
    block_table int32 [num_reqs, max_pages], slot_mapping int64 [num_tokens]: views of the batch.
    token_to_req int64, kv_start int32, kv_end int32, each [num_tokens]: the builder's persistent buffers; a padding
    token sees the empty range 0 .. -1.
    """

    num_reqs: int
    num_tokens: int
    max_query_len: int
    max_seq_len: int
    query_start_loc: torch.Tensor
    seq_lens: torch.Tensor
    positions: torch.Tensor
    block_table: torch.Tensor
    slot_mapping: torch.Tensor
    token_to_req: torch.Tensor
    kv_start: torch.Tensor
    kv_end: torch.Tensor


class ReferenceBuilder(MetadataBuilder[ReferenceMetadata]):
    """Derives every token's visible range with plain torch."""

    graph_support = GraphSupport.ALWAYS
    step_fields = ("seq_lens", "positions", "slot_mapping", "kv_start", "kv_end")

    def __init__(
        self, spec: AttentionSpec, device: torch.device, *, max_reqs: int, max_tokens: int, max_seq_len: int
    ) -> None:
        super().__init__(spec, device, max_reqs=max_reqs, max_tokens=max_tokens, max_seq_len=max_seq_len)
        self._token_to_req = torch.zeros(max_tokens, dtype=torch.int64, device=device)
        self._kv_start = torch.zeros(max_tokens, dtype=torch.int32, device=device)
        self._kv_end = torch.zeros(max_tokens, dtype=torch.int32, device=device)

    @classmethod
    def advance_support(cls, spec: AttentionSpec, device: torch.device) -> AdvanceSupport:
        return AdvanceSupport(AdvanceLevel.IN_GRAPH, "visible ranges are recomputed from positions on the device")

    def build(self, batch: AttentionBatch, *, horizon: int = 0) -> ReferenceMetadata:
        self.check_horizon(batch, horizon)
        metadata = ReferenceMetadata(
            num_reqs=batch.num_reqs,
            num_tokens=batch.num_tokens,
            max_query_len=batch.max_query_len,
            max_seq_len=batch.max_seq_len,
            query_start_loc=batch.query_start_loc,
            seq_lens=batch.seq_lens,
            positions=batch.positions,
            block_table=batch.block_table,
            slot_mapping=batch.slot_mapping,
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
        live = (metadata.seq_lens[row] > 0) & (token < starts[-1])
        end = torch.where(live, metadata.positions + 1, 0)
        metadata.token_to_req.copy_(row)
        metadata.kv_end.copy_(end)
        window = self.spec.sliding_window
        metadata.kv_start.copy_(torch.zeros_like(end) if window is None else (end - window).clamp_(min=0))

    def capture_constants(self, metadata: ReferenceMetadata) -> CaptureConstants:
        return CaptureConstants(
            max_reqs=metadata.num_reqs,
            max_query_len=metadata.max_query_len,
            max_seq_len=metadata.max_seq_len,
        )
