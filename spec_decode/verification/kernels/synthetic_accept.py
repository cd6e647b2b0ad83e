"""How many draft tokens synthetic acceptance keeps: a coin a row, whatever the tokens are."""

from __future__ import annotations

import math

import torch

from builders.errors import require_tensor
from builders.kernels.op_by_schema import define_op_by_schema
from builders.kernels.triton_runtime import await_previous, dependent_launch, tl, triton
from spec_decode.sampling import noise
from spec_decode.verification.kernels.draft_round import coin_of, leading, read_draft


def synthetic_accept(
    draft_tokens: torch.Tensor, *, seeds: torch.Tensor, draft_positions: torch.Tensor, mean: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Of draft_tokens int64 [R, K]: how many stay, int64 [R], and the position of the token behind them, int64 [R].

    floor(mean) of a row's tokens stay, one more with probability mean - floor(mean), and never one from its first -1
    on. seeds, draft_positions int64 [R]. Raises BatchError for tensors of another shape, dtype or device.
    """
    rows = len(draft_tokens)
    require_tensor("draft_tokens", draft_tokens, shape=(rows, None), dtype=torch.int64, device=draft_tokens.device)
    for name, tensor in {"seeds": seeds, "draft_positions": draft_positions}.items():
        require_tensor(name, tensor, shape=(rows,), dtype=torch.int64, device=draft_tokens.device)
    accepted, positions = _op(draft_tokens.contiguous(), seeds.contiguous(), draft_positions.contiguous(), mean)
    return accepted, positions


def _formula(
    draft_tokens: torch.Tensor, seeds: torch.Tensor, draft_positions: torch.Tensor, mean: float
) -> tuple[torch.Tensor, torch.Tensor]:
    keys = noise.key(seeds, draft_positions, noise.ACCEPT)
    whole = math.floor(mean)
    # A comparison, not floor(mean + coin): the sum of the two rounds in fp32 and would shift the mean.
    count = whole + (noise.uniform(keys, torch.zeros_like(keys)) < mean - whole).long()
    accepted = torch.minimum(count, leading(draft_tokens >= 0))
    return accepted, draft_positions + accepted


def _launch(
    draft_tokens: torch.Tensor, seeds: torch.Tensor, draft_positions: torch.Tensor, mean: float
) -> tuple[torch.Tensor, torch.Tensor]:
    rows, columns = draft_tokens.shape
    accepted, positions = torch.empty_like(seeds), torch.empty_like(seeds)
    _synthetic_accept_kernel[(rows,)](
        draft_tokens,
        seeds,
        draft_positions,
        accepted,
        positions,
        math.floor(mean),
        mean - math.floor(mean),
        columns,
        STREAM=noise.ACCEPT,
        BLOCK_K=triton.next_power_of_2(columns),
        num_warps=1,
        **dependent_launch(draft_tokens.device),
    )
    return accepted, positions


@triton.jit
def _synthetic_accept_kernel(
    draft_tokens,
    seeds,
    draft_positions,
    accepted,
    positions,
    whole,
    share,
    columns,
    STREAM: tl.constexpr,
    BLOCK_K: tl.constexpr,
    PDL: tl.constexpr,
):
    await_previous(PDL)
    row = tl.program_id(0).to(tl.int64)
    _, length = read_draft(row, draft_tokens, columns, BLOCK_K)
    position = tl.load(draft_positions + row)
    coin = coin_of(tl.load(seeds + row), position, STREAM)
    kept = tl.minimum(tl.where(coin < share, whole + 1, whole), length).to(tl.int64)
    tl.store(accepted + row, kept)
    tl.store(positions + row, position + kept)


_op = define_op_by_schema(
    "spec_decode::synthetic_accept",
    "(Tensor draft_tokens, Tensor seeds, Tensor draft_positions, float mean) -> (Tensor, Tensor)",
    cpu=_formula,
    cuda=_launch,
    fake=lambda draft_tokens, seeds, draft_positions, mean: (torch.empty_like(seeds), torch.empty_like(seeds)),
)
