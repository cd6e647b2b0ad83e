"""Implements the builder contract by calling an engine's build and in-place update."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch

from builders import (
    AdvanceLevel,
    AdvanceSupport,
    AttentionBatch,
    AttentionSpec,
    CaptureConstants,
    GraphSupport,
    MetadataBuilder,
)
from wrapped_engine import engine


@dataclass(frozen=True, kw_only=True, slots=True)
class WrappedMetadata:
    """The engine's metadata with its tensors as fields, so the kit compares what a graph would hold on to.

    If the engine's update puts new tensors into its own object instead of new content into these, these are stale.
    query_start_loc int32 [num_reqs + 1], seq_lens int32 [num_reqs], block_table int32 [num_reqs, max_pages],
    slot_mapping int64 [num_tokens]: views of the batch. kv_indptr int32 [num_reqs + 1], kv_indices int32
    [max_reqs * max_pages], last_page_len int32 [num_reqs]: the engine's buffers.
    """

    num_reqs: int
    num_tokens: int
    max_query_len: int
    max_pages: int
    query_start_loc: torch.Tensor
    seq_lens: torch.Tensor
    block_table: torch.Tensor
    slot_mapping: torch.Tensor
    kv_indptr: torch.Tensor
    kv_indices: torch.Tensor
    last_page_len: torch.Tensor

    def for_engine(self) -> engine.PagedMetadata:
        """Return the object that the engine's own code takes."""
        return engine.PagedMetadata(
            query_start_loc=self.query_start_loc,
            seq_lens=self.seq_lens,
            block_table=self.block_table,
            slot_mapping=self.slot_mapping,
            kv_indptr=self.kv_indptr,
            kv_indices=self.kv_indices,
            last_page_len=self.last_page_len,
        )


class WrappedBuilder(MetadataBuilder[WrappedMetadata]):
    """Passes the engine a batch in its format and repeats the engine's claim unverified: the kit tests the claim."""

    engine_builder: ClassVar[type[engine.PagedMetadataBuilder]] = engine.PagedMetadataBuilder
    graph_support = GraphSupport.UNIFORM_BATCH
    step_fields = ("seq_lens", "slot_mapping", "kv_indptr", "kv_indices", "last_page_len")

    def allocate(self) -> None:
        config = engine.EngineConfig(max_num_seqs=self.max_reqs, max_model_len=self.max_seq_len)
        cache = engine.KVCacheSpec(block_size=self.spec.page_size)
        self._inner = self.engine_builder(cache, ["draft"], config, self.device)

    @classmethod
    def advance_support(cls, spec: AttentionSpec, device: torch.device) -> AdvanceSupport:
        if cls.engine_builder.supports_draft_decode_metadata_update:
            return AdvanceSupport(AdvanceLevel.IN_GRAPH, "the engine claims to update draft metadata in place")
        return AdvanceSupport(AdvanceLevel.REBUILD, "the engine rebuilds draft metadata for every step")

    def build(self, batch: AttentionBatch, *, horizon: int = 0) -> WrappedMetadata:
        self.check_horizon(batch, horizon)
        common = engine.CommonAttentionMetadata(
            query_start_loc=batch.query_start_loc,
            seq_lens=batch.seq_lens,
            num_reqs=batch.num_reqs,
            num_actual_tokens=batch.num_tokens,
            max_query_len=batch.max_query_len,
            max_seq_len=batch.max_seq_len,
            block_table_tensor=batch.block_table,
            slot_mapping=batch.slot_mapping,
        )
        inner = self._inner.build(0, common)
        return WrappedMetadata(
            num_reqs=batch.num_reqs,
            num_tokens=batch.num_tokens,
            max_query_len=batch.max_query_len,
            max_pages=-(-self.max_seq_len // self.spec.page_size),
            query_start_loc=inner.query_start_loc,
            seq_lens=inner.seq_lens,
            block_table=inner.block_table,
            slot_mapping=inner.slot_mapping,
            kv_indptr=inner.kv_indptr,
            kv_indices=inner.kv_indices,
            last_page_len=inner.last_page_len,
        )

    def advance(self, metadata: WrappedMetadata) -> None:
        self._inner.update_draft_decode_metadata(metadata.for_engine())

    def capture_constants(self, metadata: WrappedMetadata) -> CaptureConstants:
        return CaptureConstants(
            max_reqs=metadata.num_reqs, max_query_len=metadata.max_query_len, max_seq_len=self.max_seq_len
        )


class DriftingBuilder(WrappedBuilder):
    """The same wrapper over the engine's builder with the wrong update."""

    engine_builder = engine.DriftingMetadataBuilder
