"""Token-wise rejection sampling of a round's drafts, in three stages.

PartialMax reads the logits in vocabulary blocks; launch_accept_draft decides how many tokens of each row are accepted;
launch_draw draws the token after them.
"""

from __future__ import annotations

import torch

from builders.kernels.op import define_op
from spec_decode.sampling.kernels.draw_tokens import launch_draw
from spec_decode.verification.kernels.accept_draft import launch_accept_draft
from spec_decode.verification.kernels.distributions import Distributions, count_leading
from spec_decode.verification.kernels.verify_arguments import VerifyArguments


class RejectionSample(VerifyArguments):
    """Accept the longest prefix in which every token d has p(d) > uniform * q(d), or at temperature 0 is p's argmax.

    The token after it is drawn from max(p - q, 0) after a rejection, and from p if the draft ended.
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
        residual, _ = launch_accept_draft(self, None)
        next_tokens = launch_draw(self.processed, self.temperature, self.seeds, self.draft_positions, residual)
        return residual.accepted, next_tokens


rejection_sample = define_op("spec_decode::rejection_sample", RejectionSample)
