"""Metadata for paged attention in Triton: views, and how many splits a request's KV tokens get."""

from __future__ import annotations

from builders.batch import AttentionBatch
from builders.devices import num_sms
from builders.paged import PagedViewBuilder, splits_in_memory


class TritonPagedBuilder(PagedViewBuilder):
    """Splits each request's KV tokens so that a decode launch fills the device a few times over."""

    _TOKENS_PER_SPLIT = 64
    """Shorter splits cost more in the merge than they gain (measured on an H200, see reports)."""
    _TOKENS_PER_SHORT_SPLIT = 32
    """Used instead if splits of 64 would leave half of the device idle and a KV head's query rows fit one tile."""
    _ROWS_PER_TILE = 16
    _WAVES = 4
    """Programs per SM that a decode launch aims for."""

    def splits(self, batch: AttentionBatch) -> int:
        visible = min(batch.max_seq_len, self.spec.sliding_window or batch.max_seq_len)
        heads, sms = batch.num_reqs * self.spec.num_kv_heads, num_sms(self.device)
        splits = -(-visible // self._TOKENS_PER_SPLIT)
        rows = batch.max_query_len * self.spec.group_size
        if rows <= self._ROWS_PER_TILE and 2 * heads * splits <= sms:
            splits = -(-visible // self._TOKENS_PER_SHORT_SPLIT)
        return max(1, min(self._WAVES * sms // heads, splits, 64, splits_in_memory(batch, self.spec)))
