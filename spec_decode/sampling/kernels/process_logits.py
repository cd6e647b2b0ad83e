"""Process logits for sampling: fp32, divided by the temperature."""

from __future__ import annotations

from typing import NamedTuple

import torch

from builders.kernels.op import define_op
from builders.kernels.triton_runtime import await_previous, dependent_launch, tl, triton
from spec_decode.sampling.kernels.restriction import is_restricted, restriction
from spec_decode.sampling.kernels.vocab_blocks import vocab_block


class ProcessLogits(NamedTuple):
    """logits / temperature, contiguous fp32 [R, G, V]; [R, 1, V] if `column` selects one of each row.

    - logits       [R, G, V] any float, of any strides
    - temperature  fp32 [R]; 0, which is greedy, leaves logits as they are
    - column       int64 [R], 0 to G - 1, or None for all
    - top_k        int32 [R] and top_p fp32 [R]: only rows that one of them restricts are written; None, all are
    """

    logits: torch.Tensor
    temperature: torch.Tensor
    column: torch.Tensor | None
    top_k: torch.Tensor | None
    top_p: torch.Tensor | None

    def reference(self) -> torch.Tensor:
        logits, temperature = self.logits, self.temperature
        if self.column is not None:
            logits = logits[torch.arange(len(logits)), self.column][:, None]
        out = (logits.float() / torch.where(temperature > 0, temperature, 1.0)[:, None, None]).contiguous()
        if self.top_k is not None and self.top_p is not None:
            # Whoever reads a row that nobody asked for is to notice.
            out[~is_restricted(self.top_k, self.top_p, logits.shape[2])] = float("nan")
        return out

    def launch(self) -> torch.Tensor:
        out = self.fake()
        rows, group, vocab = out.shape
        block = vocab_block(vocab)
        _process_kernel[(rows * group, triton.cdiv(vocab, block))](
            *self,
            out,
            group,
            vocab,
            *self.logits.stride(),
            BLOCK=block,
            num_warps=max(1, min(8, block // 256)),
            **dependent_launch(out.device),
        )
        return out

    def fake(self) -> torch.Tensor:
        rows, group, vocab = self.logits.shape
        return self.logits.new_empty(rows, group if self.column is None else 1, vocab, dtype=torch.float32)


@triton.jit
def _process_kernel(
    logits,  # [R, G, V]
    temperature,  # fp32 [R]
    selected,  # int64 [R], or None: all columns
    top_k,  # int32 [R], or None: all rows
    top_p,  # fp32 [R], or None: all rows
    out,  # out: fp32 [R, G, V]; [R, 1, V] with `selected`
    group,  # columns of out: G, or 1 with `selected`
    vocab,  # V
    row_stride,
    column_stride,
    token_stride,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    """One program per row and column of `out` and block of the vocabulary."""
    await_previous(PDL)
    line = tl.program_id(0).to(tl.int64)
    row, column = line // group, line % group
    if selected is not None:
        column = tl.load(selected + row)
    token = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = token < vocab
    if top_k is not None:
        _, _, has_top_k, has_top_p = restriction(top_k, top_p, row, vocab)
        inside = inside & (has_top_k | has_top_p)
    x = tl.load(logits + row * row_stride + column * column_stride + token * token_stride, mask=inside)
    row_temperature = tl.load(temperature + row)
    x = x.to(tl.float32)
    if row_temperature > 0:
        x = tl.div_rn(x, row_temperature)
    tl.store(out + line * vocab + token, x, mask=inside)


process_logits = define_op("spec_decode::process_logits", ProcessLogits)
