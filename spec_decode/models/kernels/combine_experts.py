"""Weighted sum of a token's experts plus the shared expert, in one kernel.

Legend: T tokens, H hidden size, k experts of a token.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from attn_backends.kernels.linear.batch_invariance import by_row
from builders.errors import require, require_tensor
from builders.kernels.op import define_op
from builders.kernels.sizes import cdiv
from builders.kernels.triton_runtime import await_previous, dependent_launch, stored_as, tl, triton

_BLOCK = 512


def combine_experts(
    rows: torch.Tensor, weights: torch.Tensor, places: torch.Tensor, shared: torch.Tensor | None
) -> torch.Tensor:
    """Return the sum over j of weights[t, j] * rows[places[t, j]], plus shared[t] if given; [T, H].

    rows     float [T k, H]
    weights  fp32 [T, k]
    places   int64 [T, k], in 0..T k - 1
    shared   [T, H] in rows' dtype, or None

    Computed in fp32 and rounded once, to the dtype of rows. Raises BatchError for another shape, dtype or device,
    before any launch.
    """
    device, (tokens, top_k) = rows.device, weights.shape
    require_tensor("weights", weights, shape=(None, None), dtype=torch.float32, device=device)
    require_tensor("places", places, shape=(tokens, top_k), dtype=torch.int64, device=device)
    require_tensor("rows", rows, shape=(tokens * top_k, None), dtype=rows.dtype, device=device)
    require(
        rows.is_floating_point(),
        f"rows must have a floating dtype, got {rows.dtype}. Convert them first.",
    )
    if shared is not None:
        require_tensor("shared", shared, shape=(tokens, rows.shape[1]), dtype=rows.dtype, device=device)
        shared = shared.contiguous()
    return _combine_experts(rows.contiguous(), weights.contiguous(), places.contiguous(), shared)


class CombineExperts(NamedTuple):
    """The arguments of `combine_experts`, contiguous."""

    rows: torch.Tensor
    weights: torch.Tensor
    places: torch.Tensor
    shared: torch.Tensor | None

    def reference(self) -> torch.Tensor:
        return by_row(_sum, self.weights, self.rows[self.places], *([] if self.shared is None else [self.shared]))

    def fake(self) -> torch.Tensor:
        return self.rows.new_empty(self.weights.shape[0], self.rows.shape[1])

    def launch(self) -> torch.Tensor:
        (tokens, top_k), width = self.weights.shape, self.rows.shape[1]
        out = stored_as(self.fake())
        _combine_kernel[(tokens, cdiv(width, _BLOCK))](
            x_ptr=self.rows,
            weights_ptr=self.weights,
            places_ptr=self.places,
            shared_ptr=self.shared,
            y_ptr=out,
            n_cols=width,
            TOP_K=top_k,
            BLOCK_SIZE=_BLOCK,
            **dependent_launch(out.device),
        )
        return out.to(self.rows.dtype)


def _sum(weights: torch.Tensor, rows: torch.Tensor, shared: torch.Tensor | None = None) -> torch.Tensor:
    out = torch.bmm(weights[:, None], rows.float())[:, 0]
    return (out if shared is None else out + shared).to(rows.dtype)


@triton.jit
def _combine_kernel(
    x_ptr,  # [T k, H]
    weights_ptr,  # fp32 [T, k]
    places_ptr,  # int64 [T, k], rows of x
    shared_ptr,  # [T, H], or None
    y_ptr,  # out: [T, H]
    n_cols,  # H
    TOP_K: tl.constexpr,  # k
    BLOCK_SIZE: tl.constexpr,  # columns per program
    PDL: tl.constexpr,  # programmatic dependent launch
):
    """y[t] = sum over j of weights[t, j] * x[places[t, j]], plus shared[t]. Grid [T, ceil(H / BLOCK_SIZE)]."""
    await_previous(PDL)
    token = tl.program_id(0).to(tl.int64)
    offs = tl.program_id(1) * BLOCK_SIZE + tl.arange(0, BLOCK_SIZE)
    mask = offs < n_cols
    acc = tl.zeros([BLOCK_SIZE], tl.float32)
    # Unrolled, so all loads are in flight before the first product waits for one.
    for j in tl.static_range(TOP_K):
        place = tl.load(places_ptr + token * TOP_K + j)
        x = tl.load(x_ptr + place * n_cols + offs, mask=mask, other=0.0).to(tl.float32)
        acc += tl.load(weights_ptr + token * TOP_K + j) * x
    if shared_ptr is not None:
        acc += tl.load(shared_ptr + token * n_cols + offs, mask=mask, other=0.0).to(tl.float32)
    tl.store(y_ptr + token * n_cols + offs, acc.to(y_ptr.dtype.element_ty), mask=mask)


_combine_experts = define_op("spec_decode::combine_experts", CombineExperts)
