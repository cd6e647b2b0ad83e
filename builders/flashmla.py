"""Metadata for FlashMLA's dense decode: views, and the calls that a batch is split into."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch

from builders.batch import AttentionBatch
from builders.contract import AdvanceLevel, AdvanceSupport, GraphSupport
from builders.metadata import BatchMetadata, BatchMetadataBuilder
from builders.spec import AttentionSpec


class QueryChunk(NamedTuple):
    """Query tokens start to end of a batch, all in one row; tokens_after query tokens follow there."""

    row: int
    start: int
    end: int
    tokens_after: int


@dataclass(frozen=True, kw_only=True, slots=True)
class FlashMlaMetadata(BatchMetadata):
    """Views of the batch if one call serves it (few query tokens, as many in each row); otherwise one call per chunk.

    kv_lens  int32 [num_reqs], or [number of chunks]   tokens that a call attends to: seq_lens, or those of a chunk
    """

    chunks: tuple[QueryChunk, ...]
    """Empty if one call serves the batch."""
    kv_lens: torch.Tensor


class FlashMlaBuilder(BatchMetadataBuilder[FlashMlaMetadata]):
    """Makes no schedule, so the kernel makes one on the device in every call.

    A schedule is valid only for the lengths it was made for. Its layout differs between releases, and FlashMLA makes
    one only together with attention, so nothing else could refresh it.
    """

    graph_support = GraphSupport.UNIFORM_BATCH
    step_fields = ("seq_lens", "slot_mapping", "kv_lens")

    _MAX_TOKENS = 128
    """Query tokens of a row per call: fp32 partial results take 0.5 MB per token with 128 heads."""

    def allocate(self) -> None:
        self._kv_lens = torch.zeros(self.max_tokens, dtype=torch.int32, device=self.device)

    @classmethod
    def advance_support(cls, spec: AttentionSpec, device: torch.device) -> AdvanceSupport:
        return AdvanceSupport(AdvanceLevel.IN_GRAPH, "step fields are views; the kernel schedules itself in each call")

    def build(self, batch: AttentionBatch, *, horizon: int = 0) -> FlashMlaMetadata:
        self.check_horizon(batch, horizon)
        chunks = () if batch.uniform and batch.max_query_len <= self._MAX_TOKENS else self._chunks_of(batch)
        metadata = FlashMlaMetadata(
            **self.batch_fields(batch),
            chunks=chunks,
            kv_lens=self._kv_lens[: len(chunks)] if chunks else batch.seq_lens,
        )
        self.advance(metadata)
        return metadata

    def advance(self, metadata: FlashMlaMetadata) -> None:
        lens = metadata.kv_lens
        for i, chunk in enumerate(metadata.chunks):
            seen = metadata.seq_lens[chunk.row : chunk.row + 1]
            torch.sub(seen, chunk.tokens_after if self.spec.causal else 0, out=lens[i : i + 1])
        if metadata.chunks:
            lens.clamp_(min=0)

    def _chunks_of(self, batch: AttentionBatch) -> tuple[QueryChunk, ...]:
        """Split the rows into chunks. Syncs with the device if query lengths differ and the host does not know them."""
        known = (batch.max_query_len,) * batch.num_reqs if batch.uniform else batch.host_query_lens
        lens = known or batch.query_start_loc.diff().tolist()
        chunks, start = [], 0
        for row, query_len in enumerate(lens):
            end = start + query_len
            for first in range(start, end, self._MAX_TOKENS):
                stop = min(first + self._MAX_TOKENS, end)
                chunks.append(QueryChunk(row, first, stop, end - stop))
            start = end
        return tuple(chunks)
