"""Metadata of dense MLA in Triton: views of the shared state, split to fill the device."""

from __future__ import annotations

import torch

from builders.batch import AttentionBatch
from builders.contract import AdvanceLevel, AdvanceSupport
from builders.paged import PagedViewBuilder, num_sms
from builders.spec import AttentionSpec

_TOKENS_PER_SPLIT = 32
_MOST_SPLITS = 128
_ROWS_PER_PROGRAM = 64
"""Query tokens times heads that one program takes at most."""


class TritonMlaBuilder(PagedViewBuilder):
    """Splits each request's KV tokens so that a launch gives every multiprocessor one program, measured as fastest."""

    @classmethod
    def advance_support(cls, spec: AttentionSpec, device: torch.device) -> AdvanceSupport:
        return AdvanceSupport(AdvanceLevel.IN_GRAPH, "all step fields are views of the shared device state")

    def splits(self, batch: AttentionBatch) -> int:
        tiles = batch.num_reqs * -(-batch.max_query_len * self.spec.num_q_heads // _ROWS_PER_PROGRAM)
        wanted = num_sms(self.device) // tiles
        return max(1, min(wanted, -(-batch.max_seq_len // _TOKENS_PER_SPLIT), _MOST_SPLITS))
