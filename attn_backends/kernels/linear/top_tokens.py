"""The most likely token of each row: the product with an output projection and its arg max in one pass, which stores no
logits.

A program has one tile of the vocabulary and every row; a second kernel takes the best of the tiles. The tiles are those
of `streamed_linear`, without split-K: a vocabulary has enough of them for every SM.

Legend: M rows, K inputs, V tokens.
"""

from __future__ import annotations

from collections.abc import Hashable
from typing import NamedTuple

import torch

from attn_backends.kernels.linear.fp8_weight import Fp8Weight, Weight, widened
from attn_backends.kernels.linear.linear import linear, variant
from attn_backends.kernels.linear.streamed_tiling import StreamedTiling, streamed_tiling
from attn_backends.kernels.linear.streamed_tma_kernel import prefetch_weight
from builders.devices import room_of
from builders.kernels.op import define_op
from builders.kernels.sizes import cdiv, next_power_of_2
from builders.kernels.triton_runtime import await_previous, dependent_launch, tl, triton

MOST_ROWS = 64
"""The most rows for one pass: more are multiplied as by `linear`, whose logits are then reduced."""


class TopTokens(NamedTuple):
    """The arguments of `top_tokens`, which returns the largest logit of each row, fp32 [M], and its first index, int64
    [M]. NaN counts as infinity.

    x           16-bit [M, K]
    weight      [N, K], contiguous, in x's dtype or in float8_e4m3fn
    scale       fp32 [N], of an 8-bit weight; None for another
    num_tokens  V, at least 1: the rows of the weight after the first V are padding
    """

    x: torch.Tensor
    weight: torch.Tensor
    scale: torch.Tensor | None
    num_tokens: int

    def reference(self) -> tuple[torch.Tensor, torch.Tensor]:
        logits = self.x.float() @ widened(self.weight, self.scale)[: self.num_tokens].T
        value, index = torch.where(logits.isnan(), torch.inf, logits).max(-1)
        return value, index

    def fake(self) -> tuple[torch.Tensor, torch.Tensor]:
        rows = self.x.shape[0]
        return self.x.new_empty(rows, dtype=torch.float32), self.x.new_empty(rows, dtype=torch.int64)

    def launch(self) -> tuple[torch.Tensor, torch.Tensor]:
        x, tile = self.x if self.x.stride(1) == 1 else self.x.contiguous(), self.tile
        rows = x.shape[0]
        if tile is None:
            value, index = linear(x, self.head)[:, : self.num_tokens].max(-1)
            return torch.where(value.isnan(), torch.inf, value).float(), index
        (best, index), tiles = self.fake(), cdiv(self.num_tokens, tile.block_n)
        values = x.new_empty(rows, tiles, dtype=torch.float32)
        tokens = x.new_empty(rows, tiles, dtype=torch.int32)
        top_of_tiles_kernel[(tiles,)](
            x_ptr=x,
            w_ptr=self.weight,
            scale_ptr=self.scale,
            values_ptr=values,
            tokens_ptr=tokens,
            M=rows,
            V=self.num_tokens,
            stride_xm=x.stride(0),
            K=x.shape[1],
            BLOCK_M=tile.block_m,
            BLOCK_N=tile.block_n,
            BLOCK_K=tile.block_k,
            STAGES=tile.stages,
            FP32_DOT=x.device.type == "cpu",
            num_warps=tile.num_warps,
            **dependent_launch(x.device),
        )
        top_of_rows_kernel[(rows,)](
            values_ptr=values,
            tokens_ptr=tokens,
            best_ptr=best,
            index_ptr=index,
            tiles=tiles,
            BLOCK=next_power_of_2(tiles),
            num_warps=4,
            **dependent_launch(x.device),
        )
        return best, index

    @property
    def head(self) -> Weight:
        """The weight with its scale."""
        return self.weight if self.scale is None else Fp8Weight(self.weight, self.scale)

    @property
    def tile(self) -> StreamedTiling | None:
        """The tiling of one pass; None without rows and for too many."""
        (rows, inputs), device = self.x.shape, self.x.device
        sizes = {"itemsize": self.weight.element_size(), "x_itemsize": self.x.element_size()}
        few = 0 < rows <= MOST_ROWS
        return streamed_tiling(rows, self.num_tokens, inputs, room_of(device), **sizes) if few else None

    def variant(self) -> Hashable:
        """See `warm_up`."""
        return self.tile or variant(self.x, self.head)


top_tokens = define_op("attn_backends::top_tokens", TopTokens)


@triton.jit(do_not_specialize=["M"])
def top_of_tiles_kernel(
    x_ptr,  # [M, K]
    w_ptr,  # [V or more, K]
    scale_ptr,  # fp32 [V or more], of w; or None
    values_ptr,  # out: fp32 [M, tiles], the largest logit of each tile
    tokens_ptr,  # out: int32 [M, tiles], its token
    M,
    V,
    stride_xm,  # between rows
    K: tl.constexpr,
    BLOCK_M: tl.constexpr,  # M, rounded up
    BLOCK_N: tl.constexpr,  # tokens in a tile
    BLOCK_K: tl.constexpr,  # inputs per iteration
    STAGES: tl.constexpr,  # tiles in flight
    FP32_DOT: tl.constexpr,  # multiply in fp32, for the interpreter
    PDL: tl.constexpr,  # programmatic dependent launch
):
    """values, tokens = max over a tile of x @ w^T * scale. Grid [tiles]."""
    offs_n, offs_m = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N), tl.arange(0, BLOCK_M)
    prefetch_weight(w_ptr, offs_n, 0, V, K, BLOCK_K, PDL)
    await_previous(PDL)
    # 1. w @ x^T, in blocks of BLOCK_K inputs
    mask_n, mask_m = (offs_n < V)[:, None], (offs_m < M)[None, :]
    w_ptrs, x_ptrs = w_ptr + offs_n.to(tl.int64)[:, None] * K, x_ptr + offs_m.to(tl.int64)[None, :] * stride_xm
    acc = tl.zeros((BLOCK_N, BLOCK_M), tl.float32)
    for k in tl.range(0, K, BLOCK_K, num_stages=STAGES):
        offs_k = k + tl.arange(0, BLOCK_K)
        w = tl.load(w_ptrs + offs_k[None, :], mask=mask_n & (offs_k < K)[None, :], other=0.0)
        x = tl.load(x_ptrs + offs_k[:, None], mask=mask_m & (offs_k < K)[:, None], other=0.0)
        if FP32_DOT:
            w, x = w.to(tl.float32), x.to(tl.float32)
        elif scale_ptr is not None:
            # By way of fp32: a GPU converts to bf16 one number at a time, in its slowest unit.
            w = w.to(tl.float32).to(x.dtype)
        acc = tl.dot(w, x, acc, input_precision="ieee")
    if scale_ptr is not None:
        acc *= tl.load(scale_ptr + offs_n, mask=offs_n < V, other=0.0)[:, None]
    # 2. The largest logit of each row; a comparison would drop NaN
    acc = tl.where(acc == acc, acc, float("inf"))
    value, at = tl.max(tl.where(mask_n, acc, float("-inf")), 0, return_indices=True)
    outs = offs_m * tl.num_programs(0) + tl.program_id(0)
    tl.store(values_ptr + outs, value, mask=offs_m < M)
    tl.store(tokens_ptr + outs, tl.program_id(0) * BLOCK_N + at, mask=offs_m < M)


@triton.jit
def top_of_rows_kernel(
    values_ptr,  # fp32 [M, tiles]
    tokens_ptr,  # int32 [M, tiles]
    best_ptr,  # out: fp32 [M]
    index_ptr,  # out: int64 [M]
    tiles,
    BLOCK: tl.constexpr,  # tiles, rounded up
    PDL: tl.constexpr,  # programmatic dependent launch
):
    """best, index = the largest value of a row, and the lowest token that has it. Grid [M]."""
    await_previous(PDL)
    INT32_MAX: tl.constexpr = 2**31 - 1
    row, offs = tl.program_id(0), tl.arange(0, BLOCK)
    value = tl.load(values_ptr + row * tiles + offs, mask=offs < tiles, other=float("-inf"))
    token = tl.load(tokens_ptr + row * tiles + offs, mask=offs < tiles, other=INT32_MAX)
    best = tl.max(value, 0)
    tl.store(best_ptr + row, best)
    tl.store(index_ptr + row, tl.min(tl.where(value == best, token, INT32_MAX), 0).to(tl.int64))
