"""The most probable next tokens of each row, and how probable they are."""

from __future__ import annotations

from typing import NamedTuple

import torch

from builders.kernels.op import define_op
from builders.kernels.triton_runtime import await_previous, dependent_launch, tl, triton
from spec_decode.sampling.kernels.vocab_blocks import merge_sum_exp, store_max_sum_exp, vocab_block


class TopChildren(NamedTuple):
    """The W largest logits of each of R rows: tokens int64 [R, W], largest first and of equal ones the first first, and
    their log-probabilities fp32 [R, W] under softmax of the row, never above 0.

    A token whose logit is -inf or NaN has -inf, and may be any of the vocabulary.

    - logits  [R, V] any float, rows of any stride, V at least W
    - width   W
    """

    logits: torch.Tensor
    width: int

    def reference(self) -> tuple[torch.Tensor, torch.Tensor]:
        logits = self.logits.float().nan_to_num(nan=-torch.inf, posinf=torch.inf, neginf=-torch.inf)
        order = logits.sort(dim=1, descending=True, stable=True)
        found, tokens = order.values[:, : self.width], order.indices[:, : self.width]
        largest = found[:, :1]
        total = torch.where(logits == -torch.inf, 0.0, (logits - largest).exp()).sum(1, keepdim=True)
        scores = torch.where(found == -torch.inf, -torch.inf, found - largest - total.log())
        return tokens.contiguous(), scores.clamp(max=0)

    def launch(self) -> tuple[torch.Tensor, torch.Tensor]:
        tokens, scores = self.fake()
        (rows, vocab), device, width = self.logits.shape, self.logits.device, self.width
        block = max(vocab_block(vocab), triton.next_power_of_2(width))
        blocks = triton.cdiv(vocab, block)
        largest = torch.empty(rows, blocks, width, dtype=torch.float32, device=device)
        at = torch.empty(rows, blocks, width, dtype=torch.int32, device=device)
        block_max, sum_exp = torch.empty(2, rows, blocks, dtype=torch.float32, device=device)
        _block_top_kernel[(rows, blocks)](
            self.logits,
            largest,
            at,
            block_max,
            sum_exp,
            vocab,
            self.logits.stride(0),
            WIDTH=width,
            BLOCK=block,
            num_warps=max(1, min(8, block // 256)),
            **dependent_launch(device),
        )
        merged = triton.next_power_of_2(blocks * width)
        _merge_top_kernel[(rows,)](
            largest,
            at,
            block_max,
            sum_exp,
            tokens,
            scores,
            vocab,
            blocks,
            WIDTH=width,
            BLOCKS=triton.next_power_of_2(blocks),
            BLOCK=merged,
            num_warps=max(1, min(8, merged // 256)),
            **dependent_launch(device),
        )
        return tokens, scores

    def fake(self) -> tuple[torch.Tensor, torch.Tensor]:
        shape, new = (len(self.logits), self.width), self.logits.new_empty
        return new(shape, dtype=torch.int64), new(shape, dtype=torch.float32)


@triton.jit
def _block_top_kernel(
    logits,  # [R, V]
    largest,  # out: fp32 [R, blocks, W]
    at,  # out: int32 [R, blocks, W]
    block_max,  # out: fp32 [R, blocks]
    sum_exp,  # out: fp32 [R, blocks]
    vocab,  # V
    row_stride,
    WIDTH: tl.constexpr,  # W
    BLOCK: tl.constexpr,  # logits of a program
    PDL: tl.constexpr,
):
    """One program per row and block of the vocabulary: the block's W largest logits, and its part of the softmax."""
    await_previous(PDL)
    row = tl.program_id(0).to(tl.int64)
    block = tl.program_id(1)
    token = block * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(logits + row * row_stride + token, mask=token < vocab, other=float("-inf")).to(tl.float32)
    x = tl.where(x == x, x, float("-inf"))
    part = row * tl.num_programs(1) + block
    store_max_sum_exp(x, block_max + part, sum_exp + part)
    for rank in range(0, WIDTH):
        best, first = tl.max(x, 0, return_indices=True)
        tl.store(largest + part * WIDTH + rank, best)
        tl.store(at + part * WIDTH + rank, block * BLOCK + first)
        x = tl.where(token == block * BLOCK + first, float("-inf"), x)


@triton.jit
def _merge_top_kernel(
    largest,  # fp32 [R, blocks, W]
    at,  # int32 [R, blocks, W]
    block_max,  # fp32 [R, blocks]
    sum_exp,  # fp32 [R, blocks]
    tokens,  # out: int64 [R, W]
    scores,  # out: fp32 [R, W]
    vocab,  # V
    blocks,  # of the vocabulary
    WIDTH: tl.constexpr,  # W
    BLOCKS: tl.constexpr,  # blocks, rounded up to a power of two
    BLOCK: tl.constexpr,  # blocks * W, likewise
    PDL: tl.constexpr,
):
    """One program per row: the W largest of its blocks', and their log-probabilities."""
    await_previous(PDL)
    row = tl.program_id(0).to(tl.int64)
    # The row's largest logit, and the logarithm of its sum of exponentials
    block = tl.arange(0, BLOCKS)
    maxima = tl.load(block_max + row * blocks + block, mask=block < blocks, other=float("-inf"))
    sums = tl.load(sum_exp + row * blocks + block, mask=block < blocks, other=0.0)
    peak, total = merge_sum_exp(maxima, sums)
    total = tl.log(total)
    # The W largest, one after another
    candidate = tl.arange(0, BLOCK)
    inside = candidate < blocks * WIDTH
    x = tl.load(largest + row * blocks * WIDTH + candidate, mask=inside, other=float("-inf"))
    token = tl.load(at + row * blocks * WIDTH + candidate, mask=inside, other=0)
    for rank in range(0, WIDTH):
        # Candidates lie in the order of their blocks: of equal ones the first has the lowest token.
        best, first = tl.max(x, 0, return_indices=True)
        chosen = tl.sum(tl.where(candidate == first, token, 0), 0)
        score = tl.where(best == float("-inf"), best, tl.minimum(best - peak - total, 0.0))
        tl.store(tokens + row * WIDTH + rank, tl.minimum(chosen, vocab - 1).to(tl.int64))
        tl.store(scores + row * WIDTH + rank, score)
        x = tl.where(candidate == first, float("-inf"), x)


top_children = define_op("spec_decode::top_children", TopChildren)
