"""What the ops that judge a draft share: the formula's distributions, and the kernels' way to them.

Legend: R rows, K draft tokens, V vocabulary, p the target's distributions, q the draft's.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from builders.errors import require_tensor
from builders.kernels.triton_runtime import await_previous, dependent_launch, tl, triton
from spec_decode.sampling import noise
from spec_decode.sampling.draft import logits_of_a_program
from spec_decode.sampling.kernels.draw_tokens import draw_formula
from spec_decode.sampling.noise import triton_key, triton_uniform


@dataclass(frozen=True, kw_only=True, slots=True)
class DraftRound:
    """The arguments of an op that judges drafts; it returns the draft tokens kept, int64 [R], and the token behind.

    processed        fp32 [R, 1 + K, V]   the target's logits after temperature, top_k and top_p
    draft_tokens     int64 [R, K]         -1 where the draft has ended; nothing behind is read
    draft_logits     fp32 [R, K, V]       the processed logits they were drawn from
    temperature      fp32 [R]             0 is greedy
    seeds            int64 [R]            of the target's draws
    coin_seeds       int64 [R]            of the coins that decide what is kept
    draft_positions  int64 [R]            absolute position of draft token 0
    """

    processed: torch.Tensor
    draft_tokens: torch.Tensor
    draft_logits: torch.Tensor
    temperature: torch.Tensor
    seeds: torch.Tensor
    coin_seeds: torch.Tensor
    draft_positions: torch.Tensor

    @classmethod
    def of(cls, *arguments: torch.Tensor) -> DraftRound:
        """From the arguments of such an op."""
        return cls(**dict(zip(cls.__slots__, arguments, strict=True)))

    def arguments(self) -> tuple[torch.Tensor, ...]:
        """In the order of SCHEMA, as the kernels read them. Raises BatchError for another shape, dtype or device."""
        rows, columns = self.draft_tokens.shape
        vocab, device = self.processed.shape[-1], self.processed.device
        shapes: dict[str, tuple[tuple[int, ...], torch.dtype]] = {
            "processed": ((rows, columns + 1, vocab), torch.float32),
            "draft_tokens": ((rows, columns), torch.int64),
            "draft_logits": ((rows, columns, vocab), torch.float32),
            "temperature": ((rows,), torch.float32),
            "seeds": ((rows,), torch.int64),
            "coin_seeds": ((rows,), torch.int64),
            "draft_positions": ((rows,), torch.int64),
        }
        for name, (shape, dtype) in shapes.items():
            require_tensor(name, getattr(self, name), shape=shape, dtype=dtype, device=device)
        # Draft logits are large and stay where they are; their kernels take any strides.
        return tuple(x if x is self.draft_logits else x.contiguous() for x in (getattr(self, name) for name in shapes))


SCHEMA = (
    "(Tensor processed, Tensor draft_tokens, Tensor draft_logits, Tensor temperature, Tensor seeds, "
    "Tensor coin_seeds, Tensor draft_positions) -> (Tensor, Tensor)"
)


def fake_verify_output(*arguments: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Shapes of what such an op returns."""
    draft_positions = arguments[-1]
    return torch.empty_like(draft_positions), torch.empty_like(draft_positions)


class Distributions:
    """In torch: both models' distributions over a round's draft.

    p fp32 [R, 1 + K, V], q fp32 [R, K, V]; p_token, q_token fp32 [R, K]: of the draft's tokens; greedy bool [R, K]: the
    draft token is the target's argmax; coin fp32 [R, K]. proposed bool [R, K]: the draft has not ended; behind its end
    every other field may hold garbage, NaN included. hot bool [R]: sampled, not greedy.
    """

    def __init__(self, round_: DraftRound) -> None:
        token = round_.draft_tokens.clamp(min=0)
        columns = token.shape[1]
        self._round = round_
        self.p = round_.processed.softmax(-1)
        self.q = round_.draft_logits.softmax(-1)
        self.p_token = self.p[:, :columns].gather(2, token[..., None])[..., 0]
        self.q_token = self.q.gather(2, token[..., None])[..., 0]
        self.greedy = token == round_.processed[:, :columns].argmax(-1)
        self.proposed = (round_.draft_tokens >= 0).long().cumprod(1).bool()
        self.hot = round_.temperature > 0
        keys = noise.key(
            round_.coin_seeds[:, None], round_.draft_positions[:, None] + torch.arange(columns), noise.ACCEPT
        )
        self.coin = noise.uniform(keys, torch.zeros_like(keys))

    def next_tokens(self, accepted: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        """The target's own token int64 [R] behind `accepted` int64 [R] draft tokens.

        Greedy rows: its argmax. Hot rows: a draw from max(weight * p - q, 0), normalised, if a draft token was refused
        there, and from p if the draft ended; weight fp32 [R].
        """
        row, last = torch.arange(len(accepted)), self.q.shape[1] - 1
        at = accepted.clamp(max=last)
        refused = self.hot & (accepted <= last) & self.proposed[row, at]
        residual = (weight[:, None] * self.p[row, accepted] - self.q[row, at]).clamp_(min=0)
        # Rounding can leave nothing of a residual that is zero in theory only if p == q: then p itself is right.
        left = refused & (residual.sum(-1) > 0)
        scores = torch.where(left[:, None], residual.log(), self._round.processed[row, accepted])
        positions = self._round.draft_positions + accepted
        return draw_formula(scores, self._round.temperature, self._round.seeds, positions)


def leading(kept: torch.Tensor) -> torch.Tensor:
    """How many of the first columns of kept bool [R, K] are all true; int64 [R]."""
    return kept.long().cumprod(1).sum(1)


@dataclass(frozen=True, kw_only=True, slots=True)
class Tops:
    """What each block of each column's logits says of p and of q, [R * K, blocks], and the judges' way to read it.

    peak  fp32 [2, ...]    the largest logit of p, and of q; q's in hot rows alone
    mass  fp32 [2, ...]    hot rows: the sum of exp(logit - peak)
    index int32            greedy rows: p's first largest logit
    """

    peak: torch.Tensor
    mass: torch.Tensor
    index: torch.Tensor

    def options(self, columns: int) -> dict[str, int]:
        """Launch options of a kernel that calls `read_draft`, a program a row."""
        blocks = triton.next_power_of_2(self.index.shape[1])
        block_k = triton.next_power_of_2(columns)
        warps = max(1, min(8, blocks * block_k // 256))
        return {"BLOCK": blocks, "BLOCK_K": block_k, "num_warps": warps}


def launch_tops(processed: torch.Tensor, draft_logits: torch.Tensor, temperature: torch.Tensor) -> Tops:
    """One pass over what the draft's tokens were chosen from, but for the column behind the last."""
    rows, columns, vocab = draft_logits.shape
    block = logits_of_a_program(vocab)
    blocks = triton.cdiv(vocab, block)
    peak, mass = torch.empty(2, 2, rows * columns, blocks, dtype=torch.float32, device=processed.device)
    index = torch.empty(rows * columns, blocks, dtype=torch.int32, device=processed.device)
    _tops_kernel[(rows * columns, blocks)](
        processed,
        draft_logits,
        temperature,
        peak,
        mass,
        index,
        columns,
        vocab,
        *draft_logits.stride(),
        BLOCK=block,
        num_warps=max(1, min(8, block // 256)),
        **dependent_launch(processed.device),
    )
    return Tops(peak=peak, mass=mass, index=index)


@triton.jit
def _tops_kernel(
    processed,
    draft_logits,
    temperature,
    peak,
    mass,
    index,
    columns,
    vocab,
    draft_row_stride,
    draft_column_stride,
    draft_token_stride,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    await_previous(PDL)
    line = tl.program_id(0).to(tl.int64)
    block = tl.program_id(1)
    row, column = line // columns, line % columns
    token = block * BLOCK + tl.arange(0, BLOCK)
    inside = token < vocab
    part = line * tl.num_programs(1) + block
    heat = tl.load(temperature + row)
    x = tl.load(processed + (line + row) * vocab + token, mask=inside, other=float("-inf"))
    if heat > 0:
        y = draft_logits + row * draft_row_stride + column * draft_column_stride + token * draft_token_stride
        y = tl.load(y, mask=inside, other=float("-inf"))
        _file_mass(x, peak + part, mass + part)
        part += tl.num_programs(0) * tl.num_programs(1)
        _file_mass(y, peak + part, mass + part)
    else:
        best, first = tl.max(x, 0, return_indices=True)
        tl.store(peak + part, best)
        tl.store(index + part, block * BLOCK + first)


@triton.jit
def _file_mass(x, peak, mass):
    best = tl.max(x, 0)
    tl.store(peak, best)
    # A block of -inf alone has no mass; -inf minus itself would make it NaN.
    tl.store(mass, tl.sum(tl.where(x == float("-inf"), 0.0, tl.exp(x - best)), 0))


@triton.jit
def read_draft(row, draft_tokens, columns, BLOCK_K: tl.constexpr):
    """A row's draft int64 [BLOCK_K], -1 outside its K columns, and how many tokens of it stand before its end."""
    column = tl.arange(0, BLOCK_K)
    token = tl.load(draft_tokens + row * columns + column, mask=column < columns, other=-1)
    return token, tl.minimum(tl.min(tl.where(token < 0, column, columns), 0), columns)


@triton.jit
def matches(row, token, length, peak, index, columns, blocks, BLOCK: tl.constexpr, BLOCK_K: tl.constexpr):
    """Of a greedy row: which of its first `length` tokens are the target's argmax."""
    column = tl.arange(0, BLOCK_K)
    block = tl.arange(0, BLOCK)[None, :]
    part = (row * columns + column[:, None]) * blocks + block
    inside = (column < length)[:, None] & (block < blocks)
    x = tl.load(peak + part, mask=inside, other=float("-inf"))
    at = tl.load(index + part, mask=inside, other=2147483647)
    best = tl.max(x, 1)
    return (token == tl.min(tl.where(x == best[:, None], at, 2147483647), 1)) & (column < length)


@triton.jit
def file_norms(row, length, peak, mass, norms, columns, blocks, BLOCK: tl.constexpr, BLOCK_K: tl.constexpr):
    """Of a hot row's first `length` columns: the largest logit and the mass, filed as Refusal's norms of one model."""
    column = tl.arange(0, BLOCK_K)
    block = tl.arange(0, BLOCK)[None, :]
    line = row * columns + column
    part = line[:, None] * blocks + block
    inside = (column < length)[:, None] & (block < blocks)
    tops = tl.load(peak + part, mask=inside, other=float("-inf"))
    masses = tl.load(mass + part, mask=inside, other=0.0)
    highest = tl.max(tops, 1)
    total = tl.sum(tl.where(masses > 0, masses * tl.exp(tops - highest[:, None]), 0.0), 1)
    count = tl.num_programs(0) * columns
    tl.store(norms + line, highest, mask=column < length)
    tl.store(norms + count + line, total, mask=column < length)
    return highest, total


@triton.jit
def probabilities(
    row, token, length, processed, draft_logits, peak, mass, norms, columns, vocab, blocks,
    draft_row_stride, draft_column_stride, draft_token_stride, BLOCK: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """p and q fp32 [BLOCK_K] of a hot row's first `length` tokens, 0 of the others; files the norms of their columns.

    A program a row."""
    column = tl.arange(0, BLOCK_K)
    count = tl.num_programs(0) * columns
    p_high, p_mass = file_norms(row, length, peak, mass, norms, columns, blocks, BLOCK, BLOCK_K)
    q_high, q_mass = file_norms(
        row, length, peak + count * blocks, mass + count * blocks, norms + 2 * count, columns, blocks, BLOCK, BLOCK_K
    )
    there = (column < length) & (token < vocab)
    x = tl.load(processed + (row * (columns + 1) + column) * vocab + token, mask=there, other=float("-inf"))
    y = draft_logits + row * draft_row_stride + column * draft_column_stride + token * draft_token_stride
    y = tl.load(y, mask=there, other=float("-inf"))
    p = tl.where(there, tl.div_rn(tl.exp(x - p_high), p_mass), 0.0)
    q = tl.where(there, tl.div_rn(tl.exp(y - q_high), q_mass), 0.0)
    return p, q


@triton.jit
def coins(row, coin_seeds, draft_positions, STREAM: tl.constexpr, BLOCK_K: tl.constexpr):
    """A row's coins, one for each column."""
    return coin_of(tl.load(coin_seeds + row), tl.load(draft_positions + row) + tl.arange(0, BLOCK_K), STREAM)


@triton.jit
def coin_of(seed, position, STREAM: tl.constexpr):
    """fp32 in (0, 1)."""
    key = triton_key(seed, position, STREAM)
    return triton_uniform(key, key * 0)
