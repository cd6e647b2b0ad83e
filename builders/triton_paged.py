"""Metadata of the Triton paged backend: views of the shared state, split to fill the device."""

from __future__ import annotations

import torch

from builders.batch import AttentionBatch
from builders.contract import AdvanceLevel, AdvanceSupport
from builders.paged import PagedViewBuilder, num_sms
from builders.spec import AttentionSpec

_TOKENS_PER_SPLIT = 64
"""A split shorter than this costs more in the merge than it gains (measured on an H200, see reports)."""
_TOKENS_OF_FEW = 32
"""The same where such splits would leave half of the device idle, and a KV head's query rows fill one tile at most."""
_ROWS_OF_A_TILE = 16
_WAVES = 4
"""Programs per multiprocessor that a decode launch aims at."""


class TritonPagedBuilder(PagedViewBuilder):
    """Splits each request's KV tokens so that a decode launch fills the device a few times over."""

    @classmethod
    def advance_support(cls, spec: AttentionSpec, device: torch.device) -> AdvanceSupport:
        return AdvanceSupport(AdvanceLevel.IN_GRAPH, "all step fields are views of the shared device state")

    def splits(self, batch: AttentionBatch) -> int:
        visible = min(batch.max_seq_len, self.spec.sliding_window or batch.max_seq_len)
        heads, processors = batch.num_reqs * self.spec.num_kv_heads, num_sms(self.device)
        splits = -(-visible // _TOKENS_PER_SPLIT)
        rows = batch.max_query_len * self.spec.num_q_heads // self.spec.num_kv_heads
        if rows <= _ROWS_OF_A_TILE and 2 * heads * splits <= processors:
            splits = -(-visible // _TOKENS_OF_FEW)
        return max(1, min(_WAVES * processors // heads, splits, 64))
