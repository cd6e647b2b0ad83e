"""The tokens that step 0 runs over: each request's kept ones, one place earlier, and the target's own behind them."""

from __future__ import annotations

import torch

from builders.kernels.op_by_schema import define_op_by_schema
from builders.kernels.triton_runtime import await_previous, dependent_launch, tl, triton


def shift_tokens(token_ids: torch.Tensor, next_tokens: torch.Tensor, accepted: torch.Tensor) -> torch.Tensor:
    """Place j of row r holds token_ids[r, j + 1] before place accepted[r], and next_tokens[r] from there on.

    token_ids int64 [R, 1 + K]; next_tokens int64, accepted int32, each [>= R]; int64 [R * (1 + K)]. A count outside 0
    to K, which only the device could know of, counts as the nearest of these.
    """
    rows = token_ids.shape[0]
    out: torch.Tensor = _shift_tokens_op(token_ids, next_tokens[:rows], accepted[:rows])
    return out


def _shift_tokens(token_ids: torch.Tensor, next_tokens: torch.Tensor, accepted: torch.Tensor) -> torch.Tensor:
    place = torch.arange(token_ids.shape[1])
    last = accepted.clamp(0, token_ids.shape[1] - 1)[:, None]
    return torch.where(place < last, token_ids.roll(-1, 1), next_tokens[:, None]).flatten()


def _launch(token_ids: torch.Tensor, next_tokens: torch.Tensor, accepted: torch.Tensor) -> torch.Tensor:
    out = _fake(token_ids, next_tokens, accepted)
    rows, query_len = token_ids.shape
    _shift_tokens_kernel[(rows,)](
        token_ids,
        next_tokens,
        accepted,
        out,
        query_len,
        token_ids.stride(0),
        BLOCK=triton.next_power_of_2(query_len),
        num_warps=1,
        **dependent_launch(token_ids.device),
    )
    return out


@triton.jit
def _shift_tokens_kernel(
    token_ids, next_tokens, accepted, out, query_len, stride, BLOCK: tl.constexpr, PDL: tl.constexpr
):
    await_previous(PDL)
    row = tl.program_id(0).to(tl.int64)
    place = tl.arange(0, BLOCK)
    # The last place never holds a shifted token, so that a count beyond it reads nothing of the next row.
    shifted = (place < tl.load(accepted + row)) & (place < query_len - 1)
    following = tl.load(token_ids + row * stride + place + 1, mask=place < query_len - 1, other=0)
    token = tl.where(shifted, following, tl.load(next_tokens + row))
    tl.store(out + row * query_len + place, token, mask=place < query_len)


def _fake(token_ids: torch.Tensor, next_tokens: torch.Tensor, accepted: torch.Tensor) -> torch.Tensor:
    return token_ids.new_empty(token_ids.numel())


_shift_tokens_op = define_op_by_schema(
    "spec_decode::shift_tokens",
    "(Tensor token_ids, Tensor next_tokens, Tensor accepted) -> Tensor",
    cpu=_shift_tokens,
    cuda=_launch,
    fake=_fake,
)
