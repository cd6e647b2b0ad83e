"""Of the states of a uniform batch, those that a request's drafting goes on from."""

from __future__ import annotations

import torch

from builders.errors import require
from builders.kernels.op_by_schema import define_op_by_schema
from builders.kernels.triton_runtime import await_previous, dependent_launch, tl, triton


def gather_last_hidden(hidden: torch.Tensor, accepted: torch.Tensor, query_len: int, kept: torch.Tensor) -> None:
    """kept[r] = hidden[r * query_len + accepted[r]], in place, behind a uniform batch of query_len tokens a row.

    hidden [R * query_len, H]; accepted int32 [>= R]; kept [R, H] contiguous, in a dtype of its own. A count outside 0
    to query_len - 1, which only the device could know of, counts as the nearest of these. Raises BatchError for states
    of another shape, with nothing written.
    """
    rows, width = kept.shape
    require(
        hidden.shape == (rows * query_len, width),
        f"{rows} rows of {query_len} tokens need states [{rows * query_len}, {width}], got {list(hidden.shape)}; "
        "nothing was written. Have the draft model return a state of its hidden_size for every token.",
    )
    _gather_last_hidden_op(hidden, accepted[:rows], query_len, kept)


def _gather_last_hidden(hidden: torch.Tensor, accepted: torch.Tensor, query_len: int, kept: torch.Tensor) -> None:
    kept.copy_(hidden[torch.arange(kept.shape[0]) * query_len + accepted.clamp(0, query_len - 1)])


def _launch(hidden: torch.Tensor, accepted: torch.Tensor, query_len: int, kept: torch.Tensor) -> None:
    rows, width = kept.shape
    block = min(1024, triton.next_power_of_2(width))
    _gather_last_hidden_kernel[(rows, triton.cdiv(width, block))](
        hidden,
        accepted,
        kept,
        query_len,
        width,
        *hidden.stride(),
        BLOCK=block,
        num_warps=max(1, min(4, block // 256)),
        **dependent_launch(hidden.device),
    )


@triton.jit
def _gather_last_hidden_kernel(
    hidden, accepted, kept, query_len, width, row_stride, column_stride, BLOCK: tl.constexpr, PDL: tl.constexpr
):
    await_previous(PDL)
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < width
    last = tl.minimum(tl.maximum(tl.load(accepted + row), 0), query_len - 1)
    state = tl.load(hidden + (row * query_len + last) * row_stride + column * column_stride, mask=inside)
    tl.store(kept + row * width + column, state, mask=inside)


_gather_last_hidden_op = define_op_by_schema(
    "spec_decode::gather_last_hidden",
    "(Tensor hidden, Tensor accepted, int query_len, Tensor(a!) kept) -> ()",
    cpu=_gather_last_hidden,
    cuda=_launch,
)
