"""Sort the rows of a mixture's tokens by expert: a stable counting sort of small integers in one kernel.

Legend: T tokens, E experts, k experts of a token. Row t k + j is token t's j-th choice.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from builders.errors import require, require_tensor
from builders.kernels.op import define_op
from builders.kernels.sizes import cdiv, next_power_of_2
from builders.kernels.triton_runtime import await_previous, dependent_launch, tl, triton

MAX_ROWS = 4096
"""Up to this many rows, each is compared with every other: quadratic work, but no dependent passes. torch sorts
more."""

_BLOCK = 32
_CHUNK = 128


class Order(NamedTuple):
    """The order of rows sorted by expert, and by row within an expert.

    tokens   int64 [T k]    token of each sorted row
    places   int64 [T, k]   the sorted row of each token's choices
    ends     int32 [E]      one past each expert's last sorted row
    """

    tokens: torch.Tensor
    places: torch.Tensor
    ends: torch.Tensor


def order_by_expert(experts: torch.Tensor, num_experts: int) -> Order:
    """Sort experts, int64 [T, k] in 0..num_experts-1, in any order and with repetitions.

    `tokens` and `places` stay within bounds for any values. Raises BatchError for another shape or dtype, before any
    launch.
    """
    require_tensor("experts", experts, shape=(None, None), dtype=torch.int64, device=experts.device)
    require(
        num_experts > 0 and experts.shape[1] > 0,
        f"a token needs at least 1 of at least 1 experts, got {experts.shape[1]} of {num_experts}. Pass more.",
    )
    return Order(*_order_by_expert(experts.contiguous(), num_experts))


class OrderByExpert(NamedTuple):
    """experts int64 [T, k], contiguous; returns the fields of an `Order`."""

    experts: torch.Tensor
    num_experts: int

    def reference(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        chosen, rows = self.experts.flatten().sort(stable=True)
        places = torch.empty_like(rows).scatter_(0, rows, torch.arange(rows.shape[0], device=rows.device))
        every = torch.arange(self.num_experts, device=rows.device)
        ends = torch.searchsorted(chosen, every, right=True, out_int32=True)
        return rows // self.experts.shape[1], places.view_as(self.experts), ends

    def fake(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        experts = self.experts
        ends = experts.new_empty(self.num_experts, dtype=torch.int32)
        return experts.new_empty(experts.numel()), experts.new_empty(experts.shape), ends

    def launch(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        rows = self.experts.numel()
        if rows > MAX_ROWS:
            return self.reference()
        tokens, places, ends = self.fake()
        _order_kernel[(cdiv(rows + self.num_experts, _BLOCK),)](
            experts_ptr=self.experts,
            tokens_ptr=tokens,
            places_ptr=places,
            ends_ptr=ends,
            num_rows=rows,
            num_experts=self.num_experts,
            TOP_K=self.experts.shape[1],
            BLOCK_SIZE=_BLOCK,
            CHUNK=min(_CHUNK, next_power_of_2(max(rows, 1))),
            **dependent_launch(tokens.device),
        )
        return tokens, places, ends


@triton.jit
def _order_kernel(
    experts_ptr,  # int64 [T, k]
    tokens_ptr,  # out: int64 [T k]
    places_ptr,  # out: int64 [T, k]
    ends_ptr,  # out: int32 [E]
    num_rows,  # T k
    num_experts,  # E
    TOP_K: tl.constexpr,  # k
    BLOCK_SIZE: tl.constexpr,  # rows and ends per program
    CHUNK: tl.constexpr,  # rows compared per iteration
    PDL: tl.constexpr,  # programmatic dependent launch
):
    """The place of a row, or of an expert's end, is the number of rows before it.

    One program counts for BLOCK_SIZE of the T k rows and E ends.
    """
    await_previous(PDL)
    # 1. Keys order rows by expert, then by row, and are distinct; an expert ends below the next one's smallest key.
    offs = tl.program_id(0).to(tl.int64) * BLOCK_SIZE + tl.arange(0, BLOCK_SIZE)
    is_row = offs < num_rows
    is_end = (offs >= num_rows) & (offs < num_rows + num_experts)
    row_key = tl.load(experts_ptr + offs, mask=is_row, other=0) * num_rows + offs
    key = tl.where(is_row, row_key, (offs - num_rows + 1) * num_rows)
    # 2. The number of rows before each
    num_before = tl.zeros([BLOCK_SIZE], tl.int32)
    for start in range(0, num_rows, CHUNK):
        offs_r = start + tl.arange(0, CHUNK)
        other_key = tl.load(experts_ptr + offs_r, mask=offs_r < num_rows, other=0) * num_rows + offs_r
        is_before = (other_key[None, :] < key[:, None]) & (offs_r < num_rows)[None, :]
        num_before += tl.sum(is_before.to(tl.int32), 1)
    tl.store(places_ptr + offs, num_before.to(tl.int64), mask=is_row)
    tl.store(tokens_ptr + num_before, offs // TOP_K, mask=is_row)
    tl.store(ends_ptr + (offs - num_rows), num_before, mask=is_end)


_order_by_expert = define_op("spec_decode::order_by_expert", OrderByExpert)
