"""What a block reads from hyper-connections and writes to them (mHC, arXiv:2512.24880): a kernel for each.

Legend: T tokens, S streams, H hidden size. All work of a token happens in fp32 between the loads and the store.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from builders.errors import require, require_tensor
from builders.kernels.op import define_op
from builders.kernels.triton_runtime import dependent_launch, triton
from spec_decode.models.kernels.batch_invariance import by_row
from spec_decode.models.kernels.hyper_connections_kernels import read_streams_kernel, write_streams_kernel
from spec_decode.models.kernels.stored_as import stored_as

_BLOCK_H = 1024
"""Columns of a program: a load of 16 bytes for each thread of 4 warps."""


def read_streams(
    streams: torch.Tensor, mixes: torch.Tensor, scale: torch.Tensor, base: torch.Tensor, *, iterations: int, eps: float
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """A block's input [T, H] in the streams' dtype, and what `write_streams` takes: fp32 [T, S] and fp32 [T, S, S].

    streams [T, S, H]; mixes [T, S (2 + S)], scale [3] and base [S (2 + S)] fp32. With m0, m1 and m2 the parts of mixes,
    of S, S and S x S numbers, times their scale plus base: the input is the sum of the streams by sigmoid(m0) + eps,
    and the others are 2 sigmoid(m1) and sinkhorn(m2). Sinkhorn: the softmax of each row plus eps, then columns and rows
    in turn divided by their sum plus eps, `iterations` times (at least 1) the columns and once less the rows.

    Raises BatchError for sizes or dtypes that do not fit, with nothing run.
    """
    require(
        iterations >= 1,
        f"hyper-connections normalise at least 1 time, got iterations={iterations}. Use "
        "collapse_streams where nothing is written back.",
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
    """The sum of streams [T, S, H] by sigmoid(mixes * scale + base) + eps; [T, H] in the streams' dtype.

    mixes [T, S], scale [1] and base [S] fp32. Raises BatchError as `read_streams` does.
    """
    tokens, count, _ = _sizes(streams)
    require_tensor("mixes", mixes, shape=(tokens, count), dtype=torch.float32, device=streams.device)
    require_tensor("scale", scale, shape=(1,), dtype=torch.float32, device=streams.device)
    require_tensor("base", base, shape=(count,), dtype=torch.float32, device=streams.device)
    return _read_streams(streams, mixes, scale, base, 0, eps)[0]


def write_streams(
    streams: torch.Tensor, output: torch.Tensor, write: torch.Tensor, carry: torch.Tensor
) -> torch.Tensor:
    """The streams after a block, [T, S, H]: write[s] * output + the sum over r of carry[r, s] * streams[r].

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
    """As `read_streams` has them; iterations 0: as `collapse_streams` does, where write and carry are empty."""

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
        blocks = triton.cdiv(hidden, _BLOCK_H)
        read_streams_kernel[(tokens, blocks + (self.iterations > 0))](
            self.streams.contiguous(), self.mixes.contiguous(), self.scale.contiguous(), self.base.contiguous(),
            stored, write, carry, self.eps, S=count, H=hidden, WIDTH=self.mixes.shape[1], ITERATIONS=self.iterations,
            BLOCKS=blocks, BLOCK_S=triton.next_power_of_2(count), BLOCK_H=_BLOCK_H, **dependent_launch(x.device),
        )  # fmt: skip
        return stored.to(x.dtype), write, carry


class WriteStreams(NamedTuple):
    """As `write_streams` has them."""

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
        write_streams_kernel[(tokens, triton.cdiv(hidden, _BLOCK_H))](
            self.streams.contiguous(), self.output.contiguous(), self.write.contiguous(), self.carry.contiguous(),
            stored, S=count, H=hidden, BLOCK_S=triton.next_power_of_2(count), BLOCK_H=_BLOCK_H,
            **dependent_launch(stored.device),
        )  # fmt: skip
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
