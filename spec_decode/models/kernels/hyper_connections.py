"""Read a block's input from hyper-connections and write its output back (mHC, arXiv:2512.24880), with one kernel each.

Legend: T tokens, S streams, H hidden size. Tensors are contiguous, and computation is in fp32 between the loads and the
store. A program owns BLOCK_H columns of one token. Normalising the matrix that mixes the streams is sequential, so a
separate program does it in parallel.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from attn_backends.kernels.linear.batch_invariance import by_row
from builders.errors import require, require_tensor
from builders.kernels.op import define_op
from builders.kernels.sizes import cdiv, next_power_of_2
from builders.kernels.triton_runtime import await_previous, dependent_launch, stored_as, tl, triton

_BLOCK_H = 1024
"""Columns per program: a load of 16 bytes for each thread of 4 warps."""


def read_streams(
    streams: torch.Tensor, mixes: torch.Tensor, scale: torch.Tensor, base: torch.Tensor, *, iterations: int, eps: float
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return a block's input [T, H] in the streams' dtype, and fp32 [T, S] and fp32 [T, S, S] for `write_streams`.

    streams [T, S, H]; mixes [T, S (2 + S)], scale [3] and base [S (2 + S)] fp32. mixes holds m0, m1 and m2, of S, S and
    S x S numbers, each times its scale plus base. The input is the sum of the streams weighted by sigmoid(m0) + eps;
    the others are 2 sigmoid(m1) and sinkhorn(m2): the softmax of each row plus eps, then alternately columns and rows
    divided by their sum plus eps, columns `iterations` times (at least 1) and rows once less.

    Raises BatchError for sizes or dtypes that do not fit, before any launch.
    """
    require(
        iterations >= 1,
        f"iterations must be at least 1, got {iterations}. Use collapse_streams to write nothing back.",
    )
    tokens, count, _ = _sizes(streams)
    width = count * (2 + count)
    require_tensor("mixes", mixes, shape=(tokens, width), dtype=torch.float32, device=streams.device)
    require_tensor("scale", scale, shape=(3,), dtype=torch.float32, device=streams.device)
    require_tensor("base", base, shape=(width,), dtype=torch.float32, device=streams.device)
    x, write, carry = _read_streams(streams, mixes, scale, base, iterations, eps)
    return x, write, carry


def collapse_streams(
    streams: torch.Tensor, mixes: torch.Tensor, scale: torch.Tensor, base: torch.Tensor, *, eps: float
) -> torch.Tensor:
    """Return the sum of streams [T, S, H] weighted by sigmoid(mixes * scale + base) + eps; [T, H] in their dtype.

    mixes [T, S], scale [1] and base [S] fp32. Raises BatchError as `read_streams` does.
    """
    tokens, count, _ = _sizes(streams)
    require_tensor("mixes", mixes, shape=(tokens, count), dtype=torch.float32, device=streams.device)
    require_tensor("scale", scale, shape=(1,), dtype=torch.float32, device=streams.device)
    require_tensor("base", base, shape=(count,), dtype=torch.float32, device=streams.device)
    return _read_streams(*ReadStreams(streams, mixes, scale, base, iterations=0, eps=eps))[0]


def write_streams(
    streams: torch.Tensor, output: torch.Tensor, write: torch.Tensor, carry: torch.Tensor
) -> torch.Tensor:
    """Return the streams after a block, [T, S, H]: write[s] * output + the sum over r of carry[r, s] * streams[r].

    streams [T, S, H] and output [T, H] of one dtype, write [T, S] and carry [T, S, S] fp32. The sum runs from the first
    stream to the last. Raises BatchError as `read_streams` does.
    """
    tokens, count, hidden = _sizes(streams)
    require_tensor("output", output, shape=(tokens, hidden), dtype=streams.dtype, device=streams.device)
    require_tensor("write", write, shape=(tokens, count), dtype=torch.float32, device=streams.device)
    require_tensor("carry", carry, shape=(tokens, count, count), dtype=torch.float32, device=streams.device)
    return _write_streams(streams, output, write, carry)


def _sizes(streams: torch.Tensor) -> torch.Size:
    require_tensor("streams", streams, shape=(None, None, None), dtype=streams.dtype, device=streams.device)
    return streams.shape


class ReadStreams(NamedTuple):
    """The arguments of `read_streams`. iterations 0: those of `collapse_streams`, with empty write and carry."""

    streams: torch.Tensor
    mixes: torch.Tensor
    scale: torch.Tensor
    base: torch.Tensor
    iterations: int
    eps: float

    def reference(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        x, write, carry = by_row(self._read, self.streams, self.mixes)
        return x, write, carry

    def _read(self, streams: torch.Tensor, mixes: torch.Tensor) -> tuple[torch.Tensor, ...]:
        scale, base, iterations, eps = self[2:]
        count = streams.shape[1]
        if iterations == 0:
            return _mixed(streams, mixes * scale + base, eps), mixes.new_empty(0), mixes.new_empty(0)
        sizes = [count, count, count * count]
        parts = zip(mixes.split(sizes, -1), scale, base.split(sizes), strict=True)
        read, write, carry = (part * factor + offset for part, factor, offset in parts)
        carry = _sinkhorn(carry.unflatten(-1, (count, count)), iterations, eps)
        return _mixed(streams, read, eps), 2 * write.sigmoid(), carry

    def fake(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        tokens, count, hidden = self.streams.shape
        x, mixes = self.streams.new_empty(tokens, hidden), self.mixes
        if self.iterations == 0:
            return x, mixes.new_empty(0), mixes.new_empty(0)
        return x, mixes.new_empty(tokens, count), mixes.new_empty(tokens, count, count)

    def launch(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        tokens, count, hidden = self.streams.shape
        x, write, carry = self.fake()
        stored = stored_as(x)
        blocks = cdiv(hidden, _BLOCK_H)
        read_streams_kernel[(tokens, blocks + (self.iterations > 0))](
            streams_ptr=self.streams.contiguous(),
            mixes_ptr=self.mixes.contiguous(),
            scale_ptr=self.scale.contiguous(),
            base_ptr=self.base.contiguous(),
            x_ptr=stored,
            write_ptr=write,
            carry_ptr=carry,
            eps=self.eps,
            S=count,
            H=hidden,
            WIDTH=self.mixes.shape[1],
            ITERATIONS=self.iterations,
            NUM_BLOCKS=blocks,
            BLOCK_S=next_power_of_2(count),
            BLOCK_H=_BLOCK_H,
            **dependent_launch(x.device),
        )
        return stored.to(x.dtype), write, carry


class WriteStreams(NamedTuple):
    """The arguments of `write_streams`."""

    streams: torch.Tensor
    output: torch.Tensor
    write: torch.Tensor
    carry: torch.Tensor

    def reference(self) -> torch.Tensor:
        return by_row(_written, *self)

    def fake(self) -> torch.Tensor:
        return self.streams.new_empty(self.streams.shape)

    def launch(self) -> torch.Tensor:
        tokens, count, hidden = self.streams.shape
        stored = stored_as(self.fake())
        write_streams_kernel[(tokens, cdiv(hidden, _BLOCK_H))](
            streams_ptr=self.streams.contiguous(),
            output_ptr=self.output.contiguous(),
            write_ptr=self.write.contiguous(),
            carry_ptr=self.carry.contiguous(),
            out_ptr=stored,
            S=count,
            H=hidden,
            BLOCK_S=next_power_of_2(count),
            BLOCK_H=_BLOCK_H,
            **dependent_launch(stored.device),
        )
        return stored.to(self.streams.dtype)


def _written(streams: torch.Tensor, output: torch.Tensor, write: torch.Tensor, carry: torch.Tensor) -> torch.Tensor:
    added = write[..., None] * output.float()[:, None]
    return torch.baddbmm(added, carry.mT, streams.float()).to(streams.dtype)


def _mixed(streams: torch.Tensor, logits: torch.Tensor, eps: float) -> torch.Tensor:
    shares = logits.sigmoid() + eps
    return torch.bmm(shares[:, None], streams.float())[:, 0].to(streams.dtype)


def _sinkhorn(logits: torch.Tensor, iterations: int, eps: float) -> torch.Tensor:
    carry = logits.softmax(-1) + eps
    carry = carry / (carry.sum(-2, keepdim=True) + eps)
    for _ in range(iterations - 1):
        carry = carry / (carry.sum(-1, keepdim=True) + eps)
        carry = carry / (carry.sum(-2, keepdim=True) + eps)
    return carry.contiguous()


_read_streams = define_op("spec_decode::read_streams", ReadStreams)
_write_streams = define_op("spec_decode::write_streams", WriteStreams)


@triton.jit
def read_streams_kernel(
    streams_ptr,  # [T, S, H]
    mixes_ptr,  # fp32 [T, WIDTH]
    scale_ptr,  # fp32 [3]; without ITERATIONS [1]
    base_ptr,  # fp32 [WIDTH]
    x_ptr,  # out: [T, H]
    write_ptr,  # out: fp32 [T, S]; without ITERATIONS empty
    carry_ptr,  # out: fp32 [T, S, S]; without ITERATIONS empty
    eps,
    S: tl.constexpr,
    H: tl.constexpr,
    WIDTH: tl.constexpr,  # S (2 + S); without ITERATIONS S
    ITERATIONS: tl.constexpr,  # of Sinkhorn; 0: do not compute write and carry
    NUM_BLOCKS: tl.constexpr,  # of columns
    BLOCK_S: tl.constexpr,  # S, rounded up to a power of two
    BLOCK_H: tl.constexpr,  # columns per program
    PDL: tl.constexpr,  # programmatic dependent launch
):
    """x = sum over s of (sigmoid(mixes[s] * scale + base[s]) + eps) * streams[s], for BLOCK_H columns of one token.

    Grid [T, NUM_BLOCKS + 1]: the program after the last block computes the token's write and carry.
    """
    await_previous(PDL)
    token, block = tl.program_id(0).to(tl.int64), tl.program_id(1)
    mixes_ptr += token * WIDTH
    if block < NUM_BLOCKS:
        offs_h = block * BLOCK_H + tl.arange(0, BLOCK_H)
        acc = tl.zeros([BLOCK_H], tl.float32)
        for s in tl.static_range(S):
            weight = _sigmoid(tl.load(mixes_ptr + s) * tl.load(scale_ptr) + tl.load(base_ptr + s)) + eps
            stream = tl.load(streams_ptr + (token * S + s) * H + offs_h, mask=offs_h < H, other=0.0)
            acc += weight * stream.to(tl.float32)
        tl.store(x_ptr + token * H + offs_h, acc.to(x_ptr.dtype.element_ty), mask=offs_h < H)
    elif ITERATIONS > 0:
        # 1. write, 2 sigmoid(m1)
        offs_s = tl.arange(0, BLOCK_S)
        mask_s = offs_s < S
        write = tl.load(mixes_ptr + S + offs_s, mask=mask_s, other=0.0) * tl.load(scale_ptr + 1)
        write += tl.load(base_ptr + S + offs_s, mask=mask_s, other=0.0)
        tl.store(write_ptr + token * S + offs_s, 2.0 * _sigmoid(write), mask=mask_s)

        # 2. carry, sinkhorn(m2)
        offs = offs_s[:, None] * S + offs_s[None, :]
        mask = mask_s[:, None] & mask_s[None, :]
        carry = tl.load(mixes_ptr + 2 * S + offs, mask=mask, other=0.0) * tl.load(scale_ptr + 2)
        carry += tl.load(base_ptr + 2 * S + offs, mask=mask, other=0.0)
        # Padding columns get weight 0; padding rows stay finite and are then zeroed.
        carry = tl.where(mask_s[None, :], carry, float("-inf"))
        carry = tl.exp(carry - tl.max(carry, 1)[:, None])
        carry = tl.where(mask, carry / tl.sum(carry, 1)[:, None] + eps, 0.0)
        carry = carry / (tl.sum(carry, 0)[None, :] + eps)
        for _ in range(ITERATIONS - 1):
            carry = carry / (tl.sum(carry, 1)[:, None] + eps)
            carry = carry / (tl.sum(carry, 0)[None, :] + eps)
        tl.store(carry_ptr + token * S * S + offs, carry, mask=mask)


@triton.jit
def _sigmoid(logits):
    return 1.0 / (1.0 + tl.exp(-logits))


@triton.jit
def write_streams_kernel(
    streams_ptr,  # [T, S, H]
    output_ptr,  # [T, H]
    write_ptr,  # fp32 [T, S]
    carry_ptr,  # fp32 [T, S, S]
    out_ptr,  # out: [T, S, H]
    S: tl.constexpr,
    H: tl.constexpr,
    BLOCK_S: tl.constexpr,  # S, rounded up to a power of two
    BLOCK_H: tl.constexpr,  # columns per program
    PDL: tl.constexpr,  # programmatic dependent launch
):
    """out[s] = write[s] * output + sum over r of carry[r, s] * streams[r], BLOCK_H columns of one token per program."""
    await_previous(PDL)
    token = tl.program_id(0).to(tl.int64)
    offs_s, offs_h = tl.arange(0, BLOCK_S), tl.program_id(1) * BLOCK_H + tl.arange(0, BLOCK_H)
    mask_s, mask_h = offs_s < S, offs_h < H
    row = token * S
    output = tl.load(output_ptr + token * H + offs_h, mask=mask_h, other=0.0).to(tl.float32)
    acc = tl.load(write_ptr + row + offs_s, mask=mask_s, other=0.0)[:, None] * output[None, :]
    for s in tl.static_range(S):
        carry = tl.load(carry_ptr + (row + s) * S + offs_s, mask=mask_s, other=0.0)
        stream = tl.load(streams_ptr + (row + s) * H + offs_h, mask=mask_h, other=0.0).to(tl.float32)
        acc += carry[:, None] * stream[None, :]
    offs = (row + offs_s[:, None]) * H + offs_h[None, :]
    tl.store(out_ptr + offs, acc.to(out_ptr.dtype.element_ty), mask=mask_s[:, None] & mask_h[None, :])
