"""Draw the tokens of a block in turn, each among the candidates of its place, by scores that the one before it shifts.

Legend: R rows, K columns, W candidates of a place, V vocabulary, N rank of the shift.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from builders.kernels.op import define_op
from builders.kernels.triton_runtime import await_previous, dependent_launch, tl, triton
from spec_decode.sampling import noise
from spec_decode.sampling.kernels.sample_draft import NO_TOKEN, POSITION_AHEAD
from spec_decode.sampling.noise import triton_gumbel, triton_key

_RANKS = 128
"""Dims of the shift that a program takes at once, at most."""


class SelectCandidates(NamedTuple):
    """The arguments of the op; CandidateSampler documents the buffers, and `select_block` of it the others.

    Line r * K + k is column k of row r. A candidate's score is its logit, and sum over n of predecessors[token before]
    * gates[line] * successors[candidate], in fp32. One whose logit is -inf or NaN is none, and one that stands twice is
    one: its noise is the same.
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
        ranks = min(triton.next_power_of_2(rank), _RANKS)
        block = triton.next_power_of_2(width)
        _select_candidates_kernel[(lines // columns,)](
            *self,
            columns,
            width,
            rank,
            self.logits.stride(0),
            self.gates.stride(0),
            self.draft_tokens.stride(0),
            *self.draft_logits.stride()[:2],
            STREAM=noise.DRAFT,
            AHEAD=POSITION_AHEAD,
            BLOCK_W=block,
            BLOCK_N=ranks,
            num_warps=max(1, min(8, block * ranks // 512)),
            **dependent_launch(self.logits.device),
        )


@triton.jit
def _select_candidates_kernel(
    logits,  # [rows * K, V]
    candidates,  # int64 [rows * K, W]
    gates,  # [rows * K, N]
    predecessors,  # [V, N]
    successors,  # [V, N]
    next_tokens,  # int64 [R]
    temperature,  # fp32 [R]
    seeds,  # int64 [R]
    positions,  # int64 [rows * K]
    seq_lens,  # int32 [R]
    draft_tokens,  # out: int64 [R, K]
    draft_logits,  # in and out: fp32 [R, K, V]
    scored,  # in and out: int64 [R, K, W]
    draft_lens,  # int32 [R]
    num_tokens,  # int32 [1]
    min_confidence,  # fp32 [1]
    columns,  # K
    width,  # W
    rank,  # N
    logits_stride,
    gates_stride,
    tokens_stride,
    cache_row_stride,  # of draft_logits, as is the next
    cache_column_stride,
    STREAM: tl.constexpr,  # of the noise
    AHEAD: tl.constexpr,  # from an input's position to that of the token it predicts
    BLOCK_W: tl.constexpr,  # W, rounded up to a power of two
    BLOCK_N: tl.constexpr,  # dims of the shift that are summed at once
    PDL: tl.constexpr,
):
    """One program per row, of the first of the buffers' R: a column after the other."""
    await_previous(PDL)
    row = tl.program_id(0).to(tl.int64)
    place = tl.arange(0, BLOCK_W)
    inside = place < width
    row_temperature = tl.load(temperature + row)
    is_random = row_temperature > 0
    seed = tl.load(seeds + row)
    threshold = tl.load(min_confidence)
    length = tl.minimum(tl.minimum(tl.load(draft_lens + row), tl.load(num_tokens)), columns)
    length = tl.where(tl.load(seq_lens + row) > 0, length, 0)
    previous = tl.load(next_tokens + row)
    for column in range(0, columns):
        line = row * columns + column
        token = tl.load(candidates + line * width + place, mask=inside, other=0)
        x = tl.load(logits + line * logits_stride + token, mask=inside, other=float("-inf")).to(tl.float32)
        found = x > float("-inf")
        # What the token before adds to each candidate's logit
        shift = tl.zeros((BLOCK_W,), tl.float32)
        for start in range(0, rank, BLOCK_N):
            dim = start + tl.arange(0, BLOCK_N)
            before = tl.load(predecessors + previous * rank + dim, mask=dim < rank, other=0.0).to(tl.float32)
            gate = tl.load(gates + line * gates_stride + dim, mask=dim < rank, other=0.0).to(tl.float32)
            after = successors + token[:, None] * rank + dim[None, :]
            after = tl.load(after, mask=found[:, None] & (dim < rank)[None, :], other=0.0).to(tl.float32)
            shift += tl.sum((before * gate)[None, :] * after, 1)
        x = tl.where(found, x + shift, float("-inf"))
        if is_random:
            x = tl.div_rn(x, row_temperature)
        # Store the scores where verification reads them, and take those of the last round away.
        line_logits = draft_logits + row * cache_row_stride + column * cache_column_stride
        line_scored = scored + line * width + place
        last = tl.load(line_scored, mask=inside, other=0)
        again = tl.sum(((last[:, None] == token[None, :]) & inside[None, :]).to(tl.int32), 1) > 0
        tl.store(line_logits + last, float("-inf"), mask=inside & (again == 0))
        tl.store(line_logits + token, x, mask=inside)
        tl.store(line_scored, token, mask=inside)
        # The best of them, with noise in a random row
        perturbed = x
        if is_random:
            perturbed = x + triton_gumbel(triton_key(seed, tl.load(positions + line) + AHEAD, STREAM), token)
        _, first = tl.max(perturbed, 0, return_indices=True)
        # Where every score is NaN none was found; the token must lie in the vocabulary all the same.
        first = tl.minimum(first, width - 1)
        previous = tl.sum(tl.where(place == first, token, 0), 0)
        tl.store(draft_tokens + row * tokens_stride + column, tl.where(column < length, previous, -1))
        if threshold > 0:
            largest = tl.max(x, 0)
            part = tl.exp(x - largest)
            sure = tl.div_rn(tl.sum(tl.where(place == first, part, 0.0), 0), tl.sum(part, 0)) >= threshold
            # The token that is not sure is still proposed.
            length = tl.where(sure, length, tl.minimum(length, column + 1))


select_candidates = define_op(
    "spec_decode::select_candidates", SelectCandidates, mutates=("draft_tokens", "draft_logits", "scored")
)
