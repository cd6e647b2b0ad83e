"""The hidden states that the later steps start from: of each request, that of its last accepted token."""

from __future__ import annotations

from typing import NamedTuple

import torch

from builders.kernels.op import define_op
from builders.kernels.triton_runtime import await_previous, dependent_launch, tl, triton


class GatherLastHidden(NamedTuple):
    """last[r] = hidden[r * query_len + accepted[r]], in place, after a uniform batch of query_len tokens a row.

    hidden     [R * query_len, H]
    accepted   int32 [>= R]   a count outside 0 to query_len - 1, which only the device could know of, counts as the
                              nearest of these
    last       [R, H]         contiguous, in a dtype of its own
    """

    hidden: torch.Tensor
    accepted: torch.Tensor
    last: torch.Tensor
    query_len: int

    def reference(self) -> None:
        rows = self.last.shape[0]
        place = self.accepted[:rows].clamp(0, self.query_len - 1)
        self.last.copy_(self.hidden[torch.arange(rows) * self.query_len + place])

    def launch(self) -> None:
        rows, width = self.last.shape
        block = min(1024, triton.next_power_of_2(width))
        _gather_last_hidden_kernel[(rows, triton.cdiv(width, block))](
            *self,
            width,
            *self.hidden.stride(),
            BLOCK=block,
            num_warps=max(1, min(4, block // 256)),
            **dependent_launch(self.hidden.device),
        )


@triton.jit
def _gather_last_hidden_kernel(
    hidden,  # [R * query_len, H]
    accepted,  # int32 [>= R]
    last,  # out: [R, H]
    query_len,
    width,  # H
    row_stride,  # of hidden
    column_stride,  # of hidden
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    """One program per row and block of columns."""
    await_previous(PDL)
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < width
    place = tl.minimum(tl.maximum(tl.load(accepted + row), 0), query_len - 1)
    state = tl.load(hidden + (row * query_len + place) * row_stride + column * column_stride, mask=inside)
    tl.store(last + row * width + column, state, mask=inside)


gather_last_hidden = define_op("spec_decode::gather_last_hidden", GatherLastHidden, mutates=("last",))
