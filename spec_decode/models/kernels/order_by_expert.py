"""The rows of a mixture's tokens sorted by expert: a stable sort of small integers, in one kernel that counts.

Legend: T tokens, E experts, k experts of a token. Row t k + j is token t's j-th choice.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from builders.errors import require, require_tensor
from builders.kernels.op import define_op
from builders.kernels.triton_runtime import await_previous, dependent_launch, tl, triton

MAX_ROWS = 4096
"""Up to so many rows, each is compared with every other: quadratic work, but no pass waits for another. Torch sorts
more."""

_BLOCK = 32
_CHUNK = 128


class Order(NamedTuple):
    """Where rows lie once they are sorted by expert, and by row within an expert.

    tokens   int64 [T k]    token of each sorted row
    places   int64 [T, k]   the sorted row of each token's choices
    ends     int32 [E]      one past each expert's last sorted row
    """

    tokens: torch.Tensor
    places: torch.Tensor
    ends: torch.Tensor


def order_by_expert(experts: torch.Tensor, num_experts: int) -> Order:
    """experts int64 [T, k] in 0..num_experts-1, in any order and with repetitions.

    `tokens` and `places` stay within their bounds for any values. Raises BatchError for another shape or dtype, with
    nothing run.
    """
    require_tensor("experts", experts, shape=(None, None), dtype=torch.int64, device=experts.device)
    require(
        num_experts > 0 and experts.shape[1] > 0,
        f"tokens need experts to be ordered by, got {experts.shape[1]} for each of {num_experts}. Ask "
        "for at least one of at least one.",
    )
    return Order(*_order_by_expert(experts.contiguous(), num_experts))


class OrderByExpert(NamedTuple):
    """experts int64 [T, k], contiguous; returns what an `Order` holds."""

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
        _order_kernel[(triton.cdiv(rows + self.num_experts, _BLOCK),)](
            self.experts,
            tokens,
            places,
            ends,
            rows,
            self.num_experts,
            TOP_K=self.experts.shape[1],
            BLOCK=_BLOCK,
            CHUNK=min(_CHUNK, triton.next_power_of_2(max(rows, 1))),
            **dependent_launch(tokens.device),
        )
        return tokens, places, ends


@triton.jit
def _order_kernel(
    experts,  # int64 [T, k]
    tokens,  # out: int64 [T k]
    places,  # out: int64 [T, k]
    ends,  # out: int32 [E]
    rows,  # T k
    num_experts,  # E
    TOP_K: tl.constexpr,  # k
    BLOCK: tl.constexpr,  # rows and ends of a program
    CHUNK: tl.constexpr,  # rows compared with at a time
    PDL: tl.constexpr,
):
    """Where something belongs is the number of rows that come before it, be it a row or the end of an expert.

    One program counts for BLOCK of the T k rows and E ends.
    """
    await_previous(PDL)
    # Keys number rows by expert, then by row, and no two are alike; an expert ends below the next one's least key.
    query = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    is_row = query < rows
    is_end = (query >= rows) & (query < rows + num_experts)
    key = tl.where(is_row, tl.load(experts + query, mask=is_row, other=0) * rows + query, (query - rows + 1) * rows)
    # How many rows come before each
    before = tl.zeros([BLOCK], tl.int32)
    for start in range(0, rows, CHUNK):
        row = start + tl.arange(0, CHUNK)
        other = tl.load(experts + row, mask=row < rows, other=0) * rows + row
        earlier = (other[None, :] < key[:, None]) & (row < rows)[None, :]
        before += tl.sum(earlier.to(tl.int32), 1)
    tl.store(places + query, before.to(tl.int64), mask=is_row)
    tl.store(tokens + before, query // TOP_K, mask=is_row)
    tl.store(ends + (query - rows), before, mask=is_end)


_order_by_expert = define_op("spec_decode::order_by_expert", OrderByExpert)
