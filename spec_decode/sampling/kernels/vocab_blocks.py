"""How a row of logits is divided over programs, and how their partial results are stored and merged."""

from __future__ import annotations

from builders.kernels.triton_runtime import tl, triton

_MIN_BLOCKS = 64
"""Programs per row, at least, within the bounds below: a single row must occupy a device."""

_BLOCK_BOUNDS = (512, 4096)
"""The fewest and the most logits of a program."""


def vocab_block(vocab: int) -> int:
    """Logits of one program: a power of two, for rows of `vocab` logits."""
    fewest, most = _BLOCK_BOUNDS
    share = 1 << (max(1, vocab // _MIN_BLOCKS).bit_length() - 1)
    block: int = min(max(fewest, min(most, share)), triton.next_power_of_2(vocab))
    return block


@triton.jit
def store_max_sum_exp(x, partial_max, partial_sum_exp):
    """Store a block's largest logit and the sum of exp(logit - largest)."""
    largest = tl.max(x, 0)
    tl.store(partial_max, largest)
    # A block of -inf alone has the sum 0; -inf minus itself would make it NaN.
    tl.store(partial_sum_exp, tl.sum(tl.where(x == float("-inf"), 0.0, tl.exp(x - largest)), 0))


@triton.jit
def merge_sum_exp(largest, sum_exp):
    """Of parts along the last axis, each with its largest logit and its sum of exp(logit - largest): both of all
    together."""
    axis: tl.constexpr = len(largest.shape) - 1
    most = tl.max(largest, axis)
    shifted = sum_exp * tl.exp(largest - tl.expand_dims(most, axis))
    # A part of -inf alone has the sum 0; -inf minus itself would make it NaN.
    return most, tl.sum(tl.where(sum_exp > 0, shifted, 0.0), axis)


@triton.jit
def merge_argmax(partial_score, partial_index, inside):
    """The largest of the blocks' scores, and the lowest index among the blocks that reach it."""
    score = tl.load(partial_score, mask=inside, other=float("-inf"))
    index = tl.load(partial_index, mask=inside, other=2147483647)  # the largest int32
    best = tl.max(score, 0)
    return best, tl.min(tl.where(score == best, index, 2147483647), 0)
