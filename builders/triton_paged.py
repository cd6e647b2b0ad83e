"""Metadata for paged attention in Triton: views, and how many splits a request's KV tokens get."""

from __future__ import annotations

from builders.batch import AttentionBatch
from builders.devices import room_of
from builders.kernels.kv_blocks import block_of
from builders.kernels.sizes import cdiv, next_power_of_2
from builders.paged import PagedViewBuilder, splits_in_memory


class TritonPagedBuilder(PagedViewBuilder):
    """Splits each request's KV tokens so that the programs of a launch fill the device once.

    A few more programs than the device holds would run when the others are done, on a device that is mostly idle.
    """

    _TOKENS_PER_SPLIT = 64
    """Shorter splits cost more in the merge than they gain (measured on an H200, see reports)."""
    _TOKENS_PER_SHORT_SPLIT = 32
    """Used instead if splits of 64 would leave half of the device idle and a KV head's query rows fit one tile."""
    _MOST_SPLITS = 128

    def splits(self, batch: AttentionBatch) -> int:
        visible = min(batch.max_seq_len, self.spec.sliding_window or batch.max_seq_len)
        rows, sms = batch.max_query_len * self.spec.group_size, room_of(self.device).num_sms
        tile = max(16, min(64, next_power_of_2(rows)))
        programs = batch.num_reqs * self.spec.num_kv_heads * cdiv(rows, tile)
        splits = cdiv(visible, self._TOKENS_PER_SPLIT)
        if tile == 16 and 2 * programs * splits <= sms:
            splits = cdiv(visible, self._TOKENS_PER_SHORT_SPLIT)
        size = self.spec.dtype.itemsize
        row_bytes = size * (next_power_of_2(self.spec.head_dim) + next_power_of_2(self.spec.out_dim))
        resident = block_of(tile, row_bytes, size, room_of(self.device)).programs * sms
        return max(1, min(resident // programs, splits, self._MOST_SPLITS, splits_in_memory(batch, self.spec)))
