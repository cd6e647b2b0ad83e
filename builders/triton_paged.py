"""Metadata for paged attention in Triton: views, and how many splits a request's KV tokens get."""

from __future__ import annotations

from typing import ClassVar

from builders.batch import AttentionBatch
from builders.devices import room_of
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
    _RESIDENT: ClassVar = {16: 4, 32: 3, 64: 2}
    """Programs for which an SM has registers, by the query rows of a tile (heads of 128 dims, compiled for an H200)."""

    def splits(self, batch: AttentionBatch) -> int:
        visible = min(batch.max_seq_len, self.spec.sliding_window or batch.max_seq_len)
        rows, sms = batch.max_query_len * self.spec.group_size, room_of(self.device).num_sms
        tile = max(16, min(64, next_power_of_2(rows)))
        programs = batch.num_reqs * self.spec.num_kv_heads * cdiv(rows, tile)
        splits = cdiv(visible, self._TOKENS_PER_SPLIT)
        if tile == 16 and 2 * programs * splits <= sms:
            splits = cdiv(visible, self._TOKENS_PER_SHORT_SPLIT)
        return max(1, min(self._resident(tile) * sms // programs, splits, 64, splits_in_memory(batch, self.spec)))

    def _resident(self, tile: int) -> int:
        """Return how many programs with so many query rows an SM holds at once: it has registers for them, and shared
        memory for a block of keys and values, the queries and their weights."""
        room, size = room_of(self.device), self.spec.dtype.itemsize
        query, value = (next_power_of_2(dim) * size for dim in (self.spec.head_dim, self.spec.out_dim))
        tokens = 32 if tile == 64 and not room.wgmma else 64  # of a block, as the kernel chooses
        shared = min(32 << 10, tokens * (query + value)) + tile * (query + tokens * size)
        # Values of 128 bytes need no more registers in any tile.
        registers = self._RESIDENT[tile if value > 128 else 16]
        return max(1, min(registers, room.shared_memory // shared))
