"""The draft's input: a token's embedding beside the hidden state before it, each normed where the draft has norms."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch.nn import functional as F

from builders.kernels.op import define_op
from builders.kernels.triton_runtime import await_previous, dependent_launch, tl, triton
from spec_decode.models.kernels.stored_as import stored_as


def embed_concat(
    token_ids: torch.Tensor,
    embedding: torch.Tensor,
    hidden: torch.Tensor,
    norms: Sequence[torch.Tensor] = (),
    eps: float = 0.0,
) -> torch.Tensor:
    """embedding[token_ids] | hidden, [T, 2 H] in their dtype.

    token_ids  int64 [T]
    embedding  float [V, H]; an id outside the vocabulary counts as a row of 0
    hidden     as embedding, [T, H]
    norms      of the embedding and of the hidden state, the weights [H] of their RMS norms with eps; none: no norms
    """
    if hidden.requires_grad or embedding.requires_grad or any(weight.requires_grad for weight in norms):
        return EmbedConcat(token_ids, embedding, hidden, norms, eps).reference()
    return _embed_concat(token_ids, embedding, hidden, norms, eps)


class EmbedConcat(NamedTuple):
    """As `embed_concat` has them."""

    token_ids: torch.Tensor
    embedding: torch.Tensor
    hidden: torch.Tensor
    norms: Sequence[torch.Tensor]
    eps: float

    def reference(self) -> torch.Tensor:
        both = [embedded(self.token_ids, self.embedding), self.hidden]
        if self.norms:
            both = [F.rms_norm(x, x.shape[1:], weight, self.eps) for x, weight in zip(both, self.norms, strict=True)]
        return torch.cat(both, -1)

    def fake(self) -> torch.Tensor:
        return self.hidden.new_empty(self.hidden.shape[0], 2 * self.hidden.shape[1])

    def launch(self) -> torch.Tensor:
        out, (tokens, width) = self.fake(), self.hidden.shape
        stored = stored_as(out)
        block = triton.next_power_of_2(width) if self.norms else min(1024, triton.next_power_of_2(width))
        _embed_concat_kernel[(tokens, triton.cdiv(width, block), 2)](
            self.token_ids,
            self.embedding,
            self.hidden,
            *(self.norms or (None, None)),
            stored,
            self.embedding.shape[0],
            width,
            self.hidden.stride(0),
            self.eps,
            BLOCK=block,
            num_warps=4 if block <= 2048 else 8,
            **dependent_launch(out.device),
        )
        return stored.to(out.dtype)


def embedded(token_ids: torch.Tensor, embedding: torch.Tensor) -> torch.Tensor:
    """embedding[token_ids], and a row of 0 for an id outside the vocabulary: what kernels that embed do."""
    known = (token_ids >= 0) & (token_ids < len(embedding))
    return torch.where(known[..., None], F.embedding(token_ids * known, embedding), 0)


@triton.jit
def _embed_concat_kernel(
    token_ids,  # int64 [T]
    embedding,  # [V, H]
    hidden,  # [T, H]
    embedding_norm,  # [H], or None
    hidden_norm,  # [H], or None
    out,  # out: [T, 2 H]
    vocab,  # V
    width,  # H
    hidden_stride,  # of a row
    eps,  # of the norms
    BLOCK: tl.constexpr,  # columns of a program
    PDL: tl.constexpr,
):
    """One block of columns of one half of a token's row; with norms a block is all of the half."""
    await_previous(PDL)
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < width
    out += token * 2 * width + column
    if tl.program_id(2) == 0:
        index = tl.load(token_ids + token)
        # An id outside the vocabulary must not lead the read out of the table.
        known = (index >= 0) & (index < vocab)
        embedded = tl.load(embedding + index * width + column, mask=inside & known, other=0.0)
        tl.store(out, _normed(embedded, embedding_norm, column, inside, width, eps, out), mask=inside)
    else:
        state = tl.load(hidden + token * hidden_stride + column, mask=inside, other=0.0)
        tl.store(out + width, _normed(state, hidden_norm, column, inside, width, eps, out), mask=inside)


@triton.jit
def _normed(
    row,  # [BLOCK]
    norm,  # [H], or None
    column,  # [BLOCK]
    inside,  # bool [BLOCK]
    width,  # H
    eps,
    out,
):
    """The row, or its RMS norm where there is a weight, as out has it."""
    wide = row.to(tl.float32)
    if norm is not None:
        scale = tl.rsqrt(tl.sum(wide * wide, 0) / width + eps)
        wide = wide * scale * tl.load(norm + column, mask=inside, other=0.0).to(tl.float32)
    return wide.to(out.dtype.element_ty)


_embed_concat = define_op("spec_decode::embed_concat", EmbedConcat)
