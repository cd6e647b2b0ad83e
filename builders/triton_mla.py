"""Metadata for dense latent attention in Triton: views, and how many splits a request's KV tokens get."""

from __future__ import annotations

from builders.batch import AttentionBatch
from builders.devices import num_sms
from builders.paged import PagedViewBuilder


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
