"""Process logits for sampling: convert to fp32 and divide by the temperature."""

from __future__ import annotations

from typing import NamedTuple

import torch

from builders.kernels.op import define_op
from builders.kernels.sizes import cdiv
from builders.kernels.triton_runtime import await_previous, dependent_launch, tl, triton
from spec_decode.sampling.kernels.vocab_blocks import vocab_block


def is_restricted(top_k: torch.Tensor, top_p: torch.Tensor, vocab: int) -> torch.Tensor:
    """Return whether top_k int32 [R] or top_p fp32 [R] restricts each row of `vocab` logits: bool [R]."""
    return ((top_k > 0) & (top_k < vocab)) | (top_p < 1)


@triton.jit
def restriction(top_k_ptr, top_p_ptr, request, vocab_size):
    """Return a request's k and p, and whether each is on."""
    k = tl.load(top_k_ptr + request)
    p = tl.load(top_p_ptr + request)
    return k, p, (k > 0) & (k < vocab_size), p < 1


class ProcessLogits(NamedTuple):
    """Return logits / temperature, contiguous fp32 [R, G, V]; [R, 1, V] if `column` selects one column per row.

    - logits       [R, G, V] any float, any strides
    - temperature  fp32 [R]; 0, greedy, does not change the logits
    - column       int64 [R], 0 to G - 1, or None for all
    - top_k        int32 [R], like top_p fp32 [R]: only rows that either restricts are written; None writes all
    """

    logits: torch.Tensor
    temperature: torch.Tensor
    column: torch.Tensor | None = None
    top_k: torch.Tensor | None = None
    top_p: torch.Tensor | None = None

    def reference(self) -> torch.Tensor:
        logits, temperature = self.logits, self.temperature
        if self.column is not None:
            logits = logits[torch.arange(len(logits)), self.column][:, None]
        out = (logits.float() / torch.where(temperature > 0, temperature, 1.0)[:, None, None]).contiguous()
        if self.top_k is not None and self.top_p is not None:
            # Poison rows that are not written, so that a test notices a read.
            out[~is_restricted(self.top_k, self.top_p, logits.shape[2])] = float("nan")
        return out

    def launch(self) -> torch.Tensor:
        out = self.fake()
        rows, group, vocab = out.shape
        block = vocab_block(vocab)
        _process_kernel[(rows * group, cdiv(vocab, block))](
            logits_ptr=self.logits,
            temperature_ptr=self.temperature,
            selected_ptr=self.column,
            top_k_ptr=self.top_k,
            top_p_ptr=self.top_p,
            out_ptr=out,
            num_columns=group,
            vocab_size=vocab,
            stride_row=self.logits.stride(0),
            stride_column=self.logits.stride(1),
            stride_token=self.logits.stride(2),
            BLOCK_V=block,
            num_warps=max(1, min(8, block // 256)),
            **dependent_launch(out.device),
        )
        return out

    def fake(self) -> torch.Tensor:
        rows, group, vocab = self.logits.shape
        return self.logits.new_empty(rows, group if self.column is None else 1, vocab, dtype=torch.float32)


@triton.jit
def _process_kernel(
    logits_ptr,  # [R, G, V]
    temperature_ptr,  # fp32 [R]
    selected_ptr,  # int64 [R], or None: all columns
    top_k_ptr,  # int32 [R], or None: all rows
    top_p_ptr,  # fp32 [R], or None: all rows
    out_ptr,  # out: fp32 [R, G, V]; [R, 1, V] with selected_ptr
    num_columns,  # columns of out: G, or 1 with selected_ptr
    vocab_size,  # V
    stride_row,
    stride_column,
    stride_token,
    BLOCK_V: tl.constexpr,  # logits per program
    PDL: tl.constexpr,  # programmatic dependent launch
):
    """out = logits / temperature. Grid [rows of out, blocks of the vocabulary]."""
    await_previous(PDL)
    out_row = tl.program_id(0).to(tl.int64)
    row, column = out_row // num_columns, out_row % num_columns
    if selected_ptr is not None:
        column = tl.load(selected_ptr + row)
    offs_v = tl.program_id(1) * BLOCK_V + tl.arange(0, BLOCK_V)
    mask = offs_v < vocab_size
    if top_k_ptr is not None:
        _, _, has_top_k, has_top_p = restriction(top_k_ptr, top_p_ptr, row, vocab_size)
        mask = mask & (has_top_k | has_top_p)
    logits_ptrs = logits_ptr + row * stride_row + column * stride_column
    x = tl.load(logits_ptrs + offs_v.to(tl.int64) * stride_token, mask=mask)
    temperature = tl.load(temperature_ptr + row)
    x = x.to(tl.float32)
    if temperature > 0:
        x = tl.div_rn(x, temperature)
    tl.store(out_ptr + out_row * vocab_size + offs_v, x, mask=mask)


process_logits = define_op("spec_decode::process_logits", ProcessLogits)
