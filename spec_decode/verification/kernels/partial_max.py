"""Partial results per vocabulary block for softmax and argmax of a draft's columns.

Legend: R rows, K draft tokens (columns) per row, V tokens of the vocabulary.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from builders.kernels.sizes import cdiv, next_power_of_2
from builders.kernels.triton_runtime import await_previous, dependent_launch, tl, triton
from spec_decode.sampling.kernels.vocab_blocks import nan_as_inf, store_max_sum_exp, vocab_block
from spec_decode.verification.kernels.verify_arguments import VerifyArguments


class PartialMax(NamedTuple):
    """Partial results over the blocks of each draft column's logits, [R * K, blocks].

    - largest   fp32 [2, R * K, blocks], of p and of q; q's only in random rows. In greedy rows +inf stands for NaN
    - sum_exp   fp32 [2, R * K, blocks], in random rows: the sum of exp(logit - largest)
    - argmax    int32 [R * K, blocks], in greedy rows: p's first largest logit
    """

    largest: torch.Tensor
    sum_exp: torch.Tensor
    argmax: torch.Tensor

    @classmethod
    def launch(cls, arguments: VerifyArguments) -> PartialMax:
        """Run one pass over the logits of all draft columns, without the column after the last."""
        processed, _, draft_logits, temperature, *_ = arguments
        (rows, columns, vocab), device = draft_logits.shape, processed.device
        block = vocab_block(vocab)
        blocks = cdiv(vocab, block)
        largest, sum_exp = torch.empty(2, 2, rows * columns, blocks, dtype=torch.float32, device=device)
        argmax = torch.empty(rows * columns, blocks, dtype=torch.int32, device=device)
        _partial_max_kernel[(rows * columns, blocks)](
            target_logits_ptr=processed,
            draft_logits_ptr=draft_logits,
            temperature_ptr=temperature,
            max_ptr=largest,
            sum_exp_ptr=sum_exp,
            argmax_ptr=argmax,
            num_drafts=columns,
            vocab_size=vocab,
            stride_draft_row=draft_logits.stride(0),
            stride_draft_pos=draft_logits.stride(1),
            stride_draft_token=draft_logits.stride(2),
            BLOCK_V=block,
            num_warps=max(1, min(8, block // 256)),
            **dependent_launch(device),
        )
        return cls(largest, sum_exp, argmax)

    def launch_options(self, columns: int) -> dict[str, int]:
        """Return the launch options of a kernel that merges these blocks over K columns, with one program per row."""
        blocks = next_power_of_2(self.argmax.shape[1])
        block_k = next_power_of_2(columns)
        warps = max(1, min(8, blocks * block_k // 256))
        return {"BLOCK_B": blocks, "BLOCK_K": block_k, "num_warps": warps}


@triton.jit
def _partial_max_kernel(
    target_logits_ptr,  # fp32 [R, 1 + K, V]
    draft_logits_ptr,  # fp32 [R, K, V]
    temperature_ptr,  # fp32 [R]
    max_ptr,  # out: fp32 [2, R * K, blocks]
    sum_exp_ptr,  # out: fp32 [2, R * K, blocks]
    argmax_ptr,  # out: int32 [R * K, blocks]
    num_drafts,  # K
    vocab_size,  # V
    stride_draft_row,
    stride_draft_pos,
    stride_draft_token,
    BLOCK_V: tl.constexpr,  # logits per program
    PDL: tl.constexpr,  # programmatic dependent launch
):
    """max(x) and sum of e^(x - max(x)), or argmax(x), over one vocabulary block of one draft column x.

    Grid [R * K, blocks].
    """
    await_previous(PDL)
    draft_row = tl.program_id(0).to(tl.int64)
    block = tl.program_id(1)
    row, k = draft_row // num_drafts, draft_row % num_drafts
    offs_v = block * BLOCK_V + tl.arange(0, BLOCK_V)
    mask = offs_v < vocab_size
    part_offs = draft_row * tl.num_programs(1) + block
    temperature = tl.load(temperature_ptr + row)
    # The target has 1 + K columns per row: row * (1 + K) + k == draft_row + row.
    target_logits = tl.load(target_logits_ptr + (draft_row + row) * vocab_size + offs_v, mask=mask, other=float("-inf"))
    if temperature > 0:
        # A random row: max and sum of the target's logits, then of the draft's
        draft_ptrs = draft_logits_ptr + row * stride_draft_row + k * stride_draft_pos
        draft_ptrs += offs_v.to(tl.int64) * stride_draft_token
        draft_logits = tl.load(draft_ptrs, mask=mask, other=float("-inf"))
        store_max_sum_exp(target_logits, max_ptr + part_offs, sum_exp_ptr + part_offs)
        part_offs += tl.num_programs(0) * tl.num_programs(1)  # the draft's plane
        store_max_sum_exp(draft_logits, max_ptr + part_offs, sum_exp_ptr + part_offs)
    else:
        # A greedy row: the target's first largest logit
        max_logit, argmax = tl.max(nan_as_inf(target_logits), 0, return_indices=True)
        tl.store(max_ptr + part_offs, max_logit)
        tl.store(argmax_ptr + part_offs, block * BLOCK_V + argmax)
