"""The draft's input: a token's embedding beside the hidden state before it."""

from __future__ import annotations

from typing import NamedTuple

import torch

from builders.kernels.op import define_op
from builders.kernels.triton_runtime import await_previous, dependent_launch, tl, triton


def embed_concat(token_ids: torch.Tensor, embedding: torch.Tensor, hidden: torch.Tensor) -> torch.Tensor:
    """embedding[token_ids] | hidden, [T, 2 H] in their dtype.

    token_ids  int64 [T]
    embedding  float [V, H]
    hidden     as embedding, [T, H]
    """
    if hidden.requires_grad or embedding.requires_grad:
        return EmbedConcat(token_ids, embedding, hidden).reference()
    return _embed_concat(token_ids, embedding, hidden)


class EmbedConcat(NamedTuple):
    """As `embed_concat` has them."""

    token_ids: torch.Tensor
    embedding: torch.Tensor
    hidden: torch.Tensor

    def reference(self) -> torch.Tensor:
        return torch.cat([torch.nn.functional.embedding(self.token_ids, self.embedding), self.hidden], -1)

    def fake(self) -> torch.Tensor:
        return self.hidden.new_empty(self.hidden.shape[0], 2 * self.hidden.shape[1])

    def launch(self) -> torch.Tensor:
        out, (tokens, width) = self.fake(), self.hidden.shape
        block = min(1024, triton.next_power_of_2(width))
        _embed_concat_kernel[(tokens, triton.cdiv(width, block))](
            *self, out, self.embedding.shape[0], width, self.hidden.stride(0),
            BLOCK=block, **dependent_launch(out.device),
        )  # fmt: skip
        return out


@triton.jit
def _embed_concat_kernel(
    token_ids, embedding, hidden, out, vocab, width, hidden_stride, BLOCK: tl.constexpr, PDL: tl.constexpr
):
    await_previous(PDL)
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < width
    index = tl.load(token_ids + token)
    # An id outside the vocabulary must not lead the read out of the table.
    known = (index >= 0) & (index < vocab)
    row = tl.load(embedding + index * width + column, mask=inside & known, other=0.0)
    state = tl.load(hidden + token * hidden_stride + column, mask=inside)
    tl.store(out + token * 2 * width + column, row, mask=inside)
    tl.store(out + token * 2 * width + width + column, state, mask=inside)


_embed_concat = define_op("spec_decode::embed_concat", EmbedConcat)
