"""Metadata of FlashAttention-3: views of the shared state, and the host constants its kernel bakes in."""

from __future__ import annotations

import torch

from builders.batch import AttentionBatch
from builders.contract import AdvanceLevel, AdvanceSupport
from builders.paged import PagedViewBuilder
from builders.spec import AttentionSpec

_SPLITS = 32
"""A positive, constant count: with 0 the kernel's host code would choose by the lengths of the captured batch."""


class FlashAttn3Builder(PagedViewBuilder):
    """The scheduler's own metadata is left out: the kernel then prepares it on the device in every call.

    Measured on an H200, made once a round instead it saves about 1 us of GPU time a call and costs 20 us of host and
    22 us of GPU time a round; refreshed in the graph it costs 2 to 4 us more a step. Stale, it is right all the same.
    """

    @classmethod
    def advance_support(cls, spec: AttentionSpec, device: torch.device) -> AdvanceSupport:
        return AdvanceSupport(AdvanceLevel.IN_GRAPH, "step fields are views; the kernel schedules itself in each call")

    def length_bound(self, batch: AttentionBatch) -> int:
        """The builder's own bound: told a small one, the kernel would drop its sliding window."""
        return self.max_seq_len

    def splits(self, batch: AttentionBatch) -> int:
        return _SPLITS if batch.max_query_len == 1 else 1
