"""Token-wise rejection sampling of a round's drafts, in three stages.

PartialMax reads the logits, block by block of the vocabulary; the kernel here decides for each row how many tokens are
accepted; launch_draw draws the one after them. Legend: R rows, K draft tokens of a row, V tokens of the vocabulary.
"""

from __future__ import annotations

import torch

from builders.kernels.op import define_op
from builders.kernels.triton_runtime import await_previous, dependent_launch, tl, triton
from spec_decode.sampling.kernels.draw_tokens import Residual, launch_draw
from spec_decode.verification.kernels.distributions import Distributions, count_leading
from spec_decode.verification.kernels.draft_probabilities import (
    accept_uniform,
    matches_argmax,
    probabilities_and_norms,
    read_draft,
)
from spec_decode.verification.kernels.partial_max import PartialMax
from spec_decode.verification.kernels.verify_arguments import VerifyArguments


class RejectionSample(VerifyArguments):
    """Accepts the longest prefix whose every token d passes p(d) > uniform * q(d), or at temperature 0 is p's argmax.

    The token after it is drawn from max(p - q, 0) where one was rejected, and from p where the draft ended.
    """

    __slots__ = ()

    def reference(self) -> tuple[torch.Tensor, torch.Tensor]:
        models = Distributions(self)
        # Strictly less: a product that underflows to 0 must not accept a token that the target cannot produce.
        passes = torch.where(
            models.is_random[:, None], models.uniform * models.q_token < models.p_token, models.is_argmax
        )
        accepted = count_leading(passes & models.proposed)
        return accepted, models.next_tokens(accepted, torch.ones(len(accepted)))

    def launch(self) -> tuple[torch.Tensor, torch.Tensor]:
        rows, columns = self.draft_tokens.shape
        partial, residual = PartialMax.launch(self), Residual.allocate(self.draft_logits)
        _rejection_sample_kernel[(rows,)](
            target_logits_ptr=self.processed,
            draft_tokens_ptr=self.draft_tokens,
            draft_logits_ptr=self.draft_logits,
            temperature_ptr=self.temperature,
            accept_seeds_ptr=self.accept_seeds,
            draft_positions_ptr=self.draft_positions,
            partial_max_ptr=partial.largest,
            partial_sum_exp_ptr=partial.sum_exp,
            partial_argmax_ptr=partial.argmax,
            num_accepted_ptr=residual.accepted,
            weight_ptr=residual.weight,
            norms_ptr=residual.norms,
            num_rows=rows,
            num_drafts=columns,
            vocab_size=self.processed.shape[2],
            num_blocks=partial.argmax.shape[1],
            stride_draft_row=self.draft_logits.stride(0),
            stride_draft_pos=self.draft_logits.stride(1),
            stride_draft_token=self.draft_logits.stride(2),
            **partial.launch_options(columns),
            **dependent_launch(self.processed.device),
        )
        next_tokens = launch_draw(self.processed, self.temperature, self.seeds, self.draft_positions, residual)
        return residual.accepted, next_tokens


@triton.jit
def _rejection_sample_kernel(
    target_logits_ptr,  # fp32 [R, 1 + K, V]
    draft_tokens_ptr,  # int64 [R, K]
    draft_logits_ptr,  # fp32 [R, K, V]
    temperature_ptr,  # fp32 [R]
    accept_seeds_ptr,  # int64 [R], of the uniforms
    draft_positions_ptr,  # int64 [R], absolute position of draft token 0
    partial_max_ptr,  # fp32 [2, R * K, blocks], of the target and of the draft
    partial_sum_exp_ptr,  # fp32 [2, R * K, blocks], likewise
    partial_argmax_ptr,  # int32 [R * K, blocks], of the target in greedy rows
    num_accepted_ptr,  # out: int64 [R]
    weight_ptr,  # out: fp32 [R], w of the residual max(w p - q, 0); 0: the token after the draft is drawn from p
    norms_ptr,  # out: fp32 [4, R * K]: the target's max and sum of exponentials, then the draft's
    num_rows,  # R
    num_drafts,  # K
    vocab_size,  # V
    num_blocks,  # of the vocabulary
    stride_draft_row,
    stride_draft_pos,
    stride_draft_token,
    BLOCK_B: tl.constexpr,  # blocks, rounded up to a power of two
    BLOCK_K: tl.constexpr,  # K, likewise
    PDL: tl.constexpr,  # programmatic dependent launch
):
    """Accept draft token k if uniform * draft_probs[k] < target_probs[k], up to the first that fails.

    Speculative sampling: Leviathan et al., 2023 (arXiv:2211.17192, algorithm 1). Greedy rows accept argmax tokens.
    Grid [R]: a program per row.
    """
    await_previous(PDL)
    # 1. Load the row's draft tokens [BLOCK_K]; draft_len of them stand before the first below 0
    row = tl.program_id(0).to(tl.int64)
    offs_k = tl.arange(0, BLOCK_K)
    draft_tokens, draft_len = read_draft(row, draft_tokens_ptr, num_drafts, BLOCK_K)
    # 2. Decide on each token: accept, bool [BLOCK_K]
    if tl.load(temperature_ptr + row) > 0:
        target_probs, draft_probs = probabilities_and_norms(
            row=row,
            draft_tokens=draft_tokens,
            draft_len=draft_len,
            target_logits_ptr=target_logits_ptr,
            draft_logits_ptr=draft_logits_ptr,
            partial_max_ptr=partial_max_ptr,
            partial_sum_exp_ptr=partial_sum_exp_ptr,
            norms_ptr=norms_ptr,
            num_rows=num_rows,
            num_drafts=num_drafts,
            vocab_size=vocab_size,
            num_blocks=num_blocks,
            stride_draft_row=stride_draft_row,
            stride_draft_pos=stride_draft_pos,
            stride_draft_token=stride_draft_token,
            BLOCK_B=BLOCK_B,
            BLOCK_K=BLOCK_K,
        )
        uniform = accept_uniform(tl.load(accept_seeds_ptr + row), tl.load(draft_positions_ptr + row) + offs_k)
        # Strictly less: past the draft's end both are 0, and a product that underflows to 0 must not accept a token
        # that the target cannot produce.
        accept = uniform * draft_probs < target_probs
    else:
        accept = matches_argmax(
            row, draft_tokens, draft_len, partial_max_ptr, partial_argmax_ptr, num_drafts, num_blocks, BLOCK_B, BLOCK_K
        )
    # 3. Count the tokens before the first rejected one: num_drafts where there is none, as columns beyond K, which
    # accept nothing, are no lower. launch_draw replaces the rejected token by a draw from max(p - q, 0), of weight 1.
    num_accepted = tl.min(tl.where(accept, num_drafts, offs_k), 0)
    tl.store(num_accepted_ptr + row, num_accepted.to(tl.int64))
    tl.store(weight_ptr + row, tl.where(num_accepted < draft_len, 1.0, 0.0))


rejection_sample = define_op("spec_decode::rejection_sample", RejectionSample)
