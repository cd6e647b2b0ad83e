"""Draw the target's tokens in one pass over its logits; only rows that biases or restrictions change need a copy."""

from __future__ import annotations

from typing import NamedTuple

import torch

from builders.kernels.op import define_op
from builders.kernels.sizes import cdiv, next_power_of_2
from builders.kernels.triton_runtime import await_previous, dependent_launch, tl, triton
from spec_decode.sampling import noise
from spec_decode.sampling.kernels.draw_tokens import drawn_tokens, store_draw_kernel
from spec_decode.sampling.kernels.process_logits import ProcessLogits
from spec_decode.sampling.kernels.vocab_blocks import nan_as_inf, vocab_block
from spec_decode.sampling.noise import triton_gumbel, triton_key


class DrawTarget(NamedTuple):
    """Draw tokens from the processed logits, see `drawn_tokens`; int64, in the shape of positions; NO_TOKEN where they
    define no distribution.

    - logits       [R, G, V] any float, any strides
    - copied       fp32 [R, G, V], or [R, 1, V] with a column, contiguous: the processed logits, read only where
                   is_copied
    - is_copied    bool [R]
    - temperature  fp32 [R]
    - seeds        int64 [R], contiguous
    - positions    int64, contiguous, one per row of copied: the absolute positions of the drawn tokens
    - column       int64 [R], 0 to G - 1: the column to draw from in each row; None: all
    """

    logits: torch.Tensor
    copied: torch.Tensor
    is_copied: torch.Tensor
    temperature: torch.Tensor
    seeds: torch.Tensor
    positions: torch.Tensor
    column: torch.Tensor | None

    def reference(self) -> torch.Tensor:
        plain = ProcessLogits(self.logits, self.temperature, self.column).reference()
        processed = torch.where(self.is_copied[:, None, None], self.copied, plain)
        positions = self.positions.view(processed.shape[:2])
        tokens = drawn_tokens(processed, self.temperature[:, None], self.seeds[:, None], positions)
        return tokens.view_as(self.positions)

    def launch(self) -> torch.Tensor:
        logits, device = self.logits, self.logits.device
        rows, group, vocab = self.copied.shape
        draws = rows * group
        block = vocab_block(vocab)
        blocks = cdiv(vocab, block)
        partial_score = torch.empty(draws, blocks, dtype=torch.float32, device=device)
        partial_index = torch.empty(draws, blocks, dtype=torch.int32, device=device)
        tokens = self.fake()
        _block_target_kernel[(draws, blocks)](
            logits_ptr=self.logits,
            copied_ptr=self.copied,
            is_copied_ptr=self.is_copied,
            temperature_ptr=self.temperature,
            seeds_ptr=self.seeds,
            positions_ptr=self.positions,
            selected_ptr=self.column,
            partial_score_ptr=partial_score,
            partial_index_ptr=partial_index,
            num_columns=group,
            vocab_size=vocab,
            stride_row=logits.stride(0),
            stride_column=logits.stride(1),
            stride_token=logits.stride(2),
            STREAM=noise.TARGET,
            BLOCK_V=block,
            num_warps=max(1, min(8, block // 128)),
            **dependent_launch(device),
        )
        store_draw_kernel[(draws,)](
            partial_score_ptr=partial_score,
            partial_index_ptr=partial_index,
            tokens_ptr=tokens,
            num_blocks=blocks,
            RESIDUAL=False,
            BLOCK_B=next_power_of_2(blocks),
            num_warps=1,
            **dependent_launch(device),
        )
        return tokens

    def fake(self) -> torch.Tensor:
        return torch.empty_like(self.positions)


@triton.jit
def _block_target_kernel(
    logits_ptr,  # [R, G, V]
    copied_ptr,  # fp32 [R, G, V]; [R, 1, V] with selected_ptr
    is_copied_ptr,  # bool [R]
    temperature_ptr,  # fp32 [R]
    seeds_ptr,  # int64 [R]
    positions_ptr,  # int64 [R, G]; [R] with selected_ptr
    selected_ptr,  # int64 [R], or None: all columns
    partial_score_ptr,  # out: fp32 [R, G, blocks]; [R, blocks] with selected_ptr, like the next
    partial_index_ptr,  # out: int32 [R, G, blocks]
    num_columns,  # draws per row: G, or 1 with selected_ptr
    vocab_size,  # V
    stride_row,
    stride_column,
    stride_token,
    STREAM: tl.constexpr,  # noise stream
    BLOCK_V: tl.constexpr,  # logits per program
    PDL: tl.constexpr,  # programmatic dependent launch
):
    """argmax of logits / temperature + gumbel over one block of the vocabulary. Grid [R * num_columns, blocks]."""
    await_previous(PDL)
    draw, block = tl.program_id(0).to(tl.int64), tl.program_id(1)
    row = draw // num_columns
    offs_v = block * BLOCK_V + tl.arange(0, BLOCK_V)
    mask = offs_v < vocab_size
    # 1. The processed logits: loaded if copied, else computed here
    temperature = tl.load(temperature_ptr + row)
    if tl.load(is_copied_ptr + row):
        x = tl.load(copied_ptr + draw * vocab_size + offs_v, mask=mask, other=float("-inf"))
    else:
        column = draw % num_columns
        if selected_ptr is not None:
            column = tl.load(selected_ptr + row)
        logits_ptrs = logits_ptr + row * stride_row + column * stride_column
        x = tl.load(logits_ptrs + offs_v.to(tl.int64) * stride_token, mask=mask, other=float("-inf")).to(tl.float32)
        if temperature > 0:
            x = tl.div_rn(x, temperature)
    # 2. The best of them, with noise unless greedy
    x = nan_as_inf(x)
    if temperature > 0:
        x += triton_gumbel(triton_key(tl.load(seeds_ptr + row), tl.load(positions_ptr + draw), STREAM), offs_v)
    max_score, argmax = tl.max(x, 0, return_indices=True)
    part_offs = draw * tl.num_programs(1) + block
    tl.store(partial_score_ptr + part_offs, max_score)
    tl.store(partial_index_ptr + part_offs, block * BLOCK_V + argmax)


draw_target = define_op("spec_decode::draw_target", DrawTarget)
