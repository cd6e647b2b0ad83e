"""Process logits for sampling: convert to fp32, edit them and divide by the temperature."""

from __future__ import annotations

from typing import NamedTuple

import torch

from builders.kernels.op import define_op
from builders.kernels.sizes import cdiv
from builders.kernels.triton_runtime import await_previous, dependent_launch, tl, triton
from spec_decode.sampling.kernels.edit_logits import (
    add_biases,
    apply_penalties,
    has_penalties,
    is_penalised,
    with_biases,
    with_penalties,
)
from spec_decode.sampling.kernels.vocab_blocks import vocab_block


def is_restricted(top_k: torch.Tensor, top_p: torch.Tensor, min_log_p: torch.Tensor, vocab: int) -> torch.Tensor:
    """Return whether top_k int32 [R], top_p fp32 [R] or min_log_p fp32 [R] restricts each row of `vocab` logits: bool
    [R]."""
    return ((top_k > 0) & (top_k < vocab)) | (top_p < 1) | (min_log_p > -torch.inf)


@triton.jit
def restriction(top_k_ptr, top_p_ptr, min_log_p_ptr, request, vocab_size):
    """Return a request's k, p and log(min_p), and whether each is on."""
    k = tl.load(top_k_ptr + request)
    p = tl.load(top_p_ptr + request)
    m = tl.load(min_log_p_ptr + request)
    return k, p, m, (k > 0) & (k < vocab_size), p < 1, m > float("-inf")


class ProcessLogits(NamedTuple):
    """Return edited logits / temperature, contiguous fp32 [R, G, V]; [R, 1, V] if `column` selects one column per
    row.

    - logits       [R, G, V] any float, any strides
    - temperature  fp32 [R]; 0, greedy, does not change the logits
    - column       int64 [R], 0 to G - 1, or None for all
    - top_k        int32 [R], like the next two, fp32 [R]: what restricts the rows; None writes all rows
    - top_p
    - min_log_p
    - is_copied    bool [R], written if there is a top_k: whether edits or restrictions change the row. Only such rows
                   of the result are written
    - positions    int64, contiguous: of the token to draw, one per row of the result; or [R], of the first column's
                   token. None without edits, like the next six: see LogitEdits
    - num_biases
    - bias_tokens
    - biases
    - bias_ends
    - penalties
    - counts
    - draft_tokens  int64 [R, G - 1], the query tokens after the first: penalties count those before the drawn one; None
                    if G is 1
    - parents       int64 [R, G - 1], as in TreeBatch; None if each draft token follows the one before
    """

    logits: torch.Tensor
    temperature: torch.Tensor
    column: torch.Tensor | None = None
    top_k: torch.Tensor | None = None
    top_p: torch.Tensor | None = None
    min_log_p: torch.Tensor | None = None
    is_copied: torch.Tensor | None = None
    positions: torch.Tensor | None = None
    num_biases: torch.Tensor | None = None
    bias_tokens: torch.Tensor | None = None
    biases: torch.Tensor | None = None
    bias_ends: torch.Tensor | None = None
    penalties: torch.Tensor | None = None
    counts: torch.Tensor | None = None
    draft_tokens: torch.Tensor | None = None
    parents: torch.Tensor | None = None

    def reference(self) -> torch.Tensor:
        logits, temperature = self.logits, self.temperature
        if self.column is not None:
            logits = logits[torch.arange(len(logits)), self.column][:, None]
        out = logits.to(torch.float32, copy=True, memory_format=torch.contiguous_format)
        if self.positions is not None:
            assert self.num_biases is not None and self.bias_tokens is not None
            assert self.biases is not None and self.bias_ends is not None
            add_biases(out, self._positions(out), self.num_biases, self.bias_tokens, self.biases, self.bias_ends)
            assert self.penalties is not None and self.counts is not None
            apply_penalties(out, self.penalties, self.counts, self.draft_tokens, self.parents, self.column)
        out /= torch.where(temperature > 0, temperature, 1.0)[:, None, None]
        if self.is_copied is not None:
            assert self.top_k is not None and self.top_p is not None and self.min_log_p is not None
            self.is_copied.copy_(is_restricted(self.top_k, self.top_p, self.min_log_p, logits.shape[2]))
            if self.num_biases is not None and self.penalties is not None:
                self.is_copied.logical_or_((self.num_biases > 0) | is_penalised(self.penalties))
            # Poison rows that are not written, so that a test notices a read.
            out[~self.is_copied] = float("nan")
        return out

    def _positions(self, out: torch.Tensor) -> torch.Tensor:
        """Return the positions of the tokens to draw from out, int64 [R, G]."""
        assert self.positions is not None
        if self.positions.numel() == out.shape[0] * out.shape[1]:
            return self.positions.view(out.shape[:2])
        return self.positions[:, None] + torch.arange(out.shape[1])

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
            min_log_p_ptr=self.min_log_p,
            is_copied_ptr=self.is_copied,
            positions_ptr=self.positions,
            num_biases_ptr=self.num_biases,
            bias_tokens_ptr=self.bias_tokens,
            biases_ptr=self.biases,
            bias_ends_ptr=self.bias_ends,
            penalties_ptr=self.penalties,
            counts_ptr=self.counts,
            draft_tokens_ptr=self.draft_tokens,
            parents_ptr=self.parents,
            out_ptr=out,
            num_columns=group,
            vocab_size=vocab,
            stride_row=self.logits.stride(0),
            stride_column=self.logits.stride(1),
            stride_token=self.logits.stride(2),
            stride_bias_row=0 if self.biases is None else self.biases.stride(0),
            stride_draft=0 if self.draft_tokens is None else self.draft_tokens.stride(0),
            stride_parents=0 if self.parents is None else self.parents.stride(0),
            EACH_POSITION=self.positions is not None and self.positions.numel() == rows * group,
            BLOCK_V=block,
            num_warps=max(1, min(8, block // 256)),
            # A product fused into a sum would round otherwise than torch does.
            enable_fp_fusion=False,
            # So that rows without edits, which need 27, keep as many loads in flight.
            **({} if torch.version.hip else {"maxnreg": 40}),  # an option of CUDA's compiler
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
    min_log_p_ptr,  # fp32 [R], or None: all rows
    is_copied_ptr,  # out: bool [R], or None: all rows
    positions_ptr,  # int64 [R, G]; [R] with selected_ptr or without EACH_POSITION; or None: no edits
    num_biases_ptr,  # int32 [R]
    bias_tokens_ptr,  # int32 [R, N]
    biases_ptr,  # fp32 [R, N]
    bias_ends_ptr,  # int64 [R, N]
    penalties_ptr,  # fp32 [R, 3]
    counts_ptr,  # int32 [R, V]
    draft_tokens_ptr,  # int64 [R, G - 1], or None: no drafts
    parents_ptr,  # int64 [R, G - 1], or None: chains
    out_ptr,  # out: fp32 [R, G, V]; [R, 1, V] with selected_ptr
    num_columns,  # columns of out: G, or 1 with selected_ptr
    vocab_size,  # V
    stride_row,
    stride_column,
    stride_token,
    stride_bias_row,
    stride_draft,
    stride_parents,
    EACH_POSITION: tl.constexpr,  # whether positions_ptr has one for each row of out, not one for the first column
    BLOCK_V: tl.constexpr,  # logits per program
    PDL: tl.constexpr,  # programmatic dependent launch
):
    """out = edited logits / temperature. Grid [rows of out, blocks of the vocabulary]."""
    await_previous(PDL)
    out_row = tl.program_id(0).to(tl.int64)
    row, out_column = out_row // num_columns, out_row % num_columns
    column = out_column
    if selected_ptr is not None:
        column = tl.load(selected_ptr + row)
    offs_v = tl.program_id(1) * BLOCK_V + tl.arange(0, BLOCK_V)
    mask = offs_v < vocab_size
    if positions_ptr is not None:
        num_biases, penalised = tl.load(num_biases_ptr + row), has_penalties(penalties_ptr, row)
    if is_copied_ptr is not None:
        _, _, _, has_top_k, has_top_p, has_min_p = restriction(top_k_ptr, top_p_ptr, min_log_p_ptr, row, vocab_size)
        is_copied = has_top_k | has_top_p | has_min_p
        if positions_ptr is not None:
            is_copied = is_copied | (num_biases > 0) | penalised
        tl.store(is_copied_ptr + row, is_copied, mask=(out_column == 0) & (tl.program_id(1) == 0))
        mask = mask & is_copied
    logits_ptrs = logits_ptr + row * stride_row + column * stride_column
    x = tl.load(logits_ptrs + offs_v.to(tl.int64) * stride_token, mask=mask)
    temperature = tl.load(temperature_ptr + row)
    x = x.to(tl.float32)
    if positions_ptr is not None:
        if num_biases > 0:
            position = tl.load(positions_ptr + (out_row if EACH_POSITION else row))
            position += 0 if EACH_POSITION else out_column
            x = with_biases(
                x, offs_v, row, position, num_biases, bias_tokens_ptr, biases_ptr, bias_ends_ptr, stride_bias_row
            )
        if penalised:
            x = with_penalties(
                x,
                offs_v,
                mask,
                row,
                column.to(tl.int64),
                penalties_ptr,
                counts_ptr,
                draft_tokens_ptr,
                parents_ptr,
                vocab_size,
                stride_draft,
                stride_parents,
            )
    if temperature > 0:
        x = tl.div_rn(x, temperature)
    tl.store(out_ptr + out_row * vocab_size + offs_v, x, mask=mask)


process_logits = define_op("spec_decode::process_logits", ProcessLogits, mutates=("is_copied",))
