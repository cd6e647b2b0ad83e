"""The draft's input: a token's embedding concatenated with the hidden state before it, each optionally normed."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

from attn_backends.kernels.add_rms_norm import AddRmsNorm
from attn_backends.kernels.linear.skinny_linear import embedded
from builders.kernels.op import define_op
from builders.kernels.sizes import cdiv, next_power_of_2
from builders.kernels.triton_runtime import await_previous, dependent_launch, stored_as, tl, triton


def embed_concat(
    token_ids: torch.Tensor,
    embedding: torch.Tensor,
    hidden: torch.Tensor,
    norms: Sequence[torch.Tensor] = (),
    eps: float = 0.0,
) -> torch.Tensor:
    """Return embedding[token_ids] | hidden, [T, 2 H] in their dtype.

    token_ids  int64 [T]
    embedding  float [V, H]; an id outside the vocabulary gets a row of 0
    hidden     [T, H] in embedding's dtype
    norms      the weights [H] of the RMS norms of the embedding and of the hidden state, with eps; none if empty
    """
    if hidden.requires_grad or embedding.requires_grad or any(weight.requires_grad for weight in norms):
        return EmbedConcat(token_ids, embedding, hidden, norms, eps).reference()
    return _embed_concat(token_ids, embedding, hidden, norms, eps)


class EmbedConcat(NamedTuple):
    """The arguments of `embed_concat`."""

    token_ids: torch.Tensor
    embedding: torch.Tensor
    hidden: torch.Tensor
    norms: Sequence[torch.Tensor]
    eps: float

    def reference(self) -> torch.Tensor:
        both = [embedded(self.token_ids, self.embedding), self.hidden]
        if self.norms:
            both = [
                AddRmsNorm(x, None, weight, self.eps).reference()[1] for x, weight in zip(both, self.norms, strict=True)
            ]
        return torch.cat(both, -1)

    def fake(self) -> torch.Tensor:
        return self.hidden.new_empty(self.hidden.shape[0], 2 * self.hidden.shape[1])

    def launch(self) -> torch.Tensor:
        out, (tokens, width) = self.fake(), self.hidden.shape
        stored = stored_as(out)
        embedding_norm, hidden_norm = self.norms or (None, None)
        block = next_power_of_2(width) if self.norms else min(1024, next_power_of_2(width))
        _embed_concat_kernel[(tokens, cdiv(width, block), 2)](
            token_ids_ptr=self.token_ids,
            embedding_ptr=self.embedding,
            hidden_ptr=self.hidden,
            embedding_norm_ptr=embedding_norm,
            hidden_norm_ptr=hidden_norm,
            out_ptr=stored,
            vocab_size=self.embedding.shape[0],
            hidden_size=width,
            stride_hidden=self.hidden.stride(0),
            eps=self.eps,
            BLOCK_H=block,
            num_warps=4 if block <= 2048 else 8,
            **dependent_launch(out.device),
        )
        return stored.to(out.dtype)


@triton.jit
def _embed_concat_kernel(
    token_ids_ptr,  # int64 [T]
    embedding_ptr,  # [V, H]
    hidden_ptr,  # [T, H]
    embedding_norm_ptr,  # [H], or None
    hidden_norm_ptr,  # [H], or None
    out_ptr,  # out: [T, 2 H]
    vocab_size,  # V
    hidden_size,  # H
    stride_hidden,  # between rows
    eps,  # of the norms
    BLOCK_H: tl.constexpr,  # columns per program
    PDL: tl.constexpr,  # programmatic dependent launch
):
    """out = norm(embedding[token_id]) | norm(hidden). A program computes BLOCK_H columns of one half of a token's row.

    Grid [T, ceil(H / BLOCK_H), 2]; with norms one block covers the half.
    """
    await_previous(PDL)
    token = tl.program_id(0).to(tl.int64)
    offs_h = tl.program_id(1) * BLOCK_H + tl.arange(0, BLOCK_H)
    mask = offs_h < hidden_size
    out_ptr += token * 2 * hidden_size + offs_h
    if tl.program_id(2) == 0:
        token_id = tl.load(token_ids_ptr + token)
        # An id outside the vocabulary must not read outside the table.
        is_known = (token_id >= 0) & (token_id < vocab_size)
        row = tl.load(embedding_ptr + token_id * hidden_size + offs_h, mask=mask & is_known, other=0.0)
        tl.store(out_ptr, _normed(row, embedding_norm_ptr, offs_h, mask, hidden_size, eps, out_ptr), mask=mask)
    else:
        state = tl.load(hidden_ptr + token * stride_hidden + offs_h, mask=mask, other=0.0)
        normed = _normed(state, hidden_norm_ptr, offs_h, mask, hidden_size, eps, out_ptr)
        tl.store(out_ptr + hidden_size, normed, mask=mask)


@triton.jit
def _normed(
    x,  # [BLOCK_H]
    norm_ptr,  # [H], or None
    offs_h,  # [BLOCK_H]
    mask,  # bool [BLOCK_H]
    hidden_size,  # H
    eps,
    out_ptr,
):
    """Return x, or its RMS norm if there is a weight, in out's dtype."""
    x_fp32 = x.to(tl.float32)
    if norm_ptr is not None:
        rstd = tl.rsqrt(tl.sum(x_fp32 * x_fp32, 0) / hidden_size + eps)
        x_fp32 = x_fp32 * rstd * tl.load(norm_ptr + offs_h, mask=mask, other=0.0).to(tl.float32)
    return x_fp32.to(out_ptr.dtype.element_ty)


_embed_concat = define_op("spec_decode::embed_concat", EmbedConcat)
