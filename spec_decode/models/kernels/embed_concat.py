"""The draft's input: a token's embedding beside the hidden state before it."""

from __future__ import annotations

import torch

from builders.kernels.op_by_schema import define_op_by_schema
from builders.kernels.triton_runtime import await_previous, dependent_launch, tl, triton


def embed_concat(token_ids: torch.Tensor, embedding: torch.Tensor, hidden: torch.Tensor) -> torch.Tensor:
    """embedding[token_ids] | hidden: token_ids int64 [T], embedding [V, H], hidden [T, H], of one dtype; [T, 2 H]."""
    if hidden.requires_grad or embedding.requires_grad:
        return _formula(token_ids, embedding, hidden)
    out: torch.Tensor = _embed_concat_op(token_ids, embedding, hidden)
    return out


def _formula(token_ids: torch.Tensor, embedding: torch.Tensor, hidden: torch.Tensor) -> torch.Tensor:
    return torch.cat([torch.nn.functional.embedding(token_ids, embedding), hidden], -1)


def _launch(token_ids: torch.Tensor, embedding: torch.Tensor, hidden: torch.Tensor) -> torch.Tensor:
    tokens, width = hidden.shape
    out = torch.empty(tokens, 2 * width, dtype=hidden.dtype, device=hidden.device)
    block = min(1024, triton.next_power_of_2(width))
    _embed_concat_kernel[(tokens, triton.cdiv(width, block))](
        token_ids,
        embedding,
        hidden,
        out,
        embedding.shape[0],
        width,
        hidden.stride(0),
        BLOCK=block,
        **dependent_launch(hidden.device),
    )
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


_embed_concat_op = define_op_by_schema(
    "spec_decode::embed_concat",
    "(Tensor token_ids, Tensor embedding, Tensor hidden) -> Tensor",
    cpu=_formula,
    cuda=_launch,
    fake=lambda token_ids, embedding, hidden: hidden.new_empty(hidden.shape[0], 2 * hidden.shape[1]),
)
