"""Per block of the vocabulary, what softmax and argmax of a draft's columns need."""

from __future__ import annotations

from typing import NamedTuple

import torch

from builders.kernels.triton_runtime import await_previous, dependent_launch, tl, triton
from spec_decode.sampling.kernels.vocab_blocks import store_max_sum_exp, vocab_block
from spec_decode.verification.kernels.verify_arguments import VerifyArguments


class PartialMax(NamedTuple):
    """Partial results over the blocks of each draft column's logits, [R * K, blocks].

    - largest   fp32 [2, R * K, blocks], of p and of q; q's in random rows alone
    - sum_exp   fp32 [2, R * K, blocks], in random rows: the sum of exp(logit - largest)
    - argmax    int32 [R * K, blocks], in greedy rows: p's first largest logit
    """

    largest: torch.Tensor
    sum_exp: torch.Tensor
    argmax: torch.Tensor

    @classmethod
    def launch(cls, arguments: VerifyArguments) -> PartialMax:
        """One pass over the logits of all draft columns, not of the column after the last."""
        processed, _, draft_logits, temperature, *_ = arguments
        (rows, columns, vocab), device = draft_logits.shape, processed.device
        block = vocab_block(vocab)
        blocks = triton.cdiv(vocab, block)
        largest, sum_exp = torch.empty(2, 2, rows * columns, blocks, dtype=torch.float32, device=device)
        argmax = torch.empty(rows * columns, blocks, dtype=torch.int32, device=device)
        _partial_max_kernel[(rows * columns, blocks)](
            processed,
            draft_logits,
            temperature,
            largest,
            sum_exp,
            argmax,
            columns,
            vocab,
            *draft_logits.stride(),
            BLOCK=block,
            num_warps=max(1, min(8, block // 256)),
            **dependent_launch(device),
        )
        return cls(largest, sum_exp, argmax)

    def launch_options(self, columns: int) -> dict[str, int]:
        """Launch options of a kernel of one program per row that merges these blocks over K columns."""
        blocks = triton.next_power_of_2(self.argmax.shape[1])
        block_k = triton.next_power_of_2(columns)
        warps = max(1, min(8, blocks * block_k // 256))
        return {"BLOCK": blocks, "BLOCK_K": block_k, "num_warps": warps}


@triton.jit
def _partial_max_kernel(
    processed,  # fp32 [R, 1 + K, V]
    draft_logits,  # fp32 [R, K, V]
    temperature,  # fp32 [R]
    largest,  # out: fp32 [2, R * K, blocks]
    sum_exp,  # out: fp32 [2, R * K, blocks]
    argmax,  # out: int32 [R * K, blocks]
    columns,  # K
    vocab,  # V
    draft_row_stride,
    draft_column_stride,
    draft_token_stride,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    """One program per draft column of a row and block of the vocabulary."""
    await_previous(PDL)
    line = tl.program_id(0).to(tl.int64)
    block = tl.program_id(1)
    row, column = line // columns, line % columns
    token = block * BLOCK + tl.arange(0, BLOCK)
    inside = token < vocab
    part = line * tl.num_programs(1) + block
    row_temperature = tl.load(temperature + row)
    x = tl.load(processed + (line + row) * vocab + token, mask=inside, other=float("-inf"))
    if row_temperature > 0:
        # A random row: the largest logit and the sum of p, then those of q
        y = draft_logits + row * draft_row_stride + column * draft_column_stride + token * draft_token_stride
        y = tl.load(y, mask=inside, other=float("-inf"))
        store_max_sum_exp(x, largest + part, sum_exp + part)
        part += tl.num_programs(0) * tl.num_programs(1)
        store_max_sum_exp(y, largest + part, sum_exp + part)
    else:
        # A greedy row: the first largest logit of p
        best, first = tl.max(x, 0, return_indices=True)
        tl.store(largest + part, best)
        tl.store(argmax + part, block * BLOCK + first)
