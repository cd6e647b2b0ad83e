"""A causal convolution within blocks of tokens, whose taps each token changes itself.

Legend: T tokens, B blocks of L tokens, H hidden size, C taps, G groups of channels.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from builders.kernels.op import define_op
from builders.kernels.triton_runtime import await_previous, dependent_launch, tl, triton

_BLOCK = 1024


class BlockConvolution(NamedTuple):
    """out[t, h] = sum over taps c of x[t - c, h] * (base[c, h] + change[t, c, group of h]), of t - c in t's block.

    Computed in fp32 and rounded once; [T, H] of x's dtype.

    - x          [T, H], rows of any stride: B blocks of L tokens, one after the other
    - base       [C, H], contiguous, of x's dtype
    - change     [T, C, G], of x's dtype: rows of G of any stride. A group is H / G channels side by side
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
        _block_convolution_kernel[(tokens, triton.cdiv(hidden, _BLOCK))](
            self.x,
            self.base,
            self.change,
            out,
            hidden,
            hidden // groups,
            self.block_len,
            self.x.stride(0),
            *self.change.stride()[:2],
            TAPS=taps,
            BLOCK=_BLOCK,
            **dependent_launch(out.device),
        )
        return out


@triton.jit
def _block_convolution_kernel(
    x,  # [T, H]
    base,  # [C, H]
    change,  # [T, C, G]
    out,  # out: [T, H]
    hidden,  # H
    group_size,  # H / G
    block_len,  # L
    x_stride,
    change_stride,  # of a token, as is the next of a tap
    tap_stride,
    TAPS: tl.constexpr,  # C
    BLOCK: tl.constexpr,  # channels of a program
    PDL: tl.constexpr,
):
    """One program per token and BLOCK of its channels."""
    await_previous(PDL)
    token = tl.program_id(0).to(tl.int64)
    channel = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = channel < hidden
    place = token % block_len
    total = tl.zeros((BLOCK,), tl.float32)
    for tap in range(0, TAPS):
        # What lies before the block is not read: it is another request's.
        seen = inside & (place >= tap)
        value = tl.load(x + (token - tap) * x_stride + channel, mask=seen, other=0.0).to(tl.float32)
        weight = tl.load(base + tap * hidden + channel, mask=seen, other=0.0).to(tl.float32)
        shift = tl.load(change + token * change_stride + tap * tap_stride + channel // group_size, mask=seen, other=0.0)
        total += value * (weight + shift.to(tl.float32))
    tl.store(out + token * hidden + channel, total.to(out.dtype.element_ty), mask=inside)


block_convolution = define_op("spec_decode::block_convolution", BlockConvolution)
