"""Attention in plain torch from the inputs of SGLang's kernels, each as the single launch it is on a device."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise

import torch
from torch import Tensor

from engine_kits.launches import launch

Rows = Callable[[], Sequence[Tensor]]
"""Reads, when the kernel runs, the slots that each row attends to."""


def attend(
    out: Tensor, query: Tensor, key: Tensor, value: Tensor, rows: Rows, read: Sequence[Tensor], scale: float
) -> None:
    """Fill out [rows, heads, value dim] with attention of query [rows, heads, dim] over slots of key and value.

    key, value: [slots, kv heads, dim]. read: the tensors that `rows` reads.
    """
    launch(_attend, out, query, key, value, rows, read, scale)


def _attend(
    out: Tensor, query: Tensor, key: Tensor, value: Tensor, rows: Rows, read: Sequence[Tensor], scale: float
) -> None:
    group = query.shape[1] // key.shape[1]
    for row, slots in enumerate(rows()):
        seen, brought = (of[slots.long()].float().repeat_interleave(group, 1) for of in (key, value))
        weights = (torch.einsum("hd,thd->ht", query[row].float(), seen) * scale).softmax(-1)
        out[row] = torch.einsum("ht,thd->hd", weights, brought)


def listed(ends: Tensor, slots: Tensor) -> list[Tensor]:
    """Return per row r the slots slots[ends[r] : ends[r + 1]].

    A kernel gets only the address of the slots, so they can extend past the view that a capture had.
    """
    edges, slots = ends.tolist(), from_its_address(slots)
    return [slots[first:last] for first, last in pairwise(edges)]


def in_pages(table: Tensor, lengths: Tensor, page_size: int, window: int = 0) -> list[Tensor]:
    """Return per row r the first lengths[r] slots of its pages, or the last `window` of them."""
    slots = (table.long()[:, :, None] * page_size + torch.arange(page_size)).flatten(1)
    return [
        row[max(0, length - window) if window else 0 : length]
        for row, length in zip(slots, lengths.tolist(), strict=False)
    ]


def used_pages(table: Tensor, lengths: Tensor, live: int, page_size: int) -> Tensor:
    """Return the pages of the first `live` rows, concatenated, without those past each row's length."""
    used = ((lengths + page_size - 1) // page_size).tolist()
    return torch.cat([table[row, : used[row]] for row in range(live)])


def from_its_address(tensor: Tensor) -> Tensor:
    """Return the tensor and all memory behind it as one row: what a kernel can read from its address."""
    behind = tensor.untyped_storage().nbytes() // tensor.itemsize - tensor.storage_offset()
    return tensor.as_strided((behind,), (1,))


def whole_rows(table: Tensor) -> Tensor:
    """Return the table with its rows as long as their stride: a kernel gets a view's address and stride."""
    return table.as_strided((len(table), table.stride(0)), table.stride())
