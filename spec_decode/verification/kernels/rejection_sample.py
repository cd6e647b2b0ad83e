"""Token-wise rejection sampling of a round's drafts."""

from __future__ import annotations

import torch

from builders.kernels.op import define_op
from builders.kernels.triton_runtime import await_previous, dependent_launch, tl, triton
from spec_decode.sampling.kernels.draw_tokens import Residual, launch_draw
from spec_decode.verification.kernels.distributions import Distributions, count_leading
from spec_decode.verification.kernels.draft_probabilities import (
    accept_uniform,
    draft_probabilities,
    matches_argmax,
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
            *self,
            *partial,
            *residual[:3],
            columns,
            self.processed.shape[2],
            partial.argmax.shape[1],
            *self.draft_logits.stride(),
            **partial.launch_options(columns),
            **dependent_launch(self.processed.device),
        )
        next_tokens = launch_draw(self.processed, self.temperature, self.seeds, self.draft_positions, residual)
        return residual.accepted, next_tokens


@triton.jit
def _rejection_sample_kernel(
    processed,  # fp32 [R, 1 + K, V]
    draft_tokens,  # int64 [R, K]
    draft_logits,  # fp32 [R, K, V]
    temperature,  # fp32 [R]
    seeds,  # int64 [R]
    accept_seeds,  # int64 [R]
    draft_positions,  # int64 [R]
    partial_max,  # fp32 [2, R * K, blocks]
    partial_sum_exp,  # fp32 [2, R * K, blocks]
    partial_argmax,  # int32 [R * K, blocks]
    accepted,  # out: int64 [R]
    weight,  # out: fp32 [R]
    norms,  # out: fp32 [4, R * K]
    columns,  # K
    vocab,  # V
    blocks,  # of the vocabulary
    draft_row_stride,
    draft_column_stride,
    draft_token_stride,
    BLOCK: tl.constexpr,
    BLOCK_K: tl.constexpr,
    PDL: tl.constexpr,
):
    """One program per row."""
    await_previous(PDL)
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK_K)
    token, length = read_draft(row, draft_tokens, columns, BLOCK_K)
    if tl.load(temperature + row) > 0:
        p, q = draft_probabilities(
            row,
            token,
            length,
            processed,
            draft_logits,
            partial_max,
            partial_sum_exp,
            norms,
            columns,
            vocab,
            blocks,
            draft_row_stride,
            draft_column_stride,
            draft_token_stride,
            BLOCK,
            BLOCK_K,
        )
        passes = accept_uniform(tl.load(accept_seeds + row), tl.load(draft_positions + row) + column) * q < p
    else:
        passes = matches_argmax(row, token, length, partial_max, partial_argmax, columns, blocks, BLOCK, BLOCK_K)
    count = tl.min(tl.where(passes, columns, column), 0)
    tl.store(accepted + row, tl.minimum(count, length).to(tl.int64))
    tl.store(weight + row, tl.where(count < length, 1.0, 0.0))


rejection_sample = define_op("spec_decode::rejection_sample", RejectionSample)
