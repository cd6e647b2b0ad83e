"""Block verification of a round's drafts, in five stages.

PartialMax reads the logits in vocabulary blocks; launch_accept_draft weighs the prefixes of each row's draft; the two
kernels here sum their residuals and choose a prefix; launch_draw draws the token after it. Legend: R rows, K draft
tokens per row, V tokens of the vocabulary.
"""

from __future__ import annotations

import torch

from builders.kernels.op import define_op
from builders.kernels.sizes import cdiv
from builders.kernels.triton_runtime import await_previous, dependent_launch, tl, triton
from spec_decode.sampling.kernels.draw_tokens import launch_draw, residual_weight
from spec_decode.sampling.kernels.vocab_blocks import vocab_block
from spec_decode.verification.kernels.accept_draft import accept_uniform, launch_accept_draft, read_draft
from spec_decode.verification.kernels.distributions import Distributions, count_leading
from spec_decode.verification.kernels.verify_arguments import VerifyArguments

_TINY = torch.finfo(torch.float32).tiny


class BlockVerify(VerifyArguments):
    """Accept the longest prefix that passes with the weights w that BlockVerification defines; at temperature 0 the
    longest prefix of argmax tokens.

    The token after it is drawn from max(w p - q, 0) after a rejection, and from p if the draft ended.
    """

    __slots__ = ()

    def reference(self) -> tuple[torch.Tensor, torch.Tensor]:
        models = Distributions(self)
        weights = _prefix_weights(models)
        passes = _passing_prefixes(models, weights)
        lengths = torch.arange(1, 1 + passes.shape[1])
        greedy = count_leading(models.is_argmax & models.proposed)
        accepted = torch.where(models.is_random, (passes * lengths).amax(1), greedy)
        weight = torch.where(accepted > 0, weights.gather(1, (accepted - 1).clamp(min=0)[:, None])[:, 0], 1.0)
        return accepted, models.next_tokens(accepted, weight)

    def launch(self) -> tuple[torch.Tensor, torch.Tensor]:
        processed, draft_tokens, draft_logits, temperature, seeds, accept_seeds, draft_positions = self
        (rows, columns, vocab), device = draft_logits.shape, processed.device
        strides = draft_logits.stride()
        block = vocab_block(vocab)
        blocks = cdiv(vocab, block)
        weights = torch.empty(rows, columns, dtype=torch.float32, device=device)
        residual_sums = torch.empty(rows * (columns - 1), blocks, dtype=torch.float32, device=device)
        residual, options = launch_accept_draft(self, weights)
        if columns > 1:
            _residual_sums_kernel[(rows * (columns - 1), blocks)](
                target_logits_ptr=processed,
                draft_logits_ptr=draft_logits,
                temperature_ptr=temperature,
                weights_ptr=weights,
                norms_ptr=residual.norms,
                residual_sums_ptr=residual_sums,
                num_rows=rows,
                num_drafts=columns,
                vocab_size=vocab,
                stride_draft_row=strides[0],
                stride_draft_pos=strides[1],
                stride_draft_token=strides[2],
                BLOCK_V=block,
                num_warps=max(1, min(8, block // 256)),
                **dependent_launch(device),
            )
        _accept_prefix_kernel[(rows,)](
            draft_tokens_ptr=draft_tokens,
            temperature_ptr=temperature,
            accept_seeds_ptr=accept_seeds,
            draft_positions_ptr=draft_positions,
            weights_ptr=weights,
            residual_sums_ptr=residual_sums,
            num_accepted_ptr=residual.accepted,
            weight_ptr=residual.weight,
            num_drafts=columns,
            num_blocks=blocks,
            **options,
            **dependent_launch(device),
        )
        return residual.accepted, launch_draw(processed, temperature, seeds, draft_positions, residual)


def _prefix_weights(models: Distributions) -> torch.Tensor:
    """Return w(1) to w(K), fp32 [R, K]: a product capped at 1 at each step is a sum capped at 0 in logarithms."""
    walk = (models.p_token / models.q_token.clamp(min=_TINY)).log().cumsum(1)
    return (walk - walk.cummax(1).values.clamp(min=0)).exp()


def _passing_prefixes(models: Distributions, weights: torch.Tensor) -> torch.Tensor:
    """Return which prefixes of lengths 1 to K pass with their uniform; bool [R, K]."""
    columns = weights.shape[1]
    residual_sum = (weights[:, :-1, None] * models.p[:, 1:columns] - models.q[:, 1:]).clamp_(min=0).sum(-1)
    residual_sum = torch.nn.functional.pad(residual_sum, (0, 1))
    # A draft also ends before a NaN of either model: the token after it is drawn from p, or is NO_TOKEN.
    ends = ~torch.nn.functional.pad(models.proposed[:, 1:] & ~weights[:, 1:].isnan(), (0, 1))
    chance = torch.where(ends, weights, residual_sum)
    whole = torch.where(ends, 1.0, residual_sum + 1 - weights)
    return (models.uniform * whole <= chance) & models.proposed


@triton.jit
def _residual_sums_kernel(
    target_logits_ptr,  # fp32 [R, 1 + K, V]
    draft_logits_ptr,  # fp32 [R, K, V]
    temperature_ptr,  # fp32 [R]
    weights_ptr,  # fp32 [R, K]
    norms_ptr,  # fp32 [4, R * K]
    residual_sums_ptr,  # out: fp32 [R * (K - 1), blocks]
    num_rows,  # R
    num_drafts,  # K
    vocab_size,  # V
    stride_draft_row,
    stride_draft_pos,
    stride_draft_token,
    BLOCK_V: tl.constexpr,  # logits per program
    PDL: tl.constexpr,  # programmatic dependent launch
):
    """Sum max(w(k) target_probs - draft_probs, 0) over one block, at the column after the prefix of k tokens.

    Grid [R * (K - 1), blocks]: one prefix, k = 1 to K - 1, and one vocabulary block per program.
    """
    await_previous(PDL)
    prefix_row = tl.program_id(0).to(tl.int64)
    row, k = prefix_row // (num_drafts - 1), 1 + prefix_row % (num_drafts - 1)
    if tl.load(temperature_ptr + row) > 0:
        offs_v = tl.program_id(1) * BLOCK_V + tl.arange(0, BLOCK_V)
        mask = offs_v < vocab_size
        draft_row = row * num_drafts + k
        # Past the draft's end weights and norms are uninitialised; no prefix reads the resulting sums.
        w = tl.load(weights_ptr + draft_row - 1)
        target_ptrs = target_logits_ptr + (draft_row + row) * vocab_size + offs_v
        target_logits = tl.load(target_ptrs, mask=mask, other=float("-inf"))
        draft_ptrs = draft_logits_ptr + row * stride_draft_row + k * stride_draft_pos
        draft_ptrs += offs_v.to(tl.int64) * stride_draft_token
        draft_logits = tl.load(draft_ptrs, mask=mask, other=float("-inf"))
        part_offs = prefix_row * tl.num_programs(1) + tl.program_id(1)
        residual = residual_weight(target_logits, draft_logits, w, norms_ptr, draft_row, num_rows * num_drafts)
        tl.store(residual_sums_ptr + part_offs, tl.sum(residual, 0))


@triton.jit
def _accept_prefix_kernel(
    draft_tokens_ptr,  # int64 [R, K]
    temperature_ptr,  # fp32 [R]
    accept_seeds_ptr,  # int64 [R]
    draft_positions_ptr,  # int64 [R]
    weights_ptr,  # fp32 [R, K]
    residual_sums_ptr,  # fp32 [R * (K - 1), blocks]
    num_accepted_ptr,  # out: int64 [R], of random rows
    weight_ptr,  # out: fp32 [R], of random rows
    num_drafts,  # K
    num_blocks,  # of the vocabulary
    BLOCK_B: tl.constexpr,  # blocks, rounded up to a power of two
    BLOCK_K: tl.constexpr,  # K, rounded up to a power of two
    PDL: tl.constexpr,  # programmatic dependent launch
):
    """Accept the longest prefix k of a random row with uniform <= S / (S + 1 - w(k)), S the sum of its residual.

    One program per row.
    """
    await_previous(PDL)
    row = tl.program_id(0).to(tl.int64)
    if tl.load(temperature_ptr + row) > 0:
        offs_k = tl.arange(0, BLOCK_K)
        _, draft_len = read_draft(row, draft_tokens_ptr, num_drafts, BLOCK_K)
        # 1. The weight of each prefix, and the sum S of its residual
        weights = tl.load(weights_ptr + row * num_drafts + offs_k, mask=offs_k < draft_len, other=0.0)
        offs_b = tl.arange(0, BLOCK_B)[None, :]
        part_offs = (row * (num_drafts - 1) + offs_k[:, None]) * num_blocks + offs_b
        # Prefix i, at column i - 1, has a residual if a token was proposed after it.
        # A weight is NaN from the first NaN of either model on, and the draft ends before it.
        mask_next = offs_k + 1 < draft_len
        next_weights = tl.load(weights_ptr + row * num_drafts + offs_k + 1, mask=mask_next, other=float("nan"))
        has_next = next_weights == next_weights
        mask = has_next[:, None] & (offs_b < num_blocks)
        residual_sum = tl.sum(tl.load(residual_sums_ptr + part_offs, mask=mask, other=0.0), 1)
        # 2. Which prefixes pass, and the longest of them. A whole draft passes with probability w.
        numerator = tl.where(has_next, residual_sum, weights)
        denominator = tl.where(has_next, residual_sum + 1 - weights, 1.0)
        uniform = accept_uniform(tl.load(accept_seeds_ptr + row), tl.load(draft_positions_ptr + row) + offs_k)
        # <=, unlike the test by token: a uniform is above 0, so a weight of 0 with an empty residual fails, while a
        # weight of 1 with an empty residual, where p equals q, must pass.
        accept = (offs_k < draft_len) & (uniform * denominator <= numerator)
        num_accepted = tl.max(tl.where(accept, offs_k + 1, 0), 0)
        w = tl.where(num_accepted > 0, tl.sum(tl.where(offs_k + 1 == num_accepted, weights, 0.0), 0), 1.0)
        tl.store(num_accepted_ptr + row, num_accepted.to(tl.int64))
        tl.store(weight_ptr + row, tl.where(num_accepted < draft_len, w, 0.0))


block_verify = define_op("spec_decode::block_verify", BlockVerify)
