"""The most probable next tokens of each row, with their log-probabilities."""

from __future__ import annotations

from typing import NamedTuple

import torch

from builders.kernels.op import define_op
from builders.kernels.rows import whole_rows
from builders.kernels.sizes import cdiv, next_power_of_2
from builders.kernels.triton_runtime import await_previous, dependent_launch, tl, triton
from spec_decode.sampling.kernels.vocab_blocks import merge_sum_exp, store_max_sum_exp, vocab_block


class TopChildren(NamedTuple):
    """Return the tokens of the W largest logits of R rows, int64 [R, W], largest first and ties in token order, and
    their log-probabilities fp32 [R, W] under softmax(row / temperature), never above 0.

    A logit of -inf or NaN gives the log-probability -inf, and its token is arbitrary.

    - logits       [R, V] any float, V at least W
    - width        W
    - temperature  fp32 [R], above 0; None is 1 for all
    """

    logits: torch.Tensor
    width: int
    temperature: torch.Tensor | None

    def reference(self) -> tuple[torch.Tensor, torch.Tensor]:
        logits = self.logits.float().nan_to_num(nan=-torch.inf, posinf=torch.inf, neginf=-torch.inf)
        if self.temperature is not None:
            logits = logits / self.temperature[:, None]
        order = logits.sort(dim=1, descending=True, stable=True)
        found, tokens = order.values[:, : self.width], order.indices[:, : self.width]
        largest = found[:, :1]
        total = torch.where(logits == -torch.inf, 0.0, (logits - largest).exp()).sum(1, keepdim=True)
        scores = torch.where(found == -torch.inf, -torch.inf, found - largest - total.log())
        return tokens.contiguous(), scores.clamp(max=0)

    def launch(self) -> tuple[torch.Tensor, torch.Tensor]:
        tokens, scores = self.fake()
        logits, width = whole_rows(self.logits), self.width
        (rows, vocab), device = logits.shape, logits.device
        block = max(vocab_block(vocab), next_power_of_2(width))
        blocks = cdiv(vocab, block)
        largest = torch.empty(rows, blocks, width, dtype=torch.float32, device=device)
        at = torch.empty(rows, blocks, width, dtype=torch.int32, device=device)
        block_max, sum_exp = torch.empty(2, rows, blocks, dtype=torch.float32, device=device)
        _block_top_kernel[(rows, blocks)](
            logits_ptr=logits,
            temperature_ptr=self.temperature,
            max_ptr=largest,
            argmax_ptr=at,
            block_max_ptr=block_max,
            sum_exp_ptr=sum_exp,
            vocab_size=vocab,
            stride_logits=logits.stride(0),
            WIDTH=width,
            BLOCK_V=block,
            num_warps=max(1, min(8, block // 256)),
            **dependent_launch(device),
        )
        merged = next_power_of_2(blocks * width)
        _merge_top_kernel[(rows,)](
            max_ptr=largest,
            argmax_ptr=at,
            block_max_ptr=block_max,
            sum_exp_ptr=sum_exp,
            tokens_ptr=tokens,
            scores_ptr=scores,
            vocab_size=vocab,
            num_blocks=blocks,
            WIDTH=width,
            BLOCK_B=next_power_of_2(blocks),
            BLOCK_C=merged,
            num_warps=max(1, min(8, merged // 256)),
            **dependent_launch(device),
        )
        return tokens, scores

    def fake(self) -> tuple[torch.Tensor, torch.Tensor]:
        shape, new = (len(self.logits), self.width), self.logits.new_empty
        return new(shape, dtype=torch.int64), new(shape, dtype=torch.float32)


@triton.jit
def _block_top_kernel(
    logits_ptr,  # [R, V]
    temperature_ptr,  # fp32 [R], or None
    max_ptr,  # out: fp32 [R, blocks, W]
    argmax_ptr,  # out: int32 [R, blocks, W]
    block_max_ptr,  # out: fp32 [R, blocks]
    sum_exp_ptr,  # out: fp32 [R, blocks]
    vocab_size,  # V
    stride_logits,
    WIDTH: tl.constexpr,  # W
    BLOCK_V: tl.constexpr,  # logits per program
    PDL: tl.constexpr,  # programmatic dependent launch
):
    """The W largest logits of one vocabulary block, and its partial softmax. Grid [R, blocks]."""
    await_previous(PDL)
    row = tl.program_id(0).to(tl.int64)
    block = tl.program_id(1)
    offs_v = block * BLOCK_V + tl.arange(0, BLOCK_V)
    x = tl.load(logits_ptr + row * stride_logits + offs_v, mask=offs_v < vocab_size, other=float("-inf")).to(tl.float32)
    x = tl.where(x == x, x, float("-inf"))
    if temperature_ptr is not None:
        x = tl.div_rn(x, tl.load(temperature_ptr + row))
    part_offs = row * tl.num_programs(1) + block
    store_max_sum_exp(x, block_max_ptr + part_offs, sum_exp_ptr + part_offs)
    for rank in range(0, WIDTH):
        max_logit, argmax = tl.max(x, 0, return_indices=True)
        tl.store(max_ptr + part_offs * WIDTH + rank, max_logit)
        tl.store(argmax_ptr + part_offs * WIDTH + rank, block * BLOCK_V + argmax)
        x = tl.where(offs_v == block * BLOCK_V + argmax, float("-inf"), x)


@triton.jit
def _merge_top_kernel(
    max_ptr,  # fp32 [R, blocks, W]
    argmax_ptr,  # int32 [R, blocks, W]
    block_max_ptr,  # fp32 [R, blocks]
    sum_exp_ptr,  # fp32 [R, blocks]
    tokens_ptr,  # out: int64 [R, W]
    scores_ptr,  # out: fp32 [R, W]
    vocab_size,  # V
    num_blocks,  # of the vocabulary
    WIDTH: tl.constexpr,  # W
    BLOCK_B: tl.constexpr,  # blocks, rounded up to a power of two
    BLOCK_C: tl.constexpr,  # blocks * W, rounded up to a power of two
    PDL: tl.constexpr,  # programmatic dependent launch
):
    """Merge the W largest logits of a row's blocks, with their log-probabilities. One program per row."""
    await_previous(PDL)
    row = tl.program_id(0).to(tl.int64)
    # 1. The row's largest logit, and the logarithm of its sum of exponentials
    offs_b = tl.arange(0, BLOCK_B)
    block_max = tl.load(block_max_ptr + row * num_blocks + offs_b, mask=offs_b < num_blocks, other=float("-inf"))
    block_sum = tl.load(sum_exp_ptr + row * num_blocks + offs_b, mask=offs_b < num_blocks, other=0.0)
    row_max, row_sum = merge_sum_exp(block_max, block_sum)
    log_sum = tl.log(row_sum)
    # 2. The W largest, one after another
    offs_c = tl.arange(0, BLOCK_C)
    mask = offs_c < num_blocks * WIDTH
    x = tl.load(max_ptr + row * num_blocks * WIDTH + offs_c, mask=mask, other=float("-inf"))
    token = tl.load(argmax_ptr + row * num_blocks * WIDTH + offs_c, mask=mask, other=0)
    for rank in range(0, WIDTH):
        # Candidates are in order of their blocks, so the first of equal ones has the lowest token.
        max_logit, argmax = tl.max(x, 0, return_indices=True)
        chosen = tl.sum(tl.where(offs_c == argmax, token, 0), 0)
        score = tl.where(max_logit == float("-inf"), max_logit, tl.minimum(max_logit - row_max - log_sum, 0.0))
        tl.store(tokens_ptr + row * WIDTH + rank, tl.minimum(chosen, vocab_size - 1).to(tl.int64))
        tl.store(scores_ptr + row * WIDTH + rank, score)
        x = tl.where(offs_c == argmax, float("-inf"), x)


top_children = define_op("spec_decode::top_children", TopChildren)
