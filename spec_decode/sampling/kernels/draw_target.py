"""Draw the target's token of each row in one pass over its logits, which are copied only where top_k or top_p restrict
them."""

from __future__ import annotations

from typing import NamedTuple

import torch

from builders.kernels.op import define_op
from builders.kernels.triton_runtime import await_previous, dependent_launch, tl, triton
from spec_decode.sampling import noise
from spec_decode.sampling.kernels.draw_tokens import DrawTokens, store_draw_kernel
from spec_decode.sampling.kernels.process_logits import ProcessLogits
from spec_decode.sampling.kernels.restriction import is_restricted, restriction
from spec_decode.sampling.kernels.vocab_blocks import vocab_block
from spec_decode.sampling.noise import triton_gumbel, triton_key


class DrawTarget(NamedTuple):
    """int64 [R]: what DrawTokens draws from the processed logits.

    - logits       [R, G, V] any float, of any strides
    - restricted   fp32 [R, 1, V], contiguous: the processed logits, read only of rows that top_k or top_p restrict
    - temperature  fp32 [R]
    - top_k        int32 [R]
    - top_p        fp32 [R]
    - seeds        int64 [R], contiguous
    - positions    int64 [R], contiguous: the absolute positions of the tokens drawn
    - column       int64 [R], 0 to G - 1: which of a row's logits are drawn from; None: the first
    """

    logits: torch.Tensor
    restricted: torch.Tensor
    temperature: torch.Tensor
    top_k: torch.Tensor
    top_p: torch.Tensor
    seeds: torch.Tensor
    positions: torch.Tensor
    column: torch.Tensor | None

    def reference(self) -> torch.Tensor:
        column = torch.zeros_like(self.positions) if self.column is None else self.column
        plain = ProcessLogits(self.logits, self.temperature, column, None, None).reference()
        rows = is_restricted(self.top_k, self.top_p, self.logits.shape[2])[:, None, None]
        processed = torch.where(rows, self.restricted, plain)[:, 0]
        return DrawTokens(processed, self.temperature, self.seeds, self.positions).reference()

    def launch(self) -> torch.Tensor:
        logits, device = self.logits, self.logits.device
        rows, _, vocab = logits.shape
        block = vocab_block(vocab)
        blocks = triton.cdiv(vocab, block)
        partial_score = torch.empty(rows, blocks, dtype=torch.float32, device=device)
        partial_index = torch.empty(rows, blocks, dtype=torch.int32, device=device)
        tokens = self.fake()
        _block_target_kernel[(rows, blocks)](
            *self,
            partial_score,
            partial_index,
            vocab,
            *logits.stride(),
            STREAM=noise.TARGET,
            BLOCK=block,
            num_warps=max(1, min(8, block // 128)),
            **dependent_launch(device),
        )
        store_draw_kernel[(rows,)](
            partial_score,
            partial_index,
            tokens,
            vocab,
            blocks,
            RESIDUAL=False,
            BLOCK=triton.next_power_of_2(blocks),
            num_warps=1,
            **dependent_launch(device),
        )
        return tokens

    def fake(self) -> torch.Tensor:
        return torch.empty_like(self.positions)


@triton.jit
def _block_target_kernel(
    logits,  # [R, G, V]
    restricted,  # fp32 [R, 1, V]
    temperature,  # fp32 [R]
    top_k,  # int32 [R]
    top_p,  # fp32 [R]
    seeds,  # int64 [R]
    positions,  # int64 [R]
    selected,  # int64 [R], or None: the first column
    partial_score,  # out: fp32 [R, blocks]
    partial_index,  # out: int32 [R, blocks]
    vocab,  # V
    row_stride,
    column_stride,
    token_stride,
    STREAM: tl.constexpr,  # of the noise
    BLOCK: tl.constexpr,  # logits of a program
    PDL: tl.constexpr,
):
    """One program per row and block of the vocabulary: the block's best token."""
    await_previous(PDL)
    row, block = tl.program_id(0).to(tl.int64), tl.program_id(1)
    token = block * BLOCK + tl.arange(0, BLOCK)
    inside = token < vocab
    # The processed logits, restricted before or made here
    row_temperature = tl.load(temperature + row)
    _, _, has_top_k, has_top_p = restriction(top_k, top_p, row, vocab)
    if has_top_k | has_top_p:
        x = tl.load(restricted + row * vocab + token, mask=inside, other=float("-inf"))
    else:
        line = logits + row * row_stride
        if selected is not None:
            line += tl.load(selected + row) * column_stride
        x = tl.load(line + token * token_stride, mask=inside, other=float("-inf")).to(tl.float32)
        if row_temperature > 0:
            x = tl.div_rn(x, row_temperature)
    # The best of them, with noise in a random row
    if row_temperature > 0:
        x += triton_gumbel(triton_key(tl.load(seeds + row), tl.load(positions + row), STREAM), token)
    best, first = tl.max(x, 0, return_indices=True)
    part = row * tl.num_programs(1) + block
    tl.store(partial_score + part, best)
    tl.store(partial_index + part, block * BLOCK + first)


draw_target = define_op("spec_decode::draw_target", DrawTarget)
