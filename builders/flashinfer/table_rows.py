"""Rows of a block table in the form FlashInfer reads pages: one list, and where each request starts in it."""

from __future__ import annotations

from typing import NamedTuple

import torch

from builders.errors import require


class TableRows(NamedTuple):
    """Wrapper arguments that describe a block table's rows in place: nothing is copied, and lengths do not matter.

    indptr         int32 [num_reqs + 1]   on the host: request r's pages start at pages[indptr[r]]
    pages          int32 [n]              a view of the table, including the gaps between its rows
    last_page_len  int32 [num_reqs]       on the table's device, for `replan` to write
    """

    indptr: torch.Tensor
    pages: torch.Tensor
    last_page_len: torch.Tensor

    @classmethod
    def of(cls, block_table: torch.Tensor) -> TableRows:
        """block_table: int32 [num_reqs, max_pages], with any row stride. Raises BatchError as `row_stride` does."""
        num_reqs, stride = block_table.shape[0], row_stride(block_table)
        return cls(
            torch.arange(num_reqs + 1, dtype=torch.int32, device="cpu") * stride,
            block_table.as_strided((num_reqs * stride,), (1,)),
            torch.ones(num_reqs, dtype=torch.int32, device=block_table.device),
        )


def row_stride(block_table: torch.Tensor) -> int:
    """Return the number of entries from one row of a block table to the next.

    Raises BatchError if FlashInfer cannot read the table as one list of pages: rows whose own elements are strided,
    rows that overlap, or a last row after which the memory ends before the next would start.
    """
    num_reqs, width = block_table.shape
    stride = width if num_reqs == 1 else block_table.stride(0)
    available = block_table.untyped_storage().nbytes() // block_table.element_size() - block_table.storage_offset()
    require(
        block_table.stride(1) == 1 and stride >= width and num_reqs * stride <= available,
        f"FlashInfer reads the block table as one list of pages, got rows of {width} with strides "
        f"{block_table.stride()} in memory for {available} entries; a copy would not follow its changes. Pass rows of "
        "one table, from its first column.",
    )
    return stride
