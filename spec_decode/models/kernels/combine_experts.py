"""What a token's experts give, weighed and added up, beside the shared expert: one kernel.

Legend: T tokens, H hidden size, k experts of a token.
"""

from __future__ import annotations

import torch

from builders.errors import require, require_tensor
from builders.kernels.op_by_schema import define_op_by_schema
from builders.kernels.triton_runtime import await_previous, dependent_launch, tl, triton

_BLOCK = 512


def combine_experts(
    rows: torch.Tensor, weights: torch.Tensor, places: torch.Tensor, shared: torch.Tensor | None
) -> torch.Tensor:
    """The sum over j of weights[t, j] * rows[places[t, j]], then plus shared[t] where there is one, in fp32; [T, H].

    rows [T k, H], weights fp32 [T, k], places int64 [T, k] in 0..T k - 1, shared as rows [T, H]. The result is rounded
    once, to the dtype of rows. Raises BatchError for tensors of another shape, dtype or device, with nothing run.
    """
    device, (tokens, top_k) = rows.device, weights.shape
    require_tensor("weights", weights, shape=(None, None), dtype=torch.float32, device=device)
    require_tensor("places", places, shape=(tokens, top_k), dtype=torch.int64, device=device)
    require_tensor("rows", rows, shape=(tokens * top_k, None), dtype=rows.dtype, device=device)
    require(
        rows.is_floating_point(),
        f"rows of experts must be of a floating dtype, got {rows.dtype}; nothing was run. Convert them first.",
    )
    if shared is not None:
        require_tensor("shared", shared, shape=(tokens, rows.shape[1]), dtype=rows.dtype, device=device)
        shared = shared.contiguous()
    out: torch.Tensor = _op(rows.contiguous(), weights.contiguous(), places.contiguous(), shared)
    return out


def _formula(
    rows: torch.Tensor, weights: torch.Tensor, places: torch.Tensor, shared: torch.Tensor | None
) -> torch.Tensor:
    out = torch.bmm(weights[:, None], rows[places].float())[:, 0]
    if shared is not None:
        out = out + shared
    return out.to(rows.dtype)


def _launch(
    rows: torch.Tensor, weights: torch.Tensor, places: torch.Tensor, shared: torch.Tensor | None
) -> torch.Tensor:
    (tokens, top_k), width = weights.shape, rows.shape[1]
    # The interpreter truncates fp32 to bf16 where the hardware rounds: let torch do that conversion.
    dtype = torch.float32 if rows.device.type == "cpu" else rows.dtype
    out = torch.empty(tokens, width, dtype=dtype, device=rows.device)
    _combine_kernel[(tokens, triton.cdiv(width, _BLOCK))](
        rows, weights, places, shared, out, width, TOP_K=top_k, BLOCK=_BLOCK, **dependent_launch(rows.device)
    )
    return out.to(rows.dtype)


@triton.jit
def _combine_kernel(
    rows, weights, places, shared, out, width, TOP_K: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr
):  # fmt: skip
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


_op = define_op_by_schema(
    "spec_decode::combine_experts",
    "(Tensor rows, Tensor weights, Tensor places, Tensor? shared) -> Tensor",
    cpu=_formula,
    cuda=_launch,
    fake=lambda rows, weights, places, shared: rows.new_empty(weights.shape[0], rows.shape[1]),
)
