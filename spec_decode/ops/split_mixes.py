"""What hyper-connections (mHC, arXiv:2512.24880) read, write and mix. Legend: T tokens, S streams."""

from __future__ import annotations

import torch

from builders._ops import define_op
from builders._triton import tl, triton


def split_mixes(
    mixes: torch.Tensor, scale: torch.Tensor, base: torch.Tensor, *, streams: int, iterations: int, eps: float
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """mixes fp32 [T, S (2 + S)], scale fp32 [3], base fp32 [S (2 + S)], all contiguous.

    read [T, S] = sigmoid(m0) + eps, write [T, S] = 2 sigmoid(m1) and carry [T, S, S] = sinkhorn(m2), where m0, m1 and
    m2 are the parts of mixes times their scale plus base. Sinkhorn: the softmax of each row plus eps, then columns and
    rows in turn divided by their sum plus eps, `iterations` times the columns and once less the rows.
    """
    read, write, carry = _split_mixes_op(mixes, scale, base, streams, iterations, eps)
    return read, write, carry


def _split_mixes(
    mixes: torch.Tensor, scale: torch.Tensor, base: torch.Tensor, streams: int, iterations: int, eps: float
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    sizes = [streams, streams, streams * streams]
    parts = zip(mixes.split(sizes, -1), scale, base.split(sizes), strict=True)
    read, write, carry = (part * factor + offset for part, factor, offset in parts)
    carry = carry.unflatten(-1, (streams, streams)).softmax(-1) + eps
    carry = carry / (carry.sum(-2, keepdim=True) + eps)
    for _ in range(iterations - 1):
        carry = carry / (carry.sum(-1, keepdim=True) + eps)
        carry = carry / (carry.sum(-2, keepdim=True) + eps)
    return read.sigmoid() + eps, 2 * write.sigmoid(), carry.contiguous()


def _outputs(
    mixes: torch.Tensor, scale: torch.Tensor, base: torch.Tensor, streams: int, iterations: int, eps: float
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    tokens = mixes.shape[0]
    return (
        mixes.new_empty(tokens, streams),
        mixes.new_empty(tokens, streams),
        mixes.new_empty(tokens, streams, streams),
    )


def _launch(
    mixes: torch.Tensor, scale: torch.Tensor, base: torch.Tensor, streams: int, iterations: int, eps: float
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    read, write, carry = _outputs(mixes, scale, base, streams, iterations, eps)
    _split_mixes_kernel[(mixes.shape[0],)](
        mixes,
        scale,
        base,
        read,
        write,
        carry,
        eps,
        S=streams,
        ITERATIONS=iterations,
        BLOCK=triton.next_power_of_2(streams),
        num_warps=1,
    )
    return read, write, carry


@triton.jit
def _split_mixes_kernel(
    mixes,
    scale,
    base,
    read,
    write,
    carry,
    eps,
    S: tl.constexpr,
    ITERATIONS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    row = mixes + token * S * (2 + S)
    stream = tl.arange(0, BLOCK)
    inside = stream < S
    reads = tl.load(row + stream, mask=inside, other=0.0) * tl.load(scale)
    reads += tl.load(base + stream, mask=inside, other=0.0)
    tl.store(read + token * S + stream, 1.0 / (1.0 + tl.exp(-reads)) + eps, mask=inside)
    writes = tl.load(row + S + stream, mask=inside, other=0.0) * tl.load(scale + 1)
    writes += tl.load(base + S + stream, mask=inside, other=0.0)
    tl.store(write + token * S + stream, 2.0 / (1.0 + tl.exp(-writes)), mask=inside)

    at = stream[:, None] * S + stream[None, :]
    square = inside[:, None] & inside[None, :]
    matrix = tl.load(row + 2 * S + at, mask=square, other=0.0) * tl.load(scale + 2)
    matrix += tl.load(base + 2 * S + at, mask=square, other=0.0)
    # Columns beyond the streams weigh nothing; rows beyond them stay finite and are then zeroed.
    matrix = tl.where(inside[None, :], matrix, float("-inf"))
    matrix = tl.exp(matrix - tl.max(matrix, 1)[:, None])
    matrix = tl.where(square, matrix / tl.sum(matrix, 1)[:, None] + eps, 0.0)
    matrix = matrix / (tl.sum(matrix, 0)[None, :] + eps)
    for _ in range(ITERATIONS - 1):
        matrix = matrix / (tl.sum(matrix, 1)[:, None] + eps)
        matrix = matrix / (tl.sum(matrix, 0)[None, :] + eps)
    tl.store(carry + token * S * S + at, matrix, mask=square)


_split_mixes_op = define_op(
    "spec_decode::split_mixes",
    "(Tensor mixes, Tensor scale, Tensor base, int streams, int iterations, float eps) -> (Tensor, Tensor, Tensor)",
    cpu=_split_mixes,
    cuda=_launch,
    fake=_outputs,
)
