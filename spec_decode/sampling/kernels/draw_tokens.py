"""The target's own token of each row: the argmax, or a draw with the noise of its seed and position."""

from __future__ import annotations

from typing import NamedTuple

import torch

from builders.errors import require_tensor
from builders.kernels.op_by_schema import define_op_by_schema
from builders.kernels.triton_runtime import await_previous, dependent_launch, tl, triton
from spec_decode.sampling import noise
from spec_decode.sampling.draft import logits_of_a_program
from spec_decode.sampling.kernels.sample_draft_kernels import first_best
from spec_decode.sampling.noise import triton_gumbel, triton_key


class Refusal(NamedTuple):
    """Where a draft of K tokens was refused, and by which distributions; R rows.

    column        int64 [R]          draft tokens kept: the token behind them is drawn, from this column's logits
    weight        fp32 [R]           w in max(w p - q, 0), which is drawn from; 0: nothing was refused, p is drawn from
    norms         fp32 [4, R * K]    of each column of p and then of q: the largest logit, and the sum of
                                     exp(logit - largest); read only where weight is above 0
    draft_logits  fp32 [R, K, V]     q's
    """

    column: torch.Tensor
    weight: torch.Tensor
    norms: torch.Tensor
    draft_logits: torch.Tensor

    @classmethod
    def allocate(cls, draft_logits: torch.Tensor) -> Refusal:
        """With memory for a kernel to write to."""
        rows, columns, _ = draft_logits.shape
        return cls(
            column=torch.empty(rows, dtype=torch.int64, device=draft_logits.device),
            weight=torch.empty(rows, dtype=torch.float32, device=draft_logits.device),
            norms=torch.empty(4, rows * columns, dtype=torch.float32, device=draft_logits.device),
            draft_logits=draft_logits,
        )


def draw_tokens(
    processed: torch.Tensor, *, temperature: torch.Tensor, seeds: torch.Tensor, positions: torch.Tensor
) -> torch.Tensor:
    """int64 [R]: where temperature fp32 [R] is 0 the argmax of processed fp32 [R, V], else a draw from its softmax.

    seeds int64 [R], positions int64 [R]: the absolute positions of the tokens drawn. Of equal logits the first wins.
    Raises BatchError for tensors of another shape, dtype or device.
    """
    rows, device = len(processed), processed.device
    require_tensor("processed", processed, shape=(rows, None), dtype=torch.float32, device=device)
    require_tensor("temperature", temperature, shape=(rows,), dtype=torch.float32, device=device)
    for name, tensor in {"seeds": seeds, "positions": positions}.items():
        require_tensor(name, tensor, shape=(rows,), dtype=torch.int64, device=device)
    tokens: torch.Tensor = _draw_op(processed.contiguous(), temperature, seeds.contiguous(), positions.contiguous())
    return tokens


def draw_formula(
    scores: torch.Tensor, temperature: torch.Tensor, seeds: torch.Tensor, positions: torch.Tensor
) -> torch.Tensor:
    """draw_tokens in torch; scores [R, V] are logarithms of weights."""
    keys = noise.key(seeds, positions, noise.TARGET)
    drawn = (scores + noise.gumbel(keys[:, None], torch.arange(scores.shape[1])[None])).argmax(-1)
    return torch.where(temperature > 0, drawn, scores.argmax(-1))


def _launch(
    processed: torch.Tensor, temperature: torch.Tensor, seeds: torch.Tensor, positions: torch.Tensor
) -> torch.Tensor:
    return launch_draw(processed[:, None], temperature, seeds, positions, None)


def launch_draw(
    processed: torch.Tensor,
    temperature: torch.Tensor,
    seeds: torch.Tensor,
    positions: torch.Tensor,
    refusal: Refusal | None,
) -> torch.Tensor:
    """The kernels, of processed fp32 [R, G, V]: column 0 at `positions`, or the refusal's, as far behind them."""
    rows, group, vocab = processed.shape
    block = logits_of_a_program(vocab)
    blocks = triton.cdiv(vocab, block)
    # A plane of draws from p, and where something may have been refused, one from what is left of it.
    planes = 1 if refusal is None else 2
    peak = torch.empty(planes, rows, blocks, dtype=torch.float32, device=processed.device)
    index = torch.empty(planes, rows, blocks, dtype=torch.int32, device=processed.device)
    tokens = torch.empty(rows, dtype=torch.int64, device=processed.device)
    _block_draw_kernel[(rows, blocks)](
        processed,
        temperature,
        seeds,
        positions,
        *(refusal or (None, None, None, None)),
        peak,
        index,
        group,
        vocab,
        *((0, 0, 0) if refusal is None else refusal.draft_logits.stride()),
        REFUSING=refusal is not None,
        STREAM=noise.TARGET,
        BLOCK=block,
        # Few logits a thread, as in a drafter's sampling: noise is arithmetic.
        num_warps=max(1, min(8, block // 128)),
        **dependent_launch(processed.device),
    )
    _take_token_kernel[(rows,)](
        peak,
        index,
        tokens,
        vocab,
        blocks,
        REFUSING=refusal is not None,
        BLOCK=triton.next_power_of_2(blocks),
        num_warps=1,
        **dependent_launch(processed.device),
    )
    return tokens


@triton.jit
def _block_draw_kernel(
    processed,
    temperature,
    seeds,
    positions,
    columns,
    weights,
    norms,
    draft_logits,
    peak,
    index,
    group,
    vocab,
    draft_row_stride,
    draft_column_stride,
    draft_token_stride,
    REFUSING: tl.constexpr,
    STREAM: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    await_previous(PDL)
    row = tl.program_id(0).to(tl.int64)
    block = tl.program_id(1)
    rows, blocks = tl.num_programs(0), tl.num_programs(1)
    token = block * BLOCK + tl.arange(0, BLOCK)
    inside = token < vocab
    heat = tl.load(temperature + row)
    seed = tl.load(seeds + row)
    position = tl.load(positions + row)
    line = row * group
    weight = 0.0
    if REFUSING:
        column = tl.load(columns + row)
        line += column
        position += column
        if heat > 0:
            weight = tl.load(weights + row)
    x = tl.load(processed + line * vocab + token, mask=inside, other=float("-inf"))
    gumbel = tl.zeros((BLOCK,), tl.float32)
    if heat > 0:
        gumbel = triton_gumbel(triton_key(seed, position, STREAM), token)
    best, first = tl.max(x + gumbel, 0, return_indices=True)
    part = row * blocks + block
    if REFUSING:
        left = tl.full((BLOCK,), float("-inf"), tl.float32)
        if weight > 0:
            y = draft_logits + row * draft_row_stride + column * draft_column_stride + token * draft_token_stride
            y = tl.load(y, mask=inside, other=float("-inf"))
            left = tl.log(residual(x, y, weight, norms, row * (group - 1) + column, rows * (group - 1))) + gumbel
        most, at = tl.max(left, 0, return_indices=True)
        tl.store(peak + rows * blocks + part, most)
        tl.store(index + rows * blocks + part, block * BLOCK + at)
    tl.store(peak + part, best)
    tl.store(index + part, block * BLOCK + first)


@triton.jit
def residual(x, y, weight, norms, at, count):
    """max(weight p - q, 0) of logits x of p and y of q, by Refusal's norms of the at-th of `count` columns."""
    p_share = tl.div_rn(weight, tl.load(norms + count + at))
    q_share = tl.div_rn(1.0, tl.load(norms + 3 * count + at))
    p = tl.exp(x - tl.load(norms + at)) * p_share
    q = tl.exp(y - tl.load(norms + 2 * count + at)) * q_share
    return tl.maximum(p - q, 0.0)


@triton.jit
def _take_token_kernel(
    peak, index, tokens, vocab, blocks, REFUSING: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr
):
    await_previous(PDL)
    row = tl.program_id(0).to(tl.int64)
    block = tl.arange(0, BLOCK)
    part = row * blocks + block
    _, first = first_best(peak + part, index + part, block < blocks)
    if REFUSING:
        part += tl.num_programs(0) * blocks
        most, behind = first_best(peak + part, index + part, block < blocks)
        # Nothing is left of p where nothing was refused, or where rounding ate what p differs by from q.
        first = tl.where(most > float("-inf"), behind, first)
    # Where every logit is NaN none was found; the token must lie in the vocabulary all the same.
    tl.store(tokens + row, tl.minimum(first, vocab - 1).to(tl.int64))


_draw_op = define_op_by_schema(
    "spec_decode::draw_tokens",
    "(Tensor processed, Tensor temperature, Tensor seeds, Tensor positions) -> Tensor",
    cpu=draw_formula,
    cuda=_launch,
    fake=lambda processed, temperature, seeds, positions: torch.empty_like(positions),
)
