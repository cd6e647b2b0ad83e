"""Products whose rows have the same bits in every batch: one kernel, cut by the weights' sizes alone.

Legend: T rows, B weights, N outputs, K inputs. Sums are in fp32 and rounded once, to the weight's dtype.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch.nn import functional as F

from builders.errors import require
from builders.kernels.op import define_op
from builders.kernels.triton_runtime import await_previous, dependent_launch, tl, triton
from spec_decode.models.kernels.stored_as import stored_as


def batch_invariant_linear(x: torch.Tensor, weight: torch.Tensor, ends: torch.Tensor | None = None) -> torch.Tensor:
    """x[t, b] @ weight[b].T; [T, B, N].

    x       [T, B, K], of any strides; converted to the weight's dtype in the kernel
    weight  [B, N, K], of any strides
    ends    int32 [B]: x is [T, 1, K] and sorted by weight, ends[b] is one past the last row of weight b, and rows from
            ends[-1] on take the last; the result is [T, 1, N]

    Raises BatchError for sizes that do not fit, with nothing run.
    """
    stacked = weight.shape[0] if ends is None else 1
    fits = x.dim() == weight.dim() == 3 and x.shape[1:] == (stacked, weight.shape[2])
    require(
        fits and (ends is None or (ends.shape == weight.shape[:1] and ends.dtype == torch.int32)),
        "weights [B, N, K] multiply x [T, B, K], or sorted rows [T, 1, K] with int32 ends [B], got weights "
        f"{list(weight.shape)}, x {list(x.shape)} and ends {None if ends is None else list(ends.shape)}. "
        "Reshape them.",
    )
    return _batch_invariant_linear(x, weight, ends)


class BatchInvariantLinear(NamedTuple):
    """As `batch_invariant_linear` has them."""

    x: torch.Tensor
    weight: torch.Tensor
    ends: torch.Tensor | None

    def reference(self) -> torch.Tensor:
        """Every row alone, and copied: torch's own sums depend on how many there are, and on a row's alignment."""
        out, weight, ends = self.fake(), self.weight.float(), self.ends
        for t, row in enumerate(self.x.float()):
            used = weight if ends is None else weight[int((ends[:-1] <= t).sum())][None]
            for b, (inputs, matrix) in enumerate(zip(row, used, strict=True)):
                aligned = inputs.clone(memory_format=torch.contiguous_format)
                out[t, b] = F.linear(aligned[None], matrix)[0].to(out.dtype)
        return out

    def fake(self) -> torch.Tensor:
        return self.weight.new_empty(*self.x.shape[:2], self.weight.shape[1])

    def launch(self) -> torch.Tensor:
        (rows, stacked, inputs), outputs = self.x.shape, self.weight.shape[1]
        out = stored_as(self.fake())
        tile = tile_of(outputs, self.weight.element_size())
        tiles = rows if self.ends is not None else triton.cdiv(rows, tile["BLOCK_T"])
        if rows and stacked:
            batch_invariant_linear_kernel[(tiles, triton.cdiv(outputs, tile["BLOCK_N"]), stacked)](
                self.x,
                self.weight,
                self.ends,
                out,
                rows,
                *self.x.stride(),
                *self.weight.stride(),
                *out.stride()[:2],
                N=outputs,
                K=inputs,
                WEIGHTS=self.weight.shape[0],
                BLOCK_E=triton.next_power_of_2(self.weight.shape[0]),
                FP32_DOT=out.device.type == "cpu",
                **tile,
                **dependent_launch(out.device),
            )
        return out.to(self.weight.dtype)


def tile_of(outputs: int, itemsize: int) -> dict[str, int]:
    """A program's rows, outputs and inputs at a time, by the weight's sizes and nothing else.

    Of those tried on an H200 the best compromise for 1 to 512 rows. A narrow weight gets programs of fewer outputs, so
    that more of them read it.
    """
    if itemsize == 4:
        return {"BLOCK_T": 16, "BLOCK_N": 32, "BLOCK_K": 32, "num_warps": 4, "num_stages": 3}
    if outputs > 8192:
        return {"BLOCK_T": 128, "BLOCK_N": 128, "BLOCK_K": 64, "num_warps": 8, "num_stages": 3}
    block_n, stages = (64, 3) if outputs > 2048 else (32, 4)
    return {"BLOCK_T": 64, "BLOCK_N": block_n, "BLOCK_K": 128, "num_warps": 4, "num_stages": stages}


@triton.jit
def batch_invariant_linear_kernel(
    x,  # [T, B, K]; with ends [T, 1, K]
    weight,  # [B, N, K]
    ends,  # int32 [B], one past each weight's last row, or None
    out,  # out: [T, B, N]; with ends [T, 1, N]
    rows,  # T
    x_row_stride,
    x_stack_stride,
    x_stride,
    w_stack_stride,
    w_row_stride,
    w_stride,
    o_row_stride,
    o_stack_stride,
    N: tl.constexpr,
    K: tl.constexpr,
    WEIGHTS: tl.constexpr,  # B
    BLOCK_E: tl.constexpr,  # B, rounded up to a power of two
    BLOCK_T: tl.constexpr,  # rows of a tile
    BLOCK_N: tl.constexpr,  # outputs of a tile
    BLOCK_K: tl.constexpr,  # inputs multiplied at a time
    FP32_DOT: tl.constexpr,  # multiply in fp32, for the interpreter
    PDL: tl.constexpr,
):
    """A tile of rows by a tile of outputs, over all inputs in order; with `ends`, the tile holds one row.

    Its grid is [tiles of rows, tiles of outputs, B], with `ends` [T, tiles of outputs, 1].
    """
    await_previous(PDL)
    # The rows of this program, and the weight that multiplies them
    stack = tl.program_id(2).to(tl.int64)
    row = tl.program_id(0) * BLOCK_T + tl.arange(0, BLOCK_T)
    used = stack
    inside = row < rows
    if ends is not None:
        # The same tile, so that a row's bits are those it has without groups; all but one of its rows are empty.
        row = tl.program_id(0) + tl.arange(0, BLOCK_T)
        inside = tl.arange(0, BLOCK_T) == 0
        index = tl.arange(0, BLOCK_E)
        end = tl.load(ends + index, mask=index < WEIGHTS - 1, other=2147483647)  # the largest int32
        used = tl.sum((end <= tl.program_id(0)).to(tl.int32), 0).to(tl.int64)
    row = row.to(tl.int64)[:, None]
    output = (tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)).to(tl.int64)[None, :]
    x += stack * x_stack_stride + row * x_row_stride
    weight += used * w_stack_stride + output * w_row_stride
    # The products, BLOCK_K inputs at a time
    acc = tl.zeros((BLOCK_T, BLOCK_N), tl.float32)
    for start in range(0, K, BLOCK_K):
        column = start + tl.arange(0, BLOCK_K)
        of_x = inside[:, None] & (column < K)[None, :]
        of_weight = (column < K)[:, None] & (output < N)
        a = tl.load(x + column[None, :] * x_stride, mask=of_x, other=0.0).to(weight.dtype.element_ty)
        b = tl.load(weight + column[:, None] * w_stride, mask=of_weight, other=0.0)
        if FP32_DOT:
            a = a.to(tl.float32)
            b = b.to(tl.float32)
        acc = tl.dot(a, b, acc, input_precision="ieee")
    to = out + row * o_row_stride + stack * o_stack_stride + output
    tl.store(to, acc.to(out.dtype.element_ty), mask=inside[:, None] & (output < N))


_batch_invariant_linear = define_op("spec_decode::batch_invariant_linear", BatchInvariantLinear)
