"""The input tokens of step 0: each request's tokens shifted one place left, with the target's own token at the end."""

from __future__ import annotations

from typing import NamedTuple

import torch

from builders.kernels.op import define_op
from builders.kernels.sizes import next_power_of_2
from builders.kernels.triton_runtime import await_previous, dependent_launch, tl, triton


class ShiftTokens(NamedTuple):
    """Return int64 [R * (1 + K)]: place j of row r is token_ids[r, j + 1] if j < accepted[r], else next_tokens[r].

    token_ids     int64 [R, 1 + K]
    next_tokens   int64 [>= R]
    accepted      int32 [>= R]   clamped to [0, K] on the device, since the host cannot check it
    """

    token_ids: torch.Tensor
    next_tokens: torch.Tensor
    accepted: torch.Tensor

    def reference(self) -> torch.Tensor:
        place = torch.arange(self.token_ids.shape[1])
        last, rows = self.accepted.clamp(0, self.token_ids.shape[1] - 1)[:, None], self.token_ids.shape[0]
        return torch.where(place < last[:rows], self.token_ids.roll(-1, 1), self.next_tokens[:rows, None]).flatten()

    def fake(self) -> torch.Tensor:
        return self.token_ids.new_empty(self.token_ids.numel())

    def launch(self) -> torch.Tensor:
        out = self.fake()
        rows, query_len = self.token_ids.shape
        _shift_tokens_kernel[(rows,)](
            token_ids_ptr=self.token_ids,
            next_tokens_ptr=self.next_tokens,
            num_accepted_ptr=self.accepted,
            out_ptr=out,
            query_len=query_len,
            stride_token_ids=self.token_ids.stride(0),
            BLOCK_Q=next_power_of_2(query_len),
            num_warps=1,
            **dependent_launch(self.token_ids.device),
        )
        return out


@triton.jit
def _shift_tokens_kernel(
    token_ids_ptr,  # int64 [R, 1 + K]
    next_tokens_ptr,  # int64 [>= R]
    num_accepted_ptr,  # int32 [>= R]
    out_ptr,  # out: int64 [R * (1 + K)]
    query_len,  # 1 + K
    stride_token_ids,  # per row
    BLOCK_Q: tl.constexpr,  # query_len, rounded up to a power of two
    PDL: tl.constexpr,  # programmatic dependent launch
):
    """out[q] = token_ids[q + 1] for q < num_accepted, else next_token. One program per row."""
    await_previous(PDL)
    row = tl.program_id(0).to(tl.int64)
    offs_q = tl.arange(0, BLOCK_Q)
    # The last place never holds a shifted token, so a count beyond K does not read the next row.
    is_shifted = (offs_q < tl.load(num_accepted_ptr + row)) & (offs_q < query_len - 1)
    next_token = tl.load(token_ids_ptr + row * stride_token_ids + offs_q + 1, mask=offs_q < query_len - 1, other=0)
    token = tl.where(is_shifted, next_token, tl.load(next_tokens_ptr + row))
    tl.store(out_ptr + row * query_len + offs_q, token, mask=offs_q < query_len)


shift_tokens = define_op("spec_decode::shift_tokens", ShiftTokens)
