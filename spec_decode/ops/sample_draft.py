"""Sample one draft token per request and file it, with its processed logits, under the column of the device step."""

from __future__ import annotations

import torch

from builders._ops import define_op
from builders._triton import tl, triton
from builders.errors import require_tensor
from spec_decode.ops import noise
from spec_decode.ops.noise import triton_gumbel, triton_key

NO_TOKEN = -1
"""Draft token of a row that proposes nothing: padding, or a request that could not advance."""

_BLOCK = 4096
_POSITION_AHEAD = 2  # a draft input at position p stands for token p + 1 and predicts token p + 2


def sample_draft(
    logits: torch.Tensor,
    *,
    temperature: torch.Tensor,
    seeds: torch.Tensor,
    positions: torch.Tensor,
    seq_lens: torch.Tensor,
    step: torch.Tensor,
    draft_tokens: torch.Tensor,
    draft_logits: torch.Tensor,
    next_ids: torch.Tensor,
) -> None:
    """Greedy where temperature is 0, else Gumbel-max sampling from softmax(logits / temperature); in place.

    logits [R, V] any float; temperature fp32, seeds, positions int64 and seq_lens int32, each [>= R]; step int64 [1].
    Column step of draft_tokens int64 [>= R, K] gets the token, of draft_logits fp32 [>= R, K, V] the processed logits
    (divided by a positive temperature), and next_ids int64 [>= R] the token as the next step's input. A row with
    seq_len 0 gets NO_TOKEN, and 0 as its next input. A step past column K - 1 files nothing.
    """
    rows, vocab = logits.shape
    require_tensor(
        "draft_logits",
        draft_logits,
        shape=(None, draft_tokens.shape[1], vocab),
        dtype=torch.float32,
        device=logits.device,
    )
    _sample_op(
        logits,
        temperature[:rows],
        seeds[:rows],
        positions[:rows],
        seq_lens[:rows],
        step,
        draft_tokens,
        draft_logits,
        next_ids,
    )


def _sample(
    logits: torch.Tensor,
    temperature: torch.Tensor,
    seeds: torch.Tensor,
    positions: torch.Tensor,
    seq_lens: torch.Tensor,
    step: torch.Tensor,
    draft_tokens: torch.Tensor,
    draft_logits: torch.Tensor,
    next_ids: torch.Tensor,
) -> None:
    rows, vocab = logits.shape
    column = int(step)
    hot = temperature > 0
    processed = logits.float() / torch.where(hot, temperature, 1.0)[:, None]
    keys = noise.key(seeds, positions + _POSITION_AHEAD, noise.DRAFT)
    perturbed = processed + noise.gumbel(keys[:, None], torch.arange(vocab)[None])
    token = torch.where(hot[:, None], perturbed, processed).argmax(-1)
    live = seq_lens > 0
    if column < draft_tokens.shape[1]:
        draft_logits[:rows, column] = processed
        draft_tokens[:rows, column] = torch.where(live, token, NO_TOKEN)
    next_ids[:rows] = torch.where(live, token, 0)


def _launch(
    logits: torch.Tensor,
    temperature: torch.Tensor,
    seeds: torch.Tensor,
    positions: torch.Tensor,
    seq_lens: torch.Tensor,
    step: torch.Tensor,
    draft_tokens: torch.Tensor,
    draft_logits: torch.Tensor,
    next_ids: torch.Tensor,
) -> None:
    rows, vocab = logits.shape
    block = min(_BLOCK, triton.next_power_of_2(vocab))
    blocks = triton.cdiv(vocab, block)
    peak = torch.empty(rows, blocks, dtype=torch.float32, device=logits.device)
    index = torch.empty(rows, blocks, dtype=torch.int32, device=logits.device)
    _block_argmax_kernel[(rows, blocks)](
        logits,
        temperature,
        seeds,
        positions,
        step,
        draft_logits,
        peak,
        index,
        vocab,
        draft_tokens.shape[1],
        logits.stride(0),
        *draft_logits.stride()[:2],
        STREAM=noise.DRAFT,
        AHEAD=_POSITION_AHEAD,
        BLOCK=block,
        num_warps=8 if block > 1024 else 4,
    )
    _file_token_kernel[(rows,)](
        peak,
        index,
        seq_lens,
        step,
        draft_tokens,
        next_ids,
        draft_tokens.stride(0),
        draft_tokens.shape[1],
        blocks,
        BLOCK=triton.next_power_of_2(blocks),
        num_warps=1,
    )


@triton.jit
def _block_argmax_kernel(
    logits,
    temperature,
    seeds,
    positions,
    step,
    draft_logits,
    peak,
    index,
    vocab,
    columns,
    logits_stride,
    cache_row_stride,
    cache_column_stride,
    STREAM: tl.constexpr,
    AHEAD: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    block = tl.program_id(1)
    token = block * BLOCK + tl.arange(0, BLOCK)
    inside = token < vocab
    heat = tl.load(temperature + row)
    hot = heat > 0
    x = tl.load(logits + row * logits_stride + token, mask=inside, other=float("-inf")).to(tl.float32)
    x = tl.div_rn(x, tl.where(hot, heat, 1.0))
    column = tl.load(step)
    filed = draft_logits + row * cache_row_stride + column * cache_column_stride + token
    tl.store(filed, x, mask=inside & (column < columns))
    if hot:
        key = triton_key(tl.load(seeds + row), tl.load(positions + row) + AHEAD, STREAM)
        x = x + triton_gumbel(key, token)
    best = tl.max(x, 0)
    at = tl.min(tl.where((x == best) & inside, token, vocab), 0)
    tl.store(peak + row * tl.num_programs(1) + block, best)
    tl.store(index + row * tl.num_programs(1) + block, at)


@triton.jit
def _file_token_kernel(
    peak,
    index,
    seq_lens,
    step,
    draft_tokens,
    next_ids,
    tokens_stride,
    columns,
    blocks,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    block = tl.arange(0, BLOCK)
    inside = block < blocks
    x = tl.load(peak + row * blocks + block, mask=inside, other=float("-inf"))
    at = tl.load(index + row * blocks + block, mask=inside, other=2147483647)
    token = tl.min(tl.where(x == tl.max(x, 0), at, 2147483647), 0).to(tl.int64)
    live = tl.load(seq_lens + row) > 0
    column = tl.load(step)
    tl.store(draft_tokens + row * tokens_stride + column, tl.where(live, token, -1), mask=column < columns)
    tl.store(next_ids + row, tl.where(live, token, 0))


_sample_op = define_op(
    "spec_decode::sample_draft",
    "(Tensor logits, Tensor temperature, Tensor seeds, Tensor positions, Tensor seq_lens, Tensor step, "
    "Tensor(a!) draft_tokens, Tensor(b!) draft_logits, Tensor(c!) next_ids) -> ()",
    cpu=_sample,
    cuda=_launch,
)
