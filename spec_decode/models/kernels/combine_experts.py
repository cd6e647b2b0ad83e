"""The weighted sum of a token's experts, beside the shared expert, in one kernel.

Legend: T tokens, H hidden size, k experts of a token.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from builders.errors import require, require_tensor
from builders.kernels.op import define_op
from builders.kernels.triton_runtime import await_previous, dependent_launch, tl, triton
from spec_decode.models.kernels.batch_invariance import by_row
from spec_decode.models.kernels.stored_as import stored_as

_BLOCK = 512


def combine_experts(
    rows: torch.Tensor, weights: torch.Tensor, places: torch.Tensor, shared: torch.Tensor | None
) -> torch.Tensor:
    """The sum over j of weights[t, j] * rows[places[t, j]], plus shared[t] where there is one; [T, H].

    rows     float [T k, H]
    weights  fp32 [T, k]
    places   int64 [T, k], in 0..T k - 1
    shared   as rows, [T, H], or None

    Computed in fp32 and rounded once, to the dtype of rows. Raises BatchError for tensors of another shape, dtype or
    device, with nothing run.
    """
    device, (tokens, top_k) = rows.device, weights.shape
    require_tensor("weights", weights, shape=(None, None), dtype=torch.float32, device=device)
    require_tensor("places", places, shape=(tokens, top_k), dtype=torch.int64, device=device)
    require_tensor("rows", rows, shape=(tokens * top_k, None), dtype=rows.dtype, device=device)
    require(
        rows.is_floating_point(),
        f"rows of experts must be of a floating dtype, got {rows.dtype}. Convert them first.",
    )
    if shared is not None:
        require_tensor("shared", shared, shape=(tokens, rows.shape[1]), dtype=rows.dtype, device=device)
        shared = shared.contiguous()
    return _combine_experts(rows.contiguous(), weights.contiguous(), places.contiguous(), shared)


class CombineExperts(NamedTuple):
    """As `combine_experts` has them, contiguous."""

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
        _combine_kernel[(tokens, triton.cdiv(width, _BLOCK))](
            *self, out, width, TOP_K=top_k, BLOCK=_BLOCK, **dependent_launch(out.device)
        )
        return out.to(self.rows.dtype)


def _sum(weights: torch.Tensor, rows: torch.Tensor, shared: torch.Tensor | None = None) -> torch.Tensor:
    out = torch.bmm(weights[:, None], rows.float())[:, 0]
    return (out if shared is None else out + shared).to(rows.dtype)


@triton.jit
def _combine_kernel(
    rows,  # [T k, H]
    weights,  # fp32 [T, k]
    places,  # int64 [T, k], rows of `rows`
    shared,  # [T, H], or None
    out,  # out: [T, H]
    width,  # H
    TOP_K: tl.constexpr,  # k
    BLOCK: tl.constexpr,  # columns of a program
    PDL: tl.constexpr,
):
    """One program per token and BLOCK of its columns."""
    await_previous(PDL)
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < width
    total = tl.zeros([BLOCK], tl.float32)
    # Unrolled, so that all loads are on their way before the first product waits for one.
    for j in tl.static_range(TOP_K):
        place = tl.load(places + token * TOP_K + j)
        row = tl.load(rows + place * width + column, mask=inside, other=0.0).to(tl.float32)
        total += tl.load(weights + token * TOP_K + j) * row
    if shared is not None:
        total += tl.load(shared + token * width + column, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + token * width + column, total.to(out.dtype.element_ty), mask=inside)


_combine_experts = define_op("spec_decode::combine_experts", CombineExperts)
