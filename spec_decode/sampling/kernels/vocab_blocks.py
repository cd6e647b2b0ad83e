"""Split a row of logits over programs, and store and merge their partial results."""

from __future__ import annotations

from builders.kernels.sizes import next_power_of_2
from builders.kernels.triton_runtime import tl, triton

_MIN_BLOCKS = 64
"""The fewest programs per row, within the bounds below: a single row must occupy a device."""

_BLOCK_BOUNDS = (512, 4096)
"""The fewest and the most logits per program."""


def vocab_block(vocab: int) -> int:
    """Return the logits per program, a power of two, for rows of `vocab` logits."""
    fewest, most = _BLOCK_BOUNDS
    share = 1 << (max(1, vocab // _MIN_BLOCKS).bit_length() - 1)
    block: int = min(max(fewest, min(most, share)), next_power_of_2(vocab))
    return block


@triton.jit
def nan_as_inf(x):
    """Return x with +inf for NaN, which a maximum would drop. The logits x then hold neither NaN nor +inf, nor -inf
    alone, exactly if their maximum is finite."""
    return tl.where(x == x, x, float("inf"))


@triton.jit
def store_max_sum_exp(logits, max_ptr, sum_exp_ptr):
    """Store max(logits) and the sum of exp(logits - max(logits)) of a block."""
    block_max = tl.max(logits, 0)
    tl.store(max_ptr, block_max)
    # A block of only -inf has the sum 0; -inf - (-inf) would make it NaN.
    tl.store(sum_exp_ptr, tl.sum(tl.where(logits == float("-inf"), 0.0, tl.exp(logits - block_max)), 0))


@triton.jit
def merge_sum_exp(block_max, block_sum):
    """Return row_max = max(block_max) and row_sum = sum(block_sum * exp(block_max - row_max)), along the last axis. The
    sum of a row with NaN or +inf is NaN."""
    axis: tl.constexpr = len(block_max.shape) - 1
    row_max = tl.max(block_max, axis)
    rescaled = block_sum * tl.exp(block_max - tl.expand_dims(row_max, axis))
    # A block of only -inf has the sum 0; -inf - (-inf) would make it NaN.
    return row_max, tl.sum(tl.where(block_sum == 0, 0.0, rescaled), axis)


@triton.jit
def merge_argmax(score_ptrs, index_ptrs, mask):
    """Return the largest score of the blocks, and the lowest index among the blocks that reach it."""
    INT32_MAX: tl.constexpr = 2**31 - 1
    score = tl.load(score_ptrs, mask=mask, other=float("-inf"))
    index = tl.load(index_ptrs, mask=mask, other=INT32_MAX)
    max_score = tl.max(score, 0)
    return max_score, tl.min(tl.where(score == max_score, index, INT32_MAX), 0)
