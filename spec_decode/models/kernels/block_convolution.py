"""A causal convolution within blocks of tokens, with a change of the taps for each token.

Legend: T tokens, B blocks of L tokens, H hidden size, C taps, G groups of channels.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from builders.kernels.op import define_op
from builders.kernels.sizes import cdiv
from builders.kernels.triton_runtime import await_previous, dependent_launch, tl, triton

_BLOCK = 1024


class BlockConvolution(NamedTuple):
    """out[t, h] = sum over taps c of x[t - c, h] * (base[c, h] + change[t, c, group of h]), for t - c in t's block.

    Computed in fp32 and rounded once; [T, H] of x's dtype.

    - x          [T, H], rows of any stride: B consecutive blocks of L tokens
    - base       [C, H], contiguous, of x's dtype
    - change     [T, C, G], of x's dtype: rows of G of any stride. A group is H / G adjacent channels
    - block_len  L
    """

    x: torch.Tensor
    base: torch.Tensor
    change: torch.Tensor
    block_len: int

    def reference(self) -> torch.Tensor:
        (taps, hidden), groups, length = self.base.shape, self.change.shape[-1], self.block_len
        x = self.x.float().reshape(-1, length, groups, hidden // groups)
        base = self.base.float().view(taps, groups, -1)
        change = self.change.float().reshape(-1, length, taps, groups, 1)
        out = x * (base[0] + change[:, :, 0])
        for tap in range(1, min(taps, length)):
            out[:, tap:] += x[:, :-tap] * (base[tap] + change[:, tap:, tap])
        return out.to(self.x.dtype).view(self.x.shape)

    def fake(self) -> torch.Tensor:
        return self.x.new_empty(self.x.shape)

    def launch(self) -> torch.Tensor:
        out = self.fake()
        (tokens, hidden), (_, taps, groups) = self.x.shape, self.change.shape
        _block_convolution_kernel[(tokens, cdiv(hidden, _BLOCK))](
            x_ptr=self.x,
            base_ptr=self.base,
            change_ptr=self.change,
            y_ptr=out,
            hidden_size=hidden,
            group_size=hidden // groups,
            block_len=self.block_len,
            stride_x=self.x.stride(0),
            stride_change_token=self.change.stride(0),
            stride_change_tap=self.change.stride(1),
            TAPS=taps,
            BLOCK_H=_BLOCK,
            **dependent_launch(out.device),
        )
        return out


@triton.jit
def _block_convolution_kernel(
    x_ptr,  # [T, H]
    base_ptr,  # [C, H]
    change_ptr,  # [T, C, G]
    y_ptr,  # out: [T, H]
    hidden_size,  # H
    group_size,  # H / G
    block_len,  # L
    stride_x,
    stride_change_token,
    stride_change_tap,
    TAPS: tl.constexpr,  # C
    BLOCK_H: tl.constexpr,  # channels per program
    PDL: tl.constexpr,  # programmatic dependent launch
):
    """y[t, h] = sum over c of x[t - c, h] * (base[c, h] + change[t, c, h's group]). Grid [T, ceil(H / BLOCK_H)]."""
    await_previous(PDL)
    token = tl.program_id(0).to(tl.int64)
    offs_h = tl.program_id(1) * BLOCK_H + tl.arange(0, BLOCK_H)
    mask = offs_h < hidden_size
    offset = token % block_len
    acc = tl.zeros((BLOCK_H,), tl.float32)
    for tap in range(0, TAPS):
        # Do not read before the block: those tokens are another request's.
        mask_x = mask & (offset >= tap)
        x = tl.load(x_ptr + (token - tap) * stride_x + offs_h, mask=mask_x, other=0.0).to(tl.float32)
        base = tl.load(base_ptr + tap * hidden_size + offs_h, mask=mask_x, other=0.0).to(tl.float32)
        change_ptrs = change_ptr + token * stride_change_token + tap * stride_change_tap + offs_h // group_size
        change = tl.load(change_ptrs, mask=mask_x, other=0.0)
        acc += x * (base + change.to(tl.float32))
    tl.store(y_ptr + token * hidden_size + offs_h, acc.to(y_ptr.dtype.element_ty), mask=mask)


block_convolution = define_op("spec_decode::block_convolution", BlockConvolution)
