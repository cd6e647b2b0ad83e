"""Draw the tokens of a block in sequence, each among the candidates of its place; the token before shifts the scores.

Legend: R rows, K columns, W candidates per place, V vocabulary, N rank of the shift.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from builders.kernels.op import define_op
from builders.kernels.sizes import next_power_of_2
from builders.kernels.triton_runtime import await_previous, dependent_launch, tl, triton
from spec_decode.sampling import noise
from spec_decode.sampling.kernels.draft_argmax import POSITION_AHEAD
from spec_decode.sampling.kernels.sample_draft import NO_TOKEN
from spec_decode.sampling.noise import triton_gumbel, triton_key

_RANKS = 128
"""The most dims of the shift that a program sums at once."""


class SelectCandidates(NamedTuple):
    """The arguments of the op; DraftSampler documents the buffers, DraftSampler.select_block the others.

    Line r * K + k is column k of row r. A candidate's score is its logit plus the sum over n of predecessors[token
    before] * gates[line] * successors[candidate], in fp32. A candidate with a logit of -inf or NaN is ignored, and a
    duplicate counts once, since its noise is the same.
    """

    logits: torch.Tensor
    candidates: torch.Tensor
    gates: torch.Tensor
    predecessors: torch.Tensor
    successors: torch.Tensor
    next_tokens: torch.Tensor
    temperature: torch.Tensor
    seeds: torch.Tensor
    positions: torch.Tensor
    seq_lens: torch.Tensor
    draft_tokens: torch.Tensor
    draft_logits: torch.Tensor
    scored: torch.Tensor
    draft_lens: torch.Tensor
    num_tokens: torch.Tensor
    min_confidence: torch.Tensor

    def reference(self) -> None:
        columns = self.draft_tokens.shape[1]
        rows = len(self.logits) // columns
        logits, candidates, gates, positions = (
            lines.unflatten(0, (rows, columns)) for lines in (self.logits, self.candidates, self.gates, self.positions)
        )
        temperature = self.temperature[:rows, None]
        is_random = temperature > 0
        lengths = self.draft_lens[:rows].clamp(max=self.num_tokens).clamp(max=columns)
        proposes = (self.seq_lens[:rows] > 0) & (lengths > 0)
        previous = self.next_tokens[:rows]
        for column in range(columns):
            ids = candidates[:, column]
            context = self.predecessors[previous].float() * gates[:, column].float()
            shift = (context[:, None] * self.successors[ids].float()).sum(-1)
            own = logits[:, column].gather(1, ids).float()
            scores = torch.where(own > -torch.inf, own + shift, -torch.inf) / temperature.where(is_random, 1.0)
            keys = noise.key(self.seeds[:rows], positions[:, column] + POSITION_AHEAD, noise.DRAFT)
            chosen = torch.where(is_random, scores + noise.gumbel(keys[:, None], ids), scores).argmax(-1, keepdim=True)
            previous = ids.gather(1, chosen)[:, 0]
            kept = self.draft_logits[:rows, column]
            kept.scatter_(1, self.scored[:rows, column], -torch.inf).scatter_(1, ids, scores)
            self.draft_tokens[:rows, column] = torch.where(proposes, previous, NO_TOKEN)
            proposes = proposes & (column + 1 < lengths)
            if self.min_confidence > 0:
                proposes &= scores.softmax(-1).gather(1, chosen)[:, 0] >= self.min_confidence
        self.scored[:rows] = candidates

    def launch(self) -> None:
        columns, (lines, width), rank = self.draft_tokens.shape[1], self.candidates.shape, self.gates.shape[1]
        ranks = min(next_power_of_2(rank), _RANKS)
        block = next_power_of_2(width)
        _select_candidates_kernel[(lines // columns,)](
            logits_ptr=self.logits,
            candidates_ptr=self.candidates,
            gates_ptr=self.gates,
            predecessors_ptr=self.predecessors,
            successors_ptr=self.successors,
            next_tokens_ptr=self.next_tokens,
            temperature_ptr=self.temperature,
            seeds_ptr=self.seeds,
            positions_ptr=self.positions,
            seq_lens_ptr=self.seq_lens,
            draft_tokens_ptr=self.draft_tokens,
            draft_logits_ptr=self.draft_logits,
            scored_ptr=self.scored,
            draft_lens_ptr=self.draft_lens,
            num_tokens_ptr=self.num_tokens,
            min_confidence_ptr=self.min_confidence,
            num_drafts=columns,
            width=width,
            rank=rank,
            stride_logits=self.logits.stride(0),
            stride_gates=self.gates.stride(0),
            stride_draft_tokens=self.draft_tokens.stride(0),
            stride_draft_row=self.draft_logits.stride(0),
            stride_draft_pos=self.draft_logits.stride(1),
            STREAM=noise.DRAFT,
            AHEAD=POSITION_AHEAD,
            BLOCK_W=block,
            BLOCK_N=ranks,
            num_warps=max(1, min(8, block * ranks // 512)),
            **dependent_launch(self.logits.device),
        )


@triton.jit
def _select_candidates_kernel(
    logits_ptr,  # [rows * K, V]
    candidates_ptr,  # int64 [rows * K, W]
    gates_ptr,  # [rows * K, N]
    predecessors_ptr,  # [V, N]
    successors_ptr,  # [V, N]
    next_tokens_ptr,  # int64 [R]
    temperature_ptr,  # fp32 [R]
    seeds_ptr,  # int64 [R]
    positions_ptr,  # int64 [rows * K]
    seq_lens_ptr,  # int32 [R]
    draft_tokens_ptr,  # out: int64 [R, K]
    draft_logits_ptr,  # in and out: fp32 [R, K, V]
    scored_ptr,  # in and out: int64 [R, K, W]
    draft_lens_ptr,  # int32 [R]
    num_tokens_ptr,  # int32 [1]
    min_confidence_ptr,  # fp32 [1]
    num_drafts,  # K
    width,  # W
    rank,  # N
    stride_logits,
    stride_gates,
    stride_draft_tokens,
    stride_draft_row,
    stride_draft_pos,
    STREAM: tl.constexpr,  # noise stream
    AHEAD: tl.constexpr,  # position of the predicted token minus that of the input
    BLOCK_W: tl.constexpr,  # W, rounded up to a power of two
    BLOCK_N: tl.constexpr,  # dims of the shift that are summed at once
    PDL: tl.constexpr,  # programmatic dependent launch
):
    """score = logit + sum of predecessors[previous] * gate * successors[token], and the argmax of score + gumbel.

    One program per row, columns in sequence; rows are the first of the R.
    """
    await_previous(PDL)
    row = tl.program_id(0).to(tl.int64)
    offs_w = tl.arange(0, BLOCK_W)
    mask = offs_w < width
    temperature = tl.load(temperature_ptr + row)
    is_random = temperature > 0
    seed = tl.load(seeds_ptr + row)
    min_confidence = tl.load(min_confidence_ptr)
    draft_len = tl.minimum(tl.minimum(tl.load(draft_lens_ptr + row), tl.load(num_tokens_ptr)), num_drafts)
    draft_len = tl.where(tl.load(seq_lens_ptr + row) > 0, draft_len, 0)
    previous = tl.load(next_tokens_ptr + row)
    for k in range(0, num_drafts):
        draft_row = row * num_drafts + k
        token = tl.load(candidates_ptr + draft_row * width + offs_w, mask=mask, other=0)
        x = tl.load(logits_ptr + draft_row * stride_logits + token, mask=mask, other=float("-inf")).to(tl.float32)
        is_found = x > float("-inf")
        # 1. The shift that the token before adds to each candidate's logit
        shift = tl.zeros((BLOCK_W,), tl.float32)
        for start in range(0, rank, BLOCK_N):
            offs_n = start + tl.arange(0, BLOCK_N)
            mask_n = offs_n < rank
            predecessor = tl.load(predecessors_ptr + previous * rank + offs_n, mask=mask_n, other=0.0).to(tl.float32)
            gate = tl.load(gates_ptr + draft_row * stride_gates + offs_n, mask=mask_n, other=0.0).to(tl.float32)
            successor = successors_ptr + token[:, None] * rank + offs_n[None, :]
            successor = tl.load(successor, mask=is_found[:, None] & mask_n[None, :], other=0.0).to(tl.float32)
            shift += tl.sum((predecessor * gate)[None, :] * successor, 1)
        x = tl.where(is_found, x + shift, float("-inf"))
        if is_random:
            x = tl.div_rn(x, temperature)
        # 2. Store the scores for verification, and reset those of the last round
        draft_logits_ptrs = draft_logits_ptr + row * stride_draft_row + k * stride_draft_pos
        scored_ptrs = scored_ptr + draft_row * width + offs_w
        last = tl.load(scored_ptrs, mask=mask, other=0)
        is_rescored = tl.sum(((last[:, None] == token[None, :]) & mask[None, :]).to(tl.int32), 1) > 0
        tl.store(draft_logits_ptrs + last, float("-inf"), mask=mask & (is_rescored == 0))
        tl.store(draft_logits_ptrs + token, x, mask=mask)
        tl.store(scored_ptrs, token, mask=mask)
        # 3. The best of them, with noise unless greedy
        perturbed = x
        if is_random:
            perturbed = x + triton_gumbel(triton_key(seed, tl.load(positions_ptr + draft_row) + AHEAD, STREAM), token)
        _, argmax = tl.max(perturbed, 0, return_indices=True)
        # If every score is NaN, no token was found; clamp to a valid one.
        argmax = tl.minimum(argmax, width - 1)
        previous = tl.sum(tl.where(offs_w == argmax, token, 0), 0)
        tl.store(draft_tokens_ptr + row * stride_draft_tokens + k, tl.where(k < draft_len, previous, -1))
        if min_confidence > 0:
            max_logit = tl.max(x, 0)
            exps = tl.exp(x - max_logit)
            is_sure = tl.div_rn(tl.sum(tl.where(offs_w == argmax, exps, 0.0), 0), tl.sum(exps, 0)) >= min_confidence
            # The first token below min_confidence is still proposed.
            draft_len = tl.where(is_sure, draft_len, tl.minimum(draft_len, k + 1))


select_candidates = define_op(
    "spec_decode::select_candidates", SelectCandidates, mutates=("draft_tokens", "draft_logits", "scored")
)
